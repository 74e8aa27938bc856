"""Corpora: texts or threads of one or several domains, labeled or not, and the checks that an adaptation needs."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mtem.data.cache import cache_folder, fingerprint_of, stored_table
from mtem.data.threads import Thread, dump, parse
from mtem.data.values import encodable, number_text
from mtem.errors import RequestError

_BATCH_ROWS = 8192
_IN_MEMORY = 1 << 26  # a selection with more bytes of text than this is stored in the cache, not in memory
_WHOLE_FLOAT = re.compile(r"[+-]?[0-9]{1,400}\.0*")
_WORD_SEPARATOR = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")  # not the sign of a number
_NINES_COMPLEMENT = str.maketrans("0123456789", "9876543210")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


def spelling(name: str) -> str:
    """Return a key that is the same for names that differ only in case and in word separators (space, '-', '_')."""
    return _WORD_SEPARATOR.sub("", name.casefold())


def text_key(text: str) -> str:
    """Return a key that is the same for texts with the same letters and digits, whatever their case.

    A text without letters and digits is its own key, without surrounding white space.
    """
    return _NOT_ALPHANUMERIC.sub("", text.casefold()) or text.strip()


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts or threads, in the order of their files. Immutable.

    Attributes
    ----------
    table : pyarrow.Table
        Columns `text` (of a thread: the root's text), `tree` (a thread as `mtem.data.threads.dump` writes it; only if the
        examples are threads), `label` (string; only if labeled), `domain` (dictionary-encoded), `row` (row number in the file)
        and `file` (position in `files`).
    name : str
        The names of the files, for messages.
    fingerprint : str
        sha256 of the texts, threads and labels.
    notices : tuple of str
        Remarks about the data for the user, one line each.
    files : tuple of dict
        One entry per file: path, name, domain, sha256, rows (kept), empty (rows dropped), threads (whether it has threads),
        text_column, label_column, texts (sha256 of the texts).
    cache : Path or None
        The cache folder; None for `cache_directory()`.
    """

    table: pa.Table
    name: str
    fingerprint: str
    notices: tuple[str, ...] = ()
    files: tuple[dict[str, Any], ...] = ()
    cache: Path | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Return the number of examples."""
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        """Return name, size, classes and domains."""
        classes = f", classes {list(self.classes)}" if self.labeled else ", unlabeled"
        return f"Corpus({self.name!r}, {len(self)} {self.unit}{classes}, domains {self.domains})"

    @property
    def labeled(self) -> bool:
        """Whether the examples have labels."""
        return "label" in self.table.column_names

    @property
    def threaded(self) -> bool:
        """Whether the examples are threads, not single texts."""
        return "tree" in self.table.column_names

    @property
    def unit(self) -> str:
        """What messages call the examples: "threads" or "texts"."""
        return "threads" if self.threaded else "texts"

    @cached_property
    def _offsets(self) -> dict[str, np.ndarray]:
        """The offsets of the chunks of each string column; they may differ between columns."""
        columns = ((name, self.table.column(name)) for name in self._string_columns)
        return {name: np.cumsum([0] + [len(chunk) for chunk in column.chunks]) for name, column in columns}

    @property
    def _string_columns(self) -> list[str]:
        """The columns that may be too large for memory."""
        return ["text", "tree"] if self.threaded else ["text"]

    def _strings(self, name: str, indices: Iterable[int] | None) -> list[str]:
        column = self.table.column(name)
        if indices is None:
            strings: list[str] = column.to_pylist()
            return strings
        # Looked up one by one: `take` on a chunked column would first copy all of it into memory.
        indices = _indices(indices, len(self))
        chunks = np.searchsorted(self._offsets[name], indices, side="right") - 1
        offsets = indices - self._offsets[name][chunks]
        return [column.chunk(c)[o].as_py() for c, o in zip(chunks.tolist(), offsets.tolist(), strict=True)]

    def text(self, i: int) -> str:
        """Return text `i`; of a thread, the root's text."""
        return self.texts([i])[0]

    def texts(self, indices: Iterable[int] | None = None) -> list[str]:
        """Return the texts at `indices` (by default all), in that order; of threads, the texts of the roots."""
        return self._strings("text", indices)

    def threads(self, indices: Iterable[int] | None = None) -> list[Thread]:
        """Return the threads at `indices` (by default all), in that order; a text is a thread without replies."""
        if not self.threaded:
            return [Thread([text], [-1]) for text in self.texts(indices)]
        return [parse(string) for string in self._strings("tree", indices)]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The distinct labels: in numeric order if all are whole numbers, else alphabetical. Empty when unlabeled."""
        if not self.labeled:
            return ()
        return sort_classes(pc.unique(self.table.column("label")).to_pylist())

    def labels(self) -> list[str]:
        """Return the label of every example."""
        self.need_labels()
        labels: list[str] = self.table.column("label").to_pylist()
        return labels

    def label_numbers(self, classes: Sequence[str]) -> np.ndarray:
        """Return the label of every example as its position in `classes`.

        Raises
        ------
        RequestError
            If the corpus has no labels, or a label is not in `classes`.
        """
        self.need_labels()
        positions = pc.index_in(self.table.column("label"), value_set=pa.array(list(classes), pa.string()))
        if positions.null_count:
            i = int(pc.index(pc.is_null(positions), True).as_py())
            label = self.table.column("label")[i].as_py()
            alike = next((name for name in classes if spelling(name) == spelling(label)), None)
            advice = "" if alike is None else f"; write {alike!r} if this is the same class"
            raise RequestError(
                f"{self.where(i)}{self.label_column(i)}: label {shortened(repr(label))} is unknown; "
                f"the classes are {listed(classes)}{advice}"
            )
        return np.asarray(positions.to_numpy(), np.int64)

    def need_labels(self) -> None:
        """Raise a RequestError if the corpus has no labels."""
        if not self.labeled:
            raise RequestError(f"{self.name}: has no labels; give a file with labels, or name their column with --label-column")

    @cached_property
    def _domain_codes(self) -> tuple[list[str], np.ndarray]:
        column = self.table.column("domain")
        if not len(column):
            return [], np.zeros(0, np.int64)
        column = self.table.select(["domain"]).unify_dictionaries().column(0)
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])
        used, numbers_ = np.unique(codes, return_inverse=True)
        names = column.chunk(0).dictionary.to_pylist()
        return [names[u] for u in used], numbers_.astype(np.int64).reshape(-1)

    @property
    def domains(self) -> list[str]:
        """The names of the domains, in the order of the files."""
        return list(self._domain_codes[0])

    def domain_numbers(self) -> np.ndarray:
        """Return the domain of every example as its position in `domains`."""
        return self._domain_codes[1]

    @property
    def rows(self) -> np.ndarray:
        """The row number of every example in its file."""
        return np.asarray(self.table.column("row").to_numpy())

    def where(self, i: int) -> str:
        """Return file and row of example `i`, for messages."""
        file = self.files[self.table.column("file")[i].as_py()]
        return f"{file['path']}: row {self.table.column('row')[i].as_py()}"

    def label_column(self, i: int) -> str:
        """Return the label column of example `i` for messages, as ", column 'label'"; "" if there is none."""
        column = self.files[self.table.column("file")[i].as_py()]["label_column"]
        return f", column {column!r}" if column else ""

    def select(self, indices: Iterable[int]) -> Corpus:
        """Return the corpus of the examples at `indices`, in that order."""
        indices = _indices(indices, len(self))
        fingerprint = fingerprint_of(self.fingerprint, indices.tobytes())
        short_columns = [name for name in self.table.column_names if name not in self._string_columns]
        # Numbers and short strings are taken at once, the texts in chunks.
        table = self.table.select(short_columns).take(pa.array(indices)).combine_chunks()
        chunks = (
            [self._strings(name, indices[start : start + _BATCH_ROWS]) for name in self._string_columns]
            for start in range(0, len(indices), _BATCH_ROWS)
        )
        size = sum(self.table.column(name).nbytes for name in self._string_columns) * len(indices) // max(1, len(self))
        strings = self._stored(fingerprint, self._string_columns, chunks, size)
        for position, name in enumerate(self._string_columns):
            table = table.add_column(position, name, strings.column(name))
        return replace(self, table=table, fingerprint=fingerprint)

    def part(self, indices: Iterable[int], name: str) -> Corpus:
        """Return the examples at `indices` as data of their own: one entry in `files`, and no notices of the whole."""
        selected = self.select(indices)
        columns = {key: next((entry[key] for entry in self.files if entry[key]), None) for key in ("text_column", "label_column")}
        entry = {
            "path": name, "name": name, "domain": name, "sha256": None, "rows": len(selected), "empty": 0,
            "threads": self.threaded, **columns, "texts": selected.fingerprint,
        }  # fmt: skip
        position = selected.table.column_names.index("file")
        table = selected.table.set_column(position, "file", pa.array(np.zeros(len(selected), np.int32)))
        return replace(selected, table=table, name=name, notices=(), files=(entry,))

    def _stored(self, address: str, names: list[str], chunks: Iterable[list[list[str]]], size: int) -> pa.Table:
        """Return a table of strings, given in chunks: in memory if its `size` in bytes allows, else in the cache."""
        schema = pa.schema([(name, pa.large_string()) for name in names])
        batches = (pa.record_batch([pa.array(column, pa.large_string()) for column in chunk], schema=schema) for chunk in chunks)
        if size > _IN_MEMORY:
            return stored_table(cache_folder("corpora", self.cache) / f"{address}.arrow", schema, batches)
        return pa.Table.from_batches(batches, schema=schema)

    def _as_threads(self) -> Corpus:
        """Return the same examples as threads; texts become threads without replies."""
        if self.threaded:
            return self
        fingerprint = fingerprint_of(self.fingerprint, "trees")
        chunks = (
            [[dump(thread) for thread in self.threads(range(start, min(start + _BATCH_ROWS, len(self))))]]
            for start in range(0, len(self), _BATCH_ROWS)
        )
        column = self._stored(fingerprint, ["tree"], chunks, self.table.column("text").nbytes).column("tree")
        return replace(self, table=self.table.add_column(1, "tree", column), fingerprint=fingerprint)

    def unlabeled(self) -> Corpus:
        """Return the same examples without their labels."""
        if not self.labeled:
            return self
        table = self.table.drop_columns(["label"])
        return replace(self, table=table, fingerprint=fingerprint_of(self.fingerprint, "unlabeled"))

    @staticmethod
    def concatenate(corpora: Iterable[Corpus]) -> Corpus:
        """Return the examples of several corpora, in order; labeled only if all of them are, threads if any of them is."""
        corpora = list(corpora)
        if len(corpora) == 1:
            return corpora[0]
        if not corpora:
            raise RequestError("no data given; name at least one file")
        if any(c.labeled for c in corpora) and not all(c.labeled for c in corpora):
            corpora = [c.unlabeled() for c in corpora]
        if any(c.threaded for c in corpora):
            corpora = [c._as_threads() for c in corpora]
        tables: list[pa.Table] = []
        entries: list[dict[str, Any]] = []
        for corpus in corpora:
            position = corpus.table.column_names.index("file")
            moved = pc.add(corpus.table.column("file"), pa.scalar(len(entries), pa.int32()))
            tables.append(corpus.table.set_column(position, "file", moved).select(corpora[0].table.column_names))
            entries.extend(corpus.files)
        notices = dict.fromkeys(notice for corpus in corpora for notice in corpus.notices)
        return Corpus(
            table=pa.concat_tables(tables).unify_dictionaries(),
            name=", ".join(dict.fromkeys(corpus.name for corpus in corpora)),
            fingerprint=fingerprint_of(*(corpus.fingerprint for corpus in corpora)),
            notices=tuple(notices),
            files=tuple(entries),
            cache=corpora[0].cache,
        )


def label_name(value: Any) -> str:
    """Return a label as a class name; 1, 1.0 and "1" are the same class.

    Raises
    ------
    TypeError
        If it is a whole number of more digits than Python converts.
    """
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, numbers.Integral):
        return number_text(int(value))
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return str(int(value)) if float(value).is_integer() else str(float(value))  # type: ignore[call-overload]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    name = encodable(" ".join(str(value).replace("\0", "").split()))
    return str(int(name.split(".")[0])) if _WHOLE_FLOAT.fullmatch(name) else name


def sort_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the labels in numeric order if all are whole numbers, else in alphabetical order."""
    labels = list(labels)
    if all(re.fullmatch(r"[+-]?[0-9]+", label) for label in labels):
        return tuple(sorted(labels, key=_numeric_order))
    return tuple(sorted(labels))


