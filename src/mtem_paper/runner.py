"""Run cells, in several processes if asked: each finished cell is written at once, a failed one is reported and skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mtem import processes
from mtem.atomic import replaced
from mtem.processes import Report
from mtem.progress import Progress
from mtem_paper import cells as files
from mtem_paper.cells import Cell

if TYPE_CHECKING:
    from mtem_paper.search import Group

SOURCE_MODELS = "source-models"  # below the results' folder


@dataclasses.dataclass
class Summary:
    """How many cells were run, existed before, failed (with a message), or were not started."""

    done: int = 0
    existed: int = 0
    failed: list[tuple[Cell, str]] = dataclasses.field(default_factory=list)
    left: int = 0


def missing(results: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that have no file yet."""
    return [cell for cell in cells if not (results / cell.address).is_file()]


def run(
    cells: Sequence[Cell],
    results: Path,
    *,
    data: Path,
    model: str,
    device: str = "auto",
    jobs: int = 1,
    pool: str = processes.PROCESSES,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Run the cells that have no file yet.

    Parameters
    ----------
    cells
        Cells of one data set and model, group after group.
    results
        The folder of the cells' files.
    data, model, device
        As for `search.Group`.
    jobs
        Number of processes; with one, everything runs in this process.
    pool
        Where they run, as in `mtem.processes.run`.
    limit
        Start no cell after this many seconds.
    progress
        Where to report.

    Returns
    -------
    Summary
        What was done and what failed.
    """
    progress = progress or Progress(quiet=True)
    missing_cells = missing(results, cells)
    summary = Summary(existed=len(cells) - len(missing_cells), left=len(missing_cells))
    deadline = time.time() + limit if limit is not None else float("inf")
    groups = [list(group) for _, group in itertools.groupby(missing_cells, key=lambda cell: cell.group)]
    solver = Solver(data, model, device, results / SOURCE_MODELS)
    outcomes = processes.run(groups, solver, jobs=jobs, deadline=deadline, pool=pool)
    with progress.stage("cells", len(missing_cells)), contextlib.closing(outcomes):
        progress.advance(0)
        for outcome in outcomes:
            summary.left -= 1
            if outcome.result is not None:
                files.write(results, outcome.task, outcome.result)
                summary.done += 1
                last = f"{outcome.task} {outcome.result['score']:.4f}"
            else:
                assert outcome.failure is not None
                path = files.failure_path(results, outcome.task)
                with replaced(path) as temporary:
                    temporary.write_text(outcome.failure, encoding="utf-8")
                summary.failed.append((outcome.task, f"{outcome.failure.strip().splitlines()[-1][:200]} ({path})"))
                last = f"{outcome.task} failed"
            progress.advance(
                summary.done + len(summary.failed), cast("dict[str, float]", {"failed": len(summary.failed), "last": last})
            )
    return summary


@dataclasses.dataclass
class Solver:
    """Run cells one after the other, and keep what those of a group share."""

    data: Path
    model: str
    device: str
    source_models: Path
    group: Group | None = None

    def __call__(self, cell: Cell, report: Report) -> dict[str, Any]:
        """Run one cell; nothing is reported before it is done."""
        from mtem_paper import search

        if self.group is None or self.group.cell.group != cell.group:
            self.group = None
            self.group = search.Group(cell, self.data, self.model, self.device, self.source_models)
        return search.solve(cell, self.group)
