"""Steps as CUDA graphs: a step with inputs of a known shape is captured once and then replayed.

Small encoders keep a GPU busy for a fraction of a step; for the rest it waits until the CPU has launched the next kernel. A
replay launches all kernels of a step at once. The arithmetic is the same.

The first step with inputs of some shapes runs as always, the second is captured, later ones are replayed. So that shapes recur,
training batches are padded to a few lengths (`length_multiple`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from mtem import parallel
from mtem.capture import HostValues, recorded
from mtem.errors import RunError
from mtem.methods.base import Batch, Method, StepLog
from mtem.models.base import Model
from mtem.training import checkpoints
from mtem.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

LENGTHS = 4  # about so many different lengths of padded batches
MOST_GRAPHS = 100
FURTHER = ("target_labeled", "outer")  # batches of a step that the method asks its context for

Step: TypeAlias = Callable[[int, Batch, "Batch | None"], StepLog]
# Runs a function in such a way that the kernels it launches can be launched again; returns its result and a function that does.
Capture: TypeAlias = Callable[[Callable[[], StepLog]], tuple[StepLog, Callable[[], None]]]


def length_multiple(model: Model, lengths: int = LENGTHS) -> int:
    """Return the number of tokens that the lengths of training batches are multiples of; 1 where no steps are captured.

    Parameters
    ----------
    model
        The model that reads the batches.
    lengths
        About so many different lengths are wanted. More of them mean less padding and more graphs to capture.
    """
    if not model.replayable or model.device.type != "cuda" or model.max_length is None:
        return 1
    return max(32, -(-model.max_length // (32 * lengths)) * 32)


def find_capture(method: Method, settings: TrainingSettings) -> Capture | None:
    """Return how the steps of a method are captured; None on a CPU, and where the settings, the method or the model forbid it."""
    if method.model.device.type != "cuda" or not settings.cuda_graphs:
        return None
    if parallel.is_together():
        logger.info("steps run without CUDA graphs: several processes wait for each other inside them")
        return None
    if method.model.microbatches > 1 or method.model.activation_checkpointing:
        logger.info("steps run without CUDA graphs: they would repeat the random draws of recomputed passes")
        return None
    for name, replayable in ((method.name, method.replayable), (type(method.model).__name__, method.model.replayable)):
        if not replayable:
            logger.info("steps run without CUDA graphs: %s is not declared replayable", name)
            return None
    return cuda_capture()


def cuda_capture() -> Capture:
    """Return a function that captures CUDA graphs, all of them in the same memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], StepLog]) -> tuple[StepLog, Callable[[], None]]:
        torch.cuda.empty_cache()  # the memory of the steps before, for the graph's own
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                log = run()
        except BaseException:
            generator.graphsafe_set_state(before)  # it would go on to believe in the capture
            raise
        return log, graph.replay

    return capture


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not in the ``with`` block: the end of an older graph would disturb the capture of a new one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclasses.dataclass
class _Graph:
    """A captured step: where its inputs are, what it takes from the CPU, and what it logs."""

    batches: tuple[Batch | None, ...]
    values: HostValues
    log: StepLog
    replay: Callable[[], None]


class StepGraphs:
    """Runs the steps of a method, replayed where possible.

    Parameters
    ----------
    method
        The method.
    step
        Runs one of its steps, from its number and its batches, and returns what is logged.
    capture
        How steps are captured.
    """

    def __init__(self, method: Method, step: Step, capture: Capture) -> None:
        self.method, self._step, self.capture = method, step, capture
        self.active = True
        self._seen: dict[Any, HostValues] = {}
        self._graphs: dict[Any, _Graph] = {}

    @property
    def count(self) -> int:
        """The number of captured steps."""
        return len(self._graphs)

    def step(self, number: int, source: Batch, target: Batch | None) -> StepLog:
        """Run one step of the method, as `Method.step` does. What it logs is valid until the next step."""
        makers = [getattr(self.method.context, name) if self.active else None for name in FURTHER]
        batches = (source, target, *(None if make is None else make(number) for make in makers))
        key = tuple(_signature(batch) for batch in batches)
        if key in self._graphs:
            return self._replay(self._graphs[key], number, batches)
        if not self.active or len(self._graphs) >= MOST_GRAPHS:
            return self._run(number, batches)
        if key not in self._seen:
            self._seen[key] = HostValues()
            with recorded(self._seen[key]):
                return self._run(number, batches)
        graph = self._captured(number, batches, self._seen[key])
        if graph is None:
            return self._run(number, batches)
        self._graphs[key] = graph
        return graph.log

    def _run(self, number: int, batches: tuple[Batch | None, ...]) -> StepLog:
        source, target, *further = batches
        context = self.method.context
        originals = {name: getattr(context, name) for name in FURTHER}
        for name, batch in zip(FURTHER, further, strict=True):
            if batch is not None:
                setattr(context, name, lambda _, batch=batch: batch)
        try:
            return self._step(number, cast(Batch, source), target)
        finally:
            for name, original in originals.items():
                setattr(context, name, original)

    def _replay(self, graph: _Graph, number: int, batches: tuple[Batch | None, ...]) -> StepLog:
        for static, batch in zip(graph.batches, batches, strict=True):
            _copy(static, batch)
        graph.values.refill(number)
        graph.replay()
        return graph.log

    def _captured(self, number: int, batches: tuple[Batch | None, ...], values: HostValues) -> _Graph | None:
        """Capture the step and run it once; None, with nothing changed, if that is not possible."""
        static = tuple(_static(batch) for batch in batches)
        context = self.method.context
        state = checkpoints.random_state(context.generator)
        try:
            with values.capture(number):
                log, replay = self.capture(lambda: self._run(number, static))
        except torch.OutOfMemoryError:
            reason = "there is too little memory for it"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        else:
            numbers = [name for name, value in log.items() if not isinstance(value, Tensor)]
            if numbers:
                raise RunError(f"{self.method.name}: a replayable step must log tensors, but '{numbers[0]}' is a number")
            values.send()
            replay()
            return _Graph(static, values, log, replay)
        self.active = False
        self._graphs = {}  # they draw from a generator that still takes itself to be captured
        self.method.model.zero_grad(set_to_none=True)
        checkpoints.restore_random_state(state, context.generator)
        logger.warning("steps run without CUDA graphs: one could not be captured (%s)", reason)
        return None


def _signature(batch: Batch | None) -> Any:
    """Return what a graph needs to be the same: names, shapes and types of all tensors, and which are constant."""
    if batch is None:
        return None
    values = {**batch.inputs, " labels": batch.labels, " rows": batch.rows}
    return tuple(
        (name, value.shape, value.dtype, _is_constant(value)) for name, value in sorted(values.items()) if value is not None
    )


def _is_constant(value: Tensor) -> bool:
    """Return whether the tensor is one value, expanded: a mask without padding."""
    return value.dim() > 0 and value.numel() > 1 and not any(value.stride())


def _static(batch: Batch | None) -> Batch | None:
    """Return a copy of a batch whose tensors keep their addresses."""
    if batch is None:
        return None
    inputs = {name: value if _is_constant(value) else value.clone() for name, value in batch.inputs.items()}
    return Batch(inputs, None if batch.labels is None else batch.labels.clone(), batch.rows.clone())


def _copy(static: Batch | None, batch: Batch | None) -> None:
    if static is None or batch is None:
        return
    for name, value in batch.inputs.items():
        if not _is_constant(value):
            static.inputs[name].copy_(value)
    static.rows.copy_(batch.rows)
    if static.labels is not None and batch.labels is not None:
        static.labels.copy_(batch.labels)
