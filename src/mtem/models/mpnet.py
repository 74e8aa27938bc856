"""Fused attention for MPNet, which transformers only has in its plain form.

MPNet adds a bias for the distance of two positions to the attention scores. The plain form keeps several matrices of scores for
each layer; the fused one (`torch.nn.functional.scaled_dot_product_attention`) keeps none. It takes bias and mask as one matrix,
which all layers share.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

MODEL_TYPE = "mpnet"


def fuse_attention(network: PreTrainedModel) -> None:
    """Let an MPNet compute its attention by the fused function, with the same weights and results."""
    # Classes and not bound methods: the encoder may be copied later, as the upper part of itself.
    for module in network.modules():
        if type(module) is MPNetEncoder:
            module.__class__ = FusedEncoder
        elif type(module) is MPNetSelfAttention:
            module.__class__ = FusedSelfAttention


class FusedEncoder(MPNetEncoder):
    """The layers of an MPNet, which get the mask as a part of the bias."""

    _mask: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *arguments: Any, **named: Any) -> Any:
        """Run the layers."""
        self._mask = attention_mask
        try:
            return super().forward(hidden_states, None, *arguments, **named)
        finally:
            self._mask = None

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
        """Return the bias of positions and, if there is a mask, of padding: [1 or N, heads, length, length]."""
        bias = super().compute_position_bias(x[:1], position_ids, num_buckets)  # type: ignore[no-untyped-call]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = bias.to(dtype)
        if self._mask is None:
            return cast(Tensor, bias)
        return cast(Tensor, bias + self._mask.clamp(min=torch.finfo(dtype).min).to(dtype))


class FusedSelfAttention(MPNetSelfAttention):
    """The attention of one layer."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **named: Any,
    ) -> Any:
        """Attend; where the attention itself is asked for, in the plain form."""
        if output_attentions or attention_mask is not None:
            plain = super().forward
            return plain(hidden_states, attention_mask, position_bias, output_attentions, **named)  # type: ignore[no-untyped-call]
        count, length = hidden_states.shape[:2]

        def heads(values: Tensor) -> Tensor:
            return values.view(count, length, -1, self.attention_head_size).transpose(1, 2)

        query, key, value = (heads(layer(hidden_states)) for layer in (self.q, self.k, self.v))
        if position_bias is not None:
            position_bias = position_bias.to(query.dtype).expand(count, -1, -1, -1)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=position_bias, dropout_p=dropout)
        return (self.o(mixed.transpose(1, 2).reshape(count, length, self.all_head_size)),)
