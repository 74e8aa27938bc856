"""Features of posts: TF-IDF of their words, or averaged word vectors. `embeddings` has a third kind, from an encoder.

Features are named arrays, with one row for each text ("values") or with the entries of a sparse matrix ("counts" of entries in
each row, "words", "weights"). `fit` learns from the corpora of the adaptation alone; the result is
saved with the model.
"""

from __future__ import annotations

import abc
import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from mtem.atomic import read_json, write_json
from mtem.data.cache import fingerprint_of
from mtem.errors import RequestError
from mtem.models import integrity
from mtem.models.trees.store import Store

Arrays = dict[str, np.ndarray]
TEXT_VERSION = 1  # of `words`, saved with every model: increase it when `words` changes

_LINK = re.compile(r"(?:https?://|www\.)\S*")
_NAME = re.compile(r"@\w+")
_WORD = re.compile(r"[@#?!]|\w+(?:'\w+)*")


def words(text: str) -> list[str]:
    """Return the words of a post in lower case: links become "url", names "@", hashtags "#" and a word; "?" and "!" are words."""
    text = _NAME.sub("@", _LINK.sub(" url ", text.lower().replace("\u2019", "'")))
    return _WORD.findall(text)


class Vocabulary:
    r"""Words with their inverse document frequency :math:`\ln \frac{1 + n}{1 + n_w} + 1`, for n posts, n_w with the word.

    Parameters
    ----------
    names
        The words.
    idf
        The inverse document frequency of each word.
    """

    def __init__(self, names: Sequence[str], idf: np.ndarray) -> None:
        self.names, self.idf = list(names), np.asarray(idf, dtype=np.float32)
        if len(self.names) != len(self.idf):
            raise ValueError(f"expected one frequency for each of {len(self.names)} words, got {len(self.idf)}")
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def fit(cls, texts: Iterable[str], size: int | None = None, known: Container[str] | None = None) -> Vocabulary:
        """Return the `size` words that occur in the most texts, out of those in `known` (None: all words)."""
        frequencies: Counter[str] = Counter()
        count = 0
        for text in texts:
            frequencies.update(set(words(text)))
            count += 1
        pairs = [pair for pair in frequencies.items() if known is None or pair[0] in known]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        pairs = pairs[:size]
        idf = np.array([math.log((1 + count) / (1 + frequency)) + 1 for _, frequency in pairs])
        return cls([name for name, _ in pairs], idf)

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.names)

    def weighted(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the numbers of a text's known words, and for each its count times its inverse document frequency."""
        counts = Counter(number for name in words(text) if (number := self._numbers.get(name)) is not None)
        numbers = list(counts)
        return numbers, np.fromiter(counts.values(), np.float32, len(numbers)) * self.idf[numbers]

    def save(self, directory: Path, **tensors: np.ndarray) -> None:
        """Write the words, and other arrays with one row for each word, to a directory."""
        write_json(directory / "vocabulary.json", self.names)
        save_file({"idf": self.idf, **tensors}, directory / "vocabulary.safetensors")

    @classmethod
    def load(cls, directory: Path, *others: str) -> tuple[Vocabulary, dict[str, np.ndarray]]:
        """Return the words, and the arrays saved with them; `others` must be among them.

        Raises
        ------
        RequestError
            If a file is missing or damaged.
        """
        file = directory / "vocabulary.safetensors"
        for path in (directory / "vocabulary.json", file):
            if not path.is_file():
                raise RequestError(f"{path}: no such file, but the model needs its words; {integrity.AGAIN}")
        names, tensors = read_json(directory / "vocabulary.json"), load_file(file)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise RequestError(f"{directory / 'vocabulary.json'}: expected a list of different words; {integrity.AGAIN}")
        for key in ("idf", *others):
            if key not in tensors or len(tensors[key]) != len(names) or not np.isfinite(tensors[key]).all():
                problem = "has no" if key not in tensors else "expected one finite row for each word in"
                raise RequestError(f"{file}: {problem} '{key}'; {integrity.AGAIN}")
        return cls(names, tensors.pop("idf")), tensors

    def fingerprint(self) -> str:
        """Return a hash of the words and their frequencies."""
        return fingerprint_of("\n".join(self.names), self.idf.tobytes())


class PostFeatures(abc.ABC):
    """A function from the texts of posts to numbers.

    Attributes
    ----------
    name
        The value of the setting `features`.
    width
        The numbers for each post.
    fingerprint
        A hash of everything that the numbers depend on, except the text.
    max_length
        The number of tokens read of each post; None: no limit.
    """

    name: ClassVar[str]
    width: int
    fingerprint: str
    max_length: int | None = None

    @abc.abstractmethod
    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Store | None = None) -> Arrays:
        """Return the features of the texts.

        Parameters
        ----------
        texts
            The texts of posts.
        device
            Where to compute them.
        store
            What `store` returned; None: nothing is cached.
        """

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Write the features to the directory of a model."""

    @classmethod
    @abc.abstractmethod
    def load(cls, directory: Path) -> PostFeatures:
        """Return the features that `save` wrote."""

    def store(self, cache: Path | None = None) -> Store | None:
        """Return the cache for results that are slow to compute; None: there are none."""
        return None


class Tfidf(PostFeatures):
    """Counts of words times their inverse document frequency, with norm 1 for each post; sparse.

    Parameters
    ----------
    vocabulary
        The words.
    """

    name = "tfidf"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.width = vocabulary, len(vocabulary)
        self.fingerprint = fingerprint_of(self.name, str(TEXT_VERSION), vocabulary.fingerprint())

    @classmethod
    def fit(cls, texts: Iterable[str], size: int) -> Tfidf:
        """Return the features for the `size` words that occur in the most texts."""
        vocabulary = Vocabulary.fit(texts, size)
        if not len(vocabulary):
            raise RequestError("features=tfidf: the texts contain no words")
        return cls(vocabulary)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Store | None = None) -> Arrays:
        """Return "counts", "words" and "weights"."""
        numbers: list[int] = []
        weights: list[np.ndarray] = [np.zeros(0, np.float32)]
        counts = np.zeros(len(texts), np.int32)
        for row, text in enumerate(texts):
            known, values = self.vocabulary.weighted(text)
            counts[row] = len(known)
            numbers += known
            weights.append(values / max(float(np.sqrt(values @ values)), 1e-12))
        return {"counts": counts, "words": np.array(numbers, np.int32), "weights": np.concatenate(weights)}

    def save(self, directory: Path) -> None:
        """Write vocabulary.json and vocabulary.safetensors to a directory."""
        self.vocabulary.save(directory)

    @classmethod
    def load(cls, directory: Path) -> Tfidf:
        """Return the features that `save` wrote."""
        return cls(Vocabulary.load(directory)[0])


class Vectors(PostFeatures):
    """The mean of the vectors of a post's words, weighted by TF-IDF; zeros for a post without known words.

    Only the vectors of words in the corpora of the adaptation are kept, and new texts are read with those. All are scaled
    together to a root mean square of 1, whatever the scale of the file.

    Parameters
    ----------
    vocabulary
        The words.
    table
        The vector of each word, [words, width].
    """

    name = "vectors"

    def __init__(self, vocabulary: Vocabulary, table: np.ndarray) -> None:
        self.vocabulary, self.table, self.width = vocabulary, np.asarray(table, np.float32), table.shape[1]
        if len(vocabulary) != len(table):
            raise ValueError(f"expected one vector for each of {len(vocabulary)} words, got {len(table)}")
        self.fingerprint = fingerprint_of(self.name, str(TEXT_VERSION), vocabulary.fingerprint(), self.table.tobytes())

    @classmethod
    def fit(cls, texts: Iterable[str], path: str | Path) -> Vectors:
        """Return the features for the words of the texts that have a vector in the file.

        Raises
        ------
        RequestError
            If the file cannot be read, or has no vector for any word.
        """
        vocabulary = Vocabulary.fit(texts)
        vectors = read_vectors(path, set(vocabulary.names))
        if not vectors:
            raise RequestError(f"{path}: has no vector for any of the {len(vocabulary)} words of the texts; give another file")
        kept = [number for number, name in enumerate(vocabulary.names) if name in vectors]
        names = [vocabulary.names[number] for number in kept]
        table = np.stack([vectors[name] for name in names])
        scale = float(np.sqrt(np.mean(np.square(table, dtype=np.float64)))) or 1.0
        return cls(Vocabulary(names, vocabulary.idf[kept]), table / scale)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Store | None = None) -> Arrays:
        """Return {"values": [texts, width]}."""
        values = np.zeros((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            numbers, weights = self.vocabulary.weighted(text)
            if numbers:
                values[row] = weights @ self.table[numbers] / weights.sum()
        return {"values": values}

    def save(self, directory: Path) -> None:
        """Write vocabulary.json and vocabulary.safetensors to a directory."""
        self.vocabulary.save(directory, vectors=self.table)

    @classmethod
    def load(cls, directory: Path) -> Vectors:
        """Return the features that `save` wrote."""
        vocabulary, tensors = Vocabulary.load(directory, "vectors")
        return cls(vocabulary, tensors["vectors"])


def read_vectors(path: str | Path, known: Container[str]) -> dict[str, np.ndarray]:
    """Return the vectors of known words from a text file of lines "word v1 v2 ...".

    The first line may have two numbers, as word2vec writes it. If a word occurs twice, the first vector counts.

    Parameters
    ----------
    path
        The file, which may be compressed (.gz).
    known
        The words to keep.

    Raises
    ------
    RequestError
        If the file cannot be read, with the number of the line.
    """
    vectors: dict[str, np.ndarray] = {}
    width = None
    for number, line in _lines(Path(path)):
        parts = line.rstrip().split(" ")
        if parts == [""] or (number == 1 and len(parts) == 2 and all(part.isdigit() for part in parts)):
            continue
        width = len(parts) - 1 if width is None else width
        if not width:
            raise RequestError(f"{path}: line {number}: expected 'word v1 v2 ...', got no numbers")
        if len(parts) < width + 1:
            raise RequestError(f"{path}: line {number}: expected {width} numbers as in the first line, got {len(parts) - 1}")
        name = " ".join(parts[:-width])  # some files have words with spaces in them
        if name in known and name not in vectors:
            try:
                vector = np.array(parts[-width:], dtype=np.float32)
            except ValueError:
                raise RequestError(f"{path}: line {number}: expected numbers in the vector of {name!r}") from None
            if not np.isfinite(vector).all():
                raise RequestError(f"{path}: line {number}: the vector of {name!r} is not finite")
            vectors[name] = vector
    return vectors


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; give vectors=FILE with lines 'word v1 v2 ...'") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{path}: cannot be read ({error})") from error
