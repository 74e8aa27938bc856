r"""Domain-adversarial training (Ganin et al., JMLR 2016): features from which no discriminator can tell the domain.

Encoder :math:`F`, classifier :math:`C` and discriminator :math:`D` play

.. math::
    \min_{F, C}\; L_{cls}(C(F(x_s)), y_s) - \lambda_p L_{dom}, \qquad \min_D\; L_{dom}, \qquad
    L_{dom} = -\tfrac12 \operatorname{E}_s \log \sigma(D(F(x_s))) - \tfrac12 \operatorname{E}_t \log(1 - \sigma(D(F(x_t))))

in one update: between :math:`F` and :math:`D` the gradient is multiplied by :math:`-\lambda_p`, so that :math:`D` itself learns
with weight 1. With :math:`p` the share of the steps that are done,

.. math:: \lambda_p = \lambda_1 \left( \frac{2}{1 + e^{-\gamma p}} - 1 \right).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.methods.base import Batch, Context, Method, Update, reverse
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class DannSettings:
    """The weight of the reversed gradient over time, and the discriminator."""

    domain_weight: float = setting(1.0, "lambda at the end: weight of the reversed gradient in the encoder", low=0.0)
    steepness: float = setting(10.0, "gamma: how soon lambda comes near its end", low=0.0)
    discriminator_layers: int = setting(1, "hidden layers of the discriminator", low=1)
    discriminator_width: int | None = setting(None, "their width; none: that of the features", low=1)
    discriminator_dropout: float = setting(0.5, "dropout behind each of them", low=0.0, high=0.99)
    discriminator_learning_rate_ratio: float = setting(10.0, "the discriminator's learning rate relative to the model's", low=0.0)


class Dann(Method):
    """Cross-entropy on the labeled texts, and a discriminator of domains that the encoder is trained against."""

    name = "dann"
    summary = "features from which an adversary cannot tell the domain"
    paper = "Ganin et al., JMLR 2016"
    Settings = DannSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"discriminator_layers": 2, "discriminator_width": 1024},
    }

    def __init__(self, model: Any, settings: DannSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        width = model.head.in_features
        parts: list[nn.Module] = []
        for _ in range(settings.discriminator_layers):
            hidden = settings.discriminator_width or model.head.in_features
            parts += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(settings.discriminator_dropout)]
            width = hidden
        self.discriminator = nn.Sequential(*parts, nn.Linear(width, 1)).to(model.device)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        self.model.train()
        self.discriminator.train()
        scores, source_features = self.model.logits_and_features(source.inputs)
        _, target_features = self.model.logits_and_features(target.inputs)
        source_loss = self.cross_entropy(scores, source.labels)

        scale = self.reversal(number)
        features = reverse(torch.cat([source_features, target_features]), scale)
        domains = self.domains(source, target)
        shares = halves(domains)
        guesses = self.discriminator(features).squeeze(1)
        domain_loss = shares @ F.binary_cross_entropy_with_logits(guesses, domains, reduction="none")

        update(source_loss + domain_loss)
        right = ((guesses > 0) == (domains > 0)).float()
        return {
            "source_loss": source_loss.detach(),
            "domain_loss": domain_loss.detach(),
            "domain_accuracy": shares @ right,
            "reversal": scale,
        }

    def reversal(self, number: int) -> float:
        """lambda_p: 0 in the first step, its largest in the last."""
        progress = number / max(self.context.steps - 1, 1)
        return self.settings.domain_weight * (2 / (1 + math.exp(-self.settings.steepness * progress)) - 1)

    def domains(self, source: Batch, target: Batch) -> Tensor:
        """1 for the source, 0 for the target, whose labeled texts stand among the source's."""
        ours = (~self.context.is_target_labeled(source.rows)).float()
        return torch.cat([ours, ours.new_zeros(len(target.rows))])

    # ------------------------------------------------------------------ for the trainer

    def modules(self) -> dict[str, nn.Module]:
        return {"discriminator": self.discriminator}

    def learning_rate_factor(self, name: str) -> float:
        return self.settings.discriminator_learning_rate_ratio if name.startswith("discriminator.") else 1.0


def halves(domains: Tensor) -> Tensor:
    """Each example's share of a mean in which every domain present counts the same."""
    ones = domains.sum()
    shares = 1 / torch.where(domains > 0, ones, len(domains) - ones)
    return shares / shares.sum()
