"""Pseudo labels with the class shares that are assumed for the target."""

from __future__ import annotations

import torch
from torch import Tensor


class Alignment:
    """Shifts logits so that the pseudo labels drawn from them have the assumed class shares, for any method.

    Parameters
    ----------
    shares : Tensor, optional
        The assumed shares of the classes ``[K]``. Without them the logits are returned as they are.
    momentum : float, default 0.9
        How slowly the bias follows the predictions.
    """

    def __init__(self, shares: Tensor | None = None, momentum: float = 0.9) -> None:
        self.shares, self.momentum = shares, momentum
        self.bias: Tensor | None = None if shares is None else torch.zeros_like(shares)
        self.started = False

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits plus the bias that gives the predictions so far the assumed shares, then update the bias."""
        if self.shares is None or self.bias is None:
            return logits
        if not self.started:  # the bias is fitted to the first batch
            self.bias.copy_(_fit_bias(self.bias, logits, self.shares, step=1.0, iterations=50))
            self.started = True
        aligned = logits + self.bias
        # In place: a captured step knows the address of the bias.
        self.bias.copy_(_fit_bias(self.bias, logits, self.shares, step=1 - self.momentum, iterations=1))
        return aligned

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs."""
        if self.shares is None or self.bias is None:
            return {}
        return {"shares": self.shares, "bias": self.bias.clone(), "begun": torch.tensor(self.started)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if not state:
            return
        self.shares, self.started = state["shares"].clone(), bool(state["begun"])
        if self.bias is None:
            self.bias = state["bias"].clone()
        else:
            self.bias.copy_(state["bias"])


def _fit_bias(bias: Tensor, logits: Tensor, shares: Tensor, step: float, iterations: int) -> Tensor:
    for _ in range(iterations):
        mean = torch.softmax(logits.float() + bias, dim=-1).mean(dim=0).clamp_min(1e-6)
        bias = (bias + step * (shares.log() - mean.log())).clamp(-20, 20)
    return bias
