"""`mtem.adapt`: from labeled and unlabeled texts to a chosen model, its estimate and its run directory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtem import methods, models, settings
from mtem.atomic import read_json
from mtem.data import summary
from mtem.data.corpus import Corpus, check_source, check_target
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.models import encoders
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.pipeline import Observer, Run
from mtem.run.result import Adapted
from mtem.run.source_model import begin_from, fingerprint, same_data, same_files
from mtem.training.devices import find_device, find_precision
from mtem.training.settings import TrainingSettings


def adapt(
    source: Any,
    target: Any,
    *,
    target_labeled: Any = None,
    model: str | os.PathLike[str] = encoders.DEFAULT,
    method: str = "mtem",
    preset: str = "recommended",
    source_model: Adapted | str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    observe: Observer | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> Adapted:
    """Train on labeled source texts, adapt to unlabeled target texts, choose the weights without target labels.

    Parameters
    ----------
    source, target, target_labeled
        Paths, lists of them, data frames, Hugging Face datasets, lists of texts, (texts, labels) pairs, or a dict that
        gives each a domain name. Labels of `target`, if any, are never read. Class names are text: labels 0 and 1 become
        "0" and "1", and that is what `predict` returns.
    model
        An encoder (a packaged name, a directory, or a Hugging Face name), or "bigcn" for threads.
    method, preset
        See `mtem methods`. A preset sets many settings at once; what is given by name comes on top.
    source_model
        What an earlier adaptation returned, or its run directory: its theta_1 is taken instead of training one.
    output
        The run directory; without it nothing is written and nothing can be resumed.
    resume
        Go on with the unfinished run in `output`.
    observe
        Called with every line of the history and the model. At those of stage "evaluation" the model has the weights that were
        judged, and "bias" is the correction of the prior they would get in the end (see `weights.add_bias`).
    given
        Any field of `TrainingSettings` or of the settings of the method or the model.
    """
    progress = progress or Progress(quiet=True)
    kind, shape = methods.get(method), models.get_class(model)
    parts = find_settings(model, method, preset, given)
    training: TrainingSettings = parts["training"]
    device = find_device(training.device)
    precision = find_precision(training.precision, device)
    directory = Path(output) if output is not None else None
    if directory is not None:
        check_output(directory, resume)
    place = models.find(model, parts["model"])
    if source_model is not None and not isinstance(source_model, Adapted):
        source_model = Adapted.load(source_model)

    progress.say("reading the data")
    columns = {"text_column": text_column, "label_column": label_column}

    def read(data: Any, name: str, labeled: bool) -> Corpus:
        corpus = load_corpus(data, labeled=labeled, name=name, **columns)
        say_what_was_read(corpus, shape, progress)
        return corpus

    labeled = read(source, "source", labeled=True)
    check_source(labeled)
    unlabeled = read(target, "target", labeled=False)
    check_target(unlabeled, labeled)
    few = None
    if target_labeled is not None:
        few = read(target_labeled, "labeled target", labeled=True)
        few.label_numbers(labeled.classes)  # refuses a class that the source does not have
    elif kind.needs_target_labels:
        raise RequestError(f"method '{method}' needs labeled target {unlabeled.unit}: give --target-labeled")

    request = {
        "method": method,
        "preset": preset,
        "model": str(model),
        "classes": list(labeled.classes),
        "unit": unlabeled.unit,
        "settings": settings.record(training, parts["method"], parts["model"]),
        "data": {
            "source": list(labeled.files),
            "target": list(unlabeled.files),
            "target_labeled": list(few.files) if few is not None else [],
        },
        "source_model": None if source_model is None else {"path": source_model.path, "sha256": fingerprint(source_model)},
    }
    if resume and directory is not None:
        if not (directory / "run.json").exists():
            progress.notice(f"{directory}: nothing to resume there, so the run starts anew")
        finished = same_request(directory, request)
        if finished:
            progress.say(f"{directory}: this run is done already")
            return Adapted.load(directory)
    torch.manual_seed(training.seed)
    corpora = [corpus for corpus in (labeled, unlabeled, few) if corpus is not None]
    like = None if source_model is None else source_model.model
    network = models.create(
        place, labeled.classes, corpora=corpora, settings=parts["model"],
        max_length=training.max_length, attention=training.attention, like=like,
    ).to(device)  # fmt: skip
    kind.prepare_model(network, parts["method"])
    if source_model is not None:
        begin_from(network, source_model)
    if network.max_length is not None and network.max_length < training.max_length:
        progress.notice(f"max_length={training.max_length}: the encoder takes {network.max_length} tokens, texts are cut there")
    network.precision = precision
    network.freeze(frozen(training, network))

    with contextlib.ExitStack() as stack:
        if directory is None:
            workspace = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtem-")))
        else:
            workspace = directory / "checkpoints"
        run = Run(
            network, kind, training, parts["method"], labeled, unlabeled, few, directory, workspace, progress, request,
            observe=observe, left_out=same_data(source_model, request),
        )  # fmt: skip
        return run.go(resume)


def say_what_was_read(corpus: Corpus, shape: type[Model], progress: Progress) -> None:
    """A line for each file, then what a person should know about them."""
    for line in summary.lines(corpus):
        progress.say(line)
    for line in (*corpus.notices, *summary.notices(corpus), *shape.warnings_for(corpus)):
        progress.notice(line)


def find_settings(model: str | os.PathLike[str], method: str, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an adaptation, as "training", "method" and "model": the defaults, the preset's, those given on top."""
    kind, shape = methods.get(method), models.get_class(model)
    if preset not in kind.presets:
        raise RequestError(f"unknown preset '{preset}': {method} has {', '.join(kind.presets)}")
    values = {**shape.defaults, **kind.presets[preset]}
    values |= {name: value for name, value in shape.presets.get(preset, {}).items() if name in values}
    return settings.build({"training": TrainingSettings, "method": kind.Settings, "model": shape.Settings}, {**values, **given})


