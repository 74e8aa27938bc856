"""Models that have not seen what they are tested on: who is left out, that nobody sees it, and that nothing else changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.run.pipeline import Run
from mtem.selection import left_out
from mtem.selection.left_out import DOMAIN, FOLD, find_parts
from mtem.training.streams import Stream
from tests.bench import stopped_after
from tests.conftest import make_texts


def parts_of(sizes, few=0, classes=2, most=4, texts=1000, held=0.5, seed=0):
    """Of domains of these sizes, every other text held out, and `few` labeled target texts."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    count = len(numbers)
    labels = np.arange(count + few) % classes
    rows = np.arange(count)
    held_rows = rows[rows % round(1 / held) == 0]
    train = np.concatenate([np.setdiff1d(rows, held_rows), np.arange(count, count + few)])
    names = [f"d{number}" for number in range(len(sizes))]
    found = find_parts(
        names, numbers, labels, train, held_rows, np.arange(count, count + few), most=most, texts=texts, seed=seed
    )  # fmt: skip
    return found, numbers, labels


def test_each_source_domain_is_left_out_once():
    parts, numbers, _ = parts_of((100, 300, 200))
    assert [(part.kind, part.name) for part in parts] == [(DOMAIN, "d1"), (DOMAIN, "d2"), (DOMAIN, "d0")]
    for part, number in zip(parts, (1, 2, 0), strict=True):
        assert set(numbers[part.test_rows]) == {number} and len(part.test_rows) == (numbers == number).sum()
        assert set(numbers[part.train_rows]) == set(numbers[part.held_out_rows]) == {0, 1, 2} - {number}
        assert not np.intersect1d(part.train_rows, part.held_out_rows).size


def test_the_largest_domains_are_left_out_and_tested_on_a_sample():
    parts, _, _ = parts_of((100, 300, 200, 50, 70), most=3, texts=80)
    assert [part.name for part in parts] == ["d1", "d2", "d0"] and [len(part.test_rows) for part in parts] == [80] * 3
    assert parts_of((100, 300), most=0)[0] == []


def test_what_says_nothing_is_not_tried():
    assert parts_of((400,))[0] == [], "one domain: nothing is left to train on"
    assert [part.name for part in parts_of((400, 29, 300))[0]] == ["d0", "d2"], "too small to test"
    numbers, labels = np.repeat([0, 1], 100), np.repeat([0, 1], 100)  # one class in each domain
    rows = np.arange(200)
    found = find_parts(["a", "b"], numbers, labels, rows[::2], rows[1::2], rows[:0], most=4, texts=100, seed=0)
    assert found == []


def test_labeled_target_texts_are_cross_fitted():
    parts, numbers, labels = parts_of((200, 200), few=50)
    few = np.arange(400, 450)
    assert [part.kind for part in parts] == [FOLD] * 4
    assert sorted(np.concatenate([part.test_rows for part in parts])) == few.tolist()
    for part in parts:
        assert not np.intersect1d(part.test_rows, part.train_rows).size
        assert sorted(np.concatenate([part.test_rows, np.intersect1d(part.train_rows, few)])) == few.tolist()
        assert abs((labels[part.test_rows] == 0).mean() - 0.5) < 0.1, "every part has its share of both classes"
        assert set(numbers[part.held_out_rows]) == {0, 1}
    assert {part.kind for part in parts_of((200, 200), few=20)[0]} == {DOMAIN}, "too few to test on"


# ---------------------------------------------------------------------- in a run


@pytest.fixture
def task(tiny):
    """Two source domains large enough to be left out."""
    pairs = {name: make_texts(160, seed, shift) for name, seed, shift in (("books", 1, 0.0), ("dvd", 2, 0.3))}
    source = {name: ([text for text, _ in rows], [label for _, label in rows]) for name, rows in pairs.items()}
    return {**tiny, "source": source, "validation_share": 0.5, "source_epochs": 1}


def few_texts(count=40):
    rows = make_texts(count, 9, 0.7)
    return [text for text, _ in rows], [label for _, label in rows]


