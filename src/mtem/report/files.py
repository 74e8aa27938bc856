"""What a run directory holds for the report, as far as it can be read; the rest is told, not raised."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from mtem.atomic import read_json
from mtem.data.parquet import rows_at_once
from mtem.errors import RequestError
from mtem.files import check_folder
from mtem.run.directory import ROWS_PER_GROUP, RunDirectory
from mtem.run.evaluation import text_digest

LONGEST_TEXT = 100_000  # characters that the page shows of a text

T = TypeVar("T")
DONE = "done"  # status of a finished run


@dataclasses.dataclass
class RunFiles:
    """The files of a run.

    Attributes
    ----------
    path
        The run directory.
    record, history, evaluation
        run.json, the lines of history.jsonl and evaluation.json; empty if they are missing.
    texts, points, words
        indexes.parquet (with the column `label` where labels are known), map.parquet and words.parquet; None if they are missing.
    word_texts
        How many source and target texts the words were counted in.
    problems
        What is missing or damaged, one line each.
    """

    path: Path
    record: dict[str, Any]
    history: list[dict[str, Any]]
    evaluation: dict[str, Any]
    texts: pd.DataFrame | None
    points: pd.DataFrame | None
    words: pd.DataFrame | None
    word_texts: tuple[int, int]
    problems: list[str]

    def get(self, *names: str) -> Any:
        """Return a value inside run.json, or None where it is missing or something else is in its place."""
        return inside(self.record, *names)

    def number(self, *names: str) -> float | None:
        """Return a finite number inside run.json, or None."""
        return finite(self.get(*names))

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.get("status") == DONE)

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        names = self.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def unit(self) -> str:
        """What the examples are called: texts or threads."""
        return "threads" if self.get("unit") == "threads" else "texts"

    def stage(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of the history of one stage."""
        return [line for line in self.history if line.get("stage") == name]


def inside(value: Any, *names: str) -> Any:
    """Return what is found in nested dicts under some names, or None."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def finite(value: Any) -> float | None:
    """Return a finite number, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def read_run(path: Path) -> RunFiles:
    """Read a run directory.

    Raises
    ------
    RequestError
        If it is no run directory.
    """
    check_folder(path)
    directory = RunDirectory(path)
    if not path.is_dir():
        raise RequestError(f"{path}: no such folder; give the --output folder of 'mtem adapt'")
    if not (directory.record_path.exists() or directory.history_path.exists()):
        raise RequestError(f"{path}: holds no run (run.json); give the --output folder of 'mtem adapt'")
    problems: list[str] = []

    def attempt(file: Path, read: Callable[[Path], T], otherwise: T, *, expected: bool = True) -> T:
        if not file.is_file():
            if expected:
                problems.append(f"{file.name} is missing")
            return otherwise
        try:
            return read(file)
        except Exception as error:  # whatever is in the file, the report shows the rest
            reason = " ".join(str(error).split())[:200]
            problems.append(f"{file.name} cannot be read ({reason})")
            return otherwise

    nothing: dict[str, Any] = {}
    record = attempt(directory.record_path, _dict, nothing)
    finished = record.get("status") == DONE
    history, bad = attempt(directory.history_path, _lines, (list[dict[str, Any]](), 0))
    if bad:
        problems.append(f"history.jsonl: {bad} {'line' if bad == 1 else 'lines'} cannot be read")
    evaluation = attempt(directory.evaluation_path, _dict, nothing, expected=False)
    texts = attempt(directory.indexes_path, _texts, None, expected=finished)
    points = attempt(directory.map_path, _points, None, expected=False)
    words, sizes = attempt(directory.words_path, _words, (None, (0, 0)), expected=False)
    if texts is not None:
        _add_labels(texts, evaluation)
    return RunFiles(path, record, history, evaluation, texts, points, words, sizes, problems)


def _dict(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are objects, and the number of the others."""
    found, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += 1
    return found, bad


def _texts(path: Path) -> pd.DataFrame:
    frame = _frame(path, ["text", "prediction", "confidence"], ["row", "tree", "index", "source_prediction", "source_confidence"])
    for name in frame.columns.intersection(["text", "tree", "prediction", "source_prediction"]):
        frame[name] = frame[name].astype(object).map(lambda value: "" if value is None else str(value))
    for name in frame.columns.intersection(["confidence", "source_confidence", "index"]):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    return frame


def _points(path: Path) -> pd.DataFrame:
    names = [f"{name}_{ending}" for ending in ("before", "after") for name in ("prediction", "x", "y")]
    return _frame(path, ["domain", "label", "position", *names]).replace([np.inf, -np.inf], np.nan).dropna()


def _words(path: Path) -> tuple[pd.DataFrame, tuple[int, int]]:
    metadata = pq.read_schema(path).metadata or {}
    sizes = int(metadata.get(b"source_texts", 0)), int(metadata.get(b"target_texts", 0))
    return _frame(path, ["word", "source", "target"]), sizes


def _frame(path: Path, needed: Sequence[str], allowed: Sequence[str] = ()) -> pd.DataFrame:
    columns = pq.read_schema(path).names
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(f"no column '{missing[0]}'")
    wanted = [name for name in (*needed, *allowed) if name in columns]
    file = pq.ParquetFile(path)
    parts = [_cut(batch.to_pandas()) for batch in file.iter_batches(rows_at_once(file, ROWS_PER_GROUP), columns=wanted)]
    return pd.concat(parts, ignore_index=True) if parts else file.read(columns=wanted).to_pandas()


def _cut(frame: pd.DataFrame) -> pd.DataFrame:
    """Cut texts that are longer than the page shows, but for one character: together they may be larger than the memory."""
    if "text" in frame:
        frame["text"] = frame["text"].map(lambda text: text[: LONGEST_TEXT + 1] if isinstance(text, str) else text)
    return frame


def _add_labels(texts: pd.DataFrame, evaluation: dict[str, Any]) -> None:
    """Add the labels of the evaluated texts that are among the target texts."""
    digests, labels = evaluation.get("texts"), evaluation.get("labels")
    if not isinstance(digests, list) or not isinstance(labels, list) or len(digests) != len(labels):
        return
    known = {digest: str(label) for digest, label in zip(digests, labels, strict=True) if isinstance(digest, str)}
    found = texts["text"].map(lambda text: known.get(text_digest(text), ""))
    if (found != "").any():
        texts["label"] = found
