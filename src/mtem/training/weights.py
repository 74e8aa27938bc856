"""Weights by name: taking, keeping and giving back those of a model, and a source model that another run has trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from mtem.errors import RunError
from mtem.models.base import Model

if TYPE_CHECKING:
    pass


def current(model: Model) -> dict[str, Tensor]:
    """What is trained, as it is now and goes on changing."""
    return {name: parameter.detach() for name, parameter in model.trainable().items()}


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in [*module.named_parameters(), *module.named_buffers()]}


def head_buffers(model: Model) -> dict[str, Tensor]:
    """What of the head is no parameter but may change: a correction of the prior."""
    return {name: value for name, value in model.named_buffers() if name.startswith(model.head_path + ".")}


def clone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in weights.items()}


@torch.no_grad()
def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in weights.items():
        own[name].copy_(value)


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def add_bias(model: Model, bias: Sequence[float] | np.ndarray) -> None:
    """Give the model's head a correction of the prior."""
    if model.head.bias is None:
        raise RunError("prior: the encoder's head has no bias that could carry the correction; set target_class_prior=none")
    model.head.bias.add_(torch.from_numpy(np.asarray(bias)).to(model.head.bias))


# ---------------------------------------------------------------------- theta_1 of another run
