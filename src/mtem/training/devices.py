"""Where a model runs, and in which precision."""

from __future__ import annotations

from typing import Any

import torch

from mtem.errors import RequestError
from mtem.models.base import Model

DEVICES = ("cpu", "cuda", "mps")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU if there is one. Refuse one that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in DEVICES:
        raise RequestError(f"unknown device '{name}': choose one of {', '.join(DEVICES)} or auto")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"device '{name}' cannot be used here: {str(error).splitlines()[0][:160]}") from error
    return device


def find_precision(name: str, device: torch.device, model: Model | None = None) -> torch.dtype | None:
    """Return the autocast type of a precision; None is full precision. On a CPU "auto" depends on the model."""
    if name not in ("auto", *PRECISIONS):
        raise RequestError(f"unknown precision '{name}': choose one of {', '.join(PRECISIONS)} or auto")
    if name == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        on_cpu = device.type == "cpu" and model is not None and model.is_wide and cpu_has_bf16()
        name = "bf16" if on_gpu or on_cpu else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise RequestError(f"precision=fp16 needs a GPU; this is {device.type}: use fp32")
    return PRECISIONS[name]


def cpu_has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 matrices by instructions of its own; others are slower with bf16 than without."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
