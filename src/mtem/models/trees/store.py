"""A cache of embeddings on disk: rows of numbers by key."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mtem.atomic import replaced
from mtem.data.cache import fingerprint_of


class Store:
    """Rows of numbers by key, in files that are never changed; `add` writes a new one.

    Parameters
    ----------
    folder
        Where the files are.
    width
        The numbers in each row.
    """

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        self.type = np.dtype([("key", "<u8"), ("values", "<f2", (width,))])
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # sorted keys, the row of each, the rows
        for path in sorted(folder.glob("*.npy")):
            self._open(path)

    def fill(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Copy the stored rows of the keys into `values`, and return the numbers of the keys that are missing."""
        missing = np.arange(len(keys))
        for ordered, numbers, rows in self.parts:
            at = np.searchsorted(ordered, keys[missing]).clip(max=len(ordered) - 1)
            known = ordered[at] == keys[missing]
            values[missing[known]] = rows["values"][numbers[at[known]]]
            missing = missing[~known]
        return missing

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Store the rows of new keys."""
        rows = np.zeros(len(keys), self.type)
        rows["key"], rows["values"] = keys, values
        path = self.folder / f"{fingerprint_of(keys.tobytes())[:32]}.npy"
        with replaced(path) as temporary, temporary.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # damaged: its rows are computed again
            return
        if rows.dtype == self.type and len(rows):
            keys = np.array(rows["key"])
            numbers = np.argsort(keys)
            self.parts.append((keys[numbers], numbers, rows))
