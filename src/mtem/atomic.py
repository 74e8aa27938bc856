"""Files and folders written whole or not at all: beside their place, then renamed into it."""

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

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_RUN_AGAIN = "nothing was written there: make room and run again"
_GO_ON = "make room and run again"


@contextlib.contextmanager
def disk_errors(path: str | Path, advice: str = _RUN_AGAIN) -> Iterator[None]:
    """A full disk becomes a `DiskFullError` that names `path`; every other error passes."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except Exception as error:
        # safetensors reports the operating system's errors in a type of its own, without their number.
        told = any(words in str(error) for words in ("No space left", "StorageFull"))
        if error.errno in _DISK_FULL if isinstance(error, OSError) else told:
            raise DiskFullError(f"{path}: the disk is full; {advice}") from error
        raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or a folder to; it takes `path`'s place when the block ends well.

    When the block fails what was written is removed and whatever stood at `path` before still stands there. The folder
    around `path` is made if need be.
    """
    target = _followed(path)
    with disk_errors(path, _GO_ON):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as temporary:
            yield temporary


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """As `replaced`, for a file a user asked for: opened for writing bytes, and in a folder that must be there."""
    target = _followed(path)
    if target.is_dir():
        raise RequestError(f"{path}: is a folder; name a file to write to")
    with disk_errors(path), _beside(target) as temporary:
        try:
            stream = open(temporary, "xb")  # noqa: SIM115 (closed below, before it is renamed)
        except FileNotFoundError:
            raise RequestError(f"{path}: the folder {target.parent} does not exist; make it first") from None
        except (PermissionError, NotADirectoryError) as error:
            raise RequestError(f"{path}: cannot be written ({error.strerror}); name another place") from None
        try:
            yield stream
        except BaseException:
            # Closing flushes what is buffered and may fail again on a full disk; the first error is the one to tell.
            with contextlib.suppress(OSError):
                stream.close()
            raise
        stream.close()


def _followed(path: str | Path) -> Path:
    """Where a link leads, so that writing to it changes what it points to and not the link."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    # Drawn, so that two writers of the same place do not meet; cut, so that a long name does not become too long.
    stem = f".{target.name[:40]}.{secrets.token_hex(6)}"
    temporary, old = target.with_name(f"{stem}.part"), target.with_name(f"{stem}.old")
    try:
        yield temporary
        if temporary.is_dir() and target.is_dir():  # a folder cannot be renamed over another
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
    """Wait until the file is on the disk: a rename may get there before what it renames."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_json(path: Path, value: Any) -> None:
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        file.write("\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; is {path.parent} the output of 'mtem adapt'?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not valid JSON ({error})") from error
