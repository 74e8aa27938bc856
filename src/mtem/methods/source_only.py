"""Training on the labeled texts alone: "Out", and "In+Out" when labeled target texts are among them."""

from __future__ import annotations

import dataclasses

from mtem.methods.base import Batch, Method, StepLog, Update


@dataclasses.dataclass(frozen=True)
class SourceOnlySettings:
    """No settings."""


class SourceOnly(Method):
    r"""Minimise :math:`L_S(\theta)`, the cross-entropy on the labeled texts; unlabeled texts are ignored."""

    name = "source-only"
    summary = "cross-entropy on the labeled texts (Out; with --target-labeled In+Out)"
    paper = "the paper's baseline"
    replayable = True
    Settings = SourceOnlySettings
    settings: SourceOnlySettings

    def step(self, number: int, source: Batch, target: Batch | None, update: Update) -> StepLog:
        """Take one step on the labeled batch."""
        self.model.train()
        loss = self.cross_entropy(self.model(source.inputs), source.require_labels())
        update(loss)
        return {"source_loss": loss.detach()}
