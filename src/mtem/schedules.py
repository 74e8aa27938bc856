r"""Learning rates as plain functions of the step: those of Assumption 2, and the schedules used in practice."""

import math
from collections.abc import Callable


def assumption_theta(step: int, k1: float) -> float:
    r"""Return the model's learning rate in Assumption 2, :math:`\eta_t = \min\{1, k_1 / t\}`.

    Parameters
    ----------
    step : int
        :math:`t`, counted from 1.
    k1 : float
        :math:`k_1`.

    Returns
    -------
    float
        :math:`\eta_t`.

    Notes
    -----
    This schedule is for the theory. Its sum grows only with the logarithm of t, so with a :math:`k_1` that suits
    fine-tuning (about 5e-5) the weights soon stop changing.
    """
    return min(1.0, k1 / _checked_step(step))


def assumption_index(step: int, k2: float, smoothness: float) -> float:
    r"""Return the indexes' learning rate in Assumption 2, :math:`\beta_t = \min\{1/L, k_2 / t^{2/3}\}`.

    Parameters
    ----------
    step : int
        :math:`t`, counted from 1.
    k2 : float
        :math:`k_2`.
    smoothness : float
        :math:`L = \max\{L_1, L_2\}`, the Lipschitz constant of the gradients in Lemma 1.

    Returns
    -------
    float
        :math:`\beta_t`.
    """
    if smoothness <= 0:
        raise ValueError(f"smoothness: expected a positive number, got {smoothness}")
    decay: float = _checked_step(step) ** (2.0 / 3.0)
    return min(1.0 / smoothness, k2 / decay)


def constant(step: int, total: int, warmup: int = 0) -> float:
    """Return a factor that rises to 1 over ``warmup`` steps and stays there. See :data:`SCHEDULES`."""
    return _rise(step, total, warmup)


def linear(step: int, total: int, warmup: int = 0) -> float:
    """Return a factor that rises to 1 over ``warmup`` steps and falls linearly to 0 at ``total``. See :data:`SCHEDULES`."""
    return _rise(step, total, warmup) if step < warmup else _remaining(step, total, warmup)


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Return a factor that rises to 1 over ``warmup`` steps and falls to 0 at ``total`` along a half cosine.

    See :data:`SCHEDULES`.
    """
    if step < warmup:
        return _rise(step, total, warmup)
    # (1 + cos(pi * progress)) / 2, written so that the last of very many steps does not round to 0.
    return math.sin(math.pi / 2 * _remaining(step, total, warmup)) ** 2


# name -> function(step, total, warmup), which multiplies the base learning rate. Steps count from 0. The factors of the
# steps 0 to total - 1 are positive; a step past the end has the factor of the last one.
SCHEDULES: dict[str, Callable[[int, int, int], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def _checked_step(step: int) -> int:
    if step < 1:
        raise ValueError(f"step: expected 1 or more (Assumption 2 counts from 1), got {step}")
    return step


def _rise(step: int, total: int, warmup: int) -> float:
    _check(step, total, warmup)
    return min(1.0, (step + 1) / (warmup + 1))


def _remaining(step: int, total: int, warmup: int) -> float:
    _check(step, total, warmup)
    return max(total - step, 1) / max(total - warmup, 1)


def _check(step: int, total: int, warmup: int) -> None:
    if min(step, total, warmup) < 0:
        raise ValueError(f"expected no negative values, got step {step}, total {total} and warmup {warmup}")
