r"""Meta-Tsallis-Entropy Minimization (Lu et al., IJCAI 2023), Algorithm 1, with the departures that real data demands.

Each unlabeled text :math:`x_i` has its own entropy index :math:`\psi_i`. One step, on a target batch :math:`B` and a labeled
batch :math:`V`:

.. math::
    \tilde y_i &\sim \mathrm{softmax}(\mathrm{score}_i / \kappa_t) \\
    \hat\theta(\psi) &= \theta - \eta\, \nabla_\theta \tfrac{1}{|B|} \sum_i \ell_{\psi_i}(f(x_i; \theta), \tilde y_i)
        && \text{inner loop (Eq. 7)} \\
    \psi &\leftarrow \psi - \beta_t\, \nabla_\psi L_S(\hat\theta(\psi) | V) && \text{outer loop (Eq. 11)} \\
    \theta &\leftarrow \theta - \eta_t\, \nabla_\theta \tfrac{1}{|B|} \sum_i \ell_{\psi_i}(f(x_i; \theta), \tilde y_i)
        && \text{with the same } \tilde y_i

The `paper` preset is this and no more. What the other settings add, and why, stands in their help texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtem import annealing, metagrad, schedules, tsallis
from mtem.errors import RequestError
from mtem.metagrad import layerwise
from mtem.methods.base import Batch, Context, Method, Update, functional, without_dropout
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class MtemSettings:
    """Algorithm 1's constants, its ablations, and the departures from it."""

    engine: str = setting(
        "layerwise",
        "how the index gradient is computed: layerwise (the default: exact, from the layers of the one pass that the step needs "
        "anyway), forward (exact, in forward mode; also what layerwise falls back to), taylor (the paper's approximation), "
        "second-order (exact, the slowest)",
        choices=("layerwise", "forward", "taylor", "second-order"),
    )
    index_initial: float = setting(2.0, "every text's entropy index at the start", low=1.0)
    index_low: float = setting(1.05, "smallest index; the theory needs it above 1", low=1.0)
    index_high: float = setting(5.0, "largest index; the paper's cases end at 5", low=1.0)
    index_learning_rate: float = setting(0.5, "beta: how far an index moves per visit", low=0.0)
    index_step: str = setting(
        "sign",
        "what beta multiplies: the raw gradient g (as printed: about 1e-5, the indexes never move), its sign, the soft sign "
        "g / (|g| + median |g| of the batch), or g divided by its root mean square or its norm over the batch",
        choices=("raw", "sign", "soft", "rms", "norm"),
    )
    index_schedule: str = setting(
        "constant", "beta over time: constant, or Assumption 2's min(1/L, k2/t^(2/3)) with L = 1/beta, k2 = beta",
        choices=("constant", "assumption-2"),
    )  # fmt: skip
    meta: bool = setting(True, "learn the indexes; false: every text keeps index_initial (ablation 'w/o M')")
    annealing: bool = setting(True, "anneal the sampling temperature; false: kappa = 1 throughout (ablation 'w/o A')")
    sampling: bool = setting(True, "sample the pseudo labels; false: take the likeliest class (ablation 'w/o S')")
    temperature_start: float = setting(1.0, "kappa at the start; above 1 small indexes flatten the predictions", low=0.0)
    temperature_end: float = setting(0.2, "kappa at the end", low=0.0)
    steepness: float = setting(5.0, "s: how suddenly the temperature falls half-way", low=0.0)
    virtual_step: bool = setting(True, "take the source gradient after the inner step; false: at theta (cheaper, not exact)")
    virtual_learning_rate: float | None = setting(None, "eta of the inner step; none: the current learning rate", low=0.0)
    source_microbatches: int = setting(
        1, "layerwise: in how many pieces the outer loop's source batch goes; with two a step needs less memory and more time",
        low=1,
    )  # fmt: skip
    taylor_step: float = setting(0.01, "finite difference of the taylor engine, relative to the norm of v", low=1e-6)
    source_weight: float = setting(
        1.0, "weight of the source loss in the update of theta (Eq. 4); 0, as printed, lets theta forget the task", low=0.0
    )
    target_weight: float = setting(1.0, "lambda: weight of the Tsallis loss in the update of theta", low=0.0)
    ema_decay: float = setting(
        0.98,
        "decay of the averaged weights that give the pseudo labels and are kept in the end; 0: the model itself. The average "
        "is better than any single step, and a model that labels for itself drifts",
        low=0.0,
        high=0.9999,
    )
    mask_ratio: float = setting(
        0.15, "share of the student's tokens that are hidden: agreeing with the teacher then takes more than repeating it",
        low=0.0, high=0.9,
    )  # fmt: skip
    dropout: bool = setting(
        True, "dropout in the update of theta; with layerwise, whose inner step is that update, in the inner loss too"
    )

    def __post_init__(self) -> None:
        if self.index_high <= self.index_low:
            raise RequestError(f"index_high={self.index_high} must be above index_low={self.index_low}")
        if self.temperature_start < self.temperature_end:
            raise RequestError(
                f"temperature_start={self.temperature_start} must not be below temperature_end={self.temperature_end}"
            )


