"""A run repeated from its run.json: the same files, settings and seed. What has changed since is refused or told."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtem import models
from mtem.atomic import read_json
from mtem.data.cache import file_fingerprint, fingerprint_of
from mtem.data.formats import bare_name
from mtem.errors import RequestError
from mtem.run.record import versions
from mtem.run.record_schema import UNFINISHED_RUN
from mtem.run.result import Adapted
from mtem.run.source_model import fingerprint
from mtem.selection.rehearsed import RECORD
from mtem.training.devices import find_device

DATA = ("source", "target", "target_labeled")
# A model's folder in words: what determines what it computes.
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")

logger = logging.getLogger(__name__)


def read_request(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of `mtem.adapt` that repeat a run.

    Parameters
    ----------
    path
        A run.json, or the folder that it is in.

    Raises
    ------
    RequestError
        If the file cannot be read, or a file that the run began with is missing or has changed.
    """
    path = Path(path)
    path = path / "run.json" if path.is_dir() else path
    record = read_json(path, UNFINISHED_RUN, "give the run.json of a run, or its folder")
    data = {part: _files(record["data"][part], path, part) for part in DATA}
    _warn_of_versions(record, path)
    for part, was in (("source_model", _source_model), ("rehearsal", _rehearsal), ("pretrained", file_fingerprint)):
        _check_origin(record.get(part), part.replace("_", " "), path, was)
    if (was := record.get("model_sha256")) is not None and model_fingerprint(record["model"]) != was:
        raise _changed(record["model"], "the model", path)
    origins = {part: (record.get(part) or {}).get("path") for part in ("source_model", "rehearsal", "pretrained")}
    settings = {str(name): value for name, value in record["settings"].items()}
    return {
        "source": data["source"],
        "target": data["target"],
        "target_labeled": data["target_labeled"] or None,
        "model": record["model"],
        "method": record["method"],
        "preset": record["preset"],
        "source_model": origins["source_model"],
        "rehearsal": origins["rehearsal"],
        "pretrained": None if origins["pretrained"] is None else Path(origins["pretrained"]),
        **(record.get("columns") or {}),
        **settings,
    }


def use_threads(path: str | os.PathLike[str]) -> None:
    """Let torch use as many threads as the run did: sums over other parts round differently."""
    path = Path(path)
    record = read_json(path / "run.json" if path.is_dir() else path, UNFINISHED_RUN)
    threads = (record.get("resolved") or {}).get("threads")
    if threads is not None and 0 < threads <= 4096:
        torch.set_num_threads(threads)


def model_fingerprint(name: str | os.PathLike[str]) -> str | None:
    """Return the sha256 of the files of a model folder; None for a model that is not given as one."""
    folder = Path(name)
    if os.fspath(name) in models.names() or not folder.is_dir():
        return None
    files = sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    return fingerprint_of(*(part for file in files for part in (file.name, file_fingerprint(file))))


def _files(entries: Sequence[Mapping[str, Any]], path: Path, part: str) -> Any:
    """Return the files of a part as `mtem.adapt` takes them, each with its domain if that is not the file's name."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        file = entry.get("path")
        if file is None or entry["sha256"] is None:
            raise RequestError(f"{path}: the {part.replace('_', '-')} data were given in memory, so this run cannot be repeated")
        if file_fingerprint(file) != entry["sha256"]:
            raise _changed(file, f"a file of the {part.replace('_', '-')} data", path)
        found.setdefault(entry.get("domain") or bare_name(file), []).append(file)
    if all(bare_name(file) == domain for domain, files in found.items() for file in files):
        return [str(entry["path"]) for entry in entries]
    return found


def _check_origin(origin: Mapping[str, Any] | None, what: str, path: Path, identity: Any) -> None:
    """Refuse a source model, a rehearsal or a pretrained encoder that is not the one the run began with."""
    if origin is None:
        return
    if origin.get("path") is None:
        raise RequestError(f"{path}: its {what} was given in memory, so this run cannot be repeated")
    if origin.get("sha256") is not None and identity(origin["path"]) != origin["sha256"]:
        raise _changed(origin["path"], f"the {what}", path)


def _source_model(path: str) -> str:
    return fingerprint(Adapted.load(path))


def _rehearsal(path: str) -> str:
    return file_fingerprint(Path(path) / RECORD)


def _changed(file: Any, what: str, path: Path) -> RequestError:
    return RequestError(
        f"{file}: {what} has changed since the run of {path}; restore it, or begin a new run with --source and --target"
    )


def _warn_of_versions(record: Mapping[str, Any], path: Path) -> None:
    """Warn of other versions, and of another kind of device: results may then differ in their last digits."""
    now, then = versions(), record.get("versions") or {}
    other = [f"{name} {then[name]} (now {now[name]})" for name in now if name in then and then[name] != now[name]]
    if other:
        logger.warning("%s: was made with %s; the results may differ", path, ", ".join(other))
    was = str((record.get("resolved") or {}).get("device", "")).partition(":")[0]
    device = find_device(str(record["settings"].get("device", "auto"))).type
    if was and device != was:
        logger.warning("%s: was run on %s and is repeated on %s; the results may differ", path, was, device)
