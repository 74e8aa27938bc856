"""Load a corpus from files, data frames, datasets or lists.

A file is streamed once into an Arrow file in the cache, addressed by its content, and memory-mapped from there: a corpus of a
million texts takes little memory, and the second load little time.
"""

from __future__ import annotations

import hashlib
import numbers
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from mtem.data import formats, readers, records
from mtem.data.cache import cache_folder, file_fingerprint, fingerprint_of, stored_table
from mtem.data.corpus import Corpus, domain_column
from mtem.data.records import Columns
from mtem.data.threads import NODES, Repairs, Thread, dump
from mtem.data.values import is_missing
from mtem.errors import RequestError

_FORMAT = "3"  # part of every cache address; increase it when the stored contents change
_BATCH_ROWS = 8192
_BATCH_CHARACTERS = 1 << 25


def load_corpus(
    data: Any,
    *,
    labeled: bool,
    text_column: str | None = None,
    label_column: str | None = None,
    domain: str | None = None,
    name: str | None = None,
    cache: str | Path | None = None,
) -> Corpus:
    """Load texts or threads, and their labels.

    Parameters
    ----------
    data : path, DataFrame, Dataset, list, tuple, dict or Corpus
        A path; a pandas DataFrame; a Hugging Face Dataset; a list of texts; a pair (texts, labels); a Corpus; a list of any of
        these; or a dict from domain names to any of these. A string alone is a path. A list of strings is a list of paths if all
        have the extension of a data file or one of them exists, otherwise a list of texts. A table whose column "nodes" holds
        lists is a table of threads (see `mtem.data.threads`). A list may hold threads, as dicts with "nodes" and optionally a
        label or as `Thread`, in place of texts.
    labeled : bool
        Whether labels are required. If not, a label column is ignored, with a notice.
    text_column, label_column : str, optional
        Columns of a table; by default the usual names are searched for, whatever their case. A text column given for a table of
        threads makes it a table of texts.
    domain : str, optional
        Name of the domain; by default the name of the file without its extensions.
    name : str, optional
        Name in messages of data that is not a file.
    cache : str or Path, optional
        The cache folder; `cache_directory()` by default.

    Returns
    -------
    Corpus
        Row numbers count from 0 in lists and data frames, and as in `readers.read_rows` in files.

    Raises
    ------
    RequestError
        If the data cannot be read; the message names file, row and column.
    """
    request = _Request(labeled, text_column, label_column, domain, name, Path(cache) if cache is not None else None)
    return _load(data, request)


class _ColumnChoice(TypedDict):
    labeled: bool
    text_column: str | None
    label_column: str | None


@dataclass(frozen=True)
class _Request:
    labeled: bool
    text_column: str | None
    label_column: str | None
    domain: str | None
    name: str | None
    cache: Path | None

    def columns(self) -> _ColumnChoice:
        return {"labeled": self.labeled, "text_column": self.text_column, "label_column": self.label_column}


def _load(data: Any, request: _Request) -> Corpus:
    if isinstance(data, Corpus):
        return _from_corpus(data, request)
    if isinstance(data, (str, Path)):
        return _from_file(data, request)
    if isinstance(data, Thread):
        data = [data]
    if isinstance(data, Mapping):
        if not data:
            raise RequestError("no data given; name at least one file")
        return Corpus.concatenate(_load(part, replace(request, domain=str(key))) for key, part in data.items())
    if _is_dataset(data):
        return _from_dataset(data, request)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        return _from_frame(data, request)
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], (str, Path, Mapping)):
        texts, labels = _as_list(data[0]), _as_list(data[1])
        if texts is not None and labels is not None and not any(_is_data(item) for item in texts[:1]):
            return _from_list(texts, labels, request)
    items = _as_list(data)
    if items is None:
        raise RequestError(f"expected data, got a {type(data).__name__}; give a path, a list of texts, or a data frame")
    if not items:
        raise RequestError(f"{request.name or 'data'}: is empty; give at least one file or text")
    strings = all(isinstance(item, str) for item in items)
    if any(map(_is_data, items)) or (strings and (all(map(_path_like, items)) or any(map(_is_file, items)))):
        return Corpus.concatenate(_load(item, request) for item in items)
    return _from_list(items, None, request)


