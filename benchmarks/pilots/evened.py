r"""A pilot's method: FixMatch in which the confident labels of a batch weigh as much in one class as in another.

`balance_target` draws the classes that the source model predicts equally often. But a text of the rarer class is seldom sure, so
its label is left out more often and the frequent class is learned more. Here the losses of the confident labels are averaged
within each class, then over the classes that the batch has; their sum weighs as much as in FixMatch. `most` limits how much more
than there a single text may count. But labels of the rarer class are also wrong more often: `power` is how much of the way is
gone.

    python benchmarks/pilots/rehearsed_pools.py ... --pool natural \
        --rule 'evened: method=benchmarks/pilots/evened.py balance_target=true'
"""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from mtem.methods.base import Batch, StepLog, Update
from mtem.methods.fixmatch import FixMatch, FixMatchSettings, confident_labels
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class EvenedSettings(FixMatchSettings):
    """How even the classes become, and the limit of a text's weight."""

    power: float = setting(1.0, "1: classes have the same weight, 0: each text has, as in FixMatch", low=0.0, high=1.0)
    most: float = setting(4.0, "largest weight of a confident label; it is 1 in FixMatch", low=1.0)


class Evened(FixMatch):
    """FixMatch with even classes among the confident labels of a batch."""

    name = "evened"
    summary = "confident labels, each class with the same weight in a batch"
    paper = "a pilot"
    Settings = EvenedSettings
    settings: EvenedSettings

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the texts, then take one step on both batches."""
        settings, model = self.settings, self.model
        plain = model.prepare(target.inputs)
        labels, confident = confident_labels(self.context.align(self.teacher_logits(plain)), settings.threshold)
        strong = self.perturbed_view(model.prepare(self.student_view(plain)), labels)
        model.train()
        source_loss = self.cross_entropy(model(source.inputs), source.require_labels())
        losses = F.cross_entropy(model(strong), labels, reduction="none")
        consistency_loss = (losses * weights(labels, confident, self.context.classes, settings)).mean()
        update(source_loss + settings.weight * consistency_loss)
        return {"source_loss": source_loss.detach(), "confident_share": confident.float().mean()}


def weights(labels: Tensor, confident: Tensor, classes: int, settings: EvenedSettings) -> Tensor:
    """Return the weights of the texts: 0 without a confident label; with a power of 1 the classes have equal sums."""
    found = F.one_hot(labels, classes) * confident.unsqueeze(1)  # [N, K]
    counts = found.sum(dim=0)
    even = counts.sum() / (counts > 0).sum().clamp_min(1)
    return (found * (even / counts.clamp_min(1)).pow(settings.power).clamp_max(settings.most)).sum(dim=1)
