"""Copies of a model for scoring many texts on a CPU: one per CPU thread, without work that the head never reads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mtem.models.base import Inputs, Model


def scorers(model: Model, count: int) -> list[Model]:
    """Return `count` copies of the model in evaluation mode, which share its weights. The model itself is not changed.

    The copies have modules of their own, so two CPU threads can use two of them at once, whatever hooks a forward pass sets.
    """
    first = _twin(model).eval()
    first.microbatches = 1  # of training
    _first_position_only(first)
    return [first, *(_twin(first) for _ in range(count - 1))]


def _twin(model: Model) -> Model:
    """Return a copy of the hierarchy of modules that shares weights, tokenizer, configuration and other values."""
    modules = list(model.modules())
    shared: list[object] = [*model.parameters(), *model.buffers()]
    shared += [value for module in modules for value in vars(module).values() if not isinstance(value, (dict, list, nn.Module))]
    return copy.deepcopy(model, {id(value): value for value in shared})


def _first_position_only(model: Model) -> None:
    """Give the linear maps of the last layer only the first position, if logits and features stay the same.

    Most heads read only the first position. Then everything after the attention of the last layer, three quarters of its
    arithmetic, is needed only there. Adding the residual broadcasts the result to all positions again, where it is not read.
    Architectures differ, so each map is tested with an example.
    """
    inputs = model.probe()
    if inputs is None or not model.has_layers:
        return
    precision, model.precision = model.precision, None  # compared in full precision
    expected = _outputs(model, inputs)
    for module in model.layers[-1].modules():
        if isinstance(module, nn.Linear):
            handle = module.register_forward_pre_hook(_first)
            if not _same(model, inputs, expected):
                handle.remove()
    model.precision = precision


def _first(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (arguments[0][:, :1], *arguments[1:])


@torch.no_grad()
def _outputs(model: Model, inputs: Inputs) -> Tensor:
    return torch.cat(model.logits_and_features(inputs), dim=1)


def _same(model: Model, inputs: Inputs, expected: Tensor) -> bool:
    try:
        return torch.allclose(_outputs(model, inputs), expected, rtol=1e-4, atol=1e-5)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the maps of the attention need all positions
        return False
