"""Write tables to disk one record at a time, in the formats that `mtem.data.readers` reads."""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import io
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtem.atomic import atomic_write, disk_errors
from mtem.data.formats import DELIMITERS, PARQUET_BATCH, file_format
from mtem.errors import RequestError

_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")  # the last four characters are full-width
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class Writer:
    """Context manager that writes records to a file, which appears, complete, when the block ends without an error.

    Parameters
    ----------
    path : str or Path
        The extension gives the format.
    columns : iterable of str, optional
        The columns and their order; by default those of the first record. Ignored for JSON lines, where every record has its
        own keys.
    spreadsheet : bool
        Whether a CSV or TSV file is meant for a spreadsheet: cells that it would take for formulas get an apostrophe in front
        (see `without_formula`).

    Examples
    --------
    >>> with Writer("predictions.csv") as out:  # doctest: +SKIP
    ...     out.write({"text": "fine", "label": "positive"})
    """

    def __init__(self, path: str | Path, columns: Iterable[str] | None = None, *, spreadsheet: bool = False) -> None:
        self.path = Path(path)
        self.columns = list(columns) if columns is not None else None
        self.spreadsheet = spreadsheet
        self._known = set(self.columns or ())
        self._format, self._gzipped = file_format(path)
        self._written = 0

    def __enter__(self) -> Writer:
        """Open a temporary file beside the path."""
        with contextlib.ExitStack() as stack:
            stream: Any = stack.enter_context(atomic_write(self.path))
            if self._gzipped:
                # Without a name and a time in the header, the same records give the same bytes.
                stream = stack.enter_context(gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0))
            self._stream = stream
            if self._format == "parquet":
                self._spool = _ParquetSpool(self.path)
                stack.callback(self._spool.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Move the complete file to its path, or remove it after an error."""
        if error_type is None:
            try:
                self._finish()
            except BaseException as failure:
                if not self._stack.__exit__(type(failure), failure, failure.__traceback__):
                    raise
                return None
        return self._stack.__exit__(error_type, error, traceback)

    def write(self, record: dict[str, Any]) -> None:
        """Add one record; columns it lacks stay empty.

        Raises
        ------
        RequestError
            If the record has a column that the file has not (except in JSON lines).
        """
        if self._format == "json":
            self._stream.write(_json_line(record))
        elif self._format == "parquet":
            names = self._columns_of(record)
            self._spool.add({name: record.get(name) for name in names})
        else:
            names = self._columns_of(record)
            if not self._written:
                self._write_fields(names)
            self._write_fields([_cell(record.get(name)) for name in names])
        self._written += 1

    def _columns_of(self, record: dict[str, Any]) -> list[str]:
        if self.columns is None:
            self.columns = list(record)
            self._known = set(record)
        if (unknown := next((name for name in record if name not in self._known), None)) is not None:
            raise RequestError(
                f"{self.path}: record {self._written + 1} has a column {unknown!r} that the first record has not; "
                "write .jsonl instead, or list all columns"
            )
        return self.columns

    def _write_fields(self, fields: list[str]) -> None:
        if self.spreadsheet:
            fields = [without_formula(field) for field in fields]
        line = io.StringIO()
        # Only with this terminator does every version of Python quote a lone carriage return. The line still ends in \n.
        csv.writer(line, delimiter=DELIMITERS[self._format], lineterminator="\r\n").writerow(fields)
        # CSV has no NUL, and UTF-8 no lone surrogates.
        text = line.getvalue().removesuffix("\r\n").replace("\0", "") + "\n"
        self._stream.write(text.encode("utf-8", errors="replace"))

    def _finish(self) -> None:
        if self._format in DELIMITERS and not self._written and self.columns:
            self._write_fields(self.columns)
        elif self._format == "parquet":
            self._spool.copy_to(self._stream, self.columns or [])


def without_formula(cell: str) -> str:
    """Return the text of a cell so that no spreadsheet runs it: with an apostrophe in front if it would begin a formula.

    Spreadsheets take a cell that begins with =, +, - or @ for a formula, some also after white space; it may start programs or
    send other cells away. Numbers stay as they are.
    """
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=_to_json)
    return str(_to_json(value))


def _to_json(value: Any) -> Any:
    """Convert types that JSON lacks: times to ISO format, bytes to text, NumPy values to Python's."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if not isinstance(value, (bool, int, float)) else value


def _json_line(record: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(record, ensure_ascii=False, default=_to_json) + "\n").encode()
    except UnicodeEncodeError:
        # A lone surrogate can only be written as an escape sequence.
        return (json.dumps(record, default=_to_json) + "\n").encode()


class _ParquetSpool:
    """Records for a Parquet file, kept in a temporary file until the types of all columns are known.

    A column may be empty for a thousand records and then hold numbers; Parquet needs its type before the first record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.schema: pa.Schema | None = None
        self.file = tempfile.TemporaryFile(prefix="mtem-")  # noqa: SIM115 (closed with the writer)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if len(self.records) >= PARQUET_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self.records:
            return
        arrays = {name: self._array(name, [record[name] for record in self.records]) for name in self.records[0]}
        batch = pa.RecordBatch.from_pydict(arrays)
        try:
            schemas = [batch.schema] if self.schema is None else [self.schema, batch.schema]
            self.schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise self._mixed_types(str(error)) from None
        with disk_errors(tempfile.gettempdir()), pa.ipc.new_stream(self.file, batch.schema) as stream:
            stream.write_batch(batch)
        self.records = []

    def _array(self, name: str, values: list[Any]) -> pa.Array:
        try:
            return pa.array(values)
        except UnicodeEncodeError:
            return pa.array([v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values])
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            raise self._mixed_types(f"column {name!r}") from None

    def _mixed_types(self, detail: str) -> RequestError:
        return RequestError(f"{self.path}: Parquet needs one type per column, got several ({detail}); write .jsonl instead")

    def copy_to(self, stream: IO[bytes], names: list[str]) -> None:
        self._flush()
        schema = self.schema if self.schema is not None else pa.schema([(name, pa.string()) for name in names])
        self.file.seek(0)
        with pq.ParquetWriter(stream, schema) as writer:
            while True:
                try:
                    batches = pa.ipc.open_stream(self.file)
                except pa.ArrowInvalid:  # no more batches
                    break
                for batch in batches:
                    table = pa.Table.from_batches([batch])
                    writer.write_table(table.cast(schema))

    def close(self) -> None:
        self.file.close()
