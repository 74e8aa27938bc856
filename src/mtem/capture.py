"""Random draws of a step on their way from the CPU to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from mtem.data.batching import send

Drawn = TypeVar("Drawn", Tensor, float)


def from_host(make: Callable[[], Drawn], device: torch.device) -> Drawn:
    """Return what `make` draws, a tensor on the device.

    Parameters
    ----------
    make
        Draws on the CPU. It depends on nothing but a generator and shapes, since it may be called again for every step.
    device
        Where tensors are sent to.
    """
    drawn = make()
    return send(drawn, device) if isinstance(drawn, Tensor) else drawn
