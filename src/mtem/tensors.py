"""Tensors on disk, as safetensors files with a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtem.atomic import replaced
from mtem.errors import RequestError

CHECKSUM = "crc32"  # its name in the metadata of a file


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors atomically."""
    with replaced(path) as temporary:
        save_tensors(temporary, tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU.

    Raises
    ------
    RequestError
        If the file is missing, cannot be read, or is not as it was written.
    """
    if not path.is_file():
        raise RequestError(f"{path}: no such file" if not path.exists() else f"{path}: is not a regular file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            expected = (file.metadata() or {}).get(CHECKSUM)
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"{path}: is damaged or not a safetensors file ({reason})") from error
    if expected is not None and expected != checksum(tensors):
        raise RequestError(f"{path}: is damaged (its checksum is another one)")
    return tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a new file.

    They are copied first, because safetensors refuses tensors that share memory or are not contiguous.
    """
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    save_file(copies, path, {CHECKSUM: checksum(copies)})


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 over names and values of contiguous tensors."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()), value)  # type: ignore[arg-type]
    return f"{value:08x}"
