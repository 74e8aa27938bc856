r"""Products and weighted sums of per-example gradients, from one forward and one backward pass.

A backward pass knows, for every layer with parameters, what went in (:math:`a`) and the gradient of what came out
(:math:`\delta`). For a linear layer the gradient of example i's loss is :math:`\sum_t \delta_{it} a_{it}^T`, so that

.. math::
    \sum_i w_i \nabla_W \ell_i = \sum_{i,t} w_i\, \delta_{it} a_{it}^T, \qquad
    \nabla_W \ell_i \cdot V = \sum_t \delta_{it} \cdot (V a_{it}),

one matrix product each, whatever the weights w and the direction V, and however often they change. Attention has no
parameters of its own, so any kernel will do. What is kept between the passes is a and :math:`\delta` of the linear layers and
embeddings; of biases and normalisations only sums over an example's tokens. That is less than autograd keeps for a backward pass.

Layers of other kinds (and parameters that meet all examples at once, such as a table of relative positions) cannot be read
this way: `Recorder.left_out` names their parameters, which are constants here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.metagrad import TSALLIS, Inner, MetaGradient

Params = dict[str, Tensor]
FP16_SCALE = 1024.0  # of the source loss, whose gradients would else vanish in fp16


@dataclass
class _Call:
    """One use of a layer: what went in, and what the backward pass told of what came out."""

    layer: nn.Module
    weight: str | None
    bias: str | None
    entered: Tensor | None
    remade: Callable[[], Tensor] | None = None  # what went in, from what autograd keeps of it anyway
    delta: Tensor | None = None
    bias_sums: Tensor | None = None

    def keep(self, delta: Tensor) -> None:
        self.delta = delta.detach()
        if self.remade is not None:
            self.entered, self.remade = self.remade(), None
        if self.bias is not None:
            self.bias_sums = _token_sums(self.delta)

    def spend(self, delta: Tensor, found: Params) -> None:
        """Add the gradient of the plain sum of the losses to `found`, and keep nothing."""
        self.keep(delta)
        values = [(name, sums.sum(dim=0)) for name, sums in self.vectors()]
        if self.has_matrix:
            values.append((self.weight, self.weight_gradient(None)))
        for name, value in values:
            found[name] = found[name] + value if name in found else value
        self.entered = self.delta = self.bias_sums = None

    def vectors(self) -> list[tuple[str, Tensor]]:
        """Parameters whose gradients are known for each example: name and [N, D]."""
        return [] if self.bias is None else [(self.bias, self.bias_sums)]

    @property
    def has_matrix(self) -> bool:
        return self.weight is not None


class _Linear(_Call):
    def weight_product(self, direction: Tensor) -> Tensor:
        return _dot(F.linear(self.entered, direction.to(self.entered.dtype)), self.delta)

    def weight_gradient(self, weights: Tensor | None) -> Tensor:
        entered, delta = self.entered, self.delta
        if weights is not None and entered.shape[-1] < delta.shape[-1]:  # the smaller one of the two is scaled
            entered = _scaled(entered, weights)
        elif weights is not None:
            delta = _scaled(delta, weights)
        return delta.flatten(0, -2).T @ entered.flatten(0, -2)


class _Norm(_Call):
    def keep(self, delta: Tensor) -> None:
        """Sums over the tokens are all that is ever needed: `entered` becomes those of the normalised input times delta."""
        super().keep(delta)
        shape, self.entered = self.layer.normalized_shape, self.entered.float()
        self.entered = _token_sums(F.layer_norm(self.entered, shape, eps=self.layer.eps) * delta)
        self.delta = self.entered

    def vectors(self) -> list[tuple[str, Tensor]]:
        return super().vectors() + ([] if self.weight is None else [(self.weight, self.entered)])

    @property
    def has_matrix(self) -> bool:
        return False


class _Table(_Call):
    def weight_product(self, direction: Tensor) -> Tensor:
        return _dot(direction[self.entered], self.delta)

    def weight_gradient(self, weights: Tensor | None) -> Tensor:
        scaled = (self.delta if weights is None else _scaled(self.delta, weights)).flatten(0, -2).float()
        ids = self.entered.flatten()
        if self.layer.padding_idx is not None:
            scaled = scaled.masked_fill((ids == self.layer.padding_idx).unsqueeze(1), 0.0)
        return torch.zeros(self.layer.weight.shape, device=scaled.device).index_add_(0, ids, scaled)


class Recording:
    """A forward pass with its graph; after `backward` the source of any products and weighted sums."""

    def __init__(self, scores: Tensor, calls: list[Any], recorder: Recorder) -> None:
        self.scores, self._calls, self.recorder = scores, calls, recorder

    def backward(self, losses: Tensor) -> None:
        """Where the losses (one for each example, functions of `scores`) send their gradients."""
        with torch.autocast(losses.device.type, enabled=False):
            losses.sum().backward()
        self.scores = self.scores.detach()
        calls = [call for call in self._calls if call.delta is not None]  # no loss depends on the others
        # All biases and normalisations side by side: one product instead of hundreds.
        vectors = [vector for call in calls for vector in call.vectors()]
        self._names, self._sizes = [name for name, _ in vectors], [sums.shape[1] for _, sums in vectors]
        self._vectors = torch.cat([sums for _, sums in vectors], dim=1) if vectors else None
        self._calls = [call for call in calls if call.has_matrix]
        for call in calls:
            call.bias_sums = None

    def product(self, direction: Params) -> Tensor:
        """The derivative of each example's loss along the direction, float32 [N]; what it lacks counts as zero."""
        found = [call.weight_product(direction[call.weight]) for call in self._calls if call.weight in direction]
        if self._vectors is not None:
            parts = [
                direction[name].float() if name in direction else self._vectors.new_zeros(size)
                for name, size in zip(self._names, self._sizes, strict=True)
            ]
            found.append(self._vectors @ torch.cat(parts))
        return torch.stack(found).sum(dim=0) if found else torch.zeros(len(self.scores), device=self.scores.device)

    def gradient(self, weights: Tensor) -> Params:
        """The gradient of the sum of the losses, each with its weight; float32, zero where a layer had no part."""
        found: Params = {}
        weights = weights.float()
        values = [(call.weight, call.weight_gradient(weights)) for call in self._calls]
        if self._vectors is not None:
            values += zip(self._names, (weights @ self._vectors).split(self._sizes), strict=True)
        for name, value in values:
            found[name] = found[name] + value if name in found else value
        return {
            name: found[name].float() if name in found else torch.zeros_like(value, dtype=torch.float32)
            for name, value in self.recorder.params.items()
        }


