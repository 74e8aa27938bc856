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
    """The values that a step gets from the CPU, in the order in which it asks for them.

    The first time a step runs under `recorded`, its values are only noted. Then `capture` announces that it is captured.

    Attributes
    ----------
    number : int
        The number of the step, for values that depend on it.
    capturing : bool
        Whether the step is being captured.
    """

    def __init__(self) -> None:
        self.number = 0
        self.capturing = False
        self._buffers: list[Tensor] = []
        self._makes: list[Callable[[], Tensor | float]] = []
        self._values: list[Tensor] = []  # those of the captured step itself, until they are sent

    def add(self, make: Callable[[], Tensor | float], device: torch.device) -> Tensor | float:
        """Return the value, or, while the step is captured, a tensor that `send` and `refill` fill with it."""
        value = make()
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        if not self.capturing:
            # Now, because during the capture memory is the graph's own, which serves several tensors one after the other.
            self._buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            return send(value, device) if isinstance(value, Tensor) else value
        buffer = self._buffers[len(self._makes)] if len(self._makes) < len(self._buffers) else None
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            raise RuntimeError("a step asked for other values than the one before")
        self._makes.append(make)
        self._values.append(tensor)
        return buffer

    @contextlib.contextmanager
    def capture(self, number: int) -> Iterator[None]:
        """Announce that the step `number` is captured in the ``with`` block."""
        self.number, self.capturing = number, True
        self._makes, self._values = [], []
        try:
            with recorded(self):
                yield
        finally:
            self.capturing = False

    def send(self) -> None:
        """Fill the tensors with the values that were made during the capture."""
        for buffer, value in zip(self._buffers, self._values, strict=True):
            buffer.copy_(_pinned(value, buffer.device), non_blocking=True)
        self._values = []

    def refill(self, number: int) -> None:
        """Make all values again, for the step `number`, and fill the tensors with them."""
        self.number = number
        for make, buffer in zip(self._makes, self._buffers, strict=True):
            value = make()
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
            buffer.copy_(_pinned(tensor, buffer.device), non_blocking=True)


_recording: ContextVar[HostValues | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recorded(values: HostValues) -> Iterator[None]:
    """Collect what `from_host` and `by_step` are asked for inside the ``with`` block."""
    token = _recording.set(values)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Return whether a step is being captured."""
    values = _recording.get()
    return values is not None and values.capturing


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
    if values is None:
        return make(number)
    if not values.capturing:
        return values.add(lambda: make(number), device)
    return values.add(lambda: make(values.number), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. From the CPU to a GPU the copy goes through pinned memory and is asynchronous."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
