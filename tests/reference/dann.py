"""Domain-adversarial training read literally: two players, two losses, one example at a time, and no gradient reversal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]


def weight(done: int, last: int, gamma: float, highest: float) -> float:
    """lambda_p after `done` of `last` steps."""
    return highest * (2 / (1 + math.exp(-gamma * done / last)) - 1)


def discriminate(params: Params, feature: Tensor, layers: list[int]) -> Tensor:
    """The probability of the source: affine layers with their negative parts cut off, then a sigmoid."""
    value = feature
    for number in layers[:-1]:
        value = params[f"discriminator.{number}.weight"] @ value + params[f"discriminator.{number}.bias"]
        value = torch.maximum(value, torch.zeros_like(value))
    score = params[f"discriminator.{layers[-1]}.weight"] @ value + params[f"discriminator.{layers[-1]}.bias"]
    return 1 / (1 + torch.exp(-score[0]))


def step(
    model: Any,
    discriminator: Params,
    labeled: list[tuple[dict[str, Tensor], int, bool]],
    unlabeled: list[dict[str, Tensor]],
    rate: float,
    discriminator_learning_rate_ratio: float,
    scale: float,
    layers: list[int],
) -> None:
    """One step, in place. `labeled` holds (inputs, class, whether it is the target's) of one example each."""
    theta = model.trainable()
    class_losses, source_losses, target_losses = [], [], []
    for inputs, label, from_target in labeled:
        scores, features = model.logits_and_features(inputs)
        class_losses.append(-torch.log(torch.softmax(scores[0], dim=0)[label]))
        chance = discriminate(discriminator, features[0], layers)
        if from_target:
            target_losses.append(-torch.log(1 - chance))
        else:
            source_losses.append(-torch.log(chance))
    for inputs in unlabeled:
        _, features = model.logits_and_features(inputs)
        target_losses.append(-torch.log(1 - discriminate(discriminator, features[0], layers)))
    class_loss = sum(class_losses) / len(class_losses)
    domain_loss = sum(source_losses) / len(source_losses) / 2 + sum(target_losses) / len(target_losses) / 2

    gradient = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    of_class = torch.autograd.grad(class_loss, list(theta.values()), **gradient)
    of_domain = torch.autograd.grad(domain_loss, list(theta.values()), **gradient)
    of_guess = torch.autograd.grad(domain_loss, list(discriminator.values()))
    with torch.no_grad():
        for value, first, second in zip(theta.values(), of_class, of_domain, strict=True):
            value -= rate * (first - scale * second)
        for value, slope in zip(discriminator.values(), of_guess, strict=True):
            value -= rate * discriminator_learning_rate_ratio * slope
