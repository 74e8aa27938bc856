"""Classification heads other than a linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.errors import RequestError


class CosineHead(nn.Module):
    r"""A classifier that depends only on the direction of the features: :math:`W f / (T \lVert f \rVert)`.

    `weight` is not normalized and there is no learned bias. `bias` is a buffer of zeros that a correction of the class prior
    may change.

    Parameters
    ----------
    linear
        The layer whose weights the head starts from.
    temperature
        The divisor :math:`T`.

    Raises
    ------
    RequestError
        If the temperature is not a positive number.
    """

    in_features: int
    out_features: int
    temperature: float
    weight: nn.Parameter
    bias: Tensor

    def __init__(self, linear: nn.Linear | CosineHead, temperature: float) -> None:
        super().__init__()
        # It may come from the config.json of a saved model.
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not number or not 0 < temperature < 1e15:
            raise RequestError(f"temperature of the cosine classifier: expected a positive number, got {temperature!r}")
        self.in_features, self.out_features, self.temperature = linear.in_features, linear.out_features, temperature
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.register_buffer("bias", linear.weight.detach().new_zeros(self.out_features))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits of shape [N, K] for features of shape [N, D]."""
        with torch.autocast(features.device.type, enabled=False):  # a small temperature magnifies half precision's rounding
            directions = F.normalize(features.to(self.weight.dtype), dim=-1)
            return F.linear(directions, self.weight) / self.temperature + self.bias

    # A linear layer W' f with W' = W / (T sqrt(d)) predicts the same class for every f as long as the bias is zero, and has
    # about the same confidence where the norm of f is about sqrt(d). It is saved in place of this head, so that other
    # libraries can read the model.

    def folded(self) -> nn.Linear:
        """Return the linear layer that predicts the same classes."""
        linear = nn.Linear(self.in_features, self.out_features, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight / (self.temperature * self.in_features**0.5))
            linear.bias.copy_(self.bias)
        return linear

    @classmethod
    def unfolded(cls, linear: nn.Linear, temperature: float) -> CosineHead:
        """Return the head that `folded` turned into `linear`."""
        head = cls(linear, temperature)
        with torch.no_grad():
            head.weight.mul_(temperature * head.in_features**0.5)
            if linear.bias is not None:
                head.bias.copy_(linear.bias)
        return head