# Algorithm 1 and the paper's constants. It gives neither kappa's range nor s: 2 -> 0.5 and 5 are ours.
PAPER: dict[str, Any] = {
    "engine": "taylor",
    "index_initial": 2.0,
    "index_low": 1.01,
    "index_learning_rate": 0.1,
    "index_step": "raw",
    "temperature_start": 2.0,
    "temperature_end": 0.5,
    "source_weight": 0.0,
    "ema_decay": 0.0,
    "mask_ratio": 0.0,
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


class Mtem(Method):
    """Self-training in which every unlabeled text has its own entropy index, learned against the source loss."""

    name = "mtem"
    summary = "self-training with a Tsallis entropy index per text, learned against the source loss"
    paper = "Lu et al., IJCAI 2023"
    Settings = MtemSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": PAPER}

    def __init__(self, model: Any, settings: MtemSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        initial = min(max(settings.index_initial, settings.index_low), settings.index_high)
        self.index = torch.full((context.target_size,), initial, device=model.device)
        self.recorder = self.find_recorder() if settings.engine == "layerwise" else None
        self.average: dict[str, Tensor] = {}
        if settings.ema_decay:
            self.average = {name: p.detach().clone() for name, p in model.trainable().items()}

    def find_recorder(self) -> layerwise.Recorder | None:
        """None where the layers cannot be read one text at a time: then the forward engine serves."""
        inputs = self.model.probe()
        if inputs is None:
            return None
        with without_dropout(self.model):
            recorder = layerwise.Recorder(self.model, self.model.trainable(), lambda: self.model(inputs))
        return recorder if recorder.skipped_share < 0.01 else None

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        settings = self.settings
        log: dict[str, Tensor | float] = {"temperature": self.temperature(number)}
        own = not (self.average or settings.mask_ratio or settings.dropout)  # the model labels just what it is trained on
        labels = None if own and self.recorder else self.pseudo_labels(target, log["temperature"])
        student = target.inputs
        if settings.mask_ratio:
            student = self.model.augment(student, "mask", settings.mask_ratio, self.context.generator)
        student = self.model.prepare(student)
        train = self.train_recorded if self.recorder else self.train
        target_loss, gradients = train(number, student, labels, target.rows, source, log)

        loss = None if target_loss is None else settings.target_weight * target_loss
        if settings.source_weight:
            self.model.train(settings.dropout)
            source_loss = self.cross_entropy(self.model(source.inputs), source.labels)
            log["source_loss"] = source_loss.detach()
            source_loss = settings.source_weight * source_loss
            loss = source_loss if loss is None else loss + source_loss
        update(loss, gradients=gradients)
        if self.average:
            now = [parameter.detach() for parameter in self.model.trainable().values()]
            torch._foreach_lerp_(list(self.average.values()), now, 1 - settings.ema_decay)
        return log

    def train(
        self, number: int, student: Any, labels: Tensor, rows: Tensor, source: Batch, log: dict[str, Tensor | float]
    ) -> tuple[Tensor, None]:
        """The outer loop by one of metagrad's engines, then the Tsallis loss with its graph."""
        if self.settings.meta:
            meta = self.index_gradient(student, labels, rows, source)
            self.index[rows] = self.moved(self.index[rows], meta.gradient, number)
            log["meta_loss"] = meta.source_loss
        self.model.train(self.settings.dropout)
        log_probs = torch.log_softmax(self.model(student), dim=-1)
        loss = tsallis.loss(log_probs, labels, self.index[rows]).mean()
        log["target_loss"] = loss.detach()
        return loss, None

    def train_recorded(
        self, number: int, student: Any, labels: Tensor | None, rows: Tensor, source: Batch, log: dict[str, Tensor | float]
    ) -> tuple[None, dict[str, Tensor]]:
        r"""The same from one pass: before and after the outer loop :math:`\theta`'s gradient is a weighted sum of the same
        per-text gradients, :math:`\sum_i p_i^{\psi_i - 1} \nabla(-\log p_i) / |B|`.
        """
        settings = self.settings
        outer: Any = lambda: self.source_pieces(source)  # noqa: E731
        if settings.meta and not settings.virtual_step:
            outer = layerwise.source_gradient(self.recorder, outer)
        self.model.train(settings.dropout)
        recording = self.recorder.record(
            lambda: self.model(student), len(rows), save_memory=settings.meta and settings.virtual_step
        )
        if labels is None:
            labels = self.drawn(recording.logits.detach(), log["temperature"])
        log_probs = torch.log_softmax(recording.logits, dim=-1)
        recording.backward(tsallis.surprisal(log_probs, labels))
        log_probs = log_probs.detach()
        if settings.meta:
            meta = layerwise.meta_gradient(recording, log_probs, labels, self.index[rows], outer, self.virtual_learning_rate())
            self.index[rows] = self.moved(self.index[rows], meta.gradient, number)
            log["meta_loss"] = meta.source_loss
        index = self.index[rows]
        log["target_loss"] = tsallis.loss(log_probs, labels, index).mean()
        weights = tsallis.pseudo_weight(log_probs, labels, index)
        return None, recording.gradient(settings.target_weight / len(rows) * weights)

    # ------------------------------------------------------------------ the lines of Algorithm 1

    def temperature(self, number: int) -> float:
        """kappa_t (line 4, Eq. 15)."""
        settings = self.settings
        if not settings.annealing:
            return 1.0
        last = max(self.context.steps - 1, 1)
        return annealing.temperature(number, last, settings.temperature_start, settings.temperature_end, settings.steepness)

    @torch.no_grad()
    def pseudo_labels(self, target: Batch, temperature: float) -> Tensor:
        """Line 5: one label for each text, by the teacher where there is one, on the text as it is."""
        with without_dropout(self.model):
            inputs = self.model.prepare(target.inputs)
            scores = functional(self.model, self.average, inputs) if self.average else self.model(inputs)
        return self.drawn(scores, temperature)

    def drawn(self, scores: Tensor, temperature: float) -> Tensor:
        scores = self.context.align(scores)
        return annealing.sample_labels(scores, temperature, generator=self.context.generator, greedy=not self.settings.sampling)

    def virtual_learning_rate(self) -> float:
        return (
            self.context.learning_rate() if self.settings.virtual_learning_rate is None else self.settings.virtual_learning_rate
        )

    def source_pieces(self, source: Batch) -> Iterator[Tensor]:
        """The source loss without dropout, piece by piece of the batch."""
        self.model.eval()
        inputs, labels = self.model.prepare(source.inputs), source.labels
        whole = class_mass(labels, self.context.class_weights)
        for part, rows in self.model.split(inputs, self.settings.source_microbatches):
            share = class_mass(labels[rows], self.context.class_weights) / whole
            yield share * self.cross_entropy(self.model(part), labels[rows])

    def index_gradient(self, inputs: dict[str, Tensor], labels: Tensor, rows: Tensor, source: Batch) -> Any:
        """Lines 6 and 7: the inner step and the derivative of the source loss behind it, without dropout."""
        settings = self.settings
        held = self.model.prepare(source.inputs)
        with without_dropout(self.model):
            return metagrad.meta_gradient(
                lambda parameters, batch: functional(self.model, parameters, batch),
                self.model.trainable(),
                inputs,
                labels,
                self.index[rows],
                lambda parameters: self.cross_entropy(functional(self.model, parameters, held), source.labels),
                self.virtual_learning_rate(),
                engine="forward" if settings.engine == "layerwise" else settings.engine,
                differentiable_attention=self.model.differentiable_attention,
                step=settings.taylor_step,
                virtual_step=settings.virtual_step,
            )

    def moved(self, index: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Line 7: the indexes after the outer step, inside their range."""
        settings = self.settings
        beta = settings.index_learning_rate
        if settings.index_schedule == "assumption-2" and beta:
            beta = schedules.assumption_index(number + 1, k2=beta, smoothness=1 / beta)
        if settings.index_step == "sign":
            gradient = gradient.sign()
        elif settings.index_step != "raw":
            scale = {
                "soft": lambda: gradient.abs() + gradient.abs().median(),
                "rms": lambda: gradient.square().mean().sqrt(),
                "norm": lambda: gradient.norm(),
            }[settings.index_step]()
            gradient = gradient / scale.clamp_min(torch.finfo(gradient.dtype).tiny)
        return (index - beta * gradient).clamp(settings.index_low, settings.index_high)

    # ------------------------------------------------------------------ for the trainer

    def meta_loss(self, source: Batch, target: Batch) -> float | None:
        if not self.settings.meta:
            return None
        # an evaluation must not change what the run draws next
        state, aligned = self.context.generator.get_state(), self.context.align.state()
        labels = self.pseudo_labels(target, 1.0)
        self.context.generator.set_state(state)
        self.context.align.load_state(aligned)
        inputs = self.model.prepare(target.inputs)
        return float(self.index_gradient(inputs, labels, target.rows, source).source_loss)

    def weights(self) -> dict[str, Tensor]:
        return self.average or super().weights()

    def state(self) -> dict[str, Tensor]:
        return {"index": self.index, **{f"average.{name}": value for name, value in self.average.items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.index.copy_(state["index"])
        for name, value in self.average.items():
            value.copy_(state[f"average.{name}"])

    def indexes(self) -> Tensor | None:
        return self.index


def class_mass(labels: Tensor, weights: Tensor | None) -> Tensor | int:
    """What the mean of a weighted cross-entropy divides by."""
    return len(labels) if weights is None else weights[labels].sum()
