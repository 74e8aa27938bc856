"""Numbers for the posts of a thread: TF-IDF of their words, averaged word vectors, or an encoder's embeddings.

Each kind turns texts into named arrays with one row for each text ("values"), or with the entries of a sparse matrix ("counts"
of entries in each row, "words", "weights"). What a kind learns from texts it learns in `fit`, from the corpora of the
adaptation and no others, and it is saved with the model.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from mtem.atomic import read_json, write_json
from mtem.data.cache import fingerprint_of
from mtem.errors import RequestError
from mtem.models import integrity

Arrays = dict[str, np.ndarray]
TEXT_VERSION = 1  # of `words`, kept with every model: raise it when texts are read otherwise

_LINK = re.compile(r"(?:https?://|www\.)\S*")
_NAME = re.compile(r"@\w+")
_WORD = re.compile(r"[@#?!]|\w+(?:'\w+)*")


def words(text: str) -> list[str]:
    """The words of a post in lower case: links become "url", names "@", a topic "#" and its word; "?" and "!" are words too."""
    text = _NAME.sub("@", _LINK.sub(" url ", text.lower().replace("\u2019", "'")))
    return _WORD.findall(text)


class Vocabulary:
    """Words with their inverse document frequency :math:`\\ln \\frac{1 + n}{1 + n_w} + 1`, of n posts n_w with the word."""

    def __init__(self, names: Sequence[str], idf: np.ndarray) -> None:
        self.names, self.idf = list(names), np.asarray(idf, dtype=np.float32)
        if len(self.names) != len(self.idf):
            raise ValueError(f"{len(self.names)} words, {len(self.idf)} frequencies")
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def fit(cls, texts: Iterable[str], size: int | None = None, known: Container[str] | None = None) -> Vocabulary:
        """Of the words that are in `known` (any, without it) the `size` found in the most texts."""
        found: Counter[str] = Counter()
        count = 0
        for text in texts:
            found.update(set(words(text)))
            count += 1
        pairs = [pair for pair in found.items() if known is None or pair[0] in known]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        pairs = pairs[:size]
        return cls([name for name, _ in pairs], np.array([math.log((1 + count) / (1 + seen)) + 1 for _, seen in pairs]))

    def __len__(self) -> int:
        return len(self.names)

    def weighted(self, text: str) -> tuple[list[int], np.ndarray]:
        """The numbers of the known words of a text, and how often each is in it times its inverse document frequency."""
        counts = Counter(number for name in words(text) if (number := self._numbers.get(name)) is not None)
        numbers = list(counts)
        return numbers, np.fromiter(counts.values(), np.float32, len(numbers)) * self.idf[numbers]

    def save(self, directory: Path, **tensors: np.ndarray) -> None:
        write_json(directory / "vocabulary.json", self.names)
        save_file({"idf": self.idf, **tensors}, directory / "vocabulary.safetensors")

    @classmethod
    def load(cls, directory: Path, *others: str) -> tuple[Vocabulary, dict[str, np.ndarray]]:
        """The words, and the `others` of the tensors saved with them."""
        file = directory / "vocabulary.safetensors"
        for path in (directory / "vocabulary.json", file):
            if not path.is_file():
                raise RequestError(f"{path}: no such file, and the model needs its words; {integrity.AGAIN}")
        names, tensors = read_json(directory / "vocabulary.json"), load_file(file)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise RequestError(f"{directory / 'vocabulary.json'}: a list of different words is wanted; {integrity.AGAIN}")
        for key in ("idf", *others):
            if key not in tensors or len(tensors[key]) != len(names) or not np.isfinite(tensors[key]).all():
                wrong = "has no" if key not in tensors else "has numbers that are none, or not one for each word, in"
                raise RequestError(f"{file}: {wrong} '{key}'; {integrity.AGAIN}")
        return cls(names, tensors.pop("idf")), tensors

    def fingerprint(self) -> str:
        return fingerprint_of("\n".join(self.names), self.idf.tobytes())


class NodeFeatures:
    """What the kinds have in common."""

    kind: ClassVar[str]
    width: int  # numbers for each post
    fingerprint: str  # of everything that decides what a text becomes
    max_length: int | None = None  # tokens seen of a post, where there is such a limit

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Any = None) -> Arrays:
        raise NotImplementedError

    def store(self, cache: Path | None = None) -> Any:
        """Where `encode` may keep what it is slow to compute; None: nowhere."""
        return None


class Tfidf(NodeFeatures):
    """Counts of words times their inverse document frequency, each post's row of length 1; sparse."""

    kind = "tfidf"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.width = vocabulary, len(vocabulary)
        self.fingerprint = fingerprint_of(self.kind, str(TEXT_VERSION), vocabulary.fingerprint())

    @classmethod
    def fit(cls, texts: Iterable[str], size: int) -> Tfidf:
        vocabulary = Vocabulary.fit(texts, size)
        if not len(vocabulary):
            raise RequestError("features=tfidf: there is no word in the texts")
        return cls(vocabulary)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Any = None) -> Arrays:
        numbers: list[int] = []
        weights = [np.zeros(0, np.float32)]
        counts = np.zeros(len(texts), np.int32)
        for row, text in enumerate(texts):
            found, values = self.vocabulary.weighted(text)
            counts[row] = len(found)
            numbers += found
            weights.append(values / max(float(np.sqrt(values @ values)), 1e-12))
        return {"counts": counts, "words": np.array(numbers, np.int32), "weights": np.concatenate(weights)}

    def save(self, directory: Path) -> None:
        self.vocabulary.save(directory)

    @classmethod
    def load(cls, directory: Path) -> Tfidf:
        return cls(Vocabulary.load(directory)[0])


