"""The run directory: JSON and tensors written whole or not at all, never pickled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtem.atomic import replaced
from mtem.errors import RequestError


def write_json(path: Path, value: Any) -> None:
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        file.write("\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; is {path.parent} the output of 'mtem adapt'?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not valid JSON ({error})") from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with replaced(path) as temporary:
        _save(temporary, tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Copies: safetensors refuses tensors that share memory or are not contiguous."""
    save_file({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}, path)


class Checkpoints:
    """`directory/step-NNN/`: tensors and a JSON record; the newest complete one is what a resumed run starts from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        place = self.directory / name
        with replaced(place) as temporary:
            temporary.mkdir()
            _save(temporary / "tensors.safetensors", tensors)
            (temporary / "record.json").write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        for other in self.directory.iterdir():
            stale = other.name.startswith((".step-", "step-")) and other != place
            if stale:
                shutil.rmtree(other, ignore_errors=True)

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = sorted(self.directory.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        if not found:
            return None
        return load_file(found[-1] / "tensors.safetensors"), read_json(found[-1] / "record.json")

    def clear(self) -> None:
        for place in self.directory.glob("step-*"):
            shutil.rmtree(place, ignore_errors=True)


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Everything that draws: torch's global generators and the run's own."""
    state = {"random.torch": torch.get_rng_state(), "random.run": generator.get_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor], generator: torch.Generator) -> None:
    torch.set_rng_state(state["random.torch"])
    generator.set_state(state["random.run"])
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])
