"""Read Parquet one record at a time, whatever size its cells have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtem.data.formats import PARQUET_BATCH, check_names
from mtem.data.values import is_missing
from mtem.errors import RequestError

_BATCH_BYTES = 1 << 26  # of the cells read at once, by the sizes that the file gives
BOMB_BYTES, BOMB_RATIO = 1 << 28, 200  # a column that expands to so many bytes, and so many times, is refused


def read_schema(path: str | Path, stream: IO[bytes]) -> list[str]:
    """Return the names of the columns."""
    return list(_open(path, stream).schema_arrow.names)


def read_rows(path: str | Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of every record, from 1, and the record as a dict.

    Parameters
    ----------
    path : str or Path
        For messages.
    stream : binary file
        It can seek.

    Notes
    -----
    A time that Python cannot express becomes text, as Arrow writes it.

    Raises
    ------
    RequestError
        If the file is damaged, with the last row that could be read.
    """
    file = _open(path, stream)
    names = file.schema_arrow.names
    row = 0
    batches = file.iter_batches(batch_size=rows_at_once(file))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            raise _damaged(path, row, error) from None
        cells = [_values(path, row, name, batch.column(number)) for number, name in enumerate(names)]
        for number in range(batch.num_rows):
            row += 1
            yield row, {name: values[number] for name, values in zip(names, cells, strict=True)}


def _open(path: str | Path, stream: IO[bytes]) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False)
        leaves = [file.schema.column(number) for number in range(len(file.schema))]
        # Texts as numbers in a list of different texts: a long text that is repeated a million times is in memory once.
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type == "STRING"]
        stream.seek(0)
        file = pq.ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False, read_dictionary=texts)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise _damaged(path, 0, error) from None
    check_names(names, str(path))
    _check_sizes(path, file)
    return file


def _check_sizes(path: str | Path, file: pq.ParquetFile) -> None:
    """Refuse a file with a column that is made to fill the memory: a few bytes that expand to gigabytes."""
    for group in range(file.metadata.num_row_groups):
        for number in range(file.metadata.num_columns):
            chunk = file.metadata.row_group(group).column(number)
            size, stored = chunk.total_uncompressed_size, max(1, chunk.total_compressed_size)
            if size > BOMB_BYTES and size > BOMB_RATIO * stored:
                raise RequestError(
                    f"{path}: column {chunk.path_in_schema!r}: {stored} bytes would expand to {size}, {size // stored} times as "
                    "many; such files are refused: write it again without padding"
                )


def rows_at_once(file: pq.ParquetFile, most: int = PARQUET_BATCH) -> int:
    """Return how many rows to read at once, at most `most`, by the sizes that the file gives."""
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(most, _BATCH_BYTES // max(1, row_bytes)))


def _values(path: str | Path, row: int, name: str, column: pa.Array) -> list[Any]:
    """Return the cells of a column as Python values; `row` is the last row before them."""
    try:
        # Arrow does not check that strings are UTF-8; the conversion to Python does.
        if pa.types.is_dictionary(column.type):
            texts: list[Any] = column.dictionary.to_pylist()
            return [None if position is None else texts[position] for position in column.indices.to_pylist()]
        values: list[Any] = column.to_pylist()
        if pa.types.is_timestamp(column.type):  # pandas has a time that is none, in the place of the smallest
            return [None if is_missing(value) else value for value in values]
        return values
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(
            f"{path}: row {_first_undecodable(column, row)}, column {name!r}: byte 0x{byte:02X} at position {error.start + 1} is "
            "not UTF-8; write the file again from UTF-8 text"
        ) from None
    except Exception:  # a date before year 1 or after year 9999, an unknown time zone: their errors have no common type
        if pa.types.is_nested(column.type):
            raise RequestError(
                f"{path}: after row {row}, column {name!r}: values of type {column.type} cannot be read; write them as text"
            ) from None
        return _as_text(path, row, name, column)


def _as_text(path: str | Path, row: int, name: str, column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))  # without a time zone that may be unknown
    elif pa.types.is_duration(column.type):
        column = column.cast(pa.int64())
    try:
        return list(column.cast(pa.string()).to_pylist())
    except (pa.ArrowException, ValueError, OverflowError):
        raise RequestError(
            f"{path}: after row {row}, column {name!r}: values of type {column.type} cannot be read; write them as text"
        ) from None


def _first_undecodable(column: pa.Array, row: int) -> int:
    for offset in range(len(column)):
        try:
            column[offset].as_py()
        except UnicodeDecodeError:
            return row + offset + 1
    return row


def _damaged(path: str | Path, row: int, error: BaseException) -> RequestError:
    position = f" after row {row}" if row else ""
    reason = " ".join(str(error).split())[:120]
    return RequestError(f"{path}: not a readable Parquet file{position} ({reason}); download or write it again")
