"""Where a model runs, and in which precision."""

from __future__ import annotations

import torch

from mtem.errors import RequestError

DEVICES = ("cpu", "cuda", "mps")


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


def find_precision(name: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast type of a precision; None is full precision."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise RequestError(f"precision=fp16 needs a GPU; this is {device.type}: use fp32")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
