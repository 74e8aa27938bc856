"""A pilot's method: FixMatch for a pool in which one class is rare, and for labeled texts in a changed view.

With `target_class_prior=estimated` the method knows the pool's class shares; with `predicted=true` it takes those that the
teacher predicts, which lie between the true and even ones, since a model of even classes gives the label of the rare class to
many texts of the frequent one. So these labels are often wrong. Here

- labels and their confidence come from the teacher's logits plus the log of the shares (relative to even ones);
- the student learns them with the same shift added to its own logits, so that its logits alone are those of even classes.

With `labels=false` only the second is done: labels are those of even classes, and the student is kept from learning that a text
of the target is likely to be of the frequent class. With `learned=true` the shares are then those of the confident labels, which
are what the student learns: also with balanced draws fewer texts of the rarer class are confident. `source_view=true` shows the
labeled texts in the run's view too.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.methods.base import Batch, Context, StepLog, Update
from mtem.methods.fixmatch import FixMatch, FixMatchSettings, confident_labels, masked_cross_entropy
from mtem.models.base import Model
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class ShiftedSettings(FixMatchSettings):
    """Where the shares come from, and whether labeled texts are shown in the view too."""

    predicted: bool = setting(False, "the teacher's mean prediction on the unlabeled texts, instead of `target_class_prior`")
    labels: bool = setting(True, "shift the teacher's logits too")
    learned: bool = setting(False, "with labels=false: the shares of the confident labels")
    source_view: bool = setting(False, "show the labeled texts in the run's view as well")


class Shifted(FixMatch):
    """FixMatch with the shares of the pool added to the logits of teacher and student."""

    name = "shifted"
    summary = "confident labels under the pool's class shares, learned with the same shares added"
    paper = "a pilot"
    Settings = ShiftedSettings
    settings: ShiftedSettings

    def __init__(self, model: Model, settings: ShiftedSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.mean = torch.full((context.classes,), 1 / context.classes, device=model.device)
        self.steps = torch.zeros((), device=model.device)

    def shares(self, logits: Tensor) -> Tensor | None:
        """Return the shares of the pool, or of the labels that are learned."""
        if self.settings.learned:
            labels, confident = confident_labels(logits, self.settings.threshold)
            found = F.one_hot(labels, logits.shape[1]) * confident.unsqueeze(1)
            return self.running_mean((found.sum(dim=0) + 1) / (found.sum() + logits.shape[1]))  # one more of each class
        return self.running_mean(logits.softmax(dim=1).mean(dim=0)) if self.settings.predicted else self.context.align.shares

    def running_mean(self, shares: Tensor) -> Tensor:
        """Return the mean over the batches so far, at most the last hundred."""
        self.steps.add_(1).clamp_(max=100)  # in place, as a captured step needs it
        self.mean.add_((shares - self.mean) / self.steps)
        return self.mean

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the texts under the pool's shares, then take one step on both batches."""
        plain = self.model.prepare(target.inputs)
        strong = self.model.prepare(self.student_view(plain))
        logits = self.teacher_logits(plain)
        shares = self.shares(logits)
        shift: Tensor | float = 0.0 if shares is None else (shares * len(shares)).log()
        labels, confident = confident_labels(logits + shift if self.settings.labels else logits, self.settings.threshold)
        strong = self.perturbed_view(strong, labels)
        self.model.train()
        labeled = self.student_view(self.model.prepare(source.inputs)) if self.settings.source_view else source.inputs
        source_loss = self.cross_entropy(self.model(labeled), source.require_labels())
        consistency_loss = masked_cross_entropy(self.model(strong) + shift, labels, confident)
        update(source_loss + self.settings.weight * consistency_loss)
        return {"source_loss": source_loss.detach(), "confident_share": confident.float().mean()}
