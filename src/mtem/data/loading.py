"""Corpora from whatever the user has the texts in.

Files are streamed once into an Arrow file in the cache, addressed by their content, and memory-mapped from there: a
corpus of a million texts takes next to no memory and the second load next to no time.
"""

from __future__ import annotations

import hashlib
import numbers
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mtem.data import files
from mtem.data.cache import cache_folder, file_fingerprint, fingerprint_of, stored_table
from mtem.data.corpus import Corpus, domain_column, encodable, is_missing, label_name, listed
from mtem.errors import RequestError

TEXT_COLUMNS = (
    "text", "review", "sentence", "content", "body", "document", "tweet", "comment", "message", "review_body",
    "review_text", "reviewtext", "reviews", "texts", "sentences", "post", "utterance", "abstract", "headline", "title",
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "class", "category", "sentiment", "target", "y", "label_text", "class_label", "polarity",
    "rating", "stars", "intent", "topic",
)  # fmt: skip

_FORMAT = "1"  # part of every cache address: raise it when what is written changes
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
    """Texts, and their labels, from whatever they are in.

    Parameters
    ----------
    data
        A path; a pandas DataFrame; a Hugging Face Dataset; a list of texts; a pair (texts, labels); a Corpus; a list of any
        of these; or a dict that gives each a domain name. A string alone is a path; a list of strings are paths if they all
        look like data files or one of them exists, else texts.
    labeled
        Whether labels are wanted. If not, a label column is ignored and a notice says so.
    text_column, label_column
        Without them the usual names are looked for, whatever their case.
    domain
        Without it the name of the file, without its extensions.
    name
        What messages call data that is no file.
    cache
        The cache folder, `cache_directory()` without it.

    Rows are counted from 0 in lists and frames, and as `files.read_rows` does in files.
    """
    request = _Request(labeled, text_column, label_column, domain, name, Path(cache) if cache is not None else None)
    return _load(data, request)


@dataclass(frozen=True)
class _Request:
    labeled: bool
    text_column: str | None
    label_column: str | None
    domain: str | None
    name: str | None
    cache: Path | None


def _load(data: Any, request: _Request) -> Corpus:
    if isinstance(data, Corpus):
        return _from_corpus(data, request)
    if isinstance(data, (str, Path)):
        return _from_file(data, request)
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
            return _from_texts(texts, labels, request)
    items = _as_list(data)
    if items is None:
        raise RequestError(f"cannot read texts from a {type(data).__name__}; give a path, a list of texts, or a data frame")
    if not items:
        raise RequestError(f"{request.name or 'data'}: is empty; give at least one file or text")
    strings = all(isinstance(item, str) for item in items)
    if any(map(_is_data, items)) or (strings and (all(map(_path_like, items)) or any(map(_is_file, items)))):
        return Corpus.concatenate(_load(item, request) for item in items)
    return _from_texts(items, None, request)


def _as_list(data: Any) -> list[Any] | None:
    if isinstance(data, (list, tuple)):
        return list(data)
    return data.tolist() if hasattr(data, "tolist") and getattr(data, "ndim", 0) == 1 else None


def _is_data(item: Any) -> bool:
    """Whether an item of a list is data of its own; a pair of strings is not: more likely it is meant as (text, label)."""
    if isinstance(item, tuple):
        return len(item) == 2 and not any(isinstance(part, str) for part in item)
    return isinstance(item, (Path, Corpus)) or (hasattr(item, "columns") and hasattr(item, "iloc")) or _is_dataset(item)


def _is_dataset(item: Any) -> bool:
    return hasattr(item, "features") and hasattr(item, "iter") and hasattr(item, "column_names")


def _path_like(item: str) -> bool:
    if len(item) > 1000 or "\n" in item:
        return False
    try:
        files.kind_of(item)
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
        place = corpus.table.column_names.index("domain")
        column = domain_column(request.domain, len(corpus))
        entries = tuple({**entry, "domain": request.domain} for entry in corpus.files)
        corpus = replace(corpus, table=corpus.table.set_column(place, "domain", column), files=entries)
    return corpus


def _from_file(path: str | Path, request: _Request) -> Corpus:
    files.kind_of(path)
    sha256 = file_fingerprint(path)
    text_column, label_column = _columns(str(path), files.columns(path), request)
    address = fingerprint_of(_FORMAT, sha256, text_column, label_column or "", str(request.labeled))
    stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
    reading = _Reading(str(path), text_column, label_column, request.labeled)
    table = stored_table(stored, reading.schema, reading.batches(files.read_rows(path)), reading.metadata)
    name = Path(path).name
    return _corpus(table, reading, request, name=name, domain=files.bare_name(path), path=str(path), sha256=sha256)


