r"""Bidirectional adversarial training (Jiang et al., IJCAI 2020): perturbations that move texts across the domain gap.

Encoder :math:`F` with two heads: :math:`h`, the model's, and :math:`t`, which learns from labeled target texts :math:`L` alone.
With the labeled batch :math:`S \cup L`, its source part :math:`S` and unlabeled texts :math:`U`, where every term is a mean over
its texts,

.. math::
    \min\; & CE(h(x), y) + \lambda_1 CE(h(x + r_{AT}), y) + \lambda_2 CE(h(x_s + r_{AAT}), y_s) + CE(t(x_l), y_l) \\
    & + \lambda_3 \left[ CE(h(u + r_{EVAT}), \hat y) + H(h(u + r_{EVAT})) \right] + \lambda_4 H(h(u)),
    \qquad \hat y = \arg\max h(u),

but the layer :math:`h` itself maximises the last term (minimax entropy, Saito et al. 2019). A perturbation :math:`r` is added to
the input embeddings :math:`E` of a text (to the input of the first trainable layer, where lower ones are frozen) and has the norm
:math:`\epsilon \lVert E \rVert`, so that :math:`\epsilon` means the same for long and short texts and for any encoder:

.. math::
    r_{AT} &\propto \nabla_E\, CE(h(x), y) && \text{towards a wrong prediction of the model} \\
    r_{AAT} &\propto -\nabla_E\, CE(t(x_s), y_s) && \text{from the source towards a right prediction of the target head} \\
    r_{EVAT} &\propto \nabla_r \left[ KL(h(u) \,\Vert\, h(u + r)) + H(h(u + r)) \right]_{r = r_0}
        && \text{from the target towards a different or uncertain prediction}

:math:`r_0` has a random direction and the norm :math:`\xi \lVert E \rVert`. Perturbations are computed without dropout.

Without labeled target texts there is no :math:`t`, and its two terms are left out.

The article's weights and its exact rule for AAT were not available: :math:`\lambda`, :math:`\epsilon`, :math:`\xi` and the sign
of :math:`r_{AAT}` are an interpretation of its description, and the `paper` preset is the same as the recommended one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.methods.base import Batch, Context, Method, StepLog, Update, reverse_gradient, without_dropout
from mtem.models.base import Inputs, Model, Noise
from mtem.settings import setting
from mtem.tsallis import gibbs_entropy


@dataclasses.dataclass(frozen=True)
class BiatSettings:
    """The weights of the terms and the size of the perturbations; none of the values is the article's."""

    adversarial_weight: float = setting(1.0, "weight of the loss on adversarially perturbed labeled texts (lambda_1)", low=0.0)
    adaptive_weight: float = setting(
        1.0,
        "weight of the loss on source texts perturbed towards the target (lambda_2); used only with labeled target texts",
        low=0.0,
    )
    virtual_weight: float = setting(
        1.0, "weight of the loss on unlabeled texts perturbed towards different or uncertain predictions (lambda_3)", low=0.0
    )
    entropy_weight: float = setting(
        0.1, "weight of the entropy that the head maximises and the encoder minimises (lambda_4)", low=0.0
    )
    radius: float = setting(
        0.005,
        "norm of a perturbation relative to the norm of the text's embeddings (epsilon); ten times the default changes most "
        "predictions of a fine-tuned encoder",
        low=0.0,
    )
    xi: float = setting(
        0.001, "norm of the random start of a virtual perturbation, relative to the norm of the text's embeddings", low=1e-6
    )
    target_head_learning_rate_ratio: float = setting(
        10.0, "learning rate of the target head relative to that of the model", low=0.0
    )


