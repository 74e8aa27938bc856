r"""Class shares of the target: what they are assumed to be, and how predictions are brought in line with them.

Self-training follows its own predictions. Where the target's classes have other shares than the source's, or one class is rare,
the predictions drift towards the frequent class with every step. Two remedies need no target labels:

- *alignment*: pseudo labels are drawn from :math:`\mathrm{softmax}(\mathrm{logit}_i + b)`, with b such that their mean is
  :math:`\pi`, the assumed shares (`mtem.methods.alignment`);
- *correction*: the finished classifier gets one bias per class with which its mean prediction on the unlabeled target texts is
  :math:`\pi`.

:math:`\pi` may be uniform, the source's, that of the labeled target texts, or estimated by expectation-maximisation
(Saerens et al. 2002) on probabilities whose temperature and biases were fitted on held-out source texts. The estimate assumes
that the texts of a class are similar in both domains and only the shares differ. Even shares help where they are about right
and harm where a class is rare. So `auto` takes the shares of the labeled target texts, with `EVEN_LABELS` labels of even shares
added, and where there are none the model says what to assume (`Model.prior_without_labels`), most often nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from mtem.methods.alignment import Alignment

if TYPE_CHECKING:
    from mtem.selection.criteria import CandidateOutputs

KINDS = ("none", "auto", "uniform", "source", "estimated", "labeled")
EVEN_LABELS = 30  # which "auto" adds to the labeled target texts; chosen on events held out of the sources (docs/pheme.md)
SMALLEST_SHARE = 0.01  # no class is assumed to be rarer: its bias would be unbounded


def fit_temperature_and_bias(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Fit the temperature T and the bias b of softmax(logits / T + b) to labels, weakly regularised to 1 and 0."""
    logits = np.asarray(logits, dtype=np.float64)
    classes = logits.shape[1]
    rows = np.arange(len(labels))

    def loss(values: np.ndarray) -> float:
        log_probs = log_softmax(logits * np.exp(values[0]) + values[1:], axis=1)
        return float(-log_probs[rows, labels].mean() + 1e-3 * (values**2).sum())

    fitted = minimize(loss, np.zeros(1 + classes), method="L-BFGS-B", bounds=[(-3.0, 3.0)] + [(-5.0, 5.0)] * classes).x
    return float(np.exp(-fitted[0])), fitted[1:] - fitted[1:].mean()


def estimate_shares(
    source_logits: np.ndarray, source_labels: np.ndarray, target_logits: np.ndarray, *, steps: int = 1000
) -> np.ndarray:
    """Estimate the target's class shares by expectation-maximisation.

    Parameters
    ----------
    source_logits, source_labels
        Of held-out source texts, [S, K] and [S].
    target_logits
        Of target texts, [T, K].
    steps
        Largest number of iterations.

    Returns
    -------
    np.ndarray
        [K], none below `SMALLEST_SHARE`.
    """
    temperature, bias = fit_temperature_and_bias(source_logits, source_labels)
    classes = target_logits.shape[1]
    start = (np.bincount(source_labels, minlength=classes) + 1.0) / (len(source_labels) + classes)
    probs = softmax(np.asarray(target_logits, dtype=np.float64) / temperature + bias, axis=1)
    shares = start
    for _ in range(steps):
        weighted = probs * (shares / start)
        new = (weighted / weighted.sum(axis=1, keepdims=True)).mean(axis=0)
        change = float(np.abs(new - shares).max())
        shares = new
        if change < 1e-7:
            break
    return floored(shares)


def assumed_shares(
    kind: str,
    source_shares: np.ndarray,
    source_logits: np.ndarray,
    source_labels: np.ndarray,
    target_logits: np.ndarray,
    target_labels: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the class shares that a value of the setting `target_class_prior` stands for; None if it assumes none.

    Parameters
    ----------
    kind
        One of `KINDS`.
    source_shares
        The classes' shares among the source labels, [K].
    source_logits, source_labels, target_logits
        As for `estimate_shares`.
    target_labels
        Class numbers of the labeled target texts.
    """
    known = np.zeros(0) if target_labels is None else target_labels
    if kind == "none" or (kind == "auto" and not len(known)):
        return None
    if kind == "uniform":
        return np.full(len(source_shares), 1 / len(source_shares))
    if kind in ("auto", "labeled"):
        classes = len(source_shares)
        return counted_shares(known, classes, EVEN_LABELS / classes if kind == "auto" else 0.5)
    return floored(source_shares if kind == "source" else estimate_shares(source_logits, source_labels, target_logits))


def counted_shares(labels: np.ndarray, classes: int, added: float) -> np.ndarray:
    """Return the classes' shares among some labels, with `added` labels more of each class."""
    counts = np.bincount(np.asarray(labels, dtype=np.int64), minlength=classes) + added
    return floored(counts / counts.sum())


def class_weights(labels: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    """Return a weight per text, 1 on average, with which the classes that occur have the given shares."""
    if shares is None:
        return np.ones(len(labels))
    weights = np.asarray(shares, dtype=float)[labels] / np.bincount(labels, minlength=len(shares))[labels]
    return weights / weights.mean() if weights.any() else np.ones(len(labels))


def floored(shares: np.ndarray) -> np.ndarray:
    """Raise shares below `SMALLEST_SHARE` and normalise."""
    shares = np.maximum(np.asarray(shares, dtype=np.float64), SMALLEST_SHARE)
    return np.asarray(shares / shares.sum())


def correction(target_logits: np.ndarray, shares: np.ndarray, *, steps: int = 500) -> np.ndarray:
    """Return the bias per class, of mean 0, with which the mean of the softmax over the target texts is `shares`."""
    logits = np.asarray(target_logits, dtype=np.float64)
    bias = np.zeros(logits.shape[1])
    for _ in range(steps):
        mean = softmax(logits + bias, axis=1).mean(axis=0)
        change = np.log(shares) - np.log(np.maximum(mean, 1e-12))
        bias = np.clip(bias + change, -30.0, 30.0)
        if np.abs(change).max() < 1e-6:
            break
    return np.asarray(bias - bias.mean())


class TargetPrior:
    """The class shares assumed of the target in a run: aligns pseudo labels and corrects outputs. Without shares, nothing."""

    def __init__(self, alignment: Alignment | None = None) -> None:
        self.alignment = alignment or Alignment()

    @classmethod
    def from_shares(cls, shares: np.ndarray | None, device: torch.device) -> TargetPrior:
        """Assume these shares, [K]; None: assume nothing."""
        if shares is None:
            return cls()
        return cls(Alignment(torch.tensor(shares, dtype=torch.float32, device=device)))

    @property
    def shares(self) -> np.ndarray | None:
        """The assumed shares, [K], or None."""
        return None if self.alignment.shares is None else self.alignment.shares.double().cpu().numpy()

    def bias(self, target_logits: np.ndarray) -> np.ndarray:
        """Return the correction for a model with these logits on the target."""
        if self.shares is None:
            raise ValueError("no class shares are assumed")
        return correction(target_logits, self.shares)

    def corrected(self, outputs: CandidateOutputs) -> CandidateOutputs:
        """Return the outputs of the corrected model; source texts are weighted as if their classes had the assumed shares."""
        if self.shares is None or not outputs.finite:
            return outputs
        bias = self.bias(outputs.target_logits)
        return dataclasses.replace(
            outputs, source_logits=outputs.source_logits + bias, target_logits=outputs.target_logits + bias,
            source_weights=class_weights(outputs.source_labels, self.shares),
        )  # fmt: skip
