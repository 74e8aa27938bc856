"""Probabilities from logits: softmax, entropy, and the temperature under which they fit labels best."""

from __future__ import annotations

import math

import numpy as np

COLDEST, HOTTEST = 0.05, 20.0  # bounds of a calibration temperature


def log_softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log softmax(scores / temperature) by rows, in double precision."""
    scores = np.asarray(scores, dtype=np.float64)
    shifted = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def entropy(log_probs: np.ndarray) -> np.ndarray:
    """H(p) = -sum_k p_k log p_k by rows; 0 log 0 = 0."""
    probs = np.exp(log_probs)
    return -(probs * np.where(probs > 0, log_probs, 0.0)).sum(axis=-1)


def calibrate(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    r"""The temperature T in [0.05, 20] under which softmax(scores / T) fits the labels best.

    Minimises the cross-entropy with labels smoothed by :math:`\epsilon = 1/(S+1)`,

    .. math:: -\frac1S \sum_i \sum_k \big((1-\epsilon)[k=y_i] + \epsilon/K\big) \log \mathrm{softmax}(b s_i)_k,

    convex in :math:`b = 1/T`, by bisection of its slope in log T. The smoothing is Platt's: S texts, all of them right,
    attest a confidence of about 1 - 1/S and not of 1, so separated data have their temperature too. The result
    scales with the scores as long as no bound is met; scores without differences have no best temperature and get 1.
    With ``weights`` the mean over the texts is a weighted one.
    """
    scores = np.asarray(scores, dtype=np.float64)
    rows = len(scores)
    centered = scores - scores.max(axis=1, keepdims=True)
    if not rows or not centered.any():
        return 1.0
    smoothing = 1.0 / (rows + 1)
    wanted = (1 - smoothing) * centered[np.arange(rows), np.asarray(labels)] + smoothing * centered.mean(axis=1)

    def too_sharp(temperature: float) -> bool:
        probs = np.exp(log_softmax(centered, temperature))
        return float(np.average((probs * centered).sum(axis=1) - wanted, weights=weights)) >= 0

    low, high = math.log(COLDEST), math.log(HOTTEST)
    if not too_sharp(COLDEST):
        return COLDEST
    if too_sharp(HOTTEST):
        return HOTTEST
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if too_sharp(math.exp(middle)) else (low, middle)
    return math.exp((low + high) / 2)
