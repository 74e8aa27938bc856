r"""Criteria: choosing among candidate weights without target labels.

A criterion is a plain function of :class:`CandidateOutputs`; higher is better. With
:math:`p_i` the softmax of target text i, :math:`\bar p` their mean, H the Gibbs entropy and z a feature vector:

``infomax`` (default)
    :math:`H(\bar p) - \frac1N\sum_i H(p_i)` on probabilities whose one temperature was fitted on the held-out source
    texts: each prediction confident, all of them together diverse. In [0, log K]. Fails when the target's classes are
    unbalanced (it prefers even ones) and cannot tell a confident mistake from a confident correct prediction.
``infomax-raw``
    The same without the temperature, as in the literature. Also rewards weights that are merely larger.
``source-validation``
    Accuracy on held-out source texts, ties broken by their likelihood. Ignores the target.
``density``
    Soft neighbourhood density (Saito et al. 2021): with unit-length :math:`\hat p_i`, the mean over i of the entropy of
    :math:`\mathrm{softmax}_{j\ne i}(\hat p_i\cdot\hat p_j/0.05)`. Fails on collapse: one class for all texts
    has the highest density.
``dev``
    Deep embedded validation (You et al. 2019): minus the source error reweighted to the target by a domain classifier
    on the features, with a control variate. Fails when the domains hardly overlap: a few texts have all the weight.
``reverse``
    Reverse validation (Zhong et al. 2010) in feature space: a fresh logistic regression learns the candidate's labels
    of the target and is scored by balanced accuracy on the source. Fails on features that separate the source anyway.
``meta``
    Minus the source loss after a virtual step on the target, where the method takes one. It is noisy (a mean
    over one mini-batch) and small for a step that changes nothing.

``last``
    The weights of the last step, for runs whose length a rehearsal has chosen; earlier ones if infomax has fallen
    more than :data:`GUARD` log K below the source model's, which is a sign of collapse (:func:`holds_up`).

Why infomax on calibrated probabilities is the default: it rewards confident and diverse predictions on the
target, and penalises collapse. Methods that minimise entropy make all predictions sharper, which is no improvement: the
temperature removes that gain, because a model that is overconfident on the source gets a higher temperature. A model that
forgets its source task also gets a high temperature, so forgetting is penalised too.

A candidate whose logits or features are not finite gets ``-inf``; for finite input no criterion returns NaN.
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
    """What one candidate computes for S held-out source texts and T target texts of K classes. No target label is in it.

    Attributes
    ----------
    source_logits, source_labels
        [S, K] and [S] class numbers, of held-out source texts.
    target_logits
        [T, K] of the unlabeled target texts, or of a sample that is the same for every candidate.
    source_features, target_features
        [S, D] and [T, D].
    meta_loss
        Source loss after a virtual step on the target, if the method takes one.
    source_weights
        [S] weight of each held-out source text, if class shares of the target are assumed; None: all equal.
    """

    source_logits: np.ndarray
    source_labels: np.ndarray
    target_logits: np.ndarray
    source_features: np.ndarray
    target_features: np.ndarray
    meta_loss: float | None = None
    source_weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Check the shapes."""
        for name in ("source_logits", "target_logits", "source_features", "target_features"):
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
            if getattr(self, name).ndim != 2 or not len(getattr(self, name)):
                raise ValueError(f"{name}: expected shape [rows >= 1, columns], got {getattr(self, name).shape}")
        object.__setattr__(self, "source_labels", np.asarray(self.source_labels))
        rows, classes = self.source_logits.shape
        expected = {
            "source_labels": (rows,),
            "target_logits": (len(self.target_logits), classes),
            "source_features": (rows, self.source_features.shape[1]),
            "target_features": (len(self.target_logits), self.source_features.shape[1]),
        }
        if self.source_weights is not None:
            object.__setattr__(self, "source_weights", np.asarray(self.source_weights, dtype=float))
            expected["source_weights"] = (rows,)
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {getattr(self, name).shape}")
        if self.source_labels.min() < 0 or self.source_labels.max() >= classes:
            raise ValueError(f"source_labels: expected class numbers 0 to {classes - 1}, got {set(self.source_labels)}")

    @property
    def finite(self) -> bool:
        """Whether all outputs are finite: the model has not diverged."""
        arrays = (self.source_logits, self.target_logits, self.source_features, self.target_features)
        return all(bool(np.isfinite(array).all()) for array in arrays)