def _as_list(data: Any) -> list[Any] | None:
    if isinstance(data, (list, tuple)):
        return list(data)
    return data.tolist() if hasattr(data, "tolist") and getattr(data, "ndim", 0) == 1 else None


def _is_data(item: Any) -> bool:
    """Return whether an item of a list is itself data; a pair of strings is not: it is more likely a (text, label)."""
    if isinstance(item, tuple) and not isinstance(item, Thread):
        return len(item) == 2 and not any(isinstance(part, str) for part in item)
    return isinstance(item, (Path, Corpus)) or (hasattr(item, "columns") and hasattr(item, "iloc")) or _is_dataset(item)


def _is_dataset(item: Any) -> bool:
    return hasattr(item, "features") and hasattr(item, "iter") and hasattr(item, "column_names")


def _path_like(item: str) -> bool:
    if len(item) > 1000 or "\n" in item:
        return False
    try:
        formats.file_format(item)
    except RequestError:
        return False
    return True


def _is_file(item: str) -> bool:
    try:
        return 0 < len(item) <= 1000 and Path(item).is_file()
    except (OSError, ValueError):
        return False


def _from_corpus(corpus: Corpus, request: _Request) -> Corpus:
    if request.labeled:
        corpus.need_labels()
    elif corpus.labeled:
        notices = (*corpus.notices, f"{corpus.name}: the labels are ignored")
        corpus = replace(corpus.unlabeled(), notices=notices)
    if request.domain is not None:
        position = corpus.table.column_names.index("domain")
        column = domain_column(request.domain, len(corpus))
        entries = tuple({**entry, "domain": request.domain} for entry in corpus.files)
        corpus = replace(corpus, table=corpus.table.set_column(position, "domain", column), files=entries)
    return corpus


def _from_file(path: str | Path, request: _Request) -> Corpus:
    formats.file_format(path)
    sha256 = file_fingerprint(path)
    columns = records.find_file_columns(path, **request.columns())
    address = fingerprint_of(_FORMAT, sha256, columns.example, columns.label or "", str(request.labeled))
    stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
    reading = _Reading(str(path), columns, request)
    table = stored_table(stored, reading.schema, reading.batches(readers.read_rows(path)), reading.metadata)
    name = Path(path).name
    return _corpus(table, reading, request, name=name, domain=formats.bare_name(path), path=str(path), sha256=sha256)


def _from_dataset(data: Any, request: _Request) -> Corpus:
    name = request.name or "dataset"
    names = list(data.column_names or data.features or [])
    columns = records.find_columns(names, lambda: _nodes(data), name, **request.columns())
    used = columns.used(names)
    label = columns.label
    classes = getattr((data.features or {}).get(label), "names", None) if label else None

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        row = 0
        for batch in data.select_columns(used).iter(batch_size=1000):
            for values in zip(*(batch[column] for column in used), strict=True):
                record = dict(zip(used, values, strict=True))
                if label and classes and isinstance(record[label], numbers.Integral):
                    # Datasets use -1 for an unknown class.
                    number = int(record[label])
                    record[label] = classes[number] if 0 <= number < len(classes) else None
                yield row, record
                row += 1

    reading = _Reading(name, columns, request)
    fingerprint = getattr(data, "_fingerprint", None)
    if fingerprint:
        address = fingerprint_of(_FORMAT, "dataset", str(fingerprint), *used, str(request.labeled), *(classes or []))
        stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
        table = stored_table(stored, reading.schema, reading.batches(rows()), reading.metadata)
    else:
        table = reading.in_memory(rows())
    return _corpus(table, reading, request, name=name, domain=name)


def _nodes(data: Any) -> Iterator[Any]:
    for batch in data.select_columns([NODES]).iter(batch_size=1):
        yield from batch[NODES]


def _from_frame(data: Any, request: _Request) -> Corpus:
    name = request.name or "data frame"
    positions = {str(column): position for position, column in enumerate(data.columns)}
    columns = records.find_columns(positions, lambda: data.iloc[:1, positions[NODES]].tolist(), name, **request.columns())
    used = columns.used(positions)
    values = [data.iloc[:, positions[column]].tolist() for column in used]
    rows = ((row, dict(zip(used, cells, strict=True))) for row, cells in enumerate(zip(*values, strict=True)))
    reading = _Reading(name, columns, request)
    return _corpus(reading.in_memory(rows), reading, request, name=name, domain=name)


