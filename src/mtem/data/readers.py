"""Tables of records on disk, read and written one record at a time: CSV, TSV, JSON lines, Parquet, each also gzipped.

Every failure is one line that names the file, the row and, where there is one, the column. Rows are counted as a person
sees them: in CSV and TSV as a spreadsheet does (the header is row 1), in JSON lines the line, in Parquet the record from 1.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mtem.atomic import disk_errors
from mtem.errors import RequestError

KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_LARGEST_FIELD = 2**31 - 1  # the largest limit the csv module accepts on every platform
_BATCH = 1024
_GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


def kind_of(path: str | Path) -> tuple[str, bool]:
    """The format a file's name stands for ("csv", "tsv", "json", "parquet"), and whether it is gzipped."""
    path = Path(path)
    zipped = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix if zipped else path.suffix
    kind = KINDS.get(suffix.lower())
    if kind is None:
        raise RequestError(
            f"{path}: unknown kind of file {suffix or path.name!r}; use one of {', '.join(KINDS)}, optionally with .gz"
        )
    return kind, zipped


def bare_name(path: str | Path) -> str:
    """A file's name without the extensions that say its format: books.labeled.jsonl.gz -> books.labeled."""
    path = Path(path)
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    return path.stem if path.suffix.lower() in KINDS else path.name


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row, record) for every record of a file, streaming."""
    kind, _ = kind_of(path)
    with _open(path) as stream:
        if kind == "parquet":
            yield from _parquet_rows(path, stream)
        elif kind == "json":
            yield from _json_rows(path, stream)
        else:
            names, rows = _table_rows(path, stream, _DELIMITERS[kind])
            for row, fields in rows:
                yield row, dict(zip(names, fields, strict=True))


def read_lines(name: str, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `read_rows`, from JSON lines that are open already, such as a member of an archive; `name` tells if they are gzipped."""
    _, zipped = kind_of(name)
    yield from _json_rows(name, gzip.GzipFile(fileobj=stream) if zipped else stream)  # type: ignore[arg-type]


