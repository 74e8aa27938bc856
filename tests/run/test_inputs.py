"""The texts of a run: which are trained on, which are held out, and which are kept for the outer loop."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import mtem
from mtem.data.corpus import Corpus
from mtem.data.loading import load_corpus
from mtem.data.splits import hold_out
from mtem.errors import RequestError
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run import pipeline
from mtem.run.inputs import RunInputs
from mtem.selection import left_out
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from tests.bench import stopped_after
from tests.conftest import make_texts


def corpus(count, seed, domain="books"):
    rows = [(f"{text} {domain} {number}", label) for number, (text, label) in enumerate(make_texts(count, seed))]
    return load_corpus(([text for text, _ in rows], [label for _, label in rows]), labeled=True, domain=domain)


def inputs(encoder, source, labeled=None, **settings):
    model = TextModel.create(encoder, source.classes, max_length=16)
    target = load_corpus([text for text, _ in make_texts(30, 9)], labeled=False)
    return RunInputs(model, TrainingSettings(batch_size=10, **settings), source, target, labeled)


@pytest.fixture
def source():
    """Two domains, and every text of the second twice."""
    twice = corpus(60, 2, "dvd")
    return Corpus.concatenate([corpus(100, 1), twice, twice])


def test_held_out_rows_do_not_depend_on_the_outer_ones(encoder, source):
    train, held_out = hold_out(source, source.classes, 0.2, 3)
    plain = inputs(encoder, source, validation_share=0.2, seed=3)
    assert np.array_equal(plain.train_rows, train) and np.array_equal(plain.held_out_rows, held_out)
    assert not len(plain.outer_rows)
    for share in (0.05, 0.1, 0.5):
        made, again = (inputs(encoder, source, validation_share=0.2, seed=3, outer_share=share) for _ in range(2))
        assert np.array_equal(made.held_out_rows, held_out) and np.array_equal(made.outer_rows, again.outer_rows)
        assert np.array_equal(np.sort(np.concatenate([made.train_rows, made.outer_rows])), train)
    others = inputs(encoder, source, validation_share=0.2, seed=4, outer_share=0.5)
    assert not np.array_equal(others.outer_rows, made.outer_rows)


def test_outer_rows_have_their_share_of_domains_and_classes_and_no_text_of_the_others(encoder, source):
    made = inputs(encoder, source, outer_share=0.2)
    texts = list(source.texts())
    parts = [{texts[row] for row in rows} for rows in (made.train_rows, made.held_out_rows, made.outer_rows)]
    assert sum(map(len, parts)) == len(set(texts)) == 160
    rows = made.outer_rows
    kinds = np.bincount(2 * source.domain_numbers()[rows] + made.labels[rows])
    assert np.abs(kinds - [10, 10, 12, 12]).max() <= 3, "of 100 and 120 rows"


def test_labeled_target_texts_are_trained_on(encoder, source):
    labeled = corpus(40, 5, "kitchen")
    made = inputs(encoder, source, labeled, outer_share=0.5)
    assert set(made.target_labeled_rows) <= set(made.train_rows) and made.outer_rows.max() < len(source)


def test_batches_have_the_rows_of_their_part_alone(encoder, source):
    made = inputs(encoder, source, outer_share=0.2)
    made.encode(Progress(quiet=True))
    for stream, rows in ((made.source_stream, made.train_rows), (made.outer_stream, made.outer_rows)):
        assert sorted(row for step in range(stream.per_epoch) for row in stream.rows(step)) == sorted(rows)
    batch = made.outer_stream(0)
    assert np.array_equal(batch.labels.numpy(), made.labels[batch.rows.numpy()])
    plain = inputs(encoder, source)
    plain.encode(Progress(quiet=True))
    assert plain.outer_stream is None


def test_too_few_texts_are_refused(encoder):
    few = load_corpus((["one", "two", "three", "four"], ["bad", "good", "bad", "good"]), labeled=True)
    assert not len(inputs(encoder, few).outer_rows)
    with pytest.raises(RequestError, match=r"no texts could be kept for outer_share=0\.1.*outer_share=0"):
        inputs(encoder, few, outer_share=0.1)
    with pytest.raises(RequestError, match=r"outer_share=0\.5: with validation_share=0\.5 no texts are left"):
        inputs(encoder, corpus(40, 1), outer_share=0.5, validation_share=0.5)


# ---------------------------------------------------------------------- in a run


@pytest.fixture
def seen(monkeypatch):
    """By stage, the rows of all batches that weights are trained on; and the inputs of the runs."""
    rows, made = {}, []

    def noted(trainer, number, source, target, step=Trainer._step):
        rows.setdefault(trainer.name, set()).update(source.rows.tolist())
        return step(trainer, number, source, target)

    prepare = pipeline.Run.prepare
    monkeypatch.setattr(pipeline.Run, "prepare", lambda run: made.append(run.inputs) or prepare(run))
    monkeypatch.setattr(Trainer, "_step", noted)
    return rows, made


def test_no_stage_trains_on_outer_texts(tiny, seen, monkeypatch):
    monkeypatch.setattr(left_out, "FEWEST", 5)
    rows, made = seen
    adapted = mtem.adapt(**{**tiny, "epochs": 3}, outer_share=0.2, validation_share=0.3, left_out_models=2)
    (found,) = made
    assert set(rows) == {"source", "adapt", "without books", "without dvd"}
    assert rows["source"] == rows["adapt"] == set(found.train_rows.tolist())
    for stage in rows.values():
        assert not stage & {*found.outer_rows.tolist(), *found.held_out_rows.tolist()}
    assert adapted.record["texts"]["source_outer"] == len(found.outer_rows) == 24


@pytest.mark.parametrize("changes", [{}, {"index_mode": "shared"}, {"frozen_layers": 1}, {"balance_target": True}])
def test_a_stopped_run_resumes_to_the_same_indexes(tiny, tmp_path, changes):
    asked = {**tiny, "preset": "learned", "outer_share": 0.2, "threshold": 0.0, "steps": 14, "checkpoint_seconds": 0.0, **changes}
    whole = mtem.adapt(**asked, output=tmp_path / "whole")
    with stopped_after(5):
        mtem.adapt(**asked, output=tmp_path / "cut")
    cut = mtem.adapt(**asked, output=tmp_path / "cut", resume=True)
    assert whole.indexes.equals(cut.indexes) and whole.indexes["index"].nunique() > 1
    with pytest.raises(RequestError, match=r"setting outer_share was 0\.2 and is now 0\.1"):
        mtem.adapt(**{**asked, "outer_share": 0.1}, output=tmp_path / "cut", resume=True)


def test_a_source_model_of_the_same_division_fits(tiny, caplog):
    asked = {**tiny, "outer_share": 0.2, "left_out_models": 0}
    whole = mtem.adapt(**asked, preset="learned")
    with caplog.at_level(logging.WARNING):
        begun = mtem.adapt(**asked, preset="learned", source_model=mtem.adapt(**asked, method="source-only"))
        assert whole.indexes.equals(begun.indexes) and "outer_share" not in caplog.text
        other = mtem.adapt(**{**asked, "outer_share": 0.0}, method="source-only")
        mtem.adapt(**asked, source_model=other)
    assert "was trained with outer_share=0.0" in caplog.text and "train one with outer_share=0.2" in caplog.text


@pytest.mark.parametrize("counts", [(24, 6), (20, 9, 1), (29, 1), (15, 15)])
def test_balanced_batches_have_as_many_rows_of_each_group(encoder, source, counts):
    made = inputs(encoder, source)
    made.encode(Progress(quiet=True))
    plain = made.target_stream
    groups = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)) * 2, counts))
    stream = Stream(plain.model, plain.tokens, np.arange(30), None, 10, 1, groups=groups)
    assert stream.per_epoch == plain.per_epoch == 3
    size, seen = 10 // len(counts), np.zeros(30, dtype=int)
    for step in range(200):
        rows = stream.rows(step)
        assert len(set(rows)) == len(rows)
        present = np.bincount(groups[rows] // 2, minlength=len(counts))
        assert all(min(count, size) <= number <= min(count, size + 1) for count, number in zip(counts, present, strict=True))
        seen[rows] += 1
    for number, count in enumerate(counts):
        of_group = seen[groups == 2 * number]
        assert of_group.min() >= 0.7 * of_group.mean(), f"some of the {count} rows are hardly seen"


def test_with_one_group_or_more_groups_than_a_batch_has_rows_batches_are_the_usual_ones(encoder, source):
    made = inputs(encoder, source)
    made.encode(Progress(quiet=True))
    plain = made.target_stream
    for groups in (np.zeros(30), np.arange(30)):
        stream = Stream(plain.model, plain.tokens, np.arange(30), None, 10, 1, groups=groups)
        assert all(np.array_equal(stream.rows(step), plain.rows(step)) for step in range(7))


def test_balance_target_follows_the_predictions_of_the_source_model(encoder, source, monkeypatch):
    target = [text for text, label in make_texts(200, 9)]
    model = mtem.adapt(source, target, model=encoder, method="source-only", max_length=16, source_epochs=3.0, left_out_models=0)
    predicted = np.array([model.classes.index(label) for label in model.predict(target)])
    few, many = np.flatnonzero(predicted == 0), np.flatnonzero(predicted == 1)
    kept = np.sort(np.concatenate([few[:8], many[:64]]))
    drawn = []
    original = Stream.__call__
    monkeypatch.setattr(Stream, "__call__", lambda self, step: drawn.append((self, step)) or original(self, step))
    mtem.adapt(
        source, [target[row] for row in kept], model=encoder, source_model=model, method="fixmatch", max_length=16, steps=6,
        batch_size=10, balance_target=True, left_out_models=0,
    )  # fmt: skip
    batches = [stream.rows(step) for stream, step in drawn if stream.labels is None]
    assert len(batches) == 6
    for rows in batches:
        assert np.bincount(predicted[kept[rows]], minlength=2).tolist() == [5, 5]
