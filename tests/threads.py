"""Threads made for tests: replies that agree or doubt, among plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import BAD, GOOD, PLAIN

SHAPES = {
    "alone": [-1],
    "pair": [-1, 0],
    "star": [-1, 0, 0, 0, 0, 0],
    "chain": [-1, *range(50)],
    "bush": [-1, 0, 0, 1, 1, 2, 5, 0, 7],
}


def make_parents(count: int, draw: np.random.Generator) -> list[int]:
    """A tree of `count` posts in which every reply picks an earlier post."""
    return [-1, *(int(draw.integers(number)) for number in range(1, count))]


def make_threads(count: int, seed: int, shift: float = 0.0, largest: int = 6) -> list[dict[str, Any]]:
    """Threads with a label; the replies carry the class words, the root but one. `shift`: as in `make_texts`."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        kind = number % 2
        parents = make_parents(int(draw.integers(1, largest + 1)), draw)
        nodes = []
        for post, parent in enumerate(parents):
            words = [str(draw.choice(PLAIN)) for _ in range(int(draw.integers(2, 6)))]
            words.append((BAD, GOOD)[kind][int(draw.integers(6) + (6 if draw.random() < shift else 0))])
            above = None if parent < 0 else f"{number}-{parent}"
            nodes.append({"id": f"{number}-{post}", "parent": above, "text": " ".join(words), "time": post})
        rows.append({"id": str(number), "label": ("bad", "good")[kind], "nodes": nodes, "lang": "en"})
    return rows


def write_threads(path: Path, rows: list[dict[str, Any]], labeled: bool = True) -> Path:
    kept = [row if labeled else {name: value for name, value in row.items() if name != "label"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return path
