"""Small parts of what a run records about itself."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

PACKAGES = ("mtem", "torch", "transformers", "safetensors", "numpy", "scikit-learn", "pyarrow")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"


@functools.cache
def machine(device: str) -> str:
    """Return the name of the processor, or of the GPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory(device: str) -> dict[str, int]:
    """Return the most bytes that the process has had in memory so far, and on its GPU; without what the system does not tell."""
    found = {}
    try:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:  # Windows
        pass
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.max_memory_allocated(torch.device(device))
    return found


def predicted_shares(logits: np.ndarray) -> np.ndarray:
    """Return the share of texts for which each class is the likeliest, [K]."""
    return np.bincount(logits.argmax(axis=1), minlength=logits.shape[1]) / max(1, len(logits))


def by_class(classes: Sequence[str], values: np.ndarray) -> dict[str, float]:
    """Return one rounded number per class, by class name."""
    return {name: round(float(value), 4) for name, value in zip(classes, values, strict=True)}


def now() -> str:
    """Return the time in UTC, in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
