"""Everything that a stage of a run needs to go on from where it stood, as named tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mtem.atomic import read_json, replaced
from mtem.methods.alignment import Alignment
from mtem.methods.base import Method
from mtem.tensors import save_tensors
from mtem.training.trainer import Trainer
from mtem.training.weights import current, load, under


def take(trainer: Trainer, align: Alignment, generator: torch.Generator) -> dict[str, Tensor]:
    method: Method = trainer.method
    tensors = {f"model.{name}": value for name, value in current(method.model).items()}
    for part, module in method.modules().items():
        tensors |= {f"module.{part}.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"method.{name}": value for name, value in method.state().items()}
    tensors |= {f"align.{name}": value for name, value in align.state().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.state().items()}
    return tensors | random_state(generator)


def restore(tensors: dict[str, Tensor], trainer: Trainer, align: Alignment, generator: torch.Generator) -> None:
    """The inverse of `take`."""
    method: Method = trainer.method
    device = method.model.device
    load(method.model, under(tensors, "model."))
    for name, module in method.modules().items():
        load(module, under(tensors, f"module.{name}."))
    method.load_state({name: value.to(device) for name, value in under(tensors, "method.").items()})
    align.load_state({name: value.to(device) for name, value in under(tensors, "align.").items()})
    trainer.load_state(under(tensors, "optimizer."))
    restore_random_state(tensors, generator)


class Checkpoints:
    """`directory/step-NNN/`: tensors and a JSON record; the newest complete one is what a resumed run starts from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        place = self.directory / name
        with replaced(place) as temporary:
            temporary.mkdir()
            save_tensors(temporary / "tensors.safetensors", tensors)
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
