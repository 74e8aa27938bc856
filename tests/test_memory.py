"""Free memory goes back to the system, where there is a way to give it back."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from mtem import memory


@pytest.fixture(autouse=True)
def _forget():
    memory._find_trim.cache_clear()
    yield
    memory._find_trim.cache_clear()


def resident() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


@pytest.mark.skipif(memory._find_trim() is None, reason="needs glibc")
def test_free_blocks_between_used_ones_go_back():
    blocks = [ctypes.create_string_buffer(b"x" * 20_000, 20_000) for _ in range(5000)]  # 100 MB, below the size that is mapped
    kept = blocks[::50]
    del blocks
    before = resident()
    memory.release_free_memory()
    assert resident() < before - 50_000
    assert all(block.raw[:3] == b"xxx" for block in kept)


def test_nothing_happens_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    memory.release_free_memory()
    assert memory._find_trim() is None


def test_nothing_happens_with_another_c_library(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    memory.release_free_memory()
    assert memory._find_trim() is None
