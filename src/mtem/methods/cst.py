r"""Cycle Self-Training (Liu, Wang, Long, NeurIPS 2021), with the losses of the authors' code.

.. math:: L = L_S + a\, L_{\text{Tsallis}} + b\, L_{\text{reverse}} + c\, L_{\text{FixMatch}}

*Forward*: the source head labels the target batch, :math:`y'_i = \arg\max_k p_{ik}`. *Reverse*: a target head is fitted to the
target features and those labels, and the features are trained so that this head works on the source (:func:`reverse_loss`). The
Tsallis term makes the predictions sharp (:func:`tsallis_term`). The last term is that of :mod:`mtem.methods.fixmatch`. One pass
over the unchanged target texts, in training mode, gives labels, confidences and features.

The loss is minimised by SAM (Foret et al., ICLR 2021): the gradient is computed where the loss is largest nearby,

.. math::
    \theta \leftarrow \theta - \eta\, \nabla L(\theta + e), \qquad
    e = \rho \frac{g}{\lVert g \rVert} \quad\text{or, adaptive (Kwon et al., ICML 2021),}\quad
    e = \rho \frac{\theta^2 \odot g}{\lVert |\theta| \odot g \rVert}, \qquad g = \nabla L(\theta),

where the labels :math:`y'` are those of the weights at which the loss is computed.

:math:`\alpha` is constant, as in the authors' code. In the paper it is chosen before every pass over the target texts: the value
whose labels give the target head with the smallest source loss. That takes one trained model per candidate value, because the
labels at fixed weights do not depend on :math:`\alpha`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem import parallel
from mtem.methods.base import Batch, Method, StepLog, Update
from mtem.methods.fixmatch import confident_labels, masked_cross_entropy
from mtem.models.base import Inputs
from mtem.settings import setting
from mtem.tsallis import gibbs_entropy

# Multiplies the loss, because half precision loses small gradients. SAM needs only the direction of the gradient.
SCALE = 2.0**10


@dataclasses.dataclass(frozen=True)
class CstSettings:
    """The weights and constants of the four losses, and of SAM."""

    tsallis_weight: float = setting(0.08, "weight of the Tsallis entropy of the target predictions (a)", low=0.0)
    alpha: float = setting(
        1.9, "entropy index of the Tsallis term (alpha); 1: Gibbs entropy, 2: Gini impurity", low=1.0, high=2.0
    )
    temperature: float = setting(2.0, "temperature that divides the logits in the Tsallis term (T)", low=0.01)
    reverse_weight: float = setting(0.5, "weight of the source loss of the target head (b)", low=0.0)
    ridge: float = setting(1e-3, "ridge regularisation of the target head (epsilon)", low=1e-6)
    consistency_weight: float = setting(0.5, "weight of the FixMatch term (c)", low=0.0)
    threshold: float = setting(0.97, "smallest probability of a label that the FixMatch term uses", low=0.0, high=1.0)
    rho: float = setting(
        0.05, "distance from the weights at which SAM computes the gradient (rho); 0: no SAM, half the time", low=0.0
    )
    adaptive: bool = setting(
        False, "measure that distance relative to the size of each weight (adaptive SAM); rho is then about 10 times larger"
    )


class Cst(Method):
    """Self-training with pseudo labels that must also train a classifier that works on the source."""

    name = "cst"
    summary = "pseudo labels that must also train a classifier good on the source; Tsallis entropy, FixMatch, SAM"
    paper = "Liu et al., NeurIPS 2021"
    learns_in_view = True
    replayable = True
    Settings = CstSettings
    settings: CstSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {
            "tsallis_weight": 0.08,
            "reverse_weight": 0.5,
            "consistency_weight": 0.5,
            "rho": 0.5,
            "adaptive": True,
            "ema_decay": 0.0,
        },
    }

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Take one step with SAM, or a plain step if rho is 0."""
        settings = self.settings
        # Both passes of SAM see the same inputs; dropout differs.
        source = source._replace(inputs=self.model.prepare(source.inputs))
        plain = self.model.prepare(target.inputs)
        strong = self.model.prepare(self.student_view(plain))
        teacher = self.teacher_logits(plain) if self.average else None
        if self.context.view_radius:
            found = self.teacher_logits(plain) if teacher is None else teacher
            strong = self.perturbed_view(strong, self.context.align(found).argmax(dim=1))

        self.model.train()
        loss, log = self.loss(source, plain, strong, teacher)
        restore = None
        if settings.rho:
            restore = climb(list(self.model.trainable().values()), loss, settings.rho, settings.adaptive)
            loss, _ = self.loss(source, plain, strong, teacher)
        update(loss, before_step=restore)
        return log

    def loss(self, source: Batch, plain: Inputs, strong: Inputs, teacher: Tensor | None = None) -> tuple[Tensor, StepLog]:
        """Return L at the current weights, and its terms; pseudo labels are made of the teacher's logits if there are any."""
        settings, source_labels = self.settings, source.require_labels()
        source_logits, source_features = self.model.logits_and_features(source.inputs)
        target_logits, target_features = self.model.logits_and_features(plain)
        labels, confident = confident_labels(
            self.context.align(target_logits.detach() if teacher is None else teacher), settings.threshold
        )
        classes = target_logits.shape[1]

        source_loss = self.cross_entropy(source_logits, source_labels)
        tsallis_loss = tsallis_term(target_logits, settings.temperature, settings.alpha)
        reverse = reverse_loss(source_features, source_labels, target_features, labels, classes, settings.ridge)
        consistency_loss = masked_cross_entropy(self.model(strong), labels, confident)
        loss = source_loss + settings.tsallis_weight * tsallis_loss + settings.reverse_weight * reverse
        loss = loss + settings.consistency_weight * consistency_loss
        return loss, {
            "source_loss": source_loss.detach(),
            "tsallis_loss": tsallis_loss.detach(),
            "reverse_loss": reverse.detach(),
            "consistency_loss": consistency_loss.detach(),
            "confident_share": confident.float().mean(),
        }


