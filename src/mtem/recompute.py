"""Passes that do not keep their activations: the backward pass runs them again, under the conditions of the first run.

Beside ``torch.utils.checkpoint`` this module remembers the parameters and the mode of the first run, because methods swap
parameters and switch dropout off between a pass and its backward pass. And what is run again is an ordinary pass, in which the
hooks of :mod:`mtem.metagrad.layerwise` work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from mtem.dropout import is_quick, quick_dropout


class RandomState:
    """The state of torch's own random generators, of the CPU and of one device, when this object is made.

    Parameters
    ----------
    device : torch.device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_cpu = device, torch.get_rng_state()
        self._on_device: Tensor | None = None
        if device.type == "cuda":
            self._on_device = torch.cuda.get_rng_state(device)
        elif device.type == "mps":
            self._on_device = torch.mps.get_rng_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw from this state inside the ``with`` block; after it, draw as if there had been no block."""
        outside = RandomState(self.device)
        self._restore()
        try:
            yield
        finally:
            outside._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self._on_cpu)
        if self._on_device is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(self._on_device, self.device)
        elif self._on_device is not None:
            torch.mps.set_rng_state(self._on_device)


def recomputed(
    module: nn.Module, function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, ...]:
    """Return ``function(*tensors)``, whose activations are not kept: the backward pass calls the function a second time.

    The second call has the parameters, the mode, the random state, the kind of dropout and the autocast state of the first
    one. Gradients of gradients are refused.

    Parameters
    ----------
    module : nn.Module
        Holds all parameters that the function uses. All its submodules are in one mode.
    function : callable
        From tensors to tensors. Gradients reach the tensors it is given and the parameters, and nothing else.
    tensors : sequence of Tensor
        What it is given.
    device : torch.device
        Where it runs.
    """
    if not torch.is_grad_enabled():
        return function(*tensors)
    parameters = _Parameters(module)
    given = [*tensors, *parameters.values]
    if not any(tensor.requires_grad for tensor in given):
        return function(*tensors)
    return cast("tuple[Tensor, ...]", _Recomputed.apply(_Pass(module, function, parameters, device), *given))  # type: ignore[no-untyped-call]


def recomputed_layer(layer: nn.Module, device: torch.device, *arguments: Any, **named: Any) -> Any:
    """Return the output of a layer, of any structure, whose activations are not kept; see :func:`recomputed`."""
    leaves, structure = pytree.tree_flatten((arguments, named))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # kept by autograd, until the backward pass
    others: list[Any] = []  # what is returned beside tensors, and the structure

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        all_arguments, all_named = pytree.tree_unflatten(filled, structure)
        flat, shape = pytree.tree_flatten(type(layer).forward(layer, *all_arguments, **all_named))
        others[:] = [{place: leaf for place, leaf in enumerate(flat) if not isinstance(leaf, Tensor)}, shape]
        return tuple(leaf for leaf in flat if isinstance(leaf, Tensor))

    results = list(recomputed(layer, run, tensors, device))
    for place, leaf in others[0].items():
        results.insert(place, leaf)
    return pytree.tree_unflatten(results, others[1])


class _Parameters:
    """The tensors in the places of a module's parameters, which need not be its own."""

    def __init__(self, module: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str, int]] = []
        numbers: dict[int, int] = {}
        self.values: list[Tensor] = []
        for submodule in module.modules():
            for name, value in submodule._parameters.items():
                if value is None:
                    continue
                if id(value) not in numbers:
                    numbers[id(value)] = len(self.values)
                    self.values.append(value)
                self._slots.append((submodule._parameters, name, numbers[id(value)]))

    @contextlib.contextmanager
    def replaced(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Put other tensors in these places."""
        before = [own[name] for own, name, _ in self._slots]
        try:
            for own, name, number in self._slots:
                own[name] = values[number]
            yield
        finally:
            for (own, name, _), value in zip(self._slots, before, strict=True):
                own[name] = value


class _Pass:
    """A function, and the conditions under which it is called."""

    def __init__(
        self, module: nn.Module, function: Callable[..., tuple[Tensor, ...]], parameters: _Parameters, device: torch.device
    ) -> None:
        self.module, self.function, self.device = module, function, device
        self.training = module.training
        self.random = RandomState(device) if module.training else None  # without dropout nothing is drawn
        self.dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self.quick_dropout = is_quick()
        self.count = len(parameters.values)
        parameters.values = []  # kept by autograd, until the backward pass
        self.parameters = parameters

    def first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.function(*tensors[: len(tensors) - self.count])

    def again(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        inputs = len(tensors) - self.count
        mode, now = self.training, self.module.training
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.parameters.replaced(tensors[inputs:]))
            if mode is not now:
                self.module.train(mode)
                stack.callback(self.module.train, now)
            if self.random is not None:
                stack.enter_context(self.random.again())
                stack.enter_context(quick_dropout(self.quick_dropout))
            # Where autocast regions are nested, the cache would keep all casts, and the graphs behind them, until the last ends.
            enabled = self.dtype is not None
            stack.enter_context(torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled, cache_enabled=False))
            return self.function(*tensors[:inputs])


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors)  # refuses tensors that are changed before the backward pass
        return call.first(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.call.again(leaves)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, output_grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        if pairs:
            # A backward pass has the dtypes of its forward pass; autocast left on would round its float32 parts as well.
            with torch.autocast(ctx.call.device.type, enabled=False):
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, *(leaf.grad for leaf in leaves)
