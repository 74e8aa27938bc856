"""Tasks in this process and in several: groups, help, failures, reports, the deadline, the end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from pathlib import Path

import pytest
import torch

from mtem import processes
from mtem.errors import DiskFullError, RequestError
from tests.processes import content, wait_for


@dataclasses.dataclass
class Work:
    """Says which tasks it has begun, and waits where `waits` says so, until another task has begun."""

    folder: Path
    waits: dict[str, str] = dataclasses.field(default_factory=dict)
    begun: list[str] = dataclasses.field(default_factory=list)  # by this process

    def __call__(self, task, report):
        self.begun.append(task)
        (self.folder / task).write_text(str(os.getpid()))
        if task in self.waits:
            wait_for((self.folder / self.waits[task]).exists, f"{task}: the beginning of {self.waits[task]}")
        report(0.5)
        if task == "dies":
            os._exit(5)
        return self.begun


def results(groups, work, **options):
    return {outcome.task: outcome.result for outcome in processes.run(groups, work, **options)}


def test_one_process_takes_group_after_group(tmp_path):
    outcomes = list(processes.run([["a0", "a1"], [], ["b0"]], Work(tmp_path), jobs=1))
    assert [outcome.task for outcome in outcomes] == ["a0", "a1", "b0"] and outcomes[-1].result == ["a0", "a1", "b0"]
    assert content(tmp_path / "b0") == str(os.getpid())


def test_a_group_is_one_process_s(tmp_path):
    work = Work(tmp_path, waits={"a0": "b0", "b0": "a0", "a1": "b1", "b1": "a1"})
    found = results([["a0", "a1"], [], ["b0", "b1"]], work, jobs=2)
    assert found == {"a0": ["a0"], "a1": ["a0", "a1"], "b0": ["b0"], "b1": ["b0", "b1"]}
    assert str(os.getpid()) not in {content(tmp_path / task) for task in found}


def test_a_group_that_nobody_has_begun_comes_before_help(tmp_path):
    found = results([["a0", "a1", "a2"], ["b0"], ["c0"]], Work(tmp_path, waits={"a0": "c0"}), jobs=2)
    assert found["c0"] == ["b0", "c0"] and sorted(found) == ["a0", "a1", "a2", "b0", "c0"]


def test_who_has_nothing_to_do_helps_with_the_largest_group(tmp_path):
    groups = [["a0", "a1"], ["b0", "b1", "b2", "b3"], ["c0"]]
    found = results(groups, Work(tmp_path, waits={"a0": "b1", "b0": "b1"}), jobs=3)
    assert found["b1"] == ["c0", "b1"] and sorted(found) == sorted(itertools.chain(*groups))


@pytest.mark.parametrize(
    ("groups", "waits"),
    [
        ([["dies", "a1", "a2"], ["b0"]], {"b0": "a1"}),  # its group has only it: another process takes its place
        ([["dies", "a1", "a2", "b0"]], {"dies": "a1", "a1": "dies"}),  # another process helps with its group
    ],
)
def test_a_process_that_ends_takes_one_task_along(tmp_path, groups, waits):
    outcomes = list(processes.run(groups, Work(tmp_path, waits), jobs=2))
    assert sorted(outcome.task for outcome in outcomes) == ["a1", "a2", "b0", "dies"]
    (failed,) = [outcome for outcome in outcomes if outcome.failure]
    assert failed.task == "dies" and failed.result is None
    assert failed.message == failed.failure == "its process ended with exit code 5"


FAILURES = {"wrong": RequestError("x.csv: no column text"), "full": DiskFullError("the disk is full"), "bug": KeyError("luck")}


def fail(task, report):
    if task in FAILURES:
        raise FAILURES[task]
    return task.upper()


def test_one_process_or_two_the_outcomes_are_the_same():
    groups = [["good", "wrong", "fine"], ["full", "bug", "best"]]
    alone, together = ({each.task: each for each in processes.run(groups, fail, jobs=jobs)} for jobs in (1, 2))
    assert alone == together
    assert [alone[task].result for task in ("good", "fine", "best", "wrong")] == ["GOOD", "FINE", "BEST", None]
    messages = {task: outcome.message for task, outcome in alone.items() if outcome.failure is not None}
    assert messages == {"wrong": "x.csv: no column text", "full": "the disk is full", "bug": "KeyError: 'luck'"}
    assert alone["good"].message == "" and alone["wrong"].failure.startswith("Traceback")
    assert "in fail" in alone["wrong"].failure and "RequestError: x.csv" in alone["wrong"].failure


class Named:
    """A task that is equal to itself alone."""

    def __init__(self, name):
        self.name = name


@dataclasses.dataclass
class Reporting:
    """Is half done until that has been received."""

    folder: Path

    def __call__(self, task, report):
        report(0)
        wait_for(lambda: report(0.5) or (self.folder / task.name).exists(), f"{task.name}: its report is received")
        report(0.75)
        report(1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_reports_come_in_order_and_the_last_one_before_the_outcome(tmp_path, jobs):
    tasks = [Named(name) for name in ("a0", "a1", "b0")]
    received = {task: [] for task in tasks}

    def report(task, fraction):
        received[task].append(fraction)
        if fraction == 0.5:
            (tmp_path / task.name).touch()

    left = set(tasks)
    for outcome in processes.run([tasks[:2], tasks[2:]], Reporting(tmp_path), jobs=jobs, report=report):
        fractions = received[outcome.task]
        assert outcome.failure is None and fractions == sorted(fractions) and 0.5 in fractions and fractions[-1] == 1
        left.remove(outcome.task)
    assert not left


def test_a_process_sends_few_reports(monkeypatch):
    clock, sent = [100.0], []

    class Connection:
        send = sent.append

    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    sender = processes.Sender(Connection)
    for percent in range(100):
        sender.report(percent / 100)
        clock[0] += processes.INTERVAL / 8
    assert [fraction for fraction, _ in sent] == [percent / 100 for percent in range(0, 100, 8)]
    del sent[:]
    sender.send("outcome")
    sender.send("another")
    assert sent == [(0.99, "outcome"), (None, "another")]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_task_is_begun_after_the_deadline(tmp_path, monkeypatch, jobs):
    clock = [100.0]
    monkeypatch.setattr(processes.time, "time", lambda: clock[0])
    outcomes = processes.run([["a0", "a1", "a2", "a3", "a4"]], Work(tmp_path), jobs=jobs, deadline=110)
    done = [next(outcomes).task]
    clock[0] = 110
    done += [outcome.task for outcome in outcomes]
    # of two processes both have a task, and who brought the first outcome has another
    assert sorted(done) == ["a0", "a1", "a2"][: 1 if jobs == 1 else 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(done)


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_process_is_started_after_the_deadline(tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(processes, "start", None)
    assert not list(processes.run([["a0"], ["b0"]], Work(tmp_path), jobs=jobs, deadline=0))


def test_who_stops_listening_ends_the_processes(tmp_path):
    work = Work(tmp_path, waits={"a0": "stays", "stays": "never"})
    with contextlib.closing(processes.run([["a0"], ["stays", "b1"]], work, jobs=2)) as outcomes:
        assert next(outcomes).task == "a0"
        number = int(wait_for(lambda: content(tmp_path / "stays"), "the number of the process"))
        os.kill(number, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def count_threads(task, report):
    return torch.get_num_threads()


@pytest.mark.parametrize(("jobs", "cores", "expected"), [(1, 8, 3), (1, 2, 2), (2, 4, 2), (2, 1, 1)])
def test_processes_share_the_cores(monkeypatch, jobs, cores, expected):
    monkeypatch.setattr(processes, "cores", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert results([["a0"], ["b0"]], count_threads, jobs=jobs) == {"a0": expected, "b0": expected}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