def _numeric_order(label: str) -> tuple[int, int, str, str]:
    """Return a key that sorts whole numbers of any length; Python converts only some thousand digits."""
    digits = label.lstrip("+-").lstrip("0")
    if label.startswith("-") and digits:
        return -1, -len(digits), digits.translate(_NINES_COMPLEMENT), label
    return 1, len(digits), digits, label


def check_source(corpus: Corpus) -> None:
    """Check that classes can be learned from labeled data.

    Raises
    ------
    RequestError
        If there are no labels, only one class, or a class with only one example.
    """
    corpus.need_labels()
    columns = listed(dict.fromkeys(entry["label_column"] for entry in corpus.files if entry["label_column"]))
    if len(corpus.classes) < 2:
        raise RequestError(
            f"{corpus.name}: column {columns}: all {len(corpus)} labels are {corpus.classes[0]!r}; "
            "give data with at least two classes"
        )
    counts = np.bincount(corpus.label_numbers(corpus.classes), minlength=len(corpus.classes))
    for label, count in zip(corpus.classes, counts, strict=True):
        if count == 1:
            i = int(pc.index(corpus.table.column("label"), label).as_py())
            raise RequestError(
                f"{corpus.where(i)}{corpus.label_column(i)}: label {label!r} occurs only once; "
                f"add more {corpus.unit} of this class or remove it"
            )


