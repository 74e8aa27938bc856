"""Calls of single layers in a recorded pass: the layer's input, the gradient of its output, and what follows from the two.

:class:`LayerWatcher` is a forward hook that makes a :class:`LayerCall` for every call of a layer. In the backward pass a call
either stores what later products and weighted sums need (:meth:`LayerCall.store`), or keeps nothing: it adds its gradient to a
running sum (:meth:`LayerCall.accumulate`) or returns the products with a direction (:meth:`LayerCall.product`).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.metagrad.autograd import Params

# One in this many activations after a wide layer is recomputed for every use instead of being stored, to save memory.
RECOMPUTE_EVERY = 3


class ParamNames(NamedTuple):
    """The names of a layer's trainable parameters; None for one that is absent or frozen."""

    weight: str | None
    bias: str | None


class LayerCall(abc.ABC):
    """One call of a layer.

    Parameters
    ----------
    layer : nn.Module
        The layer.
    names : ParamNames
        The names of its trainable parameters.
    layer_input : Tensor
        The input of this call, without graph.
    """

    def __init__(self, layer: nn.Module, names: ParamNames, layer_input: Tensor) -> None:
        self.layer, self.weight, self.bias = layer, names.weight, names.bias
        self.layer_input: Tensor | None = layer_input
        self.bias_sums: Tensor | None = None
        self.reached = False  # whether the backward pass has come to this call

    @abc.abstractmethod
    def store(self, output_grad: Tensor) -> None:
        """Store what products and weighted sums need; a hook of the backward pass."""
        self.reached = True
        if self.bias is not None:
            self.bias_sums = _token_sums(output_grad.detach())

    @abc.abstractmethod
    def accumulate(self, output_grad: Tensor, gradients: Params) -> None:
        """Add the gradient of the sum of the losses to `gradients` and store nothing; a hook of the backward pass."""

    def product(self, output_grad: Tensor, direction: Params) -> Tensor:
        """Return the derivative of each example's loss along a direction ``[N]``, and store nothing; for the backward pass."""
        self.store(output_grad)
        products = [values @ direction[name].float() for name, values in self.vector_gradients() if name in direction]
        products += self._matrix_products(direction)
        self._release()
        return torch.stack(products).sum(dim=0) if products else torch.zeros((), device=output_grad.device)

    def _matrix_products(self, direction: Params) -> list[Tensor]:
        return []

    def _release(self) -> None:
        self.layer_input = self.bias_sums = None

    def vector_gradients(self) -> list[tuple[str, Tensor]]:
        """Return name and per-example gradients ``[N, D]`` of the parameters that are vectors."""
        return [] if self.bias is None else [(self.bias, _not_none(self.bias_sums))]


class MatrixCall(LayerCall):
    """A call of a layer whose weight is a matrix: its per-example gradients are never written out."""

    output_grad: Tensor | None = None

    def _matrix_products(self, direction: Params) -> list[Tensor]:
        return [self.weight_product(direction[self.weight])] if self.weight in direction else []

    def _release(self) -> None:
        super()._release()
        self.output_grad = None

    @abc.abstractmethod
    def weight_product(self, direction: Tensor) -> Tensor:
        """Return the dot product of each example's weight gradient with a direction, float32 ``[N]``."""

    @abc.abstractmethod
    def weight_gradient(self, scale: Scale) -> Tensor:
        """Return the sum of the examples' weight gradients, each times its weight."""