def _mutual_information(log_probs: np.ndarray) -> float:
    """Return H(mean p) - mean H(p)."""
    mean = np.exp(log_probs).mean(axis=0)
    diversity = -(mean * np.log(np.where(mean > 0, mean, 1.0))).sum()
    return max(0.0, float(diversity - entropy(log_probs).mean()))


def infomax(outputs: CandidateOutputs) -> float:
    """Return H(mean p) - mean H(p) on the target, at the temperature fitted on the source. In [0, log K]."""
    temperature = calibrate(outputs.source_logits, outputs.source_labels, outputs.source_weights)
    return _mutual_information(log_softmax(outputs.target_logits, temperature))


def infomax_raw(outputs: CandidateOutputs) -> float:
    """Return H(mean p) - mean H(p) on the target, at temperature 1. In [0, log K]."""
    return _mutual_information(log_softmax(outputs.target_logits))


def source_validation(outputs: CandidateOutputs) -> float:
    """Return (R + g) / (S + 1) in [0, 1], with R correct held-out source texts and g = exp(-cross-entropy) to break ties.

    If texts have weights (1 on average), R is the total weight of the correct ones.
    """
    labels, rows, weights = outputs.source_labels, len(outputs.source_labels), outputs.source_weights
    right = rows * float(np.average(outputs.source_logits.argmax(axis=1) == labels, weights=weights))
    likelihood = math.exp(np.average(log_softmax(outputs.source_logits)[np.arange(rows), labels], weights=weights))
    return (right + likelihood) / (rows + 1)


def density(outputs: CandidateOutputs, *, rows: int = DENSITY_ROWS, block: int = 500) -> float:
    """Return the soft neighbourhood density, in [0, log(T - 1)]; 0 for a single text.

    Parameters
    ----------
    outputs
        Of one candidate.
    rows
        Of more texts than this, evenly spaced ones are used.
    block
        Number of rows for which similarities are computed at a time.
    """
    probs = np.exp(log_softmax(outputs.target_logits))
    if len(probs) > rows:
        probs = probs[np.linspace(0, len(probs) - 1, rows).astype(int)]
    count = len(probs)
    if count < 2:
        return 0.0
    unit = probs / np.linalg.norm(probs, axis=1, keepdims=True)
    total = 0.0
    for start in range(0, count, block):
        similarity = unit[start : start + block] @ unit.T / DENSITY_TEMPERATURE
        positions = np.arange(len(similarity))
        similarity[positions, start + positions] = -np.inf
        total += float(entropy(log_softmax(similarity)).sum())
    return total / count


def dev(outputs: CandidateOutputs) -> float:
    r"""Return minus the target risk by deep embedded validation; near [-1, 0], outside it if some weights are very large.

    .. math:: -\Big(\overline{w e} + \eta\,(\bar w - 1)\Big), \quad \eta = -\mathrm{Cov}(w e, w)/\mathrm{Var}(w)

    with e the 0/1 error on a held-out source text and w its density ratio target/source, see :func:`density_ratio`.
    """
    errors = (outputs.source_logits.argmax(axis=1) != outputs.source_labels).astype(float)
    weights = density_ratio(outputs.source_features, outputs.target_features)
    losses = weights * errors
    spread = weights.var()
    eta = -((losses - losses.mean()) * (weights - weights.mean())).mean() / spread if spread > 1e-12 else 0.0
    return -float(losses.mean() + eta * (weights.mean() - 1))


