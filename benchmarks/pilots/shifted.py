"""A pilot's method: FixMatch for a pool in which one class is rare, and for labeled texts in a changed view.

With `target_class_prior=estimated` the method knows the pool's class shares. A source model of even classes gives the label of
the rare class to many texts of the frequent one, so these labels are often wrong. Here

- labels and their confidence come from the teacher's logits plus the log of the shares (relative to even ones);
- the student learns them with the same shift added to its own logits, so that its logits alone are those of even classes.

`source_view=true` shows the labeled texts in the run's view too.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from mtem.methods.base import Batch, StepLog, Update
from mtem.methods.fixmatch import FixMatch, FixMatchSettings, confident_labels, masked_cross_entropy
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class ShiftedSettings(FixMatchSettings):
    """Whether labeled texts are shown in the view too; the shift needs `target_class_prior`."""

    source_view: bool = setting(False, "show the labeled texts in the run's view as well")


class Shifted(FixMatch):
    """FixMatch with the shares of the pool added to the logits of teacher and student."""

    name = "shifted"
    summary = "confident labels under the pool's class shares, learned with the same shares added"
    paper = "a pilot"
    Settings = ShiftedSettings
    settings: ShiftedSettings

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the texts under the pool's shares, then take one step on both batches."""
        shares = self.context.align.shares
        shift: Tensor | float = 0.0 if shares is None else (shares * len(shares)).log()
        plain = self.model.prepare(target.inputs)
        strong = self.student_view(plain)
        labels, confident = confident_labels(self.teacher_logits(plain) + shift, self.settings.threshold)
        self.model.train()
        labeled = self.student_view(self.model.prepare(source.inputs)) if self.settings.source_view else source.inputs
        source_loss = self.cross_entropy(self.model(labeled), source.require_labels())
        consistency_loss = masked_cross_entropy(self.model(strong) + shift, labels, confident)
        update(source_loss + self.settings.weight * consistency_loss)
        return {"source_loss": source_loss.detach(), "confident_share": confident.float().mean()}
