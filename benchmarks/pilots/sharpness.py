"""A pilot's method: FixMatch with the step of CST (SAM), which computes the gradient where the loss is largest nearby.

Both passes see the same views, the same labels and, with `view_radius`, the same perturbation.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from mtem.methods.base import Batch, StepLog, Update
from mtem.methods.cst import climb
from mtem.methods.fixmatch import FixMatch, FixMatchSettings, confident_labels, masked_cross_entropy
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class SharpnessSettings(FixMatchSettings):
    """The distance of SAM."""

    rho: float = setting(0.05, "distance from the weights at which the gradient is computed", low=0.0)


class Sharpness(FixMatch):
    """FixMatch with SAM."""

    name = "sharpness"
    summary = "confident labels, learned at weights that are moved against the loss"
    paper = "a pilot"
    Settings = SharpnessSettings
    settings: SharpnessSettings

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the texts, then take one step on both batches from where their loss is larger."""
        settings, model = self.settings, self.model
        source = source._replace(inputs=model.prepare(source.inputs))
        plain = model.prepare(target.inputs)
        labels, confident = confident_labels(self.context.align(self.teacher_logits(plain)), settings.threshold)
        strong = self.perturbed_view(model.prepare(self.student_view(plain)), labels)

        def loss() -> Tensor:
            consistency_loss = masked_cross_entropy(model(strong), labels, confident)
            return self.cross_entropy(model(source.inputs), source.require_labels()) + settings.weight * consistency_loss

        model.train()
        found = loss()
        restore = climb(list(model.trainable().values()), found, settings.rho, adaptive=False)
        update(loss(), before_step=restore)
        return {"loss": found.detach(), "confident_share": confident.float().mean()}