def _from_dataset(data: Any, request: _Request) -> Corpus:
    name = request.name or "dataset"
    names = list(data.column_names or data.features or [])
    text_column, label_column = _columns(name, names, request)
    wanted = [text_column] + ([label_column] if label_column else [])
    classes = getattr((data.features or {}).get(label_column), "names", None) if label_column else None

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        row = 0
        for batch in data.select_columns(wanted).iter(batch_size=1000):
            for values in zip(*(batch[column] for column in wanted), strict=True):
                record = dict(zip(wanted, values, strict=True))
                if classes and isinstance(record[label_column], numbers.Integral):
                    # Datasets write -1 where the class is unknown.
                    number = int(record[label_column])
                    record[label_column] = classes[number] if 0 <= number < len(classes) else None
                yield row, record
                row += 1

    reading = _Reading(name, text_column, label_column, request.labeled)
    known = getattr(data, "_fingerprint", None)
    if known:
        address = fingerprint_of(_FORMAT, "dataset", str(known), *wanted, str(request.labeled), *(classes or []))
        stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
        table = stored_table(stored, reading.schema, reading.batches(rows()), reading.metadata)
    else:
        table = reading.in_memory(rows())
    return _corpus(table, reading, request, name=name, domain=name)


def _from_frame(data: Any, request: _Request) -> Corpus:
    name = request.name or "data frame"
    text_column, label_column = _columns(name, [str(column) for column in data.columns], request)
    chosen = [text_column] + ([label_column] if label_column else [])
    places = {str(column): place for place, column in enumerate(data.columns)}
    values = [data.iloc[:, places[column]].tolist() for column in chosen]
    rows = ((row, dict(zip(chosen, cells, strict=True))) for row, cells in enumerate(zip(*values, strict=True)))
    reading = _Reading(name, text_column, label_column, request.labeled)
    return _corpus(reading.in_memory(rows), reading, request, name=name, domain=name)


