"""Losses and gradients that are not finite: the step is skipped and told with its texts; too many of them end the run.

A skipped step changes neither weights nor optimizer nor what a method keeps between steps. On a CPU every step is looked at when
it is done. On a GPU that would make the CPU wait, so the update is skipped there, by the optimizer's own kernel, and the CPU
looks at the flags of several steps at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtem import parallel
from mtem.errors import RunError
from mtem.methods.base import Batch, Method, StepLog, without_dropout
from mtem.training import checkpoints

LOOK_EVERY = 20  # steps on a GPU between two looks at the flags
MOST_NAMED = 5  # texts in a message

logger = logging.getLogger(__name__)

Describe = Callable[[str, list[int]], list[str]]  # "source" or "target", rows -> file and row of each, or nothing


class StepGuard:
    """Watches the steps of a trainer.

    Parameters
    ----------
    method
        Whose state is kept.
    name
        Of the stage.
    limit
        Number of steps that may be skipped.
    deferred
        Whether the device skips and the CPU looks later: on a GPU, and where steps are captured.
    batches
        Returns the source and the target batch of a step again.
    record
        Called with a line for the history.
    describe
        Returns file and row of texts; None: their row numbers are told.
    """

    def __init__(
        self, method: Method, name: str, limit: int, *, deferred: bool,
        batches: Callable[[int], tuple[Batch, Batch | None]], record: Callable[[dict[str, Any]], None],
        describe: Describe | None = None,
    ) -> None:  # fmt: skip
        self.method, self.name, self.limit, self.deferred = method, name, limit, deferred
        self.batches, self.record, self.describe = batches, record, describe
        self.steps = self.skipped = 0
        self._bad = torch.zeros((), device=method.model.device)  # 1: an update of this step was skipped
        self._flags: list[tuple[int, Tensor]] = []  # of steps that were not looked at yet
        self._before: dict[str, Tensor] = {}
        self._align: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Keep what the next step may have to get back."""
        self._bad.zero_()
        self._before = {name: value.clone() for name, value in self._state().items()}
        self._align = self.method.context.align.state()

    def check_update(self, loss: Tensor | None, norm: Tensor | None) -> Tensor | None:
        """Note an update whose loss or gradient is not finite.

        Parameters
        ----------
        loss
            The loss, if there is one.
        norm
            The norm of the gradient; None where infinite gradients are expected, as with scaled losses.

        Returns
        -------
        Tensor or None
            1 if the update must be skipped and else 0, to be read by the device; None if `deferred` is false and all is well.
        """
        values = [value.detach().float() for value in (loss, norm) if value is not None]
        if not values:
            return None
        bad = (~torch.isfinite(torch.stack(values))).any().float()
        if not self.deferred:  # of several processes all skip, or none
            if not parallel.anyone(bool(bad)):
                return None
            bad = torch.ones_like(bad)
        self._bad.copy_(torch.maximum(self._bad, bad))
        return bad

    def end(self, step: int, log: StepLog) -> None:
        """Undo the step if a loss, a gradient or the method's state is not finite.

        Raises
        ------
        RunError
            If more steps than the limit were skipped.
        """
        self.steps += 1
        state = self._state()
        losses = [value for name, value in log.items() if name.endswith("loss")]
        if not all(isinstance(value, Tensor) or math.isfinite(value) for value in losses):
            self._bad.fill_(1.0)
        values = [value for value in (*losses, *state.values()) if isinstance(value, Tensor) and value.is_floating_point()]
        bad = torch.stack([self._bad > 0, *(~torch.isfinite(value).all() for value in values)]).any()
        if self.deferred:
            for name, value in state.items():
                value.copy_(torch.where(bad, self._before[name], value))
            bias = self.method.context.align.bias
            if bias is not None:
                bias.copy_(torch.where(bad, self._align["bias"].to(bias), bias))
            self._flags.append((step, bad))
            if len(self._flags) >= LOOK_EVERY:
                self.look()
        elif parallel.anyone(bool(bad)):
            self.restore()
            self._report(step, {name: float(value) for name, value in log.items() if name.endswith("loss")})

    def look(self) -> None:
        """Read the flags of the steps since the last look."""
        flags, self._flags = self._flags, []
        if not flags:
            return
        for (step, _), bad in zip(flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True):
            if bad:
                self._report(step, {})

    def finish(self) -> None:
        """After the last step: look again, and refuse a stage of which half was skipped."""
        self.look()
        if self.skipped > 1 and 2 * self.skipped >= self.steps:
            raise RunError(f"{self.name}: {self.skipped} of {self.steps} steps were skipped, {_NOT_FINITE}; {_ADVICE}")

    def restore(self) -> None:
        """Give the method back what it kept before the step."""
        average = {f"average.{name}": value for name, value in self.method.average.items()}
        self.method.load_state({**average, **self._before})
        self.method.context.align.load_state(self._align)

    def _state(self) -> dict[str, Tensor]:
        """Return what the method keeps between steps, without its average: that follows the weights."""
        return {name: value for name, value in self.method.state().items() if not name.startswith("average.")}

    def _report(self, step: int, losses: Mapping[str, float]) -> None:
        self.skipped += 1
        wrong = [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        reason = wrong[0] if wrong else _NOT_FINITE
        rows = self._find_texts(step)
        self.record({"stage": "notice", "of": self.name, "step": step + 1, "skipped": reason, "texts": rows})
        texts = "; ".join(f"{kind} {', '.join(self._named(kind, found))}" for kind, found in rows.items() if found)
        if self.skipped > self.limit:
            before = f", as in {self.limit} steps before" if self.limit else ""
            raise RunError(f"{self.name}, step {step + 1}: {reason}{before} ({texts}); the last checkpoint is good; {_ADVICE}")
        logger.warning(
            "%s, step %d: %s; the step was skipped (%d of at most %d); %s",
            self.name, step + 1, reason, self.skipped, self.limit, texts,
        )  # fmt: skip

    @torch.no_grad()
    def _find_texts(self, step: int) -> dict[str, list[int]]:
        """Return the rows whose logits are not finite; if all are, those of both batches."""
        model, generator = self.method.model, self.method.context.generator
        state = checkpoints.random_state(generator)
        found: dict[str, list[int]] = {}
        everything: dict[str, list[int]] = {}
        for kind, batch in zip(("source", "target"), self.batches(step), strict=True):
            if batch is not None:
                with without_dropout(model):
                    finite = torch.isfinite(model(batch.inputs)).all(dim=1)
                found[kind], everything[kind] = batch.rows[~finite].tolist(), batch.rows.tolist()
        checkpoints.restore_random_state(state, generator)
        return found if any(found.values()) else everything

    def _named(self, kind: str, rows: list[int]) -> list[str]:
        names = None if self.describe is None else self.describe(kind, rows[:MOST_NAMED])
        named = names or [f"row {row}" for row in rows[:MOST_NAMED]]
        return [*named, *([f"and {len(rows) - MOST_NAMED} more"] if len(rows) > MOST_NAMED else [])]


_NOT_FINITE = "the loss or the gradient is not finite"
_ADVICE = "try a smaller learning rate, or look at these texts"
