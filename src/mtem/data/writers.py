"""Tables of records on disk, written one record at a time, in the formats that `readers` reads."""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtem.atomic import atomic_write, disk_errors
from mtem.data.readers import _BATCH, _DELIMITERS, kind_of
from mtem.errors import RequestError


class Writer:
    """Write records to a file of any of the formats; the file appears, whole, when the block ends well.

    >>> with Writer("predictions.csv") as out:
    ...     out.write({"text": "fine", "label": "positive"})

    Parameters
    ----------
    path
        Its extension says the format.
    columns
        The columns and their order; without it the first record's. JSON lines need none: each record has its own.
    """

    def __init__(self, path: str | Path, columns: Iterable[str] | None = None):
        self.path = Path(path)
        self.columns = list(columns) if columns is not None else None
        self._kind, self._zipped = kind_of(path)
        self._written = 0

    def __enter__(self) -> Writer:
        # What the inner exits clean up depends on the error, so they are entered in the order they must be left.
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stream: Any = stack.enter_context(atomic_write(self.path))
            if self._zipped:
                # No name and no time inside: the same records give the same bytes.
                stream = stack.enter_context(gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0))
            self._stream = stream
            if self._kind == "parquet":
                self._spool = _ParquetSpool(self.path)
                stack.callback(self._spool.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is None:
            try:
                self._finish()
            except BaseException as failure:
                if not self._stack.__exit__(type(failure), failure, failure.__traceback__):
                    raise
                return None
        return self._stack.__exit__(*error)

    def write(self, record: dict[str, Any]) -> None:
        """Add one record. Columns it lacks are left empty; a column the file does not have is a mistake."""
        if self._kind == "json":
            self._stream.write(_json_line(record))
        elif self._kind == "parquet":
            names = self._checked(record)
            self._spool.add({name: record.get(name) for name in names})
        else:
            names = self._checked(record)
            if not self._written:
                self._write_fields(names)
            self._write_fields([_cell(record.get(name)) for name in names])
        self._written += 1

    def _checked(self, record: dict[str, Any]) -> list[str]:
        if self.columns is None:
            self.columns = list(record)
        if unknown := next((name for name in record if name not in self.columns), None):
            raise RequestError(
                f"{self.path}: record {self._written + 1} has a column {unknown!r} that the first has not; "
                "write JSON lines, or name all columns"
            )
        return self.columns

    def _write_fields(self, fields: list[str]) -> None:
        line = io.StringIO()
        # Only with this terminator every version of Python quotes a lone carriage return; the line ends in \n all the same.
        csv.writer(line, delimiter=_DELIMITERS[self._kind], lineterminator="\r\n").writerow(fields)
        # NUL has no place in a CSV file and half a surrogate pair none in UTF-8.
        text = line.getvalue().removesuffix("\r\n").replace("\0", "") + "\n"
        self._stream.write(text.encode("utf-8", errors="replace"))

    def _finish(self) -> None:
        if self._kind in _DELIMITERS and not self._written and self.columns:
            self._write_fields(self.columns)
        elif self._kind == "parquet":
            self._spool.copy_to(self._stream, self.columns or [])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """What JSON has no word for: times in ISO form, bytes as the text they hold, NumPy's numbers as Python's."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if not isinstance(value, (bool, int, float)) else value


def _json_line(record: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(record, ensure_ascii=False, default=_plain) + "\n").encode()
    except UnicodeEncodeError:
        # Half a surrogate pair can only be written as the escape it came from.
        return (json.dumps(record, default=_plain) + "\n").encode()


class _ParquetSpool:
    """Records for a Parquet file, kept on disk until the last one has shown the types of the columns.

    A column may be empty for a thousand records and then hold numbers; Parquet wants its type before the first record.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.schema: pa.Schema | None = None
        self.file = tempfile.TemporaryFile(prefix="mtem-")  # noqa: SIM115 (closed with the writer)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if len(self.records) >= _BATCH:
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
            raise self._mixed(str(error)) from None
        with disk_errors(tempfile.gettempdir()), pa.ipc.new_stream(self.file, batch.schema) as stream:
            stream.write_batch(batch)
        self.records = []

    def _array(self, name: str, values: list[Any]) -> pa.Array:
        try:
            return pa.array(values)
        except UnicodeEncodeError:
            return pa.array([v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values])
        except (pa.ArrowException, OverflowError):
            raise self._mixed(f"column {name!r}") from None

    def _mixed(self, what: str) -> RequestError:
        return RequestError(
            f"{self.path}: Parquet wants one type per column and there are several ({what}); write .jsonl instead"
        )

    def copy_to(self, stream: Any, names: list[str]) -> None:
        self._flush()
        schema = self.schema if self.schema is not None else pa.schema([(name, pa.string()) for name in names])
        self.file.seek(0)
        with pq.ParquetWriter(stream, schema) as writer:
            while True:
                try:
                    batches = pa.ipc.open_stream(self.file)
                except pa.ArrowInvalid:  # no further batch
                    break
                for batch in batches:
                    table = pa.Table.from_batches([batch])
                    writer.write_table(table.cast(schema))

    def close(self) -> None:
        self.file.close()
