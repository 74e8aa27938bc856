"""Other views of a batch of threads: words masked, replies deleted, replies swapped.

Roots are never deleted or moved. All draws come from a CPU generator, so every device gets the same views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtem.models.base import Inputs

PER_POST = ("values", "noise")  # inputs with one row for each post
PER_THREAD = ("noise_roots", "noise_unseen", "neighbours")  # inputs with one row for each thread, beside the roots


def augment(inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
    """Return a view of the threads. See `mtem.models.trees.model.BigcnModel.augment` for the parameters."""
    if kind == "dropout" or not share:
        return inputs
    if kind == "mixed":
        for view in (delete, swap, mask):
            inputs = view(inputs, share / 3, generator)
        return inputs
    return {"mask": mask, "delete": delete, "swap": swap}[kind](inputs, share, generator)


def posts_of(inputs: Inputs, rows: slice) -> slice:
    """Return the posts of consecutive threads; those of a thread follow one another, the root first."""
    roots = inputs["roots"]
    return slice(int(roots[rows.start]), int(roots[rows.stop]) if rows.stop < len(roots) else len(inputs["parents"]))


def take(inputs: Inputs, rows: slice) -> Inputs:
    """Return consecutive threads of a batch."""
    posts = posts_of(inputs, rows)
    taken = {
        "parents": inputs["parents"][posts] - posts.start,
        "threads": inputs["threads"][posts] - rows.start,
        "roots": inputs["roots"][rows] - posts.start,
    }
    if "posts" in inputs:
        entries = (inputs["posts"] >= posts.start) & (inputs["posts"] < posts.stop)
        taken |= {name: inputs[name][entries] for name in ("words", "weights")}
        taken["posts"] = inputs["posts"][entries] - posts.start
    taken |= {name: inputs[name][posts] for name in (*PER_POST, "noise_codes") if name in inputs}
    taken |= {name: inputs[name][rows] for name in PER_THREAD if name in inputs}
    return {**inputs, **taken}


def mask(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """Set the weights of a random share of the words to zero; of dense features, a random share of the values."""
    name = "values" if "values" in inputs else "weights"
    values = inputs[name]
    return {**inputs, name: values * (_draws(values.shape, values, generator) >= share)}


def delete(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """Delete a random share of the replies. Replies to a deleted post become replies to the root."""
    parents, threads, roots = inputs["parents"], inputs["threads"], inputs["roots"]
    kept = (_draws(parents.shape, parents, generator) >= share) | (roots[threads] == _numbers(parents))
    positions = kept.cumsum(0) - 1
    above = torch.where(kept[parents], parents, roots[threads])
    changed = {"parents": positions[above[kept]], "threads": threads[kept], "roots": positions[roots]}
    changed |= {name: inputs[name][kept] for name in PER_POST if name in inputs}
    if "posts" in inputs:
        entries = kept[inputs["posts"]]
        changed |= {name: inputs[name][entries] for name in ("words", "weights")} | {"posts": positions[inputs["posts"][entries]]}
    return {**inputs, **changed}


def swap(inputs: Inputs, share: float, generator: torch.Generator) -> Inputs:
    """Permute the contents of a random share of the replies within each thread. The structure of the thread stays."""
    parents, threads, roots = inputs["parents"], inputs["threads"], inputs["roots"]
    replies = roots[threads] != _numbers(parents)
    moved = ((_draws(parents.shape, parents, generator) < share) & replies).nonzero().squeeze(1)
    order = moved[torch.argsort(_draws(moved.shape, parents, generator))]
    order = order[torch.argsort(threads[order], stable=True)]  # thread by thread, so each reply stays in its own
    origin = _numbers(parents)  # of the content of each post
    origin[moved] = order
    changed = {"values": inputs["values"][origin]} if "values" in inputs else {}
    if "posts" in inputs:
        goal = torch.empty_like(origin)
        goal[origin] = _numbers(parents)
        changed["posts"] = goal[inputs["posts"]]
    return {**inputs, **changed}


def _draws(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator).to(like.device, non_blocking=True)


def _numbers(posts: Tensor) -> Tensor:
    return torch.arange(len(posts), device=posts.device)