class Biat(Method):
    """Cross-entropy on texts and on texts perturbed along gradients of the model's head and of a target-only head."""

    name = "biat"
    summary = "adversarial perturbations from the source towards the target and back, and minimax entropy"
    paper = "Jiang et al., IJCAI 2020"
    replayable = True
    Settings = BiatSettings
    settings: BiatSettings

    def __init__(self, model: Model, settings: BiatSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.target_head: nn.Module | None = None
        if context.target_labeled is not None and settings.adaptive_weight:
            self.target_head = nn.Linear(model.head.in_features, context.classes, device=model.device)

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Take one step on the weighted sum of all terms."""
        settings, labels = self.settings, source.require_labels()
        labeled, unlabeled = self.model.prepare(source.inputs), self.model.prepare(target.inputs)
        self.model.train()
        terms = {"source_loss": (1.0, self.cross_entropy(self.model(labeled), labels))}
        if settings.adversarial_weight:
            terms["adversarial_loss"] = settings.adversarial_weight, self.adversarial_loss(labeled, labels)
        if self.target_head is not None and self.context.target_labeled is not None:
            terms["target_head_loss"] = 1.0, self.target_head_loss(self.context.target_labeled(number))
            is_source = ~self.context.is_target_labeled(source.rows)
            terms["adaptive_loss"] = settings.adaptive_weight, self.adaptive_loss(labeled, labels, is_source)
        if settings.virtual_weight:
            terms["virtual_loss"] = settings.virtual_weight, self.virtual_loss(unlabeled)
        if settings.entropy_weight:
            terms["entropy"] = -settings.entropy_weight, self.minimax_entropy(unlabeled)
        update(torch.as_tensor(sum(weight * term for weight, term in terms.values())))
        return {name: term.detach() for name, (_, term) in terms.items()}

    # ------------------------------------------------------------------ the terms

    def adversarial_loss(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """Return the cross-entropy of adversarially perturbed labeled texts."""
        return self.cross_entropy(self.perturbed_logits(inputs, self.adversarial(inputs, labels)), labels)

    def adaptive_loss(self, inputs: Inputs, labels: Tensor, is_source: Tensor) -> Tensor:
        """Return the cross-entropy of the source texts of the batch, perturbed towards the target; 0 if there are none."""
        logits, weights = self.perturbed_logits(inputs, self.adaptive(inputs, labels, is_source)), self.context.class_weights
        losses = F.cross_entropy(logits, labels, weight=weights, reduction="none")
        mass = is_source if weights is None else is_source * weights[labels]
        return (is_source * losses).sum() / mass.sum().clamp_min(torch.finfo(losses.dtype).tiny)

    def virtual_loss(self, inputs: Inputs) -> Tensor:
        """Return cross-entropy, for the labels of the clean texts, and entropy of perturbed unlabeled texts."""
        log_probs = self.clean_log_probs(inputs)
        logits = self.perturbed_logits(inputs, self.virtual(inputs, log_probs))
        labels = self.context.align(self.teacher_logits(inputs) if self.average else log_probs).argmax(dim=1)
        return F.cross_entropy(logits, labels) + gibbs_entropy(torch.log_softmax(logits, dim=1)).mean()

    def minimax_entropy(self, inputs: Inputs) -> Tensor:
        """Return H, which is to be maximised; its gradient reaches the encoder with the opposite sign."""
        _, features = self.model.logits_and_features(inputs)
        return gibbs_entropy(torch.log_softmax(self.model.head(reverse_gradient(features)), dim=1)).mean()

    def target_head_loss(self, target_labeled: Batch) -> Tensor:
        """Return the cross-entropy of the target head on labeled target texts."""
        _, features = self.model.logits_and_features(target_labeled.inputs)
        return self.cross_entropy(self._target_logits(features), target_labeled.require_labels())

    # ------------------------------------------------------------------ the perturbations

    def adversarial(self, inputs: Inputs, labels: Tensor) -> Noise:
        """Return r_AT."""
        gradient = self.noise_gradient(inputs, lambda logits, _: F.cross_entropy(logits, labels, reduction="sum"))
        return self.rescaled(inputs, gradient, self.settings.radius)

    def adaptive(self, inputs: Inputs, labels: Tensor, is_source: Tensor | None = None) -> Noise:
        """Return r_AAT; zero for texts that are not of the source."""

        def loss(_: Tensor, features: Tensor) -> Tensor:
            losses = F.cross_entropy(self._target_logits(features), labels, reduction="none")
            return losses.sum() if is_source is None else (is_source * losses).sum()

        return self.rescaled(inputs, self.noise_gradient(inputs, loss), -self.settings.radius)

    def virtual(self, inputs: Inputs, log_probs: Tensor) -> Noise:
        """Return r_EVAT, from the log-probabilities of the clean texts."""

        def objective(logits: Tensor, _: Tensor) -> Tensor:
            divergences = (log_probs.exp() * (log_probs - torch.log_softmax(logits, dim=1))).sum(dim=1)
            return (divergences + gibbs_entropy(torch.log_softmax(logits, dim=1))).sum()

        start = self.rescaled(inputs, self.model.random_noise(inputs, self.context.generator), self.settings.xi)
        return self.rescaled(inputs, self.noise_gradient(inputs, objective, start), self.settings.radius)

    def perturbed_logits(self, inputs: Inputs, noise: Noise) -> Tensor:
        """Return the logits of texts with noise added to their embeddings."""
        return self.model(self.model.with_noise(inputs, noise))

    @torch.no_grad()
    def clean_log_probs(self, inputs: Inputs) -> Tensor:
        """Return the log-probabilities of texts without perturbation and without dropout."""
        with without_dropout(self.model):
            return torch.log_softmax(self.model(inputs), dim=1)

    def noise_gradient(self, inputs: Inputs, objective: Callable[[Tensor, Tensor], Tensor], start: Noise | None = None) -> Noise:
        """Compute the gradient of an objective in the noise, without dropout; see `Model.noise_gradient`."""
        with without_dropout(self.model):
            return self.model.noise_gradient(inputs, objective, start)

    def rescaled(self, inputs: Inputs, direction: Noise, radius: float) -> Noise:
        """Return the direction with the norm ``radius`` times the norm of each text's embeddings; padding stays zero."""
        return self.model.rescaled_noise(inputs, direction, radius)

    def _target_logits(self, features: Tensor) -> Tensor:
        assert self.target_head is not None
        logits: Tensor = self.target_head(features)
        return logits

    # ------------------------------------------------------------------ for the trainer

    def modules(self) -> dict[str, nn.Module]:
        """Return the target head."""
        return {} if self.target_head is None else {"target_head": self.target_head}

    def learning_rate_factor(self, name: str) -> float:
        """Return the factor of the target head's parameters, or 1."""
        return self.settings.target_head_learning_rate_ratio if name.startswith("target_head.") else 1.0
