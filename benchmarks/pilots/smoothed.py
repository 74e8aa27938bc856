"""A pilot's method: MTEM over threads, its pseudo labels smoothed over the most similar first posts of the target.

The teacher's logits of a thread are kept until its next visit. A label comes from the mean of the thread's own logits and of
those of its neighbours, `smoothing` of it theirs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mtem.methods.base import Batch, Context
from mtem.methods.mtem import Mtem, MtemSettings, PseudoLabels
from mtem.models.base import Model
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class SmoothedSettings(MtemSettings):
    """How much, and over how many."""

    smoothing: float = setting(0.5, "weight of the neighbours in a label", low=0.0, high=1.0)
    smoothed_over: int = setting(10, "number of neighbours", low=1)


class Smoothed(Mtem):
    """MTEM with labels that a thread shares with its neighbours."""

    name = "smoothed"
    summary = "MTEM, labels smoothed over the most similar threads"
    paper = "a pilot"
    replayable = False
    Settings = SmoothedSettings
    settings: SmoothedSettings

    def __init__(self, model: Model, settings: SmoothedSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        posts = torch.nn.functional.normalize(torch.from_numpy(model.bank).float(), dim=1)  # type: ignore[attr-defined]
        if len(posts) != context.target_size:
            raise ValueError("the bank is not the target")
        likeness = posts @ posts.T
        likeness[likeness > 0.999] = -1.0  # the same text
        self.near = likeness.topk(settings.smoothed_over, dim=1).indices
        self.memory = torch.zeros(context.target_size, context.classes)
        self.seen = torch.zeros(context.target_size, 1)

    @torch.no_grad()
    def pseudo_labels(self, target: Batch, temperature: float | Tensor) -> PseudoLabels:
        """Return labels from the smoothed logits."""
        logits = self.teacher_logits(self.model.prepare(target.inputs))
        rows = target.rows
        self.memory[rows], self.seen[rows] = logits.float(), 1.0
        near = self.near[rows]
        count = self.seen[near].sum(dim=1)
        mean = (self.memory[near] * self.seen[near]).sum(dim=1) / count.clamp_min(1.0)
        weight = self.settings.smoothing * (count > 0).float()
        return self.sample_labels((1 - weight) * logits + weight * mean, temperature)
