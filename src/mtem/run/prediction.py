"""Predictions for a whole folder of Parquet files: one task for each file, in several processes or on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from mtem import processes
from mtem.atomic import read_json, write_json
from mtem.errors import RequestError, RunError
from mtem.inference import Predicted, predict_file
from mtem.processes import Outcome, Report
from mtem.progress import Progress
from mtem.run.directory import RunDirectory
from mtem.run.result import Adapted
from mtem.training.devices import find_device, find_precision

MARK = "_mtem_predictions.json"  # in the output folder: which model its files are from
SHOWN_FAILURES = 5

logger = logging.getLogger(__name__)


class File(NamedTuple):
    """A file to predict, and where the predictions go."""

    path: Path
    output: Path


@dataclasses.dataclass
class Predictor:
    """Predicts files one after the other; the model is read once in each process."""

    run: Path
    device: str
    text_column: str | None
    all_probabilities: bool
    raw: bool = False
    adapted: Adapted | None = None

    def __call__(self, file: File, report: Report) -> Predicted:
        """Predict one file."""
        if self.adapted is None:
            self.adapted = load_run(self.run, self.device)
        file.output.parent.mkdir(parents=True, exist_ok=True)
        return predict_file(
            self.adapted.model, file.path, file.output, text_column=self.text_column, all_probabilities=self.all_probabilities,
            raw=self.raw,
        )  # fmt: skip


def load_run(run: Path, device: str) -> Adapted:
    """Read a run and put its model on a device."""
    adapted = Adapted.load(run)
    chosen = find_device(device)
    adapted.model.to(chosen)
    adapted.model.precision = find_precision("auto", chosen)
    return adapted


def predict_folder(
    run: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text_column: str | None = None,
    all_probabilities: bool = False,
    raw: bool = False,
    device: str = "auto",
    jobs: int = 1,
    pool: str = processes.PROCESSES,
    progress: Progress | None = None,
) -> Predicted:
    """Predict every Parquet file below a folder, or one file; the predictions have the same names below `output`.

    Files whose predictions are there already, from the same model, are not predicted again.

    Parameters
    ----------
    run : path
        A run's folder.
    folder : path
        A folder with Parquet files, also in folders below it; or one file of any format.
    output : path
        Where to write: a folder, or a file for a file.
    text_column, all_probabilities, raw : str, bool, bool
        As in `mtem.inference.predict_file`.
    device : str
        Where the model is.
    jobs, pool : int, str
        As in `mtem.processes.run`.
    progress : Progress, optional
        Shows the number of files done.

    Returns
    -------
    Predicted
        A summary of the files that were predicted now.

    Raises
    ------
    RequestError
        If there are no such files, or the output folder holds something else.
    RunError
        If files could not be predicted; the others are written.
    """
    folder, output = Path(folder).absolute(), Path(output).absolute()
    load_run(Path(run), "cpu")  # refuses what is no model, before anything is written
    if not folder.is_dir():
        files = todo = [File(folder, output)]
    else:
        files = find_files(folder, output)
        begin(output, describe(Path(run), text_column, all_probabilities))
        todo = [file for file in files if not file.output.is_file()]
        if len(todo) < len(files):
            logger.info("%s: %d of %d files are predicted already", output, len(files) - len(todo), len(files))
    work = Predictor(Path(run).absolute(), device, text_column, all_probabilities, raw)
    progress = progress or Progress(quiet=True)
    rows = empty = done = 0
    counts: dict[str, int] = {}
    failed: list[Outcome[File, Predicted]] = []
    outcomes = processes.run([[file] for file in todo], work, jobs=jobs, pool=pool)
    with progress.stage("predicting, files", len(todo)), contextlib.closing(outcomes):
        for outcome in outcomes:
            done += 1
            if outcome.result is None:
                failed.append(outcome)
            else:
                rows, empty = rows + outcome.result.rows, empty + outcome.result.empty
                counts = {name: counts.get(name, 0) + count for name, count in outcome.result.counts.items()}
            progress.advance(done, {"rows": rows})
    if failed:
        raise RunError(_describe_failures(failed, len(files)))
    return Predicted(rows, empty, counts)


def find_files(folder: Path, output: Path) -> list[File]:
    """Return the Parquet files below a folder. Refuse an output folder that is one with it or inside it."""
    if output == folder or folder in output.parents:
        raise RequestError(f"{output}: the predictions of a folder must not be written into it; give another --output")
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() == ".parquet" and path.is_file() and not path.name.startswith((".", "_"))
    )
    if not names:
        raise RequestError(f"{folder}: there is no Parquet file in this folder; give a file, or a folder with .parquet files")
    return [File(folder / name, output / name) for name in names]


def describe(run: Path, text_column: str | None, all_probabilities: bool) -> dict[str, Any]:
    """Return what all predictions of a folder must have in common."""
    model = RunDirectory(run).model_path if RunDirectory(run).has_record() else run
    digest = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.suffix in (".json", ".safetensors") and path.is_file()):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return {"model_sha256": digest.hexdigest(), "text_column": text_column, "probabilities": all_probabilities}


def begin(output: Path, description: dict[str, Any]) -> None:
    """Create the output folder. Refuse one that holds something else."""
    if output.exists() and not output.is_dir():
        raise RequestError(f"{output}: is a file; for a folder of files --output expects a folder")
    mark = output / MARK
    if mark.is_file():
        if read_json(mark) != description:
            raise RequestError(f"{output}: holds predictions of another model or with other options; give another --output")
        return
    if output.is_dir() and any(output.iterdir()):
        raise RequestError(f"{output}: is not empty; give another --output")
    output.mkdir(parents=True, exist_ok=True)
    write_json(mark, description)


def _describe_failures(failed: list[Outcome[File, Predicted]], count: int) -> str:
    if count == 1:
        return failed[0].message
    lines = [f"{outcome.task.path.name}: {outcome.message}" for outcome in failed[:SHOWN_FAILURES]]
    more = f"; and {len(failed) - SHOWN_FAILURES} more" if len(failed) > SHOWN_FAILURES else ""
    return f"{len(failed)} of {count} files failed: {'; '.join(lines)}{more}; the same command tries only these again"
