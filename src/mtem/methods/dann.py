r"""Domain-adversarial training (Ganin et al., JMLR 2016): features that do not reveal the domain to a discriminator.

Encoder :math:`F`, classifier :math:`C` and discriminator :math:`D` play

.. math::
    \min_{F, C}\; L_{cls}(C(F(x_s)), y_s) - \lambda_p L_{dom}, \qquad \min_D\; L_{dom}, \qquad
    L_{dom} = -\tfrac12 \operatorname{E}_s \log \sigma(D(F(x_s))) - \tfrac12 \operatorname{E}_t \log(1 - \sigma(D(F(x_t))))

in one update: between :math:`F` and :math:`D` the gradient is multiplied by :math:`-\lambda_p`, so that :math:`D` itself learns
with weight 1. With :math:`p` the share of the steps done so far,

.. math:: \lambda_p = \lambda_1 \left( \frac{2}{1 + e^{-\gamma p}} - 1 \right).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.capture import by_step
from mtem.methods.base import Batch, Context, Method, StepLog, Update, reverse_gradient
from mtem.models.base import Model
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class DannSettings:
    """The weight of the reversed gradient over time, and the discriminator."""

    domain_weight: float = setting(
        1.0, "weight of the reversed gradient in the encoder at the end of training (lambda_1)", low=0.0
    )
    steepness: float = setting(10.0, "how fast that weight approaches its final value (gamma)", low=0.0)
    discriminator_layers: int = setting(1, "number of hidden layers of the discriminator", low=1)
    discriminator_width: int | None = setting(None, "width of these layers; none: the width of the features", low=1)
    discriminator_dropout: float = setting(0.5, "dropout after each of these layers", low=0.0, high=0.99)
    discriminator_learning_rate_ratio: float = setting(
        10.0, "learning rate of the discriminator relative to that of the model", low=0.0
    )


class Dann(Method):
    """Cross-entropy on the labeled texts, and a domain discriminator that the encoder is trained against."""

    name = "dann"
    summary = "features that do not reveal the domain to a discriminator"
    paper = "Ganin et al., JMLR 2016"
    replayable = True
    Settings = DannSettings
    settings: DannSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"discriminator_layers": 2, "discriminator_width": 1024},
    }

    def __init__(self, model: Model, settings: DannSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        width = model.head.in_features
        parts: list[nn.Module] = []
        for _ in range(settings.discriminator_layers):
            hidden = settings.discriminator_width or model.head.in_features
            parts += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(settings.discriminator_dropout)]
            width = hidden
        self.discriminator = nn.Sequential(*parts, nn.Linear(width, 1)).to(model.device)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Take one step of encoder, classifier and discriminator."""
        self.model.train()
        self.discriminator.train()
        logits, source_features = self.model.logits_and_features(source.inputs)
        _, target_features = self.model.logits_and_features(target.inputs)
        source_loss = self.cross_entropy(logits, source.require_labels())

        scale = by_step(self.reversal_weight, number, self.model.device)
        features = reverse_gradient(torch.cat([source_features, target_features]), scale)
        domains = self.domains(source, target)
        weights = balanced_weights(domains)
        domain_logits = self.discriminator(features).squeeze(1)
        domain_loss = weights @ F.binary_cross_entropy_with_logits(domain_logits, domains, reduction="none")

        update(source_loss + domain_loss)
        correct = ((domain_logits > 0) == (domains > 0)).float()
        return {
            "source_loss": source_loss.detach(),
            "domain_loss": domain_loss.detach(),
            "domain_accuracy": weights @ correct,
            "reversal": scale,
        }

    def reversal_weight(self, number: int) -> float:
        """Return lambda_p: 0 in the first step, largest in the last."""
        progress = number / max(self.context.steps - 1, 1)
        settings = self.settings
        return settings.domain_weight * (2 / (1 + math.exp(-settings.steepness * progress)) - 1)

    def domains(self, source: Batch, target: Batch) -> Tensor:
        """Return 1 for source and 0 for target texts, the labeled target texts of the source batch included."""
        is_source = (~self.context.is_target_labeled(source.rows)).float()
        return torch.cat([is_source, is_source.new_zeros(len(target.rows))])

    # ------------------------------------------------------------------ for the trainer

    def modules(self) -> dict[str, nn.Module]:
        """Return the discriminator."""
        return {"discriminator": self.discriminator}

    def learning_rate_factor(self, name: str) -> float:
        """Return the factor of the discriminator's parameters, or 1."""
        return self.settings.discriminator_learning_rate_ratio if name.startswith("discriminator.") else 1.0


def balanced_weights(domains: Tensor) -> Tensor:
    """Return the weight of each example in a mean in which every domain of the batch has the same weight."""
    source_count = domains.sum()
    weights = 1 / torch.where(domains > 0, source_count, len(domains) - source_count)
    return weights / weights.sum()