class Vectors(NodeFeatures):
    """The mean of the vectors of a post's words, weighted by TF-IDF; zeros for a post without known words.

    Of the file only the vectors of words in the corpora of the adaptation are kept, and new texts are read with those. They are
    scaled together so that their numbers are of size 1 in the root mean square, whatever the file's scale is.
    """

    kind = "vectors"

    def __init__(self, vocabulary: Vocabulary, table: np.ndarray) -> None:
        self.vocabulary, self.table, self.width = vocabulary, np.asarray(table, np.float32), table.shape[1]
        if len(vocabulary) != len(table):
            raise ValueError(f"{len(vocabulary)} words, {len(table)} vectors")
        self.fingerprint = fingerprint_of(self.kind, str(TEXT_VERSION), vocabulary.fingerprint(), self.table.tobytes())

    @classmethod
    def fit(cls, texts: Iterable[str], path: str | Path) -> Vectors:
        vocabulary = Vocabulary.fit(texts)
        found = read_vectors(path, set(vocabulary.names))
        if not found:
            raise RequestError(f"{path}: has no vector for any of the {len(vocabulary)} words of the texts")
        kept = [number for number, name in enumerate(vocabulary.names) if name in found]
        names = [vocabulary.names[number] for number in kept]
        table = np.stack([found[name] for name in names])
        scale = float(np.sqrt(np.mean(np.square(table, dtype=np.float64)))) or 1.0
        return cls(Vocabulary(names, vocabulary.idf[kept]), table / scale)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Any = None) -> Arrays:
        values = np.zeros((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            numbers, weights = self.vocabulary.weighted(text)
            if numbers:
                values[row] = weights @ self.table[numbers] / weights.sum()
        return {"values": values}

    def save(self, directory: Path) -> None:
        self.vocabulary.save(directory, vectors=self.table)

    @classmethod
    def load(cls, directory: Path) -> Vectors:
        vocabulary, tensors = Vocabulary.load(directory, "vectors")
        return cls(vocabulary, tensors["vectors"])


def read_vectors(path: str | Path, wanted: Container[str]) -> dict[str, np.ndarray]:
    """The vectors of the wanted words from a text file of lines "word v1 v2 ..." (.gz too; a first line with two numbers, as
    word2vec writes it, is passed over). Of a word that comes twice the first counts."""
    found: dict[str, np.ndarray] = {}
    width = None
    for number, line in _lines(Path(path)):
        parts = line.rstrip().split(" ")
        if parts == [""] or (number == 1 and len(parts) == 2 and all(part.isdigit() for part in parts)):
            continue
        width = len(parts) - 1 if width is None else width
        if len(parts) < width + 1 or not width:
            told = f"{len(parts) - 1} numbers where the first has {width}" if width else "no numbers"
            raise RequestError(f"{path}: line {number}: {told}; 'word v1 v2 ...' is wanted")
        name = " ".join(parts[:-width])  # some files have words with spaces in them
        if name in wanted and name not in found:
            try:
                vector = np.array(parts[-width:], dtype=np.float32)
            except ValueError:
                raise RequestError(f"{path}: line {number}: the vector of {name!r} is not made of numbers") from None
            if not np.isfinite(vector).all():
                raise RequestError(f"{path}: line {number}: the vector of {name!r} is not finite")
            found[name] = vector
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; vectors=FILE wants lines 'word v1 v2 ...'") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{path}: cannot be read ({error})") from error
