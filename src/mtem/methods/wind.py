r"""WIND: weighting instances differentially for model-agnostic domain adaptation (Chen, Cao, Wan, Findings of ACL 2021).

Each labeled text :math:`x_i` of the source has a learned number :math:`w_i` and with it the weight :math:`u_i = \sigma(w_i)`;
the labeled texts of the target have :math:`u_i = 1`. One step, on a labeled batch and a batch :math:`V` of labeled target texts:

.. math::
    L(\theta, w) &= \frac{\sum_i \sigma(w_i)\, \ell_i(\theta)}{\sum_i \sigma(w_i)} \\
    \hat\theta(w) &= \theta - \eta\, \nabla_\theta L(\theta, w), \qquad v = \nabla L_V(\hat\theta) \\
    w &\leftarrow w + \alpha\; v \cdot \nabla_\theta \frac{\partial L}{\partial w}
        && \text{that is } w - \tfrac{\alpha}{\eta} \nabla_w L_V(\hat\theta(w)) \\
    \theta &\leftarrow \theta - \eta\, \nabla_\theta L(\theta, w) && \text{with the new } w

The weight of a text rises if its gradient points in the direction of the target's gradient, and falls if it points elsewhere.

The authors' code takes the virtual step with Adam and the finite difference around :math:`\hat\theta`. The formula, and this
implementation, take a plain step and the derivative at :math:`\theta`. Unlabeled target texts are ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem import metagrad, parallel
from mtem.capture import from_host
from mtem.methods.base import Batch, Context, Method, StepLog, Update, functional, without_dropout
from mtem.models.base import Model
from mtem.settings import setting

TINY_RATE = 1e-12
IN_DOMAIN = 1e8  # w of labeled target texts, as in the authors' code: the weight is exactly 1 and its derivative exactly 0


@dataclasses.dataclass(frozen=True)
class WindSettings:
    """The constants of the two loops."""

    engine: str = setting(
        "forward",
        "how the gradient of the weights is computed: forward (exact), taylor (as published), second-order (exact, slowest)",
        choices=("forward", "taylor", "second-order"),
    )
    weight_learning_rate: float = setting(
        1.0, "how far w of a text moves per visit (alpha); the weight of the text is sigmoid(w)", low=0.0
    )
    weight_step: str = setting(
        "rms",
        "what alpha multiplies: the raw gradient g (as published; one visit then moves w by about 0.01), g divided by its norm "
        "or its root mean square over the batch, or its sign",
        choices=("raw", "norm", "rms", "sign"),
    )
    inner_steps: int = setting(1, "number of updates of the weights of a batch before the model is updated", low=1)
    taylor_step: float = setting(0.01, "step of the finite difference of the taylor engine, relative to the norm of v", low=1e-6)
    virtual_learning_rate: float | None = setting(
        None, "learning rate of the virtual step (eta); none: the current learning rate", low=0.0
    )


class Wind(Method):
    """The weighted mean loss over the labeled texts, with weights learned to reduce the loss on labeled target texts."""

    name = "wind"
    summary = "a weight for every source text, learned against labeled target texts (needs --target-labeled)"
    paper = "Chen, Cao and Wan, Findings of ACL 2021"
    needs_target_labels = True
    replayable = True
    Settings = WindSettings
    settings: WindSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": {},
        "paper": {"engine": "taylor", "weight_learning_rate": 0.15, "weight_step": "raw", "ema_decay": 0.0},
    }

    def __init__(self, model: Model, settings: WindSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.w = parallel.new_rows(context.source_size, 0.0, torch.zeros((), device=model.device))
        assert context.target_labeled_rows is not None  # because of needs_target_labels
        self.w[context.target_labeled_rows] = torch.full(context.target_labeled_rows.shape, IN_DOMAIN, device=model.device)
        self.inner_loss = weighted_mean(context.class_weights)

    def step(self, number: int, source: Batch, target: Batch | None, update: Update) -> StepLog:
        """Update the weights of the batch, then the model."""
        assert self.context.target_labeled is not None  # because of needs_target_labels
        inputs = self.model.prepare(source.inputs)
        target_labeled = self.context.target_labeled(number)
        target_labeled = target_labeled._replace(inputs=self.model.prepare(target_labeled.inputs))
        for _ in range(self.settings.inner_steps):
            gradient, meta_loss = self.weight_gradient(source._replace(inputs=inputs), target_labeled)
            w = self.w[source.rows]
            self.w[source.rows] = w + self.settings.weight_learning_rate * self.scaled(gradient, w)

        self.model.train()
        log_probs = torch.log_softmax(self.model(inputs), dim=1)
        w = self.w[source.rows]
        loss = self.inner_loss.value(log_probs, source.require_labels(), w)
        update(loss)
        return {
            "source_loss": loss.detach(),
            "meta_loss": meta_loss,
            "sample_weight": torch.sigmoid(w).mean(),
        }

    def weight_gradient(self, source: Batch, target_labeled: Batch) -> tuple[Tensor, Tensor]:
        r"""Compute how the weights should change.

        Parameters
        ----------
        source : Batch
            Labeled texts.
        target_labeled : Batch
            :math:`V`, labeled target texts.

        Returns
        -------
        tuple of Tensor
            :math:`v \cdot \nabla_\theta\, \partial L / \partial w` of each text, and the loss on :math:`V` that v is the
            gradient of.
        """
        settings, target_labels = self.settings, target_labeled.require_labels()
        # A step of length 0 ends at theta, as a tiny one does.
        rate = from_host(lambda: max(self.virtual_learning_rate(), TINY_RATE), self.model.device)
        with without_dropout(self.model):
            meta = metagrad.meta_gradient(
                lambda parameters, inputs: functional(self.model, parameters, inputs),
                self.model.trainable(),
                source.inputs,
                source.require_labels(),
                self.w[source.rows],
                lambda parameters: self.cross_entropy(functional(self.model, parameters, target_labeled.inputs), target_labels),
                rate,
                engine=settings.engine,
                differentiable_attention=self.model.differentiable_attention,
                step=settings.taylor_step,
                inner_loss=self.inner_loss,
                rewind=False,
                split=self.model.parts,
            )
        return -meta.gradient / rate, meta.source_loss

    def virtual_learning_rate(self) -> float:
        """Return the learning rate of the virtual step."""
        rate = self.settings.virtual_learning_rate
        return self.context.learning_rate() if rate is None else rate

    def scaled(self, gradient: Tensor, w: Tensor) -> Tensor:
        """Return what alpha multiplies. Labeled target texts, whose gradient is 0, do not count in the mean."""
        rule = self.settings.weight_step
        if rule == "raw":
            return gradient
        if rule == "sign":
            return gradient.sign()
        scale: Tensor = gradient.norm()
        if rule == "rms":
            scale = scale / (w < IN_DOMAIN).sum().clamp_min(1).sqrt()
        return gradient / scale.clamp_min(torch.finfo(gradient.dtype).tiny)

    def sample_weights(self) -> Tensor:
        """Return u of every labeled text, in the order of the labeled rows."""
        return torch.sigmoid(parallel.whole_rows(self.w))

    def state(self) -> dict[str, Tensor]:
        """Return w and the averaged weights."""
        return {"w": parallel.whole_rows(self.w), **super().state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore w and the averaged weights."""
        super().load_state(state)
        self.w.copy_(state["w"])


