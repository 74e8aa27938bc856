"""Read tables from disk one record at a time: CSV, TSV, JSON lines and Parquet, each also gzipped.

Every error is one line with the file, the row and, if known, the column. Row numbers are those a person sees: in CSV and TSV
as in a spreadsheet (the header is row 1), in JSON lines the number of the line, in Parquet the number of the record from 1.
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
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtem.atomic import disk_errors
from mtem.data.formats import DELIMITERS, PARQUET_BATCH, file_format
from mtem.errors import RequestError

_LARGEST_FIELD = 2**31 - 1  # the largest limit the csv module accepts on every platform
_GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the row number and the record, as a dict, of every record of a file; memory does not grow with the file.

    Raises
    ------
    RequestError
        If the file cannot be read or is damaged; the message names the row.
    """
    format_name, _ = file_format(path)
    with _open(path) as stream:
        if format_name == "parquet":
            yield from _parquet_rows(path, stream)
        elif format_name == "json":
            yield from _json_rows(path, stream)
        else:
            names, rows = _table_rows(path, stream, DELIMITERS[format_name])
            for row, fields in rows:
                yield row, dict(zip(names, fields, strict=True))


def read_lines(name: str, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of an open stream of JSON lines, such as a member of an archive.

    Parameters
    ----------
    name : str
        For messages; its extension says whether the stream is gzipped.
    stream : binary file
        Read from its current position.

    Yields
    ------
    tuple of int and dict
        As `read_rows`.
    """
    _, gzipped = file_format(name)
    yield from _json_rows(name, gzip.GzipFile(fileobj=stream) if gzipped else stream)  # type: ignore[arg-type]


def columns(path: str | Path) -> list[str]:
    """Return the names of a file's columns: the header, the Parquet schema, or the keys of the first JSON line."""
    format_name, _ = file_format(path)
    with _open(path) as stream:
        if format_name == "parquet":
            return list(_open_parquet(path, stream).schema_arrow.names)
        if format_name == "json":
            return next((list(record) for _, record in _json_rows(path, stream)), [])
        return _table_rows(path, stream, DELIMITERS[format_name])[0]


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file and yield its decompressed bytes; gzipped Parquet is unpacked to a temporary file, which can seek."""
    format_name, gzipped = file_format(path)
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
            raise RequestError(f"{path}: the file is empty (0 bytes); check how it was written")
        if gzipped:
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        elif start[:2] == b"\x1f\x8b":
            raise RequestError(f"{path}: is gzip-compressed; rename it to {Path(path).name}.gz")
        if format_name == "parquet" and gzipped:
            stream = stack.enter_context(_decompressed(path, stream))
        yield stream


@contextlib.contextmanager
def _decompressed(path: str | Path, stream: Any) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(prefix="mtem-") as decompressed:
        try:
            with disk_errors(tempfile.gettempdir()):
                shutil.copyfileobj(stream, decompressed, 1 << 20)
        except _GZIP_ERRORS as error:
            raise _gzip_error(path, 0, error) from None
        decompressed.seek(0)
        yield decompressed


def _gzip_error(path: str | Path, row: int, error: Exception) -> RequestError:
    position = f" after row {row}" if row else ""
    if isinstance(error, EOFError):
        return RequestError(f"{path}: the gzip data ends too early{position}; the file is truncated: download or write it again")
    return RequestError(f"{path}: the gzip data is damaged{position} ({error}); download or write the file again")


def _check_text(path: str | Path, row: int, column: str | None, text: str) -> None:
    """Refuse bytes that are not UTF-8 (decoding turned them into lone surrogates) and NUL bytes."""
    where = f"{path}: row {row}" + (f", column {column!r}" if column is not None else "")
    if "\0" in text:
        raise RequestError(f"{where}: contains a NUL byte; the file is damaged or not UTF-8 text: save it as UTF-8")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise RequestError(
            f"{where}: byte 0x{byte:02X} at position {error.start + 1} is not UTF-8; save the file as UTF-8"
        ) from None


def _lines(path: str | Path, stream: IO[bytes], newline: str, last_row: list[int]) -> Iterator[str]:
    """Yield the lines of a text file; `last_row` holds the last complete row, for the message if the gzip data ends early."""
    # Bytes that are not UTF-8 become lone surrogates here, so that a later check can name their row and column.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    first = True
    try:
        for line in text:
            if first and line[:2] in ("\udcff\udcfe", "\udcfe\udcff"):
                raise RequestError(f"{path}: row 1: starts with the byte order mark of UTF-16; save the file as UTF-8")
            first = False
            yield line
    except _GZIP_ERRORS as error:
        raise _gzip_error(path, last_row[0], error) from None


def _json_rows(path: str | Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    last_row = [0]
    empty = True
    for row, line in enumerate(_lines(path, stream, "\n", last_row), start=1):
        if line.isspace():
            last_row[0] = row
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
            got = {list: "an array", str: "a string", type(None): "null", bool: "true or false"}.get(type(record), "a number")
            raise RequestError(f"{path}: row {row}: expected an object, got {got}; every line must be one JSON object")
        empty = False
        last_row[0] = row
        yield row, record
    if empty:
        raise RequestError(f"{path}: the file is empty; write one JSON object per line")


def _table_rows(path: str | Path, stream: IO[bytes], delimiter: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    csv.field_size_limit(_LARGEST_FIELD)
    last_row = [0]
    rows = _numbered(path, csv.reader(_lines(path, stream, "", last_row), delimiter=delimiter, strict=True), last_row)
    row, names = next(rows, (0, []))
    if not row:
        raise RequestError(f"{path}: the file is empty; the first row must name the columns")
    for name in names:
        _check_text(path, row, None, name)
    if not any(name.strip() for name in names):
        raise RequestError(f"{path}: row {row}: the header is missing; the first row must name the columns")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{path}: row {row}: column {repeated!r} occurs twice in the header; rename one")
    if names.count("") > 1:
        raise RequestError(f"{path}: row {row}: {names.count('')} columns have no name in the header; name them")

    def records() -> Iterator[tuple[int, list[str]]]:
        for row, fields in rows:
            if len(fields) != len(names):
                much = "few" if len(fields) < len(names) else "many"
                raise RequestError(
                    f"{path}: row {row}: too {much} fields ({len(fields)}, the header has {len(names)}); "
                    "quote texts that contain the delimiter or a line break"
                )
            for name, field in zip(names, fields, strict=True):
                _check_text(path, row, name, field)
            yield row, fields

    return names, records()


def _numbered(path: str | Path, reader: Iterable[list[str]], last_row: list[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows with their numbers; blank rows are counted, as in a spreadsheet, but left out."""
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
                raise RequestError(f"{path}: row {row}: contains a NUL byte; save the file as UTF-8 text") from None
            raise RequestError(
                f"{path}: row {row}: {error}; a field that starts with a quote must end with one, inner quotes doubled"
            ) from None
        last_row[0] = row
        if fields:
            yield row, fields


def _open_parquet(path: str | Path, stream: IO[bytes]) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _parquet_error(path, 0, error) from None
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{path}: column {repeated!r} occurs twice; rename one")
    return file


def _parquet_rows(path: str | Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    file = _open_parquet(path, stream)
    row = 0
    batches = file.iter_batches(batch_size=PARQUET_BATCH)
    while True:
        try:
            batch = next(batches)
            # Arrow does not check that string columns are UTF-8; the conversion to Python does.
            records = batch.to_pylist()
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            row, column = _undecodable_cell(batch, row)
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


def _undecodable_cell(batch: pa.RecordBatch, row: int) -> tuple[int, str]:
    for offset in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[offset].as_py()
            except UnicodeDecodeError:
                return row + offset + 1, name
    return row, ""


def _parquet_error(path: str | Path, row: int, error: Exception) -> RequestError:
    position = f" after row {row}" if row else ""
    reason = " ".join(str(error).split())[:120]
    return RequestError(f"{path}: not a readable Parquet file{position} ({reason}); download or write it again")
