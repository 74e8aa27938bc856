"""Which trials are run, what a budget cuts, and what is left out when the time is over or a trial fails."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mtem
from mtem import processes
from mtem.data.loading import load_corpus
from mtem.errors import RequestError, RunError
from mtem.progress import Progress
from mtem.rehearsal import schedule
from mtem.rehearsal.domains import DOMAINS, Domains
from mtem.rehearsal.plan import make_plan
from mtem.rehearsal.schedule import complete, cut, plan_trials
from mtem.rehearsal.trials import SourceTask, Trial, Work
from tests.rehearsed import write_method

# 0.6 s for a text in source training: 1.8 s for one in a pass of a trial
FIRST = {
    "texts": {"source_trained_on": 100}, "settings": {"source_epochs": 1}, "seconds": {"source": 60.0},
    "resolved": {"learning_rate": 1e-3},
}  # fmt: skip
MINUTES = 1.8 * 300 / 60  # one pass of one configuration in both domains


@pytest.fixture
def work(tmp_path):
    """Two domains of 150 texts, in one of which `bad` is too rare to be made rarer."""
    labels = ["bad", "good"] * 75 + ["bad"] * 20 + ["good"] * 130
    data = {"books": ([f"b{n}" for n in range(150)], labels[:150]), "dvd": ([f"d{n}" for n in range(150)], labels[150:])}
    corpus = load_corpus(data, labeled=True)
    domains = Domains(DOMAINS, ("books", "dvd"), corpus.domain_numbers(), (0, 1), ())
    plan = make_plan(("mtem", "fixmatch"), "minilm", "recommended", None, None, None, {})
    return Work(corpus, domains, plan, tmp_path)


def finish(work, trial):
    """Write the record of a trial, as if it had been run."""
    folder = work.trial_folder(trial.domain)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{trial.name}.json").write_text("{}")


# ---------------------------------------------------------------------- which trials


def test_tasks_run_where_they_are_asked_to(work, monkeypatch):
    pools = []

    def run(groups, *arguments, pool, **options):
        pools.append((groups, pool))
        yield from ()

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(schedule, "read_json", lambda path: FIRST | {"resolved": {"learning_rate": 1e-3, "frozen_layers": 0}})
    with pytest.raises(RunError, match="no method was tried"):
        schedule.run_trials(work, work.plan, 2, None, Progress(quiet=True), "ray")
    assert [pool for _, pool in pools] == ["ray", "ray"] and len(pools[1][0][0]) == 8


def test_the_first_method_and_rate_come_first_in_all_domains(work):
    trials = plan_trials(work, work.plan, 1e-3)
    assert [(t.method, t.learning_rate, t.domain) for t in trials] == [
        (method, rate, domain) for method in ("mtem", "fixmatch") for rate in (1e-3, 2.5e-3) for domain in ("books", "dvd")
    ]
    assert {(t.prior, t.rare) for t in trials} == {("none", "")}


def test_priors_are_compared_with_rarer_classes_where_there_are_enough_texts(work):
    plan = dataclasses.replace(work.plan, class_priors=("none", "uniform"), learning_rates=(1e-3,), methods=("mtem",))
    trials = plan_trials(work, dataclasses.replace(plan, rarer_classes=True), 1e-3)
    assert {t.prior for t in trials} == {"none", "uniform"} and len(trials) == 2 * 5 == len(set(trials))
    assert {(t.domain, t.rare) for t in trials} == {
        ("books", ""), ("books", "bad"), ("books", "good"), ("dvd", ""), ("dvd", "good"),
    }  # fmt: skip
    rows, labels = work.pool("books", "bad")
    assert np.bincount(labels).tolist() == [25, 75] and len(rows) == 100


def test_trials_have_names_of_their_own():
    base = Trial("books", "mtem", 1e-3)
    others = [
        dataclasses.replace(base, **change)
        for change in (
            {"learning_rate": 2e-3},
            {"prior": "uniform"},
            {"rare": "bad"},
            {"method": "a/own.py"},
            {"method": "b/own.py"},
        )
    ]
    assert len({trial.name for trial in (base, *others)}) == 6
    assert all("/" not in trial.name for trial in others) and base.name.startswith("mtem-") and others[3].name.startswith("own-")


def test_source_models_have_folders_of_their_own(work):
    tasks = [
        SourceTask(domain, method) for domain in ("books", "dvd") for method in ("source-only", "mme", "a/own.py", "b/own.py")
    ]
    assert len({work.source_model_path(task) for task in tasks}) == 8


# ---------------------------------------------------------------------- the budget


def passes(minutes):
    """Forecasts are compared with a little more than they say."""
    return minutes * 1.001


def test_a_budget_that_suffices_cuts_nothing(work):
    assert cut(work, work.plan, FIRST, 1, passes(4 * 6 * MINUTES)) == (work.plan, [])
    assert cut(work, work.plan, FIRST, 1, float("inf")) == (work.plan, [])


def test_passes_are_cut_first(work):
    plan, notes = cut(work, work.plan, FIRST, 1, passes(4 * 5 * MINUTES))
    assert plan == dataclasses.replace(work.plan, epochs=5) and notes == ["to fit the budget: 5 passes instead of 6"]
    plan, notes = cut(work, work.plan, FIRST, 1, passes(4 * 2 * MINUTES))
    assert plan.epochs == 2 and plan.learning_rates is None and plan.methods == work.plan.methods and len(notes) == 1


def test_then_learning_rates(work):
    plan, notes = cut(work, work.plan, FIRST, 1, passes(2 * 2 * MINUTES))
    assert plan.epochs == 2 and plan.rates_of("mtem", 1e-3) == (1e-3,) and plan.methods == ("mtem", "fixmatch")
    assert notes == ["to fit the budget: 2 passes instead of 6", "to fit the budget: only the default learning rate is tried"]
    given = dataclasses.replace(work.plan, learning_rates=(5e-3, 1e-3))
    plan, notes = cut(work, given, FIRST, 1, passes(2 * 2 * MINUTES))
    assert plan.learning_rates == (5e-3,) and notes[-1] == "to fit the budget: only the learning rate 0.005 is tried"


def test_then_methods(work):
    plan, notes = cut(work, work.plan, FIRST, 1, passes(2 * MINUTES))
    assert plan.methods == ("mtem",) and plan.factors == (1.0,) and plan.epochs == 2
    assert notes[-1] == "to fit the budget: fixmatch not tried" and len(notes) == 3


def test_a_budget_that_is_too_small_says_how_much_is_needed(work):
    plan, notes = cut(work, work.plan, FIRST, 1, 1.0)
    assert (plan.methods, plan.epochs) == (("mtem",), 2)
    assert notes[0] == f"the budget is too small: about {2 * MINUTES:.0f} more minutes are needed at least"


def test_processes_share_the_work(work):
    assert cut(work, work.plan, FIRST, 4, passes(6 * MINUTES)) == (work.plan, [])


def test_what_is_done_costs_nothing(work):
    """Trials of as many passes as the shortened plan has."""
    shorter = dataclasses.replace(work, plan=dataclasses.replace(work.plan, epochs=5))
    for trial in plan_trials(shorter, shorter.plan, 1e-3):
        finish(shorter, trial)
    plan, _ = cut(work, work.plan, FIRST, 1, 1.0)
    assert plan == shorter.plan and work.plan.epochs == 6
    for trial in plan_trials(work, work.plan, 1e-3):
        finish(work, trial)
    assert cut(work, work.plan, FIRST, 1, 1.0) == (work.plan, [])


# ---------------------------------------------------------------------- what is complete


def test_configurations_that_were_not_tried_everywhere_are_left_out(work, monkeypatch):
    monkeypatch.setattr(Work, "read", lambda self, trial: trial)
    trials = plan_trials(work, work.plan, 1e-3)
    for trial in trials[:3]:
        finish(work, trial)
    outputs, notes = complete(work, trials, failed=[])
    assert outputs == trials[:2]
    assert notes == [
        f"out of time: {method} at {rate:g} was not tried in every domain and is left out"
        for method, rate in (("mtem", 2.5e-3), ("fixmatch", 1e-3), ("fixmatch", 2.5e-3))
    ]
    assert len(complete(work, trials, failed=[trials[3]])[1]) == 2, "a failure is told elsewhere"


# ---------------------------------------------------------------------- whole rehearsals


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved, for the deadline alone."""
    now = SimpleNamespace(seconds=1e9)
    fake = SimpleNamespace(time=lambda: now.seconds, monotonic=time.monotonic)
    monkeypatch.setattr(schedule, "time", fake)
    monkeypatch.setattr(processes, "time", fake)
    return now