def check_output(directory: Path, resume: bool) -> None:
    """An output folder may be absent, empty, or (with `resume`) hold the run to go on with."""
    if directory.exists() and not directory.is_dir():
        raise RequestError(f"{directory}: is a file; --output wants a folder")
    there = directory.is_dir() and any(directory.iterdir())
    if resume and not (directory / "run.json").exists():
        if there:
            raise RequestError(f"{directory}: holds no run to resume and is not empty; give another --output")
        return
    if there and not resume:
        if (directory / "run.json").exists():
            raise RequestError(
                f"{directory}: holds another run; give another --output, or --resume to go on with an unfinished run"
            )
        raise RequestError(f"{directory}: is not empty; give another --output")
    if not directory.exists():
        parent = next(place for place in directory.absolute().parents if place.exists())
        if not os.access(parent, os.W_OK):
            raise RequestError(f"{directory}: cannot be made, {parent} is not writable")


def same_request(directory: Path, request: dict[str, Any]) -> bool:
    """Whether the run in `directory` is finished; refuses to resume a run that was asked for otherwise."""
    if not (directory / "run.json").exists():
        return False
    old = read_json(directory / "run.json")
    wanted = json.loads(json.dumps(request, default=str))
    for key in ("method", "preset", "model", "classes"):
        if old.get(key) != wanted[key]:
            raise RequestError(f"{directory}: cannot resume, its {key} was {old.get(key)!r} and is now {wanted[key]!r}")
    free = {"checkpoint_seconds", "log_every"}
    for key in sorted({*old["settings"], *wanted["settings"]} - free):
        if old["settings"].get(key) != wanted["settings"].get(key):
            was, now_ = old["settings"].get(key), wanted["settings"].get(key)
            raise RequestError(f"{directory}: cannot resume, its setting {key} was {was} and is now {now_}")
    if (old.get("source_model") or {}).get("sha256") != (wanted["source_model"] or {}).get("sha256"):
        raise RequestError(
            f"{directory}: cannot resume, it began from another source model; give the --source-model it began with"
        )
    for part, entries in wanted["data"].items():
        if same_files(old["data"][part]) != same_files(entries):
            raise RequestError(f"{directory}: cannot resume, the {part.replace('_', '-')} data have changed since")
    return old["status"] == "done"


def frozen(training: TrainingSettings, model: Model) -> int:
    """How many layers to freeze; by default the whole encoder is trained on a GPU, or where its layers are not a list."""
    if training.frozen_layers is not None:
        return training.frozen_layers
    return -2 if model.device.type == "cpu" and model.has_layers else 0
