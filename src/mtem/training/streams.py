"""Batches of a corpus by step number: labeled or unlabeled, with a fixed share of labeled target texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtem.data.batching import Batches, on_device
from mtem.data.tokens import Tokens
from mtem.methods.base import Batch


def share_of(size: int, share: float) -> int:
    """How many texts of a batch that is; at least one."""
    return min(max(1, round(size * share)), size)


class Stream:
    """Labeled or unlabeled batches of some rows of a corpus, by step number."""

    def __init__(
        self, model: Any, tokens: Tokens, rows: np.ndarray, labels: np.ndarray | None, size: int, seed: int,
        *, extra: np.ndarray | None = None, extra_share: float = 0.0,
    ) -> None:  # fmt: skip
        """`extra` rows, if any, make up `extra_share` of every batch instead of coming at random among the others."""
        self.model, self.tokens = model, tokens
        # On the device as a whole, so that a batch is one small transfer.
        self.labels = None if labels is None else torch.from_numpy(labels).to(model.device)
        lengths = np.asarray(tokens.lengths)
        few = 0
        if extra is not None and len(extra) and extra_share:
            few = share_of(size, extra_share)
            rows = np.setdiff1d(rows, extra)
        self.parts = []
        bucket = 50 if getattr(tokens, "padded", True) else 1  # sorting by length is for the sake of padding alone
        if size - few > 0 and len(rows):
            self.parts.append((rows, Batches(lengths[rows], size - few, seed, bucket)))
        if few:
            self.parts.append((np.asarray(extra), Batches(lengths[extra], few, seed + 1, bucket)))
        self.per_epoch = self.parts[0][1].batches_per_epoch

    def rows(self, step: int) -> np.ndarray:
        return np.concatenate([rows[batches(step)] for rows, batches in self.parts])

    def __call__(self, step: int) -> Batch:
        return self.of(self.rows(step))

    def of(self, rows: np.ndarray) -> Batch:
        numbers = on_device(np.asarray(rows, dtype=np.int64), self.model.device)
        return Batch(self.model.collate(self.tokens, rows), None if self.labels is None else self.labels[numbers], numbers)
