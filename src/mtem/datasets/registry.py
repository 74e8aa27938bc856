"""The published data sets that `mtem data prepare` can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mtem.datasets import amazon, pheme
from mtem.errors import RequestError


class Dataset(NamedTuple):
    """A published data set.

    Attributes
    ----------
    prepare : callable
        Reads the original archive or folder, writes JSON lines to a folder, and returns lines that describe the files.
    description : str
        One line.
    """

    prepare: Callable[[Path, Path], list[str]]
    description: str


DATASETS = {
    "amazon": Dataset(amazon.prepare, "Multi-Domain Sentiment Dataset: Amazon reviews of several product domains"),
    "pheme": Dataset(pheme.prepare, "PHEME: threads of tweets about breaking news, rumours and non-rumours"),
}


def get(name: str) -> Dataset:
    """Return a data set by name.

    Raises
    ------
    RequestError
        If the name is unknown.
    """
    if name not in DATASETS:
        raise RequestError(f"unknown data set '{name}': there are {' and '.join(DATASETS)}")
    return DATASETS[name]