class LinearCall(MatrixCall):
    """A call of a linear layer.

    The input is in one of three places: stored (`layer_input`); recomputed from what autograd saves until its backward step
    (`recompute_from_saved`); or recomputed at any time from the input of the previous linear layer
    (`recompute_from_previous`), which saves memory.
    """

    layer: nn.Linear
    recompute_from_saved: Callable[[], Tensor] | None = None
    recompute_from_previous: Callable[[], Tensor] | None = None

    def store(self, output_grad: Tensor) -> None:
        """Store the input, unless it can be recomputed later, and the gradient of the output."""
        self.output_grad = output_grad.detach()
        if self.recompute_from_saved is not None and self.recompute_from_previous is None:
            self.layer_input = self.recompute_from_saved()
        self.recompute_from_saved = None
        super().store(output_grad)

    def accumulate(self, output_grad: Tensor, gradients: Params) -> None:
        """Add the gradients of weight and bias."""
        output_grad = output_grad.detach().flatten(0, -2)
        layer_input = _not_none(self.layer_input) if self.recompute_from_saved is None else self.recompute_from_saved()
        self.layer_input = self.recompute_from_saved = None
        if self.weight is not None:
            add(gradients, self.weight, output_grad.T @ layer_input.flatten(0, -2))
        if self.bias is not None:
            add(gradients, self.bias, output_grad.sum(dim=0, dtype=torch.float32))

    def input(self) -> Tensor:
        """Return the input of a call that was stored."""
        return _not_none(self.layer_input) if self.recompute_from_previous is None else self.recompute_from_previous()

    def weight_product(self, direction: Tensor) -> Tensor:
        """Return the products with a direction."""
        layer_input = self.input()
        return _dot(F.linear(layer_input, direction.to(layer_input.dtype)), _not_none(self.output_grad))

    def weight_gradient(self, scale: Scale) -> Tensor:
        """Return the weighted sum of gradients."""
        layer_input, output_grad = self.input(), _not_none(self.output_grad)
        if layer_input.shape[-1] <= output_grad.shape[-1]:  # scale the smaller one of the two
            layer_input = scale(layer_input)
        else:
            output_grad = scale(output_grad)
        return output_grad.flatten(0, -2).T @ layer_input.flatten(0, -2)


class EmbeddingCall(MatrixCall):
    """A call of an embedding table; the input are the ids."""

    layer: nn.Embedding

    def store(self, output_grad: Tensor) -> None:
        """Store the gradient of the output."""
        self.output_grad = output_grad.detach()
        super().store(output_grad)

    def accumulate(self, output_grad: Tensor, gradients: Params) -> None:
        """Add the gradient of the table."""
        if self.weight is not None:
            add(gradients, self.weight, self._table_gradient(output_grad.detach()))
        self.layer_input = None

    def weight_product(self, direction: Tensor) -> Tensor:
        """Return the products with a direction."""
        return _dot(direction[_not_none(self.layer_input)], _not_none(self.output_grad))

    def weight_gradient(self, scale: Scale) -> Tensor:
        """Return the weighted sum of gradients."""
        return self._table_gradient(scale(_not_none(self.output_grad)))

    def _table_gradient(self, output_grad: Tensor) -> Tensor:
        rows, ids = output_grad.flatten(0, -2).float(), _not_none(self.layer_input).flatten()
        if self.layer.padding_idx is not None:
            rows = rows.masked_fill(ids.eq(self.layer.padding_idx).unsqueeze(1), 0.0)
        return torch.zeros(self.layer.weight.shape, device=rows.device).index_add_(0, ids, rows)


class NormCall(LayerCall):
    """A call of a layer normalisation. Only sums over an example's tokens are ever needed, so nothing else is stored."""

    layer: nn.LayerNorm
    weight_sums: Tensor | None = None
    # returns the normalised input if a later linear layer has recomputed it already
    take_normalized: Callable[[], Tensor | None] | None = None

    def store(self, output_grad: Tensor) -> None:
        """Store the sums over the tokens of each example."""
        normalized = self._normalized()
        super().store(output_grad)
        self.weight_sums, self.layer_input = _token_sums(normalized * output_grad), None

    def accumulate(self, output_grad: Tensor, gradients: Params) -> None:
        """Add the gradients of weight and bias."""
        normalized, output_grad = self._normalized(), output_grad.detach().flatten(0, -2)
        if self.weight is not None:
            add(gradients, self.weight, (normalized.flatten(0, -2) * output_grad).sum(dim=0, dtype=torch.float32))
        if self.bias is not None:
            add(gradients, self.bias, output_grad.sum(dim=0, dtype=torch.float32))
        self.layer_input = None

    def vector_gradients(self) -> list[tuple[str, Tensor]]:
        """Return name and per-example gradients ``[N, D]`` of bias and weight."""
        return super().vector_gradients() + ([] if self.weight is None else [(self.weight, _not_none(self.weight_sums))])

    def _release(self) -> None:
        super()._release()
        self.weight_sums = None

    def _normalized(self) -> Tensor:
        """Return the normalised input."""
        ready = None if self.take_normalized is None else self.take_normalized()
        self.take_normalized = None
        if ready is not None:
            return ready
        return F.layer_norm(_not_none(self.layer_input).float(), self.layer.normalized_shape, eps=self.layer.eps)