def density_ratio(source: np.ndarray, target: np.ndarray, *, seed: int = 0) -> np.ndarray:
    r"""Return estimates of p_target(z) / p_source(z) at the source rows, [S].

    .. math:: w(z) = \frac{N_s}{N_t} \cdot \frac{P(\mathrm{target}\mid z)}{P(\mathrm{source}\mid z)}

    P is a logistic regression on standardised features. The rows are halved; each half is scored by the
    classifier of the other, since a classifier recognises rows that it was trained on. The regularisation is the one with
    the smallest loss on the unseen halves: the ratio needs calibrated probabilities, not just a separating plane. Ratios
    are clipped to [1e-6, 1e6]. With fewer than four rows on a side the ratio is 1.
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


def reverse(outputs: CandidateOutputs) -> float:
    """Return the balanced accuracy on the source of a classifier trained on the candidate's target labels. In [0, 1].

    The mean is over the classes that occur among the source labels. One class for the whole target scores 1/K.
    """
    pseudo = outputs.target_logits.argmax(axis=1)
    if len(np.unique(pseudo)) < 2:
        return 1.0 / int(outputs.target_logits.shape[1])
    target, source = _standardise(outputs.target_features, outputs.source_features)
    predicted = _fit(target, pseudo, REVERSE_STRENGTH).predict(source)
    labels = outputs.source_labels
    return float(np.mean([(predicted[labels == label] == label).mean() for label in np.unique(labels)]))


def meta(outputs: CandidateOutputs) -> float:
    """Return minus the source loss after a virtual step on the target."""
    if outputs.meta_loss is None:
        raise RequestError(
            "criterion 'meta' needs the source loss after a virtual step, which only the method mtem computes;"
            f" choose one of {', '.join(name for name in CRITERIA if name != 'meta')}"
        )
    return -float(outputs.meta_loss)


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
LAST = "last"  # not a function of one candidate: the last weights, unless `holds_up` says that they have collapsed
GUARD = 0.05  # of log K: how far infomax may fall below the source model's


def holds_up(infomax_before: float, infomax_after: float, classes: int) -> bool:
    """Return whether adapted weights have not collapsed: their infomax is not far below the source model's."""
    return infomax_after >= infomax_before - GUARD * math.log(max(2, classes))


def score(criterion: str, outputs: CandidateOutputs) -> float:
    """Return the score of one candidate by one criterion; ``-inf`` for a model that has diverged."""
    if criterion not in CRITERIA:
        raise RequestError(f"unknown criterion {criterion!r}; choose one of {', '.join(CRITERIA)}")
    if not outputs.finite:
        return -math.inf
    value = CRITERIA[criterion](outputs)
    return -math.inf if math.isnan(value) else value


def scores(outputs: CandidateOutputs) -> dict[str, float]:
    """Return the scores of one candidate by every criterion that can be computed from its outputs."""
    return {name: score(name, outputs) for name in CRITERIA if name != "meta" or outputs.meta_loss is not None}


def choose(candidates: Sequence[float], tolerance: float = 0.0) -> int:
    """Return the earliest candidate within ``tolerance`` of the best score.

    Candidate 0 is the source model, so a tie keeps it. NaN never wins; if nothing is a number, candidate 0 is kept.
    """
    if not len(candidates):
        raise ValueError("no candidates to choose from")
    values = [-math.inf if math.isnan(value) else float(value) for value in candidates]
    best = max(values)
    return next(index for index, value in enumerate(values) if value >= best - tolerance)


def _standardise(fitted: np.ndarray, *others: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
    """Scale columns to mean 0 and deviation 1 by the first array's statistics; constant columns become about 0."""
    fitted = np.asarray(fitted, dtype=np.float64)
    with np.errstate(over="ignore"):  # an infinite deviation makes a column constant
        mean, deviation = fitted.mean(axis=0), fitted.std(axis=0)
    deviation = np.where(deviation > 1e-9 * np.abs(mean) + 1e-12, deviation, np.inf)
    done = tuple(np.nan_to_num((np.asarray(array, dtype=np.float64) - mean) / deviation) for array in (fitted, *others))
    return done if others else done[0]


def _fit(features: np.ndarray, labels: np.ndarray, strength: float) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a hundred steps are enough here
        return LogisticRegression(C=strength, max_iter=100).fit(features, labels)
