"""What the domain says about a post: the mean of the posts that are most like it.

Posts of an event tell a few stories, again and again in other words. Their mean has less of the wording of one post in it.
"""

from __future__ import annotations

import numpy as np

BANK = 10_000  # first posts among which neighbours are sought; of more, every second, third, ...
SAME = 0.9999  # posts of this similarity are the same text, which is no neighbour
_ROWS = 512  # compared at once


def bank_of(values: np.ndarray) -> np.ndarray:
    """Return the rows among which neighbours are sought, in half precision."""
    return np.ascontiguousarray(values[:: -(-len(values) // BANK) or 1], np.float16)


def neighbour_means(values: np.ndarray, bank: np.ndarray, count: int) -> np.ndarray:
    """Return for each row the mean of the `count` rows of the bank that are nearest by cosine similarity, in half precision.

    Rows equal to it do not count, so it does not matter whether the row itself is in the bank. A row without any neighbour gets
    itself.

    Parameters
    ----------
    values
        Rows, [rows, width].
    bank
        Rows to choose from, [others, width].
    count
        The number of neighbours; of a smaller bank, all.
    """
    means = np.array(values, np.float16)
    others, directions = np.asarray(bank, np.float32), _directions(bank)
    count = min(count, len(bank))
    for start in range(0, len(values) if count else 0, _ROWS):
        rows = slice(start, start + _ROWS)
        likeness = _directions(values[rows]) @ directions.T
        likeness[likeness > SAME] = -np.inf
        nearest = np.argpartition(likeness, -count, axis=1)[:, -count:]
        found = np.isfinite(np.take_along_axis(likeness, nearest, axis=1)).astype(np.float32)
        sums = np.einsum("rc,rcw->rw", found, others[nearest])
        counts = found.sum(axis=1)
        has = counts > 0
        means[rows][has] = sums[has] / counts[has, np.newaxis]
    return means


def _directions(values: np.ndarray) -> np.ndarray:
    rows = np.asarray(values, np.float32)
    directions: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return directions
