r"""Cycle Self-Training (Liu, Wang, Long, NeurIPS 2021), with the losses of the authors' code.

.. math:: L = L_S + a\, L_{\text{Tsallis}} + b\, L_{\text{reverse}} + c\, L_{\text{FixMatch}}

*Forward*: the source head labels the target batch, :math:`y'_i = \arg\max_k p_{ik}`. *Reverse*: a target head is fitted to the
target features and those labels, and the features are moved so that it serves the source (:func:`reverse_loss`). The Tsallis
term makes the labels sharp (:func:`tsallis_term`), the last one is that of :mod:`mtem.methods.fixmatch`. One pass over the
plain target texts, in training mode, gives labels, confidences and features.

The loss is minimised by SAM (Foret et al., ICLR 2021): the gradient is taken where the loss is worst nearby,

.. math::
    \theta \leftarrow \theta - \eta\, \nabla L(\theta + e), \qquad
    e = \rho \frac{g}{\lVert g \rVert} \quad\text{or, adaptive (Kwon et al., ICML 2021),}\quad
    e = \rho \frac{\theta^2 \odot g}{\lVert |\theta| \odot g \rVert}, \qquad g = \nabla L(\theta),

the labels :math:`y'` being those of the weights the loss is taken at.

:math:`\alpha` is constant, as in the authors' code. The paper would choose it before every pass over the target texts as the
one whose labels fit the target head with the smallest source loss; that takes one trained model per candidate, for the labels
at fixed weights do not depend on :math:`\alpha`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.methods.base import Batch, Method, Update
from mtem.methods.fixmatch import confident_labels, masked_cross_entropy
from mtem.models.augment import KINDS
from mtem.models.base import Inputs
from mtem.settings import setting

# Half precision loses small gradients; a power of two changes nothing else, and SAM needs the direction alone.
SCALE = 2.0**10


@dataclasses.dataclass(frozen=True)
class CstSettings:
    """The weights and constants of the four losses, and of SAM."""

    tsallis_weight: float = setting(0.08, "a: weight of the Tsallis entropy of the target predictions", low=0.0)
    alpha: float = setting(1.9, "entropy index of the Tsallis term; 1: Gibbs, 2: Gini", low=1.0, high=2.0)
    temperature: float = setting(2.0, "T: divides the scores in the Tsallis term", low=0.01)
    reverse_weight: float = setting(0.5, "b: weight of the source loss of the target head", low=0.0)
    ridge: float = setting(1e-3, "regularisation of the target head", low=1e-6)
    consistency_weight: float = setting(0.5, "c: weight of the FixMatch term", low=0.0)
    threshold: float = setting(0.97, "how likely a label must be for the FixMatch term", low=0.0, high=1.0)
    strong: str = setting("mixed", "the FixMatch term's view; mixed: a third of mask, delete and swap each", choices=KINDS)
    strength: float = setting(0.3, "share of the words (mask: of the tokens) that this view touches", low=0.0, high=1.0)
    rho: float = setting(0.05, "SAM: how far from theta the gradient is taken; 0: at theta, in half the time", low=0.0)
    adaptive: bool = setting(False, "SAM: measure that distance relative to the size of each weight (rho about 10 times larger)")


class Cst(Method):
    """Self-training whose pseudo labels must also train a classifier that works on the source."""

    name = "cst"
    summary = "pseudo labels that must train a classifier good on the source too; Tsallis entropy, FixMatch, SAM"
    paper = "Liu et al., NeurIPS 2021"
    Settings = CstSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"tsallis_weight": 0.08, "reverse_weight": 0.5, "consistency_weight": 0.5, "rho": 0.5, "adaptive": True},
    }

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        settings = self.settings
        # Both passes of SAM see the same inputs; dropout differs.
        source = source._replace(inputs=self.model.prepare(source.inputs))
        plain = self.model.prepare(target.inputs)
        strong = self.model.augment(plain, settings.strong, settings.strength, self.context.generator)
        strong = self.model.prepare(strong)

        self.model.train()
        loss, log = self.loss(source, plain, strong)
        restore = None
        if settings.rho:
            restore = climb(list(self.model.trainable().values()), loss, settings.rho, settings.adaptive)
            loss, _ = self.loss(source, plain, strong)
        update(loss, before_step=restore)
        return log

    def loss(self, source: Batch, plain: Inputs, strong: Inputs) -> tuple[Tensor, dict[str, Tensor | float]]:
        """L at the current weights, and its terms."""
        settings = self.settings
        source_logits, source_features = self.model.logits_and_features(source.inputs)
        target_logits, target_features = self.model.logits_and_features(plain)
        labels, sure = confident_labels(self.context.align(target_logits.detach()), settings.threshold)
        classes = target_logits.shape[1]

        source_loss = self.cross_entropy(source_logits, source.labels)
        tsallis_loss = tsallis_term(target_logits, settings.temperature, settings.alpha)
        reverse = reverse_loss(source_features, source.labels, target_features, labels, classes, settings.ridge)
        consistency_loss = masked_cross_entropy(self.model(strong), labels, sure)
        loss = source_loss + settings.tsallis_weight * tsallis_loss + settings.reverse_weight * reverse
        loss = loss + settings.consistency_weight * consistency_loss
        return loss, {
            "source_loss": source_loss.detach(),
            "tsallis_loss": tsallis_loss.detach(),
            "reverse_loss": reverse.detach(),
            "consistency_loss": consistency_loss.detach(),
            "confident_share": sure.float().mean(),
        }


def tsallis_term(logits: Tensor, temperature: float, alpha: float) -> Tensor:
    r"""The Tsallis entropy of a batch of predictions, each class given the same say and sure texts more of it.

    With :math:`p = \mathrm{softmax}(z / T)`, constants :math:`w_i = B (1 + e^{-H(p_i)}) / \sum_j (1 + e^{-H(p_j)})` and
    :math:`m_k = \sum_i w_i p_{ik}`,

    .. math::
        \frac{1}{\alpha - 1} \sum_i \Bigl[\frac{1}{\mathrm{mean}_k\, m_k} - \sum_k \frac{w_i p_{ik}^\alpha}{m_k}\Bigr]
        = \sum_k \sum_i r_{ik}\, \frac{1 - p_{ik}^{\alpha - 1}}{\alpha - 1}, \qquad r_{ik} = \frac{w_i p_{ik}}{m_k}.

    The left-hand side is the authors'; the right-hand side is computed, since it is exact as :math:`\alpha \to 1` and as
    :math:`m_k \to 0`. The shares :math:`r_{ik}` sum to 1 over the batch (a softmax over the texts, in which the norm of
    :math:`w` cancels): the term grows with the number of classes, at most :math:`K`, and not with the batch.
    """
    log_probs = torch.log_softmax(logits / temperature, dim=1)
    with torch.no_grad():
        entropies = -(log_probs.exp() * log_probs).sum(dim=1, keepdim=True)
        weights = 1 + torch.exp(-entropies)
    shares = torch.softmax(weights.log() + log_probs, dim=0)
    excess = alpha - 1
    surprise = -torch.expm1(excess * log_probs) / excess if excess else -log_probs
    return (shares * surprise).sum()


def reverse_loss(
    source_features: Tensor, source_labels: Tensor, target_features: Tensor, pseudo: Tensor, classes: int, ridge: float
) -> Tensor:
    r"""How badly a head fitted to the target's pseudo labels serves the source.

    The head is ridge regression in closed form, on features :math:`F_t, F_s` with rows of length 1:

    .. math::
        \hat Y_s = F_s F_t^\top (F_t F_t^\top + \epsilon I)^{-1} \bigl(\mathrm{onehot}(y') - \tfrac 1 K\bigr), \qquad
        L_{\text{reverse}} = \mathrm{mean}\bigl(\hat Y_s - \mathrm{onehot}(y_s) + \tfrac 1 K\bigr)^2

    The gradient passes through both kernels and the inverse; :math:`y'` is constant.
    """
    target, source = _directions(target_features), _directions(source_features)
    kernel = target @ target.T + ridge * torch.eye(len(target), dtype=target.dtype, device=target.device)
    head = torch.linalg.solve_ex(kernel, _centred(pseudo, classes, target))[0]  # the ridge makes it solvable: nothing to check
    return F.mse_loss(source @ target.T @ head, _centred(source_labels, classes, source))


def climb(parameters: list[torch.nn.Parameter], loss: Tensor, rho: float, adaptive: bool) -> Callable[[], None]:
    """Move the parameters to theta + e; returns what moves them back."""
    found = torch.autograd.grad(SCALE * loss, parameters, allow_unused=True)
    moved = [parameter for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None]
    gradients = [gradient for gradient in found if gradient is not None]
    kept = [parameter.detach().clone() for parameter in moved]
    if adaptive:
        gradients = [value.abs() * gradient for value, gradient in zip(kept, gradients, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    usable = norm.isfinite() & (norm > 0)  # half precision may overflow: then stay
    with torch.no_grad():
        for parameter, value, gradient in zip(moved, kept, gradients, strict=True):
            direction = value.abs() * gradient if adaptive else gradient
            parameter += torch.where(usable, rho * direction / norm, 0.0)

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(moved, kept, strict=True):
            parameter.copy_(value)

    return restore


def _directions(features: Tensor) -> Tensor:
    """The rows divided by their lengths; a row of zeros stays one and has a finite gradient."""
    norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(norms > 0, norms, 1.0)


def _centred(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    return F.one_hot(labels, classes).to(like.dtype) - 1 / classes
