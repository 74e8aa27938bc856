r"""Several processes that train one model: which part of a batch each of them computes, and what they tell each other.

Every process runs the same program with the same batches. A pass of the model is divided: each process computes its own examples,
and the outputs are gathered, so that all have the logits of the whole batch and compute the same loss, whatever it is. With
:math:`P` processes, the backward pass multiplies the gradient of a process's own outputs by :math:`P`. Then the mean over the
processes of any gradient is the gradient of the loss: below the gathered outputs each process has the part of its examples,
:math:`P` times too large, and above them each has all of it.

.. math:: \frac 1 P \sum_p P \sum_{i \in B_p} \frac{\partial L}{\partial z_i} \frac{\partial z_i}{\partial \theta}
    = \frac{\partial L}{\partial \theta}

So a method needs no line of its own for several processes. Random draws of a method come from the run's generator, which has
the same state everywhere; dropout is drawn by each process for its own examples.

Hugging Face Accelerate knows where the processes are and which device each of them has.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mtem import liveness
from mtem.errors import RequestError, RunError

TIMEOUT = datetime.timedelta(hours=2)  # one process may tokenize a large corpus while the others wait
BUCKET = 2**24  # numbers that are sent at once

Value = TypeVar("Value")


class _Group(NamedTuple):
    """The processes of a run."""

    rank: int
    size: int
    control: dist.ProcessGroup | None  # over the CPU, for what is not on the device; None: the default group


_group: _Group | None = None
_together = False


def start(device: torch.device) -> torch.device:
    """Join the other processes of the run, if a launcher has started any.

    Parameters
    ----------
    device : torch.device
        The device that was asked for.

    Returns
    -------
    torch.device
        The device of this process.

    Raises
    ------
    RequestError
        If there are more processes than GPUs, or the device is of a kind that only one process can use.
    """
    global _group
    if liveness.launched() == 1:
        return device
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"device {device.type}: several processes train on cpu or cuda; give --set device=cpu, or one process")
    if device.type == "cuda":
        here, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > found:
            raise RequestError(
                f"{here} processes on this machine, but it has {found} GPU{'s' * (found != 1)}: start one process per GPU, or "
                "give --set device=cpu"
            )
    if _group is None:
        _group = _join(device)
    if device.type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def _join(device: torch.device) -> _Group:
    from accelerate import PartialState

    try:
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        threads = torch.get_num_threads()
        state = PartialState(
            cpu=device.type == "cpu", store=PrefixStore("mtem", store), rank=rank, world_size=size, timeout=TIMEOUT
        )
        torch.set_num_threads(threads)  # as the user or the launcher has it
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if device.type == "cuda" else None
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"the processes of this run could not join each other: {_first_line(error)}") from error
    liveness.watch(store, state.process_index, state.num_processes, is_together)
    return _Group(state.process_index, state.num_processes, control)


def stop() -> None:
    """Leave the other processes, at the end of a run."""
    global _group
    if _group is not None:
        liveness.end()
        dist.destroy_process_group()
        _group = None


def size() -> int:
    """Return the number of processes of the run."""
    return 1 if _group is None else _group.size


def rank() -> int:
    """Return the number of this process, from 0."""
    return 0 if _group is None else _group.rank


def is_main() -> bool:
    """Return whether this is the process that writes files and shows progress."""
    return rank() == 0


# ---------------------------------------------------------------------- together or alone


def is_together() -> bool:
    """Return whether all processes are at this place of the program and divide its passes."""
    return _together


@contextlib.contextmanager
def together(enabled: bool = True) -> Iterator[None]:
    """Divide the passes inside the ``with`` block, which all processes enter."""
    global _together
    before, _together = _together, enabled and size() > 1
    try:
        yield
    finally:
        _together = before


def alone() -> contextlib.AbstractContextManager[None]:
    """Return a context whose passes this process computes alone, whatever the others do."""
    return together(False)


# ---------------------------------------------------------------------- examples of a batch


class Part(NamedTuple):
    """The examples of a batch that this process computes.

    Attributes
    ----------
    rows : slice
        What it computes: at least one example, so that every process runs every pass.
    kept : int
        How many of these are its own: 0 or all.
    """

    rows: slice
    kept: int


def part_of(count: int) -> Part:
    """Return the part of a batch of `count` examples that this process computes; all of it where no pass is divided."""
    if not is_together():
        return Part(slice(0, count), count)
    own = own_rows(count)
    return Part(own, own.stop - own.start) if own.stop > own.start else Part(slice(0, 1), 0)


def spread(run: Callable[[slice], tuple[Tensor, ...]], count: int) -> tuple[Tensor, ...]:
    """Run a pass on this process's part of a batch, and return its outputs for the whole batch.

    Parameters
    ----------
    run : callable
        From the rows of the batch to tensors with one row each.
    count : int
        The examples of the batch.
    """
    part = part_of(count)
    with alone():  # a pass that calls another one divides the batch once
        outputs = run(part.rows)
    return tuple(gather(output[: part.kept], count) for output in outputs)


def gather(own: Tensor, count: int) -> Tensor:
    """Return the rows of all processes, from this process's own ones; the gradient in these is multiplied by their number."""
    return cast(Tensor, _Gather.apply(own, count)) if is_together() else own  # type: ignore[no-untyped-call]


