"""Estimating the accuracy on the target without its labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, stdtrit

from mtem.selection.calibration import calibrate, entropy, log_softmax
from mtem.selection.left_out import DOMAIN, FOLD, LeftOut
from mtem.selection.priors import class_weights

FEWEST_HELD_OUT_TEXTS = 20  # with fewer there is no estimate
DISAGREEMENT = 0.05  # between the two estimates, from which on a note is added
ONE_DOMAIN = (
    "the interval covers the number of texts, not the step to a new domain: no source model was trained without one of the"
    " domains (this needs two or more source domains with some 300 texts each, or 30 labeled target texts)"
)


@dataclass(frozen=True)
class Estimate:
    """An accuracy on the target, estimated without its labels. ``dataclasses.asdict`` makes it JSON-ready.

    Attributes
    ----------
    accuracy, low, high
        The estimate and its 95 % interval; :func:`estimate_accuracy` says what the interval covers.
    method
        How it was estimated.
    source_accuracy
        Accuracy on the held-out source texts, for comparison.
    by_threshold
        Average thresholded confidence alone.
    by_confidence
        A second estimate: source accuracy less the drop in mean confidence.
    domain_error
        Root mean square error of such estimates in source domains that were left out of the training; None if unknown.
    left_out
        Number of left-out source models that the interval rests on.
    source_model
        The source model's own estimate, if another model is estimated.
    notes
        Remarks for the user.
    """

    accuracy: float
    low: float
    high: float
    method: str
    source_accuracy: float
    by_threshold: float
    by_confidence: float
    domain_error: float | None
    left_out: int = 0
    source_model: float | None = None
    notes: tuple[str, ...] = ()


def estimate_accuracy(
    source_logits: np.ndarray,
    source_labels: np.ndarray,
    target_logits: np.ndarray,
    *,
    left_out: Sequence[LeftOut] = (),
    target_shares: np.ndarray | None = None,
    anchor: tuple[Estimate, np.ndarray] | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> Estimate:
    r"""Estimate the accuracy on the target without its labels, or from a few labeled target texts.

    Parameters
    ----------
    source_logits, source_labels
        [S, K] and [S], of held-out source texts.
    target_logits
        [T, K], of unlabeled target texts.
    left_out
        Logits of source models that were trained without one domain, or without a part of the labeled target texts.
    target_shares
        [K] class shares of the target, as far as they are known or assumed. Source texts are weighted so that their
        classes have these shares: a model that was corrected for them is at its best there.
    anchor
        For an adapted model: the estimate of the source model, and its logits on the same target texts.
    resamples, seed
        Of the bootstrap.

    Notes
    -----
    **The estimate** is average thresholded confidence (Garg et al. 2022). The confidence is the negative entropy
    :math:`c = -H(p)` of the softmax at the temperature fitted on the held-out source texts. The threshold t splits the source
    texts so that as many lie below it as are wrong; the estimate is the share of target texts that do not lie below it:

    .. math:: P_S(c < t) = P_S(\hat y \ne y), \qquad \widehat{acc} = P_T(c \ge t).

    Texts exactly at t count with the same fraction on both sides. The second estimate is the difference of confidences
    (Guillory et al. 2021), :math:`acc_S - (\overline{\max p}_S - \overline{\max p}_T)`; a gap of 5 points is noted.

    **The interval.** A Bayesian bootstrap over source and target texts (Dirichlet weights, half a text of either kind added to
    each share, so that a perfect score on few texts is not taken as certain; the temperature is fixed) covers the number of
    texts. ``left_out`` covers the step to a new domain: with the errors :math:`e_d` of the same estimate in D left-out domains,
    and the target's error as one more of the same kind,

    .. math:: t_{0.975}(D) \sqrt{\tfrac1D \sum_d e_d^2}

    is the half-width (t: Student's quantile), added to the bootstrap's in quadrature. Without ``left_out`` (one source domain)
    the interval covers the number of texts alone, and reaches to the second estimate; a note says so. It cannot cover a shift
    of another kind than the one among the source domains.

    **Labeled target texts.** If ``left_out`` has models trained without a part of these, the source model's accuracy is how
    often they are right on the part that they have not seen. The interval is Student's for the mean over the F parts, with
    half-width :math:`t_{0.975}(F - 1)\, s / \sqrt F`; no narrower than Jeffreys' interval for that share; and widened by the
    sampling of the target texts.

    **An adapted model** was trained to be confident on these texts, so its own confidence overestimates its accuracy. With
    ``anchor``: if the two models disagree on a share d of the texts, their accuracies differ by d at most, so the model's own
    estimate e (less the source model's known error, if labeled target texts show it) is clipped to [a - d, a + d] around the
    source model's estimate a. The result is halfway between a and e. The interval covers a's interval and one own half-width
    around e, but reaches no further than d beyond a's.
    """
    source_logits, target_logits = np.asarray(source_logits), np.asarray(target_logits)
    source_labels = np.asarray(source_labels)
    if not len(source_logits) or not len(target_logits):
        raise ValueError("expected at least one source text and one target text")
    own = _thresholded(source_logits, source_labels, target_logits, target_shares)
    drawn = _resample(own, resamples, np.random.default_rng(seed))
    quantiles = np.quantile(drawn, [0.025, 0.975])
    accuracy, method, notes = own.accuracy, "average thresholded confidence", []
    below, above = max(0.0, accuracy - float(quantiles[0])), max(0.0, float(quantiles[1]) - accuracy)

    domains = [model for model in left_out if model.kind == DOMAIN]
    folds = [model for model in left_out if model.kind == FOLD]
    domain_error = None
    if folds:
        parts = [model.with_shares(target_shares).correct for model in folds]
        right = np.concatenate(parts)
        method = "labeled target texts, cross-fitted"
        notes.append(f"from {len(right)} labeled target texts; by confidence alone it is {accuracy:.3f}")
        accuracy = float(right.mean())
        below, above = _share_interval(parts, len(target_logits))
    elif domains:
        errors = [_domain_error(model, target_shares) for model in domains]
        domain_error = math.sqrt(float(np.mean(np.square(errors))))
        widening = float(stdtrit(len(errors), 0.975)) * domain_error
        below, above = math.hypot(below, widening), math.hypot(above, widening)
    else:
        below, above = max(below, accuracy - own.by_confidence), max(above, own.by_confidence - accuracy)
        notes.append(ONE_DOMAIN)
    if not folds and abs(accuracy - own.by_confidence) > DISAGREEMENT:
        notes.append(f"by the drop in confidence it is {own.by_confidence:.3f}, by thresholding {accuracy:.3f}")
    low, high = accuracy - below, accuracy + above

    if anchor is not None:
        before, before_logits = anchor
        if len(before_logits) != len(target_logits):
            raise ValueError(f"anchor: expected logits of the {len(target_logits)} texts, got {len(before_logits)}")
        changed = float((np.asarray(before_logits).argmax(axis=1) != target_logits.argmax(axis=1)).mean())
        unclipped = own.accuracy + (before.accuracy - before.by_threshold if folds else 0.0)
        clipped = min(max(unclipped, before.accuracy - changed), before.accuracy + changed)
        if clipped != unclipped:
            notes.append(
                f"by confidence alone it is {unclipped:.3f}, but only {changed:.1%} of the predictions differ"
                f" from the source model's, estimated at {before.accuracy:.3f}"
            )
        accuracy = (before.accuracy + clipped) / 2
        low, high = min(clipped - below, before.low), max(clipped + above, before.high)
        low, high = max(low, before.low - changed), min(high, before.high + changed)
        if abs(clipped - before.accuracy) > DISAGREEMENT:
            notes.append(
                f"halfway between the source model's {before.accuracy:.3f} and the adapted model's own {clipped:.3f}:"
                " self-training makes a model overconfident"
            )
    return Estimate(
        accuracy=accuracy,
        low=max(0.0, low),
        high=min(1.0, high),
        method=method,
        source_accuracy=float(own.right.mean()),
        by_threshold=own.accuracy,
        by_confidence=own.by_confidence,
        domain_error=domain_error,
        left_out=len(folds or domains),
        source_model=None if anchor is None else anchor[0].accuracy,
        notes=tuple(notes),
    )


def _share_at_least_as_sure(
    source: np.ndarray,
    error: float,
    target: np.ndarray,
    source_weights: np.ndarray | None = None,
    target_weights: np.ndarray | None = None,
) -> float:
    """Return P_T(c >= t) with t such that P_S(c < t) = error; the mass at t is divided on both sides as on the source's."""
    order = np.argsort(source, kind="stable")
    weights = np.full(len(source), 1.0) if source_weights is None else source_weights
    below = np.cumsum(weights[order])
    below = below / below[-1]
    position = int(np.searchsorted(below, error + 1e-12, side="right"))
    if position == len(source) or error >= 1:
        return 0.0
    threshold = source[order[position]]
    ties = source[order] == threshold
    at = float(weights[order][ties].sum() / weights.sum())
    up_to = float(below[np.flatnonzero(ties)[-1]])
    counted = min(1.0, max(0.0, (up_to - error) / at))
    weights = np.full(len(target), 1.0) if target_weights is None else target_weights
    return float((weights * ((target > threshold) + counted * (target == threshold))).sum() / weights.sum())


@dataclass(frozen=True)
class _Thresholded:
    """Average thresholded confidence and what it rests on."""

    accuracy: float
    by_confidence: float
    right: np.ndarray
    weights: np.ndarray
    source_confidence: np.ndarray
    target_confidence: np.ndarray


def _thresholded(logits: np.ndarray, labels: np.ndarray, target_logits: np.ndarray, shares: np.ndarray | None) -> _Thresholded:
    weights = class_weights(labels, shares)
    temperature = calibrate(logits, labels, weights)
    source, target = log_softmax(logits, temperature), log_softmax(target_logits, temperature)
    right = source.argmax(axis=1) == labels
    weighted = float(np.average(right, weights=weights))
    source_confidence, target_confidence = -entropy(source), -entropy(target)
    accuracy = _share_at_least_as_sure(source_confidence, 1 - weighted, target_confidence, weights)
    gap = float(np.average(np.exp(source.max(axis=1)), weights=weights) - np.exp(target.max(axis=1)).mean())
    by_confidence = min(1.0, max(0.0, weighted - gap))
    return _Thresholded(accuracy, by_confidence, right, weights, source_confidence, target_confidence)


def _domain_error(left_out: LeftOut, shares: np.ndarray | None) -> float:
    """Return the estimate for a domain that the model was not trained on, less the true accuracy."""
    corrected = left_out.with_shares(shares)
    return _thresholded(corrected.held_out_logits, corrected.held_out_labels, corrected.logits, shares).accuracy - float(
        corrected.correct.mean()
    )


def _share_interval(parts: Sequence[np.ndarray], texts: int) -> tuple[float, float]:
    """Return how far below and above the share of correct texts the share among `texts` others may be."""
    right = np.concatenate(parts)
    hits, count = float(right.sum()), len(right)
    low, high = betaincinv(hits + 0.5, count - hits + 0.5, [0.025, 0.975])
    share, smoothed = hits / count, (hits + 0.5) / (count + 1)
    spread = 0.0
    if len(parts) > 1:
        means = [part.mean() for part in parts]
        spread = float(stdtrit(len(parts) - 1, 0.975) * np.std(means, ddof=1) / math.sqrt(len(parts)))
    chance = 1.96 * math.sqrt(smoothed * (1 - smoothed) / texts)
    return math.hypot(max(share - low, spread), chance), math.hypot(max(high - share, spread), chance)


def _resample(own: _Thresholded, resamples: int, random: np.random.Generator) -> np.ndarray:
    """Return [resamples] estimates under Dirichlet weights of the texts: a share n/N becomes Beta(n + 1/2, N - n + 1/2)."""
    drawn = np.empty(resamples)
    for index in range(resamples):
        source_weights = own.weights * random.standard_exponential(len(own.source_confidence))
        target_weights = random.standard_exponential(len(own.target_confidence))
        more_wrong, more_right, more_below, more_above = random.standard_gamma(0.5, size=4)
        error = (source_weights[~own.right].sum() + more_wrong) / (source_weights.sum() + more_wrong + more_right)
        share = _share_at_least_as_sure(own.source_confidence, error, own.target_confidence, source_weights, target_weights)
        total = target_weights.sum()
        drawn[index] = (share * total + more_above) / (total + more_above + more_below)
    return drawn
