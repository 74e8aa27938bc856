r"""Products and weighted sums of per-example gradients, from one forward and one backward pass.

A backward pass knows, for every layer with parameters, the layer's input (:math:`a`) and the gradient of its output
(:math:`\delta`). For a linear layer the gradient of example i's loss is :math:`\sum_t \delta_{it} a_{it}^T`, so that

.. math::
    \sum_i w_i \nabla_W \ell_i = \sum_{i,t} w_i\, \delta_{it} a_{it}^T, \qquad
    \nabla_W \ell_i \cdot V = \sum_t \delta_{it} \cdot (V a_{it}),

one matrix product each, for any weights w and any direction V. Attention has no parameters of its own, so any attention kernel
works. Between the passes a and :math:`\delta` of the linear layers and embeddings are kept, and sums over an example's tokens for
biases and normalisations. That is less than autograd keeps for a backward pass.

Where memory is short, nothing is kept between the passes (:class:`Replay`): each weighted sum and each product runs the pass
again, part of the batch by part, and each layer contributes its share when the backward pass reaches it.

Other layers (and parameters that are used for all examples at once, such as a table of relative positions) cannot be read this
way: `Recorder.skipped` names their parameters, which are constants here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtem import parallel
from mtem.metagrad.autograd import TSALLIS, InnerLoss, MetaGradient, Params
from mtem.metagrad.layer_hooks import LayerCall, LayerWatcher, MatrixCall, ParamNames, Scale, add, cast_all
from mtem.recompute import RandomState

FP16_SCALE = 1024.0  # multiplies the source loss, whose gradients would otherwise vanish in fp16


class Recording:
    """A forward pass with its graph; after `backward` the source of products and weighted sums.

    Made by :meth:`Recorder.record`.

    Attributes
    ----------
    logits : Tensor
        The output of the pass, with its graph until `backward`.
    recorder : Recorder
        The recorder that made it.
    """

    def __init__(self, logits: Tensor, calls: list[LayerCall], recorder: Recorder) -> None:
        self.logits, self.recorder = logits, recorder
        self._calls = calls
        self._matrices: list[tuple[str, MatrixCall]] = []
        self._vector_names: list[str] = []
        self._vector_sizes: list[int] = []
        self._vectors: Tensor | None = None

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass of the losses, one per example ``[N]``, functions of `logits`."""
        with torch.autocast(losses.device.type, enabled=False):
            torch.autograd.backward(losses.sum())
        self.logits = self.logits.detach()
        calls = [call for call in self._calls if call.reached]  # no loss depends on the others
        # All biases and normalisations side by side: one product instead of hundreds.
        vectors = [vector for call in calls for vector in call.vector_gradients()]
        self._vector_names, self._vector_sizes = [name for name, _ in vectors], [values.shape[1] for _, values in vectors]
        self._vectors = torch.cat([values for _, values in vectors], dim=1) if vectors else None
        self._matrices = [(call.weight, call) for call in calls if isinstance(call, MatrixCall) and call.weight is not None]
        self._calls = []

    def product(self, direction: Params) -> Tensor:
        """Return the derivative of each example's loss along a direction.

        Parameters
        ----------
        direction : dict of str to Tensor
            The direction by parameter name; parameters that are missing count as zero.

        Returns
        -------
        Tensor
            The derivatives, float32 ``[N]``.
        """
        products = [call.weight_product(direction[name]) for name, call in self._matrices if name in direction]
        if self._vectors is not None:
            parts = [
                direction[name].float() if name in direction else self._vectors.new_zeros(size)
                for name, size in zip(self._vector_names, self._vector_sizes, strict=True)
            ]
            products.append(self._vectors @ torch.cat(parts))
        if not products:
            return torch.zeros(len(self.logits), device=self.logits.device)
        return parallel.gather_derivatives(torch.stack(products).sum(dim=0), len(self.logits))

    def gradient(self, weights: Tensor) -> Params:
        """Return the gradient of the weighted sum of the losses.

        Parameters
        ----------
        weights : Tensor
            One weight per example, ``[N]``.

        Returns
        -------
        dict of str to Tensor
            The gradient by parameter name, float32; zero for layers that the losses do not depend on. Of several processes each
            has its own part, and the mean is the gradient.
        """
        gradients: Params = {}
        weights = weights[parallel.part_of(len(weights)).rows]
        scale = Scale(weights)
        for name, call in self._matrices:
            add(gradients, name, call.weight_gradient(scale))
        if self._vectors is not None:
            values = torch.split(weights.float() @ self._vectors, self._vector_sizes)
            for name, value in zip(self._vector_names, values, strict=True):
                add(gradients, name, value)
        return self.recorder.complete(gradients)


