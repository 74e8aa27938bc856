"""What single layers tell in a recorded pass: what went in, the gradient of what came out, and what follows from the two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Tensor]
REMADE = 3  # of so many activations behind a wide layer one is computed again for every use instead of being kept


@dataclass
class Call:
    """One use of a layer: what went in, and what the backward pass told of what came out."""

    layer: nn.Module
    weight: str | None
    bias: str | None
    entered: Tensor | None
    remade: Callable[[], Tensor] | None = None  # what went in, from what autograd keeps of it anyway
    again: Callable[[], Tensor] | None = None  # what went in, from what another call keeps: in the place of `entered`
    delta: Tensor | None = None
    bias_sums: Tensor | None = None

    def store(self, delta: Tensor) -> None:
        self.delta = delta.detach()
        if self.remade is not None and self.again is None:
            self.entered = self.remade()
        self.remade = None
        if self.bias is not None:
            self.bias_sums = _token_sums(self.delta)

    def accumulate(self, delta: Tensor, found: Params) -> None:
        """Add the gradient of the plain sum of the losses to `found`, and keep nothing."""
        raise NotImplementedError

    def vectors(self) -> list[tuple[str, Tensor]]:
        """Parameters whose gradients are known for each example: name and [N, D]."""
        return [] if self.bias is None else [(self.bias, self.bias_sums)]

    @property
    def has_matrix(self) -> bool:
        return self.weight is not None


class LinearCall(Call):
    def accumulate(self, delta: Tensor, found: Params) -> None:
        delta = delta.detach().flatten(0, -2)
        entered = self.entered if self.remade is None else self.remade()
        self.entered = self.remade = None
        if self.weight is not None:
            add(found, self.weight, delta.T @ entered.flatten(0, -2))
        if self.bias is not None:
            add(found, self.bias, delta.sum(dim=0, dtype=torch.float32))

    def input(self) -> Tensor:
        return self.entered if self.again is None else self.again()

    def weight_product(self, direction: Tensor) -> Tensor:
        entered = self.input()
        return _dot(F.linear(entered, direction.to(entered.dtype)), self.delta)

    def weight_gradient(self, scale: Scale) -> Tensor:
        entered, delta = self.input(), self.delta
        if entered.shape[-1] <= delta.shape[-1]:  # the smaller one of the two is scaled
            entered = scale(entered)
        else:
            delta = scale(delta)
        return delta.flatten(0, -2).T @ entered.flatten(0, -2)


class Scale:
    """Each example's values times its weight. Layers that were given the same values share the product."""

    def __init__(self, weights: Tensor) -> None:
        self.weights: dict[torch.dtype, Tensor] = {torch.float32: weights.float()}
        self.last: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, values: Tensor) -> Tensor:
        if self.last[0] is not values:
            if values.dtype not in self.weights:
                self.weights[values.dtype] = self.weights[torch.float32].to(values.dtype)
            self.last = (values, values * self.weights[values.dtype].view(-1, *[1] * (values.dim() - 1)))
        return self.last[1]


class NormCall(Call):
    def store(self, delta: Tensor) -> None:
        """Sums over the tokens are all that is ever needed: `entered` becomes those of the normalised input times delta."""
        unit = self.unit()
        super().store(delta)
        self.delta = self.entered = _token_sums(unit * delta)

    def accumulate(self, delta: Tensor, found: Params) -> None:
        unit, delta = self.unit(), delta.detach().flatten(0, -2)
        if self.weight is not None:
            add(found, self.weight, (unit.flatten(0, -2) * delta).sum(dim=0, dtype=torch.float32))
        if self.bias is not None:
            add(found, self.bias, delta.sum(dim=0, dtype=torch.float32))
        self.entered = None

    def unit(self) -> Tensor:
        """The normalised input, if a layer behind this one has not made it already."""
        made = None if self.remade is None else self.remade()
        self.remade = None
        return F.layer_norm(self.entered.float(), self.layer.normalized_shape, eps=self.layer.eps) if made is None else made

    def vectors(self) -> list[tuple[str, Tensor]]:
        return super().vectors() + ([] if self.weight is None else [(self.weight, self.entered)])

    @property
    def has_matrix(self) -> bool:
        return False


class TableCall(Call):
    def accumulate(self, delta: Tensor, found: Params) -> None:
        self.store(delta)
        add(found, self.weight, self.weight_gradient(None))
        self.entered = self.delta = None

    def weight_product(self, direction: Tensor) -> Tensor:
        return _dot(direction[self.entered], self.delta)

    def weight_gradient(self, scale: Scale | None) -> Tensor:
        scaled = (self.delta if scale is None else scale(self.delta)).flatten(0, -2).float()
        ids = self.entered.flatten()
        if self.layer.padding_idx is not None:
            scaled = scaled.masked_fill((ids == self.layer.padding_idx).unsqueeze(1), 0.0)
        return torch.zeros(self.layer.weight.shape, device=scaled.device).index_add_(0, ids, scaled)


