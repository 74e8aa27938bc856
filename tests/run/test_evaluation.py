"""What 'mtem evaluate' keeps for the report."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

import mtem
from mtem.data.loading import load_corpus
from mtem.progress import Progress
from mtem.run import evaluation
from tests.conftest import make_texts


@pytest.fixture(scope="module")
def run(tmp_path_factory, encoder):
    pairs = make_texts(80, 1, 0.8)
    path = tmp_path_factory.mktemp("evaluated") / "run"
    mtem.adapt(
        tuple(map(list, zip(*pairs, strict=True))), [text for text, _ in make_texts(40, 2, 0.8)], model=encoder, output=path,
        steps=2, source_epochs=1, left_out_models=0, max_length=16, batch_size=16, device="cpu",
    )  # fmt: skip
    return path


@pytest.fixture
def labeled():
    texts, labels = map(list, zip(*make_texts(30, 3, 0.8), strict=True))
    return load_corpus((texts, labels), labeled=True, name="labeled")


def evaluate(run, labeled, **options):
    return evaluation.evaluate(mtem.load(run), labeled, progress=Progress(quiet=True), **options)


def test_the_record_agrees_with_the_figures_and_with_predict(run, labeled):
    figures = evaluate(run, labeled, compare=True)
    record = json.loads((run / "evaluation.json").read_text())
    assert record["texts"] == [evaluation.text_digest(text) for text in labeled.texts()] and record["labels"] == labeled.labels()
    for name in ("before", "after"):
        right = np.mean([one == other for one, other in zip(record[name]["predictions"], record["labels"], strict=True)])
        assert figures[name].accuracy == pytest.approx(right) == record[name]["figures"]["accuracy"]
    loaded = mtem.load(run)
    assert record["after"]["predictions"] == loaded.predict(labeled.texts())
    assert record["after"]["confidence"] == pytest.approx(loaded.predict_proba(labeled.texts()).max(axis=1), abs=1e-4)
    assert evaluate(run, labeled, compare=False).keys() == {"after"}
    assert "before" not in json.loads((run / "evaluation.json").read_text()), "what was measured last"


def test_of_many_texts_some_are_kept(run, labeled, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_KEPT", 7)
    figures = evaluate(run, labeled, compare=False)
    record = json.loads((run / "evaluation.json").read_text())
    assert figures["after"].n == 30 and {len(record["texts"]), len(record["labels"]), len(record["after"]["confidence"])} == {7}


def test_a_run_that_may_only_be_read_is_measured_all_the_same(run, labeled, monkeypatch, caplog):
    def refuse(path, value):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mtem.run.directory.write_json", refuse)
    with caplog.at_level(logging.WARNING, "mtem"):
        assert evaluate(run, labeled, compare=False)["after"].n == 30
    assert "the report will not have these figures" in caplog.text
