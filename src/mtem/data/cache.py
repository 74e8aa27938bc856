"""Cache of prepared data: files addressed by the content they were made from, read by memory mapping."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from mtem.atomic import ABANDONED, atomic_write, clear_parts, disk_errors
from mtem.errors import RequestError
from mtem.files import open_regular


def cache_directory() -> Path:
    """Return the cache folder: $MTEM_CACHE, else $XDG_CACHE_HOME/mtem, else ~/.cache/mtem. It may not exist yet."""
    if chosen := os.environ.get("MTEM_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~/.cache"))) / "mtem"


def cache_folder(name: str, cache: str | Path | None = None) -> Path:
    """Return a subfolder of the cache, created if it does not exist.

    Parameters
    ----------
    name : str
        Of the subfolder, such as "corpora" or "tokens".
    cache : str or Path, optional
        The cache; `cache_directory()` by default.

    Raises
    ------
    RequestError
        If the folder cannot be created or written to.
    """
    folder = (Path(cache) if cache is not None else cache_directory()) / name
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise RequestError(
                f"{folder}: cannot be used as the cache folder ({error.strerror}); set MTEM_CACHE to another folder"
            ) from None
        except OSError as error:
            if error.errno == errno.EROFS:
                raise RequestError(f"{folder}: the cache folder is read-only; set MTEM_CACHE to another folder") from None
            raise
    clear_parts(folder, older_than=ABANDONED)
    return folder


def file_fingerprint(path: str | Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        try:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        except OSError as error:
            raise RequestError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from None
    return digest.hexdigest()


def fingerprint_of(*parts: str | bytes) -> str:
    """Return the sha256 of a sequence of parts, each preceded by its length, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def stored_table(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: dict[str, str] | None = None
) -> pa.Table:
    """Return the table stored at `path`, memory-mapped; write it first if the file is missing or damaged.

    Parameters
    ----------
    path : Path
        An Arrow file.
    schema : pyarrow.Schema
        Of the batches.
    batches : iterable of pyarrow.RecordBatch
        Read only if the table has to be written.
    metadata : dict, optional
        Stored with the table. May be filled while the batches are read: it is written after the last one.
    """
    if (table := _read_mapped(path, schema)) is None:
        with atomic_write(path) as stream, pa.ipc.new_file(stream, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
            # The schema is written before the first record, so metadata about all of them goes into a last, empty batch.
            writer.write_batch(pa.record_batch([[] for _ in schema], schema=schema), custom_metadata=metadata or {"": ""})
        table = _read_mapped(path, schema)
        assert table is not None
    return table


def read_batches(path: Path, schema: pa.Schema) -> list[tuple[pa.RecordBatch, dict[bytes, bytes]]] | None:
    """Return the batches of a stored file with their metadata, memory-mapped; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if not reader.schema.equals(schema):
                return None
            pairs = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
            for batch, _ in pairs:
                batch.validate(full=True)  # offsets out of a damaged file would be followed
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException):
        return None
    return [(batch, metadata or {}) for batch, metadata in pairs]


def _read_mapped(path: Path, schema: pa.Schema) -> pa.Table | None:
    """Return a stored table, None if the file is missing or damaged."""
    pairs = read_batches(path, schema)
    if not pairs:
        return None
    batches = [batch for batch, _ in pairs if batch.num_rows]
    return pa.Table.from_batches(batches, schema=schema).replace_schema_metadata(pairs[-1][1])
