r"""FixMatch (Sohn et al., NeurIPS 2020), the labeled batch from the source and the unlabeled one :math:`B` from the target.

.. math::
    L = L_S + \lambda_u \frac{1}{|B|} \sum_{i \in B} \mathbb 1[\max_k p_k(\alpha(u_i)) \ge \tau]\;
        \mathrm{CE}\bigl(\arg\max_k p_k(\alpha(u_i)),\; p(\mathcal A(u_i))\bigr)

A text that the model is sure of in its weak view :math:`\alpha(u)` must get the same label in its strong view
:math:`\mathcal A(u)`. Labels and the indicator are constants; the mean is over the whole batch, so few sure texts have little
say. Back-translation, the usual strong view of texts, needs a translator; here tokens are masked, words deleted and swapped.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.methods.base import Batch, Method, Update
from mtem.models.augment import KINDS
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class FixMatchSettings:
    """The threshold, the weight and the two views."""

    threshold: float = setting(0.95, "tau: how likely a label must be in the weak view to be learned", low=0.0, high=1.0)
    weight: float = setting(1.0, "lambda_u: weight of the loss on the target texts", low=0.0)
    strong: str = setting("mixed", "the view that learns the label; mixed: a third of mask, delete and swap each", choices=KINDS)
    strength: float = setting(0.3, "share of the words (mask: of the tokens) that the strong view touches", low=0.0, high=1.0)
    weak: str = setting(
        "plain", "the view that gives the label, the text as it is: without dropout, or with it", choices=("plain", "dropout")
    )


class FixMatch(Method):
    """Self-training on the labels the model is sure of, learned from harder views of the same texts."""

    name = "fixmatch"
    summary = "confident labels of the plain target texts, learned from masked and shuffled ones"
    paper = "Sohn et al., NeurIPS 2020"
    Settings = FixMatchSettings
    # The original's weak view is random too (flips and shifts of images): of texts, dropout is the mildest random view.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"threshold": 0.95, "weight": 1.0, "weak": "dropout"},
    }

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        settings = self.settings
        plain = self.model.prepare(target.inputs)
        strong = self.model.augment(plain, settings.strong, settings.strength, self.context.generator)
        self.model.train(settings.weak == "dropout")
        with torch.no_grad():
            labels, sure = confident_labels(self.context.align(self.model(plain)), settings.threshold)

        self.model.train()
        source_loss = self.cross_entropy(self.model(source.inputs), source.labels)
        consistency_loss = masked_cross_entropy(self.model(strong), labels, sure)
        update(source_loss + settings.weight * consistency_loss)
        return {
            "source_loss": source_loss.detach(),
            "consistency_loss": consistency_loss.detach(),
            "confident_share": sure.float().mean(),
        }


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Each text's likeliest class, and whether its probability reaches the threshold; constants, [N] each."""
    probability, labels = torch.softmax(logits.detach(), dim=-1).max(dim=-1)
    return labels, probability >= threshold


def masked_cross_entropy(logits: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
    """The cross-entropy of the chosen texts, divided by the number of all."""
    return (F.cross_entropy(logits, labels, reduction="none") * chosen).mean()
