"""The loop: batches in, steps of a method out, on any device and precision; logged, checkpointed, resumable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtem import priors, rates
from mtem.data.batching import Batches, on_device
from mtem.data.tokens import Tokens
from mtem.errors import RequestError, RunError
from mtem.methods import Batch, Method
from mtem.progress import Progress
from mtem.selection import CRITERIA, DEFAULT_CRITERION
from mtem.settings import setting

SCHEDULES = (*rates.SCHEDULES, "assumption-2")
DEVICES = ("cpu", "cuda", "mps")
FUSED = ("cpu", "cuda")  # where the optimizers have a kernel that updates all parameters at once
QUANTILE_SAMPLE = 20_000  # indexes at most that the history's quantiles are taken of


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """What all methods share: lengths, rates, batches, the device, the choice of the final weights."""

    seed: int = setting(0, "every random choice follows from it", low=0, high=2**32 - 1)
    max_length: int = setting(256, "tokens kept of a text", low=4)
    batch_size: int = setting(50, "texts in a batch, of the source and of the target", low=1)
    source_epochs: float = setting(3.0, "passes over the labeled texts before the adaptation", low=0.0)
    source_rate: float | None = setting(
        None, "learning rate of the source training; none: 5e-5, or 5e-4 when lower layers are frozen; bigcn 2e-3", low=0.0
    )
    epochs: float = setting(2.0, "passes over the unlabeled texts in the adaptation", low=0.0)
    steps: int | None = setting(None, "steps of the adaptation, in place of epochs", low=0)
    rate: float | None = setting(
        None, "learning rate of the adaptation; none: 2e-5, or 2e-4 when lower layers are frozen; bigcn 5e-4", low=0.0
    )
    optimizer: str = setting(
        "adamw", "of the adaptation; sgd, as in Algorithm 1, hardly moves a transformer at the usual rates",
        choices=("adamw", "adam", "sgd"),
    )  # fmt: skip
    schedule: str = setting("linear", "of the learning rate", choices=SCHEDULES)
    warmup: float = setting(0.1, "share of the steps in which the rate rises", low=0.0, high=1.0)
    weight_decay: float = setting(0.01, "of matrices; biases and norms have none", low=0.0)
    layer_decay: float = setting(1.0, "each layer's rate relative to the one above it", low=0.01, high=1.0)
    clip: float = setting(1.0, "largest norm of the gradient; 0: as it is", low=0.0)
    frozen_layers: int | None = setting(
        None, "lower layers kept as they are (negative: all but so many); none: 0 on a GPU, all but two on a CPU"
    )
    target_labeled_share: float | None = setting(
        0.5,
        "with --target-labeled: their share of every labeled batch, for every method and the outer loop too; none: as often as "
        "their number says",
        low=0.01,
        high=1.0,
    )
    class_weights: str = setting(
        "none", "of the loss on labeled texts; balanced: rare classes count as much as frequent ones",
        choices=("none", "balanced"),
    )  # fmt: skip
    prior: str = setting(
        "none",
        "class shares assumed of the target: pseudo labels are aligned with them, and in the end each class gets the bias that "
        "brings the predictions there. labeled: those of the labeled target texts. estimated: from the unlabeled texts, where "
        "only the shares differ from the source's",
        choices=priors.KINDS,
    )
    validation_share: float = setting(0.1, "share of the labeled texts held out", low=0.01, high=0.5)
    criterion: str = setting(DEFAULT_CRITERION, "how weights are chosen without target labels", choices=tuple(CRITERIA))
    evaluations: int = setting(8, "how often weights are judged during the adaptation", low=1)
    evaluation_texts: int = setting(1000, "target texts looked at in each; and at most so many held-out ones", low=10)
    left_out_models: int = setting(
        4,
        "source models that are trained besides, each without one source domain (the largest, if there are more) or without a "
        "part of the labeled target texts, to see how far the accuracy estimate is off in an unseen domain; 0: none",
        low=0,
    )
    device: str = setting("auto", "cpu, cuda, mps or auto")
    precision: str = setting("auto", "auto: bf16 on a GPU that has it, else fp32", choices=("auto", "fp32", "bf16", "fp16"))
    attention: str | None = setting(None, "attention implementation of transformers; none: its default")
    log_every: int = setting(10, "steps between two lines of the history", low=1)
    checkpoint_seconds: float = setting(60.0, "time between two checkpoints", low=0.0)


def find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in DEVICES:
        raise RequestError(f"unknown device '{name}': there are {', '.join(DEVICES)} and auto")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"device '{name}' cannot be used here: {str(error).splitlines()[0][:160]}") from error
    return device


def find_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The autocast type; None is full precision."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise RequestError(f"precision=fp16 needs a GPU; this is {device.type}: use fp32")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def find_rates(settings: TrainingSettings, defaults: tuple[float, float]) -> tuple[float, float]:
    """(source, adaptation): the settings', or where they give none the model's."""
    source, adaptation = defaults
    return (
        source if settings.source_rate is None else settings.source_rate,
        adaptation if settings.rate is None else settings.rate,
    )


def share_of(size: int, share: float) -> int:
    """How many texts of a batch that is; at least one."""
    return min(max(1, round(size * share)), size)


class Stream:
    """Labeled or unlabeled batches of some rows of a corpus, by step number."""

    def __init__(
        self, model: Any, tokens: Tokens, rows: np.ndarray, labels: np.ndarray | None, size: int, seed: int,
        *, extra: np.ndarray | None = None, extra_share: float = 0.0,
    ) -> None:  # fmt: skip
        """`extra` rows, if any, make up `extra_share` of every batch instead of coming at random among the others."""
        self.model, self.tokens = model, tokens
        # On the device as a whole, so that a batch is one small transfer.
        self.labels = None if labels is None else torch.from_numpy(labels).to(model.device)
        lengths = np.asarray(tokens.lengths)
        few = 0
        if extra is not None and len(extra) and extra_share:
            few = share_of(size, extra_share)
            rows = np.setdiff1d(rows, extra)
        self.parts = []
        bucket = 50 if getattr(tokens, "padded", True) else 1  # sorting by length is for the sake of padding alone
        if size - few > 0 and len(rows):
            self.parts.append((rows, Batches(lengths[rows], size - few, seed, bucket)))
        if few:
            self.parts.append((np.asarray(extra), Batches(lengths[extra], few, seed + 1, bucket)))
        self.per_epoch = self.parts[0][1].batches_per_epoch

    def rows(self, step: int) -> np.ndarray:
        return np.concatenate([rows[batches(step)] for rows, batches in self.parts])

    def __call__(self, step: int) -> Batch:
        return self.of(self.rows(step))

    def of(self, rows: np.ndarray) -> Batch:
        numbers = on_device(np.asarray(rows, dtype=np.int64), self.model.device)
        return Batch(self.model.collate(self.tokens, rows), None if self.labels is None else self.labels[numbers], numbers)


class Trainer:
    """Runs `steps` steps of a method. `after(done)` is called behind each step: evaluations and checkpoints live there."""

    def __init__(
        self,
        method: Method,
        settings: TrainingSettings,
        *,
        name: str,
        steps: int,
        rate: float,
        source: Stream,
        target: Stream | None,
        progress: Progress,
        optimizer: str | None = None,
        schedule: str | None = None,
        record: Callable[[dict[str, Any]], None] = lambda line: None,
        after: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.method, self.settings, self.name, self.steps, self.base_rate = method, settings, name, steps, rate
        self.source, self.target, self.progress, self.record, self.after = source, target, progress, record, after
        self.schedule = schedule or settings.schedule
        self.optimizer = make_optimizer(method, settings, optimizer or settings.optimizer, rate)
        scaled = method.model.precision is torch.float16
        self.scaler = torch.amp.GradScaler(method.model.device.type, enabled=scaled)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._norm: Tensor | None = None
        self._rate = rate

    def rate(self) -> float:
        """The current learning rate, before layer-wise decay."""
        return self._rate

    def run(self, first: int = 0) -> None:
        with self.progress.stage(self.name, self.steps):
            self.progress.advance(first)
            for step in range(first, self.steps):
                self._set_rate(step)
                target = self.target(step) if self.target is not None else None
                try:
                    log = self.method.step(step, self.source(step), target, self.update)
                except torch.OutOfMemoryError as error:
                    raise RunError(
                        f"{self.name}, step {step + 1}: the GPU's memory is full; set a smaller batch_size or max_length, "
                        "or frozen_layers"
                    ) from error
                last = step + 1 == self.steps
                if step % self.settings.log_every == 0 or last:
                    self._log(step, log)
                else:
                    self.progress.advance(step + 1)
                self.after(step + 1)

    def update(
        self, loss: Tensor | None, between: Callable[[], None] | None = None, gradients: dict[str, Tensor] | None = None
    ) -> None:
        """Backward, clipping, one optimizer step; what `methods.Update` says."""
        if loss is not None:
            self.scaler.scale(loss).backward()
        if gradients:
            scale = self.scaler.scale(torch.ones((), device=self.method.model.device)) if self.scaler.is_enabled() else None
            for name, parameter in self.method.model.trainable().items():
                if name in gradients:
                    gradient = gradients[name] if scale is None else gradients[name] * scale
                    # Contiguous: the fused kernels on the CPU read the memory and not the strides.
                    parameter.grad = gradient.contiguous() if parameter.grad is None else parameter.grad.add_(gradient)
        if between is not None:
            between()
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            self._norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)  # now, so that the next step's passes have that memory

    # ------------------------------------------------------------------ resuming

    def state(self) -> dict[str, Tensor]:
        """Optimizer and scaler as named tensors."""
        tensors = {}
        for number, parameter in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"{number}.{key}"] = torch.as_tensor(value)
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            tensors["scale"] = torch.tensor([scaler["scale"], scaler["_growth_tracker"]], dtype=torch.float64)
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            if name == "scale":
                scaler = self.scaler.state_dict()
                scaler.update(scale=float(value[0]), _growth_tracker=int(value[1]))
                self.scaler.load_state_dict(scaler)
                continue
            number, key = name.split(".", 1)
            parameter = self.parameters[int(number)]
            # Adam counts its steps in a CPU tensor unless it is fused: leave it where the optimizer expects it.
            place = value if key == "step" and not self._fused else value.to(parameter.device)
            self.optimizer.state[parameter][key] = place

    @property
    def _fused(self) -> bool:
        return bool(self.optimizer.param_groups[0].get("fused"))

    # ------------------------------------------------------------------ inside

    def _set_rate(self, step: int) -> None:
        if self.schedule == "assumption-2":  # Assumption 2: eta_t = min(1, k1 / t), with k1 the base rate
            self._rate = rates.assumption_theta(step + 1, k1=self.base_rate)
        else:
            warmup = round(self.settings.warmup * self.steps)
            self._rate = self.base_rate * rates.SCHEDULES[self.schedule](step, self.steps, warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * group["factor"]

    def _log(self, step: int, log: dict[str, Tensor | float]) -> None:
        figures = {name: float(value) for name, value in log.items()}
        if self._norm is not None:
            figures["gradient_norm"] = float(self._norm)
        for name, value in figures.items():
            if name.endswith("loss") and not math.isfinite(value):
                raise RunError(f"{self.name}, step {step + 1}: {name} is {value}; try a smaller learning rate")
        line: dict[str, Any] = {"stage": self.name, "step": step + 1, "rate": self._rate}
        line |= {name: value if math.isfinite(value) else None for name, value in figures.items()}
        shown = {name.replace("_", " "): value for name, value in figures.items() if name != "gradient_norm"}
        index = self.method.indexes()
        if index is not None and len(index):
            at = torch.tensor([0.1, 0.5, 0.9], device=index.device, dtype=index.dtype)
            # Sorting a million of them would take longer than the steps between two lines; a thin sample says the same.
            line["index_quantiles"] = torch.quantile(index[:: -(-len(index) // QUANTILE_SAMPLE)], at).tolist()
            shown["index"] = "/".join(f"{value:.2f}" for value in line["index_quantiles"])  # type: ignore[assignment]
        self.record(line)
        self.progress.advance(step + 1, shown)


def make_optimizer(method: Method, settings: TrainingSettings, kind: str, rate: float) -> torch.optim.Optimizer:
    """Groups by layer (rates fall by `layer_decay` from the top) and by whether weight decay applies."""
    model = method.model
    named = list(model.trainable().items())
    depths = model.depths() if settings.layer_decay < 1 else {}
    top = max(depths.values(), default=0)
    named += [(f"{part}.{name}", p) for part, module in method.modules().items() for name, p in module.named_parameters()]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = method.rate_factor(name) * settings.layer_decay ** (top - depths.get(name, top))
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    if not groups:
        raise RequestError("nothing to train: all layers are frozen")
    parts = [
        {"params": parameters, "lr": rate * factor, "weight_decay": decay, "factor": factor}
        for (factor, decay), parameters in groups.items()
    ]
    optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    return optimizer(parts, lr=rate, fused=model.device.type in FUSED)