def columns(path: str | Path) -> list[str]:
    """The names of the columns: the header, the Parquet schema, or the keys of the first JSON line."""
    kind, _ = kind_of(path)
    with _open(path) as stream:
        if kind == "parquet":
            return _open_parquet(path, stream).schema_arrow.names
        if kind == "json":
            return next((list(record) for _, record in _json_rows(path, stream)), [])
        return _table_rows(path, stream, _DELIMITERS[kind])[0]


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file; Parquet, which is read from both ends, comes as a file that can seek."""
    kind, zipped = kind_of(path)
    with contextlib.ExitStack() as stack:
        try:
            stream: Any = stack.enter_context(open(path, "rb"))
            start = stream.read(4)
            stream.seek(0)
        except FileNotFoundError:
            raise RequestError(f"{path}: no such file; check the path") from None
        except IsADirectoryError:
            raise RequestError(f"{path}: is a folder; name a file in it") from None
        except OSError as error:
            raise RequestError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
        if not start:
            raise RequestError(f"{path}: the file is empty (0 bytes)")
        if zipped:
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        elif start[:2] == b"\x1f\x8b":
            raise RequestError(f"{path}: holds gzip-compressed data; rename it to {Path(path).name}.gz")
        if kind == "parquet" and zipped:
            stream = stack.enter_context(_decompressed(path, stream))
        yield stream


@contextlib.contextmanager
def _decompressed(path: str | Path, stream: Any) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile(prefix="mtem-") as whole:
        try:
            with disk_errors(tempfile.gettempdir()):
                shutil.copyfileobj(stream, whole, 1 << 20)
        except _GZIP_ERRORS as error:
            raise _gzip_error(path, 0, error) from None
        whole.seek(0)
        yield whole  # type: ignore[misc]


def _gzip_error(path: str | Path, row: int, error: Exception) -> RequestError:
    place = f" after row {row}" if row else ""
    if isinstance(error, EOFError):
        return RequestError(f"{path}: the gzip data ends too early{place}; the file is truncated: fetch or make it again")
    return RequestError(f"{path}: the gzip data is damaged{place} ({error}); fetch or make the file again")


def _check_text(path: str | Path, row: int, column: str | None, text: str) -> None:
    """Refuse what was no UTF-8 (decoding left lone surrogates in its place) and NUL bytes."""
    place = f"{path}: row {row}" + (f", column {column!r}" if column is not None else "")
    if "\0" in text:
        raise RequestError(f"{place}: holds a NUL byte; the file is damaged or not UTF-8 text: save it as UTF-8")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise RequestError(
            f"{place}: byte 0x{byte:02X} at position {error.start + 1} is not UTF-8; save the file as UTF-8"
        ) from None


def _lines(path: str | Path, stream: BinaryIO, newline: str, where: list[int]) -> Iterator[str]:
    """The lines of a text file; `where` holds the last complete row, for the message when the gzip data breaks off."""
    # Undecodable bytes come through as lone surrogates, so that the row and column they stand in can be named.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    first = True
    try:
        for line in text:
            if first and line[:2] in ("\udcff\udcfe", "\udcfe\udcff"):
                raise RequestError(f"{path}: row 1: starts with the mark of UTF-16 (byte 0xFF); save the file as UTF-8")
            first = False
            yield line
    except _GZIP_ERRORS as error:
        raise _gzip_error(path, where[0], error) from None


def _json_rows(path: str | Path, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    where = [0]
    found = False
    for row, line in enumerate(_lines(path, stream, "\n", where), start=1):
        if line.isspace():
            where[0] = row
            continue
        _check_text(path, row, None, line)
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(
                f"{path}: row {row}: not valid JSON ({error.msg} at character {error.pos + 1}); "
                "every line must be one JSON object"
            ) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}: row {row}: not usable JSON ({str(error)[:80]})") from None
        if not isinstance(record, dict):
            kind = {list: "an array", str: "a string", type(None): "null", bool: "true or false"}.get(type(record), "a number")
            raise RequestError(f"{path}: row {row}: is {kind}, not an object; every line must be one JSON object")
        found = True
        where[0] = row
        yield row, record
    if not found:
        raise RequestError(f"{path}: the file is empty: no JSON object in it")


def _table_rows(path: str | Path, stream: BinaryIO, delimiter: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    csv.field_size_limit(_LARGEST_FIELD)
    where = [0]
    rows = _numbered(path, csv.reader(_lines(path, stream, "", where), delimiter=delimiter, strict=True), where)
    row, names = next(rows, (0, []))
    if not row:
        raise RequestError(f"{path}: the file is empty: not even a header with the names of the columns")
    for name in names:
        _check_text(path, row, None, name)
    if not any(name.strip() for name in names):
        raise RequestError(f"{path}: row {row}: the header is missing; the first row must name the columns")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{path}: row {row}: column {repeated!r} is named twice in the header; rename one")
    if names.count("") > 1:
        raise RequestError(f"{path}: row {row}: {names.count('')} columns have no name in the header; name them")

    def records() -> Iterator[tuple[int, list[str]]]:
        for row, fields in rows:
            if len(fields) != len(names):
                some = "few" if len(fields) < len(names) else "many"
                raise RequestError(
                    f"{path}: row {row}: too {some} fields ({len(fields)}, the header has {len(names)}); "
                    "quote texts that hold the delimiter or a line break"
                )
            for name, field in zip(names, fields, strict=True):
                _check_text(path, row, name, field)
            yield row, fields

    return names, records()


def _numbered(path: str | Path, reader: Iterable[list[str]], where: list[int]) -> Iterator[tuple[int, list[str]]]:
    """Number the rows; blank ones are counted, as a spreadsheet does, but not given."""
    row = 0
    rows = iter(reader)
    while True:
        row += 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "NUL" in str(error):
                raise RequestError(f"{path}: row {row}: holds a NUL byte; save the file as UTF-8 text") from None
            raise RequestError(
                f"{path}: row {row}: {error}; a field that starts with a quote must end with one, inner quotes doubled"
            ) from None
        where[0] = row
        if fields:
            yield row, fields


def _open_parquet(path: str | Path, stream: BinaryIO) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _parquet_error(path, 0, error) from None
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{path}: column {repeated!r} is there twice; rename one")
    return file


def _parquet_rows(path: str | Path, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    file = _open_parquet(path, stream)
    row = 0
    batches = file.iter_batches(batch_size=_BATCH)
    while True:
        try:
            batch = next(batches)
            # Arrow does not check the bytes of a string column; Python does, here.
            records = batch.to_pylist()
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            row, column = _broken_cell(batch, row)
            byte = error.object[error.start]
            raise RequestError(
                f"{path}: row {row}, column {column!r}: byte 0x{byte:02X} at position {error.start + 1} is not UTF-8; "
                "write the file again from UTF-8 text"
            ) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _parquet_error(path, row, error) from None
        for record in records:
            row += 1
            yield row, record


def _broken_cell(batch: pa.RecordBatch, row: int) -> tuple[int, str]:
    for offset in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[offset].as_py()
            except UnicodeDecodeError:
                return row + offset + 1, name
    return row, ""


def _parquet_error(path: str | Path, row: int, error: Exception) -> RequestError:
    place = f" after row {row}" if row else ""
    reason = " ".join(str(error).split())[:120]
    return RequestError(f"{path}: not a readable Parquet file{place} ({reason}); fetch or make it again")
