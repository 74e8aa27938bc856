"""WIND's step, read literally: plain tensors, the virtual step kept differentiable in every weight, one text at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, Tensor]


def weighted_loss(scores: Tensor, labels: list[int], w: list[Tensor], class_weights: list[float] | None = None) -> Tensor:
    """sum sigma(w_i) l_i / sum sigma(w_i); a class weight multiplies its texts' sigma(w_i)."""
    above, below = torch.zeros(()), torch.zeros(())
    for row, label in enumerate(labels):
        weight = 1 / (1 + torch.exp(-w[row])) * (1.0 if class_weights is None else class_weights[label])
        above = above - weight * torch.log(torch.softmax(scores[row], dim=0)[label])
        below = below + weight
    return above / below


def meta_gradient(
    scores_of: Callable[[Params], Tensor],
    target_loss_of: Callable[[Params], Tensor],
    params: Params,
    w: Tensor,
    labels: list[int],
    eta: float,
    class_weights: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """d L_V(theta_hat(w)) / d w_i for every text, by autograd through the virtual step, and L_V(theta_hat)."""
    theta = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    learned = [value.detach().clone().requires_grad_() for value in w]
    loss = weighted_loss(scores_of(theta), labels, learned, class_weights)
    gradients = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
    virtual = {name: value - eta * gradient for (name, value), gradient in zip(theta.items(), gradients, strict=True)}
    after = target_loss_of(virtual)
    return torch.stack(torch.autograd.grad(after, learned)), after.detach()


def step(
    scores_of: Callable[[Params], Tensor],
    target_loss_of: Callable[[Params], Tensor],
    params: Params,
    w: Tensor,
    in_domain: list[bool],
    labels: list[int],
    eta: float,
    alpha: float,
) -> tuple[Params, Tensor]:
    """One batch: (theta, w of the batch's texts). eta is absorbed in alpha; in-domain texts keep their w."""
    gradient, _ = meta_gradient(scores_of, target_loss_of, params, w, labels, eta)
    moved = torch.stack([old if own else old - alpha * g / eta for old, g, own in zip(w, gradient, in_domain, strict=True)])
    theta = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = weighted_loss(scores_of(theta), labels, list(moved))
    gradients = torch.autograd.grad(loss, list(theta.values()))
    return {name: value.detach() - eta * g for (name, value), g in zip(theta.items(), gradients, strict=True)}, moved
