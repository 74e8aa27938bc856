"""The run directory: every path in it, and everything that is written there.

::

    run/model/                         a Hugging Face model directory with its card
    run/run.json                       settings, versions, data, the choice of weights, estimates, warnings
    run/history.jsonl                  one line per logged step
    run/indexes.parquet                every target text with its entropy index, prediction and confidence, before and after
    run/map.parquet                    texts as points in the space of the model's features, before and after
    run/words.parquet                  in how many source and target texts a word occurs
    run/evaluation.json                what 'mtem evaluate' has measured last
    run/report.html                    the page that shows all this
    run/checkpoints/source.safetensors the weights before the adaptation
    run/rehearsal/                     the rehearsal, if the run was asked to rehearse first
    run/checkpoints/                   during the run: step-N/, best-N.safetensors, frozen-*.npy, left-out-N.safetensors,
                                       pretrained.safetensors

Each file is written whole or not at all. ``run.json`` is written before anything else, with the status "running", and again when
everything else is there. Files are checked when they are read: whatever is in them, a damaged one is named. While a run writes
here, it holds the lock of the folder (`mtem.locks`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from mtem import locks
from mtem.atomic import clear_parts, disk_errors, is_part, read_json, replaced, write_json
from mtem.errors import RequestError
from mtem.files import check_folder
from mtem.models import integrity
from mtem.models.base import Model
from mtem.run.record_schema import FINISHED_RUN, RUN, UNFINISHED_RUN
from mtem.selection.left_out import LeftOut, from_tensors, to_tensors
from mtem.tensors import read_tensors, write_tensors
from mtem.training.checkpoints import Checkpoint, Checkpoints

logger = logging.getLogger(__name__)

ROWS_PER_GROUP = 50_000  # of indexes.parquet
REHEARSAL = "rehearsal"  # folder of a rehearsal that was made for the run
SOURCE = "source"  # name of the weights before the adaptation
PRETRAINED = "pretrained"  # name of the weights before the source training, if the encoder was pretrained
NOT_RESUMED = "without it the run cannot be resumed: begin it again in another --output"


class RunDirectory:
    """Paths, reads and writes of one run.

    Parameters
    ----------
    path
        The run directory. None: the result stays in memory, and only `workspace` is written to.
    workspace
        Folder for checkpoints and intermediate files; ``path / "checkpoints"`` by default.
    frozen_store
        Output of the frozen layers for a larger corpus, see `Model.store_lower`.
    """

    def __init__(self, path: Path | None, workspace: Path | None = None, frozen_store: Path | None = None) -> None:
        if workspace is None:
            if path is None:
                raise ValueError("RunDirectory needs a path or a workspace")
            workspace = path / "checkpoints"
        self.path, self.workspace, self.frozen_store = path, workspace, frozen_store
        self.checkpoints = Checkpoints(workspace)

    @property
    def persistent(self) -> bool:
        """Whether the run has an output folder."""
        return self.path is not None

    @property
    def root(self) -> Path:
        """The output folder."""
        if self.path is None:
            raise ValueError("this run has no output folder")
        return self.path

    @property
    def record_path(self) -> Path:
        """``run.json``."""
        return self.root / "run.json"

    @property
    def history_path(self) -> Path:
        """``history.jsonl``."""
        return self.root / "history.jsonl"

    @property
    def indexes_path(self) -> Path:
        """``indexes.parquet``."""
        return self.root / "indexes.parquet"

    @property
    def map_path(self) -> Path:
        """``map.parquet``."""
        return self.root / "map.parquet"

    @property
    def words_path(self) -> Path:
        """``words.parquet``."""
        return self.root / "words.parquet"

    @property
    def evaluation_path(self) -> Path:
        """``evaluation.json``."""
        return self.root / "evaluation.json"

    @property
    def report_path(self) -> Path:
        """``report.html``."""
        return self.root / "report.html"

    @property
    def model_path(self) -> Path:
        """``model/``."""
        return self.root / "model"

    @property
    def left_out_path(self) -> Path:
        """Logits of the source models that were trained without one domain each."""
        return self.workspace / "left-out.safetensors"

    # ------------------------------------------------------------------ before a run

    def check_available(self, resume: bool) -> None:
        """Refuse a folder that holds something else; with `resume` it may hold the run to continue."""
        path = self.root
        if path.exists() and not path.is_dir():
            raise RequestError(f"{path}: is a file; --output expects a folder")
        occupied = path.is_dir() and any(self._counts(entry) for entry in path.iterdir())
        if resume and not self.record_path.exists():
            if occupied:
                raise RequestError(f"{path}: holds no run to resume and is not empty; give another --output")
            return
        if occupied and not resume:
            if self.record_path.exists():
                raise RequestError(f"{path}: holds another run; give another --output, or --resume to continue an unfinished run")
            raise RequestError(f"{path}: is not empty; give another --output")
        if not path.exists():
            parent = next(parent for parent in path.absolute().parents if parent.exists())
            if not os.access(parent, os.W_OK):
                raise RequestError(f"{path}: cannot be created, {parent} is not writable")

    def _counts(self, entry: Path) -> bool:
        """Return whether an entry of the folder is something of the user's or of a run: locks and parts of files are not."""
        if entry.name == REHEARSAL or is_part(entry.name) or entry.name.startswith(locks.NAME):
            return False
        return entry != self.workspace or any(self.workspace.iterdir())

    @contextlib.contextmanager
    def claimed(self, resume: bool) -> Iterator[None]:
        """Hold the lock of the folder inside the ``with`` block, in which a run writes to it. Refuse a folder that is taken."""
        locks.check_free(self.root)  # first: a run that is going on is not "another run"
        self.check_available(resume)
        check_folder(self.root)
        with locks.FolderLock(self.root) as lock:
            self.check_available(resume)  # another run may have ended in between
            self.checkpoints.before_write = lock.check
            for folder in (self.root, self.workspace):
                for part in clear_parts(folder):
                    logger.info("%s: removed, an interrupted run had left it", part)
            yield

    def start(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json`` before anything else, so that whatever happens next the run can be resumed."""
        if self.persistent:
            self.write_record(record)
            self.workspace.mkdir(parents=True, exist_ok=True)

    def newest_checkpoint(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the newest checkpoint that can be continued from, if there is one; see `Checkpoints.newest`."""
        return self.checkpoints.newest(check) if self.workspace.is_dir() else None

    # ------------------------------------------------------------------ run.json and history.jsonl

    def has_record(self) -> bool:
        """Return whether ``run.json`` exists."""
        return self.path is not None and self.record_path.is_file()

    def read_record(self, *, resume: bool = False) -> dict[str, Any]:
        """Return the contents of ``run.json``; of a run to `resume`, with all that a resumed one is compared with."""
        advice = NOT_RESUMED if resume else "give the --output folder of 'mtem adapt', or copy it again"
        record: dict[str, Any] = read_json(self.record_path, RUN, advice)
        if resume:
            schema = FINISHED_RUN if record["status"] == "done" else UNFINISHED_RUN
            record = read_json(self.record_path, schema, advice)
        return record

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json``."""
        if self.persistent:
            write_json(self.record_path, record)

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``history.jsonl``."""
        if self.persistent:
            with disk_errors(self.history_path, "make room and run again"), self.history_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def history_size(self) -> int:
        """Return the bytes of ``history.jsonl``."""
        return self.history_path.stat().st_size if self.history_path.exists() else 0

    def truncate_history(self, size: int) -> None:
        """Drop lines that were written after the checkpoint: they will be written again."""
        if self.persistent and size < self.history_size():
            os.truncate(self.history_path, max(0, size))

    # ------------------------------------------------------------------ weights and intermediate files

    def weights_path(self, name: str) -> Path:
        """Return the file of the weights called `name`."""
        return self.workspace / f"{name}.safetensors"

    def write_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Write weights, unless the run stays in memory."""
        if self.persistent:
            write_tensors(self.weights_path(name), dict(weights))

    def read_weights(self, name: str, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights called `name`. Refuse a file that is missing, damaged, or not of the expected names and shapes."""
        path = self.weights_path(name)
        weights = read_tensors(path)
        integrity.check_tensors(weights, expected, str(path), advice="")
        return weights

    def keep_best(self, steps: set[int]) -> None:
        """Remove the best weights of other steps than these."""
        for path in self.workspace.glob("best-*.safetensors"):
            if path.name not in {f"best-{step}.safetensors" for step in steps}:
                path.unlink()

    def frozen_path(self, name: str) -> Path:
        """Return the file for the output of the frozen layers."""
        return self.workspace / f"frozen-{name}.npy"

    def has_left_out_part(self, number: int) -> bool:
        """Return whether the logits of left-out model `number` were written."""
        return self.weights_path(f"left-out-{number}").exists()

    def write_left_out_part(self, number: int, result: LeftOut) -> None:
        """Write the logits of left-out model `number`."""
        write_tensors(self.weights_path(f"left-out-{number}"), to_tensors([result]))

    def read_left_out_part(self, number: int, kind: str, name: str) -> LeftOut | None:
        """Return the logits of left-out model `number`; None if they were not written, or are damaged."""
        if not self.has_left_out_part(number):
            return None
        try:
            return _read_left_out(self.weights_path(f"left-out-{number}"), [{"kind": kind, "name": name}])[0]
        except RequestError as error:
            logger.warning("%s; it is computed again", error)
            return None

    def remove_intermediate(self) -> None:
        """After a finished run, keep only the source model's weights and the left-out models' logits."""
        self.checkpoints.clear()
        for pattern in ("best-*.safetensors", "frozen-*.npy", "left-out-*.safetensors", f"{PRETRAINED}.safetensors"):
            for path in self.workspace.glob(pattern):
                path.unlink()

    # ------------------------------------------------------------------ the result

    def write_model(self, model: Model, card: str) -> None:
        """Write the model directory with its card."""
        with replaced(self.model_path) as temporary:
            temporary.mkdir()
            model.save(temporary)
            (temporary / "README.md").write_text(card, encoding="utf-8")

    def write_indexes(self, table: pa.Table) -> None:
        """Write ``indexes.parquet``."""
        _write_table(self.indexes_path, table)

    def write_overview(self, points: pa.Table, words: pa.Table) -> None:
        """Write ``map.parquet`` and ``words.parquet``."""
        _write_table(self.map_path, points)
        _write_table(self.words_path, words)

    def read_indexes(self) -> pa.Table:
        """Return ``indexes.parquet``."""
        try:
            return pq.read_table(self.indexes_path)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:160]
            raise RequestError(f"{self.indexes_path}: cannot be read ({reason}); {integrity.AGAIN}") from error

    def copy_overview(self, other: RunDirectory) -> None:
        """Copy what only the report reads from another run directory, as far as it is there."""
        for path, copy in ((other.map_path, self.map_path), (other.words_path, self.words_path)):
            if path != copy and path.is_file():
                with replaced(copy) as temporary:
                    shutil.copyfile(path, temporary)

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """Write ``evaluation.json``."""
        write_json(self.evaluation_path, record)

    def write_left_out(self, results: Sequence[LeftOut]) -> None:
        """Write the logits of all left-out models."""
        write_tensors(self.left_out_path, to_tensors(results))

    def read_left_out(self, descriptions: Sequence[Mapping[str, Any]]) -> list[LeftOut]:
        """Return the logits of all left-out models; empty if there are none."""
        if not descriptions or not self.left_out_path.is_file():
            return []
        return _read_left_out(self.left_out_path, descriptions)


def _read_left_out(path: Path, descriptions: Sequence[Mapping[str, Any]]) -> list[LeftOut]:
    tensors = read_tensors(path)
    try:
        return from_tensors(tensors, descriptions)
    except ValueError as error:
        raise RequestError(f"{path}: does not hold what its run says: {error}; {integrity.AGAIN}") from error


def _write_table(path: Path, table: pa.Table) -> None:
    with replaced(path) as temporary:
        pq.write_table(table, temporary, row_group_size=ROWS_PER_GROUP)
