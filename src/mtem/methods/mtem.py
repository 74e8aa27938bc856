r"""Meta-Tsallis-Entropy Minimization (Lu et al., IJCAI 2023), Algorithm 1, with changes that real data requires.

Each unlabeled text :math:`x_i` has its own entropy index :math:`\psi_i`. One step, on a target batch :math:`B` and a labeled
batch :math:`V` (with the run's setting `outer_share`, of labeled texts that no weight is trained on):

.. math::
    \tilde y_i &\sim \mathrm{softmax}(\mathrm{score}_i / \kappa_t) \\
    \hat\theta(\psi) &= \theta - \eta\, \nabla_\theta \tfrac{1}{|B|} \sum_i \ell_{\psi_i}(f(x_i; \theta), \tilde y_i)
        && \text{inner loop (Eq. 7)} \\
    \psi &\leftarrow \psi - \beta_t\, \nabla_\psi L_S(\hat\theta(\psi) | V) && \text{outer loop (Eq. 11)} \\
    \theta &\leftarrow \theta - \eta_t\, \nabla_\theta \tfrac{1}{|B|} \sum_i \ell_{\psi_i}(f(x_i; \theta), \tilde y_i)
        && \text{with the same } \tilde y_i

The `paper` preset is exactly this. The help texts of the other settings say what they change, and why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mtem import annealing, metagrad, parallel, schedules, tsallis
from mtem.capture import by_step, from_host
from mtem.errors import RequestError
from mtem.metagrad import layerwise
from mtem.methods.base import Batch, Context, Method, StepLog, Update, functional, without_dropout
from mtem.methods.shared_index import FEATURES, STATE, SharedIndex
from mtem.models.base import Inputs, Model
from mtem.settings import setting

LARGEST_INDEX = 1000.0  # far beyond any use, and powers of probabilities stay numbers
OF_OUTER_LOOP = (
    "engine", "shared_learning_rate", "index_learning_rate", "index_step", "index_schedule", "virtual_step",
    "virtual_learning_rate", "source_microbatches", "taylor_step", "outer_share",
)  # fmt: skip
OF_SINGLE_INDEXES = ("index_initial", "index_low", "index_learning_rate", "index_step", "index_schedule")
OF_TEMPERATURE = ("annealing", "temperature_start", "temperature_end", "steepness")


@dataclasses.dataclass(frozen=True)
class MtemSettings:
    """The constants of Algorithm 1, its ablations, and the changes to it."""

    engine: str = setting(
        "layerwise",
        "how the index gradient is computed: layerwise (exact, from the layers of the pass that the step needs anyway; falls "
        "back to forward for models without such layers), forward (exact, forward-mode differentiation), taylor (the paper's "
        "approximation), second-order (exact, slowest)",
        choices=("layerwise", "forward", "taylor", "second-order"),
    )
    index_mode: str = setting(
        "per-text",
        "whose the entropy index is: each text has its own, as in the paper (per-text); one rule for all texts gives it from "
        "the teacher's confidence, the agreement of the views, the stability over visits and the nearness to labeled texts, "
        "beginning near 1 (shared); or it is index_initial for all and nothing is learned (fixed)",
        choices=("per-text", "shared", "fixed"),
    )
    shared_learning_rate: float = setting(0.02, "learning rate of the rule with index_mode=shared (Adam)", low=0.0)
    index_initial: float = setting(
        2.0, "entropy index of every text at the start (psi_0); below 1, hard views weigh more", low=0.0, high=LARGEST_INDEX
    )
    index_low: float = setting(1.05, "smallest entropy index; the theory requires more than 1", low=0.0, high=LARGEST_INDEX)
    index_high: float = setting(
        5.0, "largest entropy index; the largest in the paper's case study is 5", low=1.0, high=LARGEST_INDEX
    )
    index_learning_rate: float = setting(0.5, "step size of the entropy indexes (beta)", low=0.0)
    index_step: str = setting(
        "sign",
        "what beta multiplies: the raw gradient g (as in the paper; about 1e-5, so the indexes hardly change), its sign, the "
        "soft sign g / (|g| + median |g| of the batch), or g divided by its root mean square or its norm over the batch",
        choices=("raw", "sign", "soft", "rms", "norm"),
    )
    index_schedule: str = setting(
        "constant", "beta over time: constant, or min(1/L, k2/t^(2/3)) of Assumption 2 with L = 1/beta and k2 = beta",
        choices=("constant", "assumption-2"),
    )  # fmt: skip
    meta: bool = setting(True, "learn the entropy indexes; false: every text keeps index_initial (ablation w/o M)")
    annealing: bool = setting(True, "anneal the sampling temperature; false: it is always 1 (ablation w/o A)")
    sampling: bool = setting(True, "sample the pseudo labels; false: take the most probable class (ablation w/o S)")
    threshold: float = setting(
        0.0, "smallest probability of the teacher's likeliest class for a text to be learned from; 0: all texts are", low=0.0,
        high=1.0,
    )  # fmt: skip
    temperature_start: float = setting(
        1.0, "sampling temperature at the start (kappa_max); above 1, small indexes flatten the predictions", low=0.0
    )
    temperature_end: float = setting(0.2, "sampling temperature at the end (kappa_min)", low=0.0)
    steepness: float = setting(5.0, "how steeply the temperature falls half-way (s)", low=0.0)
    virtual_step: bool = setting(
        True, "compute the source gradient after the inner step; false: at the current weights (cheaper, not exact)"
    )
    virtual_learning_rate: float | None = setting(
        None, "learning rate of the inner step (eta); none: the current learning rate", low=0.0
    )
    source_microbatches: int = setting(
        1,
        "number of parts of the source batch in the outer loop (engine layerwise), at least microbatches; 2 needs less memory "
        "and more time",
        low=1,
    )
    taylor_step: float = setting(0.01, "step of the finite difference of the taylor engine, relative to the norm of v", low=1e-6)
    source_weight: float = setting(
        1.0,
        "weight of the source loss in the update of the model (Eq. 4); with 0, as in Algorithm 1, it forgets the task",
        low=0.0,
    )
    target_weight: float = setting(1.0, "weight of the Tsallis loss in the update of the model (lambda)", low=0.0)
    dropout: bool = setting(
        True, "dropout in the update of the model; with the layerwise engine also in the inner loss, which uses the same pass"
    )

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.index_high <= self.index_low:
            raise RequestError(f"setting index_high={self.index_high}: expected a value above index_low={self.index_low}")
        if self.temperature_start < self.temperature_end:
            raise RequestError(
                f"setting temperature_start={self.temperature_start}: "
                f"expected a value of at least temperature_end={self.temperature_end}"
            )

    @property
    def learns_index(self) -> bool:
        """Whether there is an outer loop."""
        return self.meta and self.index_mode != "fixed"


# The paper's parts with values that suit encoders: an index is learned for each text, upwards from 1; labels are sampled.
LEARNED: dict[str, Any] = {
    "index_mode": "per-text", "index_initial": 1.0, "index_low": 1.0, "sampling": True, "threshold": 0.95,
}  # fmt: skip

# On an encoder: an index above 1 takes the weight from the hard views, which teach most, and no rule that was learned for it
# gained anything over 1; what distrust is for, the threshold does as well (docs/recipe.md). So MTEM is FixMatch there. BiGCN
# has other values of both (`BigcnModel.presets`).
RECOMMENDED: dict[str, Any] = {**LEARNED, "index_mode": "fixed", "sampling": False}

# Algorithm 1 and the constants of the paper. It does not give the range of kappa, nor s: 2 to 0.5 and 5 are our choice.
PAPER: dict[str, Any] = {
    "engine": "taylor",
    "index_mode": "per-text",
    "index_initial": 2.0,
    "index_low": 1.01,
    "index_learning_rate": 0.1,
    "index_step": "raw",
    "threshold": 0.0,
    "temperature_start": 2.0,
    "temperature_end": 0.5,
    "source_weight": 0.0,
    "ema_decay": 0.0,
    "view": "dropout",
    "view_strength": 0.0,
    "dropout": False,
    "optimizer": "sgd",
    "learning_rate": 5e-5,
    "schedule": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "layer_decay": 1.0,
    "frozen_layers": 0,
    "batch_size": 50,
    "max_length": 256,
}


class PseudoLabels(NamedTuple):
    """The pseudo labels of a batch.

    Attributes
    ----------
    labels : Tensor
        Integers ``[N]``.
    confidence : Tensor
        The teacher's probability of its likeliest class, ``[N]``.
    trusted : Tensor or None
        1 for texts that are learned from and 0 for others, ``[N]``; None: all are.
    """

    labels: Tensor
    confidence: Tensor
    trusted: Tensor | None = None

    @property
    def inner_loss(self) -> metagrad.InnerLoss:
        """The mean Tsallis loss, to which texts that are not trusted add nothing."""
        return metagrad.TSALLIS if self.trusted is None else metagrad.tsallis_loss(self.trusted)

    def log(self) -> StepLog:
        """Return the share of the texts that are trusted, if there is a threshold."""
        return {} if self.trusted is None else {"confident_share": self.trusted.mean()}


class Mtem(Method):
    """Self-training in which every unlabeled text has its own entropy index, learned against the source loss."""

    name = "mtem"
    summary = "self-training with a Tsallis entropy index per text, learned against the source loss"
    paper = "Lu et al., IJCAI 2023"
    learns_in_view = True
    replayable = True
    Settings = MtemSettings
    settings: MtemSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": RECOMMENDED, "learned": LEARNED, "paper": PAPER}

    def __init__(self, model: Model, settings: MtemSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        initial = min(max(settings.index_initial, settings.index_low), settings.index_high)
        self.index = parallel.new_rows(context.target_size, initial, torch.zeros((), device=model.device))
        self.shared: SharedIndex | None = None
        if settings.index_mode == "shared":
            width, rate = model.head.in_features, settings.shared_learning_rate
            self.shared = SharedIndex(context.target_size, context.classes, width, rate, model.device)
            self.index.copy_(self._in_range(self.shared.index(torch.eye(len(FEATURES), device=model.device)[:1])))
        recorded = settings.learns_index and settings.engine == "layerwise"
        self.recorder = self._make_recorder() if recorded else None

    @classmethod
    def unused(cls, settings: MtemSettings) -> dict[str, str]:
        """Return settings without effect: of an outer loop or single indexes that do not exist, of labels that are not drawn."""
        without_loop = "index_mode=fixed" if settings.meta else "meta=false"
        names = dict.fromkeys(OF_SINGLE_INDEXES, "index_mode=shared") if settings.index_mode == "shared" else {}
        names = names if settings.learns_index else {**names, **dict.fromkeys(OF_OUTER_LOOP, without_loop)}
        return names if settings.sampling else {**names, **dict.fromkeys(OF_TEMPERATURE, "sampling=false")}

    def _make_recorder(self) -> layerwise.Recorder | None:
        """Return None if the layers cannot be read one text at a time: then the forward engine is used."""
        inputs = self.model.probe()
        if inputs is None:
            return None
        with without_dropout(self.model), parallel.alone():
            recorder = layerwise.Recorder(self.model, self.model.trainable(), lambda: self.model(inputs))
        return recorder if recorder.skipped_share < 0.01 else None

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Update the entropy indexes of the target batch, then the model."""
        settings = self.settings
        temperature = by_step(self.temperature, number, self.model.device)
        log: StepLog = {"temperature": temperature} if settings.sampling else {}
        # Without average, mask and dropout the recorded pass itself gives the logits for the pseudo labels.
        changed = self.context.view_strength or self.context.view_radius
        labels_from_recording = not (self.average or changed or settings.dropout or self.shared)
        pseudo = None if labels_from_recording and self.recorder else self.pseudo_labels(target, temperature)
        inputs = self.model.prepare(self.student_view(target.inputs))
        if pseudo is not None:
            inputs = self.perturbed_view(inputs, pseudo.labels)
        if self.shared is not None and settings.meta:  # else the rule stays as it is, the same for all
            assert pseudo is not None
            self._describe(self.shared, inputs, pseudo, target.rows, source)
        outer = source if self.context.outer is None or not settings.learns_index else self.context.outer(number)
        loss: Tensor | None = None
        gradients: dict[str, Tensor] | None = None
        if self.recorder is not None:
            gradients = self._recorded_gradient(self.recorder, number, inputs, pseudo, target.rows, outer, temperature, log)
        else:
            assert pseudo is not None
            loss = settings.target_weight * self._target_loss(number, inputs, pseudo, target.rows, outer, log)

        if settings.source_weight:
            self.model.train(settings.dropout)
            source_loss = self.cross_entropy(self.model(source.inputs), source.require_labels())
            log["source_loss"] = source_loss.detach()
            source_loss = settings.source_weight * source_loss
            loss = source_loss if loss is None else loss + source_loss
        update(loss, gradients=gradients)
        return log

    def _target_loss(self, number: int, inputs: Inputs, pseudo: PseudoLabels, rows: Tensor, outer: Batch, log: StepLog) -> Tensor:
        """Run the outer loop by an engine of `mtem.metagrad`, and return the Tsallis loss with its graph."""
        if self.settings.learns_index:
            meta = self.index_gradient(inputs, pseudo, rows, outer)
            self._learn_index(rows, meta.gradient, number)
            log["meta_loss"] = meta.source_loss
        self.model.train(self.settings.dropout)
        log_probs = torch.log_softmax(self.model(inputs), dim=-1)
        loss = pseudo.inner_loss.value(log_probs, pseudo.labels, self.index[rows])
        log |= {"target_loss": loss.detach(), **pseudo.log()}
        return loss

    def _recorded_gradient(
        self,
        recorder: layerwise.Recorder,
        number: int,
        inputs: Inputs,
        pseudo: PseudoLabels | None,
        rows: Tensor,
        outer: Batch,
        temperature: float | Tensor,
        log: StepLog,
    ) -> dict[str, Tensor]:
        r"""Run the outer loop from one recorded pass, and return the gradient of the weighted Tsallis loss.

        Before and after the outer loop the gradient in :math:`\theta` is a weighted sum of the same per-text gradients,
        :math:`\sum_i p_i^{\psi_i - 1} \nabla(-\log p_i) / |B|`.
        """
        settings = self.settings
        at_theta: layerwise.SourceGradient | None = None
        if not settings.virtual_step:
            at_theta = layerwise.source_gradient(recorder, lambda: self._source_losses(outer))
        self.model.train(settings.dropout)
        recording = self._record(recorder, inputs, len(rows))
        if pseudo is None:
            pseudo = self.sample_labels(recording.logits.detach(), temperature)
        labels, inner_loss = pseudo.labels, pseudo.inner_loss
        log_probs = torch.log_softmax(recording.logits, dim=-1)
        recording.backward(tsallis.surprisal(log_probs, labels))
        log_probs = log_probs.detach()
        source_loss = (lambda: self._source_losses(outer)) if at_theta is None else at_theta
        meta = layerwise.meta_gradient(
            recording,
            log_probs,
            labels,
            self.index[rows],
            source_loss,
            from_host(self.virtual_learning_rate, self.model.device),
            inner_loss=inner_loss,
        )
        self._learn_index(rows, meta.gradient, number)
        log["meta_loss"] = meta.source_loss
        index = self.index[rows]
        log |= {"target_loss": inner_loss.value(log_probs, labels, index), **pseudo.log()}
        return recording.gradient(settings.target_weight * inner_loss.weights(log_probs, labels, index))

    def _record(self, recorder: layerwise.Recorder, inputs: Inputs, texts: int) -> layerwise.Recording | layerwise.Replay:
        model, settings = self.model, self.settings
        if model.microbatches == 1 and not model.activation_checkpointing:
            return recorder.record(lambda: model(inputs), texts, save_memory=settings.virtual_step)

        def run(part: Inputs) -> Tensor:
            model.train(settings.dropout)  # between two runs is the source pass, without dropout
            return model.one_pass(part)

        return recorder.replay([functools.partial(run, part) for part in model.parts(inputs)])

    # ------------------------------------------------------------------ the lines of Algorithm 1

    def temperature(self, number: int) -> float:
        """Return kappa_t (line 4, Eq. 15)."""
        settings = self.settings
        if not settings.annealing:
            return 1.0
        last = max(self.context.steps - 1, 1)
        return annealing.temperature(number, last, settings.temperature_start, settings.temperature_end, settings.steepness)

    @torch.no_grad()
    def pseudo_labels(self, target: Batch, temperature: float | Tensor) -> PseudoLabels:
        """Return a pseudo label for each text (line 5), from the averaged weights if there are any, on the unchanged text."""
        return self.sample_labels(self.teacher_logits(self.model.prepare(target.inputs)), temperature)

    def sample_labels(self, logits: Tensor, temperature: float | Tensor) -> PseudoLabels:
        """Return a pseudo label for each row of logits."""
        settings, logits = self.settings, self.context.align(logits)
        labels = annealing.sample_labels(logits, temperature, self.context.generator, greedy=not settings.sampling)
        confidence = torch.softmax(logits, dim=-1).amax(dim=-1)
        trusted = (confidence >= settings.threshold).to(logits.dtype) if settings.threshold else None
        return PseudoLabels(labels, confidence, trusted)

    def virtual_learning_rate(self) -> float:
        """Return the learning rate of the inner step."""
        rate = self.settings.virtual_learning_rate
        return self.context.learning_rate() if rate is None else rate

    def _source_losses(self, source: Batch) -> Iterator[Tensor]:
        """Yield the source loss of each microbatch, without dropout; their sum is that of the batch."""
        self.model.eval()
        inputs, labels = self.model.prepare(source.inputs), source.require_labels()
        total = _class_mass(labels, self.context.class_weights)
        for part, rows in self.model.split(inputs, max(self.settings.source_microbatches, self.model.microbatches)):
            share = _class_mass(labels[rows], self.context.class_weights) / total
            yield share * self.cross_entropy(self.model.one_pass(part), labels[rows])

    def index_gradient(self, inputs: Inputs, pseudo: PseudoLabels, rows: Tensor, source: Batch) -> metagrad.MetaGradient:
        """Compute the inner step and the derivative of the source loss after it in each index (lines 6 and 7).

        Parameters
        ----------
        inputs : mapping of str to Tensor
            The target texts.
        pseudo : PseudoLabels
            Their pseudo labels.
        rows : Tensor
            Their rows in the target corpus ``[N]``.
        source : Batch
            Labeled texts.

        Returns
        -------
        MetaGradient
            The gradient and the source loss, both without dropout.
        """
        settings, source_labels = self.settings, source.require_labels()
        source_inputs = self.model.prepare(source.inputs)
        with without_dropout(self.model):
            return metagrad.meta_gradient(
                lambda parameters, batch: functional(self.model, parameters, batch),
                self.model.trainable(),
                inputs,
                pseudo.labels,
                self.index[rows],
                lambda parameters: self.cross_entropy(functional(self.model, parameters, source_inputs), source_labels),
                from_host(self.virtual_learning_rate, self.model.device),
                engine="forward" if settings.engine == "layerwise" else settings.engine,
                differentiable_attention=self.model.differentiable_attention,
                step=settings.taylor_step,
                virtual_step=settings.virtual_step,
                rewind=False,
                split=self.model.parts,
                inner_loss=pseudo.inner_loss,
            )

    @torch.no_grad()
    def _describe(self, shared: SharedIndex, inputs: Inputs, pseudo: PseudoLabels, rows: Tensor, source: Batch) -> None:
        """Find the features of a batch that the shared rule reads, and the indexes that it gives."""
        with without_dropout(self.model):
            _, labeled = self.model.logits_and_features(source.inputs)
            logits, features = self.model.logits_and_features(inputs)
        shared.see_labeled(labeled, source.require_labels())
        shared.visit(rows, pseudo.labels)
        agreement = torch.softmax(logits, dim=-1).gather(1, pseudo.labels.unsqueeze(1)).squeeze(1)
        self._phi = shared.describe(rows, pseudo.confidence, agreement, features)
        self.index[rows] = self._in_range(shared.index(self._phi))

    def _learn_index(self, rows: Tensor, gradient: Tensor, number: int) -> None:
        """Move the indexes of a batch, or the rule that gives them, along the gradient of the source loss."""
        if self.shared is None:
            self.index[rows] = self.updated_index(self.index[rows], gradient, number)
        else:
            self.shared.learn(gradient, self._phi)
            self.index[rows] = self._in_range(self.shared.index(self._phi))

    def _in_range(self, index: Tensor) -> Tensor:
        return index.clamp(1.0, self.settings.index_high)

    def updated_index(self, index: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Return the entropy indexes after the outer step (line 7), inside their range.

        Parameters
        ----------
        index : Tensor
            The indexes ``[N]``.
        gradient : Tensor
            Their gradient ``[N]``.
        number : int
            The number of the step, from 0.
        """
        settings = self.settings
        beta = by_step(self.index_learning_rate, number, index.device)
        return (index - beta * _index_step(gradient, settings.index_step)).clamp(settings.index_low, settings.index_high)

    def index_learning_rate(self, number: int) -> float:
        """Return beta_t."""
        beta = self.settings.index_learning_rate
        if self.settings.index_schedule == "assumption-2" and beta:
            return schedules.assumption_index(number + 1, k2=beta, smoothness=1 / beta)
        return beta

    # ------------------------------------------------------------------ for the trainer

    def meta_loss(self, source: Batch, target: Batch) -> float:
        """Return the source loss after the inner step, for pseudo labels sampled at temperature 1; draws are taken back."""
        # An evaluation must not change the random draws of the run.
        state, aligned = self.context.generator.get_state(), self.context.align.state()
        pseudo = self.pseudo_labels(target, 1.0)
        self.context.generator.set_state(state)
        self.context.align.load_state(aligned)
        inputs = self.model.prepare(target.inputs)
        return float(self.index_gradient(inputs, pseudo, target.rows, source).source_loss)

    def state(self) -> dict[str, Tensor]:
        """Return the entropy indexes, the rule that they share if there is one, and the averaged weights."""
        shared = {} if self.shared is None else {f"shared.{name}": value for name, value in self.shared.state().items()}
        return {"index": parallel.whole_rows(self.index), **shared, **super().state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self.index.copy_(state["index"])
        if self.shared is not None:
            self.shared.load_state({name: state[f"shared.{name}"] for name in STATE})

    def indexes(self) -> Tensor | None:
        """Return the entropy index of every target text."""
        return parallel.whole_rows(self.index)


def _class_mass(labels: Tensor, weights: Tensor | None) -> Tensor | int:
    """Return the divisor of the mean of a class-weighted cross-entropy."""
    return len(labels) if weights is None else weights[labels].sum()


def _index_step(gradient: Tensor, rule: str) -> Tensor:
    """Return what beta multiplies, by the rule of the setting index_step."""
    if rule == "raw":
        return gradient
    if rule == "sign":
        return gradient.sign()
    if rule == "soft":
        scale = gradient.abs() + gradient.abs().median()
    elif rule == "rms":
        scale = gradient.square().mean().sqrt()
    else:
        scale = gradient.norm()
    return gradient / scale.clamp_min(torch.finfo(gradient.dtype).tiny)
