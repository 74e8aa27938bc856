"""Run cases in processes with limits: a case that takes too long, too much memory, or its process with it, is a failure."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 2 << 30  # bytes of resident memory
SECONDS = 60.0  # a case; the machine may be busy
CASES_PER_PROCESS = 2000  # then a new one begins, so that none keeps what others left


class Case(NamedTuple):
    """One case: a target, or the name of a past failure, and its number."""

    target: str
    number: int
    seed: int = 0


class Outcome(NamedTuple):
    """What came of a case: an empty `problem` if it was answered or refused in one line."""

    case: Case
    problem: str
    seconds: float
    peak: int


def run_all(
    cases: Iterable[Case], shop: Path, run: Callable[[Case, Path], None], jobs: int = 1, memory: int = MEMORY
) -> Iterator[Outcome]:
    """Yield the outcome of every case, in the order in which they end.

    Parameters
    ----------
    cases
        What to run.
    shop
        The folder that the cases read.
    run
        Runs a case in a process; it must be a function of a module, which is imported before the first case begins.
    jobs
        Number of processes.
    memory
        Bytes that a process may have.
    """
    waiting = iter(cases)
    workers = [_Worker(shop, run, memory) for _ in range(jobs)]
    try:
        idle = list(workers)
        busy: list[_Worker] = []
        while True:
            while idle and (case := next(waiting, None)) is not None:
                worker = idle.pop()
                worker.begin(case)
                busy.append(worker)
            if not busy:
                return
            wait([worker.connection for worker in busy], timeout=0.5)
            for worker in list(busy):
                if (outcome := worker.outcome()) is not None:
                    busy.remove(worker)
                    idle.append(worker)
                    yield outcome
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    def __init__(self, shop: Path, run: Callable[[Case, Path], None], memory: int) -> None:
        self.shop, self.run, self.memory = shop, run, memory
        self.process: Any = None
        self.done = 0

    def begin(self, case: Case) -> None:
        if self.process is None or self.done >= CASES_PER_PROCESS:
            self.end()
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.shop, self.run, self.memory), daemon=True)
            self.process.start()
            theirs.close()
            self.connection.recv()  # the imports, which are not the case's, are done
            self.done = 0
        self.case, self.began = case, time.monotonic()
        self.done += 1
        self.connection.send(case)

    def outcome(self) -> Outcome | None:
        seconds = time.monotonic() - self.began
        try:
            if self.connection.poll():
                problem, peak = self.connection.recv()
                if problem:
                    self.end()
                return Outcome(self.case, problem, seconds, peak)
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.end()
            return Outcome(self.case, f"the process ended with {code}", seconds, 0)
        if seconds > SECONDS:
            self.end(patience=0)
            return Outcome(self.case, f"hangs: no answer in {SECONDS:.0f} seconds", seconds, 0)
        return None

    def end(self, patience: float = 10.0) -> None:
        if self.process is not None:
            self.connection.close()  # an idle process ends by itself, and leaves what coverage has counted
            self.process.join(patience)
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(connection: Connection, shop: Path, run: Callable[[Case, Path], None], memory: int) -> None:
    # What the watch on the peak would see too late: allocations beyond this fail at once.
    resource.setrlimit(resource.RLIMIT_DATA, (2 * MEMORY, 2 * MEMORY))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    connection.send("ready")
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        problem = ""
        try:
            run(case, shop)
        except BaseException as error:
            problem = "".join(traceback.format_exception(error))[-4000:]
        peak = peak_memory()
        if not problem and peak > memory:  # the peak stays, so a failure ends the process
            problem = f"took {peak >> 20} MB of memory"
        connection.send((problem, peak))


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def drawn(case: Case) -> random.Random:
    """The random numbers of a case: the same in every run."""
    return random.Random(f"{case.seed} {case.target} {case.number}")


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one case."""
    return tempfile.TemporaryDirectory(prefix="mtem-fuzz-")
