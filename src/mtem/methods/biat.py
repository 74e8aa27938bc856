r"""Bidirectional adversarial training (Jiang et al., IJCAI 2020): perturbations that carry texts across the domain gap.

Encoder :math:`F` with two heads: :math:`h`, the model's, and :math:`t`, which learns from labeled target texts :math:`L` alone.
With the labeled batch :math:`S \cup L`, its source part :math:`S` and unlabeled texts :math:`U`, all terms mean over their texts,

.. math::
    \min\; & CE(h(x), y) + \lambda_1 CE(h(x + r_{AT}), y) + \lambda_2 CE(h(x_s + r_{AAT}), y_s) + CE(t(x_l), y_l) \\
    & + \lambda_3 \left[ CE(h(u + r_{EVAT}), \hat y) + H(h(u + r_{EVAT})) \right] + \lambda_4 H(h(u)),
    \qquad \hat y = \arg\max h(u),

but :math:`h`'s own layer raises the last term (minimax entropy, Saito et al. 2019). A perturbation :math:`r` is added to the
input embeddings :math:`E` of a text (to what enters the first trainable layer, where lower ones are frozen) and has a norm of
:math:`\epsilon \lVert E \rVert`, so that :math:`\epsilon` means the same for long and short texts and for any encoder:

.. math::
    r_{AT} &\propto \nabla_E\, CE(h(x), y) && \text{where the model gets the text wrong} \\
    r_{AAT} &\propto -\nabla_E\, CE(t(x_s), y_s) && \text{from the source to where the target's own head gets it right} \\
    r_{EVAT} &\propto \nabla_r \left[ KL(h(u) \,\Vert\, h(u + r)) + H(h(u + r)) \right]_{r = r_0}
        && \text{from the target to where the prediction is another or uncertain}

:math:`r_0` has a random direction and the norm :math:`\xi \lVert E \rVert`. Perturbations are found without dropout.

Without labeled target texts there is no :math:`t`, and its two terms are left out.

The article's weights, and its exact rule for AAT, were not at hand: :math:`\lambda`, :math:`\epsilon`, :math:`\xi` and the sign
of :math:`r_{AAT}` are a reading of its description, and the `paper` preset is the same as the recommended one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.methods.base import Batch, Context, Method, Update, reverse, without_dropout
from mtem.models.base import Inputs
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class BiatSettings:
    """The weights of the terms and the size of the perturbations; none of them is the article's."""

    adversarial_weight: float = setting(1.0, "lambda 1: labeled texts, perturbed against the model", low=0.0)
    adaptive_weight: float = setting(
        1.0, "lambda 2: source texts, perturbed towards the target; only with labeled target texts", low=0.0
    )
    virtual_weight: float = setting(1.0, "lambda 3: unlabeled texts, perturbed towards other and uncertain predictions", low=0.0)
    entropy_weight: float = setting(0.1, "lambda 4: entropy that the head raises and the encoder lowers", low=0.0)
    radius: float = setting(
        0.005,
        "epsilon: norm of a perturbation, relative to that of the text's embeddings; ten times this turns most predictions of a "
        "fine-tuned encoder",
        low=0.0,
    )
    xi: float = setting(0.001, "norm of the random start of a virtual perturbation, relative likewise", low=1e-6)
    target_head_learning_rate_ratio: float = setting(
        10.0, "learning rate of the target's own head relative to the model's", low=0.0
    )


