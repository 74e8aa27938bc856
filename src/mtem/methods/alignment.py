"""Pseudo labels with the class shares that are assumed of the target."""

from __future__ import annotations

import torch
from torch import Tensor


class Alignment:
    """Pseudo labels with the assumed class shares, whatever the method that makes them. Does nothing without `shares`."""

    def __init__(self, shares: Tensor | None = None, momentum: float = 0.9) -> None:
        self.shares, self.momentum = shares, momentum
        self.bias = None if shares is None else torch.zeros_like(shares)
        self.begun = False

    @torch.no_grad()
    def __call__(self, scores: Tensor) -> Tensor:
        """The scores with the bias that gave the predictions so far the assumed shares; these predictions then move it."""
        if self.shares is None:
            return scores
        if not self.begun:  # the first batch has it fitted
            self._move(scores, 1.0, 50)
            self.begun = True
        aligned = scores + self.bias
        self._move(scores, 1 - self.momentum, 1)
        return aligned

    def _move(self, scores: Tensor, step: float, times: int) -> None:
        for _ in range(times):
            mean = torch.softmax(scores.float() + self.bias, dim=-1).mean(dim=0).clamp_min(1e-6)
            self.bias = (self.bias + step * (self.shares.log() - mean.log())).clamp(-20, 20)

    def state(self) -> dict[str, Tensor]:
        if self.shares is None:
            return {}
        return {"shares": self.shares, "bias": self.bias, "begun": torch.tensor(self.begun)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if state:
            self.shares, self.bias, self.begun = state["shares"].clone(), state["bias"].clone(), bool(state["begun"])