def gather_derivatives(computed: Tensor, count: int) -> Tensor:
    """Return one derivative for each example of a batch, from those that a backward pass through `gather` has computed here."""
    return gather(computed[: part_of(count).kept], count) / size() if is_together() else computed


class _Gather(torch.autograd.Function):
    # In the form that torch.func.jvp can differentiate.

    @staticmethod
    def forward(own: Tensor, count: int) -> Tensor:
        return _gathered(own, count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.count = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return size() * gradient[own_rows(ctx.count)], None

    @staticmethod
    def jvp(ctx: Any, own: Tensor, _: None) -> Tensor:
        return _gathered(own, ctx.count)


def _gathered(own: Tensor, count: int) -> Tensor:
    whole = torch.zeros((count, *own.shape[1:]), dtype=own.dtype, device=own.device)
    whole[own_rows(count)] = own
    _sum(whole)
    return whole


def own_rows(count: int) -> slice:
    """Return the rows of a batch whose outputs are this process's own."""
    return slice(count * rank() // size(), count * (rank() + 1) // size())


# ---------------------------------------------------------------------- gradients


@torch.no_grad()
def average(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the means of tensors over the processes; the tensors themselves where no pass is divided."""
    if not is_together():
        return tensors
    averaged = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    average_(list(averaged.values()))
    return averaged


@torch.no_grad()
def average_(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their means over the processes."""
    if not is_together():
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        _sum(flat)
        flat /= size()
        for tensor, values in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type that are sent together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        numbers = 0
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            bucket.append(tensor)
            numbers += tensor.numel()
            if numbers >= BUCKET:
                yield bucket
                bucket, numbers = [], 0
        if bucket:
            yield bucket


# ---------------------------------------------------------------------- agreement


@torch.no_grad()
def copy_from_main(tensors: Sequence[Tensor]) -> None:
    """Give the tensors of all processes the values that the main process has."""
    if is_together():
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            _attempt(functools.partial(dist.broadcast, whole, src=0))
            tensor.copy_(whole)


def anyone(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    if not is_together():
        return flag
    values: list[Any] = [None] * size()
    _attempt(lambda: dist.all_gather_object(values, flag, group=_joined().control))
    return any(values)


def agreed(value: Value) -> Value:
    """Return the value that the main process has."""
    if not is_together():
        return value
    values: list[Any] = [value]
    _attempt(lambda: dist.broadcast_object_list(values, src=0, group=_joined().control))
    return cast(Value, values[0])


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the block in the main process, then in the others: what the first one stores, they find."""
    if is_together() and not is_main():
        agreed(None)
    with alone() if is_together() else contextlib.nullcontext():
        yield
    if is_together() and is_main():
        agreed(None)


# ---------------------------------------------------------------------- one number for each text


class OwnedRows:
    """One number for each of many rows, each of which lives in one process: row r in process r modulo their number.

    All processes read and write the same rows at the same time.

    Parameters
    ----------
    count : int
        The number of rows.
    value : float
        What all rows have at first.
    like : Tensor
        A tensor of the type and on the device that the numbers are to have.
    """

    def __init__(self, count: int, value: float, like: Tensor) -> None:
        self.count = count
        self.own = torch.full((len(range(rank(), count, size())),), value, dtype=like.dtype, device=like.device)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the numbers of some rows."""
        mine = rows % size() == rank()
        values = torch.zeros(rows.shape, dtype=self.own.dtype, device=self.own.device)
        values[mine] = self.own[rows[mine] // size()]
        _sum(values)
        return values

    def __setitem__(self, rows: Tensor, values: Tensor) -> None:
        """Set the numbers of some rows."""
        mine = rows % size() == rank()
        self.own[rows[mine] // size()] = values[mine].to(self.own.dtype)

    def whole(self) -> Tensor:
        """Return the numbers of all rows."""
        values = torch.zeros(self.count, dtype=self.own.dtype, device=self.own.device)
        values[rank() :: size()] = self.own
        _sum(values)
        return values

    def copy_(self, values: Tensor) -> None:
        """Take the numbers of all rows, or one number for all."""
        self.own.copy_(values.expand(self.count)[rank() :: size()])


Rows = Tensor | OwnedRows


def new_rows(count: int, value: float, like: Tensor) -> Rows:
    """Return one number for each of `count` rows, of the type and on the device of `like`."""
    if is_together():
        return OwnedRows(count, value, like)
    return torch.full((count,), value, dtype=like.dtype, device=like.device)


def whole_rows(rows: Rows) -> Tensor:
    """Return the numbers of all rows, gathered from their owners."""
    return rows.whole() if isinstance(rows, OwnedRows) else rows


# ---------------------------------------------------------------------- inside


def _joined() -> _Group:
    assert _group is not None
    return _group


def _sum(tensor: Tensor) -> None:
    """Replace a tensor by the sum over the processes."""
    _attempt(lambda: dist.all_reduce(tensor))


def _attempt(communicate: Callable[[], Any]) -> None:
    """Communicate; an error means that a process is gone."""
    try:
        communicate()
    except RuntimeError as error:
        raise RunError(f"{liveness.LOST} ({_first_line(error)}); {liveness.CONTINUE}") from error


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2][:120] or line[:120]  # without the place in torch's sources
