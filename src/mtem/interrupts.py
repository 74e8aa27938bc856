"""SIGINT (Ctrl-C), SIGTERM and SIGHUP: a training finishes its step and saves, everything else unwinds; a second signal ends all.

The command line runs inside `handled`. In a program that uses the library nothing is changed: its signals are its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ENDINGS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "the terminal was closed"}


class Interrupted(KeyboardInterrupt):
    """Raised by a signal; whatever handles Ctrl-C handles this."""


class _State:
    installed = False
    unwinds = False  # whether something may have to be cleaned up
    deferring = 0  # blocks that a signal waits for
    received: int | None = None  # the first signal


_state = _State()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle the signals inside the ``with`` block. One that the parent process has set to be ignored stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.installed, _state.unwinds, _state.deferring, _state.received = True, False, 0, None
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]  # Windows has no SIGHUP
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        _state.installed = False
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.received is not None:  # the second one
        _exit_now(number)
    _state.received = number
    if _state.deferring:
        _say("finishing the step and saving; again to stop at once")
        return
    if not _state.unwinds:  # libraries are being imported: nothing to clean up, and not all of them pass an exception on
        _exit_now(number)
    raise Interrupted


def _exit_now(number: int) -> None:
    _say(ending())
    os._exit(128 + number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        sys.stderr.write(f"mtem: {text}\n")
        sys.stderr.flush()


def ending() -> str:
    """Return what happened, in words."""
    return _ENDINGS[signal.Signals(_state.received or signal.SIGINT).name]


def exit_code() -> int:
    """Return the exit code of a process that a signal has ended: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + int(_state.received or signal.SIGINT)


def unwind() -> None:
    """Let signals raise `Interrupted` from now on instead of ending the process: something is being written or computed."""
    _state.unwinds = True


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a signal wait inside the ``with`` block, which asks for it with `pending` and ends itself with `stop`."""
    _state.deferring += 1
    try:
        yield
    finally:
        _state.deferring -= 1
    if not _state.deferring and pending():  # it came after the block had asked for the last time
        stop()


def pending() -> bool:
    """Return whether a signal waits."""
    return _state.installed and _state.received is not None


def stop() -> None:
    """Raise `Interrupted`, for the signal that waited."""
    raise Interrupted
