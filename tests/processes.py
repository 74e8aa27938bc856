"""Waiting for other processes: for what they write, never for a time; the limit only ends a test that has failed anyway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 600.0  # seconds


def wait_for(done: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """What `done` says as soon as it is something."""
    end = time.monotonic() + limit
    while not (found := done()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.02)
    return found


def wait_for_begun(process: Any, begun: Callable[[], Any], what: str) -> None:
    """Until the process has begun what is to be cut short; if it ends before, there is nothing to test."""
    wait_for(lambda: begun() or process.poll() is not None, what)
    assert process.poll() is None, f"{what}: the process ended with {process.returncode} before it was to be stopped"
    assert begun(), what


def content(path: Path) -> str:
    """What is in a file that others write and replace; nothing if it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def is_group(number: int) -> bool:
    """Whether any process of that process group is left."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def interruptible() -> None:
    """For `preexec_fn`: Ctrl-C is heard, also where the tests themselves were started so that they ignore it (as by `&`)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
