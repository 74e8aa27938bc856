"""Tasks on a Ray cluster of this machine: what they return, failures, reports, the deadline, and what needs Ray."""

from __future__ import annotations

import builtins
import dataclasses
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtem import processes, ray_pool
from mtem.errors import RequestError, RunError
from mtem.models.text import TextModel
from tests.conftest import make_texts
from tests.processes import wait_for

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One cluster for all tests of this file, with fewer workers than Ray would prepare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONBREAKPOINT", "")  # Ray sets it, and leaves it behind
        ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False, object_store_memory=10**8)
        yield
        ray.shutdown()


@dataclasses.dataclass
class Work:
    """Says what it has run in this process, and fails or ends where the task says so."""

    folder: Path
    begun: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, task, report):
        self.begun.append(task)
        report(0.5)
        if task == "fails":
            raise RequestError("no such task")
        if task == "dies":
            os._exit(5)
        if task == "waits":
            wait_for((self.folder / "go").exists, "a report")
        return os.getcwd(), list(self.begun)


def test_outcomes_and_failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = {
        outcome.task: outcome
        for outcome in processes.run([["a0", "a1"], ["fails", "dies", "b2"]], Work(tmp_path), jobs=2, pool="ray")
    }
    assert sorted(outcomes) == ["a0", "a1", "b2", "dies", "fails"]
    assert outcomes["a1"].result == (str(tmp_path), ["a0", "a1"])  # a group is one worker's, in the command's folder
    assert outcomes["fails"].message == "no such task" and outcomes["fails"].result is None
    assert outcomes["dies"].failure == "its worker ended (ActorDiedError)"
    assert outcomes["b2"].result is not None


def test_reports_come_while_a_task_runs(tmp_path):
    told = []

    def report(task, fraction):
        told.append((task, fraction))
        (tmp_path / "go").touch()

    (outcome,) = processes.run([["waits"]], Work(tmp_path), jobs=1, pool="ray", report=report)
    assert outcome.failure is None and set(told) == {("waits", 0.5)}


def test_nothing_begins_after_the_deadline(tmp_path):
    assert list(processes.run([["a0"]], Work(tmp_path), jobs=1, pool="ray", deadline=time.time() - 1)) == []


def test_workers_for_a_cluster(monkeypatch):
    assert ray_pool.default_jobs() == 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    assert ray_pool.default_jobs() == 32


def test_a_cluster_that_cannot_be_reached(monkeypatch):
    def fail(**options):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RunError, match="no cluster could be started here: nobody there"):
        ray_pool.default_jobs()
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    with pytest.raises(RunError, match="the cluster at RAY_ADDRESS=somewhere:6379 cannot be reached"):
        ray_pool.default_jobs()


def test_a_folder_has_the_same_predictions(encoder, tmp_path, command):
    model = TextModel.create(encoder, ["bad", "good"], max_length=16)
    model.save(tmp_path / "model")
    for number in range(2):
        texts = [text for text, _ in make_texts(20, number)] + [""]
        (tmp_path / "texts").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts}), tmp_path / "texts" / f"{number}.parquet")
    found = {}
    for engine in ("processes", "ray"):
        output = tmp_path / engine
        code, told, _ = command("predict", tmp_path / "model", tmp_path / "texts", "--output", output, "--engine", engine)
        assert code == 0 and "42 rows" in told and "2 rows have no text" in told
        found[engine] = {path.name: pq.read_table(path).to_pydict() for path in output.glob("*.parquet")}
    assert found["ray"] == found["processes"] and sorted(found["ray"]) == ["0.parquet", "1.parquet"]


def test_ray_is_an_extra(monkeypatch, command, tmp_path):
    real = builtins.__import__

    def without(name, *more, **options):
        if name == "ray":
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for arguments in (
        ["predict", tmp_path, tmp_path, "--output", tmp_path / "out"],
        ["rehearse", "--source", tmp_path / "a.csv", "--output", tmp_path / "out"],
        ["reproduce", "general"],
    ):
        code, _, told = command(*arguments, "--engine", "ray")
        assert code == 2 and "pip install 'mtem[ray]'" in told
        code, _, told = command(*arguments, "--engine", "taylor")
        assert code == 2 and "--engine taylor: expected processes or ray" in told and "--set engine" in told
