"""Weights by name: read, copied, loaded, corrected, scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mtem.errors import RunError
from mtem.models.base import Model


def current(model: Model) -> dict[str, Tensor]:
    """Return the trainable weights themselves, without copying: they change with the training."""
    return {name: parameter.detach() for name, parameter in model.trainable().items()}


def everything(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, without copying."""
    return {name: value.detach() for name, value in [*module.named_parameters(), *module.named_buffers()]}


def head_buffers(model: Model) -> dict[str, Tensor]:
    """Return the buffers of the head. They are not trained but may hold a prior correction."""
    return {name: value for name, value in model.named_buffers() if name.startswith(model.head_path + ".")}


def clone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy."""
    return {name: value.detach().clone() for name, value in weights.items()}


@torch.no_grad()
def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the parameters and buffers of the same names."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in weights.items():
        own[name].copy_(value)


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def add_bias(model: Model, bias: Sequence[float] | np.ndarray) -> None:
    """Add a prior correction to the bias of the model's head."""
    if model.head.bias is None:
        raise RunError(
            "target_class_prior: the encoder's head has no bias that could hold the correction; set target_class_prior=none"
        )
    model.head.bias.add_(torch.from_numpy(np.asarray(bias)).to(model.head.bias))


@torch.no_grad()
def scale_head(model: Model, factor: float) -> None:
    """Multiply the model's logits by a positive number: the weights of its head, and its bias if there is one.

    The predicted labels stay the same, except where two logits differ by no more than the rounding of the model's precision.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"factor: expected a positive number, got {factor}")
    model.head.weight.mul_(factor)
    if model.head.bias is not None:
        model.head.bias.mul_(factor)
