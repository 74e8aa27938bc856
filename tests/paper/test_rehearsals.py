"""Rehearsals on the paper's data sets, at tiny size: the plan, what is seen, what is kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from mtem.cli import main
from mtem.errors import RequestError
from mtem.rehearsal import trials
from mtem.rehearsal.choice import choose
from mtem.rehearsal.trials import SourceTask, Trial
from mtem_paper import rehearsals, splits
from mtem_paper.protocol import DATASETS

TINY = {"epochs": "2", "source_epochs": "0.5", "batch_size": "20", "vocabulary": "60"}


def is_result(record):
    return True


@pytest.fixture(scope="module")
def ran(pheme, tmp_path_factory):
    """Trials and finals of two methods, one of them with a head of its own."""
    folder = tmp_path_factory.mktemp("results")
    tasks = rehearsals.plan("pheme", "bigcn", targets=["ferguson"], methods=["fixmatch", "mme"], seeds=[0], overrides=TINY)
    tasks = [task for task in tasks if task.factor in (0.0, 1.0) and task.work.domain in ("ferguson", "sydneysiege")]
    rehearser = rehearsals.Rehearser(pheme, "bigcn", "cpu", folder)
    return folder, tasks, rehearsals.run(tasks, rehearser), rehearser


def test_the_plan_trains_every_source_model_once_and_before_it_is_needed():
    for dataset, about in DATASETS.items():
        tasks = rehearsals.plan(dataset, "m")
        assert len(set(tasks)) == len(tasks) == len({task.address for task in tasks})
        position = {task: number for number, task in enumerate(tasks)}
        for task in tasks:
            if isinstance(task.work, Trial):
                assert position[rehearsals.source_of(task)] < position[task]
                assert task.work.learning_rate == pytest.approx(rehearsals.RATES[dataset] * task.factor)
        for target in about.targets:
            found = {task.work.domain for task in tasks if task.place.target == target}
            assert found == set(about.domains), "each source stands for the target, and the target for itself"
        assert {task.place.seed for task in tasks if not task.final} == {0}
    tasks = rehearsals.plan("amazon", "m", targets=["dvd"], seeds=[0])
    shared = [task.work for task in tasks if isinstance(task.work, SourceTask)]
    assert len(shared) == 4 * 2 and {work.method for work in shared} == {"source-only", "mme"}


def test_the_plan_refuses_what_it_does_not_have():
    with pytest.raises(RequestError, match="--variants wind: for rehearsals on amazon, expected some of mtem, fixmatch"):
        rehearsals.plan("amazon", "m", methods=["wind"])
    with pytest.raises(RequestError, match="--targets germanwings-crash"):
        rehearsals.plan("pheme", "m", targets=["germanwings-crash"])


def test_records_and_outputs_agree(ran):
    folder, tasks, summary, _ = ran
    wanted = {task.address: task for task in tasks if isinstance(task.work, Trial)}
    assert (summary.done, summary.existed, summary.left, summary.failed) == (len(wanted), 0, 0, [])
    found = list(rehearsals.read(folder, is_result))
    assert {entry.path for entry in found} == set(wanted)
    assert not list(rehearsals.read(folder)), "runs with other settings are no results"
    for entry in found:
        task, record = wanted[entry.path], entry.record
        assert entry.trial == task.work and record["final"] == task.final and record["metric"] == "f1:rumour"
        assert [candidate["epoch"] for candidate in record["candidates"]] == [0, 1, 2]
        assert record["settings"]["learning_rate"] == task.work.learning_rate and record["settings"]["epochs"] == 2
        outputs, tested = entry.outputs(folder / rehearsals.OUTPUTS)
        assert (tested is not None) == task.final
        again = rehearsals.figures_of(outputs, tested, record["metric"], record["classes"])
        for figures, candidate in zip(again, record["candidates"], strict=True):
            assert figures.score == pytest.approx(candidate["score"], abs=0.02), "stored with 16 bits"
            assert figures.estimate == pytest.approx(candidate["estimate"], abs=0.02)


def test_a_final_is_scored_on_the_test_set_with_the_correction_of_its_unlabeled_texts(ran, pheme):
    folder, _, _, _ = ran
    division = splits.divide(splits.read("pheme", pheme, "ferguson", "event"), 0)
    classes = ["non-rumour", "rumour"]
    for entry in rehearsals.read(folder, lambda record: record["final"] and record["trial"]["prior"] == "uniform"):
        outputs, tested = entry.outputs(folder / rehearsals.OUTPUTS)
        assert tested.labels.tolist() == [classes.index(label) for label in division.truth]
        assert outputs.labels.tolist() == [classes.index(label) for label in division.unlabeled_labels]
        for logits in outputs.logits:  # corrected: the mean prediction has the assumed shares
            shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            assert shares.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.01)
        shares = np.exp(tested.logits[-1]) / np.exp(tested.logits[-1]).sum(axis=1, keepdims=True)
        assert shares.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.1), "the same distribution, the same correction"


def test_the_source_model_is_the_same_for_all_methods_with_a_plain_head(pheme, tmp_path):
    tasks = rehearsals.plan("pheme", "bigcn", targets=["ferguson"], methods=["fixmatch", "dann"], seeds=[0], overrides=TINY)
    tasks = [task for task in tasks if task.factor in (0.0, 1.0) and task.final and task.work.method != "mme"]
    tasks = [task for task in tasks if isinstance(task.work, SourceTask) or task.work.prior == "uniform"]
    summary = rehearsals.run(tasks, rehearsals.Rehearser(pheme, "bigcn", "cpu", tmp_path))
    assert summary.done == 2 and not summary.failed
    one, other = (entry.record["candidates"][0] for entry in rehearsals.read(tmp_path, is_result))
    assert one == other


def test_adapt_sees_no_labels_of_the_domain_and_no_test_texts(pheme, tmp_path, monkeypatch):
    seen = []
    original = trials.adapt

    def watched(source, target, **given):
        seen.append((source, target))
        assert given["target_labeled"] is None
        return original(source, target, **given)

    monkeypatch.setattr(trials, "adapt", watched)
    tasks = rehearsals.plan("pheme", "bigcn", targets=["ferguson"], methods=["fixmatch"], seeds=[0], overrides=TINY)
    domains = ("ferguson", "sydneysiege")
    tasks = [
        task for domain in domains for task in tasks
        if task.work.domain == domain and task.factor in (0.0, 1.0) and not getattr(task.work, "rare", "")
    ]  # fmt: skip
    assert not rehearsals.run(tasks, rehearsals.Rehearser(pheme, "bigcn", "cpu", tmp_path)).failed
    division = splits.divide(splits.read("pheme", pheme, "ferguson", "event"), 0)
    test = {tuple(node["text"] for node in thread["nodes"]) for thread in division.test}
    everything = set(DATASETS["pheme"].domains)
    for source, target in seen:
        (domain,) = target.domains
        assert not target.labeled and set(source.domains) == everything - {"ferguson", domain}
        if domain == "ferguson":
            assert len(target) == len(division.unlabeled)
        assert not test & {tuple(thread.texts) for corpus in (source, target) for thread in corpus.threads()}
    assert {target.domains[0] for _, target in seen} == set(domains)


def test_what_exists_is_not_run_again_and_what_fails_does_not_stop_the_rest(ran, monkeypatch):
    folder, tasks, _, rehearser = ran
    summary = rehearsals.run(tasks, rehearser)
    assert summary.done == 0 and summary.existed == sum(isinstance(task.work, Trial) for task in tasks)
    first, second = [task for task in tasks if isinstance(task.work, Trial)][:2]
    for task in (first, second):
        rehearsals.record_path(folder, task).unlink()
    original = trials.Work.run_trial

    def fails(work, trial, *given):
        if trial == first.work:
            raise ValueError("no such luck")
        return original(work, trial, *given)

    monkeypatch.setattr(trials.Work, "run_trial", fails)
    summary = rehearsals.run(tasks, rehearser)
    assert summary.done == 1 and [task for task, _ in summary.failed] == [first] and "no such luck" in summary.failed[0][1]
    assert "no such luck" in rehearsals.failure_path(folder, first).read_text()
    monkeypatch.undo()
    assert rehearsals.run(tasks, rehearser).done == 1 and not rehearsals.failure_path(folder, first).exists()


def test_without_its_source_model_a_trial_fails_at_once(ran, tmp_path, monkeypatch):
    _, tasks, _, rehearser = ran
    monkeypatch.setattr(trials.Work, "train_source", lambda *_: 1 / 0)
    moved = dataclasses.replace(rehearser, results=tmp_path, _works={})
    summary = rehearsals.run(tasks, moved)
    assert summary.done == 0 and {task for task, _ in summary.failed} == set(tasks)


def test_choose_takes_the_curves(ran):
    folder, _, _, _ = ran
    curves = [entry.curve() for entry in rehearsals.read(folder, is_result) if not entry.record["final"]]
    choice = choose([curve for curve in curves if not curve.rare])
    assert choice.configuration.method in ("fixmatch", "mme") and list(choice.gains) == ["sydneysiege"]


def test_the_command(pheme, tmp_path):
    def command(*words):
        given = ["reproduce", "rehearsal", "--dataset", "pheme", "--targets", "ferguson", "--variants", "dann", "--seeds", "0"]
        more = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
        return CliRunner().invoke(main.app, [*given, "--results", str(tmp_path), *more, *map(str, words)])

    told = command("--data", pheme, "--device", "cpu", "--limit-seconds", "0", "-q")
    assert told.exit_code == 0 and "0 trials run, 0 existed, 0 failed, 5 not started" in told.output
    told = command("--list")
    assert "missing pheme/bigcn/ferguson/final-dann-1-uniform-0" in told.output and "0 of 5 trials exist" in told.output
    assert "mtem data prepare pheme" in str(command().exception)
