"""Tensors on disk: safetensors only, written whole or not at all, never pickled."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mtem.atomic import replaced


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with replaced(path) as temporary:
        save_tensors(temporary, tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Copies: safetensors refuses tensors that share memory or are not contiguous."""
    save_file({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}, path)
