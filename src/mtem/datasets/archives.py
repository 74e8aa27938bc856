"""Files of a published data set, in a folder or an archive; archives are read without unpacking them."""

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
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from mtem.atomic import disk_errors
from mtem.errors import RequestError, RunError
from mtem.files import special_kind

JSON_LINES = (".jsonl", ".jsonl.gz")
Member = tuple[str, Callable[[], IO[bytes]]]  # path, and a function that opens the file

_ARCHIVES = ".tar.gz, .tgz, .tar.bz2, .tar.xz, .tar or .zip"
_BOMB_BYTES, _BOMB_RATIO = 1 << 28, 50
_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


@contextlib.contextmanager
def members(source: Path) -> Iterator[Iterator[Member]]:
    """Open a folder or an archive and yield an iterator over its files, without hidden ones.

    Parameters
    ----------
    source : Path
        A folder, an archive, or a single file of JSON lines.

    Yields
    ------
    iterator of Member
        The path of each file and a function that opens it. Paths in a folder begin with the folder's own name. Compressed
        archives are fast only if every file is opened before the next one is requested.

    Raises
    ------
    RequestError
        If the archive cannot be read, or has links, devices or paths that lead out of it.
    """
    if source.is_dir():
        yield _folder_members(source.resolve())
        return
    if source.name.endswith(JSON_LINES) and source.is_file():
        yield iter([(source.name, partial(_open_file, source))])
        return
    if kind := special_kind(source):
        raise RequestError(f"{source}: is {kind}; give the archive of the data set or its unpacked folder")
    if not source.exists():
        raise RequestError(f"{source}: no such file or folder; give the archive of the data set or its unpacked folder")
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
                yield path.relative_to(source.parent).as_posix(), partial(_open_file, path)


def _most_bytes(source: Path) -> int:
    """Return how many bytes an archive may have when unpacked: texts are compressed to a twentieth at most."""
    return max(_BOMB_BYTES, _BOMB_RATIO * source.stat().st_size)


def _check_unpacked(source: Path, size: int) -> None:
    if size > _most_bytes(source):
        raise RequestError(
            f"{source}: would expand to more than {_most_bytes(source) >> 20} MB, {_BOMB_RATIO} times its size; such archives "
            "are refused: unpack it, and give the folder"
        )


def _zip_members(source: Path, archive: zipfile.ZipFile) -> Iterator[Member]:
    unpacked = 0
    for entry in archive.infolist():
        unpacked += entry.file_size
        _check_unpacked(source, unpacked)
        path = _inside(source, entry.filename)
        if (entry.external_attr >> 16) & 0o170000 == 0o120000:
            raise _refused(source, "a link", entry.filename)
        if not entry.is_dir() and not _hidden(path):
            yield path.as_posix(), partial(archive.open, entry)


def _tar_members(source: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    unpacked = 0
    for entry in tar:
        unpacked += entry.size
        _check_unpacked(source, max(unpacked, entry.offset_data))
        path = _inside(source, entry.name)
        if entry.issym() or entry.islnk():
            raise _refused(source, "a link", entry.name)
        if entry.isfile() and not _hidden(path):
            yield path.as_posix(), partial(_open_entry, tar, entry)
        elif not entry.isfile() and not entry.isdir():
            raise _refused(source, "a device", entry.name)
    # tarfile takes a damaged header, or the end of a truncated file, for the end of the archive. The true end is a block of
    # zeros. The rest is read so that the checksum of the compression is verified.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"damaged or truncated at byte {tar.offset} of the unpacked archive")
    while block := tar.fileobj.read(1 << 20):
        unpacked += len(block)
        _check_unpacked(source, unpacked)


def _open_file(path: Path) -> IO[bytes]:
    return path.open("rb")


def _open_entry(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(entry)
    assert stream is not None  # only regular files are opened
    return stream


def _inside(source: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
        raise _refused(source, "a path that leads out of it", name)
    return path


def _hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _refused(source: Path, content: str, name: str) -> RequestError:
    return RequestError(f"{source}: contains {content}, {name!r}; such archives are refused: pack only regular files")


def check_apart(source: Path, to: Path) -> None:
    """Raise a RequestError if the data would be written into the folder it is read from."""
    read = os.path.realpath(source)
    if os.path.realpath(to) in (read, os.path.dirname(read) if source.name.endswith(JSON_LINES) else None):
        raise RequestError(f"{to}: is also the folder the data is read from; give another folder")


def make_folder(to: Path) -> None:
    """Create the folder to write to, if it does not exist."""
    with disk_errors(to):
        try:
            to.mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise RequestError(f"{to}: cannot be created as a folder ({error.strerror}); give another folder") from None
