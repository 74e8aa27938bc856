"""Load a corpus from files, data frames, datasets or lists.

A file is streamed once into an Arrow file in the cache, addressed by its content, and memory-mapped from there: a corpus of a
million texts takes little memory, and the second load little time.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from mtem.data import formats, readers, records
from mtem.data.cache import cache_folder, file_fingerprint, fingerprint_of, stored_table
from mtem.data.corpus import Corpus, domain_column
from mtem.data.records import Columns
from mtem.data.tables import TableBuilder
from mtem.data.threads import NODES, Thread
from mtem.errors import RequestError

_FORMAT = "3"  # part of every cache address; increase it when the stored contents change


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
    builder = TableBuilder(str(path), columns, request.labeled)
    table = stored_table(stored, builder.schema, builder.batches(readers.read_rows(path)), builder.metadata)
    name = Path(path).name
    return _corpus(table, builder, request, name=name, domain=formats.bare_name(path), path=str(path), sha256=sha256)


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

    builder = TableBuilder(name, columns, request.labeled)
    fingerprint = getattr(data, "_fingerprint", None)
    if fingerprint:
        address = fingerprint_of(_FORMAT, "dataset", str(fingerprint), *used, str(request.labeled), *(classes or []))
        stored = cache_folder("corpora", request.cache) / f"{address}.arrow"
        table = stored_table(stored, builder.schema, builder.batches(rows()), builder.metadata)
    else:
        table = builder.in_memory(rows())
    return _corpus(table, builder, request, name=name, domain=name)


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
    builder = TableBuilder(name, columns, request.labeled)
    return _corpus(builder.in_memory(rows), builder, request, name=name, domain=name)


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
    builder = TableBuilder(name, Columns(NODES, label, threaded=True), request.labeled)
    return _corpus(builder.in_memory(enumerate(rows)), builder, request, name=name, domain=name)


def _from_texts(texts: list[Any], labels: list[Any] | None, request: _Request) -> Corpus:
    name = request.name or "texts"
    if labels is None and request.labeled:
        raise RequestError(f"{name}: expected labels, got only texts; give a pair (texts, labels)")
    if labels is not None and len(labels) != len(texts):
        raise RequestError(f"{name}: {len(texts)} texts but {len(labels)} labels; give one label per text")
    names = ["text"] if labels is None else ["text", "label"]
    cells = [texts] if labels is None else [texts, labels]
    rows = ((row, dict(zip(names, values, strict=True))) for row, values in enumerate(zip(*cells, strict=True)))
    builder = TableBuilder(name, Columns("text", None if labels is None else "label"), request.labeled)
    return _corpus(builder.in_memory(rows), builder, request, name=name, domain=name)


def _corpus(
    table: pa.Table,
    builder: TableBuilder,
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
        "threads": builder.columns.threaded,
        "text_column": builder.columns.example,
        "label_column": builder.columns.label if request.labeled else None,
        "texts": metadata["texts"],
    }
    table = table.replace_schema_metadata(None)
    table = table.append_column("domain", domain_column(domain, table.num_rows))
    table = table.append_column("file", pa.array(np.zeros(table.num_rows, np.int32)))
    notices = tuple(f"{name}: {notice}" for notice in metadata["notices"].splitlines())
    return Corpus(table, name, metadata["fingerprint"], notices, (entry,), request.cache)
