"""Whole runs with pretraining: the record, kill and resume, source models, left-out models, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.errors import RequestError
from mtem.run.pipeline import Run
from mtem.training import checkpoints
from mtem.training.pretraining import MaskedWords
from tests.bench import stopped_after
from tests.conftest import make_encoder, make_texts, write_jsonl
from tests.threads import make_threads, write_threads

MODEL = "model/model.safetensors"


SHORT = {"pretrain_epochs": 2, "pretrain_batch_size": 20, "pretrain_learning_rate": 1e-3, "left_out_models": 0, "log_every": 1}


@pytest.fixture
def pretrained(tiny) -> dict:
    """Arguments of an adaptation with a short pretraining: 200 texts in batches of 20, two passes."""
    return {**tiny, **SHORT}


def weights(path, name=MODEL):
    return load_file(path / name)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def history(path, stage):
    lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]


def test_a_run_pretrains_before_it_trains_the_source_model(pretrained, tmp_path):
    output = tmp_path / "run"
    adapted = mtem.adapt(**pretrained, output=output)
    record = adapted.record
    assert record["steps"]["pretrain"] == 20 and record["seconds"]["pretrain"] > 0
    assert record["resolved"]["pretrain_learning_rate"] == 1e-3
    lines = history(output, "pretrain")
    assert [line["step"] for line in lines] == list(range(1, 21)) and all(line["word_loss"] > 0 for line in lines)
    stages = [json.loads(line)["stage"] for line in (output / "history.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(stages)) == ["pretrain", "source", "evaluation", "adapt"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["source.safetensors"]
    assert not [name for name in weights(output) if "words." in name], "the head over the vocabulary is not part of the model"
    plain = mtem.adapt(**{**pretrained, "pretrain_epochs": 0}, output=tmp_path / "plain")
    assert plain.record["steps"]["pretrain"] == 0 and plain.record["resolved"]["pretrain_learning_rate"] is None
    assert not same(weights(output), weights(tmp_path / "plain"))


def test_all_texts_of_the_run_are_read_and_only_those(pretrained, reviews, monkeypatch):
    seen = []
    step = MaskedWords.step

    def watched(self, number, source, target, update):
        assert source.labels is None and target is None
        ids = source.inputs["input_ids"].numpy()
        seen.extend(tuple(row[row != 0]) for row in ids)
        return step(self, number, source, target, update)

    monkeypatch.setattr(MaskedWords, "step", watched)
    labeled = make_texts(6, 40, 0.7)
    few = ([text for text, _ in labeled], [label for _, label in labeled])
    adapted = mtem.adapt(**{**pretrained, "pretrain_epochs": 1}, target_labeled=few, method="source-only")
    files = [reviews[name].read_text().splitlines() for name in ("books", "dvd", "kitchen")]
    texts = [json.loads(line)["text"] for lines in files for line in lines] + few[0]
    wanted = [tuple(ids) for ids in adapted.model.tokenizer(texts, truncation=True, max_length=16)["input_ids"]]
    assert sorted(seen) == sorted(wanted), "held-out source texts and labeled target texts among them, the test set not"


@pytest.fixture(scope="module")
def larger(encoder, reviews, tmp_path_factory) -> dict:
    """Arguments with enough held-out source texts for left-out models: 240 texts in all, 24 steps of pretraining."""
    place = tmp_path_factory.mktemp("larger")
    source = [str(write_jsonl(place / f"{name}.jsonl", make_texts(80, seed))) for seed, name in enumerate(("books", "dvd"))]
    return {
        "source": source, "target": str(reviews["kitchen"]), "model": encoder, "frozen_layers": 0, "max_length": 16,
        "batch_size": 10, "source_epochs": 1, "epochs": 0.5, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
        "evaluations": 2, "criterion": "last", "validation_share": 0.4, **SHORT, "left_out_models": 2, "checkpoint_seconds": 0.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(larger, tmp_path_factory) -> mtem.Adapted:
    """The result of these arguments, never interrupted."""
    return mtem.adapt(**larger, output=tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("where", [("pretrain", 1), ("pretrain", 13), ("source", 0), ("source", 5), ("adapt", 2)])
def test_a_stopped_run_resumes_to_the_same_weights(larger, whole, tmp_path, caplog, where):
    stage, stop = where
    assert not whole.record["selection"]["kept_source_model"] and whole.record["steps"]["pretrain"] == 24
    with stopped_after(stop, stage), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))  # stopped before old ones are removed
        mtem.adapt(**larger, output=tmp_path / "cut")
    redone = []
    caplog.set_level(logging.INFO, logger="mtem")
    with pytest.MonkeyPatch.context() as patch:
        step = MaskedWords.step
        patch.setattr(MaskedWords, "step", lambda self, number, *rest: redone.append(number) or step(self, number, *rest))
        resumed = mtem.adapt(**larger, output=tmp_path / "cut", resume=True)
    assert redone == list(range(stop if stage == "pretrain" else 24, 24)), "what a checkpoint has is not done again"
    assert f"resuming: stage {stage}, {stop} steps done" in caplog.text, "the newest one is taken"
    assert same(weights(Path(whole.path)), weights(tmp_path / "cut"))
    left_out = [[entry.logits for entry in run.left_out()] for run in (whole, resumed)]
    assert len(left_out[0]) == 2 and np.array_equal(*left_out)
    for name in ("pretrain", "source", "adapt"):
        one, other = (history(path, name) for path in (Path(whole.path), tmp_path / "cut"))
        assert [line["step"] for line in one] == [line["step"] for line in other]


def test_a_run_in_memory_is_the_same_as_one_on_disk(pretrained, tmp_path):
    kept, written = mtem.adapt(**pretrained), mtem.adapt(**pretrained, output=tmp_path / "run")
    assert same(kept.source_weights(), written.source_weights())


def test_left_out_models_begin_from_the_pretrained_encoder(larger, monkeypatch):
    begun, left_out_model = [], Run.left_out_model

    def watched(run, part):
        begun.append({name: value.clone() for name, value in run.initial.items()})
        return left_out_model(run, part)

    monkeypatch.setattr(Run, "left_out_model", watched)
    untrained = mtem.adapt(**{**larger, "method": "source-only", "source_epochs": 0}).source_weights()
    assert not begun
    mtem.adapt(**{**larger, "method": "source-only"})
    assert len(begun) == 2
    for initial in begun:
        assert all(torch.equal(value, untrained[name]) for name, value in initial.items())


def test_a_run_from_a_source_model_does_not_pretrain_again(larger, whole, tmp_path, monkeypatch):
    """And adapts as the run that trained the source model did."""
    monkeypatch.setattr(MaskedWords, "__init__", None)
    begun = mtem.adapt(**larger, source_model=whole.path, output=tmp_path / "begun")
    assert begun.record["steps"]["pretrain"] == 0 and begun.record["seconds"]["pretrain"] == 0
    assert not whole.record["selection"]["kept_source_model"] and same(weights(Path(whole.path)), weights(tmp_path / "begun"))


def test_three_classes_and_another_encoder(tmp_path):
    encoder = make_encoder(tmp_path / "encoder", "distilbert")
    rows = [(text, f"çlass {number % 3}") for number, (text, _) in enumerate(make_texts(90, 5))]
    source = write_jsonl(tmp_path / "source.jsonl", rows)
    adapted = mtem.adapt(
        str(source), [text for text, _ in make_texts(30, 6)], model=encoder, max_length=16, batch_size=10, source_epochs=1,
        epochs=1, frozen_layers=0, pretrain_epochs=1, left_out_models=0,
    )  # fmt: skip
    assert adapted.classes == ("çlass 0", "çlass 1", "çlass 2") and adapted.record["steps"]["pretrain"] == 2
    assert adapted.record["resolved"]["pretrain_learning_rate"] == 2e-4
    assert set(adapted.predict(["good1 word2"])) <= set(adapted.classes)


@pytest.mark.parametrize("frozen", [2, -2, None], ids=["given", "counted from the top", "the default on a CPU"])
def test_frozen_layers_are_refused_before_anything_is_written(pretrained, tmp_path, frozen):
    with pytest.raises(RequestError, match=r"pretrain_epochs=2: .* layers are frozen .*set frozen_layers=0"):
        mtem.adapt(**{**pretrained, "frozen_layers": frozen}, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_threads_without_an_encoder_are_refused(tmp_path):
    told = r"pretrain_epochs=1: .*bigcn has one only with features=encoder; use that, or pretrain_epochs=0"
    with pytest.raises(RequestError, match=told):
        mtem.adapt(
            str(write_threads(tmp_path / "a.jsonl", make_threads(30, 1))),
            str(write_threads(tmp_path / "b.jsonl", make_threads(20, 2), labeled=False)), model="bigcn", pretrain_epochs=1,
            features="tfidf",
        )  # fmt: skip
