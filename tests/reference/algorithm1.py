"""Algorithm 1, read literally: plain tensors, autograd twice, one text at a time where the paper writes a sum over texts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, Tensor]


def tsallis_loss(probabilities: Tensor, label: int, index: Tensor) -> Tensor:
    """Eq. 3 with a one-hot label."""
    return (1 - probabilities[label] ** (index - 1)) / (index - 1)


def inner_loss(scores: Tensor, labels: list[int], indexes: list[Tensor]) -> Tensor:
    """L_T on a batch: the mean over texts."""
    total = torch.zeros(())
    for row, label in enumerate(labels):
        total = total + tsallis_loss(torch.softmax(scores[row], dim=0), label, indexes[row])
    return total / len(labels)


def step(
    scores_of: Callable[[Params], Tensor],
    source_loss_of: Callable[[Params], Tensor],
    params: Params,
    indexes: Tensor,
    labels: list[int],
    eta: float,
    beta: float,
    low: float,
    high: float,
) -> tuple[Params, Tensor]:
    """Lines 6 to 8 for one batch: (theta_{t+1}, psi_{t+1} of the batch's texts)."""
    theta = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    psi = [value.detach().clone().requires_grad_() for value in indexes]

    # line 6: the virtual step, kept differentiable in psi
    loss = inner_loss(scores_of(theta), labels, psi)
    gradients = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
    virtual = {name: value - eta * gradient for (name, value), gradient in zip(theta.items(), gradients, strict=True)}

    # line 7: the source loss behind it, differentiated in every psi
    outer = torch.autograd.grad(source_loss_of(virtual), psi)
    moved = torch.stack([value.detach() - beta * gradient for value, gradient in zip(psi, outer, strict=True)])
    moved = moved.clamp(low, high)

    # line 8: the real step with the new indexes and the same labels
    loss = inner_loss(scores_of(theta), labels, list(moved))
    gradients = torch.autograd.grad(loss, list(theta.values()))
    stepped = {name: value.detach() - eta * gradient for (name, value), gradient in zip(theta.items(), gradients, strict=True)}
    return stepped, moved
