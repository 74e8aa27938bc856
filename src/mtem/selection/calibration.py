"""Probabilities from logits: log-softmax, entropy, and the temperature that fits labels best."""

from __future__ import annotations

import math

import numpy as np

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return log softmax(logits / temperature) by rows, in double precision."""
    logits = np.asarray(logits, dtype=np.float64)
    shifted = (logits - logits.max(axis=1, keepdims=True)) / temperature
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def entropy(log_probs: np.ndarray) -> np.ndarray:
    """Return H(p) = -sum_k p_k log p_k by rows; 0 log 0 = 0."""
    probs = np.exp(log_probs)
    return np.asarray(-(probs * np.where(probs > 0, log_probs, 0.0)).sum(axis=-1))


def calibrate(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    r"""Return the temperature T in [0.05, 20] under which softmax(logits / T) fits the labels best.

    Parameters
    ----------
    logits, labels
        [S, K] and [S] class numbers.
    weights
        [S], of the mean over the texts; all equal by default.

    Notes
    -----
    Minimises the cross-entropy with labels smoothed by :math:`\epsilon = 1/(S+1)`,

    .. math:: -\frac1S \sum_i \sum_k \big((1-\epsilon)[k=y_i] + \epsilon/K\big) \log \mathrm{softmax}(b s_i)_k,

    convex in :math:`b = 1/T`, by bisection of its slope in log T. The smoothing is Platt's: if all of S texts are classified
    correctly, the data supports a confidence of about 1 - 1/S and not of 1, so separated data has a finite optimum too.
    Logits that are all equal have no best temperature and get 1.
    """
    logits = np.asarray(logits, dtype=np.float64)
    rows = len(logits)
    centered = logits - logits.max(axis=1, keepdims=True)
    if not rows or not centered.any():
        return 1.0
    smoothing = 1.0 / (rows + 1)
    expected = (1 - smoothing) * centered[np.arange(rows), np.asarray(labels)] + smoothing * centered.mean(axis=1)

    def too_sharp(temperature: float) -> bool:
        probs = np.exp(log_softmax(centered, temperature))
        return float(np.average((probs * centered).sum(axis=1) - expected, weights=weights)) >= 0

    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    if not too_sharp(LOWEST_TEMPERATURE):
        return LOWEST_TEMPERATURE
    if too_sharp(HIGHEST_TEMPERATURE):
        return HIGHEST_TEMPERATURE
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if too_sharp(math.exp(middle)) else (low, middle)
    return math.exp((low + high) / 2)