def stop_after(monkeypatch, clock, trials):
    ran, run_trial = [], Work.run_trial

    def watched(self, trial, *more):
        ran.append(trial)
        if len(ran) == trials:
            clock.seconds += 3600
        return run_trial(self, trial, *more)

    monkeypatch.setattr(Work, "run_trial", watched)
    return ran


@pytest.fixture
def request_(rehearsed, tmp_path):
    """Two domains that can stand for the target, and one that is too small."""
    books, dvd, toys = (Path(path).read_text().splitlines() for path in rehearsed["request"]["source"])
    for name, lines in (("first", books), ("second", dvd), ("rest", toys[:80])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second", "rest")]
    return {**rehearsed["request"], "source": files, "epochs": 1, "source_epochs": 0.2}


def test_out_of_time_the_first_configurations_are_complete(request_, rehearsed, tmp_path, monkeypatch, clock):
    ran = stop_after(monkeypatch, clock, 3)
    compared = {**rehearsed["compared"], "learning_rates": [1e-3, 2e-3]}
    found = mtem.rehearse(**request_, **compared, budget=30, output=tmp_path / "out")
    assert [(trial.learning_rate, trial.domain) for trial in ran] == [(1e-3, "first"), (1e-3, "second"), (2e-3, "first")]
    method = compared["method"][0]
    assert f"out of time: {method} at 0.002 was not tried in every domain and is left out" in found.record["notes"]
    assert {trial["learning_rate"] for trial in found.record["trials"]} == {1e-3}
    assert found.advice(method).settings["learning_rate"] == 1e-3


def test_out_of_time_before_anything_is_complete(request_, rehearsed, tmp_path, monkeypatch, clock):
    ran = stop_after(monkeypatch, clock, 1)
    compared = {**rehearsed["compared"], "learning_rates": [1e-3]}
    with pytest.raises(RunError, match=r"no method was tried in every domain.*out of time.*--resume continues"):
        mtem.rehearse(**request_, **compared, budget=30, output=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "rehearsal.json").read_text())["status"] == "running" and len(ran) == 1
    found = mtem.rehearse(**request_, **compared, budget=30, output=tmp_path / "out", resume=True)
    assert len(ran) == 2 and ran[0].domain != ran[1].domain and found.record["status"] == "done"


