"""What only the report shows: counted words, and texts as points."""

from __future__ import annotations

import types

import numpy as np
import pytest

from mtem.data.loading import load_corpus
from mtem.run import overview
from mtem.selection.criteria import CandidateOutputs


def corpus(texts):
    return load_corpus(texts, labeled=False, name="made up")


def test_words_are_counted_once_for_each_text(monkeypatch):
    monkeypatch.setattr(overview, "FEWEST_TEXTS", 2)
    source = corpus(["A good, GOOD novel!", "the novel's end", "x 42 don't"])
    table = overview.count_words(source, corpus(["a good blender", "the blender; blender-like", "don't"]))
    found = {row["word"]: (row["source"], row["target"]) for row in table.to_pylist()}
    assert found == {"good": (1, 1), "the": (1, 1), "blender": (0, 2), "don't": (1, 1)}
    assert table.schema.metadata == {b"source_texts": b"3", b"target_texts": b"3"}


def test_long_corpora_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr(overview, "MOST_TEXTS", 3)
    monkeypatch.setattr(overview, "FEWEST_TEXTS", 1)
    table = overview.count_words(corpus([f"text word{letter}" for letter in "abcdefghi"]), corpus(["other"]))
    assert set(table.column("word").to_pylist()) == {"text", "worda", "worde", "wordi", "other"}


@pytest.mark.parametrize(("count", "most", "wanted"), [(0, 5, []), (1, 5, [0]), (3, 5, [0, 1, 2]), (9, 3, [0, 4, 8])])
def test_spread_positions(count, most, wanted):
    assert overview.spread(count, most).tolist() == wanted


def outputs(features, logits):
    half = len(features) // 2
    return CandidateOutputs(logits[:half], np.zeros(half, dtype=int), logits[half:], features[:half], features[half:])


@pytest.fixture
def inputs():
    return types.SimpleNamespace(
        held_out_rows=np.arange(5), classes=("bad", "good"), domains=("books", "dvd"), domain_numbers=np.array([0, 0, 1, 1, 1]),
        labels=np.array([0, 1, 0, 1, 0]),
    )  # fmt: skip


def test_the_map_has_the_main_directions_and_does_not_flip(inputs):
    random = np.random.default_rng(0)
    features = random.normal(size=(10, 6)) * [9, 4, 1, 0.1, 0.1, 0.1]
    logits = random.normal(size=(10, 2))
    table = overview.draw_map(inputs, np.arange(100, 105), outputs(features, logits), outputs(-features, -logits))
    frame = table.to_pandas()
    _, _, directions = np.linalg.svd(features - features.mean(axis=0))
    projected = (features - features.mean(axis=0)) @ directions[:2].T
    for name, wanted in zip(("x", "y"), projected.T, strict=True):
        assert abs(np.corrcoef(frame[f"{name}_before"], wanted)[0, 1]) == pytest.approx(1)
        assert frame[f"{name}_after"].to_numpy() == pytest.approx(frame[f"{name}_before"].to_numpy(), abs=1e-6), (
            "its mirror image"
        )
    assert frame["position"].tolist() == [-1] * 5 + [100, 101, 102, 103, 104]
    assert frame["domain"].tolist() == ["books", "books", "dvd", "dvd", "dvd", *[""] * 5]
    assert frame["label"].tolist()[:3] == ["bad", "good", "bad"]
    assert (frame["prediction_before"] != frame["prediction_after"]).all()


@pytest.mark.parametrize("features", [np.zeros((10, 3)), np.full((10, 3), np.nan), np.full((10, 1), 1e30), np.ones((10, 1))])
def test_features_without_directions_are_points_all_the_same(inputs, features):
    logits = np.zeros((10, 2))
    frame = overview.draw_map(inputs, np.arange(5), outputs(features, logits), outputs(features, logits)).to_pandas()
    assert len(frame) == 10 and np.isfinite(frame[["x_before", "y_before", "x_after", "y_after"]]).all().all()
