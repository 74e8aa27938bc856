"""A corpus as token numbers: tokenized once, kept in an Arrow file in the cache, memory-mapped from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mtem.atomic import atomic_write
from mtem.data.cache import cache_folder
from mtem.data.corpus import Corpus

_FORMAT = "1"  # part of every cache address: raise it when what is written changes
_ROWS = 8192  # in every batch of the file but the last, so that a text's batch is a division away
_CALL_TEXTS = 1024
_CALL_CHARACTERS = 1 << 20  # a tokenizer keeps much more than the tokens of the texts it works on
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32()))])


class Tokens:
    """The token numbers of texts, special tokens included.

    Attributes
    ----------
    lengths
        The number of tokens of each text (int32).
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]):
        lists = [batch.column(0) for batch in batches if batch.num_rows]
        self._rows = len(lists[0]) if lists else 1
        if any(len(one) != self._rows for one in lists[:-1]):
            raise ValueError("all batches but the last must have the same number of rows")
        self._values = [one.values.to_numpy() for one in lists]
        self._offsets = [one.offsets.to_numpy() for one in lists]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *(np.diff(o) for o in self._offsets)]).astype(np.int32)

    @classmethod
    def of_ids(cls, ids: Iterable[Sequence[int]]) -> Tokens:
        """Tokens in memory, from a list of lists of numbers."""
        return cls(list(_batches(list(one) for one in ids)))

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> np.ndarray:
        """The token numbers of text `i` (int32): a view, not a copy."""
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        batch, row = divmod(int(i), self._rows)
        offsets = self._offsets[batch]
        return self._values[batch][offsets[row] : offsets[row + 1]]


def tokenize(
    corpus: Corpus,
    tokenizer: Any,
    max_length: int,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """The tokens of a corpus, at most `max_length` a text; from the cache if they were made before.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    cache
        The cache folder; without it the one the corpus was loaded with, or `cache_directory()`.
    progress
        Called with (texts done, texts in all) now and then.
    """
    digest = hashlib.sha256()
    for part in (_FORMAT, corpus.fingerprint, tokenizer_fingerprint(tokenizer), str(max_length)):
        digest.update(part.encode() + b"\0")
    path = cache_folder("tokens", cache if cache is not None else corpus.cache) / f"{digest.hexdigest()}.arrow"
    batches = _mapped(path)
    if batches is None or sum(batch.num_rows for batch in batches) != len(corpus):
        with atomic_write(path) as stream, pa.ipc.new_file(stream, _SCHEMA) as writer:
            for batch in _batches(_encoded(corpus, tokenizer, max_length, progress)):
                writer.write_batch(batch)
        batches = _mapped(path)
        assert batches is not None
    elif progress is not None:
        progress(len(corpus), len(corpus))
    return Tokens(batches)


def encode(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[list[int]]:
    """The token numbers of a few texts, special tokens included."""
    return tokenizer(
        list(texts),
        truncation=True,
        max_length=max_length,
        padding=False,
        add_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over everything that decides which tokens a text becomes."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # What the last call asked for stays in the tokenizer; it is no part of what the tokenizer is.
        state["truncation"] = state["padding"] = None
        digest.update(json.dumps(state, sort_keys=True).encode())
    else:
        digest.update(json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True).encode())
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps([tokenizer.truncation_side, special], sort_keys=True).encode())
    return digest.hexdigest()


def _encoded(corpus: Corpus, tokenizer: Any, max_length: int, progress: Callable[[int, int], None] | None) -> Iterator[list[int]]:
    done = 0
    for texts in _calls(corpus):
        yield from encode(texts, tokenizer, max_length)
        done += len(texts)
        if progress is not None:
            progress(done, len(corpus))


def _calls(corpus: Corpus) -> Iterator[list[str]]:
    """The texts in portions that are worth a call and not too much for one."""
    texts: list[str] = []
    characters = 0
    for chunk in corpus.table.column("text").chunks:
        for scalar in chunk:
            text = scalar.as_py()
            if texts and (len(texts) >= _CALL_TEXTS or characters + len(text) > _CALL_CHARACTERS):
                yield texts
                texts, characters = [], 0
            texts.append(text)
            characters += len(text)
    if texts:
        yield texts


def _batches(ids: Iterable[Sequence[int]]) -> Iterator[pa.RecordBatch]:
    pieces: list[np.ndarray] = []

    def batch() -> pa.RecordBatch:
        offsets = np.cumsum([0] + [len(piece) for piece in pieces], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(pieces)))
        return pa.record_batch([lists], schema=_SCHEMA)

    for one in ids:
        pieces.append(np.asarray(one, np.int32))
        if len(pieces) == _ROWS:
            yield batch()
            pieces = []
    if pieces:
        yield batch()


def _mapped(path: Path) -> list[pa.RecordBatch] | None:
    """The batches of a stored file, None if it is not there or damaged."""
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException):
        return None
