"""Memory that the process no longer needs, given back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def release_free_memory() -> None:
    """Give back what the C library keeps for later; nothing happens where it cannot.

    Batches differ in length, so the blocks of one step rarely fit the next, and the library's reserve grows to a multiple of
    what is in use.
    """
    trim = _find_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _find_trim() -> Callable[[int], int] | None:
    """Return `malloc_trim` of glibc; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
