r"""The class shares of the target: what they are assumed or estimated to be, and how predictions are brought in line with them.

Self-training follows its own predictions. Where the target's classes are shared out otherwise than the source's, or one is
small, the predictions drift to the larger one with every step. Two remedies, without target labels:

- *alignment*: pseudo labels are drawn from :math:`\mathrm{softmax}(\mathrm{score}_i + b)`, with b kept such that their mean is
  :math:`\pi`, the shares that are assumed;
- *correction*: the finished classifier gets a bias for each class with which its mean prediction on the unlabeled target texts
  is :math:`\pi`.

:math:`\pi` may be uniform, the source's, that of the labeled target texts (where there are some), or estimated by
expectation-maximisation (Saerens et al. 2002) on probabilities whose temperature and biases were fitted on held-out source
texts (without that the estimate follows the classifier's errors). The estimate assumes that the classes look alike in both
domains and only their shares differ; where they do not, it is wrong, and `uniform` is the safer choice.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

KINDS = ("none", "uniform", "source", "estimated", "labeled")
LEAST = 0.01  # no class is assumed to be rarer: its bias would be without bounds


def calibration(scores: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The temperature T and the bias b with which softmax(scores / T + b) fits the labels best, slightly held to 1 and 0."""
    scores = np.asarray(scores, dtype=np.float64)
    classes = scores.shape[1]
    rows = np.arange(len(labels))

    def loss(values: np.ndarray) -> float:
        logs = log_softmax(scores * np.exp(values[0]) + values[1:], axis=1)
        return float(-logs[rows, labels].mean() + 1e-3 * (values**2).sum())

    found = minimize(loss, np.zeros(1 + classes), method="L-BFGS-B", bounds=[(-3.0, 3.0)] + [(-5.0, 5.0)] * classes).x
    return float(np.exp(-found[0])), found[1:] - found[1:].mean()


def estimate(source_logits: np.ndarray, source_labels: np.ndarray, target_logits: np.ndarray, *, steps: int = 1000) -> np.ndarray:
    """The target's class shares by expectation-maximisation, from logits of held-out source and of target texts."""
    temperature, bias = calibration(source_logits, source_labels)
    classes = target_logits.shape[1]
    start = (np.bincount(source_labels, minlength=classes) + 1.0) / (len(source_labels) + classes)
    probs = softmax(np.asarray(target_logits, dtype=np.float64) / temperature + bias, axis=1)
    shares = start
    for _ in range(steps):
        weighted = probs * (shares / start)
        new = (weighted / weighted.sum(axis=1, keepdims=True)).mean(axis=0)
        moved = float(np.abs(new - shares).max())
        shares = new
        if moved < 1e-7:
            break
    return floored(shares)


def assumed(
    kind: str,
    source_shares: np.ndarray,
    evidence: tuple[np.ndarray, np.ndarray, np.ndarray],
    target_labels: np.ndarray | None = None,
) -> np.ndarray | None:
    """The shares that a setting stands for; `evidence` is what `estimate` takes, `target_labels` are class numbers."""
    if kind == "none":
        return None
    if kind == "uniform":
        return np.full(len(source_shares), 1 / len(source_shares))
    if kind == "labeled":
        return counted([] if target_labels is None else target_labels, len(source_shares))
    return floored(source_shares if kind == "source" else estimate(*evidence))


def counted(labels: np.ndarray, classes: int) -> np.ndarray:
    """The classes' shares among some labels, half a label added to each: a class that a few texts lack may still be there."""
    counts = np.bincount(np.asarray(labels, dtype=np.int64), minlength=classes) + 0.5
    return floored(counts / counts.sum())


def class_weights(labels: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    """A weight for each text with which the classes that there are have the given shares; 1 on average."""
    if shares is None:
        return np.ones(len(labels))
    weights = np.asarray(shares, dtype=float)[labels] / np.bincount(labels, minlength=len(shares))[labels]
    return weights / weights.mean() if weights.any() else np.ones(len(labels))


def floored(shares: np.ndarray) -> np.ndarray:
    shares = np.maximum(np.asarray(shares, dtype=np.float64), LEAST)
    return shares / shares.sum()


def correction(target_logits: np.ndarray, shares: np.ndarray, *, steps: int = 500) -> np.ndarray:
    """The bias of each class, of mean 0, with which the mean of the softmax is `shares`."""
    scores = np.asarray(target_logits, dtype=np.float64)
    bias = np.zeros(scores.shape[1])
    for _ in range(steps):
        mean = softmax(scores + bias, axis=1).mean(axis=0)
        change = np.log(shares) - np.log(np.maximum(mean, 1e-12))
        bias = np.clip(bias + change, -30.0, 30.0)
        if np.abs(change).max() < 1e-6:
            break
    return bias - bias.mean()
