"""A corpus of threads as numbers: the parent and the features of every post, memory-mapped from the cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mtem.atomic import replaced

Arrays = dict[str, np.ndarray]
CHUNK = 512  # threads whose values are read at once


class EncodedThreads:
    """Threads in flat arrays, one after the other.

    Parameters
    ----------
    lengths
        The number of posts of each thread.
    parents
        For every post the position, in its thread, of the post it replies to; -1 for a root.
    arrays
        The features of the posts as in `features`: "values" [posts, width], or "counts" [posts], "words" and "weights".

    Attributes
    ----------
    centres
        What is subtracted from the values of first posts and of replies, [domains, 2, width]; None: nothing.
    domains
        The domain of each thread, among those of `centres`.
    neighbours
        The mean of the first posts that are most like that of each thread, [threads, width]; None: not known.
    """

    padded = False  # batches have no padding, so threads of different sizes may share one

    def __init__(self, lengths: np.ndarray, parents: np.ndarray, arrays: Arrays) -> None:
        self.lengths, self.parents, self.arrays = lengths, parents, arrays
        self.centres: np.ndarray | None = None
        self.domains = np.zeros(len(lengths), np.int64)
        self.neighbours: np.ndarray | None = None
        self._starts = _starts(lengths)
        self._entries = _starts(arrays["counts"]) if "counts" in arrays else None

    def __len__(self) -> int:
        """Return the number of threads."""
        return len(self.lengths)

    def batch(self, rows: np.ndarray) -> Arrays:
        """Return the threads at `rows` as one graph.

        Returns
        -------
        dict
            "parents" (of every post; a root is its own), "threads" (of every post) and "roots" (of every thread), as in
            `bigcn.Graph`; and the features, either "values" (one row for each post) or "words", "weights" and "posts"
            (column, value and row of each entry). With "values", if they are known, "neighbours" (one row for each thread).
        """
        rows = np.asarray(rows, np.int64)
        sizes = np.asarray(self.lengths[rows], np.int64)
        posts, threads = _ranges(self._starts[rows], sizes)
        first = np.cumsum(sizes) - sizes
        above = np.asarray(self.parents[posts], np.int64)
        parents = np.where(above < 0, np.arange(len(posts)), above + first[threads])
        graph = {"parents": parents, "threads": threads, "roots": first}
        if self._entries is None:
            values = np.asarray(self.arrays["values"][posts], np.float32)
            if self.centres is not None:
                values = values - self.centres[np.asarray(self.domains)[rows][threads], (above >= 0).astype(np.int64)]
            if self.neighbours is not None:
                graph["neighbours"] = np.asarray(self.neighbours[rows], np.float32)
                if self.centres is not None:
                    graph["neighbours"] -= self.centres[np.asarray(self.domains)[rows], 0]
            return {**graph, "values": values}
        entries, owners = _ranges(self._entries[posts], np.asarray(self.arrays["counts"][posts], np.int64))
        words = np.asarray(self.arrays["words"][entries], np.int64)
        return {**graph, "words": words, "weights": np.asarray(self.arrays["weights"][entries], np.float32), "posts": owners}

    def first_posts(self, threads: np.ndarray | None = None) -> np.ndarray:
        """Return the values of the first posts of some threads, or of all, [threads, width]."""
        return np.asarray(self.arrays["values"][self._starts if threads is None else self._starts[threads]])

    def means(self, threads: np.ndarray) -> np.ndarray:
        """Return the mean of the values of some threads' first posts, and of their replies, [2, width]."""
        values = self.arrays["values"]
        sums, counts = np.zeros((2, values.shape[1])), np.zeros((2, 1))
        for chunk in np.array_split(threads, max(1, len(threads) // CHUNK)):
            posts, _ = _ranges(self._starts[chunk], np.asarray(self.lengths[chunk], np.int64))
            replies = np.asarray(self.parents[posts]) >= 0
            for kind, chosen in enumerate((posts[~replies], posts[replies])):
                sums[kind] += np.asarray(values[chosen], np.float32).sum(axis=0)
                counts[kind] += len(chosen)
        means: np.ndarray = (sums / np.maximum(counts, 1)).astype(np.float32)
        return means

    @classmethod
    def of(cls, pieces: Iterable[Arrays]) -> EncodedThreads:
        """Return threads in memory, from pieces as for `stored`."""
        pieces = list(pieces)
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return cls(joined.pop("lengths"), joined.pop("parents"), joined)


def stored(folder: Path, pieces: Iterable[Arrays], width: int) -> EncodedThreads:
    """Return the threads in a folder of the cache, after writing them there if they are missing.

    Parameters
    ----------
    folder
        The folder.
    pieces
        The threads in pieces with "lengths", "parents" and the arrays of the features. Read only if needed.
    width
        The number of features of a post.
    """
    if (threads := _mapped(folder, width)) is None:
        with replaced(folder) as temporary:
            temporary.mkdir()
            for piece in pieces:
                for name, array in piece.items():  # raw numbers: their count is known only at the end
                    with (temporary / f"{name}.{array.dtype.str[1:]}").open("ab") as file:
                        file.write(array.tobytes())
        threads = _mapped(folder, width)
        assert threads is not None
    return threads


def _mapped(folder: Path, width: int) -> EncodedThreads | None:
    """Return the threads in a folder, or None if it is missing or incomplete."""
    arrays: Arrays = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in (".i4", ".f4", ".f2"):
            dtype = np.dtype("<" + path.suffix[1:])
            empty = path.stat().st_size < dtype.itemsize  # an empty file cannot be mapped
            arrays[path.stem] = np.zeros(0, dtype) if empty else np.memmap(path, dtype, "r")
    if "values" in arrays:
        arrays["values"] = arrays["values"][: len(arrays["values"]) // width * width].reshape(-1, width)
    sizes = {name: len(array) for name, array in arrays.items()}
    posts, entries = (int(arrays[name].sum(dtype=np.int64)) if name in arrays else -1 for name in ("lengths", "counts"))
    expected = {"parents": posts, "values": posts}
    if "values" not in arrays:
        expected = {"parents": posts, "counts": posts, "words": entries, "weights": entries}
    if any(sizes.get(name) != size for name, size in expected.items()):
        return None
    return EncodedThreads(arrays.pop("lengths"), arrays.pop("parents"), arrays)


def _starts(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths, np.int64)
    starts: np.ndarray = np.cumsum(lengths) - lengths
    return starts


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers start, start + 1, ... of several ranges, one after the other, and the range of each number."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(len(owners)) + (starts - (np.cumsum(lengths) - lengths))[owners], owners
