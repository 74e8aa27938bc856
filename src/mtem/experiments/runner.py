"""Running cells: groups in processes of their own, every finished cell written at once, a failed one told and passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtem.atomic import replaced
from mtem.experiments import cells as files
from mtem.experiments.cells import Cell
from mtem.progress import Progress


@dataclasses.dataclass(frozen=True)
class Task:
    """The cells of one group that are still to be run, and where."""

    cells: tuple[Cell, ...]
    data: Path
    model: str
    device: str
    deadline: float  # time.time() after which no cell is begun


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
    tasks = [
        Task(tuple(group), data, model, device, deadline) for _, group in itertools.groupby(wanted, key=lambda cell: cell.group)
    ]
    threads = max(1, min(torch.get_num_threads(), cores() // jobs))  # OMP_NUM_THREADS may say fewer
    outcomes = in_processes(tasks, jobs, threads) if jobs > 1 else in_this_process(tasks, threads)
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


def solved(task: Task) -> Iterator[Outcome]:
    """The cells of a group, one after the other, until the deadline."""
    from mtem.experiments import search

    group: search.Group | None = None
    for cell in task.cells:
        if time.time() >= task.deadline:
            return
        try:
            group = group or search.Group(cell, task.data, task.model, task.device)
            yield Outcome(cell, search.solve(cell, group), None)
        except Exception:
            yield Outcome(cell, None, traceback.format_exc())
        release()


def release() -> None:
    """Give back what a finished run held: its parts refer to one another, and would stay until Python looks for such."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_this_process(tasks: Sequence[Task], threads: int) -> Iterator[Outcome]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for task in tasks:
            yield from solved(task)
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- several processes


def in_processes(tasks: Sequence[Task], jobs: int, threads: int) -> Iterator[Outcome]:
    """Groups go to whoever is free. Workers only compute: what they find is sent here and written here, so that nothing is
    half written when they are stopped."""
    pending = deque(tasks)
    workers: dict[Connection, Any] = {}
    busy: dict[Connection, list[Cell]] = {}  # what is left of the group that a worker is at

    def hand_out(connection: Connection) -> None:
        task = pending.popleft() if pending else None
        busy[connection] = list(task.cells) if task else []
        with contextlib.suppress(ConnectionError):  # a worker that has ended is met below
            connection.send(task)

    try:
        while pending or workers:
            while pending and len(workers) < jobs:
                connection, process = start(threads)
                workers[connection] = process
                hand_out(connection)
            for connection in wait(list(workers)):
                try:
                    message = connection.recv()
                except (EOFError, ConnectionError):
                    process = workers.pop(connection)
                    process.join()
                    for cell in busy.pop(connection):
                        yield Outcome(cell, None, f"its process ended with exit code {process.exitcode}")
                    continue
                if message is None:
                    hand_out(connection)
                else:
                    busy[connection].remove(message.cell)
                    yield message
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def start(threads: int) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, threads), daemon=True)
    process.start()
    there.close()
    return here, process


def serve(connection: Connection, threads: int) -> None:
    """Groups in, outcomes out; None says that a group is done, or that there is none left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends this process
    torch.set_num_threads(threads)
    while (task := connection.recv()) is not None:
        for outcome in solved(task):
            connection.send(outcome)
        connection.send(None)