def tsallis_term(logits: Tensor, temperature: float, alpha: float) -> Tensor:
    r"""Compute the Tsallis entropy of a batch of predictions, with equal weight of the classes and more of confident texts.

    With :math:`p = \mathrm{softmax}(z / T)`, constants :math:`w_i = B (1 + e^{-H(p_i)}) / \sum_j (1 + e^{-H(p_j)})` and
    :math:`m_k = \sum_i w_i p_{ik}`,

    .. math::
        \frac{1}{\alpha - 1} \sum_i \Bigl[\frac{1}{\mathrm{mean}_k\, m_k} - \sum_k \frac{w_i p_{ik}^\alpha}{m_k}\Bigr]
        = \sum_k \sum_i r_{ik}\, \frac{1 - p_{ik}^{\alpha - 1}}{\alpha - 1}, \qquad r_{ik} = \frac{w_i p_{ik}}{m_k}.

    The left-hand side is the authors'; the right-hand side is computed, since it is exact as :math:`\alpha \to 1` and as
    :math:`m_k \to 0`. The shares :math:`r_{ik}` sum to 1 over the batch (a softmax over the texts, in which the norm of
    :math:`w` cancels): the term grows with the number of classes, at most :math:`K`, and not with the batch.

    Parameters
    ----------
    logits : Tensor
        :math:`z`, ``[N, K]``.
    temperature : float
        :math:`T`.
    alpha : float
        The entropy index :math:`\alpha`.

    Returns
    -------
    Tensor
        The term, a scalar.
    """
    log_probs = torch.log_softmax(logits / temperature, dim=1)
    with torch.no_grad():
        weights = 1 + torch.exp(-gibbs_entropy(log_probs).unsqueeze(1))
    shares = torch.softmax(weights.log() + log_probs, dim=0)
    excess = alpha - 1
    surprisals = -torch.expm1(excess * log_probs) / excess if excess else -log_probs
    return (shares * surprisals).sum()


def reverse_loss(
    source_features: Tensor, source_labels: Tensor, target_features: Tensor, pseudo_labels: Tensor, classes: int, ridge: float
) -> Tensor:
    r"""Compute the source loss of a head that is fitted to the pseudo labels of the target.

    The head is ridge regression in closed form, on features :math:`F_t, F_s` with rows of length 1:

    .. math::
        \hat Y_s = F_s F_t^\top (F_t F_t^\top + \epsilon I)^{-1} \bigl(\mathrm{onehot}(y') - \tfrac 1 K\bigr), \qquad
        L_{\text{reverse}} = \mathrm{mean}\bigl(\hat Y_s - \mathrm{onehot}(y_s) + \tfrac 1 K\bigr)^2

    The gradient passes through both kernels and the inverse; :math:`y'` is constant.

    Parameters
    ----------
    source_features, target_features : Tensor
        The features before normalisation, ``[N, D]`` each.
    source_labels, pseudo_labels : Tensor
        :math:`y_s` and :math:`y'`, integers ``[N]`` each.
    classes : int
        :math:`K`.
    ridge : float
        :math:`\epsilon`.

    Returns
    -------
    Tensor
        The loss, a scalar.
    """
    target, source = _directions(target_features), _directions(source_features)
    kernel = target @ target.T + ridge * torch.eye(len(target), dtype=target.dtype, device=target.device)
    head = torch.linalg.solve_ex(kernel, _centred(pseudo_labels, classes, target))[0]  # solvable because of the ridge
    return F.mse_loss(source @ target.T @ head, _centred(source_labels, classes, source))


def climb(parameters: list[torch.nn.Parameter], loss: Tensor, rho: float, adaptive: bool) -> Callable[[], None]:
    """Move the parameters to theta + e, where SAM computes the gradient.

    Parameters
    ----------
    parameters : list of nn.Parameter
        The parameters, changed in place.
    loss : Tensor
        The loss at theta, with its graph.
    rho : float
        The distance.
    adaptive : bool
        Whether the distance is relative to the size of each weight.

    Returns
    -------
    callable
        Moves the parameters back.
    """
    all_gradients: Sequence[Tensor | None] = torch.autograd.grad(SCALE * loss, parameters, allow_unused=True)
    moved = [parameter for parameter, gradient in zip(parameters, all_gradients, strict=True) if gradient is not None]
    gradients = [gradient for gradient in all_gradients if gradient is not None]
    parallel.average_(gradients)
    originals = [parameter.detach().clone() for parameter in moved]
    if adaptive:
        gradients = [value.abs() * gradient for value, gradient in zip(originals, gradients, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    usable = norm.isfinite() & (norm > 0)  # half precision may overflow: then the parameters stay at theta
    with torch.no_grad():
        for parameter, value, gradient in zip(moved, originals, gradients, strict=True):
            direction = value.abs() * gradient if adaptive else gradient
            parameter.add_(torch.where(usable, rho * direction / norm, 0.0))

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(moved, originals, strict=True):
            parameter.copy_(value)

    return restore


def _directions(features: Tensor) -> Tensor:
    """Return the rows divided by their norms; a row of zeros stays zero and has a finite gradient."""
    norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(norms > 0, norms, 1.0)


def _centred(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    return F.one_hot(labels, classes).to(like.dtype) - 1 / classes