@pytest.fixture
def single(request_, tmp_path):
    """Only one domain can stand for the target."""
    lines = (tmp_path / "first.jsonl").read_text().splitlines()
    for number in (1, 2):
        (tmp_path / f"first{number}.jsonl").write_text("\n".join(lines[number - 1 :: 2]) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first1", "first2", "second", "rest")]
    return {**request_, "source": files}


def test_a_method_that_fails_is_left_out(single, rehearsed, tmp_path):
    raises = write_method(tmp_path, "raises")
    compared = {"method": [raises, *rehearsed["compared"]["method"]], "learning_rates": [1e-3]}
    found = mtem.rehearse(**single, **compared)
    assert found.methods == rehearsed["compared"]["method"]
    (note,) = [line for line in found.record["notes"] if "failed" in line]
    assert note.startswith(f"{raises} at 0.001 on second failed and is left out: {raises}, line ")
    assert note.endswith(": step 1 failed: ValueError: broken")
    assert not any("out of time" in line for line in found.record["notes"])


def test_nothing_is_left_if_all_fail(single, tmp_path):
    with pytest.raises(RunError, match=r"no method was tried in every domain.*broken$"):
        mtem.rehearse(**single, method=write_method(tmp_path, "raises"), learning_rates=[1e-3], output=tmp_path / "out")


def test_nothing_goes_on_without_a_source_model(request_, rehearsed, tmp_path, monkeypatch):
    def broken(*_):
        raise RequestError("out of luck")

    monkeypatch.setattr(Work, "train_source", broken)
    with pytest.raises(RunError, match=r"the source model without first failed: out of luck$"):
        mtem.rehearse(**request_, **rehearsed["compared"], output=tmp_path / "out")
    assert not (tmp_path / "out" / "trials").exists()
