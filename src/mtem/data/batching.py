"""Batches of texts of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from mtem.capture import send


class Batches:
    """The batches of a training run, as a function of the step.

    The batch of a step depends only on the seed and the step, so that a resumed run needs no other state.

    Parameters
    ----------
    lengths : array of int, shape (N,)
        The number of tokens of every row.
    size : int
        Rows per batch.
    seed : int
        Seed of the permutations.
    bucket : int
        Batches per pool. A larger pool has less padding and less random batches.
    full_only : bool
        Leave out what remains of an epoch after the last full batch, other rows in every epoch; with fewer rows than a batch
        has, all of them are one batch.

    Attributes
    ----------
    batches_per_epoch : int
        Number of batches of an epoch.

    Notes
    -----
    Every epoch is a new permutation of all rows, cut into pools of `bucket` batches. Inside a pool the rows are sorted by length
    (ties in random order) and cut into batches; the batches of an epoch come in random order. Every row occurs exactly once in
    an epoch. The last batch of an epoch may be smaller; a single remaining row joins another batch.
    """

    def __init__(self, lengths: np.ndarray, size: int, seed: int, bucket: int = 50, full_only: bool = False) -> None:
        self.lengths = np.asarray(lengths)
        if len(self.lengths) == 0 or size < 1 or bucket < 1:
            raise ValueError(f"batches of {size} from {len(self.lengths)} rows in pools of {bucket}: all must be positive")
        self.size, self.seed, self.bucket = size, seed, bucket
        full, remainder = divmod(len(self.lengths), size)
        self._used = full * size if full_only and full else len(self.lengths)
        remainder *= self._used > full * size
        self._merge_last = full > 0 and remainder == 1
        self.batches_per_epoch = full + (remainder > 0) - self._merge_last
        self._epoch = -1
        self._order: list[np.ndarray] = []

    def __call__(self, step: int) -> np.ndarray:
        """Return the rows of the batch of a step, counted from 0."""
        epoch, position = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._make_epoch(epoch), epoch
        return self._order[position]

    def _make_epoch(self, epoch: int) -> list[np.ndarray]:
        random = np.random.default_rng([self.seed, epoch])
        rows = random.permutation(len(self.lengths))[: self._used]
        batches: list[np.ndarray] = []
        for pool in _cut(rows, self.size * self.bucket):
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += _cut(pool, self.size)
        if self._merge_last:
            single = batches.pop()
            batches[-1] = np.concatenate([batches[-1], single])
        return [batches[i] for i in random.permutation(len(batches))]


def sequential(lengths: np.ndarray, *, size: int | None = None, tokens_per_batch: int | None = 16384) -> list[np.ndarray]:
    """Return batches for inference: every row once, sorted by length.

    The longest rows come first, so that a lack of memory shows at once.

    Parameters
    ----------
    lengths : array of int, shape (N,)
        The number of tokens of every row.
    size : int, optional
        Most rows per batch.
    tokens_per_batch : int, optional
        Most tokens per batch, padding included; a batch has at least one row.

    Returns
    -------
    list of array of int
        The rows of each batch.
    """
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    batches = []
    start = 0
    while start < len(order):
        count = len(order) - start
        if tokens_per_batch is not None:
            count = min(count, max(1, int(tokens_per_batch // max(1, int(lengths[order[start]])))))
        if size is not None:
            count = min(count, size)
        batches.append(order[start : start + count])
        start += count
    return batches


def padding_share(lengths: np.ndarray, batches: Iterable[np.ndarray]) -> float:
    """Return the share of padding among all tokens of padded batches."""
    lengths = np.asarray(lengths)
    real = padded = 0
    for rows in batches:
        real += int(lengths[rows].sum())
        padded += int(lengths[rows].max()) * len(rows)
    return 1.0 - real / padded if padded else 0.0


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on a device."""
    return send(torch.from_numpy(array), device)


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
