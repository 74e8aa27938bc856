"""Values that travel from the CPU to a device: sent without waiting, and made anew each time a captured step is replayed.

A CUDA graph repeats the kernels of a step with the very numbers and addresses of its capture. What the CPU computes for a step
(random draws, learning rates, temperatures) must reach the device through `from_host` or `by_step`. Otherwise every replay would
repeat the values of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor


class HostValues:
    """The values that a step got from the CPU while it was captured, in the order in which it asked for them.

    Attributes
    ----------
    number : int
        The number of the step, for values that depend on it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        self._entries: list[tuple[Callable[[], Tensor | float], Tensor]] = []
        self._new: list[Tensor] = []  # the values of the captured step itself, until they are sent

    def add(self, make: Callable[[], Tensor | float], device: torch.device) -> Tensor:
        """Return a tensor on the device that `send` and `refill` fill with the value."""
        value = _as_tensor(make())
        # On a stream that is not captured: the graph uses its own memory for several tensors, one after the other.
        with torch.cuda.stream(self._stream):
            buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
        self._entries.append((make, buffer))
        self._new.append(value)
        return buffer

    def send(self) -> None:
        """Fill the tensors with the values that were made during the capture."""
        for (_, buffer), value in zip(self._entries, self._new, strict=True):
            buffer.copy_(_pinned(value, buffer.device), non_blocking=True)
        self._new = []

    def refill(self, number: int) -> None:
        """Make all values again, for the step `number`, and fill the tensors with them."""
        self.number = number
        for make, buffer in self._entries:
            buffer.copy_(_pinned(_as_tensor(make()), buffer.device), non_blocking=True)


_recording: ContextVar[HostValues | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recorded(values: HostValues) -> Iterator[None]:
    """Collect what `from_host` and `by_step` return inside the ``with`` block."""
    token = _recording.set(values)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Return whether a step is being captured."""
    return _recording.get() is not None


def from_host(make: Callable[[], Tensor | float], device: torch.device) -> Tensor | float:
    """Return a value that the CPU computes.

    Parameters
    ----------
    make : callable
        Returns a number or a CPU tensor, always of the same shape. It is called again at every replay of a captured step, so
        it may depend on generators and on attributes that change, not on the number of the step: see `by_step`.
    device : torch.device
        Where a tensor is sent.

    Returns
    -------
    Tensor or float
        What `make` returned, a tensor on the device. While a step is captured a number is a tensor too, float32 without axes.
    """
    values = _recording.get()
    if values is not None:
        return values.add(make, device)
    value = make()
    return send(value, device) if isinstance(value, Tensor) else value


def draws(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return a CPU tensor, such as random draws, on the device; as `from_host`, for tensors alone."""
    value = from_host(make, device)
    assert isinstance(value, Tensor)
    return value


def by_step(make: Callable[[int], float], number: int, device: torch.device) -> Tensor | float:
    """Return a number that depends on the step: ``make(number)``; while a step is captured, a tensor as in `from_host`."""
    values = _recording.get()
    return make(number) if values is None else values.add(lambda: make(values.number), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. From the CPU to a GPU the copy goes through pinned memory and is asynchronous."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _as_tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
