r"""Choosing among candidate weights without target labels.

A criterion is a plain function of an :class:`CandidateOutputs` and higher is better. No target label enters any signature. With
:math:`p_i` the softmax of target text i, :math:`\bar p` their mean, H the Gibbs entropy and z a feature vector:

``infomax`` (default)
    :math:`H(\bar p) - \frac1N\sum_i H(p_i)` on probabilities whose one temperature was fitted on the held-out source
    texts: each prediction sure, all of them together diverse. In [0, log K]. Fails when the target's classes are really
    lopsided (it likes even ones) and cannot tell a confident mistake from a confident hit.
``infomax-raw``
    The same without the temperature, as in the literature. Fails also by rewarding weights that are merely larger.
``source-validation``
    Accuracy on held-out source texts, ties broken by their likelihood. Fails by not looking at the target at all.
``density``
    Soft neighbourhood density (Saito et al. 2021): with unit-length :math:`\hat p_i`, the mean over i of the entropy of
    :math:`\mathrm{softmax}_{j\ne i}(\hat p_i\cdot\hat p_j/0.05)`. Fails on collapse: one class for all is
    as dense as can be.
``dev``
    Deep embedded validation (You et al. 2019): minus the source error reweighted to the target by a domain classifier
    on the features, with a control variate. Fails when the domains hardly overlap: a few texts carry all the weight.
``reverse``
    Reverse validation (Zhong et al. 2010) in feature space: a fresh logistic regression learns the candidate's labels
    of the target and is scored by balanced accuracy on the source. Fails on features that separate the source anyway.
``meta``
    Minus the source loss after a virtual step on the target, where the method takes one. Fails by being noisy (it is a
    mean over mini-batches) and small for a step that does nothing.

Why infomax on calibrated probabilities is the default: it rewards what adaptation is meant to bring, sure and diverse
predictions on the target, and punishes collapse. Entropy-minimising methods sharpen everything, which is no knowledge:
the temperature takes that gain away, since a model that is surer than it is right on the source is cooled down. A model
that forgets its source task is given a high temperature, so forgetting is punished as well.

A candidate whose scores or features are not finite gets ``-inf``; for finite input no criterion returns NaN.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from mtem.errors import RequestError
from mtem.selection.calibration import calibrate, entropy, log_softmax

DENSITY_TEMPERATURE = 0.05
DENSITY_ROWS = 2000
DEV_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # inverse regularisation of the domain classifier
REVERSE_STRENGTH = 0.1
LARGEST_LOG_RATIO = math.log(1e6)


@dataclass(frozen=True)
class CandidateOutputs:
    """What is known about one candidate without target labels: S held-out source texts, T target texts, K classes."""

    source_logits: np.ndarray
    """[S, K] logits on held-out source texts."""
    source_labels: np.ndarray
    """[S] their class numbers."""
    target_logits: np.ndarray
    """[T, K] logits on the unlabeled target texts, or on a sample of them, the same for every candidate."""
    source_features: np.ndarray
    """[S, D]"""
    target_features: np.ndarray
    """[T, D]"""
    meta_loss: float | None = None
    """Source loss after a virtual step on the target, when the method takes one."""
    source_weights: np.ndarray | None = None
    """[S] how much each held-out source text counts, where class shares are assumed of the target; None: all alike."""

    def __post_init__(self) -> None:
        for name in ("source_logits", "target_logits", "source_features", "target_features"):
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
            if getattr(self, name).ndim != 2 or not len(getattr(self, name)):
                raise ValueError(f"{name} wants shape [rows >= 1, columns], got {getattr(self, name).shape}")
        object.__setattr__(self, "source_labels", np.asarray(self.source_labels))
        rows, classes = self.source_logits.shape
        wanted = {
            "source_labels": (rows,),
            "target_logits": (len(self.target_logits), classes),
            "source_features": (rows, self.source_features.shape[1]),
            "target_features": (len(self.target_logits), self.source_features.shape[1]),
        }
        if self.source_weights is not None:
            object.__setattr__(self, "source_weights", np.asarray(self.source_weights, dtype=float))
            wanted["source_weights"] = (rows,)
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} wants shape {shape}, got {getattr(self, name).shape}")
        if self.source_labels.min() < 0 or self.source_labels.max() >= classes:
            raise ValueError(f"source_labels wants class numbers 0 to {classes - 1}, got {set(self.source_labels)}")

    @property
    def finite(self) -> bool:
        """Whether the model that gave these numbers has not diverged."""
        arrays = (self.source_logits, self.target_logits, self.source_features, self.target_features)
        return all(bool(np.isfinite(array).all()) for array in arrays)


def _mutual_information(log_probs: np.ndarray) -> float:
    """H(mean p) - mean H(p)."""
    mean = np.exp(log_probs).mean(axis=0)
    diversity = -(mean * np.log(np.where(mean > 0, mean, 1.0))).sum()
    return max(0.0, float(diversity - entropy(log_probs).mean()))


def infomax(evidence: CandidateOutputs) -> float:
    """H(mean p) - mean H(p) on the target, at the temperature fitted on the source. In [0, log K]."""
    temperature = calibrate(evidence.source_logits, evidence.source_labels, evidence.source_weights)
    return _mutual_information(log_softmax(evidence.target_logits, temperature))


def infomax_raw(evidence: CandidateOutputs) -> float:
    """H(mean p) - mean H(p) on the target, at temperature 1. In [0, log K]."""
    return _mutual_information(log_softmax(evidence.target_logits))


def source_validation(evidence: CandidateOutputs) -> float:
    """(R + g) / (S + 1) in [0, 1]: R held-out source texts right, g = exp(-cross-entropy) in (0, 1] to break ties.

    Where texts have weights (1 on average), R is the weight of those that are right.
    """
    labels, rows, weights = evidence.source_labels, len(evidence.source_labels), evidence.source_weights
    right = rows * float(np.average(evidence.source_logits.argmax(axis=1) == labels, weights=weights))
    likelihood = math.exp(np.average(log_softmax(evidence.source_logits)[np.arange(rows), labels], weights=weights))
    return (right + likelihood) / (rows + 1)


def density(evidence: CandidateOutputs, *, rows: int = DENSITY_ROWS, block: int = 500) -> float:
    """Soft neighbourhood density, in [0, log(T - 1)]; 0 for a single text.

    Of more than ``rows`` texts, evenly spaced ones are taken; similarities are computed ``block`` rows at a time.
    """
    probs = np.exp(log_softmax(evidence.target_logits))
    if len(probs) > rows:
        probs = probs[np.linspace(0, len(probs) - 1, rows).astype(int)]
    count = len(probs)
    if count < 2:
        return 0.0
    unit = probs / np.linalg.norm(probs, axis=1, keepdims=True)
    total = 0.0
    for start in range(0, count, block):
        similarity = unit[start : start + block] @ unit.T / DENSITY_TEMPERATURE
        here = np.arange(len(similarity))
        similarity[here, start + here] = -np.inf
        total += float(entropy(log_softmax(similarity)).sum())
    return total / count


def dev(evidence: CandidateOutputs) -> float:
    r"""Minus the target risk by deep embedded validation; near [-1, 0], outside it when the weights are wild.

    .. math:: -\Big(\overline{w e} + \eta\,(\bar w - 1)\Big), \quad \eta = -\mathrm{Cov}(w e, w)/\mathrm{Var}(w)

    with e the 0/1 error on a held-out source text and w its density ratio target/source, see :func:`density_ratio`.
    """
    errors = (evidence.source_logits.argmax(axis=1) != evidence.source_labels).astype(float)
    weights = density_ratio(evidence.source_features, evidence.target_features)
    losses = weights * errors
    spread = weights.var()
    eta = -((losses - losses.mean()) * (weights - weights.mean())).mean() / spread if spread > 1e-12 else 0.0
    return -float(losses.mean() + eta * (weights.mean() - 1))


def density_ratio(source: np.ndarray, target: np.ndarray, *, seed: int = 0) -> np.ndarray:
    r"""[S] estimates of p_target(z) / p_source(z) at the source rows.

    .. math:: w(z) = \frac{N_s}{N_t} \cdot \frac{P(\mathrm{target}\mid z)}{P(\mathrm{source}\mid z)}

    P is a logistic regression on standardised features. The rows are halved; each half is judged by the classifier of
    the other, since one that has seen a row knows where it came from. The regularisation is the one with the smallest
    loss on the unseen halves: the ratio needs probabilities that are right, not just a separating plane. Ratios
    are kept within [1e-6, 1e6]; fewer than four rows on a side say nothing, and the ratio is 1.
    """
    if min(len(source), len(target)) < 4:
        return np.ones(len(source))
    features = _standardise(np.concatenate([source, target]))
    domain = np.concatenate([np.zeros(len(source), dtype=int), np.ones(len(target), dtype=int)])
    random = np.random.default_rng(seed)
    half = np.zeros(len(domain), dtype=int)
    for number in (0, 1):
        rows = random.permutation(np.flatnonzero(domain == number))
        half[rows[len(rows) // 2 :]] = 1
    best, best_loss = np.zeros(len(domain)), math.inf
    for strength in DEV_STRENGTHS:
        log_ratio, loss = np.zeros(len(domain)), 0.0
        for seen, unseen in ((half == 0, half == 1), (half == 1, half == 0)):
            log_odds = _fit(features[seen], domain[seen], strength).decision_function(features[unseen])
            loss += float(np.logaddexp(0.0, np.where(domain[unseen] == 1, -log_odds, log_odds)).sum())
            log_ratio[unseen] = log_odds - math.log(domain[seen].sum() / (1 - domain[seen]).sum())
        if loss < best_loss:
            best, best_loss = log_ratio, loss
    return np.exp(np.clip(best[: len(source)], -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def reverse(evidence: CandidateOutputs) -> float:
    """Balanced accuracy on the source of a classifier that learned the candidate's target labels. In [0, 1].

    The mean is over the classes that occur among the source labels. One class for the whole target scores 1/K.
    """
    pseudo = evidence.target_logits.argmax(axis=1)
    if len(np.unique(pseudo)) < 2:
        return 1.0 / evidence.target_logits.shape[1]
    target, source = _standardise(evidence.target_features, evidence.source_features)
    predicted = _fit(target, pseudo, REVERSE_STRENGTH).predict(source)
    labels = evidence.source_labels
    return float(np.mean([(predicted[labels == label] == label).mean() for label in np.unique(labels)]))


def meta(evidence: CandidateOutputs) -> float:
    """Minus the source loss after a virtual step on the target."""
    if evidence.meta_loss is None:
        raise RequestError(
            "criterion 'meta' needs the source loss after a virtual step, which only the method mtem takes;"
            f" choose one of {', '.join(name for name in CRITERIA if name != 'meta')}"
        )
    return -float(evidence.meta_loss)


CRITERIA: dict[str, Callable[[CandidateOutputs], float]] = {
    "infomax": infomax,
    "infomax-raw": infomax_raw,
    "source-validation": source_validation,
    "density": density,
    "dev": dev,
    "reverse": reverse,
    "meta": meta,
}
DEFAULT_CRITERION = "infomax"


def score(criterion: str, evidence: CandidateOutputs) -> float:
    """One candidate by one criterion; ``-inf`` for a model that has diverged."""
    if criterion not in CRITERIA:
        raise RequestError(f"unknown criterion {criterion!r}; choose one of {', '.join(CRITERIA)}")
    if not evidence.finite:
        return -math.inf
    value = CRITERIA[criterion](evidence)
    return -math.inf if math.isnan(value) else value


def scores(evidence: CandidateOutputs) -> dict[str, float]:
    """One candidate by every criterion that can be computed from the evidence."""
    return {name: score(name, evidence) for name in CRITERIA if name != "meta" or evidence.meta_loss is not None}


def choose(candidates: Sequence[float], tolerance: float = 0.0) -> int:
    """The earliest candidate within ``tolerance`` of the best score.

    Candidate 0 is the source model, so a tie keeps it. NaN never wins; if nothing is a number, candidate 0 is kept.
    """
    if not len(candidates):
        raise ValueError("no candidates to choose from")
    values = [-math.inf if math.isnan(value) else float(value) for value in candidates]
    best = max(values)
    return next(index for index, value in enumerate(values) if value >= best - tolerance)


def _standardise(fitted: np.ndarray, *others: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
    """Columns to mean 0 and deviation 1 by the first array's figures; constant columns to about 0."""
    fitted = np.asarray(fitted, dtype=np.float64)
    with np.errstate(over="ignore"):  # an infinite deviation makes a column constant
        mean, deviation = fitted.mean(axis=0), fitted.std(axis=0)
    deviation = np.where(deviation > 1e-9 * np.abs(mean) + 1e-12, deviation, np.inf)
    done = tuple(np.nan_to_num((np.asarray(array, dtype=np.float64) - mean) / deviation) for array in (fitted, *others))
    return done if others else done[0]


def _fit(features: np.ndarray, labels: np.ndarray, strength: float) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a hundred steps are plenty for a yardstick
        return LogisticRegression(C=strength, max_iter=100).fit(features, labels)
