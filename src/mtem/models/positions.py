"""The last layer of an encoder, computed only at the first position, if that is all its head reads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mtem.models.base import Inputs, Model
from mtem.models.frozen import evaluation_mode


class Switch:
    """Whether the hooks of a model are on."""

    def __init__(self) -> None:
        self.on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the hooks off for a while."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


def first_position_only(model: Model) -> Switch:
    """Give modules of the last layer hooks that cut their inputs to the first position, and return the switch of the hooks.

    Most heads read only the first position. Then everything after the attention of the last layer is needed only there, and the
    attention needs only its query. Architectures differ, so each hook is tested with an example: it stays if logits, features and
    the gradients in the layer's parameters are those of the whole layer.

    Parameters
    ----------
    model
        The model, in full precision.
    """
    switch, inputs = Switch(), model.probe()
    if inputs is None or not model.has_layers:
        return switch
    layers = model.layers
    with evaluation_mode(model.network):
        whole = _Example(model, inputs, layers[-1])
        with _last_alone(layers):  # one layer shows what is read in less time than all
            handles = _add_hooks(_Example(model, inputs, layers[-1]), switch)
        if not whole.is_same():
            for handle in handles:
                handle.remove()
    return switch


def _add_hooks(example: _Example, switch: Switch) -> list[RemovableHandle]:
    """Give each module of the layer a hook, keep those that change nothing, and return them."""
    handles: list[RemovableHandle] = []
    for module in example.layer.modules():
        if next(module.parameters(), None) is None:
            continue
        is_attention = hasattr(module, "key") and hasattr(module, "value")
        for cut in (_CutQuery(switch), _Cut(switch)) if is_attention else (_Cut(switch),):
            handle = module.register_forward_pre_hook(cut, with_kwargs=True)
            if example.is_same() and cut.has_cut:
                handles.append(handle)
                break
            handle.remove()
    return handles


@contextlib.contextmanager
def _last_alone(layers: nn.ModuleList) -> Iterator[None]:
    """Leave out all layers but the last."""
    modules = layers._modules
    layers._modules = {"0": layers[-1]}
    try:
        yield
    finally:
        layers._modules = modules


@dataclasses.dataclass
class _Cut:
    """A hook that passes only the first position to a module."""

    switch: Switch
    has_cut: bool = False

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.switch.on:
            return None
        values = (*arguments, *named.values())
        self.has_cut |= any(isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] > 1 for value in values)
        return tuple(map(_first, arguments)), {name: _first(value) for name, value in named.items()}


class _CutQuery(_Cut):
    """A hook that passes only the first position to an attention, whose keys and values come from all, as if from a cache."""

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.switch.on:
            return None
        cut, cut_named = super().__call__(module, arguments, named)
        return cut, {**cut_named, "past_key_values": _KeysAndValues(module, arguments[0])}


class _KeysAndValues:
    """The keys and values of all positions, in the place of a cache of transformers."""

    def __init__(self, attention: nn.Module, hidden: Tensor) -> None:
        self.attention, self.hidden = attention, hidden

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values, [N, heads, positions, width], instead of those of the first position."""
        all_keys, all_values = (self.attention.get_submodule(name)(self.hidden) for name in ("key", "value"))
        return _by_head(all_keys, key), _by_head(all_values, value)


def _by_head(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape[:-1], like.shape[1], like.shape[3]).transpose(1, 2)


def _first(value: Any) -> Any:
    """Return hidden states [N, positions, width] and masks [N, heads, positions, positions] at the first position."""
    if isinstance(value, Tensor) and value.dim() in (3, 4):
        return value[:, :1] if value.dim() == 3 else value[:, :, :1]
    return value


class _Example:
    """What a model computes of an example: logits and features, and their gradients in the parameters of a layer.

    Where weights are zero, only the gradients show what is read.
    """

    def __init__(self, model: Model, inputs: Inputs, layer: nn.Module) -> None:
        self.model, self.inputs, self.layer = model, inputs, layer
        self.expected = list(self._results())

    def is_same(self) -> bool:
        """Return whether the model computes the same as before; False if there is an error."""
        results = self._results()
        return all(_near(next(results, None), expected) for expected in self.expected) and len(self.expected) == 2

    def _results(self) -> Iterator[Tensor]:
        parameters = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        try:
            with torch.enable_grad():
                outputs = torch.cat(self.model.logits_and_features(self.inputs), dim=1)
                loss = outputs.flatten() @ torch.arange(outputs.numel(), device=outputs.device).cos()
            yield outputs.detach()
            yield torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)])
        except Exception:  # with a part of its input a module may raise any, and some attentions do not run on every device
            return


def _near(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())
