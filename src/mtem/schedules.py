r"""Learning rates as plain functions of the step: those of Assumption 2, and the ones used in practice."""

import math
from collections.abc import Callable


def assumption_theta(step: int, k1: float) -> float:
    r"""The model's rate in Assumption 2, :math:`\eta_t = \min\{1, k_1 / t\}`, with t counted from 1.

    It is there for the theory: its sum grows with the logarithm of t only, so a model started at a rate that suits
    fine-tuning (:math:`k_1` about 5e-5) soon stands still.
    """
    return min(1.0, k1 / _count(step))


def assumption_index(step: int, k2: float, smoothness: float) -> float:
    r"""The indexes' rate in Assumption 2, :math:`\beta_t = \min\{1/L, k_2 / t^{2/3}\}`, with t counted from 1.

    ``smoothness`` is :math:`L = \max\{L_1, L_2\}`, the Lipschitz constant of the gradients in Lemma 1.
    """
    if smoothness <= 0:
        raise ValueError(f"smoothness: got {smoothness}, wanted a positive number")
    return min(1.0 / smoothness, k2 / _count(step) ** (2.0 / 3.0))


def constant(step: int, total: int, warmup: int = 0) -> float:
    """Multiplier of the base rate: up to 1 over ``warmup`` steps, then 1."""
    return _rise(step, total, warmup)


def linear(step: int, total: int, warmup: int = 0) -> float:
    """Multiplier of the base rate: up to 1 over ``warmup`` steps, then down a line that meets 0 at ``total``."""
    return _rise(step, total, warmup) if step < warmup else _remaining(step, total, warmup)


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Multiplier of the base rate: up to 1 over ``warmup`` steps, then down half a cosine that meets 0 at ``total``."""
    if step < warmup:
        return _rise(step, total, warmup)
    # (1 + cos(pi * gone)) / 2, written so that the last of very many steps does not round to 0.
    return math.sin(math.pi / 2 * _remaining(step, total, warmup)) ** 2


# name -> function(step, total, warmup): the steps count from 0, and each that is taken, 0 to total - 1, gets a positive
# multiplier; a step past the end gets the last one's.
SCHEDULES: dict[str, Callable[[int, int, int], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def _count(step: int) -> int:
    if step < 1:
        raise ValueError(f"step: got {step}, wanted 1 or more (Assumption 2 counts from 1)")
    return step


def _rise(step: int, total: int, warmup: int) -> float:
    _check(step, total, warmup)
    return min(1.0, (step + 1) / (warmup + 1))


def _remaining(step: int, total: int, warmup: int) -> float:
    _check(step, total, warmup)
    return max(total - step, 1) / max(total - warmup, 1)


def _check(step: int, total: int, warmup: int) -> None:
    if min(step, total, warmup) < 0:
        raise ValueError(f"got step {step}, total {total} and warmup {warmup}, wanted none of them negative")
