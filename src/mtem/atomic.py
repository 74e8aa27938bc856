"""Atomic writes: files and folders are written to a temporary path beside their own and then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mtem import interrupts
from mtem.errors import DiskFullError, RequestError, RunError
from mtem.files import check_writable, special_kind
from mtem.schema import Schema, find_problem

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, a quota, or a limit on the size of files
_NOTHING_WRITTEN = "nothing was written: make room and run again"
_RUN_AGAIN = "make room and run again"
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_PART = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<kind>part|old)$")
ABANDONED = 24 * 3600  # seconds without a change after which an unfinished file is taken for that of a killed process
LARGEST_JSON = 1 << 28  # bytes of a JSON file that is read


@contextlib.contextmanager
def disk_errors(path: str | Path, advice: str = _NOTHING_WRITTEN) -> Iterator[None]:
    """Turn errors of a full disk into a `DiskFullError` that names `path`; other errors pass."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _READ_ONLY and _is_beside(error.filename, path):
            raise RunError(f"{path}: cannot be written ({error.strerror}); make the folder writable and run again") from error
        # safetensors reports errors of the operating system as its own type, without their number.
        by_message = any(words in str(error) for words in ("No space left", "StorageFull", "File too large"))
        if error.errno in _DISK_FULL if isinstance(error, OSError) else by_message:
            raise DiskFullError(f"{path}: the disk is full; {advice}") from error
        raise


def _is_beside(name: Any, path: str | Path) -> bool:
    """Return whether an error is about a file in the folder that is written to, and not about one that is read."""
    return isinstance(name, (str, os.PathLike)) and Path(os.path.realpath(name)).is_relative_to(_resolved(path).parent)


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
    clear_parts(target.parent, target.name, older_than=ABANDONED)
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
    stem = f".{_cut(target.name)}.{secrets.token_hex(6)}"
    temporary, old = target.with_name(f"{stem}.part"), target.with_name(f"{stem}.old")
    interrupts.unwind()
    try:
        yield temporary
        _open_to_umask(temporary)
        if temporary.is_dir() and target.is_dir():  # a folder cannot replace another by a rename
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except BaseException:
                os.rename(old, target)
                raise
            shutil.rmtree(old)
        else:
            if target.is_dir():
                raise RunError(f"{target}: is a folder; remove it and run again")
            if temporary.is_file():
                _flush(temporary)
            os.replace(temporary, target)
    finally:
        _remove(temporary)


def _cut(name: str) -> str:
    return name[:40]


def _open_to_umask(path: Path) -> None:
    """Give files the permissions that the user's umask leaves: some libraries create theirs for the user alone."""
    os.umask(mask := os.umask(0o077))  # there is no way to read it without setting it
    for file in (entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):  # a file system without permissions
            if stat.S_IMODE(file.stat().st_mode) == 0o600:
                file.chmod(0o666 & ~mask)


def clear_parts(folder: Path, name: str | None = None, older_than: float = 0.0) -> list[Path]:
    """Remove what interrupted writes have left in a folder; a folder that was about to be replaced comes back.

    Parameters
    ----------
    folder
        The folder; what is deeper is left alone.
    name
        Only parts of this file.
    older_than
        Only parts that have not changed for so many seconds. Without it no other process may write here.

    Returns
    -------
    list of Path
        What was removed.
    """
    removed = []
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    for entry in entries:
        match = _PART.match(entry.name)
        if match is None or (name is not None and match["name"] != _cut(name)):
            continue
        with contextlib.suppress(OSError):
            if older_than and time.time() - entry.stat().st_mtime < older_than:
                continue
            original = folder / match["name"]
            if match["kind"] == "old" and not original.exists():
                os.rename(entry, original)
                continue
            _remove(entry)
            removed.append(entry)
    return removed


def is_part(name: str) -> bool:
    """Return whether a file name is that of an unfinished write."""
    return _PART.match(name) is not None


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


def read_json(path: Path, schema: Schema | None = None, advice: str = "") -> Any:
    """Read a JSON file.

    Parameters
    ----------
    path
        The file.
    schema
        What it must look like, see `mtem.schema`; None: not checked.
    advice
        What the user can do if it cannot be read.

    Raises
    ------
    RequestError
        If the file is missing, cannot be read, is not valid JSON, or does not look like that.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            raise RequestError(f"{path}: is not a regular file" + _then(advice))
        if found.st_size > LARGEST_JSON:
            raise RequestError(f"{path}: has {found.st_size:,} bytes, too many for a file of mtem" + _then(advice))
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; is {path.parent} the output of 'mtem adapt'?") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})" + _then(advice)) from None
    except RecursionError:
        raise RequestError(f"{path}: not valid JSON (nested too deeply)" + _then(advice)) from None
    except ValueError as error:  # of JSON, of UTF-8, or of a number with too many digits
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path}: not valid JSON ({error})" + _then(advice)) from error
    if schema is not None and (problem := find_problem(value, schema)):
        raise RequestError(f"{path}: is not what mtem has written: {problem}" + _then(advice))
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _then(advice: str) -> str:
    return f"; {advice}" if advice else ""
