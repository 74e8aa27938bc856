"""Atomic writes: files and folders are written to a temporary path beside their own and then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mtem.errors import DiskFullError, RequestError, RunError
from mtem.files import check_writable, special_kind

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOTHING_WRITTEN = "nothing was written: make room and run again"
_RUN_AGAIN = "make room and run again"


@contextlib.contextmanager
def disk_errors(path: str | Path, advice: str = _NOTHING_WRITTEN) -> Iterator[None]:
    """Turn errors of a full disk into a `DiskFullError` that names `path`; other errors pass."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except Exception as error:
        # safetensors reports errors of the operating system as its own type, without their number.
        by_message = any(words in str(error) for words in ("No space left", "StorageFull"))
        if error.errno in _DISK_FULL if isinstance(error, OSError) else by_message:
            raise DiskFullError(f"{path}: the disk is full; {advice}") from error
        raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, which replaces `path` when the block ends without an error.

    After an error the temporary path is removed and `path` is as it was before. The parent folder is created if it does not
    exist. A named pipe or a device is refused, not replaced.
    """
    if kind := special_kind(path):
        raise RequestError(f"{path}: is {kind}; name a regular file to write to")
    target = _resolved(path)
    with disk_errors(path, _RUN_AGAIN):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as temporary:
            yield temporary


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file, which becomes `path` when the block ends without an error.

    For files that a user asked for: unlike with `replaced`, the parent folder must exist.

    Raises
    ------
    RequestError
        If the path is a folder, a named pipe or a device, its parent does not exist, or it cannot be written to.
    """
    check_writable(path)
    target = _resolved(path)
    with disk_errors(path), _beside(target) as temporary:
        try:
            stream = open(temporary, "xb")  # noqa: SIM115 (closed below, before it is renamed)
        except FileNotFoundError:
            raise RequestError(f"{path}: the folder {target.parent} does not exist; create it first") from None
        except (PermissionError, NotADirectoryError) as error:
            raise RequestError(f"{path}: cannot be written ({error.strerror}); choose another path") from None
        try:
            yield stream
        except BaseException:
            # Closing flushes the buffer and may fail again on a full disk; the first error is the one to report.
            with contextlib.suppress(OSError):
                stream.close()
            raise
        stream.close()


def _resolved(path: str | Path) -> Path:
    """Follow links, so that a write changes the file and not the link."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    # Random, so that two writers of the same path do not collide; cut, so that a long name does not become too long.
    stem = f".{target.name[:40]}.{secrets.token_hex(6)}"
    temporary, old = target.with_name(f"{stem}.part"), target.with_name(f"{stem}.old")
    try:
        yield temporary
        if temporary.is_dir() and target.is_dir():  # a folder cannot replace another by a rename
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except BaseException:
                os.rename(old, target)
                raise
            shutil.rmtree(old)
        else:
            if temporary.is_file():
                _flush(temporary)
            os.replace(temporary, target)
    finally:
        _remove(temporary)


def _flush(path: Path) -> None:
    """Wait until the file is on the disk: a rename may reach it before the contents."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; types that JSON lacks become strings.

    Raises
    ------
    ValueError
        If the value has a number that is not finite.
    """
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises
    ------
    RequestError
        If the file is missing or is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; is {path.parent} the output of 'mtem adapt'?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not valid JSON ({error})") from error
