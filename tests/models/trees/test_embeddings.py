"""Embeddings of posts: means over the tokens of an encoder, computed once and stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mtem.errors import RequestError
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.store import Store
from tests.conftest import make_encoder, make_texts
from tests.tolerance import assert_near


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return Embeddings.find(make_encoder(tmp_path_factory.mktemp("encoder")), 12)


def test_embeddings_are_means_over_tokens(tmp_path):
    place = make_encoder(tmp_path / "encoder")
    features = Embeddings.find(place, 12)
    texts = [text for text, _ in make_texts(20, 1)] + ["", "word1 " * 50]
    network, tokenizer = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    found = features.encode(texts)["values"]
    assert features.width == 32 and features.max_length == 12 and found.dtype == np.float16
    for text, row in zip(texts, found, strict=True):
        with torch.no_grad():
            hidden = network(**tokenizer(text, return_tensors="pt", truncation=True, max_length=12)).last_hidden_state[0]
        mean = hidden.mean(dim=0)
        assert_near(row, mean / mean.square().mean().sqrt(), 2)  # of float16


def counted(features, monkeypatch):
    seen = []
    computed = features._computed
    monkeypatch.setattr(features, "_computed", lambda texts, device: seen.extend(texts) or computed(texts, device))
    return seen


def test_a_text_is_computed_once(embeddings, tmp_path, monkeypatch):
    seen = counted(embeddings, monkeypatch)
    first = embeddings.encode(["word1", "word2", "word1"], None, embeddings.store(tmp_path))["values"]
    assert seen == ["word1", "word2"] and np.array_equal(first[0], first[2]) and not np.array_equal(first[0], first[1])
    store = embeddings.store(tmp_path)  # as in another process
    again = embeddings.encode(["word3", "word2", "word1"], None, store)["values"]
    assert seen == ["word1", "word2", "word3"] and np.array_equal(again[1:], first[1::-1])
    embeddings.encode(["word3", "word2"], None, store)
    assert len(seen) == 3, "what was added is there at once"
    other = Embeddings(embeddings.network, embeddings.tokenizer, 8)
    assert other.fingerprint != embeddings.fingerprint
    embeddings.encode(["word1"])
    assert len(seen) == 4, "without a store nothing is kept"


def test_other_weights_have_other_embeddings_and_another_store(embeddings, tmp_path):
    other = Embeddings.find(make_encoder(tmp_path / "other", seed=1), 12)
    same = Embeddings.find(make_encoder(tmp_path / "same"), 12)
    assert other.fingerprint != embeddings.fingerprint == same.fingerprint


def test_a_saved_encoder_is_the_same(embeddings, tmp_path):
    embeddings.save(tmp_path)
    loaded = Embeddings.load(tmp_path)
    assert loaded.fingerprint == embeddings.fingerprint and loaded.max_length == 12
    np.testing.assert_array_equal(loaded.encode(["good1 word2"])["values"], embeddings.encode(["good1 word2"])["values"])


def test_a_damaged_part_of_the_store_is_passed_over(tmp_path):
    store = Store(tmp_path / "s", 2)
    store.add(np.array([5, 3, 2**63 + 1], np.uint64), np.arange(6, dtype=np.float16).reshape(3, 2))
    store.add(np.array([9], np.uint64), np.array([[7, 8]], np.float16))
    values = np.zeros((4, 2), np.float16)
    wanted = np.array([2**63 + 1, 4, 9, 5], np.uint64)
    assert Store(tmp_path / "s", 2).fill(wanted, values).tolist() == [1]
    assert values.tolist() == [[4, 5], [0, 0], [7, 8], [0, 1]]
    largest = max((tmp_path / "s").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-3])
    assert Store(tmp_path / "s", 2).fill(wanted, values).tolist() == [0, 1, 3]
    assert Store(tmp_path / "empty", 2).fill(wanted, values).tolist() == [0, 1, 2, 3]


def test_encoders_that_cannot_be_loaded(tmp_path):
    with pytest.raises(RequestError, match="no such directory"):
        Embeddings.find(tmp_path / "none", 12)
    place = make_encoder(tmp_path / "pickled")
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(RequestError, match="no safetensors"):
        Embeddings.find(place, 12)
    place = make_encoder(tmp_path / "cut")
    (place / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(RequestError, match="could not be loaded"):
        Embeddings.find(place, 12)
