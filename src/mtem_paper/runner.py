"""Run cells, in several processes if asked: each finished cell is written at once, a failed one is reported and skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from mtem.atomic import replaced
from mtem.progress import Progress
from mtem_paper import cells as files
from mtem_paper.cells import Cell

if TYPE_CHECKING:
    from mtem_paper.search import Group

SOURCE_MODELS = "source-models"  # below the results' folder


class Outcome(NamedTuple):
    """A cell that was run: its result, or the traceback of its failure."""

    cell: Cell
    result: dict[str, Any] | None
    failure: str | None


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
    threads = max(1, min(torch.get_num_threads(), cores() // jobs))  # OMP_NUM_THREADS may ask for fewer
    solver = Solver(data, model, device, results / SOURCE_MODELS)
    if jobs > 1:
        outcomes = in_processes(groups, solver, jobs, threads, deadline)
    else:
        outcomes = in_this_process(groups, solver, threads, deadline)
    with progress.stage("cells", len(missing_cells)), contextlib.closing(outcomes):
        progress.advance(0)
        for outcome in outcomes:
            summary.left -= 1
            if outcome.result is not None:
                files.write(results, outcome.cell, outcome.result)
                summary.done += 1
                last = f"{outcome.cell} {outcome.result['score']:.4f}"
            else:
                assert outcome.failure is not None
                path = files.failure_path(results, outcome.cell)
                with replaced(path) as temporary:
                    temporary.write_text(outcome.failure, encoding="utf-8")
                summary.failed.append((outcome.cell, f"{outcome.failure.strip().splitlines()[-1][:200]} ({path})"))
                last = f"{outcome.cell} failed"
            progress.advance(
                summary.done + len(summary.failed), cast("dict[str, float]", {"failed": len(summary.failed), "last": last})
            )
    return summary


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass
class Solver:
    """Run cells one after the other, and keep what those of a group share."""

    data: Path
    model: str
    device: str
    source_models: Path
    group: Group | None = None

    def __call__(self, cell: Cell) -> Outcome:
        """Run one cell; a failure is part of the outcome."""
        from mtem_paper import search

        try:
            if self.group is None or self.group.cell.group != cell.group:
                self.group = None
                self.group = search.Group(cell, self.data, self.model, self.device, self.source_models)
            return Outcome(cell, search.solve(cell, self.group), None)
        except Exception:
            return Outcome(cell, None, traceback.format_exc())
        finally:
            release()


def release() -> None:
    """Free the memory of a finished run: its objects refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_this_process(
    groups: Sequence[Sequence[Cell]], solver: Solver, threads: int, deadline: float
) -> Generator[Outcome, None, None]:
    """Run the groups in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for cell in itertools.chain(*groups):
            if time.time() >= deadline:
                return
            yield solver(cell)
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- several processes


def in_processes(
    groups: Sequence[Sequence[Cell]], solver: Solver, jobs: int, threads: int, deadline: float
) -> Generator[Outcome, None, None]:
    """Run the groups in several processes.

    A worker takes a group that no other works on; when none is left, it helps with the largest one. Workers only compute. Their
    results are sent to this process and written here, so nothing is half written when they are stopped.
    """
    pending = deque(deque(group) for group in groups)
    workers: dict[Connection, SpawnProcess] = {}
    remaining: dict[Connection, deque[Cell]] = {}  # the rest of a worker's group
    busy: dict[Connection, Cell | None] = {}

    def more() -> bool:
        return time.time() < deadline and bool(pending or any(remaining.values()))

    def hand_out(connection: Connection) -> None:
        if more() and not remaining.get(connection):
            remaining[connection] = pending.popleft() if pending else max(remaining.values(), key=len)
        busy[connection] = remaining[connection].popleft() if more() else None
        with contextlib.suppress(ConnectionError):  # a worker that has ended is handled below
            connection.send(busy[connection])

    try:
        while workers or more():
            while len(workers) < jobs and more():
                connection, process = start(solver, threads)
                workers[connection] = process
                hand_out(connection)
            for connection in cast("list[Connection]", wait(list(workers))):
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionError):
                    process = workers.pop(connection)
                    process.join()
                    unfinished = remaining.pop(connection, None)
                    if unfinished and not any(unfinished is other for other in remaining.values()):
                        pending.appendleft(unfinished)
                    if (cell := busy.pop(connection)) is not None:
                        yield Outcome(cell, None, f"its process ended with exit code {process.exitcode}")
                    continue
                hand_out(connection)
                yield outcome
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def start(solver: Solver, threads: int) -> tuple[Connection, SpawnProcess]:
    """Start a worker; return the connection to it and its process."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, solver, threads), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def serve(connection: Connection, solver: Solver, threads: int) -> None:
    """Receive cells and send outcomes, until a None arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    while (cell := connection.recv()) is not None:
        connection.send(solver(cell))


def end_with_parent() -> None:
    """End this process when its parent is killed, instead of finishing a cell that nothing receives."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
