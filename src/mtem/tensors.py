"""Tensors on disk, as safetensors files."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mtem.atomic import replaced


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors atomically."""
    with replaced(path) as temporary:
        save_tensors(temporary, tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU."""
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a new file.

    They are copied first, because safetensors refuses tensors that share memory or are not contiguous.
    """
    save_file({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}, path)