class Scale:
    """Multiplies each example's values by its weight. Layers with the same input, one after the other, share the product.

    Parameters
    ----------
    weights : Tensor
        One weight per example, ``[N]``.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights: dict[torch.dtype, Tensor] = {torch.float32: weights.float()}
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values ``[N, ...]`` times the weights."""
        if self.last is None or self.last[0] is not values:
            if values.dtype not in self.weights:
                self.weights[values.dtype] = self.weights[torch.float32].to(values.dtype)
            self.last = (values, values * self.weights[values.dtype].view(-1, *[1] * (values.dim() - 1)))
        return self.last[1]


class LayerWatcher:
    """The forward hook of all layers of a pass: makes a :class:`LayerCall` of every call of a layer.

    Parameters
    ----------
    layers : dict
        The layers and the names of their parameters.
    on_call : callable
        Is given every call and its output.
    examples : int
        The number of examples in the batch.
    save_memory : bool
        Whether some activations are recomputed for every use instead of being stored.
    repeated : bool
        Whether calls without gradients are ignored, since the backward pass repeats them (:mod:`mtem.recompute`), inside the
        life of the hook.
    """

    def __init__(
        self,
        layers: dict[nn.Module, ParamNames],
        on_call: Callable[[LayerCall, Tensor], None],
        examples: int,
        save_memory: bool,
        repeated: bool,
    ) -> None:
        self.layers, self.on_call, self.examples, self.save_memory = layers, on_call, examples, save_memory
        self.repeated = repeated
        self.casts: dict[Any, Tensor] = {}  # an input that several layers share, in the dtype they compute in
        # by node of the autograd graph:
        self.normalized: dict[Any, Tensor] = {}  # the normalised input of a normalisation, until it is taken
        # the same, in the forward pass alone:
        self.eps: dict[Any, float] = {}  # the constant of a normalisation
        self.linear_calls: dict[Any, LinearCall] = {}  # the call whose output it is
        self.activations = 0

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Watch one call; returns its output, which has a gradient."""
        if not torch.is_grad_enabled():
            if not self.repeated:
                raise RuntimeError("a layer was called without gradients; `Recorder.replay` allows activation checkpointing")
            return output
        layer_input: Tensor = args[0] if args else next(iter(kwargs.values()))
        names = self.layers[layer]
        call: LayerCall
        if isinstance(layer, nn.Linear):
            call = LinearCall(layer, names, layer_input.detach())
            self._set_input(call, layer_input, output.dtype)
        elif isinstance(layer, nn.Embedding):
            if layer_input.dim() == 2 and len(layer_input) == 1 and self.examples > 1:
                # Positions are looked up once for all examples: watch each example's copy of them.
                layer_input, output = layer_input.expand(self.examples, -1), output.expand(self.examples, -1, -1)
            call = EmbeddingCall(layer, names, layer_input.detach())
        else:
            call = NormCall(layer, names, layer_input.detach())
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        elif isinstance(call, NormCall):
            self.eps[output.grad_fn] = call.layer.eps
            call.take_normalized = functools.partial(self.normalized.pop, output.grad_fn, None)
        elif isinstance(call, LinearCall):
            self.linear_calls[output.grad_fn] = call
        self.on_call(call, output)
        return output

    def forget_nodes(self) -> None:
        """Forget the nodes of a forward pass that is over: a node keeps the inputs of its graph and their gradients alive."""
        self.eps.clear()
        self.linear_calls.clear()

    def close(self) -> None:
        """Forget everything, also `on_call`: what refers to the hook or the graph, and they to it, would stay alive."""
        self.forget_nodes()
        self.normalized.clear()
        self.casts.clear()
        self.on_call = lambda call, output: None

    def _set_input(self, call: LinearCall, layer_input: Tensor, dtype: torch.dtype) -> None:
        """Keep the input only where it cannot be recomputed from what autograd saves anyway."""
        node: Any = layer_input.grad_fn
        name = type(node).__name__
        if name == "GeluBackward0" and layer_input.dtype == dtype:
            call.layer_input, call.recompute_from_saved = None, functools.partial(_recompute_gelu, node)
            previous = self.linear_calls.get(node.next_functions[0][0])
            self.activations += previous is not None
            if self.save_memory and previous is not None and self.activations % RECOMPUTE_EVERY == 0:
                call.recompute_from_previous = functools.partial(_recompute_activation, previous, node._saved_approximate)
        elif name == "NativeLayerNormBackward0" and node in self.eps:
            call.layer_input = None
            call.recompute_from_saved = functools.partial(self._recompute_norm, node, self.eps[node], dtype)
        else:
            call.layer_input = _cast(_not_none(call.layer_input), dtype, self.casts)

    def _recompute_norm(self, node: Any, eps: float, dtype: torch.dtype) -> Tensor:
        """Return the output of a normalisation from its input; layers with the same input share it."""
        if node not in self.casts:
            self.casts.clear()
            with torch.no_grad():
                normalized = F.layer_norm(node._saved_input.float(), node._saved_normalized_shape, eps=eps)
                self.normalized[node] = normalized
                weight, bias = node._saved_weight, node._saved_bias
                if weight is None:
                    output = normalized
                else:
                    output = normalized * weight if bias is None else torch.addcmul(bias, normalized, weight)
                self.casts[node] = output.to(dtype)
        return self.casts[node]


def add(gradients: Params, name: str, value: Tensor) -> None:
    """Add a gradient to the one of that name in `gradients`, if there is one; sums are at least float32."""
    if name not in gradients:
        gradients[name] = value
    elif gradients[name].itemsize < 4:
        gradients[name] = gradients[name].float().add_(value)
    else:
        gradients[name].add_(value)


def cast_all(values: Params, dtype: torch.dtype) -> Params:
    """Return the same values in another dtype, cast in one launch."""
    uncast = {name: value for name, value in values.items() if value.dtype != dtype}
    cast = {name: torch.empty_like(value, dtype=dtype) for name, value in uncast.items()}
    if cast:
        torch._foreach_copy_(list(cast.values()), list(uncast.values()))
    return {name: cast.get(name, value) for name, value in values.items()}


def _recompute_gelu(node: Any) -> Tensor:
    """Return the output of an activation from its input, which autograd saves until the backward step of the activation."""
    with torch.no_grad():
        return F.gelu(node._saved_self, approximate=node._saved_approximate)


def _recompute_activation(previous: LinearCall, approximate: str) -> Tensor:
    """Return the output of an activation from the input of the linear layer before it."""
    with torch.no_grad():
        layer_input = previous.input()
        bias = None if previous.layer.bias is None else previous.layer.bias.to(layer_input.dtype)
        return F.gelu(F.linear(layer_input, previous.layer.weight.to(layer_input.dtype), bias), approximate=approximate)


def _cast(value: Tensor, dtype: torch.dtype, casts: dict[Any, Tensor]) -> Tensor:
    """Return the value as the layer sees it under autocast; layers with the same input, one after the other, share the cast."""
    if value.dtype == dtype:
        return value
    key = (value.data_ptr(), value._version, tuple(value.shape), value.stride(), dtype)
    if key not in casts:
        casts.clear()  # the memory of an older entry may belong to another value by now
        casts[key] = value.to(dtype)
    return casts[key]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over all but the first axis of the product, accumulated in float32."""
    return (a * b).flatten(1).sum(dim=1, dtype=torch.float32)


def _token_sums(values: Tensor) -> Tensor:
    """Return the sum over the tokens of each example, float32 [N, D]."""
    return values.flatten(1, -2).sum(dim=1, dtype=torch.float32) if values.dim() > 2 else values.float()


def _not_none(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
