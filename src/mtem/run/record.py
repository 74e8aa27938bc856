"""Small parts of what a run writes down about itself."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

PACKAGES = ("mtem", "torch", "transformers", "safetensors", "numpy", "scikit-learn", "pyarrow")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"


@functools.cache
def machine(device: str) -> str:
    """The processor's name, or the graphics card's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def shares(scores: np.ndarray) -> np.ndarray:
    """How often each class is the likeliest."""
    return np.bincount(scores.argmax(axis=1), minlength=scores.shape[1]) / max(1, len(scores))


def named(classes: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in zip(classes, values, strict=True)}


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
