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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtem.metagrad import TSALLIS, InnerLoss, MetaGradient
from mtem.metagrad.layer_hooks import Params, Scale, Watch, add, cast_all

FP16_SCALE = 1024.0  # of the source loss, whose gradients would else vanish in fp16


class Recording:
    """A forward pass with its graph; after `backward` the source of any products and weighted sums."""

    def __init__(self, logits: Tensor, calls: list[Any], recorder: Recorder) -> None:
        self.logits, self._calls, self.recorder = logits, calls, recorder

    def backward(self, losses: Tensor) -> None:
        """Where the losses (one for each example, functions of `logits`) send their gradients."""
        with torch.autocast(losses.device.type, enabled=False):
            losses.sum().backward()
        self.logits = self.logits.detach()
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
        return torch.stack(found).sum(dim=0) if found else torch.zeros(len(self.logits), device=self.logits.device)

    def gradient(self, weights: Tensor) -> Params:
        """The gradient of the sum of the losses, each with its weight; float32, zero where a layer had no part."""
        found: Params = {}
        scale = Scale(weights)
        for call in self._calls:
            add(found, call.weight, call.weight_gradient(scale))
        if self._vectors is not None:
            for name, value in zip(self._names, (weights.float() @ self._vectors).split(self._sizes), strict=True):
                add(found, name, value)
        found = cast_all(found, torch.float32)
        return {
            name: found[name] if name in found else torch.zeros_like(value, dtype=torch.float32)
            for name, value in self.recorder.params.items()
        }


class Outer(NamedTuple):
    """The source loss, and its gradient times `scale`."""

    direction: Params
    loss: Tensor
    scale: float


def source_gradient(recorder: Recorder, source_loss: Callable[[], Iterable[Tensor]], params: Params | None = None) -> Outer:
    """Of scalars whose sum is the source loss of the model, at other parameters (which are used up) or at its own.

    Each one's graph is freed before the next is asked for, so pieces of a batch need less memory.
    """
    scale = FP16_SCALE if recorder.precision is torch.float16 else 1.0
    if params is not None:
        return Outer(*recorder.gradient(source_loss, recorder.cast(params), scale), scale)
    found: Params = {}
    total: Tensor | float = 0.0
    with torch.enable_grad():
        for piece in source_loss():
            gradients = torch.autograd.grad(scale * piece, list(recorder.params.values()), materialize_grads=True)
            for name, value in zip(recorder.params, gradients, strict=True):
                add(found, name, value)
            total = total + piece.detach()
    return Outer(recorder.cast(found), torch.as_tensor(total), scale)


def meta_gradient(
    recording: Recording,
    log_probs: Tensor,
    labels: Tensor,
    numbers: Tensor,
    source_loss: Callable[[], Iterable[Tensor]] | Outer,
    learning_rate: float,
    *,
    inner: InnerLoss = TSALLIS,
) -> MetaGradient:
    """What `metagrad.meta_gradient` computes, from a recording of the examples' surprisals.

    Args:
        recording: after `backward` of the surprisals of `labels`.
        log_probs: of the recorded logits, without graph.
        numbers: what the outer loop learns, one for each example (the entropy indexes).
        source_loss: as in `source_gradient`, of the model with the virtual step's parameters. Or what that function found at
            theta, before the recording was made: cheaper in memory and time, and not exact.
        learning_rate, inner: as there. Parameters that cannot be read take no part in the virtual step.
    """
    recorder = recording.recorder
    if not isinstance(source_loss, Outer):
        step = recording.gradient(inner.weights(log_probs, labels, numbers))
        torch._foreach_mul_(list(step.values()), -learning_rate)
        torch._foreach_add_(list(step.values()), [recorder.params[name].detach() for name in step])
        source_loss = source_gradient(recorder, source_loss, step)
    # The learning_rate first: slopes may be so large that a later product overflows. Of surprisals, hence no minus.
    slopes = recording.product(source_loss.direction) * (learning_rate / source_loss.scale)
    return MetaGradient(inner.mixed(log_probs, slopes, labels, numbers), source_loss.loss)


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
        if self.precision is None:
            cast = dict(params)
        else:
            cast = cast_all({name: value for name, value in params.items() if name in self._halved}, self.precision)
            cast |= {name: value for name, value in params.items() if name not in cast}
        params.clear()
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

    def record(self, run: Callable[[], Tensor], count: int, save_memory: bool = True) -> Recording:
        """`run` is a forward pass of the model on `count` examples; its first axis counts them.

        A save_memory recording keeps less and is a little slower to read: what a source pass beside it needs is the peak of a step.
        """
        calls: list[Any] = []

        def note(call: Any, output: Tensor) -> None:
            calls.append(call)
            output.register_hook(call.store)

        constants = self.cast({name: value.detach() for name, value in self.params.items()})
        with torch.enable_grad(), self.holding(constants), self._hooks(note, count, save_memory):
            logits = run()
        return Recording(logits, calls, self)

    def gradient(self, losses: Callable[[], Iterable[Tensor]], params: Params, scale: float) -> tuple[Params, Tensor]:
        """The gradient of the sum of some losses at other parameters, times `scale`, and that sum.

        Each layer's gradient is taken when the backward pass comes by, so that less is kept than by autograd.
        """
        found: Params = {}

        def note(call: Any, output: Tensor) -> None:
            output.register_hook(lambda delta: call.accumulate(delta, found))

        total: Tensor | float = 0.0
        with torch.enable_grad(), self.holding(params), self._hooks(note, 1):
            for piece in losses():
                with torch.autocast(piece.device.type, enabled=False):
                    (scale * piece).backward()
                total = total + piece.detach()
        return found, torch.as_tensor(total)

    @contextlib.contextmanager
    def _hooks(self, note: Callable[[Any, Tensor], None], count: int, save_memory: bool = False) -> Iterator[None]:
        """Every call of a layer is noted, with its output. The parameters are constants meanwhile: autograd keeps nothing
        for their gradients."""
        watch = Watch(self._layers, note, count, save_memory)
        for parameter in self._others:
            parameter.requires_grad_(False)
        handles = [layer.register_forward_hook(watch, with_kwargs=True) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._others:
                parameter.requires_grad_(True)


def _readable(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
    return type(module) is nn.Linear or type(module) is nn.LayerNorm