def _from_texts(texts: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "texts"
    if labels is None and request.labeled:
        raise RequestError(f"{name}: labels are wanted and these are texts alone; give a pair (texts, labels)")
    if labels is not None and len(labels) != len(texts):
        raise RequestError(f"{name}: {len(texts)} texts but {len(labels)} labels; give one label per text")
    names = ["text"] if labels is None else ["text", "label"]
    cells = [texts] if labels is None else [texts, labels]
    rows = ((row, dict(zip(names, values, strict=True))) for row, values in enumerate(zip(*cells, strict=True)))
    reading = _Reading(name, "text", None if labels is None else "label", request.labeled)
    return _corpus(reading.in_memory(rows), reading, request, name=name, domain=name)


def find_column(
    columns: Iterable[str], kind: str, named: str | None, name: str, *, needed: bool = True, taken: str | None = None
) -> str | None:
    """The column that holds the `kind` ("text" or "label"): `named` where given, else the first of the usual names.

    Case does not matter. Where there is none: a RequestError that lists the columns of `name`, or None if not `needed`.
    The column `taken` is not considered.
    """
    columns = list(columns)
    there = {column.strip().casefold(): column for column in reversed(columns) if column != taken}
    if named is not None:
        if named in columns:
            return named
        if named.strip().casefold() in there:
            return there[named.strip().casefold()]
        missing = f"no column {named!r}"
    else:
        for usual in {"text": TEXT_COLUMNS, "label": LABEL_COLUMNS}[kind]:
            if usual in there:
                return there[usual]
        missing = f"no {kind} column found"
    if needed:
        if len(columns) == 1 and (mark := next((mark for mark in ";\t|" if mark in columns[0]), None)):
            raise RequestError(
                f"{name}: {missing}; the header is one column {columns[0]!r}: is {mark!r} the separator? Use commas"
            )
        raise RequestError(f"{name}: {missing}; the columns are {listed(columns)}: name one with --{kind}-column")
    return None


def _columns(name: str, columns: list[str], request: _Request) -> tuple[str, str | None]:
    """The text and the label column; the label column may be absent if labels are not wanted."""
    text = find_column(columns, "text", request.text_column, name, taken=request.label_column)
    assert text is not None
    return text, find_column(columns, "label", request.label_column, name, needed=request.labeled, taken=text)


class _Reading:
    """Records on their way into a table: cleaned, checked, counted."""

    def __init__(self, name: str, text_column: str, label_column: str | None, labeled: bool):
        self.name = name
        self.text_column = text_column
        self.label_column = label_column
        self.labeled = labeled
        label = [("label", pa.string())] if labeled else []
        self.schema = pa.schema([("text", pa.large_string()), *label, ("row", pa.int64())])
        self.metadata: dict[str, str] = {}

    def in_memory(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> pa.Table:
        table = pa.Table.from_batches(list(self.batches(rows)), schema=self.schema)
        return table.replace_schema_metadata(self.metadata)

    def batches(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        texts: list[str] = []
        labels: list[str] = []
        kept: list[int] = []
        characters = read = empty = first_empty = 0
        # Eight bytes of digest per text, and a number per label, find the repeats of a million texts in a few megabytes.
        digests, places, codes = array("Q"), array("q"), array("i")
        numbers_of: dict[str, int] = {}
        texts_sha, labels_sha = hashlib.sha256(), hashlib.sha256()

        def batch() -> pa.RecordBatch:
            columns = [pa.array(texts, pa.large_string()), pa.array(kept, pa.int64())]
            if self.labeled:
                columns.insert(1, pa.array(labels, pa.string()))
            return pa.record_batch(columns, schema=self.schema)

        for row, record in rows:
            read += 1
            text = self._text(row, record.get(self.text_column))
            if text is None:
                empty += 1
                first_empty = row if empty == 1 else first_empty
                continue
            label = self._label(row, record.get(self.label_column)) if self.labeled else ""
            encoded = text.encode()
            digests.append(int.from_bytes(hashlib.blake2b(encoded.strip(), digest_size=8).digest(), "little"))
            places.append(row)
            texts_sha.update(len(encoded).to_bytes(8, "little") + encoded)
            texts.append(text)
            kept.append(row)
            if self.labeled:
                labels.append(label)
                codes.append(numbers_of.setdefault(label, len(numbers_of)))
                labels_sha.update(label.encode() + b"\0")
            characters += len(text)
            if len(texts) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                yield batch()
                texts, labels, kept, characters = [], [], [], 0
        if texts:
            yield batch()
        if not read:
            raise RequestError(f"{self.name}: holds no rows; give at least one text")
        if read == empty:
            raise RequestError(
                f"{self.name}: row {first_empty}, column {self.text_column!r}: all {read} texts are empty; "
                "name another column with --text-column"
            )
        notices = []
        if empty:
            notices.append(f"{_count(empty, 'empty text')} dropped (first: row {first_empty}, column {self.text_column!r})")
        notices += _repeats(np.frombuffer(digests, np.uint64), np.frombuffer(places, np.int64), codes)
        if self.label_column is not None and not self.labeled:
            notices.append(f"column {self.label_column!r} is ignored: this data is used without labels")
        self.metadata.update(
            notices="\n".join(notices),
            texts=texts_sha.hexdigest(),
            fingerprint=fingerprint_of(texts_sha.hexdigest(), labels_sha.hexdigest() if self.labeled else ""),
        )

    def _text(self, row: int, value: Any) -> str | None:
        """The text in a cell, None where there is none."""
        if is_missing(value):
            return None
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{self.name}: row {row}, column {self.text_column!r}: byte 0x{value[error.start]:02X} is not UTF-8"
                ) from None
        if isinstance(value, (bool, numbers.Number, np.generic)):
            value = str(value)
        if not isinstance(value, str):
            raise RequestError(
                f"{self.name}: row {row}, column {self.text_column!r}: is a {type(value).__name__}, not a text; "
                "name another column with --text-column"
            )
        text = value.replace("\0", "")
        return encodable(text) if text.strip() else None

    def _label(self, row: int, value: Any) -> str:
        if isinstance(value, (list, dict)):
            raise RequestError(
                f"{self.name}: row {row}, column {self.label_column!r}: is a {type(value).__name__}, not a label; "
                "name another column with --label-column"
            )
        label = "" if is_missing(value) else label_name(value)
        if not label or label.casefold() in ("nan", "<na>"):
            raise RequestError(
                f"{self.name}: row {row}, column {self.label_column!r}: the label is missing; "
                "fill it in, remove the row, or name another column with --label-column"
            )
        return label


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
        "text_column": reading.text_column,
        "label_column": reading.label_column if request.labeled else None,
        "texts": metadata["texts"],
    }
    table = table.replace_schema_metadata(None)
    table = table.append_column("domain", domain_column(domain, table.num_rows))
    table = table.append_column("file", pa.array(np.zeros(table.num_rows, np.int32)))
    notices = tuple(f"{name}: {notice}" for notice in metadata["notices"].splitlines())
    return Corpus(table, name, metadata["fingerprint"], notices, (entry,), request.cache)


def _repeats(digests: np.ndarray, rows: np.ndarray, codes: array[int]) -> list[str]:
    """Notices about texts that occur more than once, and about those of them with different labels."""
    order = np.argsort(digests, kind="stable")
    same = digests[order[1:]] == digests[order[:-1]]
    notices = []
    if same.any():
        later = order[1:][same]
        first = later.min()
        earlier = order[:-1][same][later.argmin()]
        notices.append(f"{_count(len(later), 'repeated text')} kept (first: rows {rows[earlier]} and {rows[first]})")
    if len(codes) and same.any():
        label = np.frombuffer(codes, np.int32)
        differ = same & (label[order[1:]] != label[order[:-1]])
        if differ.any():
            later = order[1:][differ]
            earlier = order[:-1][differ][later.argmin()]
            notices.append(
                f"{_count(len(later), 'repeated text')} with different labels "
                f"(first: rows {rows[earlier]} and {rows[later.min()]})"
            )
    return notices


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
