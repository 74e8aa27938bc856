"""Trials: no label of the domain that stands for the target reaches the training; what is written is what is read."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import mtem
from mtem.data.loading import load_corpus
from mtem.rehearsal import trials
from mtem.rehearsal.domains import find_domains
from mtem.rehearsal.plan import has_own_head, make_plan
from mtem.rehearsal.trials import SourceTask, Trial, TrialOutputs, Work
from tests.conftest import make_texts, write_jsonl
from tests.rehearsed import SMALL

QUICK = {**SMALL, "source_epochs": 0.5}


def work_of(folder, encoder, toys):
    """Three domains, of which only `toys` is large enough to stand for the target."""
    folder.mkdir()
    files = [write_jsonl(folder / f"{name}.jsonl", make_texts(98, number)) for number, name in ((1, "books"), (2, "dvd"))]
    files.append(write_jsonl(folder / "toys.jsonl", toys))
    corpus = load_corpus(files, labeled=True)
    plan = make_plan(("fixmatch", "mtem", "mme"), str(encoder), "recommended", [3e-3], None, None, QUICK)
    domains = find_domains(corpus, lambda: pytest.fail("not one domain"), 0)
    assert [domains.names[number] for number in domains.rehearsed] == ["toys"]
    return Work(corpus, domains, plan, folder / "out")


def shuffled(rows, seed=0):
    """The same texts with the labels of others: as many of each class."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return [(text, rows[other][1]) for (text, _), other in zip(rows, order, strict=True)]


@pytest.fixture(scope="module")
def pair(encoder, tmp_path_factory):
    """The same work with the labels of `toys` as they are, and with permuted ones."""
    place, toys = tmp_path_factory.mktemp("pair"), make_texts(110, 3, 0.5)
    return work_of(place / "true", encoder, toys), work_of(place / "permuted", encoder, shuffled(toys))


@pytest.mark.parametrize(
    ("method", "prior"), [("fixmatch", "none"), ("fixmatch", "estimated"), ("mtem", "none"), ("mme", "source")]
)
def test_labels_of_the_rehearsed_domain_do_not_reach_the_training(pair, method, prior):
    trial = Trial("toys", method, 3e-3, prior)
    found = []
    for work in pair:
        if not work.is_done(work.source_task(trial)):
            work(work.source_task(trial))
        found.append(work.run_trial(trial))
    one, other = found
    assert len(one.labels) == 110 and not np.array_equal(one.labels, other.labels), "the labels are others"
    for name in ("logits", "held_out_logits", "infomax", "held_out_labels", "epochs"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.assumed_shares is None) == (prior == "none")
    if one.assumed_shares is not None:
        assert np.array_equal(one.assumed_shares, other.assumed_shares)
    assert not np.array_equal(one.logits[0], one.logits[-1]), "it was trained"
    scores = [(outputs.logits.argmax(axis=2) == outputs.labels).mean(axis=1) for outputs in found]
    assert not np.allclose(*scores), "the labels score"


def test_labels_of_the_other_domains_do_reach_the_training(pair, tmp_path):
    """Else the test above could not fail."""
    work, trial = pair[0], Trial("toys", "fixmatch", 3e-3)
    books = [(text, {"bad": "good", "good": "bad"}[label]) for text, label in make_texts(98, 1)]
    files = [write_jsonl(tmp_path / "books.jsonl", books), *(work.folder.parent / f"{name}.jsonl" for name in ("dvd", "toys"))]
    other = dataclasses.replace(work, corpus=load_corpus(files, labeled=True), folder=tmp_path / "other")
    logits = []
    for each in (work, other):
        if not each.is_done(each.source_task(trial)):
            each(each.source_task(trial))
        logits.append(each.run_trial(trial).logits)
    assert not np.allclose(*logits, atol=1e-2)


def test_what_the_runs_of_a_trial_are_given(pair, monkeypatch):
    work, seen = pair[0], []
    monkeypatch.setattr(trials, "adapt", lambda source, target, **given: seen.append((source, target, given)) or 1 / 0)
    for task in (SourceTask("toys"), Trial("toys", "fixmatch", 3e-3), Trial("toys", "fixmatch", 3e-3, "none", "bad")):
        if isinstance(task, Trial):
            monkeypatch.setattr(trials.Adapted, "load", lambda path: None)
        with pytest.raises(ZeroDivisionError):
            work(task)
    for source, target, given in seen:
        assert not target.labeled and source.domains == ["books", "dvd"] and len(source) == 196
        assert not set(target.texts()) & set(source.texts()) and given["target_labeled"] is None
        assert given["left_out_models"] == 0
    assert [len(target) for _, target, _ in seen] == [110, 110, 73]
    assert seen[0][2]["steps"] == 0 and seen[1][2]["epochs"] == 2.0 and seen[1][2]["evaluations"] == 2


