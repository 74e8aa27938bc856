"""One step of FixMatch, read literally: one text at a time, probabilities written out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, Tensor]


def probabilities(scores: Tensor) -> Tensor:
    powers = torch.exp(scores - scores.max().detach())
    return powers / powers.sum()


def consistency(weak: Tensor, strong: Tensor, threshold: float) -> Tensor:
    """The second sum: `weak` and `strong` are the scores [N, K] of the two views."""
    total = torch.zeros(())
    for i in range(len(weak)):
        p = probabilities(weak[i].detach()).tolist()
        label = max(range(len(p)), key=lambda k: p[k])
        if p[label] >= threshold:
            total = total - torch.log(probabilities(strong[i])[label])
    return total / len(weak)


def source_loss(scores: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros(())
    for i, label in enumerate(labels.tolist()):
        total = total - torch.log(probabilities(scores[i])[label])
    return total / len(labels)


def step(
    scores_of: Callable[[Params, dict[str, Tensor]], Tensor],
    params: Params,
    source: dict[str, Tensor],
    labels: Tensor,
    weak: dict[str, Tensor],
    strong: dict[str, Tensor],
    threshold: float,
    weight: float,
    rate: float,
) -> Params:
    theta = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = source_loss(scores_of(theta, source), labels)
    loss = loss + weight * consistency(scores_of(theta, weak), scores_of(theta, strong), threshold)
    gradients = torch.autograd.grad(loss, list(theta.values()))
    return {name: value.detach() - rate * gradient for (name, value), gradient in zip(theta.items(), gradients, strict=True)}
