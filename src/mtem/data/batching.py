"""Which texts form a batch. Texts of like length go together, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


class Batches:
    """The batches of a training run: a pure function of the seed and the step, so a resumed run needs only the step.

    Every epoch is a new permutation of all rows, cut into pools of `bucket` batches; inside a pool the rows are sorted by
    length (ties at random) and cut into batches; the batches of an epoch come in random order. Every row comes exactly once
    an epoch. The last batch of an epoch may be smaller; a single row left over joins another batch.

    Parameters
    ----------
    lengths
        The number of tokens of every row.
    size
        Rows per batch.
    seed
        Of the permutations.
    bucket
        Batches per pool: more is less padding and less chance in what comes together.
    """

    def __init__(self, lengths: np.ndarray, size: int, seed: int, bucket: int = 50):
        self.lengths = np.asarray(lengths)
        if len(self.lengths) == 0 or size < 1 or bucket < 1:
            raise ValueError(f"batches of {size} from {len(self.lengths)} rows in pools of {bucket}: all must be positive")
        self.size, self.seed, self.bucket = size, seed, bucket
        whole, rest = divmod(len(self.lengths), size)
        self._merge_last = whole > 0 and rest == 1
        self.batches_per_epoch = whole + (rest > 0) - self._merge_last
        self._epoch = -1
        self._order: list[np.ndarray] = []

    def __call__(self, step: int) -> np.ndarray:
        """The rows of the batch of `step` (from 0)."""
        epoch, place = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._make_epoch(epoch), epoch
        return self._order[place]

    def _make_epoch(self, epoch: int) -> list[np.ndarray]:
        random = np.random.default_rng([self.seed, epoch])
        rows = random.permutation(len(self.lengths))
        batches: list[np.ndarray] = []
        for pool in _cut(rows, self.size * self.bucket):
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += _cut(pool, self.size)
        if self._merge_last:
            single = batches.pop()
            batches[-1] = np.concatenate([batches[-1], single])
        return [batches[i] for i in random.permutation(len(batches))]


def sequential(lengths: np.ndarray, *, size: int | None = None, tokens_per_batch: int | None = 16384) -> list[np.ndarray]:
    """Batches for inference: every row once, sorted by length, the longest first (if memory is short it shows at once).

    A batch holds at most `size` rows and at most `tokens_per_batch` tokens with padding, but at least one row.
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
    """The share of padding among all tokens of padded batches."""
    lengths = np.asarray(lengths)
    real = padded = 0
    for rows in batches:
        real += int(lengths[rows].sum())
        padded += int(lengths[rows].max()) * len(rows)
    return 1.0 - real / padded if padded else 0.0


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there."""
    return send(torch.from_numpy(array), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there. From the CPU to a GPU it goes through pinned memory, and nobody waits until it has arrived."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
