"""Running cells: groups in processes of their own, every finished cell written at once, a failed one told and passed over."""

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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtem.atomic import replaced
from mtem.progress import Progress
from mtem_paper import cells as files
from mtem_paper.cells import Cell

SOURCE_MODELS = "source-models"  # below the results' folder


class Outcome(NamedTuple):
    cell: Cell
    result: dict[str, Any] | None
    failure: str | None  # a traceback


@dataclasses.dataclass
class Summary:
    done: int = 0
    there: int = 0  # before
    failed: list[tuple[Cell, str]] = dataclasses.field(default_factory=list)
    left: int = 0  # not begun


def missing(results: Path, cells: Sequence[Cell]) -> list[Cell]:
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
    """Run the cells that have no file yet. With one job everything is done in this process, else in `jobs` others."""
    progress = progress or Progress(quiet=True)
    wanted = missing(results, cells)
    summary = Summary(there=len(cells) - len(wanted), left=len(wanted))
    deadline = time.time() + limit if limit is not None else float("inf")
    groups = [list(group) for _, group in itertools.groupby(wanted, key=lambda cell: cell.group)]
    threads = max(1, min(torch.get_num_threads(), cores() // jobs))  # OMP_NUM_THREADS may say fewer
    solver = Solver(data, model, device, results / SOURCE_MODELS)
    if jobs > 1:
        outcomes = in_processes(groups, solver, jobs, threads, deadline)
    else:
        outcomes = in_this_process(groups, solver, threads, deadline)
    with progress.stage("cells", len(wanted)), contextlib.closing(outcomes):
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
            progress.advance(summary.done + len(summary.failed), {"failed": len(summary.failed), "last": last})
    return summary


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass
class Solver:
    """Runs cells one after the other, and keeps what those of a group share."""

    data: Path
    model: str
    device: str
    source_models: Path
    group: Any = None

    def __call__(self, cell: Cell) -> Outcome:
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
    """Give back what a finished run held: its parts refer to one another, and would stay until Python looks for such."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_this_process(groups: Sequence[Sequence[Cell]], solver: Solver, threads: int, deadline: float) -> Iterator[Outcome]:
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


def in_processes(groups: Sequence[Sequence[Cell]], solver: Solver, jobs: int, threads: int, deadline: float) -> Iterator[Outcome]:
    """A worker takes a group that nobody is at; when there is none left, it helps with the one that has most to do.

    Workers only compute: what they find is sent here and written here, so that nothing is half written when they are stopped.
    """
    pending = deque(deque(group) for group in groups)
    workers: dict[Connection, Any] = {}
    at: dict[Connection, deque[Cell]] = {}  # what is left of the group that a worker is at
    busy: dict[Connection, Cell | None] = {}

    def more() -> bool:
        return time.time() < deadline and bool(pending or any(at.values()))

    def hand_out(connection: Connection) -> None:
        if more() and not at.get(connection):
            at[connection] = pending.popleft() if pending else max(at.values(), key=len)
        busy[connection] = at[connection].popleft() if more() else None
        with contextlib.suppress(ConnectionError):  # a worker that has ended is met below
            connection.send(busy[connection])

    try:
        while workers or more():
            while len(workers) < jobs and more():
                connection, process = start(solver, threads)
                workers[connection] = process
                hand_out(connection)
            for connection in wait(list(workers)):
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionError):
                    process = workers.pop(connection)
                    process.join()
                    left = at.pop(connection, None)
                    if left and not any(left is other for other in at.values()):
                        pending.appendleft(left)
                    if (cell := busy.pop(connection)) is not None:
                        yield Outcome(cell, None, f"its process ended with exit code {process.exitcode}")
                    continue
                hand_out(connection)
                yield outcome
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def start(solver: Solver, threads: int) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, solver, threads), daemon=True)
    process.start()
    there.close()
    return here, process


def serve(connection: Connection, solver: Solver, threads: int) -> None:
    """Cells in, outcomes out; None says that there is none left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    while (cell := connection.recv()) is not None:
        connection.send(solver(cell))


def end_with_parent() -> None:
    """Without it, what a killed parent leaves behind would go on until its cell is done, for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
