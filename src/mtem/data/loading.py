"""Corpora from whatever the user has the texts, or threads of them, in.

Files are streamed once into an Arrow file in the cache, addressed by their content, and memory-mapped from there: a
corpus of a million texts takes next to no memory and the second load next to no time.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mtem.data import readers, threads
from mtem.data.cache import cache_folder, file_fingerprint, fingerprint_of, stored_table
from mtem.data.corpus import Corpus, domain_column, label_name, listed
from mtem.data.values import is_missing, text_of
from mtem.errors import RequestError

TEXT_COLUMNS = (
    "text", "review", "sentence", "content", "body", "document", "tweet", "comment", "message", "review_body",
    "review_text", "reviewtext", "reviews", "texts", "sentences", "post", "utterance", "abstract", "headline", "title",
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "class", "category", "sentiment", "target", "y", "label_text", "class_label", "polarity",
    "rating", "stars", "intent", "topic",
)  # fmt: skip

_FORMAT = "3"  # part of every cache address: raise it when what is written changes
_BATCH_ROWS = 8192
_BATCH_CHARACTERS = 1 << 25
_POSTS = re.compile(r"\s*\[\s*\{")  # how JSON that spells a list of objects begins


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
        look like data files or one of them exists, else texts. A table with a column `nodes` of lists holds threads (see
        `mtem.data.threads`); in lists a thread, as a dict with `nodes` and maybe `label` or as a Thread, stands where a text would.
    labeled
        Whether labels are wanted. If not, a label column is ignored and a notice says so.
    text_column, label_column
        Without them the usual names are looked for, whatever their case. A text column that is named makes texts of a table
        of threads.
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
    if isinstance(data, threads.Thread):
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
        raise RequestError(f"cannot read texts from a {type(data).__name__}; give a path, a list of texts, or a data frame")
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
    """Whether an item of a list is data of its own; a pair of strings is not: more likely it is meant as (text, label)."""
    if isinstance(item, tuple) and not isinstance(item, threads.Thread):
        return len(item) == 2 and not any(isinstance(part, str) for part in item)
    return isinstance(item, (Path, Corpus)) or (hasattr(item, "columns") and hasattr(item, "iloc")) or _is_dataset(item)


def _is_dataset(item: Any) -> bool:
    return hasattr(item, "features") and hasattr(item, "iter") and hasattr(item, "column_names")


def _path_like(item: str) -> bool:
    if len(item) > 1000 or "\n" in item:
        return False
    try:
        readers.kind_of(item)
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
    readers.kind_of(path)
    sha256 = file_fingerprint(path)
    columns = _columns(
        str(path), readers.columns(path), request, lambda: (record.get(threads.NODES) for _, record in readers.read_rows(path))
    )
    address = fingerprint_of(_FORMAT, sha256, columns.example, columns.label or "", str(request.labeled))
    stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
    reading = _Reading(str(path), columns, request)
    table = stored_table(stored, reading.schema, reading.batches(readers.read_rows(path)), reading.metadata)
    name = Path(path).name
    return _corpus(table, reading, request, name=name, domain=readers.bare_name(path), path=str(path), sha256=sha256)


def _from_dataset(data: Any, request: _Request) -> Corpus:
    name = request.name or "dataset"
    names = list(data.column_names or data.features or [])
    columns = _columns(name, names, request, lambda: _nodes(data))
    wanted = columns.wanted(names)
    label = columns.label
    classes = getattr((data.features or {}).get(label), "names", None) if label else None

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        row = 0
        for batch in data.select_columns(wanted).iter(batch_size=1000):
            for values in zip(*(batch[column] for column in wanted), strict=True):
                record = dict(zip(wanted, values, strict=True))
                if classes and isinstance(record[label], numbers.Integral):
                    # Datasets write -1 where the class is unknown.
                    number = int(record[label])
                    record[label] = classes[number] if 0 <= number < len(classes) else None
                yield row, record
                row += 1

    reading = _Reading(name, columns, request)
    known = getattr(data, "_fingerprint", None)
    if known:
        address = fingerprint_of(_FORMAT, "dataset", str(known), *wanted, str(request.labeled), *(classes or []))
        stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
        table = stored_table(stored, reading.schema, reading.batches(rows()), reading.metadata)
    else:
        table = reading.in_memory(rows())
    return _corpus(table, reading, request, name=name, domain=name)


def _nodes(data: Any) -> Iterator[Any]:
    for batch in data.select_columns([threads.NODES]).iter(batch_size=1):
        yield from batch[threads.NODES]


def _from_frame(data: Any, request: _Request) -> Corpus:
    name = request.name or "data frame"
    places = {str(column): place for place, column in enumerate(data.columns)}
    columns = _columns(name, list(places), request, lambda: data.iloc[:1, places[threads.NODES]].tolist())
    chosen = columns.wanted(places)
    values = [data.iloc[:, places[column]].tolist() for column in chosen]
    rows = ((row, dict(zip(chosen, cells, strict=True))) for row, cells in enumerate(zip(*values, strict=True)))
    reading = _Reading(name, columns, request)
    return _corpus(reading.in_memory(rows), reading, request, name=name, domain=name)


def _from_list(items: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    first = items[0] if items else None
    if isinstance(first, threads.Thread) or (isinstance(first, Mapping) and threads.NODES in first):
        return _from_threads(items, labels, request)
    return _from_texts(items, labels, request)


def _from_threads(items: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "threads"
    if labels is not None and len(labels) != len(items):
        raise RequestError(f"{name}: {len(items)} threads but {len(labels)} labels; give one label per thread")
    records: list[dict[str, Any]] = []
    for row, thread in enumerate(items):
        if not isinstance(thread, (threads.Thread, Mapping)):
            raise RequestError(f"{name}: row {row}: is a {type(thread).__name__} and row 0 a thread; give threads alone")
        record = {threads.NODES: thread} if isinstance(thread, threads.Thread) else dict(thread)
        records.append(record if labels is None else {**record, "label": labels[row]})
    named = request.label_column if labels is None else "label"
    label = find_column(records[0], "label", named, name, needed=request.labeled, taken=threads.NODES)
    columns = _Columns(threads.NODES, label, threaded=True)
    reading = _Reading(name, columns, request)
    return _corpus(reading.in_memory(enumerate(records)), reading, request, name=name, domain=name)


def _from_texts(texts: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "texts"
    if labels is None and request.labeled:
        raise RequestError(f"{name}: labels are wanted and these are texts alone; give a pair (texts, labels)")
    if labels is not None and len(labels) != len(texts):
        raise RequestError(f"{name}: {len(texts)} texts but {len(labels)} labels; give one label per text")
    names = ["text"] if labels is None else ["text", "label"]
    cells = [texts] if labels is None else [texts, labels]
    rows = ((row, dict(zip(names, values, strict=True))) for row, values in enumerate(zip(*cells, strict=True)))
    reading = _Reading(name, _Columns("text", None if labels is None else "label"), request)
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


def example_column(path: str | Path, text_column: str | None = None) -> tuple[str, bool]:
    """The column of a file that holds the texts, or the posts of threads; and whether it is these."""
    request = _Request(False, text_column, None, None, None, None)
    rows = (record.get(threads.NODES) for _, record in readers.read_rows(path))
    columns = _columns(str(path), readers.columns(path), request, lambda: rows)
    return columns.example, columns.threaded


def text_cell(record: Mapping[str, Any], column: str, where: str, *, named: bool) -> str:
    """The text in a row's `column`, "" where there is none; RequestError for what is no text. `named`: the user named it."""
    if not named and isinstance(record.get(threads.NODES), list):
        raise RequestError(
            f"{where}: is a thread (it has {threads.NODES!r}) and the first row is a text; "
            "put threads and texts into files of their own, or name the column to read with --text-column"
        )
    value = record.get(column)
    try:
        return text_of(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}, column {column!r}: byte 0x{value[error.start]:02X} is not UTF-8") from None
    except TypeError as error:
        raise RequestError(f"{where}, column {column!r}: {error}; name another column with --text-column") from None


