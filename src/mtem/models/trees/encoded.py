"""A corpus of threads as numbers: who replies to whom, and the features of every post, memory-mapped from the cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mtem.atomic import replaced

Arrays = dict[str, np.ndarray]


class EncodedThreads:
    """EncodedThreads one behind the other, in flat arrays.

    Attributes
    ----------
    lengths
        Posts in each thread.
    parents
        For every post the position, in its thread, of the one it replies to; -1 for a root.
    arrays
        The posts' features as in `node_features`: "values" [posts, width], or "counts" [posts], "words" and "weights".
    """

    padded = False  # nothing is gained by putting threads of one size into a batch

    def __init__(self, lengths: np.ndarray, parents: np.ndarray, arrays: Arrays) -> None:
        self.lengths, self.parents, self.arrays = lengths, parents, arrays
        self._starts = _starts(lengths)
        self._entries = _starts(arrays["counts"]) if "counts" in arrays else None

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: np.ndarray) -> Arrays:
        """The threads at `rows` as one graph: "parents" (a root is its own), "trees" and "roots", and the posts' features.

        Sparse features are "words", "weights" and "nodes", by post.
        """
        rows = np.asarray(rows, np.int64)
        sizes = np.asarray(self.lengths[rows], np.int64)
        posts, trees = _ranges(self._starts[rows], sizes)
        first = np.cumsum(sizes) - sizes
        above = np.asarray(self.parents[posts], np.int64)
        parents = np.where(above < 0, np.arange(len(posts)), above + first[trees])
        graph = {"parents": parents, "trees": trees, "roots": first}
        if self._entries is None:
            return {**graph, "values": np.asarray(self.arrays["values"][posts], np.float32)}
        entries, nodes = _ranges(self._entries[posts], np.asarray(self.arrays["counts"][posts], np.int64))
        words = np.asarray(self.arrays["words"][entries], np.int64)
        return {**graph, "words": words, "weights": np.asarray(self.arrays["weights"][entries], np.float32), "nodes": nodes}

    @classmethod
    def of(cls, pieces: Iterable[Arrays]) -> EncodedThreads:
        """In memory, from pieces as `stored` takes them."""
        pieces = list(pieces)
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return cls(joined.pop("lengths"), joined.pop("parents"), joined)


def stored(folder: Path, pieces: Iterable[Arrays], width: int) -> EncodedThreads:
    """The threads in `folder`; written there first, piece by piece, if they are not there.

    A piece has "lengths", "parents" and the arrays of the features.
    """
    if (threads := _mapped(folder, width)) is None:
        with replaced(folder) as temporary:
            temporary.mkdir()
            for piece in pieces:
                for name, array in piece.items():  # plain numbers, since how many there will be is known only at the end
                    with (temporary / f"{name}.{array.dtype.str[1:]}").open("ab") as file:
                        file.write(array.tobytes())
        threads = _mapped(folder, width)
        assert threads is not None
    return threads


def _mapped(folder: Path, width: int) -> EncodedThreads | None:
    """None where nothing is, or not all of it."""
    arrays = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in (".i4", ".f4", ".f2"):
            kind = np.dtype("<" + path.suffix[1:])
            full = path.stat().st_size >= kind.itemsize  # nothing cannot be mapped
            arrays[path.stem] = np.memmap(path, kind, "r") if full else np.zeros(0, kind)
    if "values" in arrays:
        arrays["values"] = arrays["values"][: len(arrays["values"]) // width * width].reshape(-1, width)
    sizes = {name: len(array) for name, array in arrays.items()}
    posts, entries = (int(arrays[name].sum(dtype=np.int64)) if name in arrays else -1 for name in ("lengths", "counts"))
    wanted = {"parents": posts, "values": posts}
    if "values" not in arrays:
        wanted = {"parents": posts, "counts": posts, "words": entries, "weights": entries}
    if any(sizes.get(name) != size for name, size in wanted.items()):
        return None
    return EncodedThreads(arrays.pop("lengths"), arrays.pop("parents"), arrays)


def _starts(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths, np.int64)
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers start, start + 1, ... of several ranges one behind the other, and which range each is of."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(len(owners)) + (starts - (np.cumsum(lengths) - lengths))[owners], owners
