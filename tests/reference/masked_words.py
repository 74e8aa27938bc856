"""Masked words, read literally: logits of the whole vocabulary at every position, one text after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(scores: Tensor) -> Tensor:
    powers = torch.exp(scores - scores.max().detach())
    return powers / powers.sum()


def head(state: Tensor, dense: torch.nn.Linear, norm: torch.nn.LayerNorm, bias: Tensor, embeddings: Tensor) -> Tensor:
    """The scores of all tokens for one position: dense, gelu, normalised, then the embedding of each token times it."""
    values = dense.weight @ state + dense.bias
    values = values * 0.5 * (1 + torch.erf(values / 2**0.5))
    values = (values - values.mean()) / (((values - values.mean()) ** 2).mean() + norm.eps).sqrt() * norm.weight + norm.bias
    return torch.stack([embedding @ values for embedding in embeddings]) + bias


def loss(scores: Tensor, original: list[list[int]], chosen: list[list[bool]]) -> Tensor:
    """The mean of -log p over all chosen positions; `scores` are those of every position, [N, L, vocabulary]."""
    terms = [
        -torch.log(probabilities(scores[i, j])[token])
        for i, text in enumerate(original)
        for j, token in enumerate(text)
        if chosen[i][j]
    ]
    return torch.stack(terms).mean() if terms else torch.zeros(())