class Watch:
    """The forward hook of all layers of a pass: makes a call of every use of a layer."""

    def __init__(
        self,
        layers: dict[nn.Module, tuple[str | None, str | None]],
        note: Callable[[Any, Tensor], None],
        count: int,
        save_memory: bool,
    ) -> None:
        self.layers, self.note, self.count, self.save_memory = layers, note, count, save_memory
        self.casts: dict[Any, Tensor] = {}  # what several layers were given, in the type they see
        self.eps: dict[Any, float] = {}  # by the graph's node: a normalisation's constant
        self.units: dict[Any, Tensor] = {}  # by the node: its normalised input, until it is asked for
        self.linear: dict[Any, LinearCall] = {}  # by the node: the call behind it
        self.activations = 0

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        kind = LinearCall if isinstance(layer, nn.Linear) else TableCall if isinstance(layer, nn.Embedding) else NormCall
        value = arguments[0] if arguments else next(iter(named.values()))
        if kind is TableCall and value.dim() == 2 and len(value) == 1 and self.count > 1:
            # positions are looked up once for all examples: look at each example's copy of them
            value, output = value.expand(self.count, -1), output.expand(self.count, -1, -1)
        call = kind(layer, *self.layers[layer], value.detach())
        if kind is LinearCall:
            self._find_input(call, value, output.dtype)
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        elif kind is NormCall:
            self.eps[output.grad_fn] = layer.eps
            call.remade = functools.partial(self.units.pop, output.grad_fn, None)
        elif kind is LinearCall:
            self.linear[output.grad_fn] = call
        self.note(call, output)
        return output

    def _find_input(self, call: LinearCall, value: Tensor, dtype: torch.dtype) -> None:
        """Where autograd keeps what this value was made from, the value itself need not be kept during the pass."""
        node, name = value.grad_fn, type(value.grad_fn).__name__
        if name == "GeluBackward0" and value.dtype == dtype:
            call.entered, call.remade = None, functools.partial(_gelu_again, node)
            before = self.linear.get(node.next_functions[0][0])
            self.activations += before is not None
            if self.save_memory and before is not None and self.activations % REMADE == 0:
                call.again = functools.partial(_activation_again, before, node._saved_approximate)
        elif name == "NativeLayerNormBackward0" and node in self.eps:
            call.entered, call.remade = None, functools.partial(self._norm_again, node, dtype)
        else:
            call.entered = _cast(call.entered, dtype, self.casts)

    def _norm_again(self, node: Any, dtype: torch.dtype) -> Tensor:
        """A normalisation's output from its input; layers that were given the same one share it."""
        if node not in self.casts:
            self.casts.clear()
            with torch.no_grad():
                unit = F.layer_norm(node._saved_input.float(), node._saved_normalized_shape, eps=self.eps[node])
                self.units[node] = unit
                weight, bias = node._saved_weight, node._saved_bias
                made = unit if weight is None else unit * weight if bias is None else torch.addcmul(bias, unit, weight)
                self.casts[node] = made.to(dtype)
        return self.casts[node]


def _gelu_again(node: Any) -> Tensor:
    """The activation's output from its input, which autograd keeps until its backward step."""
    with torch.no_grad():
        return F.gelu(node._saved_self, approximate=node._saved_approximate)


def _activation_again(before: LinearCall, approximate: str) -> Tensor:
    """The activation's output from what the layer before it keeps."""
    with torch.no_grad():
        entered = before.input()
        bias = None if before.layer.bias is None else before.layer.bias.to(entered.dtype)
        return F.gelu(F.linear(entered, before.layer.weight.to(entered.dtype), bias), approximate=approximate)


def _cast(value: Tensor, dtype: torch.dtype, casts: dict[Any, Tensor]) -> Tensor:
    """The value as the layer sees it under autocast; layers that are given the same value one after the other share it."""
    if value.dtype == dtype:
        return value
    key = (value.data_ptr(), value._version, tuple(value.shape), value.stride(), dtype)
    if key not in casts:
        casts.clear()  # an older entry's memory may belong to another value by now
        casts[key] = value.to(dtype)
    return casts[key]


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The sum over all but the first axis of the product, accumulated in float32."""
    return (one * other).flatten(1).sum(dim=1, dtype=torch.float32)


def add(found: Params, name: str, value: Tensor) -> None:
    found[name] = found[name] + value if name in found else value


def cast_all(values: Params, dtype: torch.dtype) -> Params:
    """The same in another type, with one launch for many."""
    other = {name: value for name, value in values.items() if value.dtype != dtype}
    cast = {name: torch.empty_like(value, dtype=dtype) for name, value in other.items()}
    if cast:
        torch._foreach_copy_(list(cast.values()), list(other.values()))
    return {name: cast.get(name, value) for name, value in values.items()}


def _token_sums(values: Tensor) -> Tensor:
    """Per example the sum over its tokens, float32 [N, D]."""
    return values.flatten(1, -2).sum(dim=1, dtype=torch.float32) if values.dim() > 2 else values.float()