def test_a_run_leaves_each_domain_out_and_is_otherwise_the_same(task, tmp_path):
    adapted = mtem.adapt(**task, output=tmp_path / "run")
    alone = mtem.adapt(**task, output=tmp_path / "alone", left_out_models=0)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "alone"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    about = adapted.record["left_out"]
    assert [(each["kind"], each["name"], each["texts"]) for each in about] == [(DOMAIN, "books", 160), (DOMAIN, "dvd", 160)]
    estimates = [run.record["estimate"]["after"] for run in (adapted, alone)]
    assert [each["left_out"] for each in estimates] == [2, 0] and estimates[0]["domain_error"] is not None
    assert estimates[0]["accuracy"] == pytest.approx(estimates[1]["accuracy"]) and estimates[1]["domain_error"] is None
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["left-out.safetensors", "source.safetensors"]
    again = mtem.load(tmp_path / "run").left_out()
    for one, other in zip(adapted.left_out(), again, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize("few", [False, True])
def test_no_step_sees_what_is_left_out(task, monkeypatch, few):
    trained: dict[int, set[int]] = {}
    rows_of, model_of = Stream.rows, Run.left_out_model

    def rows(self, step):
        found = rows_of(self, step)
        if watched:
            trained.setdefault(watched[-1], set()).update(found.tolist())
        return found

    watched: list[int] = []
    parts = []

    def model(self, part):
        watched.append(len(parts))
        parts.append(part)
        try:
            return model_of(self, part)
        finally:
            watched.clear()

    monkeypatch.setattr(Stream, "rows", rows)
    monkeypatch.setattr(Run, "left_out_model", model)
    mtem.adapt(**task, **({"target_labeled": few_texts()} if few else {}))
    assert [part.kind for part in parts] == ([FOLD] * 4 if few else [DOMAIN] * 2)
    for number, part in enumerate(parts):
        assert trained[number] == set(part.train_rows.tolist()), "all that it may see in one pass"
        assert not trained[number] & {*part.test_rows.tolist(), *part.held_out_rows.tolist()}


def test_a_run_stopped_between_two_of_them_goes_on_there(task, tmp_path, monkeypatch):
    whole = mtem.adapt(**task, output=tmp_path / "whole")
    made, model_of = [], Run.left_out_model

    def model(self, part):
        if len(made) == 1 and not resumed:
            raise KeyboardInterrupt
        made.append(part.name)
        return model_of(self, part)

    resumed = False
    monkeypatch.setattr(Run, "left_out_model", model)
    with pytest.raises(KeyboardInterrupt):
        mtem.adapt(**task, output=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    resumed = True
    adapted = mtem.adapt(**task, output=tmp_path / "run", resume=True)
    assert made == ["books", "dvd"], "what was there is not trained again"
    for one, other in zip(whole.left_out(), adapted.left_out(), strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
    assert adapted.record["estimate"] == whole.record["estimate"]


def test_they_come_with_the_source_model_if_the_data_are_the_same(task, monkeypatch):
    source = mtem.adapt(**task, method="source-only")
    monkeypatch.setattr(Run, "left_out_model", lambda *_: pytest.fail("trained again"))
    adapted = mtem.adapt(**task, source_model=source)
    assert adapted.record["estimate"]["after"]["left_out"] == 2
    other = {**task, "source": {**task["source"], "dvd": tuple(values[:150] for values in task["source"]["dvd"])}}
    assert mtem.adapt(**other, source_model=source).record["estimate"]["after"]["left_out"] == 0


def test_every_method_sees_the_same_labeled_target_texts(task, monkeypatch):
    """In a step, half of the labeled batch; where a method asks for more of them, just these."""
    seen = []
    prepare = Run.prepare

    def prepared(self):
        prepare(self)
        for step in range(7):
            batch = self.inputs.source_stream.rows(step)
            own = set(batch[np.isin(batch, self.inputs.target_labeled_rows)].tolist())
            seen.append((len(own), len(batch), own == set(self.inputs.target_labeled_stream.rows(step).tolist())))

    monkeypatch.setattr(Run, "prepare", prepared)
    mtem.adapt(**task, target_labeled=few_texts(30), method="source-only", left_out_models=0)
    assert set(seen) == {(5, 10, True)}
    seen.clear()
    mtem.adapt(**task, target_labeled=few_texts(30), method="source-only", left_out_models=0, target_labeled_share=0.2)
    assert set(seen) == {(2, 10, True)}


def test_stopping_and_resuming_inside_one_ends_alike(task, tmp_path):
    """Not resumed from its middle, but begun anew; all others are kept."""
    whole = mtem.adapt(**task, output=tmp_path / "whole")
    with stopped_after(3, "without dvd"):
        mtem.adapt(**task, output=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "left-out-0.safetensors").is_file()
    adapted = mtem.adapt(**task, output=tmp_path / "run", resume=True)
    assert adapted.record["estimate"] == whole.record["estimate"] and len(left_out.to_tensors(adapted.left_out())) == 10
