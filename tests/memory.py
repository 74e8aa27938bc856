"""How many bytes of tensors a block makes that are alive at the same time."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Inside the ``with`` block, counts the storages that operations make, until they are freed; `bytes` is the largest sum."""

    def __init__(self):
        super().__init__()
        self.now = self.bytes = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)}
        result = function(*arguments, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        if storage in self.seen:
            return
        self.seen.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._freed, size)
        self.now += size
        self.bytes = max(self.bytes, self.now)

    def _freed(self, size):
        self.now -= size
