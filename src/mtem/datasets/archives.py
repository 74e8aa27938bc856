"""Data sets as they are published, in a folder or an archive: read where they lie, nothing is unpacked."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mtem.atomic import disk_errors
from mtem.errors import RequestError, RunError

JSON_LINES = (".jsonl", ".jsonl.gz")
Member = tuple[str, Callable[[], BinaryIO]]

_ARCHIVES = ".tar.gz, .tgz, .tar.bz2, .tar.xz, .tar or .zip"
_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


@contextlib.contextmanager
def members(source: Path) -> Iterator[Iterator[Member]]:
    """The files of a folder or an archive, hidden ones aside: the path of each and how to open it, in the order they lie there.

    Paths in a folder begin with the folder's own name; a file of JSON lines stands for itself. A compressed archive is fast
    only if every file is opened when its turn comes. One with links, devices or paths that lead out of it is refused.
    """
    if source.is_dir():
        yield _folder_members(source.resolve())
        return
    if source.name.endswith(JSON_LINES) and source.is_file():
        yield iter([(source.name, lambda: source.open("rb"))])
        return
    if not source.exists():
        raise RequestError(f"{source}: no such file or folder; give the data set's archive or its unpacked folder")
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                yield _zip_members(source, archive)
        else:
            with tarfile.open(source, "r:*") as tar:
                yield _tar_members(source, tar)
    except RunError:
        raise
    except _ERRORS as error:
        reason = " ".join(str(error).split())[:100]
        raise RequestError(f"{source}: not a readable archive ({reason}); give {_ARCHIVES}, or the folder") from None
    except OSError as error:
        if error.errno is None or isinstance(error, PermissionError):
            raise RequestError(f"{source}: cannot be read ({error}); give {_ARCHIVES}, or the folder") from None
        raise


def _folder_members(source: Path) -> Iterator[Member]:
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(source.parent).as_posix(), lambda path=path: path.open("rb")


def _zip_members(source: Path, archive: zipfile.ZipFile) -> Iterator[Member]:
    for entry in archive.infolist():
        path = _inside(source, entry.filename)
        if (entry.external_attr >> 16) & 0o170000 == 0o120000:
            raise _refused(source, "a link", entry.filename)
        if not entry.is_dir() and not _hidden(path):
            yield path.as_posix(), lambda entry=entry: archive.open(entry)


def _tar_members(source: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    for entry in tar:
        path = _inside(source, entry.name)
        if entry.issym() or entry.islnk():
            raise _refused(source, "a link", entry.name)
        if entry.isfile() and not _hidden(path):
            yield path.as_posix(), lambda entry=entry: tar.extractfile(entry)
        elif not entry.isfile() and not entry.isdir():
            raise _refused(source, "a device", entry.name)
    # A damaged header, or the end of a file that was cut, looks like the end of the archive to tarfile; the end proper is a
    # block of zeros. What follows is read for the checksum of the compression.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset} of the unpacked archive")
    while tar.fileobj.read(1 << 20):
        pass


def _inside(source: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
        raise _refused(source, "a path that leads out of it", name)
    return path


def _hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _refused(source: Path, what: str, name: str) -> RequestError:
    return RequestError(f"{source}: holds {what}, {name!r}; such archives are refused: pack plain files")


def check_apart(source: Path, to: Path) -> None:
    """Refuse to write into the folder the data comes from."""
    if to.resolve() in (source.resolve(), source.resolve().parent if source.name.endswith(JSON_LINES) else None):
        raise RequestError(f"{to}: is also where the data comes from; name another folder to write to")


def make_folder(to: Path) -> None:
    """The folder to write to, made if need be."""
    with disk_errors(to):
        try:
            to.mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise RequestError(f"{to}: cannot be made a folder ({error.strerror}); name another place") from None
