"""Token ids of a corpus: computed once, stored in an Arrow file in the cache, memory-mapped from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mtem.atomic import atomic_write
from mtem.data.cache import cache_folder, read_batches
from mtem.data.corpus import Corpus
from mtem.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = "1"  # part of every cache address; increase it when the stored contents change
_ROWS = 8192  # in every batch of the file but the last, so that the batch of a text follows from its number
_CALL_TEXTS = 1024
_CALL_CHARACTERS = 1 << 20  # a tokenizer needs much more memory than the token ids take
LONGEST_TEXT = 1 << 20  # characters of a text that are tokenized at most
_CHARACTERS_PER_TOKEN = 16  # more than words have on average
_SPARE_TOKENS = 32  # that a cut text has beyond those that are kept
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32()))])


class Tokens:
    """The token ids of texts, including special tokens.

    Parameters
    ----------
    batches : sequence of pyarrow.RecordBatch
        With one column of lists of int32; all but the last have the same number of rows.

    Attributes
    ----------
    lengths : array of int32, shape (N,)
        The number of tokens of each text.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        lists = [batch.column(0) for batch in batches if batch.num_rows]
        self._rows = len(lists[0]) if lists else 1
        if any(len(array) != self._rows for array in lists[:-1]):
            raise ValueError("all batches but the last must have the same number of rows")
        self._values: list[np.ndarray] = [array.values.to_numpy() for array in lists]
        self._offsets: list[np.ndarray] = [array.offsets.to_numpy() for array in lists]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *(np.diff(o) for o in self._offsets)]).astype(np.int32)

    @classmethod
    def of_ids(cls, ids: Iterable[Sequence[int]]) -> Tokens:
        """Return tokens in memory, from a list of lists of token ids."""
        return cls(list(_batches(list(text_ids) for text_ids in ids)))

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.lengths)

    def ids(self, i: int) -> np.ndarray:
        """Return the token ids of text `i` (int32), as a view."""
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        batch, row = divmod(int(i), self._rows)
        offsets = self._offsets[batch]
        return self._values[batch][offsets[row] : offsets[row + 1]]


class JoinedTokens(Tokens):
    """The tokens of several corpora, one after the other, without copying them."""

    def __init__(self, parts: Sequence[Tokens]) -> None:
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        self.lengths = np.concatenate([np.zeros(0, np.int32), *(part.lengths for part in parts)])

    def ids(self, i: int) -> np.ndarray:
        """Return the token ids of text `i` (int32), as a view."""
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        part = int(np.searchsorted(self._starts, i, side="right")) - 1
        return self._parts[part].ids(int(i - self._starts[part]))


def tokenize(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """Tokenize a corpus, or read its tokens from the cache.

    Parameters
    ----------
    corpus : Corpus
        Of threads, the texts of the roots are tokenized.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its fingerprint is part of the address in the cache.
    max_length : int
        Longer texts are truncated to this number of tokens.
    cache : str or Path, optional
        The cache folder; by default the one the corpus was loaded with, or `cache_directory()`.
    progress : callable, optional
        Called with (texts done, texts in all) from time to time.
    """
    digest = hashlib.sha256()
    for part in (_FORMAT, corpus.fingerprint, tokenizer_fingerprint(tokenizer), str(max_length)):
        digest.update(part.encode() + b"\0")
    path = cache_folder("tokens", cache if cache is not None else corpus.cache) / f"{digest.hexdigest()}.arrow"
    batches = _read_mapped(path, len(corpus), len(tokenizer), max_length)
    if batches is None:
        with atomic_write(path) as stream, pa.ipc.new_file(stream, _SCHEMA) as writer:
            for batch in _batches(_encoded(corpus, tokenizer, max_length, progress)):
                writer.write_batch(batch)
        batches = _read_mapped(path, len(corpus), len(tokenizer), max_length)
        assert batches is not None
    elif progress is not None:
        progress(len(corpus), len(corpus))
    return Tokens(batches)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[int]]:
    """Return the token ids of a few texts, including special tokens.

    Long texts are cut before they are tokenized: a tokenizer reads the whole text, however few tokens are kept.
    """
    return _ids([_beginning(text, tokenizer, max_length) for text in texts], tokenizer, max_length)


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[int]]:
    try:
        ids: list[list[int]] = tokenizer(
            list(texts),
            truncation=True,
            max_length=max_length,
            padding=False,
            add_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    except BaseException as error:
        # A damaged tokenizer fails in Rust, by an error that is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the tokenizer of the model is damaged ({error}); copy or download the model again") from None
    return ids


def _beginning(text: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """Return a beginning of the text that has the same first tokens as the text.

    It ends before white space, where no tokenizer joins what it has read with what follows, and has more tokens than are kept.
    White space without end, or a word without end, is read up to `LONGEST_TEXT` characters.
    """
    characters = _CHARACTERS_PER_TOKEN * (max_length + _SPARE_TOKENS)
    if len(text) <= 2 * characters or tokenizer.truncation_side != "right":
        return text
    while characters < min(len(text), LONGEST_TEXT):
        end = _word_end(text, characters)
        if end and len(_ids([text[:end]], tokenizer, max_length + _SPARE_TOKENS)[0]) == max_length + _SPARE_TOKENS:
            return text[:end]
        characters *= 2
    return text[:LONGEST_TEXT]


def _word_end(text: str, end: int) -> int:
    """Return the last position up to `end` where a word ends, 0 if there is none."""
    while end and not text[end].isspace():
        end -= 1
    while end and text[end - 1].isspace():
        end -= 1
    return end


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of everything that determines the tokens of a text."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # A tokenizer keeps the options of its last call; they are not part of it.
        state["truncation"] = state["padding"] = None
        digest.update(json.dumps(state, sort_keys=True).encode())
    else:
        digest.update(json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True).encode())
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps([tokenizer.truncation_side, special], sort_keys=True).encode())
    return digest.hexdigest()


def _encoded(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, progress: Callable[[int, int], None] | None
) -> Iterator[list[int]]:
    done = 0
    for texts in _calls(corpus):
        yield from encode(texts, tokenizer, max_length)
        done += len(texts)
        if progress is not None:
            progress(done, len(corpus))


def _calls(corpus: Corpus) -> Iterator[list[str]]:
    """Yield the texts in lists of a suitable size for one call of the tokenizer."""
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
    arrays: list[np.ndarray] = []

    def batch() -> pa.RecordBatch:
        offsets = np.cumsum([0] + [len(array) for array in arrays], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))
        return pa.record_batch([lists], schema=_SCHEMA)

    for text_ids in ids:
        arrays.append(np.asarray(text_ids, np.int32))
        if len(arrays) == _ROWS:
            yield batch()
            arrays = []
    if arrays:
        yield batch()


def _read_mapped(path: Path, texts: int, vocabulary: int, max_length: int) -> list[pa.RecordBatch] | None:
    """Return the batches of a stored file, None if it is missing, damaged, or not of so many texts and such tokens."""
    pairs = read_batches(path, _SCHEMA)
    if pairs is None:
        return None
    batches = [batch for batch, _ in pairs]
    if sum(batch.num_rows for batch in batches) != texts or any(batch.num_rows != _ROWS for batch in batches[:-1]):
        return None
    for batch in batches:
        lists = batch.column(0)
        if lists.null_count or lists.values.null_count:
            return None
        ids, lengths = lists.values.to_numpy(), np.diff(lists.offsets.to_numpy())
        if (len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary) or (len(lengths) and lengths.max() > max_length):
            return None
    return batches
