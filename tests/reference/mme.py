"""Minimax entropy read literally: cosine scores by hand, one example at a time, each player stepping its own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def probabilities(model: Any, inputs: dict[str, Tensor], temperature: float) -> list[Tensor]:
    """softmax(W f / (T |f|)) of a single example."""
    _, features = model.logits_and_features(inputs)
    feature = features[0]
    length = torch.sqrt(sum(value * value for value in feature))
    powers = [torch.exp((row @ feature) / length / temperature) for row in model.head.weight]
    return [power / sum(powers) for power in powers]


def step(
    model: Any,
    labeled: list[tuple[dict[str, Tensor], int]],
    unlabeled: list[dict[str, Tensor]],
    rate: float,
    head_learning_rate_ratio: float,
    weight: float,
    temperature: float,
) -> tuple[float, float]:
    """Both updates, in place: (cross-entropy, entropy), each before its update."""
    head = model.head.weight
    encoder = [parameter for parameter in model.trainable().values() if parameter is not head]

    # the labeled examples: everybody descends
    chances = [probabilities(model, inputs, temperature)[label] for inputs, label in labeled]
    loss = sum(-torch.log(chance) for chance in chances) / len(chances)
    slopes = torch.autograd.grad(loss, [head, *encoder])
    with torch.no_grad():
        head -= rate * head_learning_rate_ratio * slopes[0]
        for value, slope in zip(encoder, slopes[1:], strict=True):
            value -= rate * slope

    # the unlabeled ones: the head climbs the entropy, the encoder descends it
    entropies = [-sum(p * torch.log(p) for p in probabilities(model, inputs, temperature)) for inputs in unlabeled]
    entropy = sum(entropies) / len(entropies)
    slopes = torch.autograd.grad(entropy, [head, *encoder])
    with torch.no_grad():
        head += rate * head_learning_rate_ratio * weight * slopes[0]
        for value, slope in zip(encoder, slopes[1:], strict=True):
            value -= rate * weight * slope
    return float(loss.detach()), float(entropy.detach())
