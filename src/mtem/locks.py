"""A lock for a folder that one process at a time writes to, on this machine or over a network file system.

The lock is a file that only one process can create. It holds who that is, and its time stamp is renewed while the process lives.
Locks of the operating system are not used: many network file systems do not pass them on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from mtem import interrupts
from mtem.atomic import disk_errors
from mtem.errors import RequestError, RunError

NAME = ".lock"
BEAT = 10.0  # seconds between two renewals of the time stamp
STALE = 120.0  # seconds without a renewal after which the process of another machine is taken for dead


class FolderLock:
    """Holds the lock of a folder inside a ``with`` block.

    Parameters
    ----------
    folder
        The folder; it and those above it are created if they do not exist, and removed again if they are empty in the end.

    Raises
    ------
    RequestError
        On entering, if another process holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self._own = {**_identity(), "token": secrets.token_hex(8)}
        self._ended = threading.Event()
        self._lost = False
        self._created: list[Path] = []

    def __enter__(self) -> FolderLock:
        """Take the lock."""
        interrupts.unwind()
        try:
            with disk_errors(self.path):
                self._created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
                self.folder.mkdir(parents=True, exist_ok=True)
                self._take()
        except PermissionError as error:
            raise RequestError(f"{self.folder}: cannot be written to ({error.strerror}); choose another folder") from None
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Give the lock back."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._is_own():
                self.path.unlink()
            for path in self._created:
                path.rmdir()  # refused unless it is empty

    def check(self) -> None:
        """Raise an error if another process has taken the folder over, as after this one was suspended for minutes."""
        if self._lost:
            raise RunError(
                f"{self.folder}: another process has taken this folder over while this one did not answer; it goes on there"
            )

    def _take(self) -> None:
        for _ in range(3):  # a lock may go away, or be taken over, while it is looked at
            if self._create():
                return
            found = check_free(self.folder)
            if found is not None:
                self._remove_stale(found)
        raise RequestError(f"{self.folder}: other processes are taking this folder; give another one")

    def _create(self) -> bool:
        try:
            number = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(self._own, file)
        return True

    def _remove_stale(self, found: dict[str, Any]) -> None:
        """Remove the lock of a dead process, unless another process has done so and has the lock now."""
        aside = self.path.with_name(f"{NAME}.{secrets.token_hex(6)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside) != found:  # it was renewed or taken over in this moment: back with it
                with contextlib.suppress(OSError):
                    os.link(aside, self.path)
            aside.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        found = _read(self.path)
        return found is not None and found.get("token") == self._own["token"]

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                if self._is_own():
                    os.utime(self.path)
                elif self.path.parent.is_dir() and not self._ended.is_set():
                    self._lost = True
                    return


def check_free(folder: Path) -> dict[str, Any] | None:
    """Refuse a folder that a living process holds. Return what the lock of a dead one says; None if there is no lock.

    Raises
    ------
    RequestError
        With the process that holds it.
    """
    found = _read(folder / NAME) if folder.is_dir() else None
    if found is not None and not _is_stale(folder / NAME, found):
        raise RequestError(f"{folder}: {_describe(found)} is writing to this folder; wait for it, or give another one")
    return found


def _identity() -> dict[str, Any]:
    """Return what tells this process from every other: machine, number and time of its start."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def _machine() -> str:
    """Return what is equal for processes whose numbers can be compared: the same boot and the same container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str | None:
    """Return when a process of this machine started, in the units of the system; None if that is not known."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a lock says; an empty dict if it cannot be read, None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_stale(path: Path, found: dict[str, Any]) -> bool:
    """Return whether the process of a lock is dead."""
    pid = found.get("pid")
    if found.get("machine") == _machine() and os.name == "posix" and type(pid) is int and 0 < pid < 2**31:
        return not _is_alive(pid, found.get("started"))
    return _age(path) > STALE


def _is_alive(pid: int, started: Any) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    now = _start_of(pid)
    return started is None or now is None or now == started  # else its number was given to a new process


def _age(path: Path) -> float:
    """Return how long ago a lock was renewed, by the clock of its file system: those of two machines may differ."""
    probe = path.with_name(f"{NAME}.{secrets.token_hex(6)}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _describe(found: dict[str, Any]) -> str:
    if "pid" not in found:
        return "another process (its lock cannot be read)"
    return f"process {str(found['pid'])[:20]} on {str(found.get('host'))[:80]}"
