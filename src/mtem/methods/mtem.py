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
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtem import annealing, metagrad, rates, tsallis
from mtem.errors import RequestError
from mtem.methods import Batch, Context, Method, Update, functional, without_dropout
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class MtemSettings:
    """Algorithm 1's constants, its ablations, and the departures from it."""

    engine: str = setting("forward", "how the index gradient is computed", choices=("forward", "taylor", "second-order"))
    index_initial: float = setting(2.0, "every text's entropy index at the start", low=1.0)
    index_low: float = setting(1.05, "smallest index; the theory needs it above 1", low=1.0)
    index_high: float = setting(5.0, "largest index; the paper's cases end at 5", low=1.0)
    index_rate: float = setting(0.5, "beta: how far an index moves per visit", low=0.0)
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
    hottest: float = setting(1.0, "kappa at the start; above 1 small indexes flatten the predictions", low=0.0)
    coldest: float = setting(0.2, "kappa at the end", low=0.0)
    steepness: float = setting(5.0, "s: how suddenly the temperature falls half-way", low=0.0)
    virtual_step: bool = setting(True, "take the source gradient after the inner step; false: at theta (cheaper, not exact)")
    virtual_rate: float | None = setting(None, "eta of the inner step; none: the current learning rate", low=0.0)
    taylor_step: float = setting(0.01, "finite difference of the taylor engine, relative to the norm of v", low=1e-6)
    source_weight: float = setting(
        1.0, "weight of the source loss in the update of theta (Eq. 4); 0, as printed, lets theta forget the task", low=0.0
    )
    target_weight: float = setting(1.0, "lambda: weight of the Tsallis loss in the update of theta", low=0.0)
    teacher: float = setting(
        0.98,
        "decay of the averaged weights that give the pseudo labels and are kept in the end; 0: the model itself. The average "
        "is better than any single step, and a model that labels for itself drifts",
        low=0.0,
        high=0.9999,
    )
    corruption: float = setting(
        0.15, "share of the student's tokens that are hidden: agreeing with the teacher then takes more than repeating it",
        low=0.0, high=0.9,
    )  # fmt: skip
    dropout: bool = setting(True, "dropout in the update of theta (never in the passes for the index gradient)")

    def __post_init__(self) -> None:
        if self.index_high <= self.index_low:
            raise RequestError(f"index_high={self.index_high} must be above index_low={self.index_low}")
        if self.hottest < self.coldest:
            raise RequestError(f"hottest={self.hottest} must not be below coldest={self.coldest}")


# Algorithm 1 and the paper's constants. It gives neither kappa's range nor s: 2 -> 0.5 and 5 are ours.
PAPER: dict[str, Any] = {
    "engine": "taylor",
    "index_initial": 2.0,
    "index_low": 1.01,
    "index_rate": 0.1,
    "index_step": "raw",
    "hottest": 2.0,
    "coldest": 0.5,
    "source_weight": 0.0,
    "teacher": 0.0,
    "corruption": 0.0,
    "dropout": False,
    "optimizer": "sgd",
    "rate": 5e-5,
    "schedule": "constant",
    "weight_decay": 0.0,
    "clip": 0.0,
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
        self.average: dict[str, Tensor] = {}
        if settings.teacher:
            self.average = {name: p.detach().clone() for name, p in model.trainable().items()}

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        settings = self.settings
        temperature = self.temperature(number)
        labels = self.pseudo_labels(target, temperature)
        student = target.inputs
        if settings.corruption:
            student = self.model.augment(student, "mask", settings.corruption, self.context.generator)
        student = self.model.prepare(student)
        log: dict[str, Tensor | float] = {"temperature": temperature}

        if settings.meta:
            meta = self.index_gradient(student, labels, target.rows, source)
            self.index[target.rows] = self.moved(self.index[target.rows], meta.gradient, number)
            log["meta_loss"] = meta.source_loss

        self.model.train(settings.dropout)
        log_probs = torch.log_softmax(self.model(student), dim=-1)
        target_loss = tsallis.loss(log_probs, labels, self.index[target.rows]).mean()
        loss = settings.target_weight * target_loss
        log["target_loss"] = target_loss.detach()
        if settings.source_weight:
            source_loss = self.cross_entropy(self.model(source.inputs), source.labels)
            loss = loss + settings.source_weight * source_loss
            log["source_loss"] = source_loss.detach()
        update(loss)
        if self.average:
            now = [parameter.detach() for parameter in self.model.trainable().values()]
            torch._foreach_lerp_(list(self.average.values()), now, 1 - settings.teacher)
        return log

    # ------------------------------------------------------------------ the lines of Algorithm 1

    def temperature(self, number: int) -> float:
        """kappa_t (line 4, Eq. 15)."""
        settings = self.settings
        if not settings.annealing:
            return 1.0
        last = max(self.context.steps - 1, 1)
        return annealing.temperature(number, last, settings.hottest, settings.coldest, settings.steepness)

    @torch.no_grad()
    def pseudo_labels(self, target: Batch, temperature: float) -> Tensor:
        """Line 5: one label for each text, by the teacher where there is one, on the text as it is."""
        with without_dropout(self.model):
            inputs = self.model.prepare(target.inputs)
            scores = functional(self.model, self.average, inputs) if self.average else self.model(inputs)
        return annealing.sample_labels(scores, temperature, generator=self.context.generator, greedy=not self.settings.sampling)

    def index_gradient(self, inputs: dict[str, Tensor], labels: Tensor, rows: Tensor, source: Batch) -> Any:
        """Lines 6 and 7: the inner step and the derivative of the source loss behind it, without dropout."""
        settings = self.settings
        rate = self.context.rate() if settings.virtual_rate is None else settings.virtual_rate
        held = self.model.prepare(source.inputs)
        with without_dropout(self.model):
            return metagrad.meta_gradient(
                lambda parameters, batch: functional(self.model, parameters, batch),
                self.model.trainable(),
                inputs,
                labels,
                self.index[rows],
                lambda parameters: self.cross_entropy(functional(self.model, parameters, held), source.labels),
                rate,
                engine=settings.engine,
                smooth=self.model.smooth,
                step=settings.taylor_step,
                virtual_step=settings.virtual_step,
            )

    def moved(self, index: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Line 7: the indexes after the outer step, inside their range."""
        settings = self.settings
        beta = settings.index_rate
        if settings.index_schedule == "assumption-2" and beta:
            beta = rates.assumption_index(number + 1, k2=beta, smoothness=1 / beta)
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
        state = self.context.generator.get_state()  # an evaluation must not change what the run draws next
        labels = self.pseudo_labels(target, 1.0)
        self.context.generator.set_state(state)
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