def test_labeled_target_texts_are_neither_adapted_to_nor_scored(pair, monkeypatch, tmp_path):
    given = []
    original = trials.adapt

    def record(source, target, **options):
        given.append((len(source), list(target.texts()), options["target_labeled"]))
        return original(source, target, **options)

    monkeypatch.setattr(trials, "adapt", record)
    work = dataclasses.replace(pair[0], folder=tmp_path, labeled=20)
    trial = Trial("toys", "fixmatch", 3e-3)
    work(work.source_task(trial))
    outputs = work.run_trial(trial)
    assert len(outputs.labels) == 90 and len(given) == 2
    labels = dict(make_texts(110, 3, 0.5))
    for size, target, labeled in given:
        texts = list(labeled.texts())
        assert size == 2 * 98 and (len(target), len(texts)) == (90, 20) and sorted([*target, *texts]) == sorted(labels)
        assert [labels[text] for text in texts] == [labeled.classes[number] for number in labeled.label_numbers(labeled.classes)]
    assert dataclasses.replace(work, labeled=0).target_labeled("toys") is None


def test_large_domains_are_sampled(pair, monkeypatch):
    monkeypatch.setattr(trials, "MOST_TEXTS", 40)
    rows, labels = pair[0].pool("toys")
    assert len(rows) == len(np.unique(rows)) == 40 and set(rows) <= set(range(196, 306))
    assert np.array_equal(labels, pair[0].corpus.label_numbers(("bad", "good"))[rows])
    assert np.array_equal(rows, pair[0].pool("toys")[0]) and rows.tolist() != list(range(196, 236))


def test_candidates_come_after_every_pass_and_the_labels_belong_to_their_texts(pair, monkeypatch):
    work, trial = pair[0], Trial("toys", "fixmatch", 3e-3)
    if not work.is_done(work.source_task(trial)):
        work(work.source_task(trial))
    whole = work.run_trial(trial)
    monkeypatch.setattr(trials, "SCORED_TEXTS", 50)
    found = work.run_trial(trial)
    assert found.epochs.tolist() == [0.0, 1.0, 2.0] and found.logits.shape == (3, 50, 2) and len(found.labels) == 50
    by_logits = {tuple(row.round(4)): label for row, label in zip(whole.logits[0], whole.labels, strict=True)}
    near = [by_logits.get(tuple(row.round(4))) for row in found.logits[0]]
    known = [(one, other) for one, other in zip(near, found.labels, strict=True) if one is not None]
    assert len(known) > 40 and all(one == other for one, other in known)


def test_a_written_trial_is_read_as_it_was(tmp_path):
    draw = np.random.default_rng(0)
    trial = Trial("books", "mtem", 1e-3, "uniform", "bad")
    outputs = TrialOutputs(
        trial, epochs=np.array([0.0, 1.0]), infomax=np.array([0.1, -1e9]), logits=draw.normal(size=(2, 5, 3)).astype(np.float32),
        labels=np.array([0, 1, 2, 0, 1]), held_out_logits=draw.normal(size=(2, 4, 3)).astype(np.float32),
        held_out_labels=np.array([0, 1, 2, 2]), assumed_shares=np.array([0.2, 0.3, 0.5]), seconds=1.5, machine="a processor",
    )  # fmt: skip
    for written in (outputs, dataclasses.replace(outputs, assumed_shares=None)):
        written.write(tmp_path)
        found = TrialOutputs.read(tmp_path, trial)
        for field in dataclasses.fields(TrialOutputs):
            one, other = getattr(written, field.name), getattr(found, field.name)
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, field.name
    assert json.loads((tmp_path / f"{trial.name}.json").read_text())["trial"] == dataclasses.asdict(trial)


def test_a_trial_is_done_when_its_record_is_there(pair, tmp_path):
    work, trial = dataclasses.replace(pair[0], folder=tmp_path), Trial("toys", "mtem", 1e-3)
    folder = work.trial_folder("toys")
    folder.mkdir(parents=True)
    (folder / f"{trial.name}.safetensors").write_bytes(b"")
    assert not work.is_done(trial), "the arrays come first"
    (folder / f"{trial.name}.json").write_text("{}")
    assert work.is_done(trial) and not work.is_done(dataclasses.replace(trial, learning_rate=2e-3))
    longer = dataclasses.replace(work, plan=dataclasses.replace(work.plan, epochs=3))
    assert not longer.is_done(trial), "of another length"


def test_methods_that_change_the_head():
    assert has_own_head("mme") and not any(map(has_own_head, ("mtem", "fixmatch", "dann", "cst", "biat")))


def test_runs_inside_a_trial_say_nothing(pair, caplog):
    with caplog.at_level("INFO", logger="mtem"), trials.quiet_logging():
        mtem.run.adapt.logger.warning("inside")
    assert "inside" not in caplog.text