def check_target(target: Corpus, source: Corpus) -> None:
    """Check that the target differs from the source.

    Raises
    ------
    RequestError
        If a target file is one of the source files, or has the same texts.
    """
    for entry in target.files:
        for other in source.files:
            if (entry["sha256"] and entry["sha256"] == other["sha256"]) or entry["texts"] == other["texts"]:
                same = "the same file as" if entry["path"] == other["path"] else f"the same {target.unit} as"
                raise RequestError(
                    f"{entry['path']}: the target is {same} the source {other['path']}; "
                    f"the target must be the unlabeled {target.unit} of another domain"
                )


def _indices(indices: Iterable[int], length: int) -> np.ndarray:
    positions = np.asarray(indices if hasattr(indices, "__len__") else list(indices))
    positions = np.flatnonzero(positions) if positions.dtype == bool else positions.astype(np.int64)
    if len(positions) and (positions.min() < 0 or positions.max() >= length):
        wrong = positions.max() if positions.max() >= length else positions.min()
        raise IndexError(f"text {wrong} of a corpus of {length}")
    return positions


def domain_column(domain: str, length: int) -> pa.DictionaryArray:
    """Return the column `domain` of a table with one domain."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(length, np.int32)), pa.array([domain], pa.string()))


def shortened(text: str, length: int = 100) -> str:
    """Return a text of at most `length` characters, for messages."""
    return text if len(text) <= length else f"{text[:length]}…"


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, for messages; of many, the first twenty."""
    names = list(names)
    shown = ", ".join(shortened(repr(name)) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"