def weighted_mean(class_weights: Tensor | None = None) -> metagrad.InnerLoss:
    r"""Return L as a function of w; class weights :math:`c`, if any, enter the mean as in the cross-entropy.

    .. math::
        L = \sum_i s_i \ell_i, \quad s_i = \frac{u_i c_{y_i}}{\sum_j u_j c_{y_j}}, \quad
        \frac{\partial L}{\partial w_i} = s_i (1 - u_i)(\ell_i - L).

    The derivative is linear in :math:`\ell = -\log p_y`, so its directional derivative is the same function of those of
    :math:`\ell`.
    """

    def shares(labels: Tensor, w: Tensor) -> Tensor:
        log_u = F.logsigmoid(w)  # not u itself, which may round to 0 for every text of a batch
        return torch.softmax(log_u if class_weights is None else log_u + class_weights[labels].log(), dim=0)

    def losses(log_probs: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(log_probs, labels, reduction="none")

    def derivative(losses: Tensor, labels: Tensor, w: Tensor) -> Tensor:
        share = shares(labels, w)
        return share * torch.sigmoid(-w) * (losses - (share * losses).sum())

    return metagrad.InnerLoss(
        value=lambda log_probs, labels, w: (shares(labels, w) * losses(log_probs, labels)).sum(),
        weights=lambda log_probs, labels, w: shares(labels, w),
        derivative=lambda log_probs, labels, w: derivative(losses(log_probs, labels), labels, w),
        mixed_derivative=lambda log_probs, directional, labels, w: derivative(-directional, labels, w),
    )
