"""How far apart two evaluations of one formula may be: so many roundings of their dtype, at the size of the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# One pass through a small network, or a few steps of one: sums of some hundred terms a dozen layers deep, in whatever order a
# machine takes them. Two orders were seen to differ by up to ten roundings of the largest result.
PASS = 100


def allowed(dtype: torch.dtype, size: float, roundings: float = PASS) -> float:
    """The distance that so many roundings make between numbers of that size."""
    return roundings * torch.finfo(dtype).eps * size


def assert_near(
    found: Any,
    wanted: Any,
    roundings: float = PASS,
    *,
    dtype: torch.dtype | None = None,
    size: float | None = None,
    msg: str = "",
) -> None:
    """Numbers, arrays or tensors are equal but for rounding.

    `dtype`: what they were computed or kept in; the coarser one of the two if nothing is said. `size`: of the largest number
    that entered a sum; the largest of `wanted` if nothing is said. A small number beside large ones came from sums as large
    as theirs, and cannot be nearer than these.
    """
    dtypes = [dtype] if dtype is not None else [_dtype(found), _dtype(wanted)]
    coarsest = max(dtypes, key=lambda each: torch.finfo(each).eps)
    one, other = _double(found), _double(wanted)
    assert one.shape == other.shape, f"{msg} shapes {one.shape} and {other.shape}"
    assert np.isfinite(one).all() and np.isfinite(other).all(), f"{msg} not all are finite"
    if not one.size:
        return
    limit = allowed(coarsest, float(np.abs(other).max()) if size is None else size, roundings)
    apart = np.abs(one - other)
    worst = np.unravel_index(apart.argmax(), apart.shape)
    assert apart[worst] <= limit, (
        f"{msg} {apart[worst]:.3g} apart at {tuple(map(int, worst))} ({one[worst]!r}, wanted {other[worst]!r}); "
        f"{roundings:g} roundings of {coarsest} at that size are {limit:.3g}"
    )


def assert_weights_near(found: dict[str, Any], wanted: dict[str, Any], roundings: float = PASS) -> None:
    """Two sets of weights that were trained alike: a step's rounding has the size of the largest weights, in all of them."""
    size = max(float(np.abs(_double(wanted[name])).max()) for name in found)
    for name, value in found.items():
        assert_near(value, wanted[name], roundings, size=size, msg=name)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.Tensor):
        return value.dtype if value.is_floating_point() else torch.float64
    kind = np.asarray(value).dtype
    return getattr(torch, kind.name) if kind.kind == "f" else torch.float64


def _double(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)
