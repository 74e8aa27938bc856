"""One step of CST, read literally: sums over texts and classes as loops, the inverse as an inverse, SAM in two full passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.reference.fixmatch import consistency, probabilities, source_loss

Params = dict[str, Tensor]
ScoresAndFeatures = Callable[[Params, dict[str, Tensor]], tuple[Tensor, Tensor]]


class Constants(NamedTuple):
    a: float
    b: float
    c: float
    alpha: float
    temperature: float
    ridge: float
    threshold: float
    rho: float
    adaptive: bool


def tsallis_weights(scores: Tensor, temperature: float) -> list[float]:
    """w_i, with the norm that makes them sum to the batch size."""
    sureness = []
    for row in scores.detach():
        entropy = -sum(p * math.log(p) for p in probabilities(row / temperature).tolist() if p > 0)
        sureness.append(1 + math.exp(-entropy))
    return [len(scores) * value / sum(sureness) for value in sureness]


def tsallis(scores: Tensor, temperature: float, alpha: float, weights: list[float]) -> Tensor:
    """1/(alpha-1) sum_i [1 / mean_k m_k - sum_k w_i p_ik^alpha / m_k]."""
    p = [probabilities(row / temperature) for row in scores]
    classes = scores.shape[1]
    m = []
    for k in range(classes):
        m.append(sum(weights[i] * p[i][k] for i in range(len(p))))
    total = torch.zeros((), dtype=scores.dtype)
    for i in range(len(p)):
        total = total + 1 / (sum(m) / classes)
        for k in range(classes):
            total = total - weights[i] * p[i][k] ** alpha / m[k]
    return total / (alpha - 1)


def reverse(
    source_features: Tensor, source_labels: list[int], target_features: Tensor, pseudo: list[int], classes: int, ridge: float
) -> Tensor:
    """The mean square error on the source of the ridge regression on the target's pseudo labels, with torch's inverse."""
    target = torch.stack([row / torch.sqrt((row * row).sum()) for row in target_features])
    source = torch.stack([row / torch.sqrt((row * row).sum()) for row in source_features])
    kernel = torch.stack([torch.stack([(one * other).sum() for other in target]) for one in target])
    across = torch.stack([torch.stack([(one * other).sum() for other in target]) for one in source])
    goals = torch.tensor([[float(k == label) - 1 / classes for k in range(classes)] for label in pseudo], dtype=target.dtype)
    predicted = across @ torch.inverse(kernel + ridge * torch.eye(len(target), dtype=target.dtype)) @ goals
    total = torch.zeros((), dtype=target.dtype)
    for i, label in enumerate(source_labels):
        for k in range(classes):
            total = total + (predicted[i, k] - (float(k == label) - 1 / classes)) ** 2
    return total / (len(source_labels) * classes)


def reverse_value(
    source_features: np.ndarray,
    source_labels: list[int],
    target_features: np.ndarray,
    pseudo: list[int],
    classes: int,
    ridge: float,
) -> float:
    """The same number without torch, through the d x d normal equations instead of the kernel."""
    target = target_features / np.sqrt((target_features**2).sum(axis=1, keepdims=True))
    source = source_features / np.sqrt((source_features**2).sum(axis=1, keepdims=True))
    goals = np.array([[float(k == label) - 1 / classes for k in range(classes)] for label in pseudo])
    head = np.linalg.inv(target.T @ target + ridge * np.eye(target.shape[1])) @ target.T @ goals
    errors = []
    for row, label in zip(source, source_labels, strict=True):
        for k in range(classes):
            errors.append((sum(row[d] * head[d, k] for d in range(len(row))) - float(k == label) + 1 / classes) ** 2)
    return sum(errors) / len(errors)


def loss(
    both: ScoresAndFeatures, theta: Params, source: dict[str, Tensor], labels: Tensor, plain: dict[str, Tensor],
    strong: dict[str, Tensor], constants: Constants,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """L at theta, and the pseudo labels there."""
    source_logits, source_features = both(theta, source)
    scores, features = both(theta, plain)
    pseudo = scores.argmax(dim=1).tolist()
    weights = tsallis_weights(scores, constants.temperature)
    total = source_loss(source_logits, labels)
    total = total + constants.a * tsallis(scores, constants.temperature, constants.alpha, weights)
    rest = (pseudo, scores.shape[1], constants.ridge)
    total = total + constants.b * reverse(source_features, labels.tolist(), features, *rest)
    total = total + constants.c * consistency(scores, both(theta, strong)[0], constants.threshold)
    return total, pseudo


def perturbation(theta: Params, gradients: dict[str, Tensor], rho: float, adaptive: bool) -> dict[str, Tensor]:
    """SAM's e."""
    size = {name: theta[name].detach().abs() if adaptive else torch.ones_like(theta[name]) for name in theta}
    norm = math.sqrt(sum(float(((size[name] * gradients[name]) ** 2).sum()) for name in theta))
    return {name: rho * size[name] ** 2 * gradients[name] / norm for name in theta}


def step(
    both: ScoresAndFeatures, params: Params, source: dict[str, Tensor], labels: Tensor, plain: dict[str, Tensor],
    strong: dict[str, Tensor], constants: Constants, rate: float,
) -> tuple[Params, int]:  # fmt: skip
    """The weights after the step, and how many pseudo labels differed between SAM's two passes."""

    def gradient(theta: Params) -> tuple[dict[str, Tensor], list[int]]:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in theta.items()}
        total, pseudo = loss(both, leaves, source, labels, plain, strong, constants)
        return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True)), pseudo

    found, first = gradient(params)
    second = first
    if constants.rho:
        moved = perturbation(params, found, constants.rho, constants.adaptive)
        found, second = gradient({name: value + moved[name] for name, value in params.items()})
    changed = sum(one != other for one, other in zip(first, second, strict=True))
    return {name: value - rate * found[name] for name, value in params.items()}, changed