def meta_gradient(
    recording: Recording,
    log_probs: Tensor,
    labels: Tensor,
    numbers: Tensor,
    source_loss: Callable[[], Iterable[Tensor]],
    rate: float,
    *,
    virtual_step: bool = True,
    inner: Inner = TSALLIS,
) -> MetaGradient:
    """What `metagrad.meta_gradient` computes, from a recording of the examples' surprisals.

    Args:
        recording: after `backward` of the surprisals of `labels`.
        log_probs: of the recorded scores, without graph.
        numbers: what the outer loop learns, one for each example (the entropy indexes).
        source_loss: scalars whose sum is the source loss of the model, which has the virtual step's parameters meanwhile. Each
            one's graph is freed before the next is asked for, so pieces of a batch need less memory.
        rate, virtual_step, inner: as there. Parameters that cannot be read take no part in the virtual step.
    """
    recorder = recording.recorder
    start = {name: value.detach() for name, value in recorder.params.items()}
    if virtual_step:
        step = recording.gradient(inner.weights(log_probs, labels, numbers))
        torch._foreach_mul_(list(step.values()), -rate)
        torch._foreach_add_(list(step.values()), list(start.values()))
        start = step
        del step
    scale = FP16_SCALE if recorder.precision is torch.float16 else 1.0
    direction, total = recorder.gradient(source_loss, recorder.cast(start), scale)
    # The rate first: slopes may be so large that a later product overflows. Of surprisals, hence no minus.
    slopes = recording.product(direction) * (rate / scale)
    return MetaGradient(inner.mixed(log_probs, slopes, labels, numbers), total)


