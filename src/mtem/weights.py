"""Weights by name: taking, keeping and giving back those of a model, and a source model that another run has trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from mtem.data.cache import fingerprint_of
from mtem.errors import RequestError, RunError
from mtem.models.base import CosineHead, Model

if TYPE_CHECKING:
    from mtem.adapted import Adapted


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
        raise RunError("prior: the encoder's head has no bias that could carry the correction; set prior=none")
    model.head.bias.add_(torch.from_numpy(np.asarray(bias)).to(model.head.bias))


# ---------------------------------------------------------------------- theta_1 of another run


def begin_from(model: Model, source: Adapted) -> None:
    """Give the model the theta_1 of `source`. Refuses one of another shape."""
    name = source.path or "the source model"
    if source.classes != model.classes:
        raise RequestError(
            f"{name}: its classes are {', '.join(source.classes)}, those of the labeled texts {', '.join(model.classes)}; "
            "a source model must have the same"
        )
    if _head(source.model) != _head(model):
        raise RequestError(
            f"{name}: its head is of another kind; a method with a head of its own (mme) needs the source model of such a run"
        )
    given, own = source.source_weights(), everything(model)
    for key in sorted({*own, *given}):
        shapes = [tuple(weights[key].shape) if key in weights else None for weights in (given, own)]
        if shapes[0] != shapes[1]:
            there, wanted = ("absent" if shape is None else f"of shape {list(shape)}" for shape in shapes)
            raise RequestError(f"{name}: does not fit this model: {key} is {there} there and {wanted} here")
    load(model, given)


def fingerprint(source: Adapted) -> str:
    """sha256 over theta_1, its names and values."""
    weights = source.source_weights()
    return fingerprint_of(*(part for name in sorted(weights) for part in (name, _bytes(weights[name]))))


def _head(model: Model) -> tuple[str, float | None]:
    head = model.head
    return ("cosine", head.temperature) if isinstance(head, CosineHead) else ("linear", None)


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
