"""Features of posts: words, TF-IDF against scikit-learn's, word vectors from files, an encoder's embeddings and their store."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import AutoModel, AutoTokenizer

from mtem.errors import RequestError
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.features import Tfidf, Vectors, Vocabulary, read_vectors, words
from mtem.models.trees.store import Store
from tests.conftest import make_encoder, make_texts
from tests.tolerance import assert_near

TWEETS = [
    "@Anna Isn\u2019t THIS true?! See http://t.co/abC1 #Ferguson don't",
    "RT @x_1: ümläut 2014 www.a.b/c #a #b",
    "",
    "true true TRUE story, says @anna",
    "***",
]


def dense(arrays, width):
    matrix = np.zeros((len(arrays["counts"]), width))
    rows = np.repeat(np.arange(len(arrays["counts"])), arrays["counts"])
    np.add.at(matrix, (rows, arrays["words"]), arrays["weights"])
    return matrix


# ---------------------------------------------------------------------- words


def test_words_of_a_post():
    assert words(TWEETS[0]) == ["@", "isn't", "this", "true", "?", "!", "see", "url", "#", "ferguson", "don't"]
    assert words(TWEETS[1]) == ["rt", "@", "ümläut", "2014", "url", "#", "a", "#", "b"]
    assert words("") == words("*** ...") == []
    assert words("не правда? 嘘だ") == ["не", "правда", "?", "嘘だ"]


# ---------------------------------------------------------------------- TF-IDF


def test_tfidf_is_scikit_learns():
    texts = [text for text, _ in make_texts(200, 0)] + TWEETS
    features = Tfidf.fit(texts, 10_000)
    other = TfidfVectorizer(tokenizer=words, token_pattern=None, lowercase=False, vocabulary=features.vocabulary.names)
    assert_near(dense(features.encode(texts), features.width), other.fit_transform(texts).toarray(), dtype=torch.float32)
    assert set(features.vocabulary.names) == {word for text in texts for word in words(text)}


def test_the_most_frequent_words_are_kept_and_ties_go_by_the_alphabet():
    texts = ["b a", "b c", "b d d d d", "a e"]  # by texts, not by occurrences: d is in one
    assert Vocabulary.fit(texts, 2).names == ["b", "a"] and Vocabulary.fit(texts, 4).names == ["b", "a", "c", "d"]
    assert Vocabulary.fit(iter(reversed(texts)), 4).names == ["b", "a", "c", "d"]
    assert Vocabulary.fit(texts, 3, known={"c", "e"}).names == ["c", "e"]


def test_unknown_words_and_empty_posts():
    features = Tfidf.fit(["a b", "a c"], 2)
    found = features.encode(["zz zz", "", "a zz", "a"])
    assert found["counts"].tolist() == [0, 0, 1, 1] and found["weights"].tolist() == [1.0, 1.0]
    assert features.encode([])["words"].dtype == np.int32 and len(features.encode([])["counts"]) == 0
    with pytest.raises(RequestError, match="no word"):
        Tfidf.fit(["***", ""], 10)


def test_tfidf_is_kept_with_its_words(tmp_path):
    features = Tfidf.fit(["ä b", "b\u2028c 'd'", "e 嘘"], 5)
    features.save(tmp_path)
    loaded = Tfidf.load(tmp_path)
    assert loaded.vocabulary.names == features.vocabulary.names and loaded.fingerprint == features.fingerprint
    assert Tfidf.fit(["ä b", "b c"], 5).fingerprint != features.fingerprint
    np.testing.assert_array_equal(loaded.encode(["b ä ä"])["weights"], features.encode(["b ä ä"])["weights"])


# ---------------------------------------------------------------------- word vectors


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("a 1 0 0\nb 0 2 0\n. . 5 5 5\nunused 9 9 9\nç 0.5 -1e-1 3\na 7 7 7\n", encoding="utf-8")
    return path


def test_vectors_are_a_weighted_mean(table):
    texts = ["a b", "a ç", "a a a b", "zz"]
    features = Vectors.fit(texts, table)
    assert features.width == 3 and features.vocabulary.names == ["a", "b", "ç"]
    idf = {word: np.log(5 / (1 + count)) + 1 for word, count in {"a": 3, "b": 2, "ç": 1}.items()}
    found = features.encode([*texts, "unused", ""])["values"]
    wanted = (3 * idf["a"] * np.array([1, 0, 0]) + idf["b"] * np.array([0, 2, 0])) / (3 * idf["a"] + idf["b"])
    scale = np.sqrt((1 + 4 + 0.25 + 0.01 + 9) / 9)
    assert_near(found[2], wanted / scale, dtype=torch.float32)
    assert not found[3:].any(), "words that are not in the texts of the fit are not known later"


def test_vectors_are_kept(table, tmp_path):
    features = Vectors.fit(["a b", "ç"], table)
    features.save(tmp_path)
    table.unlink()
    loaded = Vectors.load(tmp_path)
    assert loaded.fingerprint == features.fingerprint
    np.testing.assert_array_equal(loaded.encode(["a ç"])["values"], features.encode(["a ç"])["values"])


def test_forms_of_files(table, tmp_path):
    plain = read_vectors(table, {"a", "ç", ". ."})
    assert set(plain) == {"a", "ç", ". ."} and plain["a"].tolist() == [1, 0, 0]
    with gzip.open(tmp_path / "v.txt.gz", "wt", encoding="utf-8") as file:
        file.write("5 3\n" + table.read_text(encoding="utf-8"))
    zipped = read_vectors(tmp_path / "v.txt.gz", {"a", "ç", "5"})
    assert set(zipped) == {"a", "ç"} and zipped["ç"].tolist() == plain["ç"].tolist()
    (tmp_path / "crlf.txt").write_bytes(b"a 1 2\r\nb 3 4 \r\n")
    assert read_vectors(tmp_path / "crlf.txt", {"b"})["b"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a 1 2 3\nb 1 2\n", "line 2: expected 3 numbers as in the first line, got 2"),
        ("a 1 2 3\nb 1 x 3\n", "line 2: expected numbers in the vector of 'b'"),
        ("a 1 2 3\nb 1 nan 3\n", "line 2: the vector of 'b' is not finite"),
        ("a\n", "line 1: expected 'word v1 v2 ...', got no numbers"),
        ("a 1 2\n\nb\n", "line 3: expected 2 numbers as in the first line, got 0"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, told):
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(RequestError, match=rf"v\.txt: {told}"):
        read_vectors(tmp_path / "v.txt", {"a", "b"})


def test_files_that_cannot_be_read(tmp_path, table):
    with pytest.raises(RequestError, match="no such file"):
        read_vectors(tmp_path / "none.txt", {"a"})
    (tmp_path / "v.gz").write_bytes(b"no gzip")
    with pytest.raises(RequestError, match=r"v\.gz: cannot be read"):
        read_vectors(tmp_path / "v.gz", {"a"})
    with pytest.raises(RequestError, match="no vector for any of the 1 words"):
        Vectors.fit(["zz"], table)


# ---------------------------------------------------------------------- an encoder's embeddings


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
