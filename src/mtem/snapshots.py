"""Everything that a stage of a run needs to go on from where it stood, as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mtem.methods import Method
from mtem.priors import Alignment
from mtem.storage import random_state, restore_random_state
from mtem.training import Trainer
from mtem.weights import current, load, under


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
