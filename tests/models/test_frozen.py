"""A store of the frozen layers' output: parts of its corpus find their texts in it, and others do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mtem
from mtem.data.loading import load_corpus
from mtem.data.tokens import Tokens
from mtem.models import frozen
from mtem.models.frozen import FrozenTokens, frozen_tokens, keys_of, write_keys
from mtem.models.text import TextModel
from mtem.progress import Progress
from tests.conftest import make_texts
from tests.tolerance import assert_near

IDS = [[2, 5, 3], [2, 9, 8, 7, 3], [2, 3], [2, 6, 6, 3], [2, 5, 3]]


def lower_of(tokens):
    """A lower part whose output says which tokens it has seen; and how many rows it was given."""
    seen = []

    def lower(rows):
        seen.extend(rows)
        length = max(int(tokens.lengths[row]) for row in rows)
        out = torch.zeros(len(rows), length, 2)
        for line, row in enumerate(rows):
            ids = torch.from_numpy(tokens.ids(row).copy()).float()
            out[line, : len(ids)] = torch.stack([ids, ids.cumsum(0)], dim=1)
        return out

    return lower, seen


def kept(ids, path, store=None):
    tokens = Tokens.of_ids(ids)
    lower, seen = lower_of(tokens)
    return frozen_tokens(tokens, lower, 2, path, Progress(quiet=True), "frozen", store), seen


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store.npy"
    kept(IDS, path)
    write_keys(Tokens.of_ids(IDS), keys_of(path))
    return path


@pytest.mark.parametrize("rows", [[3, 1], [0], [4, 0, 2], [1, 1, 3], [0, 1, 2, 3, 4]])
def test_a_part_finds_its_texts_in_the_store(store, tmp_path, rows):
    part = [IDS[row] for row in rows]
    found, seen = kept(part, tmp_path / "part.npy", store)
    assert seen == [] and not (tmp_path / "part.npy").exists()
    own, seen = kept(part, tmp_path / "own.npy")
    assert len(seen) == len(rows) == len(found)
    for row in range(len(rows)):
        assert np.array_equal(found.hidden(row), own.hidden(row)) and np.array_equal(found.ids(row), own.ids(row))
        assert found.hidden(row)[:, 0].tolist() == part[row]


@pytest.mark.parametrize("missing", [[2, 5], [2, 5, 3, 3], [2, 5, 4], [5, 2, 3]])
def test_a_store_that_lacks_a_text_is_not_used(store, tmp_path, missing):
    found, seen = kept([IDS[1], missing], tmp_path / "part.npy", store)
    assert len(seen) == 2 and found.hidden(1)[:, 0].tolist() == missing and found.hidden(0)[:, 0].tolist() == IDS[1]


@pytest.mark.parametrize("gone", ["store", "keys"])
def test_a_store_that_is_not_whole_is_not_used(store, tmp_path, gone):
    (store if gone == "store" else keys_of(store)).unlink()
    found, seen = kept(IDS[:2], tmp_path / "part.npy", store)
    assert len(seen) == 2 and found.hidden(1)[:, 0].tolist() == IDS[1]


def test_keys_of_a_store():
    from pathlib import Path

    assert keys_of(Path("a/frozen.npy")) == Path("a/frozen.keys.npy")


@pytest.mark.parametrize("layers", [0, 2])
def test_a_model_stores_what_parts_of_the_corpus_need(encoder, tmp_path, layers):
    model = TextModel.create(encoder, ["bad", "good"], max_length=16)
    model.freeze(layers)
    texts = [text for text, _ in make_texts(30, 1)]
    corpus = load_corpus(texts, labeled=False)
    given = (Progress(quiet=True), "frozen", 1e9)
    assert model.store_lower(model.encode(corpus), tmp_path / "store.npy", *given) == (layers > 0)
    assert [path.name for path in sorted(tmp_path.iterdir())] == (["store-2.keys.npy", "store-2.npy"] if layers else [])
    part = model.encode(corpus.select([7, 3, 21]))
    stored = model.keep_lower(part, tmp_path / "part.npy", *given, tmp_path / "store.npy")
    assert not (tmp_path / "part.npy").exists()
    if not layers:
        return
    own = model.keep_lower(part, tmp_path / "own.npy", *given)
    assert isinstance(stored, FrozenTokens) and isinstance(own, FrozenTokens)
    for row in range(3):
        assert_near(stored.hidden(row), own.hidden(row))
    with torch.no_grad():
        model.eval()
        assert_near(model(model.collate(stored, [0, 1, 2])), model(model.collate(own, [0, 1, 2])))
    assert not model.store_lower(model.encode(corpus), tmp_path / "large.npy", Progress(quiet=True), "frozen", 10.0), "too large"
    assert not list(tmp_path.glob("large*"))
    model.freeze(1)
    model.keep_lower(part, tmp_path / "less.npy", *given, tmp_path / "store.npy")
    assert (tmp_path / "less.npy").exists(), "of another depth"


def test_a_run_with_a_store_gives_the_same_model(tiny, encoder, tmp_path, monkeypatch):
    given = {**tiny, "frozen_layers": 2, "method": "fixmatch", "left_out_models": 0, "source_epochs": 1}
    plain = mtem.adapt(**given)
    model = TextModel.create(encoder, ["bad", "good"], max_length=16)
    model.freeze(2)
    corpus = load_corpus([*tiny["source"], tiny["target"]], labeled=False)
    model.store_lower(model.encode(corpus), tmp_path / "store.npy", Progress(quiet=True), "frozen", 1e9)
    monkeypatch.setattr(frozen, "_write", lambda *_: pytest.fail("all texts are in the store"))
    stored = mtem.adapt(**given, frozen_store=tmp_path / "store.npy")
    texts = [text for text, _ in make_texts(20, 8)]
    assert_near(stored.predict_proba(texts), plain.predict_proba(texts), 1000, dtype=torch.float32)
