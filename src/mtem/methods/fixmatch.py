r"""FixMatch (Sohn et al., NeurIPS 2020), the labeled batch from the source and the unlabeled one :math:`B` from the target.

.. math::
    L = L_S + \lambda_u \frac{1}{|B|} \sum_{i \in B} \mathbb 1[\max_k p_k(\alpha(u_i)) \ge \tau]\;
        \mathrm{CE}\bigl(\arg\max_k p_k(\alpha(u_i)),\; p(\mathcal A(u_i))\bigr)

A text that the model labels with confidence in its weak view :math:`\alpha(u)` must get the same label in its strong view
:math:`\mathcal A(u)`. Labels and the indicator are constants. The mean is over the whole batch, so few confident texts have a
small weight. Back-translation, the usual strong view of texts, needs a translation model; here tokens are masked, and words
deleted and swapped.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.methods.base import Batch, Method, StepLog, Update
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class FixMatchSettings:
    """The threshold, the weight and the weak view; the strong view is the run's."""

    threshold: float = setting(
        0.95, "smallest probability of a label in the weak view that is learned from (tau)", low=0.0, high=1.0
    )
    weight: float = setting(1.0, "weight of the loss on the target texts (lambda_u)", low=0.0)
    weak: str = setting(
        "plain",
        "weak view, which gives the label: the unchanged text without dropout (plain), or with dropout by the weights themselves "
        "(then the run's average of the weights gives no labels)",
        choices=("plain", "dropout"),
    )


class FixMatch(Method):
    """Self-training on confident labels, learned from harder views of the same texts."""

    name = "fixmatch"
    summary = "confident labels of the plain target texts, learned from masked and shuffled ones"
    paper = "Sohn et al., NeurIPS 2020"
    learns_in_view = True
    replayable = True
    Settings = FixMatchSettings
    settings: FixMatchSettings
    # The weak view of the original is random too (flips and shifts of images); for texts, dropout is the mildest random view.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"threshold": 0.95, "weight": 1.0, "weak": "dropout", "ema_decay": 0.0},
    }

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the weak views, then take one step on the labeled texts and the strong views."""
        settings = self.settings
        plain = self.model.prepare(target.inputs)
        strong = self.model.prepare(self.student_view(plain))
        if settings.weak == "dropout":
            self.model.train()
            with torch.no_grad():
                weak_logits = self.model(plain)
        else:
            weak_logits = self.teacher_logits(plain)
        labels, confident = confident_labels(self.context.align(weak_logits), settings.threshold)

        strong = self.perturbed_view(strong, labels)
        self.model.train()
        source_loss = self.cross_entropy(self.model(source.inputs), source.require_labels())
        consistency_loss = masked_cross_entropy(self.model(strong), labels, confident)
        update(source_loss + settings.weight * consistency_loss)
        return {
            "source_loss": source_loss.detach(),
            "consistency_loss": consistency_loss.detach(),
            "confident_share": confident.float().mean(),
        }


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the most probable class of each text, and whether its probability reaches the threshold.

    Parameters
    ----------
    logits : Tensor
        ``[N, K]``.
    threshold : float
        The smallest probability of a confident label.

    Returns
    -------
    tuple of Tensor
        The classes and the indicator, ``[N]`` each, without gradient.
    """
    probability, labels = torch.softmax(logits.detach(), dim=-1).max(dim=-1)
    return labels, probability >= threshold


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the texts of the mask, divided by the number of all texts."""
    return (F.cross_entropy(logits, labels, reduction="none") * mask).mean()
