"""BiAT's step, read literally: one text at a time, every perturbation by its own backward pass, two players by two gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Params = dict[str, Tensor]


class Text(NamedTuple):
    """What the encoder takes, the embeddings with zeros as padding, the label if known, the draw of the virtual perturbation."""

    inputs: Any
    embeddings: Tensor
    label: int | None = None
    source: bool = True
    drawn: Tensor | None = None


class Constants(NamedTuple):
    lambdas: tuple[float, float, float, float]
    epsilon: float
    xi: float
    eta: float
    target_head_learning_rate_ratio: float


def probabilities(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scores = weight @ features + bias
    return torch.exp(scores) / torch.exp(scores).sum()


def entropy(p: Tensor) -> Tensor:
    return -sum(value * torch.log(value) for value in p)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))


def of_length(direction: Tensor, length: Tensor) -> Tensor:
    return direction * length / torch.sqrt((direction**2).sum())


def step(
    features_of: Callable[[Params, Any, Tensor], Tensor],
    params: Params,
    head: tuple[str, str],
    target_head: tuple[Tensor, Tensor],
    labeled: list[Text],
    target_labeled: list[Text],
    unlabeled: list[Text],
    constants: Constants,
) -> tuple[Params, tuple[Tensor, Tensor]]:
    """One step: (all parameters, the target's own head). `head` names weight and bias among the parameters."""
    theta = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    own = [value.detach().clone().requires_grad_() for value in target_head]

    def h(text: Text, noise: Tensor) -> Tensor:
        return probabilities(features_of(theta, text.inputs, noise), theta[head[0]], theta[head[1]])

    def t(text: Text, noise: Tensor) -> Tensor:
        return probabilities(features_of(theta, text.inputs, noise), *own)

    def length(text: Text) -> Tensor:
        return torch.sqrt((text.embeddings**2).sum())

    def uphill(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        start = start.detach().clone().requires_grad_()
        return torch.autograd.grad(function(start), start)[0]

    one, two, three, four = constants.lambdas
    loss = torch.zeros(())
    for text in labeled:
        nothing = torch.zeros_like(text.embeddings)
        radius = constants.epsilon * length(text)
        loss = loss - torch.log(h(text, nothing)[text.label]) / len(labeled)

        away = of_length(uphill(lambda r, x=text: -torch.log(h(x, r)[x.label]), nothing), radius)
        loss = loss - one * torch.log(h(text, away)[text.label]) / len(labeled)

        if target_labeled and text.source:
            across = -of_length(uphill(lambda r, x=text: -torch.log(t(x, r)[x.label]), nothing), radius)
            loss = loss - two * torch.log(h(text, across)[text.label]) / sum(other.source for other in labeled)

    for text in target_labeled:
        loss = loss - torch.log(t(text, torch.zeros_like(text.embeddings))[text.label]) / len(target_labeled)

    contested = torch.zeros(())
    for text in unlabeled:
        seen = h(text, torch.zeros_like(text.embeddings))
        contested = contested + four * entropy(seen) / len(unlabeled)

        seen = seen.detach()
        start = of_length(text.drawn, constants.xi * length(text))
        ahead = uphill(lambda r, x=text, p=seen: divergence(p, h(x, r)) + entropy(h(x, r)), start)
        moved = h(text, of_length(ahead, constants.epsilon * length(text)))
        loss = loss + three * (entropy(moved) - torch.log(moved[int(seen.argmax())])) / len(unlabeled)

    everything = [*theta.values(), *own]
    common = torch.autograd.grad(loss, everything, allow_unused=True, retain_graph=True)
    played = torch.autograd.grad(contested, everything, allow_unused=True)
    found = [
        (torch.zeros_like(value) if a is None else a, torch.zeros_like(value) if b is None else b)
        for value, a, b in zip(everything, common, played, strict=True)
    ]
    moved_theta = {}
    for (name, value), (shared, game) in zip(theta.items(), found, strict=False):
        gradient = shared - game if name in head else shared + game  # the head raises the entropy, the encoder lowers it
        moved_theta[name] = (value - constants.eta * gradient).detach()
    rate = constants.eta * constants.target_head_learning_rate_ratio
    weight, bias = ((value - rate * shared).detach() for value, (shared, _) in zip(own, found[-2:], strict=True))
    return moved_theta, (weight, bias)
