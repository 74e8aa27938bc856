"""The processes of a run as seen from outside: how many there are, and whether they still live.

A GPU waits for a process that has died until a timeout that must be long, because a process may have work of its own for an hour.
So a thread of each process counts upwards in the store that the processes have in common, and looks at the counts of the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

INTERVAL = 2.0  # seconds between two signs of life
PATIENCE = 40.0  # seconds without a sign after which a process is taken to be gone
LAST_WORD = 5.0  # seconds that the main thread has to say it, where the store does not answer
LOST = "another process of this run has ended"
PARENT = "MTEM_PARENT"  # the variable with the number of the process that started this one, if it is to end with it
CONTINUE = "the same command with --resume continues, with any number of processes"

_ended = threading.Event()


def launched() -> int:
    """Return the number of processes that a launcher has started for this run; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def is_first() -> bool:
    """Return whether this is the first process of its run: the one that writes files and shows progress."""
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


def watch(store: Store, rank: int, size: int, needed: Callable[[], bool]) -> threading.Thread:
    """Begin to give signs of life, and to look at those of the other processes.

    Parameters
    ----------
    store : Store
        What the processes have in common; a connection of its own is made.
    rank, size : int
        The number of this process, and how many there are.
    needed : callable
        Returns whether this process needs the others now; at other times they may leave.

    Returns
    -------
    threading.Thread
        What gives the signs, until `end`.
    """
    _ended.clear()
    clone = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    thread = threading.Thread(target=_run, args=(clone, rank, size, needed), daemon=True)
    thread.start()
    return thread


def end_with_parent() -> None:
    """End this process when the one that started it is gone, if it was started to end with it."""
    parent = os.environ.get(PARENT)
    if parent is not None:
        threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os._exit(1)


def end() -> None:
    """Stop: the processes leave one after the other."""
    _ended.set()


def _run(store: Store, rank: int, size: int, needed: Callable[[], bool]) -> None:
    counts = dict.fromkeys(range(size), 0)
    seen = dict.fromkeys(range(size), time.monotonic())
    while not _ended.wait(INTERVAL):
        try:
            store.add(f"alive-{rank}", 1)
            for other in counts:
                count = store.add(f"alive-{other}", 0)
                if count != counts[other]:
                    counts[other], seen[other] = count, time.monotonic()
        except RuntimeError:  # the process that holds the store is gone; its main thread may say so itself
            if needed() and not _ended.wait(LAST_WORD) and needed():
                _leave("the place where they meet does not answer")
            continue
        silent = [other for other in counts if time.monotonic() - seen[other] > PATIENCE]
        if silent and needed():
            _leave(f"process {silent[0] + 1} of {size} gave no sign of life for {PATIENCE:.0f} s")


def _leave(reason: str) -> NoReturn:
    """End this process: its main thread may wait for the network without end."""
    print(f"mtem: {LOST} ({reason}); {CONTINUE}", file=sys.stderr, flush=True)
    os._exit(1)
