"""Copies of a model for scoring many texts on a CPU: one per CPU thread."""

from __future__ import annotations

import copy

from torch import nn

from mtem.models.base import Model


def scorers(model: Model, count: int) -> list[Model]:
    """Return `count` copies of the model in evaluation mode, which share its weights. The model itself is not changed.

    The copies have modules of their own, so two CPU threads can use two of them at once, whatever hooks a forward pass sets.
    """
    twins = [_twin(model).eval() for _ in range(count)]
    for twin in twins:
        twin.microbatches = 1  # of training
    return twins


def _twin(model: Model) -> Model:
    """Return a copy of the hierarchy of modules that shares weights, tokenizer, configuration and other values."""
    modules = list(model.modules())
    shared: list[object] = [*model.parameters(), *model.buffers()]
    shared += [value for module in modules for value in vars(module).values() if not isinstance(value, (dict, list, nn.Module))]
    return copy.deepcopy(model, {id(value): value for value in shared})