class Recorder:
    """Knows which layers hold the trainable parameters, and watches a forward pass so that they can be read.

    `probe` is a forward pass on two examples of four tokens: it shows which layers see the examples one by one. `precision`
    is the model's autocast type: linear layers are handed their parameters in it.
    """

    def __init__(self, model: nn.Module, trainable: dict[str, nn.Parameter], probe: Callable[[], Any]) -> None:
        names = {id(parameter): name for name, parameter in trainable.items()}
        self.precision: torch.dtype | None = getattr(model, "precision", None)
        self._layers: dict[nn.Module, tuple[str | None, str | None]] = {}
        for module in model.modules():
            own = {key: names.get(id(value)) for key, value in module._parameters.items() if value is not None}
            if any(own.values()) and _readable(module):
                self._layers[module] = (own.get("weight"), own.get("bias"))
        for module in self._apart(probe):
            del self._layers[module]
        read = {name for pair in self._layers.values() for name in pair if name}
        self.params = {name: parameter for name, parameter in trainable.items() if name in read}
        self.left_out = sorted(set(trainable) - read)
        self._others = [trainable[name] for name in self.left_out]
        self._halved = {n for layer, pair in self._layers.items() if isinstance(layer, nn.Linear) for n in pair if n}
        sizes = {name: parameter.numel() for name, parameter in trainable.items()}
        self.share_left_out = sum(sizes[name] for name in self.left_out) / max(1, sum(sizes.values()))

    def _apart(self, probe: Callable[[], Any]) -> set[nn.Module]:
        """Layers that are never called, or with something that does not count the examples."""
        seen: dict[nn.Module, bool] = {}

        def look(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered = arguments[0] if arguments else next(iter(named.values()))
            positions = isinstance(module, nn.Embedding) and entered.dim() == 2 and len(entered) == 1
            seen[module] = seen.get(module, True) and (positions or len(entered) == 2)

        handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in self._layers]
        try:
            with torch.no_grad():
                probe()
        finally:
            for handle in handles:
                handle.remove()
        return {module for module in self._layers if not seen.get(module, False)}

    def cast(self, params: Params) -> Params:
        """The linear layers' parameters as autocast would hand them over, so that it has nothing to do. Empties `params`."""
        cast = {}
        for name in list(params):
            value = params.pop(name)
            cast[name] = value.to(self.precision) if self.precision is not None and name in self._halved else value
        return cast

    @contextlib.contextmanager
    def holding(self, params: Params) -> Iterator[None]:
        """The layers with these values in the place of their parameters."""
        kept = [(layer, dict(layer._parameters)) for layer in self._layers]
        try:
            for layer, (weight, bias) in self._layers.items():
                for key, name in (("weight", weight), ("bias", bias)):
                    if name is not None:
                        layer._parameters[key] = params[name]  # type: ignore[assignment]
            yield
        finally:
            for layer, own in kept:
                layer._parameters.update(own)

    def record(self, run: Callable[[], Tensor], count: int) -> Recording:
        """`run` is a forward pass of the model on `count` examples; its first axis counts them."""
        calls: list[Any] = []

        def note(call: Any, output: Tensor) -> None:
            calls.append(call)
            output.register_hook(call.keep)

        constants = self.cast({name: value.detach() for name, value in self.params.items()})
        with torch.enable_grad(), self.holding(constants), self._hooks(note, count):
            scores = run()
        return Recording(scores, calls, self)

    def gradient(self, losses: Callable[[], Iterable[Tensor]], params: Params, scale: float) -> tuple[Params, Tensor]:
        """The gradient of the sum of some losses at other parameters, times `scale`, and that sum.

        Each layer's gradient is taken when the backward pass comes by, so that less is kept than by autograd.
        """
        found: Params = {}

        def note(call: Any, output: Tensor) -> None:
            output.register_hook(lambda delta: call.spend(delta, found))

        total: Tensor | float = 0.0
        with torch.enable_grad(), self.holding(params), self._hooks(note, 1):
            for piece in losses():
                with torch.autocast(piece.device.type, enabled=False):
                    (scale * piece).backward()
                total = total + piece.detach()
        return found, torch.as_tensor(total)

    @contextlib.contextmanager
    def _hooks(self, note: Callable[[Any, Tensor], None], count: int) -> Iterator[None]:
        """Every call of a layer is noted, with its output. The parameters are constants meanwhile: autograd keeps nothing
        for their gradients."""
        casts: dict[Any, Tensor] = {}
        norms: dict[Any, float] = {}
        for parameter in self._others:
            parameter.requires_grad_(False)
        handles = [
            layer.register_forward_hook(self._hook(layer, note, casts, norms, count), with_kwargs=True) for layer in self._layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._others:
                parameter.requires_grad_(True)

    def _hook(
        self,
        layer: nn.Module,
        note: Callable[[Any, Tensor], None],
        casts: dict[Any, Tensor],
        norms: dict[Any, float],
        count: int,
    ) -> Any:
        kind = _Linear if isinstance(layer, nn.Linear) else _Table if isinstance(layer, nn.Embedding) else _Norm

        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            value = arguments[0] if arguments else next(iter(named.values()))
            entered, remade = value.detach(), None
            if kind is _Table and entered.dim() == 2 and len(entered) == 1 and count > 1:
                # positions are looked up once for all examples: look at each example's copy of them
                entered, output = entered.expand(count, -1), output.expand(count, -1, -1)
            node = type(value.grad_fn).__name__
            if kind is _Linear and node == "GeluBackward0" and value.dtype == output.dtype:
                entered, remade = None, functools.partial(_gelu_again, value.grad_fn)
            elif kind is _Linear and node == "NativeLayerNormBackward0" and value.grad_fn in norms:
                remade = functools.partial(_norm_again, value.grad_fn, norms[value.grad_fn], output.dtype, casts)
                entered = None
            elif kind is _Linear:
                entered = _cast(entered, output.dtype, casts)
            if kind is _Norm and output.grad_fn is not None:
                norms[output.grad_fn] = layer.eps
            if not output.requires_grad:
                output = output.detach().requires_grad_()
            note(kind(layer, *self._layers[layer], entered, remade), output)
            return output

        return hook


def _gelu_again(node: Any) -> Tensor:
    """The activation's output from its input, which autograd keeps until its backward step."""
    with torch.no_grad():
        return F.gelu(node._saved_self, approximate=node._saved_approximate)


def _norm_again(node: Any, eps: float, dtype: torch.dtype, casts: dict[Any, Tensor]) -> Tensor:
    """A normalisation's output from its input, likewise; layers that were given the same one share it."""
    if node not in casts:
        casts.clear()
        with torch.no_grad():
            shape = node._saved_normalized_shape
            again = F.layer_norm(node._saved_input, shape, node._saved_weight, node._saved_bias, eps)
            casts[node] = again.to(dtype)
    return casts[node]


def _readable(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
    return type(module) is nn.Linear or type(module) is nn.LayerNorm


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


def _scaled(values: Tensor, weights: Tensor) -> Tensor:
    """Each example's values times its weight."""
    return values * weights.to(values.dtype).view(-1, *[1] * (values.dim() - 1))


def _token_sums(values: Tensor) -> Tensor:
    """Per example the sum over its tokens, float32 [N, D]."""
    return values.flatten(1, -2).sum(dim=1, dtype=torch.float32) if values.dim() > 2 else values.float()
