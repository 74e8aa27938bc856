r"""Minimax entropy (Saito et al., ICCV 2019): the classifier's prototypes move to the target, the features to the prototypes.

The classifier sees only the direction of the features, :math:`p(x) = \mathrm{softmax}(W F(x) / (T \lVert F(x) \rVert))`. One step
is two updates, the first on labeled texts :math:`L` (the target's among them, if there are any), the second on unlabeled ones
:math:`U`:

.. math::
    (F, W) &\leftarrow \text{descend } \operatorname{E}_L\left[-\log p_y(x)\right] \\
    W &\leftarrow \text{ascend } \lambda H, \quad F \leftarrow \text{descend } \lambda H, \qquad
    H = -\operatorname{E}_U \sum_k p_k(x) \log p_k(x)

The second is one backward pass of :math:`-\lambda H` whose gradient changes its sign between :math:`W` and :math:`F`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtem.methods.base import Batch, Context, Method, Update, reverse
from mtem.models.base import CosineHead
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class MmeSettings:
    """The classifier's temperature and rate, and the weight of the entropy."""

    temperature: float = setting(0.05, "T of the cosine classifier", low=1e-3)
    entropy_weight: float = setting(0.1, "lambda: weight of the entropy", low=0.0)
    head_learning_rate_ratio: float = setting(10.0, "the classifier's learning rate relative to the encoder's", low=0.0)


class Mme(Method):
    """A cosine classifier that raises the entropy of unlabeled texts against an encoder that lowers it."""

    name = "mme"
    summary = "a classifier that raises the unlabeled texts' entropy against an encoder that lowers it"
    paper = "Saito et al., ICCV 2019"
    Settings = MmeSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": {}}  # the defaults are the paper's

    def __init__(self, model: Any, settings: MmeSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.head_names = model.head_names()

    @classmethod
    def prepare_model(cls, model: Any, settings: MmeSettings) -> None:
        model.head = CosineHead(model.head, settings.temperature)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        self.model.train()
        source_loss = self.cross_entropy(self.model(source.inputs), source.labels)
        update(source_loss)
        entropy = self.contested_entropy(target)
        update(-self.settings.entropy_weight * entropy)
        return {"source_loss": source_loss.detach(), "entropy": entropy.detach()}

    def contested_entropy(self, target: Batch) -> Tensor:
        """H, whose gradient reaches the encoder with the opposite sign."""
        _, features = self.model.logits_and_features(target.inputs)
        log_probs = torch.log_softmax(self.model.head(reverse(features)), dim=-1)
        return -(log_probs.exp() * log_probs).sum(dim=-1).mean()

    def learning_rate_factor(self, name: str) -> float:
        return self.settings.head_learning_rate_ratio if name in self.head_names else 1.0
