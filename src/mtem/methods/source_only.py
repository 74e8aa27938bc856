"""Training on the labeled texts alone: "Out", and "In+Out" when labeled target texts are among them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from mtem.methods.base import Batch, Method, Update


@dataclasses.dataclass(frozen=True)
class SourceOnlySettings:
    """Nothing to set."""


class SourceOnly(Method):
    r""":math:`\min_\theta L_S(\theta)`, the cross-entropy on the labeled texts; the unlabeled ones are not looked at."""

    name = "source-only"
    summary = "cross-entropy on the labeled texts (Out; with --target-labeled In+Out)"
    paper = "the paper's baseline"
    Settings = SourceOnlySettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": {}}

    def step(self, number: int, source: Batch, target: Batch | None, update: Update) -> dict[str, Tensor | float]:
        self.model.train()
        loss = self.cross_entropy(self.model(source.inputs), source.labels)
        update(loss)
        return {"source_loss": loss.detach()}