class Replay:
    """A pass of which nothing is kept but the logits; a :class:`Recording` whose every product and sum runs it again.

    With F for one forward pass, making it costs F, and `product` and `gradient` cost 3 F each, where a recording costs 2 F and
    F each. Made by :meth:`Recorder.replay`.

    Attributes
    ----------
    logits : Tensor
        The output of the pass, without the graph of the model.
    recorder : Recorder
        The recorder that made it.
    """

    def __init__(self, parts: Sequence[Callable[[], Tensor]], recorder: Recorder) -> None:
        self.recorder, self._parts = recorder, parts
        device = next(iter(recorder.params.values())).device
        self._random: list[RandomState] = []
        outputs = []
        with torch.no_grad():
            for part in parts:
                self._random.append(RandomState(device))
                outputs.append(part())
        self._sizes = [len(output) for output in outputs]
        self.logits = torch.cat(outputs).requires_grad_()
        self._logit_grads = torch.zeros_like(self.logits)

    def backward(self, losses: Tensor) -> None:
        """Compute the gradient in the logits of the losses, one per example ``[N]``, functions of `logits`."""
        self._logit_grads = torch.autograd.grad(losses.sum(), self.logits)[0]
        self.logits = self.logits.detach()

    def product(self, direction: Params) -> Tensor:
        """Return the derivative of each example's loss along a direction; see :meth:`Recording.product`."""
        passes = zip(self._passes(self._logit_grads), self._sizes, strict=True)
        return torch.cat([self.recorder.product(loss, direction, size) for loss, size in passes])

    def gradient(self, weights: Tensor) -> Params:
        """Return the gradient of the weighted sum of the losses; see :meth:`Recording.gradient`."""
        scale = self.recorder.loss_scale
        passes = self._passes(self._logit_grads * weights.unsqueeze(1))
        gradients, _ = self.recorder.gradient(lambda: (loss() for loss in passes), self.recorder.constants(), scale)
        gradients = self.recorder.complete(gradients)
        if scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), 1 / scale)
        return gradients

    def _passes(self, logit_grads: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Yield functions that run a part and return a loss with this gradient in the logits."""
        for part, random, grads in zip(self._parts, self._random, torch.split(logit_grads, self._sizes), strict=True):

            def loss(part: Callable[[], Tensor] = part, random: RandomState = random, grads: Tensor = grads) -> Tensor:
                with random.again():
                    return (part() * grads).sum()

            yield loss


class SourceGradient(NamedTuple):
    """The source loss and its gradient.

    Attributes
    ----------
    direction : dict of str to Tensor
        The gradient times `scale`.
    loss : Tensor
        The source loss, a scalar.
    scale : float
        The factor of the gradient.
    """

    direction: Params
    loss: Tensor
    scale: float


def source_gradient(
    recorder: Recorder, source_loss: Callable[[], Iterable[Tensor]], params: Params | None = None
) -> SourceGradient:
    """Compute the source loss and its gradient.

    Parameters
    ----------
    recorder : Recorder
        The recorder of the model.
    source_loss : callable
        Returns scalars whose sum is the source loss. The graph of each is freed before the next is requested, so several
        microbatches need less memory than one batch.
    params : dict of str to Tensor, optional
        The parameters to compute it at; emptied. By default those of the model.

    Returns
    -------
    SourceGradient
        The loss, and its gradient in the parameters that the recorder reads.
    """
    scale = recorder.loss_scale
    if params is not None:
        direction, loss = recorder.gradient(source_loss, recorder.cast(params), scale)
        return SourceGradient(parallel.average(direction), loss, scale)
    direction = {}
    total: Tensor | float = 0.0
    with torch.enable_grad():
        for loss in source_loss():
            gradients = torch.autograd.grad(scale * loss, list(recorder.params.values()), materialize_grads=True)
            for name, value in zip(recorder.params, gradients, strict=True):
                add(direction, name, value)
            total = total + loss.detach()
    return SourceGradient(recorder.cast(parallel.average(direction)), torch.as_tensor(total), scale)


def meta_gradient(
    recording: Recording | Replay,
    log_probs: Tensor,
    labels: Tensor,
    meta_parameters: Tensor,
    source_loss: Callable[[], Iterable[Tensor]] | SourceGradient,
    learning_rate: float | Tensor,
    *,
    inner_loss: InnerLoss = TSALLIS,
) -> MetaGradient:
    """Compute what :func:`mtem.metagrad.meta_gradient` computes, from a recording.

    Parameters
    ----------
    recording : Recording or Replay
        After `backward` of the surprisals of `labels`.
    log_probs : Tensor
        The log-probabilities of the recorded logits, without graph.
    labels : Tensor
        Pseudo labels, integers ``[N]``.
    meta_parameters : Tensor
        What the outer loop learns, one number per example (the entropy indexes).
    source_loss : callable or SourceGradient
        As in :func:`source_gradient`, of the model with the parameters after the virtual step. Or the result of that
        function at theta, computed before the recording was made: cheaper in memory and time, and not exact.
    learning_rate : float or Tensor
        The learning rate of the virtual step, a tensor without axes if it is on the device. Parameters that the recorder skips
        take no part in the step.
    inner_loss : InnerLoss
        The loss of the virtual step.

    Returns
    -------
    MetaGradient
        The gradient and the source loss, without graph.
    """
    recorder = recording.recorder
    if not isinstance(source_loss, SourceGradient):
        step = parallel.average(recording.gradient(inner_loss.weights(log_probs, labels, meta_parameters)))
        torch._foreach_mul_(list(step.values()), -learning_rate)
        torch._foreach_add_(list(step.values()), [recorder.params[name].detach() for name in step])
        source_loss = source_gradient(recorder, source_loss, step)
    # The learning rate is multiplied first: the products may be so large that a later product overflows. They are
    # derivatives of surprisals, so there is no minus.
    directional = recording.product(source_loss.direction) * (learning_rate / source_loss.scale)
    return MetaGradient(inner_loss.mixed_derivative(log_probs, directional, labels, meta_parameters), source_loss.loss)


class Recorder:
    """Finds the layers that hold the trainable parameters, and records forward passes so that they can be read.

    Parameters
    ----------
    model : nn.Module
        The model. Its attribute `precision`, if any, is its autocast dtype: linear layers are given their parameters in it.
    trainable : dict of str to nn.Parameter
        Its trainable parameters by name.
    probe : callable
        A forward pass on two examples of four tokens. It shows which layers see the examples one by one.

    Attributes
    ----------
    params : dict of str to nn.Parameter
        The parameters that can be read.
    skipped : list of str
        The names of the other trainable parameters.
    skipped_share : float
        Their share of all trainable numbers.
    """

    def __init__(self, model: nn.Module, trainable: dict[str, nn.Parameter], probe: Callable[[], Any]) -> None:
        names = {id(parameter): name for name, parameter in trainable.items()}
        self.precision: torch.dtype | None = getattr(model, "precision", None)
        self._layers: dict[nn.Module, ParamNames] = {}
        for module in model.modules():
            own = {key: names.get(id(value)) for key, value in module._parameters.items() if value is not None}
            if any(own.values()) and _is_readable(module):
                self._layers[module] = ParamNames(own.get("weight"), own.get("bias"))
        for module in self._find_unreadable(probe):
            del self._layers[module]
        readable = {name for pair in self._layers.values() for name in pair if name}
        self.params = {name: parameter for name, parameter in trainable.items() if name in readable}
        self.skipped = sorted(set(trainable) - readable)
        self._skipped_parameters = [trainable[name] for name in self.skipped]
        self._linear_names = {n for layer, pair in self._layers.items() if isinstance(layer, nn.Linear) for n in pair if n}
        sizes = {name: parameter.numel() for name, parameter in trainable.items()}
        self.skipped_share = sum(sizes[name] for name in self.skipped) / max(1, sum(sizes.values()))

    def _find_unreadable(self, probe: Callable[[], Any]) -> set[nn.Module]:
        """Layers that are never called, or called with an input whose first axis does not count the examples."""
        by_example: dict[nn.Module, bool] = {}

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            layer_input = args[0] if args else next(iter(kwargs.values()))
            positions = isinstance(module, nn.Embedding) and layer_input.dim() == 2 and len(layer_input) == 1
            by_example[module] = by_example.get(module, True) and (positions or len(layer_input) == 2)

        handles = [module.register_forward_pre_hook(watch, with_kwargs=True) for module in self._layers]
        try:
            with torch.no_grad():
                probe()
        finally:
            for handle in handles:
                handle.remove()
        return {module for module in self._layers if not by_example.get(module, False)}

    def cast(self, params: Params) -> Params:
        """Return parameters with those of the linear layers in the autocast dtype, so that autocast need not cast them.

        Empties `params`, so that the memory can be freed.
        """
        if self.precision is None:
            cast = dict(params)
        else:
            cast = cast_all({name: value for name, value in params.items() if name in self._linear_names}, self.precision)
            cast |= {name: value for name, value in params.items() if name not in cast}
        params.clear()
        return cast

    def record(self, forward: Callable[[], Tensor], examples: int, save_memory: bool = True) -> Recording:
        """Record a forward pass.

        Parameters
        ----------
        forward : callable
            A forward pass of the model; returns logits ``[examples, K]``.
        examples : int
            The number of examples.
        save_memory : bool, default True
            Keep less, which makes products and sums a little slower. The memory of a source pass beside the recording is
            the peak of a step.

        Returns
        -------
        Recording
            The recording, before its backward pass.
        """
        calls: list[LayerCall] = []
        rows = parallel.part_of(examples).rows

        def on_call(call: LayerCall, output: Tensor) -> None:
            calls.append(call)
            output.register_hook(call.store)  # type: ignore[no-untyped-call]

        with (
            torch.enable_grad(),
            self._replaced_parameters(self.constants()),
            self._hooks(on_call, rows.stop - rows.start, save_memory, repeated=False),
        ):
            logits = forward()
        return Recording(logits, calls, self)

    def replay(self, parts: Sequence[Callable[[], Tensor]]) -> Replay:
        """Run a forward pass in parts, so that it can be run again; keeps hardly anything.

        Parameters
        ----------
        parts : sequence of callable
            Forward passes of the model, each with a part of the examples; they return logits ``[examples, K]``. Every later
            pass draws the same dropout masks.

        Returns
        -------
        Replay
            It has the methods of a recording.
        """
        return Replay(parts, self)

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with, whose gradients might vanish."""
        return FP16_SCALE if self.precision is torch.float16 else 1.0

    def constants(self) -> Params:
        """Return the current parameters without graph, as :meth:`cast` returns them."""
        return self.cast({name: value.detach() for name, value in self.params.items()})

    def complete(self, gradients: Params) -> Params:
        """Return gradients in float32, with zeros for the parameters that have none."""
        gradients = cast_all(gradients, torch.float32)
        return {
            name: gradients[name] if name in gradients else torch.zeros_like(value, dtype=torch.float32)
            for name, value in self.params.items()
        }

    def product(self, loss: Callable[[], Tensor], direction: Params, examples: int) -> Tensor:
        """Compute the derivative of each example's loss along a direction.

        Each layer's product is computed when the backward pass reaches it, and nothing is kept.

        Parameters
        ----------
        loss : callable
            Runs a forward pass and returns the sum of the losses.
        direction : dict of str to Tensor
            The direction by parameter name; parameters that are missing count as zero.
        examples : int
            The number of examples.

        Returns
        -------
        Tensor
            The derivatives, float32 ``[examples]``.
        """
        rows = parallel.part_of(examples).rows
        own = rows.stop - rows.start
        total = torch.zeros(own, device=next(iter(self.params.values())).device)

        def on_call(call: LayerCall, output: Tensor) -> None:
            def add_product(output_grad: Tensor) -> None:
                watcher.forget_nodes()
                total.add_(call.product(output_grad, direction))

            output.register_hook(add_product)  # type: ignore[no-untyped-call]

        with (
            torch.enable_grad(),
            self._replaced_parameters(self.constants()),
            self._hooks(on_call, own) as watcher,
        ):
            value = loss()
            with torch.autocast(value.device.type, enabled=False):
                torch.autograd.backward(value)
        return parallel.gather_derivatives(total, examples)

    def gradient(self, losses: Callable[[], Iterable[Tensor]], params: Params, scale: float) -> tuple[Params, Tensor]:
        """Compute the gradient of a sum of losses at other parameters.

        Each layer's gradient is computed when the backward pass reaches it, so that less is kept than by autograd.

        Parameters
        ----------
        losses : callable
            Returns the losses, scalars.
        params : dict of str to Tensor
            The parameters, as :meth:`cast` returns them.
        scale : float
            Multiplies the gradient.

        Returns
        -------
        tuple
            The gradient by parameter name, and the sum of the losses.
        """
        gradients: Params = {}

        def on_call(call: LayerCall, output: Tensor) -> None:
            def accumulate(output_grad: Tensor) -> None:
                watcher.forget_nodes()
                call.accumulate(output_grad, gradients)

            output.register_hook(accumulate)  # type: ignore[no-untyped-call]

        total: Tensor | float = 0.0
        with torch.enable_grad(), self._replaced_parameters(params), self._hooks(on_call, 1) as watcher:
            for loss in losses():
                with torch.autocast(loss.device.type, enabled=False):
                    torch.autograd.backward(scale * loss)
                total = total + loss.detach()
                del loss  # the rest of its graph, before the next pass
        return gradients, torch.as_tensor(total)

    @contextlib.contextmanager
    def _replaced_parameters(self, params: Params) -> Iterator[None]:
        """Put other values in the place of the layers' parameters."""
        originals = [(layer, dict(layer._parameters)) for layer in self._layers]
        try:
            for layer, names in self._layers.items():
                for key, name in (("weight", names.weight), ("bias", names.bias)):
                    if name is not None:
                        layer._parameters[key] = params[name]  # type: ignore[assignment]
            yield
        finally:
            for layer, own in originals:
                layer._parameters.update(own)

    @contextlib.contextmanager
    def _hooks(
        self, on_call: Callable[[LayerCall, Tensor], None], examples: int, save_memory: bool = False, repeated: bool = True
    ) -> Iterator[LayerWatcher]:
        """Call `on_call` for every call of a layer; meanwhile the skipped parameters are constants."""
        watcher = LayerWatcher(self._layers, on_call, examples, save_memory, repeated)
        for parameter in self._skipped_parameters:
            parameter.requires_grad_(False)
        handles = [layer.register_forward_hook(watcher, with_kwargs=True) for layer in self._layers]
        try:
            yield watcher
        finally:
            watcher.close()
            for handle in handles:
                handle.remove()
            for parameter in self._skipped_parameters:
                parameter.requires_grad_(True)


def _is_readable(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
    return type(module) is nn.Linear or type(module) is nn.LayerNorm
