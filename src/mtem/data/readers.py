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
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mtem.atomic import disk_errors
from mtem.data import parquet
from mtem.data.formats import DELIMITERS, LARGEST_RECORD, check_names, file_format
from mtem.errors import RequestError
from mtem.files import open_regular

_LARGEST_FIELD = 2**31 - 1  # the largest limit the csv module accepts on every platform
MOST_BLANK_ROWS = 1_000_000  # one after the other
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
            yield from parquet.read_rows(path, stream)
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
            return parquet.read_schema(path, stream)
        if format_name == "json":
            return next((list(record) for _, record in _json_rows(path, stream)), [])
        return _table_rows(path, stream, DELIMITERS[format_name])[0]


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file and yield its decompressed bytes; gzipped Parquet is unpacked to a temporary file, which can seek."""
    format_name, gzipped = file_format(path)
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(open_regular(path))
        start = stream.read(4)
        stream.seek(0)
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
                _unpack(path, stream, decompressed)
        except _GZIP_ERRORS as error:
            raise _gzip_error(path, 0, error) from None
        decompressed.seek(0)
        yield decompressed


def _unpack(path: str | Path, stream: IO[bytes], decompressed: IO[bytes]) -> None:
    most = max(parquet.BOMB_BYTES, parquet.BOMB_RATIO * Path(path).stat().st_size)
    while block := stream.read(1 << 20):
        decompressed.write(block)
        if decompressed.tell() > most:
            raise RequestError(f"{path}: expands to more than {most >> 20} MB; such files are refused: write it without .gz")


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


class _Position:
    """Where a reader of lines is: the last complete row, and how much was read since.

    A few kilobytes of gzip can be gigabytes in one row, or blank lines without end, so both are bounded.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.row, self.pending, self.blank_rows, self.blank = path, 0, 0, 0, 0

    def add(self, line: str) -> None:
        """Count a line, which may be a part of a row."""
        self.pending += len(line)
        if self.pending > LARGEST_RECORD:
            raise RequestError(
                f"{self.path}: row {self.row + 1}: more than {LARGEST_RECORD} characters in one row; the file is damaged, "
                "has a quote that is not closed, or is not a table"
            )

    def end_row(self, blank: bool) -> None:
        """Count a complete row."""
        self.row += 1
        self.blank_rows = self.blank_rows + 1 if blank else 0
        self.blank = self.blank + self.pending if blank else 0
        self.pending = 0
        if self.blank_rows > MOST_BLANK_ROWS or self.blank > LARGEST_RECORD:
            raise RequestError(f"{self.path}: row {self.row}: {self.blank_rows} blank rows one after the other; remove them")


def _lines(path: str | Path, stream: IO[bytes], newline: str, position: _Position) -> Iterator[str]:
    """Yield the lines of a text file; `position` has the last complete row, for the message if the gzip data ends early."""
    # Bytes that are not UTF-8 become lone surrogates here, so that a later check can name their row and column.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    first = True
    try:
        while line := text.readline(LARGEST_RECORD + 1):
            position.add(line)
            if first and line[:2] in ("\udcff\udcfe", "\udcfe\udcff"):
                raise RequestError(f"{path}: row 1: starts with the byte order mark of UTF-16; save the file as UTF-8")
            first = False
            yield line
    except _GZIP_ERRORS as error:
        raise _gzip_error(path, position.row, error) from None


def _json_rows(path: str | Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    position = _Position(path)
    empty = True
    for row, line in enumerate(_lines(path, stream, "\n", position), start=1):
        if line.isspace():
            position.end_row(blank=True)
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
        position.end_row(blank=False)
        yield row, record
    if empty:
        raise RequestError(f"{path}: the file is empty; write one JSON object per line")


def _table_rows(path: str | Path, stream: IO[bytes], delimiter: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    csv.field_size_limit(_LARGEST_FIELD)
    position = _Position(path)
    rows = _numbered(path, csv.reader(_lines(path, stream, "", position), delimiter=delimiter, strict=True), position)
    row, names = next(rows, (0, []))
    if not row:
        raise RequestError(f"{path}: the file is empty; the first row must name the columns")
    for name in names:
        _check_text(path, row, None, name)
    if not any(name.strip() for name in names):
        raise RequestError(f"{path}: row {row}: the header is missing; the first row must name the columns")
    if (unnamed := names.count("")) > 1:
        raise RequestError(f"{path}: row {row}: {unnamed} columns have no name in the header; name them")
    check_names(names, f"{path}: row {row}")

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


def _numbered(path: str | Path, reader: Iterable[list[str]], position: _Position) -> Iterator[tuple[int, list[str]]]:
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
        position.end_row(blank=not fields)
        if fields:
            yield row, fields
