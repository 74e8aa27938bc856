"""Features of posts: words, TF-IDF against that of scikit-learn, word vectors from files."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

from mtem.errors import RequestError
from mtem.models.trees.features import Tfidf, Vectors, Vocabulary, read_vectors, words
from tests.conftest import make_texts
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
