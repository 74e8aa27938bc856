"""Other views of a batch of threads: words hidden, replies deleted, replies in one another's place.

Roots are never deleted or moved. All draws come from the generator on the CPU, so that every device sees the same views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtem.models.base import Inputs

PER_POST = ("values", "noise")


def augment(inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
    if kind == "dropout" or not share:
        return inputs
    if kind == "mixed":
        for each in (delete, swap, mask):
            inputs = each(inputs, share / 3, generator)
        return inputs
    return {"mask": mask, "delete": delete, "swap": swap}[kind](inputs, share, generator)


def mask(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """A random share of the words without weight; of features that are no words, a random share of each post's numbers."""
    name = "values" if "values" in inputs else "weights"
    values = inputs[name]
    return {**inputs, name: values * (_draws(values.shape, values, generator) >= share)}


def delete(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """Without a random share of the replies; what was said to them hangs from the root, as other orphans do."""
    parents, trees, roots = inputs["parents"], inputs["trees"], inputs["roots"]
    kept = (_draws(parents.shape, parents, generator) >= share) | (roots[trees] == _numbers(parents))
    places = kept.cumsum(0) - 1
    above = torch.where(kept[parents], parents, roots[trees])
    changed = {"parents": places[above[kept]], "trees": trees[kept], "roots": places[roots]}
    changed |= {name: inputs[name][kept] for name in PER_POST if name in inputs}
    if "nodes" in inputs:
        there = kept[inputs["nodes"]]
        changed |= {name: inputs[name][there] for name in ("words", "weights")} | {"nodes": places[inputs["nodes"][there]]}
    return {**inputs, **changed}


def swap(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """What a random share of a thread's replies say in another order among themselves; who replies to whom stays."""
    parents, trees, roots = inputs["parents"], inputs["trees"], inputs["roots"]
    replies = roots[trees] != _numbers(parents)
    moved = ((_draws(parents.shape, parents, generator) < share) & replies).nonzero().squeeze(1)
    order = moved[torch.argsort(_draws(moved.shape, parents, generator))]
    order = order[torch.argsort(trees[order], stable=True)]  # tree by tree, so each stays in its own
    comes = _numbers(parents)
    comes[moved] = order
    changed = {"values": inputs["values"][comes]} if "values" in inputs else {}
    if "nodes" in inputs:
        goes = torch.empty_like(comes)
        goes[comes] = _numbers(parents)
        changed["nodes"] = goes[inputs["nodes"]]
    return {**inputs, **changed}


def _draws(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator).to(like.device, non_blocking=True)


def _numbers(posts: Tensor) -> Tensor:
    return torch.arange(len(posts), device=posts.device)
