"""Dropout on a CPU without the wait for random numbers.

torch draws one number of 64 bits for every value that dropout may set to zero, one after the other in a single thread. In a
training step of a small encoder that takes as long as some of the matrix products. Sixteen bits are enough: the probability is
then right to 1/131,072. And attention with dropout is computed here in the type of its inputs, where torch uses float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

BITS = 16
LEVELS = 2**BITS
LOWEST = -LEVELS // 2
ONE_OF_16_BITS = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}  # 1.0, read as an integer


class _QuickDropout(TorchFunctionMode):
    """While it is active, dropout on the CPU draws its masks by :func:`keep`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


_active = 0


def is_quick() -> bool:
    """Return whether a :func:`quick_dropout` is active."""
    return _active > 0


@contextlib.contextmanager
def quick_dropout(enabled: bool = True) -> Iterator[None]:
    """Draw the masks of dropout on the CPU quickly inside the ``with`` block."""
    global _active
    if not enabled or _active:
        yield
        return
    _active += 1
    try:
        with _QuickDropout():
            yield
    finally:
        _active -= 1


def keep(shape: torch.Size, p: float, dtype: torch.dtype = torch.bool) -> tuple[Tensor, float]:
    """Draw from torch's own generator which values are kept.

    Parameters
    ----------
    shape : torch.Size
        The shape of the values.
    p : float
        The probability of each value to be dropped, rounded to 16 bits.
    dtype : torch.dtype
        The type of the values. The mask has it too if that is 16 bits wide, since products of one type are quicker; otherwise
        the mask has bools, which need less memory.

    Returns
    -------
    tuple
        A mask, and what the kept values are to be multiplied by.
    """
    dropped = min(round(p * LEVELS), LEVELS - 1)
    numbers = random_numbers(shape.numel()).view(shape)
    if dtype in ONE_OF_16_BITS and dropped > 0:
        lowest_kept = LOWEST + dropped  # in place: to `lowest_kept` or one less, to 1 or 0, to the bits of 1.0 or 0.0
        mask = numbers.clamp_(lowest_kept - 1, lowest_kept).sub_(lowest_kept - 1).mul_(ONE_OF_16_BITS[dtype]).view(dtype)
    else:
        mask = numbers >= LOWEST + dropped
    return mask, LEVELS / (LEVELS - dropped)


def random_numbers(count: int) -> Tensor:
    """Draw integers of 16 bits, from `LOWEST` to ``LOWEST + LEVELS - 1``, from torch's own generator."""
    return torch.empty(-(-count * BITS // 64), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace or values.device.type != "cpu":
        return F.dropout(values, p, training, inplace)
    mask, scale = keep(values.shape, p, values.dtype)
    return values * mask * scale


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if not 0 < dropout_p < 1 or is_causal or enable_gqa or query.device.type != "cpu":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        lowest = torch.finfo(scores.dtype).min  # where all is masked, the result is finite
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill_(~attn_mask, lowest)
    if attn_mask is not None:
        scores = scores + attn_mask
    mask, factor = keep(scores.shape, dropout_p, scores.dtype)
    attended: Tensor = (scores.softmax(dim=-1) * mask) @ (value * factor)
    return attended