class _Columns(NamedTuple):
    example: str  # what holds the text, or the posts of the thread
    label: str | None
    threaded: bool = False

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that matter."""
        matter = (self.example, self.label, "id" if self.threaded else None)
        return [name for name in dict.fromkeys(matter) if name in names]


def _columns(name: str, columns: list[str], request: _Request, nodes: Callable[[], Iterable[Any]]) -> _Columns:
    """Which columns to read; the label column may be absent if labels are not wanted.

    Where no text column is named and a column `nodes` begins with a list (or with JSON that spells one of objects), threads
    are meant. `nodes` gives what is in that column.
    """
    if request.text_column in (None, threads.NODES) and threads.NODES in columns:
        for value in itertools.islice(nodes(), 1):
            if _POSTS.match(value) if isinstance(value, str) else isinstance(value, (list, tuple, np.ndarray)):
                label = find_column(columns, "label", request.label_column, name, needed=request.labeled, taken=threads.NODES)
                return _Columns(threads.NODES, label, threaded=True)
    text = find_column(columns, "text", request.text_column, name, taken=request.label_column)
    assert text is not None
    return _Columns(text, find_column(columns, "label", request.label_column, name, needed=request.labeled, taken=text))


class _Reading:
    """Records on their way into a table: cleaned, checked, counted."""

    def __init__(self, name: str, columns: _Columns, request: _Request):
        self.name = name
        self.columns = columns
        self.labeled = request.labeled
        self.text_named = request.text_column is not None
        self.repairs = threads.Repairs()
        self._threads: dict[int, int] = {}
        long = ["text", "tree"] if columns.threaded else ["text"]
        label = [("label", pa.string())] if self.labeled else []
        self.schema = pa.schema([*((column, pa.large_string()) for column in long), *label, ("row", pa.int64())])
        self.metadata: dict[str, str] = {}

    def in_memory(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> pa.Table:
        table = pa.Table.from_batches(list(self.batches(rows)), schema=self.schema)
        return table.replace_schema_metadata(self.metadata)

    def batches(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        cells: dict[str, list[Any]] = {column: [] for column in self.schema.names}
        characters = read = empty = first_empty = 0
        # Eight bytes of digest per text, and a number per label, find the repeats of a million texts in a few megabytes.
        digests, places, codes = array("Q"), array("q"), array("i")
        numbers_of: dict[str, int] = {}
        texts_sha, labels_sha = hashlib.sha256(), hashlib.sha256()

        def batch() -> pa.RecordBatch:
            return pa.record_batch([pa.array(cells[each.name], each.type) for each in self.schema], schema=self.schema)

        for row, record in rows:
            read += 1
            text, tree = self._thread(row, record) if self.columns.threaded else (self._text(row, record), "")
            if not text and not tree:
                empty += 1
                first_empty = row if empty == 1 else first_empty
                continue
            label = self._label(row, record.get(self.columns.label)) if self.labeled else ""
            # A thread is found again by its root; one whose root has no text, as a whole.
            digests.append(_digest(text.strip() or tree))
            places.append(row)
            encoded = (tree or text).encode()
            texts_sha.update(len(encoded).to_bytes(8, "little") + encoded)
            if self.labeled:
                codes.append(numbers_of.setdefault(label, len(numbers_of)))
                labels_sha.update(label.encode() + b"\0")
            values = {"text": text, "tree": tree, "label": label, "row": row}
            for column, column_cells in cells.items():
                column_cells.append(values[column])
            characters += len(text) + len(tree)
            if len(cells["row"]) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                yield batch()
                cells, characters = {column: [] for column in cells}, 0
        if cells["row"]:
            yield batch()
        what, column = ("thread", "") if self.columns.threaded else ("text", f", column {self.columns.example!r}")
        if not read:
            raise RequestError(f"{self.name}: holds no rows; give at least one {what}")
        if read == empty:
            advice = "the posts need a 'text'" if self.columns.threaded else "name another column with --text-column"
            raise RequestError(f"{self.name}: row {first_empty}{column}: all {read} {what}s are empty; {advice}")
        notices = []
        if empty:
            notices.append(f"{_count(empty, f'empty {what}')} dropped (first: row {first_empty}{column})")
        notices += self.repairs.notices(inside=self.name)
        what = "repeated root text" if self.columns.threaded else "repeated text"
        notices += _repeats(np.frombuffer(digests, np.uint64), np.frombuffer(places, np.int64), codes, what)
        if self.columns.label is not None and not self.labeled:
            notices.append(f"column {self.columns.label!r} is ignored: this data is used without labels")
        self.metadata.update(
            notices="\n".join(notices),
            empty=str(empty),
            texts=texts_sha.hexdigest(),
            fingerprint=fingerprint_of(texts_sha.hexdigest(), labels_sha.hexdigest() if self.labeled else ""),
        )

    def _thread(self, row: int, record: dict[str, Any]) -> tuple[str, str]:
        """The root's text and the tree, both "" if the thread has no text."""
        tree, repairs = threads.read(record, f"{self.name}: row {row}")
        if not is_missing(record.get("id")):
            earlier = self._threads.setdefault(_digest(str(record["id"])), row)
            if earlier != row:
                raise RequestError(
                    f"{self.name}: row {row}, thread {str(record['id'])!r}: row {earlier} is a thread of that id already; "
                    "remove one of them"
                )
        if tree.blank:
            return "", ""
        self.repairs += repairs
        return tree.texts[0], threads.dump(tree)

    def _text(self, row: int, record: dict[str, Any]) -> str:
        """The text of a record, "" where there is none."""
        return text_cell(record, self.columns.example, f"{self.name}: row {row}", named=self.text_named)

    def _label(self, row: int, value: Any) -> str:
        if isinstance(value, (list, dict)):
            raise RequestError(
                f"{self.name}: row {row}, column {self.columns.label!r}: is a {type(value).__name__}, not a label; "
                "name another column with --label-column"
            )
        label = "" if is_missing(value) else label_name(value)
        if not label or label.casefold() in ("nan", "<na>"):
            raise RequestError(
                f"{self.name}: row {row}, column {self.columns.label!r}: the label is missing; "
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


def _repeats(digests: np.ndarray, rows: np.ndarray, codes: array[int], what: str) -> list[str]:
    """Notices about texts that occur more than once, and about those of them with different labels."""
    order = np.argsort(digests, kind="stable")
    same = digests[order[1:]] == digests[order[:-1]]
    notices = []
    if same.any():
        later = order[1:][same]
        first = later.min()
        earlier = order[:-1][same][later.argmin()]
        notices.append(f"{_count(len(later), what)} kept (first: rows {rows[earlier]} and {rows[first]})")
    if len(codes) and same.any():
        label = np.frombuffer(codes, np.int32)
        differ = same & (label[order[1:]] != label[order[:-1]])
        if differ.any():
            later = order[1:][differ]
            earlier = order[:-1][differ][later.argmin()]
            notices.append(
                f"{_count(len(later), what)} with different labels (first: rows {rows[earlier]} and {rows[later.min()]})"
            )
    return notices


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
