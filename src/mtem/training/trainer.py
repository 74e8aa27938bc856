"""The training loop: batches in, steps of a method out, on any device and precision."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtem import interrupts, parallel, schedules
from mtem.capture import is_recording
from mtem.errors import RunError
from mtem.memory import release_free_memory
from mtem.methods.base import Batch, Method, StepLog
from mtem.progress import Progress
from mtem.training.graphs import Capture, StepGraphs, find_capture
from mtem.training.guard import Describe, StepGuard
from mtem.training.optimizer import make_optimizer
from mtem.training.rewind import StepStart, use_less_memory
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream

RELEASE_EVERY = 3  # steps on a CPU between two releases of free memory
QUANTILE_SAMPLE = 20_000  # largest number of indexes that quantiles in the history are computed from

logger = logging.getLogger(__name__)


class Trainer:
    """Runs steps of a method.

    Parameters
    ----------
    method
        What is trained, and how.
    settings
        Clipping, logging, optimizer and schedule.
    name
        Of the stage, in the history and on the progress bar.
    steps, learning_rate
        Number of steps, and the base learning rate.
    last_step
        Where to stop, if before the end of the schedule.
    source, target
        Labeled and unlabeled batches by step number.
    progress
        Where the progress is shown.
    optimizer, schedule
        In place of those of the settings.
    capture
        How steps are captured to be replayed; None: as CUDA graphs, where there is a GPU and the settings allow it.
    record
        Called with every line of the history.
    after_step
        Called after each step with the number of steps done: evaluations and checkpoints happen here.
    before_stop
        Called with the number of steps done if a signal ends the run after this step (see `mtem.interrupts`).
    describe
        Returns file and row of texts, for messages on losses that are not finite.
    """

    def __init__(
        self,
        method: Method,
        settings: TrainingSettings,
        *,
        name: str,
        steps: int,
        learning_rate: float,
        source: Stream,
        target: Stream | None,
        progress: Progress,
        optimizer: str | None = None,
        schedule: str | None = None,
        last_step: int | None = None,
        capture: Capture | None = None,
        record: Callable[[dict[str, Any]], None] = lambda line: None,
        after_step: Callable[[int], None] = lambda done: None,
        before_stop: Callable[[int], None] = lambda done: None,
        describe: Describe | None = None,
    ) -> None:
        self.method, self.settings, self.name, self.steps, self.base_learning_rate = method, settings, name, steps, learning_rate
        self.source, self.target, self.progress, self.record, self.after_step = source, target, progress, record, after_step
        self.before_stop = before_stop
        self.schedule = schedule or settings.schedule
        self.last_step = steps if last_step is None else last_step
        capture = find_capture(method, settings) if capture is None else capture
        self.graphs = None if capture is None else StepGraphs(method, self._step, capture)
        self.optimizer = make_optimizer(
            method, settings, optimizer or settings.optimizer, learning_rate, capturable=capture is not None
        )
        scaled = method.model.precision is torch.float16
        self.scaler = torch.amp.GradScaler(method.model.device.type, enabled=scaled)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # Of several processes each looks at once: what a method keeps between steps is gathered, and cannot be put back later.
        deferred = self._fused and (method.model.device.type == "cuda" or capture is not None) and not parallel.is_together()
        self.guard = StepGuard(
            method, name, settings.max_skipped_steps, deferred=deferred, batches=self._batches, describe=describe,
            record=lambda line: self.record(line),
        )  # fmt: skip
        self._updates = 0  # of the current step
        self._several_updates = True  # in a step; not known before the first
        self._norm: Tensor | None = None
        self._learning_rate = learning_rate

    def learning_rate(self) -> float:
        """Return the current learning rate, before layer-wise decay."""
        return self._learning_rate

    def run(self, first: int = 0) -> None:
        """Run the steps from number `first` on."""
        on_cpu = self.method.model.device.type == "cpu"
        with self.progress.stage(self.name, self.last_step), interrupts.deferred():
            self.progress.advance(first)
            for step in range(first, self.last_step):
                self._set_learning_rate(step)
                self._seed_dropout(step)
                log = self._attempt(step, *self._batches(step))
                self.guard.end(step, log)
                last = step + 1 == self.last_step
                if step % self.settings.log_every == 0 or last:
                    self.guard.look()
                    self._log(step, log)
                else:
                    self.progress.advance(step + 1)
                self.after_step(step + 1)
                if parallel.anyone(interrupts.pending()):
                    self.before_stop(step + 1)
                    interrupts.stop()
                if on_cpu and step % RELEASE_EVERY == 0:
                    release_free_memory()
            self.guard.finish()

    def _batches(self, step: int) -> tuple[Batch, Batch | None]:
        return self.source(step), self.target(step) if self.target is not None else None

    def _attempt(self, step: int, source: Batch, target: Batch | None) -> StepLog:
        """Take a step; out of memory, take it again from the same state with the batch in smaller parts."""
        while True:
            start = StepStart(self, copy=self._several_updates and not (self.graphs and self.graphs.active))
            self.guard.begin()
            self._updates = 0
            try:
                log = (self._step if self.graphs is None else self.graphs.step)(step, source, target)
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # its frames keep the tensors of the step
            else:
                self._several_updates = self._updates > 1
                return log
            self.graphs = None  # they keep memory, and cannot pass a batch in parts
            # Several processes end: the others are in the middle of the step, and cannot go back.
            possible = not parallel.is_together() and start.restore(self._updates)
            now = use_less_memory(self.method.model, source) if possible else None
            if now is None:
                raise RunError(
                    f"{self.name}, step {step + 1}: out of GPU memory; set microbatches=5 or activation_checkpointing=true "
                    "(the same results in more time), a smaller batch_size (of the pretraining: pretrain_batch_size) or "
                    "max_length, or frozen_layers"
                ) from failure
            self.guard.restore()
            logger.warning(
                "%s, step %d: out of GPU memory; it is taken again, and the rest of the stage, with %s", self.name, step + 1, now
            )
            self.record({"stage": "notice", "of": self.name, "step": step + 1, "out_of_memory": now})

    def _step(self, number: int, source: Batch, target: Batch | None) -> StepLog:
        # Only source training has no target batches, and its method ignores them.
        log = self.method.step(number, source, cast(Batch, target), self.update)
        self.method.update_average()
        return log if self._norm is None else {**log, "gradient_norm": self._norm}

    def update(
        self, loss: Tensor | None, before_step: Callable[[], None] | None = None, gradients: dict[str, Tensor] | None = None
    ) -> None:
        """Run the backward pass, clip, take one optimizer step; see `mtem.methods.Update`."""
        if loss is not None:
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if gradients:
            scale = self.scaler.scale(torch.ones((), device=self.method.model.device)) if self.scaler.is_enabled() else None
            for name, parameter in self.method.model.trainable().items():
                if name in gradients:
                    gradient = gradients[name] if scale is None else gradients[name] * scale
                    # Contiguous: the fused CPU kernels ignore strides.
                    parameter.grad = gradient.contiguous() if parameter.grad is None else parameter.grad.add_(gradient)
        parallel.average_([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if before_step is not None:
            before_step()
        norm: Tensor | None = None
        if self.settings.max_grad_norm:
            self.scaler.unscale_(self.optimizer)
            self._norm = norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        elif not self.scaler.is_enabled():
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        self._updates += 1
        bad = self.guard.check_update(loss, None if self.scaler.is_enabled() else norm)
        if self.guard.deferred and self._fused and not self.scaler.is_enabled():
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]  # read by the fused kernels: with 1 they change nothing
        elif bad is not None and not self.guard.deferred:
            self.optimizer.zero_grad(set_to_none=True)
            return
        known = len(self.optimizer.state)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if is_recording() and len(self.optimizer.state) != known:  # a replay would begin with an empty state each time
            raise RuntimeError("a parameter got its first gradient in this step")
        self.optimizer.zero_grad(set_to_none=True)  # frees memory before the next step

    # ------------------------------------------------------------------ resuming

    def state(self) -> dict[str, Tensor]:
        """Return the state of optimizer and scaler as named tensors."""
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
        """Load what `state` returned."""
        for name, value in tensors.items():
            if name == "scale":
                scaler = self.scaler.state_dict()
                scaler.update(scale=float(value[0]), _growth_tracker=int(value[1]))
                self.scaler.load_state_dict(scaler)
                continue
            number, key = name.split(".", 1)
            parameter = self.parameters[int(number)]
            # Adam counts its steps in a CPU tensor unless it is fused.
            moved = value if key == "step" and not self._fused else value.to(parameter.device)
            self.optimizer.state[parameter][key] = moved

    @property
    def _fused(self) -> bool:
        return bool(self.optimizer.param_groups[0].get("fused"))

    # ------------------------------------------------------------------ inside

    def _seed_dropout(self, step: int) -> None:
        """Let each of several processes draw its own dropout: a function of the step, so that a resumed run draws it again."""
        if parallel.is_together():
            name = f"{self.settings.seed} {self.name} {step} {parallel.rank()}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True))

    def _set_learning_rate(self, step: int) -> None:
        if self.schedule == "assumption-2":  # Assumption 2: eta_t = min(1, k1 / t), with k1 the base rate
            self._learning_rate = schedules.assumption_theta(step + 1, k1=self.base_learning_rate)
        else:
            warmup = round(self.settings.warmup_ratio * self.steps)
            self._learning_rate = self.base_learning_rate * schedules.SCHEDULES[self.schedule](step, self.steps, warmup)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._learning_rate * group["factor"])
            else:
                group["lr"] = self._learning_rate * group["factor"]

    def _log(self, step: int, log: dict[str, Tensor | float]) -> None:
        figures = {name: float(value) for name, value in log.items()}
        line: dict[str, Any] = {"stage": self.name, "step": step + 1, "learning_rate": self._learning_rate}
        line |= {name: value if math.isfinite(value) else None for name, value in figures.items()}
        shown = {name.replace("_", " "): value for name, value in figures.items() if name != "gradient_norm"}
        index = self.method.indexes()
        if index is not None and len(index):
            at = torch.tensor([0.1, 0.5, 0.9], device=index.device, dtype=index.dtype)
            # Sorting a million indexes would take longer than the steps between two lines, so a sample is used.
            line["index_quantiles"] = torch.quantile(index[:: -(-len(index) // QUANTILE_SAMPLE)], at).tolist()
            if len(set(line["index_quantiles"])) > 1:
                shown["index"] = "/".join(f"{value:.2f}" for value in line["index_quantiles"])  # type: ignore[assignment]
        self.record(line)
        self.progress.advance(step + 1, shown)