def _from_list(items: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    first = items[0] if items else None
    if isinstance(first, Thread) or (isinstance(first, Mapping) and NODES in first):
        return _from_threads(items, labels, request)
    return _from_texts(items, labels, request)


def _from_threads(items: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "threads"
    if labels is not None and len(labels) != len(items):
        raise RequestError(f"{name}: {len(items)} threads but {len(labels)} labels; give one label per thread")
    rows: list[dict[str, Any]] = []
    for row, thread in enumerate(items):
        if not isinstance(thread, (Thread, Mapping)):
            raise RequestError(f"{name}: row {row}: expected a thread as in row 0, got a {type(thread).__name__}")
        record = {NODES: thread} if isinstance(thread, Thread) else dict(thread)
        rows.append(record if labels is None else {**record, "label": labels[row]})
    chosen = request.label_column if labels is None else "label"
    label = records.find_column(rows[0], "label", chosen, name, required=request.labeled, exclude=NODES)
    reading = _Reading(name, Columns(NODES, label, threaded=True), request)
    return _corpus(reading.in_memory(enumerate(rows)), reading, request, name=name, domain=name)


def _from_texts(texts: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "texts"
    if labels is None and request.labeled:
        raise RequestError(f"{name}: expected labels, got only texts; give a pair (texts, labels)")
    if labels is not None and len(labels) != len(texts):
        raise RequestError(f"{name}: {len(texts)} texts but {len(labels)} labels; give one label per text")
    names = ["text"] if labels is None else ["text", "label"]
    cells = [texts] if labels is None else [texts, labels]
    rows = ((row, dict(zip(names, values, strict=True))) for row, values in enumerate(zip(*cells, strict=True)))
    reading = _Reading(name, Columns("text", None if labels is None else "label"), request)
    return _corpus(reading.in_memory(rows), reading, request, name=name, domain=name)


class _Reading:
    """Turn records into a table: clean, check and count them."""

    def __init__(self, name: str, columns: Columns, request: _Request) -> None:
        self.name = name
        self.columns = columns
        self.labeled = request.labeled
        self.repairs = Repairs()
        self._thread_rows: dict[int, int] = {}  # digest of a thread's id -> row
        strings = ["text", "tree"] if columns.threaded else ["text"]
        label = [("label", pa.string())] if self.labeled else []
        self.schema = pa.schema([*((column, pa.large_string()) for column in strings), *label, ("row", pa.int64())])
        self.metadata: dict[str, str] = {}

    def in_memory(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> pa.Table:
        table = pa.Table.from_batches(list(self.batches(rows)), schema=self.schema)
        return table.replace_schema_metadata(self.metadata)

    def batches(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        cells: dict[str, list[Any]] = {column: [] for column in self.schema.names}
        characters = read = empty = first_empty = 0
        # Eight bytes of digest per text, and a number per label: the repeats among a million texts take a few megabytes.
        digests, kept_rows, codes = array("Q"), array("q"), array("i")
        label_codes: dict[str, int] = {}
        texts_sha, labels_sha = hashlib.sha256(), hashlib.sha256()

        def batch() -> pa.RecordBatch:
            return pa.record_batch([pa.array(cells[each.name], each.type) for each in self.schema], schema=self.schema)

        for row, record in rows:
            read += 1
            text, thread = self._read(row, record)
            if not text and not thread:
                empty += 1
                first_empty = row if empty == 1 else first_empty
                continue
            label = self._label(row, record)
            # Threads are repeats if their roots are; without a text in the root, if the whole threads are.
            digests.append(_digest(text.strip() or thread))
            kept_rows.append(row)
            encoded = (thread or text).encode()
            texts_sha.update(len(encoded).to_bytes(8, "little") + encoded)
            if self.labeled:
                codes.append(label_codes.setdefault(label, len(label_codes)))
                labels_sha.update(label.encode() + b"\0")
            values = {"text": text, "tree": thread, "label": label, "row": row}
            for column, column_cells in cells.items():
                column_cells.append(values[column])
            characters += len(text) + len(thread)
            if len(cells["row"]) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                yield batch()
                cells, characters = {column: [] for column in cells}, 0
        if cells["row"]:
            yield batch()
        unit, column = ("thread", "") if self.columns.threaded else ("text", f", column {self.columns.example!r}")
        if not read:
            raise RequestError(f"{self.name}: has no rows; give at least one {unit}")
        if read == empty:
            advice = "the posts need a 'text'" if self.columns.threaded else "name another column with --text-column"
            raise RequestError(f"{self.name}: row {first_empty}{column}: all {read} {unit}s are empty; {advice}")
        notices = []
        if empty:
            notices.append(f"{_count(empty, f'empty {unit}')} dropped (first: row {first_empty}{column})")
        notices += self.repairs.notices(file=self.name)
        repeated = "repeated root text" if self.columns.threaded else "repeated text"
        notices += _repeats(np.frombuffer(digests, np.uint64), np.frombuffer(kept_rows, np.int64), codes, repeated)
        if self.columns.label is not None and not self.labeled:
            notices.append(f"column {self.columns.label!r} is ignored: this data is used without labels")
        self.metadata.update(
            notices="\n".join(notices),
            empty=str(empty),
            texts=texts_sha.hexdigest(),
            fingerprint=fingerprint_of(texts_sha.hexdigest(), labels_sha.hexdigest() if self.labeled else ""),
        )

    def _read(self, row: int, record: dict[str, Any]) -> tuple[str, str]:
        """Return the text (of a thread: its root's) and the thread as `dump` writes it; both "" if there is no text."""
        example, repairs = records.read_example(record, self.columns, f"{self.name}: row {row}")
        if isinstance(example, str):
            return example, ""
        self._check_id(row, record.get("id"))
        if example.blank:
            return "", ""
        self.repairs += repairs
        return example.texts[0], dump(example)

    def _check_id(self, row: int, identity: Any) -> None:
        if is_missing(identity):
            return
        earlier = self._thread_rows.setdefault(_digest(str(identity)), row)
        if earlier != row:
            raise RequestError(
                f"{self.name}: row {row}, thread {str(identity)!r}: row {earlier} has a thread with the same id; "
                "remove one of them"
            )

    def _label(self, row: int, record: dict[str, Any]) -> str:
        if not self.labeled:
            return ""
        assert self.columns.label is not None
        return records.read_label(record, self.columns.label, f"{self.name}: row {row}")


def _corpus(
    table: pa.Table,
    reading: _Reading,
    request: _Request,
    *,
    name: str,
    domain: str,
    path: str | None = None,
    sha256: str | None = None,
) -> Corpus:
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    domain = request.domain if request.domain is not None else domain
    entry = {
        "path": path or name,
        "name": name,
        "domain": domain,
        "sha256": sha256,
        "rows": table.num_rows,
        "empty": int(metadata["empty"]),
        "threads": reading.columns.threaded,
        "text_column": reading.columns.example,
        "label_column": reading.columns.label if request.labeled else None,
        "texts": metadata["texts"],
    }
    table = table.replace_schema_metadata(None)
    table = table.append_column("domain", domain_column(domain, table.num_rows))
    table = table.append_column("file", pa.array(np.zeros(table.num_rows, np.int32)))
    notices = tuple(f"{name}: {notice}" for notice in metadata["notices"].splitlines())
    return Corpus(table, name, metadata["fingerprint"], notices, (entry,), request.cache)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _repeats(digests: np.ndarray, rows: np.ndarray, codes: array[int], unit: str) -> list[str]:
    """Return notices about texts that occur more than once, and about those of them with different labels."""
    order = np.argsort(digests, kind="stable")
    same = digests[order[1:]] == digests[order[:-1]]
    notices = []
    if same.any():
        later = order[1:][same]
        first = later.min()
        earlier = order[:-1][same][later.argmin()]
        notices.append(f"{_count(len(later), unit)} kept (first: rows {rows[earlier]} and {rows[first]})")
    if len(codes) and same.any():
        label = np.frombuffer(codes, np.int32)
        differ = same & (label[order[1:]] != label[order[:-1]])
        if differ.any():
            later = order[1:][differ]
            earlier = order[:-1][differ][later.argmin()]
            notices.append(
                f"{_count(len(later), unit)} with different labels (first: rows {rows[earlier]} and {rows[later.min()]})"
            )
    return notices


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
