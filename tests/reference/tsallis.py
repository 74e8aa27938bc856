"""The printed formulas of the Tsallis entropy, its loss and Eq. 14, read literally, one number at a time, in 200 digits."""

from collections.abc import Sequence

import mpmath

_DIGITS = 200


def entropy(probs: Sequence[float], index: float) -> float:
    """Eq. 1, and Eq. 2 at index 1.

    Eq. 1 is of probabilities, which add up to 1, and floats rounded one by one do not: what they lack, divided by psi - 1, is
    larger than the entropy itself where psi is next to 1. So they are divided by their sum first.
    """
    with mpmath.workdps(_DIGITS):
        values = [mpmath.mpf(p) for p in probs]
        values = [p / sum(values) for p in values]
        a = mpmath.mpf(index)
        if a == 1:
            return float(-sum(p * mpmath.log(p) for p in values if p > 0))
        return float((1 - sum(p**a for p in values if p > 0)) / (a - 1))


def loss(prob: float, index: float) -> float:
    """Eq. 3 for a one-hot label of the class with probability ``prob``, and the cross-entropy at index 1."""
    return float(_loss(prob, index))


def index_gradient(prob: float, index: float) -> float:
    """Eq. 14; at index 1 its limit, which l'Hopital's rule gives as half the second derivative of p^a in a, negated."""
    with mpmath.workdps(_DIGITS):
        a = mpmath.mpf(index)
        cross_entropy = _loss(prob, 1.0)
        if a == 1:
            return float(-(mpmath.log(mpmath.mpf(prob)) ** 2) / 2)
        tsallis = _loss(prob, index)
        return float((cross_entropy - tsallis) / (a - 1) - cross_entropy * tsallis)


def _loss(prob: float, index: float) -> mpmath.mpf:
    with mpmath.workdps(_DIGITS):
        p, a = mpmath.mpf(prob), mpmath.mpf(index)
        return -mpmath.log(p) if a == 1 else (1 - p ** (a - 1)) / (a - 1)
