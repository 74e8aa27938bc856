"""Batches of a corpus by step number: labeled or unlabeled, with a fixed share of labeled target texts."""

from __future__ import annotations

import numpy as np
import torch

from mtem.data.batching import Batches, on_device
from mtem.methods.base import Batch
from mtem.models.base import EncodedCorpus, Model
from mtem.training.graphs import LENGTHS, length_multiple

BUCKET = 50  # batches that are sorted by length together, to save padding


def texts_per_batch(size: int, share: float) -> int:
    """Return how many texts of a batch make up `share` of it; at least one."""
    return min(max(1, round(size * share)), size)


class Stream:
    """Batches of some rows of a corpus.

    Parameters
    ----------
    model
        Collates the batches, on its device.
    tokens
        What `model.encode` returned for the corpus.
    rows
        The rows that batches are drawn from.
    labels
        Class numbers of all rows of the corpus; None: the batches have no labels.
    size, seed
        Texts in a batch, and the seed of their order.
    extra, extra_share
        Rows that make up `extra_share` of every batch, instead of coming at random among the others.
    groups
        A number for each of the rows: of every group a batch has as many rows as of any other. A pass has as many batches as
        without groups, so rows of small groups come several times. None, or more groups than rows in a batch: all rows alike.
    padded_lengths
        About so many different lengths of padded batches, where steps are captured.
    """

    def __init__(
        self, model: Model, tokens: EncodedCorpus, rows: np.ndarray, labels: np.ndarray | None, size: int, seed: int,
        *, extra: np.ndarray | None = None, extra_share: float = 0.0, groups: np.ndarray | None = None,
        padded_lengths: int = LENGTHS,
    ) -> None:  # fmt: skip
        self.model, self.tokens = model, tokens
        self.multiple = length_multiple(model, padded_lengths)
        # On the device as a whole, so that a batch is one small transfer.
        self.labels = None if labels is None else torch.from_numpy(labels).to(model.device)
        lengths = np.asarray(tokens.lengths)
        extra_size = 0
        if extra is not None and len(extra) and extra_share:
            extra_size = texts_per_batch(size, extra_share)
            rows = np.setdiff1d(rows, extra)
        self.parts = []
        bucket = BUCKET if getattr(tokens, "padded", True) else 1
        size -= extra_size
        self.per_epoch = 0
        if size > 0 and len(rows):
            whole = Batches(lengths[rows], size, seed, bucket)
            self.per_epoch = whole.batches_per_epoch
            parts = [] if groups is None else [rows[groups == number] for number in np.unique(groups)]
            if 1 < len(parts) <= size:
                sizes = [size // len(parts) + (number < size % len(parts)) for number in range(len(parts))]
                for part, count in zip(parts, sizes, strict=True):  # full batches, so that steps have few shapes
                    self.parts.append((part, Batches(lengths[part], count, seed, bucket, full_only=True)))
            else:
                self.parts.append((rows, whole))
        if extra_size:
            extra = np.asarray(extra)
            self.parts.append((extra, Batches(lengths[extra], extra_size, seed + 1, bucket)))
        self.per_epoch = self.per_epoch or self.parts[0][1].batches_per_epoch

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the batch of a step."""
        return np.concatenate([rows[batches(step)] for rows, batches in self.parts])

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self.of(self.rows(step))

    def of(self, rows: np.ndarray) -> Batch:
        """Return the batch of some rows."""
        numbers = on_device(np.asarray(rows, dtype=np.int64), self.model.device)
        inputs = self.model.collate(self.tokens, rows, multiple=self.multiple)
        return Batch(inputs, None if self.labels is None else self.labels[numbers], numbers)