class Biat(Method):
    """Cross-entropy on texts as they are and as gradients of the own and of a target-only head perturb them."""

    name = "biat"
    summary = "adversarial perturbations from the source towards the target and back, and minimax entropy"
    paper = "Jiang et al., IJCAI 2020"
    Settings = BiatSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": {}}  # the article's constants are not known

    def __init__(self, model: Any, settings: BiatSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.target_head: nn.Module | None = None
        if context.target_labeled is not None and settings.adaptive_weight:
            self.target_head = nn.Linear(model.head.in_features, context.classes, device=model.device)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        settings = self.settings
        labeled, unlabeled = self.model.prepare(source.inputs), self.model.prepare(target.inputs)
        self.model.train()
        terms = {"source_loss": (1.0, self.cross_entropy(self.model(labeled), source.labels))}
        if settings.adversarial_weight:
            terms["adversarial_loss"] = settings.adversarial_weight, self.adversarial_loss(labeled, source.labels)
        if self.target_head is not None:
            terms["target_head_loss"] = 1.0, self.target_head_loss(self.context.target_labeled(number))
            own = ~self.context.is_target_labeled(source.rows)
            terms["adaptive_loss"] = settings.adaptive_weight, self.adaptive_loss(labeled, source.labels, own)
        if settings.virtual_weight:
            terms["virtual_loss"] = settings.virtual_weight, self.virtual_loss(unlabeled)
        if settings.entropy_weight:
            terms["entropy"] = -settings.entropy_weight, self.contested_entropy(unlabeled)
        update(sum(weight * term for weight, term in terms.values()))
        return {name: term.detach() for name, (_, term) in terms.items()}

    # ------------------------------------------------------------------ the terms

    def adversarial_loss(self, inputs: Inputs, labels: Tensor) -> Tensor:
        return self.cross_entropy(self.perturbed(inputs, self.adversarial(inputs, labels)), labels)

    def adaptive_loss(self, inputs: Inputs, labels: Tensor, own: Tensor) -> Tensor:
        """Over the source's `own` texts of the batch; 0 where there are none."""
        scores, weights = self.perturbed(inputs, self.adaptive(inputs, labels)), self.context.class_weights
        losses = F.cross_entropy(scores, labels, weight=weights, reduction="none")
        mass = own if weights is None else own * weights[labels]
        return (own * losses).sum() / mass.sum().clamp_min(torch.finfo(losses.dtype).tiny)

    def virtual_loss(self, inputs: Inputs) -> Tensor:
        log_probs = self.clean(inputs)
        scores = self.perturbed(inputs, self.virtual(inputs, log_probs))
        return F.cross_entropy(scores, self.context.align(log_probs).argmax(dim=1)) + entropies(scores).mean()

    def contested_entropy(self, inputs: Inputs) -> Tensor:
        """H, whose gradient reaches the encoder with the opposite sign; it is to be raised."""
        _, features = self.model.logits_and_features(inputs)
        return entropies(self.model.head(reverse(features))).mean()

    def target_head_loss(self, few: Batch) -> Tensor:
        _, features = self.model.logits_and_features(few.inputs)
        return self.cross_entropy(self.target_head(features), few.labels)

    # ------------------------------------------------------------------ the perturbations

    def adversarial(self, inputs: Inputs, labels: Tensor) -> Tensor:
        gradient = self.gradient(inputs, lambda scores, _: F.cross_entropy(scores, labels, reduction="sum"))
        return self.sized(inputs, gradient, self.settings.radius)

    def adaptive(self, inputs: Inputs, labels: Tensor) -> Tensor:
        def loss(_: Tensor, features: Tensor) -> Tensor:
            return F.cross_entropy(self.target_head(features), labels, reduction="sum")

        return self.sized(inputs, -self.gradient(inputs, loss), self.settings.radius)

    def virtual(self, inputs: Inputs, log_probs: Tensor) -> Tensor:
        def objective(scores: Tensor, _: Tensor) -> Tensor:
            divergences = (log_probs.exp() * (log_probs - torch.log_softmax(scores, dim=1))).sum(dim=1)
            return (divergences + entropies(scores)).sum()

        drawn = torch.randn(self.model.input_embeddings(inputs).shape, generator=self.context.generator)
        start = self.sized(inputs, drawn.to(self.model.device, non_blocking=True), self.settings.xi)
        return self.sized(inputs, self.gradient(inputs, objective, start), self.settings.radius)

    def perturbed(self, inputs: Inputs, noise: Tensor) -> Tensor:
        return self.model({**inputs, "noise": noise})

    @torch.no_grad()
    def clean(self, inputs: Inputs) -> Tensor:
        with without_dropout(self.model):
            return torch.log_softmax(self.model(inputs), dim=1)

    def gradient(self, inputs: Inputs, total: Callable[[Tensor, Tensor], Tensor], start: Tensor | None = None) -> Tensor:
        """Of a sum over texts of a function of scores and features, in what is added to the texts; at `start`, or at 0."""
        noise = torch.zeros_like(self.model.input_embeddings(inputs)) if start is None else start.detach()
        noise.requires_grad_()
        with without_dropout(self.model):
            value = total(*self.model.logits_and_features({**inputs, "noise": noise}))
        return torch.autograd.grad(value, noise)[0]

    def sized(self, inputs: Inputs, direction: Tensor, radius: float) -> Tensor:
        """Along the direction, of each text's own length."""
        values = self.model.input_embeddings(inputs)
        direction = direction * (values != 0).any(dim=-1, keepdim=True)  # padding stays what it is
        return radius * self.model.embedding_norms(values, inputs) * self.model.unit_directions(direction, inputs)

    # ------------------------------------------------------------------ for the trainer

    def modules(self) -> dict[str, nn.Module]:
        return {} if self.target_head is None else {"target_head": self.target_head}

    def learning_rate_factor(self, name: str) -> float:
        return self.settings.target_head_learning_rate_ratio if name.startswith("target_head.") else 1.0


def entropies(scores: Tensor) -> Tensor:
    """H of each row of scores."""
    log_probs = torch.log_softmax(scores, dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1)
