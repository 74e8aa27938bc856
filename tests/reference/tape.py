"""A CUDA graph on the CPU, slow and literal: the operations of a function, done again with its first numbers and addresses.

What Python computed while the function was recorded is a constant of the tape, as it is of a CUDA graph. So a step that takes
something from the CPU in a way that a replay cannot see goes wrong here too.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from mtem.capture import HostValues


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self.own = {}  # storages that the function made, kept so that no address is used twice
        self.saved = {}  # other storages that it wrote to, as they were

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in zip(operation._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for value in tensors(written):
            storage = value.untyped_storage()
            if storage.data_ptr() not in self.own and storage.data_ptr() not in self.saved:
                self.saved[storage.data_ptr()] = storage, storage.clone()
        result = operation(*args, **kwargs)
        if "empty" in operation.__name__:  # memory, no arithmetic
            for value in tensors(result):
                self.own[value.untyped_storage().data_ptr()] = value.untyped_storage()
            return result
        inputs = {value.untyped_storage().data_ptr() for value in tensors((args, kwargs))}
        made = [value.untyped_storage().data_ptr() not in inputs for value in tensors(result)]
        for value, new in zip(tensors(result), made, strict=True):
            if new:
                self.own[value.untyped_storage().data_ptr()] = value.untyped_storage()
        self.operations.append((operation, args, kwargs, [value.detach() for value in tensors(result)], made))
        return result

    def restore(self):
        """Undo what the recording changed: a capture runs nothing."""
        for storage, copy in self.saved.values():
            storage.copy_(copy)

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, outputs, made in self.operations:
            result = operation(*args, **kwargs)
            for output, value, new in zip(outputs, tensors(result), made, strict=True):
                if new:
                    output.copy_(value)


def tensors(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def on_the_host(values, make, device, add=HostValues.add):
    """What the CPU computes is not part of a graph."""
    with _disable_current_modes():
        buffer = add(values, make, device)
        if values.capturing:  # what a GPU does not compute during a capture is computed here
            buffer.copy_(values._values[-1])
        return buffer


def capture(run):
    """Stands in for `mtem.training.graphs.cuda_capture()`."""
    state = torch.get_rng_state()
    tape = Tape()
    with tape, mock.patch.object(HostValues, "add", on_the_host):
        log = run()
    tape.restore()
    torch.set_rng_state(state)
    return log, tape.replay
