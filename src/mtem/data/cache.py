"""Where prepared data is kept between runs: addressed by what it was made from, memory-mapped from there."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from mtem.atomic import atomic_write, disk_errors
from mtem.errors import RequestError


def cache_directory() -> Path:
    """The folder for prepared data: $MTEM_CACHE, else $XDG_CACHE_HOME/mtem, else ~/.cache/mtem. It may not exist yet."""
    if named := os.environ.get("MTEM_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~/.cache"))) / "mtem"


def cache_folder(kind: str, cache: str | Path | None = None) -> Path:
    """The subfolder `kind` of the cache (of `cache` where given), made if need be."""
    folder = (Path(cache) if cache is not None else cache_directory()) / kind
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise RequestError(
                f"{folder}: cannot be used as cache folder ({error.strerror}); set MTEM_CACHE to a folder you may write"
            ) from None
        except OSError as error:
            if error.errno == errno.EROFS:
                raise RequestError(f"{folder}: the cache folder is read-only; set MTEM_CACHE to a folder you may write") from None
            raise
    return folder


def file_fingerprint(path: str | Path) -> str:
    """The sha256 of a file's bytes, as hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise RequestError(f"{path}: is a folder; name a file in it") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from None
    return digest.hexdigest()


def fingerprint_of(*parts: str | bytes) -> str:
    """The sha256 of the parts one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def stored_table(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: dict[str, str] | None = None
) -> pa.Table:
    """The table at `path`, memory-mapped; written first if it is not there. `metadata` is known after the last batch."""
    if (table := _mapped(path)) is None:
        with atomic_write(path) as stream, pa.ipc.new_file(stream, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
            # The schema is written before the first record, so what all records told goes into a last, empty batch.
            writer.write_batch(pa.record_batch([[] for _ in schema], schema=schema), custom_metadata=metadata or {"": ""})
        table = _mapped(path)
        assert table is not None
    return table


def _mapped(path: Path) -> pa.Table | None:
    """A stored table, None if it is not there or damaged."""
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            pairs = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException):
        return None
    batches = [pair.batch for pair in pairs if pair.batch.num_rows]
    return pa.Table.from_batches(batches, schema=reader.schema).replace_schema_metadata(pairs[-1].custom_metadata)
