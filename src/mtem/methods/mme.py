r"""Minimax entropy (Saito et al., ICCV 2019): the classifier's prototypes move to the target, the features to the prototypes.

The classifier sees only the direction of the features, :math:`p(x) = \mathrm{softmax}(W F(x) / (T \lVert F(x) \rVert))`. One step
is two updates, the first on labeled texts :math:`L` (labeled target texts included), the second on unlabeled texts :math:`U`:

.. math::
    (F, W) &\leftarrow \text{descend } \operatorname{E}_L\left[-\log p_y(x)\right] \\
    W &\leftarrow \text{ascend } \lambda H, \quad F \leftarrow \text{descend } \lambda H, \qquad
    H = -\operatorname{E}_U \sum_k p_k(x) \log p_k(x)

The second is one backward pass of :math:`-\lambda H` whose gradient changes its sign between :math:`W` and :math:`F`.

The default settings are those of the paper, so both presets are empty.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mtem.methods.base import Batch, Context, Method, StepLog, Update, reverse_gradient
from mtem.models.base import Model
from mtem.models.heads import CosineHead
from mtem.settings import setting
from mtem.tsallis import gibbs_entropy


@dataclasses.dataclass(frozen=True)
class MmeSettings:
    """The temperature and learning rate of the classifier, and the weight of the entropy."""

    temperature: float = setting(0.05, "temperature of the cosine classifier (T)", low=1e-3)
    entropy_weight: float = setting(0.1, "weight of the entropy (lambda)", low=0.0)
    head_learning_rate_ratio: float = setting(10.0, "learning rate of the classifier relative to that of the encoder", low=0.0)


class Mme(Method):
    """A cosine classifier that maximises the entropy of unlabeled texts, and an encoder that minimises it."""

    name = "mme"
    summary = "a classifier that maximises the entropy of unlabeled texts, and an encoder that minimises it"
    paper = "Saito et al., ICCV 2019"
    replayable = True
    Settings = MmeSettings
    settings: MmeSettings

    def __init__(self, model: Model, settings: MmeSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.head_names = model.head_names()

    @classmethod
    def prepare_model(cls, model: Model, settings: MmeSettings) -> None:
        """Replace the head by a cosine classifier."""
        model.head = CosineHead(model.head, settings.temperature)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Update on the labeled batch, then on the unlabeled one."""
        self.model.train()
        source_loss = self.cross_entropy(self.model(source.inputs), source.require_labels())
        update(source_loss)
        entropy = self.minimax_entropy(target)
        update(-self.settings.entropy_weight * entropy)
        return {"source_loss": source_loss.detach(), "entropy": entropy.detach()}

    def minimax_entropy(self, target: Batch) -> Tensor:
        """Return H, whose gradient reaches the encoder with the opposite sign."""
        _, features = self.model.logits_and_features(target.inputs)
        return gibbs_entropy(torch.log_softmax(self.model.head(reverse_gradient(features)), dim=-1)).mean()

    def learning_rate_factor(self, name: str) -> float:
        """Return the factor of the classifier's parameters, or 1."""
        return self.settings.head_learning_rate_ratio if name in self.head_names else 1.0
