"""A model made ready for scoring many texts on the processor: one twin per thread, and no work that the head never sees."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mtem.models.base import Inputs


def scorers(model: Any, count: int) -> list[Any]:
    """The model `count` times in evaluation mode: the same weights, but modules of their own; the model stays as it is.

    Two threads may use two of them at once, whatever hooks a forward pass sets and removes.
    """
    first = _twin(model).eval()
    _first_position_only(first)
    return [first, *(_twin(first) for _ in range(count - 1))]


def _twin(model: Any) -> Any:
    """A copy of the tree of modules; weights, tokenizer, configuration and the like are shared."""
    modules = list(model.modules())
    shared = [*model.parameters(), *model.buffers()]
    shared += [value for module in modules for value in vars(module).values() if not isinstance(value, (dict, list, nn.Module))]
    return copy.deepcopy(model, {id(one): one for one in shared})


def _first_position_only(model: Any) -> None:
    """Give the last layer's linear maps the first position alone, wherever the scores and features stay the same.

    Most heads look at the first position and nothing else. Then what follows the attention of the last layer, three quarters
    of its arithmetic, is needed there only; adding the residual spreads the result over all positions again, unread.
    Architectures differ, so it is tried, not assumed.
    """
    inputs = model.probe()
    if inputs is None or not model.has_layers:
        return
    precision, model.precision = model.precision, None  # compared in full precision
    wanted = _seen(model, inputs)
    for module in model.layers[-1].modules():
        if isinstance(module, nn.Linear):
            handle = module.register_forward_pre_hook(_first)
            if not _same(model, inputs, wanted):
                handle.remove()
    model.precision = precision


def _first(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (arguments[0][:, :1], *arguments[1:])


@torch.no_grad()
def _seen(model: Any, inputs: Inputs) -> Tensor:
    return torch.cat(model.logits_and_features(inputs), dim=1)


def _same(model: Any, inputs: Inputs, wanted: Tensor) -> bool:
    try:
        return torch.allclose(_seen(model, inputs), wanted, rtol=1e-4, atol=1e-5)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the attention's own maps cannot do with less
        return False
