"""Run tasks, in several processes or on a Ray cluster if asked: a task that fails, or whose process ends, stops no other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch

from mtem import errors, interrupts

Task = TypeVar("Task")
Result = TypeVar("Result")
Worker = TypeVar("Worker")
Report: TypeAlias = Callable[[float], None]

INTERVAL = 0.5  # seconds between two reports of a process
PROCESSES, RAY = POOLS = ("processes", "ray")  # where tasks can run


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """A task that was run: its result, or its failure, a traceback or how its process ended."""

    task: Task
    result: Result | None = None
    failure: str | None = None

    @property
    def message(self) -> str:
        """The failure in one line; of an error in `mtem.errors` what it tells the user, without its type."""
        line = (self.failure or "").strip().rpartition("\n")[2]
        kind, _, text = line.partition(": ")
        return text if kind.startswith(f"{errors.__name__}.") else line


def run(
    groups: Sequence[Sequence[Task]],
    work: Callable[[Task, Report], Result],
    *,
    jobs: int,
    deadline: float = float("inf"),
    report: Callable[[Task, float], None] | None = None,
    pool: str = PROCESSES,
) -> Generator[Outcome[Task, Result], None, None]:
    """Run the tasks of all groups.

    A process runs the tasks of a group one after the other, so that `work` can keep what they share. When no group is left, it
    helps with the largest one.

    Parameters
    ----------
    groups
        Tasks; with several processes they are pickled, and None is not a task.
    work
        ``work(task, report)`` computes the result of one task. It may call ``report(fraction)`` with the fraction of the task
        that is done, from 0 to 1. With several processes it is pickled, and so are its results.
    jobs
        Number of processes; with one, everything runs in this process.
    deadline
        Start no task after this time, as `time.time` has it.
    report
        Called in this process with a task and the last fraction that `work` reported. With several processes not every fraction
        is sent, but a task's last one comes before its outcome.
    pool
        "processes" of this machine, or the workers of a "ray" cluster, which all see the same files.

    Yields
    ------
    Outcome
        Each task's, in the order in which they finish. Closing the generator ends the other processes.
    """
    tell = report or (lambda task, fraction: None)
    if pool == RAY:
        from mtem import ray_pool

        return ray_pool.in_ray(groups, work, jobs, deadline, tell)
    threads = max(1, min(torch.get_num_threads(), cores() // jobs))  # OMP_NUM_THREADS may ask for fewer
    if jobs > 1:
        return in_processes(groups, work, jobs, threads, deadline, tell)
    return in_this_process(groups, work, threads, deadline, tell)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def attempt(work: Callable[[Task, Report], Result], task: Task, report: Report) -> Outcome[Task, Result]:
    """Run one task; a failure is part of the outcome."""
    try:
        return Outcome(task, result=work(task, report))
    except Exception:
        return Outcome(task, failure=traceback.format_exc())
    finally:
        release()


def release() -> None:
    """Free the memory of a finished task: its objects refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_this_process(
    groups: Sequence[Sequence[Task]],
    work: Callable[[Task, Report], Result],
    threads: int,
    deadline: float,
    report: Callable[[Task, float], None],
) -> Generator[Outcome[Task, Result], None, None]:
    """Run the groups in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for task in itertools.chain(*groups):
            if time.time() >= deadline:
                return
            yield attempt(work, task, functools.partial(report, task))
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- several processes


class Queue(Generic[Worker, Task]):
    """Which task a worker runs next: one of its group, of one that nobody has begun, or of the largest one.

    Parameters
    ----------
    groups, deadline
        As in `run`.
    """

    def __init__(self, groups: Sequence[Sequence[Task]], deadline: float) -> None:
        self.deadline = deadline
        self._pending = deque(deque(group) for group in groups if group)
        self._remaining: dict[Worker, deque[Task]] = {}  # the rest of a worker's group

    def more(self) -> bool:
        """Return whether there are tasks left to begin."""
        return time.time() < self.deadline and bool(self._pending or any(self._remaining.values()))

    def next(self, worker: Worker) -> Task | None:
        """Return the next task of a worker, if there is one."""
        if not self.more():
            return None
        if not self._remaining.get(worker):
            self._remaining[worker] = self._pending.popleft() if self._pending else max(self._remaining.values(), key=len)
        return self._remaining[worker].popleft()

    def leave(self, worker: Worker) -> None:
        """Give the rest of a worker's group to others: it has ended."""
        unfinished = self._remaining.pop(worker, None)
        if unfinished and not any(unfinished is other for other in self._remaining.values()):
            self._pending.appendleft(unfinished)


def in_processes(
    groups: Sequence[Sequence[Task]],
    work: Callable[[Task, Report], Result],
    jobs: int,
    threads: int,
    deadline: float,
    report: Callable[[Task, float], None],
) -> Generator[Outcome[Task, Result], None, None]:
    """Run the groups in several processes.

    Workers only compute. Their results are sent to this process, so that nothing is half written when they are stopped.
    """
    queue: Queue[Connection, Task] = Queue(groups, deadline)
    workers: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, Task | None] = {}

    def hand_out(connection: Connection) -> None:
        busy[connection] = queue.next(connection)
        with contextlib.suppress(ConnectionError):  # a worker that has ended is handled below
            connection.send(busy[connection])

    try:
        while workers or queue.more():
            while len(workers) < jobs and queue.more():
                connection, process = start(work, threads)
                workers[connection] = process
                hand_out(connection)
            for connection in cast("list[Connection]", wait(list(workers))):
                task = busy[connection]
                try:
                    fraction, outcome = connection.recv()
                except (EOFError, ConnectionError):
                    process = workers.pop(connection)
                    process.join()
                    del busy[connection]
                    queue.leave(connection)
                    if task is not None:
                        yield Outcome(task, failure=f"its process ended with exit code {process.exitcode}")
                    continue
                if outcome is not None:
                    hand_out(connection)
                if fraction is not None:
                    report(cast(Task, task), fraction)
                if outcome is not None:
                    yield dataclasses.replace(outcome, task=task)  # not its copy
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def start(work: Callable[[Any, Report], Any], threads: int) -> tuple[Connection, SpawnProcess]:
    """Start a worker; return the connection to it and its process."""
    interrupts.unwind()
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, work, threads), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def serve(connection: Connection, work: Callable[[Any, Report], Any], threads: int) -> None:
    """Receive tasks and send reports and outcomes, until a None arrives."""
    for name in interrupts.SIGNALS:  # they may be sent to all processes; the parent handles them and ends this one
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    sender = Sender(connection)
    while (task := connection.recv()) is not None:
        sender.send(attempt(work, task, sender.report))


@dataclasses.dataclass
class Sender:
    """Send pairs of a fraction and an outcome, either of which may be None."""

    connection: Connection
    fraction: float | None = None  # reported and not sent yet
    sent: float = -float("inf")

    def report(self, fraction: float) -> None:
        """Send the fraction, unless the last message is too recent; then it goes with the next one."""
        self.fraction = float(fraction)
        if time.monotonic() - self.sent >= INTERVAL:
            self.send(None)

    def send(self, outcome: Outcome[Any, Any] | None) -> None:
        """Send the outcome, if there is one yet, and the last fraction."""
        self.connection.send((self.fraction, outcome))
        self.fraction, self.sent = None, time.monotonic()


def end_with_parent() -> None:
    """End this process when its parent is killed, instead of finishing a task that nothing receives."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
