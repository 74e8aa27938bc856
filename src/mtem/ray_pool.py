"""Tasks on a Ray cluster: the one that RAY_ADDRESS names or that runs on this machine, else one that is started for the tasks.

Ray is an extra, ``pip install 'mtem[ray]'``. All machines of a cluster need mtem and the same folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mtem.errors import RequestError, RunError
from mtem.processes import INTERVAL, Outcome, Queue, Report, Result, Task, attempt

PER_GPU = 4  # workers that share a GPU at most, where their number is not given


def require_ray() -> Any:
    """Return the module `ray`.

    Raises
    ------
    RequestError
        If it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise RequestError("--engine ray: Ray is not installed; install it with: pip install 'mtem[ray]'") from None
    return ray


@contextmanager
def cluster() -> Iterator[Any]:
    """Connect to a cluster for a while, or start one; give the module `ray`."""
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    before = dict(os.environ)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to other hosts
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=None if address else False)
    except Exception as error:  # of many kinds, by what is wrong with the cluster
        where = f"the cluster at RAY_ADDRESS={address} cannot be reached" if address else "no cluster could be started here"
        raise RunError(f"--engine ray: {where}: {' '.join(str(error).split())[:300]}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
        os.environ.clear()  # Ray leaves variables behind, one that replaces the debugger among them
        os.environ.update(before)


def default_jobs() -> int:
    """Return a number of workers for a cluster: for each GPU some, or one for two cores."""
    with cluster() as ray:
        found = ray.cluster_resources()
    gpus = int(found.get("GPU", 0))
    return PER_GPU * gpus if gpus else max(1, int(found.get("CPU", 1)) // 2)


def in_ray(
    groups: Sequence[Sequence[Task]],
    work: Callable[[Task, Report], Result],
    jobs: int,
    deadline: float,
    report: Callable[[Task, float], None],
) -> Generator[Outcome[Task, Result], None, None]:
    """Run the groups in workers of a cluster; see `mtem.processes.run`."""
    with cluster() as ray:
        queue: Queue[int, Task] = Queue(groups, deadline)
        found = ray.cluster_resources()
        cpus = max(1, int(found.get("CPU", 1)))
        threads = max(1, min(torch.get_num_threads(), cpus // jobs))
        share = {"num_cpus": threads if threads * jobs <= cpus else cpus / jobs, "num_gpus": min(1.0, found.get("GPU", 0) / jobs)}
        make = ray.remote(_Worker).options(max_concurrency=2, max_restarts=0, **share).remote
        work_there = ray.put(work)
        workers: dict[int, Any] = {}
        busy: dict[Any, tuple[int, Task]] = {}  # by what will be its outcome
        count = 0
        try:
            while busy or queue.more():
                while len(workers) < jobs and queue.more():
                    workers[count] = make(work_there, threads, os.getcwd())
                    _begin(queue, count, workers, busy)
                    count += 1
                ready, _ = ray.wait(list(busy), timeout=INTERVAL)
                for reference in ready:
                    number, task = busy.pop(reference)
                    try:
                        fraction, outcome = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        del workers[number]
                        queue.leave(number)
                        yield Outcome(task, failure=f"its worker ended ({type(error).__name__})")
                        continue
                    _begin(queue, number, workers, busy)
                    if fraction is not None:
                        report(task, fraction)
                    yield Outcome(task, outcome.result, outcome.failure)
                if not ready:
                    _tell(ray, workers, busy, report)
        finally:
            for worker in workers.values():
                ray.kill(worker)


def _begin(queue: Queue[int, Task], number: int, workers: dict[int, Any], busy: dict[Any, tuple[int, Task]]) -> None:
    """Give a worker its next task, if there is one."""
    task = queue.next(number)
    if task is not None:
        busy[workers[number].run.remote(task)] = number, task


def _tell(ray: Any, workers: dict[int, Any], busy: dict[Any, tuple[int, Task]], report: Callable[[Task, float], None]) -> None:
    """Report how much of each task is done."""
    asked = {workers[number].fraction.remote(): task for number, task in busy.values()}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=INTERVAL)
    for reference in ready:
        try:
            fraction = ray.get(reference)
        except ray.exceptions.RayError:  # its outcome will tell
            continue
        if fraction is not None:
            report(asked[reference], fraction)


class _Worker:
    """Runs tasks one after the other, and says meanwhile how much of a task is done."""

    def __init__(self, work: Callable[[Any, Report], Any], threads: int, folder: str) -> None:
        torch.set_num_threads(threads)
        with suppress(OSError):  # relative paths are those of the command
            os.chdir(folder)
        self.work = work
        self.last: float | None = None

    def run(self, task: Any) -> tuple[float | None, Outcome[Any, Any]]:
        """Run a task; return the last fraction that it reported, and its outcome."""
        self.last = None
        outcome = attempt(self.work, task, self._report)
        return self.last, outcome

    def fraction(self) -> float | None:
        """Return the last fraction that the task has reported."""
        return self.last

    def _report(self, fraction: float) -> None:
        self.last = float(fraction)
