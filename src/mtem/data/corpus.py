"""Labeled or unlabeled examples of one or several domains, texts or threads, and what makes them fit for an adaptation."""

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
from mtem.data.values import encodable
from mtem.errors import RequestError

_BATCH_ROWS = 8192
_IN_MEMORY = 1 << 26  # a selection with more bytes of text than this goes to the cache instead of into memory
_WHOLE_FLOAT = re.compile(r"[+-]?[0-9]{1,400}\.0*")
_BETWEEN = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")  # not the sign of a number
_NOT_LETTERS = re.compile(r"[\W_]+")


def spelling(name: str) -> str:
    """What two names share when they differ only in upper and lower case and in what stands between words (space, '-', '_')."""
    return _BETWEEN.sub("", name.casefold())


def text_key(text: str) -> str:
    """What two texts share when they are the same text: letters and digits, whatever the case (or all, if it has none)."""
    return _NOT_LETTERS.sub("", text.casefold()) or text.strip()


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts, or threads of them, in the order of their files. Immutable.

    Attributes
    ----------
    table
        Columns `text` (of a thread: its root's), `tree` (`trees.dump`; only where the examples are threads), `label` (string;
        absent when unlabeled), `domain` (dictionary-encoded), `row` (where the text stood in its file) and `file` (which of
        `files` that is).
    name
        The file names, for messages.
    fingerprint
        sha256 over texts, trees and labels.
    notices
        What a person should know about the data, one line each.
    files
        One entry per file: path, name, domain, sha256, rows kept, empty (rows left out), threads (whether it holds threads),
        text_column, label_column, texts (their sha256).
    """

    table: pa.Table
    name: str
    fingerprint: str
    notices: tuple[str, ...] = ()
    files: tuple[dict[str, Any], ...] = ()
    cache: Path | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.table.num_rows

    def __repr__(self) -> str:
        classes = f", classes {list(self.classes)}" if self.labeled else ", unlabeled"
        return f"Corpus({self.name!r}, {len(self)} {self.unit}{classes}, domains {self.domains})"

    @property
    def labeled(self) -> bool:
        return "label" in self.table.column_names

    @property
    def threaded(self) -> bool:
        """Whether the examples are threads: trees of posts and not single texts."""
        return "tree" in self.table.column_names

    @property
    def unit(self) -> str:
        """What messages call the examples."""
        return "threads" if self.threaded else "texts"

    @cached_property
    def _starts(self) -> dict[str, np.ndarray]:
        """Where the chunks of the columns with texts begin; they need not be the same chunks."""
        columns = ((name, self.table.column(name)) for name in self._long)
        return {name: np.cumsum([0] + [len(chunk) for chunk in column.chunks]) for name, column in columns}

    @property
    def _long(self) -> list[str]:
        """The columns that may be too large for memory."""
        return ["text", "tree"] if self.threaded else ["text"]

    def _strings(self, name: str, indices: Iterable[int] | None) -> list[str]:
        column = self.table.column(name)
        if indices is None:
            return column.to_pylist()
        # Looked up one by one: taking from a chunked column would first copy all of it into memory.
        indices = _indices(indices, len(self))
        chunks = np.searchsorted(self._starts[name], indices, side="right") - 1
        offsets = indices - self._starts[name][chunks]
        return [column.chunk(c)[o].as_py() for c, o in zip(chunks.tolist(), offsets.tolist(), strict=True)]

    def text(self, i: int) -> str:
        return self.texts([i])[0]

    def texts(self, indices: Iterable[int] | None = None) -> list[str]:
        """The texts at `indices` (all without it), in that order; of threads, the roots'."""
        return self._strings("text", indices)

    def trees(self, indices: Iterable[int] | None = None) -> list[Thread]:
        """The threads at `indices` (all without it), in that order; a text alone is a thread without replies."""
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
        """The label of every text."""
        self.need_labels()
        return self.table.column("label").to_pylist()

    def label_numbers(self, classes: Sequence[str]) -> np.ndarray:
        """Each text's label as its place in `classes`."""
        self.need_labels()
        found = pc.index_in(self.table.column("label"), value_set=pa.array(list(classes), pa.string()))
        if found.null_count:
            i = int(pc.index(pc.is_null(found), True).as_py())
            label = self.table.column("label")[i].as_py()
            alike = next((name for name in classes if spelling(name) == spelling(label)), None)
            meant = "" if alike is None else f"; write {alike!r} if that is meant"
            raise RequestError(
                f"{self.where(i)}{self._column_of(i)}: label {label!r} is unknown; the classes are {listed(classes)}{meant}"
            )
        return found.to_numpy().astype(np.int64)

    def need_labels(self) -> None:
        """Refuse a corpus without labels where they are needed."""
        if not self.labeled:
            raise RequestError(f"{self.name}: has no labels; give a file with a label column, or name it: --label-column")

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
        """Each text's domain as its place in `domains`."""
        return self._domain_codes[1]

    @property
    def rows(self) -> np.ndarray:
        """Where each text stood in its file."""
        return self.table.column("row").to_numpy()

    def where(self, i: int) -> str:
        """The place of text `i`, for messages: file and row."""
        file = self.files[self.table.column("file")[i].as_py()]
        return f"{file['path']}: row {self.table.column('row')[i].as_py()}"

    def _column_of(self, i: int) -> str:
        column = self.files[self.table.column("file")[i].as_py()]["label_column"]
        return f", column {column!r}" if column else ""

    def select(self, indices: Iterable[int]) -> Corpus:
        """The corpus of the texts at `indices`, in that order."""
        indices = _indices(indices, len(self))
        fingerprint = fingerprint_of(self.fingerprint, indices.tobytes())
        others = [name for name in self.table.column_names if name not in self._long]
        # Numbers and short strings: cheap to take. The texts follow in pieces.
        rest = self.table.select(others).take(pa.array(indices)).combine_chunks()
        pieces = (
            [self._strings(name, indices[start : start + _BATCH_ROWS]) for name in self._long]
            for start in range(0, len(indices), _BATCH_ROWS)
        )
        size = sum(self.table.column(name).nbytes for name in self._long) * len(indices) // max(1, len(self))
        strings = self._stored(fingerprint, self._long, pieces, size)
        for place, name in enumerate(self._long):
            rest = rest.add_column(place, name, strings.column(name))
        return replace(self, table=rest, fingerprint=fingerprint)

    def _stored(self, address: str, names: list[str], pieces: Iterable[list[list[str]]], size: int) -> pa.Table:
        """A table of strings, given in pieces: in memory if its `size` in bytes allows, else in the cache."""
        schema = pa.schema([(name, pa.large_string()) for name in names])
        batches = (pa.record_batch([pa.array(c, pa.large_string()) for c in piece], schema=schema) for piece in pieces)
        if size > _IN_MEMORY:
            return stored_table(cache_folder("corpora", self.cache) / f"{address}.arrow", schema, batches)
        return pa.Table.from_batches(batches, schema=schema)

    def _with_trees(self) -> Corpus:
        """The same texts as threads, those that are none as threads without replies."""
        if self.threaded:
            return self
        fingerprint = fingerprint_of(self.fingerprint, "trees")
        pieces = (
            [[dump(tree) for tree in self.trees(range(start, min(start + _BATCH_ROWS, len(self))))]]
            for start in range(0, len(self), _BATCH_ROWS)
        )
        column = self._stored(fingerprint, ["tree"], pieces, self.table.column("text").nbytes).column("tree")
        return replace(self, table=self.table.add_column(1, "tree", column), fingerprint=fingerprint)

    def unlabeled(self) -> Corpus:
        """The same texts without their labels."""
        if not self.labeled:
            return self
        table = self.table.drop_columns(["label"])
        return replace(self, table=table, fingerprint=fingerprint_of(self.fingerprint, "unlabeled"))

    @staticmethod
    def concatenate(corpora: Iterable[Corpus]) -> Corpus:
        """All examples of several corpora, one after the other; labeled only if every one of them is, threads if any is."""
        corpora = list(corpora)
        if len(corpora) == 1:
            return corpora[0]
        if not corpora:
            raise RequestError("no data given; name at least one file")
        if any(c.labeled for c in corpora) and not all(c.labeled for c in corpora):
            corpora = [c.unlabeled() for c in corpora]
        if any(c.threaded for c in corpora):
            corpora = [c._with_trees() for c in corpora]
        tables, entries = [], []
        for corpus in corpora:
            place = corpus.table.column_names.index("file")
            moved = pc.add(corpus.table.column("file"), pa.scalar(len(entries), pa.int32()))
            tables.append(corpus.table.set_column(place, "file", moved).select(corpora[0].table.column_names))
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
    """A label as a class name: 1, 1.0 and "1" are the same class."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return str(int(value)) if float(value).is_integer() else str(float(value))
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    name = encodable(" ".join(str(value).replace("\0", "").split()))
    return str(int(name.split(".")[0])) if _WHOLE_FLOAT.fullmatch(name) else name


def sort_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Numbers in numeric order if all are whole numbers, else alphabetical."""
    labels = list(labels)
    if all(re.fullmatch(r"[+-]?[0-9]+", label) for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def check_source(corpus: Corpus) -> None:
    """Refuse labeled data nobody can learn classes from: one class only, or a class seen once."""
    corpus.need_labels()
    columns = listed(dict.fromkeys(entry["label_column"] for entry in corpus.files if entry["label_column"]))
    if len(corpus.classes) < 2:
        raise RequestError(
            f"{corpus.name}: column {columns}: all {len(corpus)} labels are {corpus.classes[0]!r}; "
            "at least two classes are needed"
        )
    counts = np.bincount(corpus.label_numbers(corpus.classes), minlength=len(corpus.classes))
    for label, count in zip(corpus.classes, counts, strict=True):
        if count == 1:
            i = int(pc.index(corpus.table.column("label"), label).as_py())
            raise RequestError(
                f"{corpus.where(i)}{corpus._column_of(i)}: label {label!r} is there only once; "
                f"add more {corpus.unit} of that class or remove this one"
            )


def check_target(target: Corpus, source: Corpus) -> None:
    """Refuse a target that is one of the source files, or holds the same texts."""
    for entry in target.files:
        for other in source.files:
            if (entry["sha256"] and entry["sha256"] == other["sha256"]) or entry["texts"] == other["texts"]:
                same = "the same file as" if entry["path"] == other["path"] else f"the same {target.unit} as"
                raise RequestError(
                    f"{entry['path']}: the target is {same} the source {other['path']}; "
                    f"the target must be the unlabeled {target.unit} of another domain"
                )


def _indices(indices: Iterable[int], length: int) -> np.ndarray:
    found = np.asarray(indices if hasattr(indices, "__len__") else list(indices))
    found = np.flatnonzero(found) if found.dtype == bool else found.astype(np.int64)
    if len(found) and (found.min() < 0 or found.max() >= length):
        raise IndexError(f"text {found.max() if found.max() >= length else found.min()} of a corpus of {length}")
    return found


def domain_column(domain: str, length: int) -> pa.DictionaryArray:
    """The column `domain` of a table whose texts are all of one."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(length, np.int32)), pa.array([domain], pa.string()))


def listed(names: Iterable[str]) -> str:
    """Names in quotes, for messages; of many, the first twenty."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"
