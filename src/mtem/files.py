"""Regular files: what may be read and written. A named pipe would wait for ever, a device has no end or is destroyed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from mtem.errors import RequestError

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special_kind(path: str | Path) -> str | None:
    """Return what a path is if it is neither a regular file, nor a folder, nor missing: "a named pipe", "a device"."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file to read its bytes.

    Raises
    ------
    RequestError
        If there is no such file, it is no regular file, or it cannot be read.
    """
    if kind := special_kind(path):
        raise RequestError(f"{path}: is {kind}; only regular files are read: write its contents to a file first")
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise RequestError(f"{path}: is a folder; name a file in it") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except ValueError as error:  # a NUL character in the path
        raise RequestError(f"{str(path)!r}: is not a path ({error})") from None


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that has a named pipe or a device among its files, before a library opens one of them.

    Two levels of folders in it are looked at: models and checkpoints have no more.

    Raises
    ------
    RequestError
        With the first of them.
    """
    for place, folders, names in os.walk(folder):
        if len(Path(place).relative_to(folder).parts) >= 2:
            folders.clear()
        for name in names:
            if kind := special_kind(path := Path(place, name)):
                raise RequestError(f"{path}: is {kind}; only regular files are read: copy the folder again without it")


def check_writable(path: str | Path) -> None:
    """Refuse a path to write to that is a folder, a named pipe, a device, or a link that leads to itself.

    Raises
    ------
    RequestError
        With what the path is.
    """
    if kind := special_kind(path):
        raise RequestError(f"{path}: is {kind}; name a regular file to write to")
    if Path(path).is_dir():
        raise RequestError(f"{path}: is a folder; name a file to write to")
    try:
        os.stat(path)
    except FileNotFoundError:
        pass  # it will be created
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror}); choose another path") from None
    except ValueError as error:
        raise RequestError(f"{str(path)!r}: is not a path ({error})") from None
