"""Checkpoints: everything that a stage of a run needs to continue, as named tensors, and the files they are in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtem.atomic import read_json, replaced
from mtem.methods.alignment import Alignment
from mtem.tensors import read_tensors, save_tensors
from mtem.training.weights import current, load, strip_prefix

if TYPE_CHECKING:
    from mtem.training.trainer import Trainer


def collect(trainer: Trainer, alignment: Alignment, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the state of model, method, optimizer, alignment and random generators."""
    method = trainer.method
    tensors = {f"model.{name}": value for name, value in current(method.model).items()}
    for part, module in method.modules().items():
        tensors |= {f"module.{part}.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"method.{name}": value for name, value in method.state().items()}
    tensors |= {f"align.{name}": value for name, value in alignment.state().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.state().items()}
    return tensors | random_state(generator)


def restore(tensors: dict[str, Tensor], trainer: Trainer, alignment: Alignment, generator: torch.Generator) -> None:
    """Load what `collect` returned."""
    method = trainer.method
    device = method.model.device
    load(method.model, strip_prefix(tensors, "model."))
    for name, module in method.modules().items():
        load(module, strip_prefix(tensors, f"module.{name}."))
    method.load_state({name: value.to(device) for name, value in strip_prefix(tensors, "method.").items()})
    alignment.load_state({name: value.to(device) for name, value in strip_prefix(tensors, "align.").items()})
    trainer.load_state(strip_prefix(tensors, "optimizer."))
    restore_random_state(tensors, generator)


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Return the state of torch's global generators and of the run's own."""
    state = {"random.torch": torch.get_rng_state(), "random.run": generator.get_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor], generator: torch.Generator) -> None:
    """Load what `random_state` returned."""
    torch.set_rng_state(state["random.torch"])
    generator.set_state(state["random.run"])
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])


class Checkpoints:
    """Folders ``step-N`` with tensors and a JSON record. A resumed run continues from the newest complete one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write a checkpoint, then remove the older ones."""
        path = self.directory / name
        with replaced(path) as temporary:
            temporary.mkdir()
            save_tensors(temporary / "tensors.safetensors", tensors)
            (temporary / "record.json").write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        for other in self.directory.iterdir():
            if other.name.startswith((".step-", "step-")) and other != path:
                shutil.rmtree(other, ignore_errors=True)

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and record of the newest checkpoint, if there is one."""
        steps = sorted(self.directory.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        if not steps:
            return None
        return read_tensors(steps[-1] / "tensors.safetensors"), read_json(steps[-1] / "record.json")

    def clear(self) -> None:
        """Remove all checkpoints."""
        for path in self.directory.glob("step-*"):
            shutil.rmtree(path, ignore_errors=True)
