"""How good is the classifier on the target? An estimate without target labels, and warnings in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtem.selection import calibrate, entropy, log_softmax

FEW_TARGET_TEXTS = 200
FEW_HELD_OUT_TEXTS = 50
FEW_DOMAIN_TEXTS = 10  # a source domain with fewer held-out texts says nothing about the estimate's error
DISAGREEMENT = 0.05  # between the two estimates, from here on worth a note


@dataclass(frozen=True)
class Estimate:
    """An accuracy nobody measured. ``dataclasses.asdict`` makes it JSON-ready."""

    accuracy: float
    low: float
    high: float
    """The ends of a 95 % interval; :func:`estimate_accuracy` says what it covers."""
    method: str
    source_accuracy: float
    """On the held-out source texts, for comparison."""
    by_confidence: float
    """The second opinion: source accuracy less the drop in mean confidence."""
    domain_error: float | None
    """Root mean square error of such estimates among source domains, beyond sampling noise; None if unknown."""
    source_model: float | None = None
    """The source model's own estimate, if there is another model to estimate."""
    notes: tuple[str, ...] = ()


def estimate_accuracy(
    source_scores: np.ndarray,
    source_labels: np.ndarray,
    target_scores: np.ndarray,
    *,
    source_domains: np.ndarray | None = None,
    target_shares: np.ndarray | None = None,
    anchor: tuple[Estimate, np.ndarray] | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> Estimate:
    r"""Target accuracy by average thresholded confidence (Garg et al. 2022), without target labels.

    The confidence is the negative entropy :math:`c = -H(p)` of the softmax at the temperature fitted on the held-out
    source texts. The threshold t splits the source texts so that as many lie below it as are wrong; the estimate is
    the share of target texts that do not lie below it:

    .. math:: P_S(c < t) = P_S(\hat y \ne y), \qquad \widehat{acc} = P_T(c \ge t).

    Texts exactly at t count with the same fraction on both sides. Beside it stands the difference of confidences
    (Guillory et al. 2021), :math:`acc_S - (\overline{\max p}_S - \overline{\max p}_T)`. Thresholding is right when the
    target has more (or fewer) of the hard texts the source knows, and for models that are too sure of unfamiliar texts,
    as fine-tuned ones are; it is too low for a model that knows how unsure it is. There the difference is right, which
    is too high for the former. The interval reaches to both, and a gap of 5 points is noted.

    The 95 % interval is a Bayesian bootstrap over source and target texts (Dirichlet weights, half a text of either
    kind added to each share, so a perfect score on few texts is not taken for certainty; the temperature is kept).
    With two or more ``source_domains`` (one domain number per source text) the accuracy of each is predicted by the
    threshold of the others and compared with the truth; the mean square of the errors beyond sampling noise is added
    in quadrature. What it all covers: few texts, and a shift as mild as the one among source domains that the model was
    trained on. What it does not cover: a shift of another kind.

    With ``target_shares``, those of the K classes in the target as far as they are known or assumed, the source texts of
    a class count so much that all together have these shares: a model that was corrected for them is at its best there.

    An adapted model was trained to be sure of these very texts, so by its own confidence it looks better than it is.
    ``anchor`` is what helps: the source model's estimate a and its scores on the same target texts. If the two models
    disagree on a share d of the texts, their accuracies differ by d at most, so the own estimate e is brought within
    [a - d, a + d] and its interval within the anchor's, d wider at either end; where the bound bites, that is its
    interval. The truth is then looked for between a, where the adaptation has gained nothing, and e, where it is right
    wherever it is sure: the estimate is halfway, and the interval reaches over both.
    """
    source_scores, target_scores = np.asarray(source_scores), np.asarray(target_scores)
    source_labels = np.asarray(source_labels)
    if not len(source_scores) or not len(target_scores):
        raise ValueError("an estimate wants at least one source text and one target text")
    random = np.random.default_rng(seed)
    weights = _class_weights(source_labels, target_shares)
    temperature = calibrate(source_scores, source_labels, weights)
    source, target = log_softmax(source_scores, temperature), log_softmax(target_scores, temperature)
    right = source.argmax(axis=1) == source_labels
    weighted = float(np.average(right, weights=weights))

    source_confidence, target_confidence = -entropy(source), -entropy(target)
    accuracy = _share_at_least_as_sure(source_confidence, 1 - weighted, target_confidence, weights)
    gap = float(np.average(np.exp(source.max(axis=1)), weights=weights) - np.exp(target.max(axis=1)).mean())
    by_confidence = min(1.0, max(0.0, weighted - gap))

    drawn = _resample(source_confidence, right, weights, target_confidence, resamples, random)
    ends = np.quantile(drawn, [0.025, 0.975])
    below, above = max(0.0, accuracy - float(ends[0])), max(0.0, float(ends[1]) - accuracy)
    domain_error = None
    if source_domains is not None:
        domain_error = _error_across_domains(source_scores, source_labels, np.asarray(source_domains), target_shares)
    widening = 1.96 * (domain_error or 0.0)
    low = min(accuracy - math.hypot(below, widening), by_confidence)
    high = max(accuracy + math.hypot(above, widening), by_confidence)

    notes = []
    if abs(accuracy - by_confidence) > DISAGREEMENT:
        notes.append(f"the drop in confidence alone would say {by_confidence:.3f}, thresholding says {accuracy:.3f}")
    if anchor is not None:
        before, before_scores = anchor
        if len(before_scores) != len(target_scores):
            raise ValueError(f"the anchor wants scores of the {len(target_scores)} texts, got {len(before_scores)}")
        changed = float((np.asarray(before_scores).argmax(axis=1) != target_scores.argmax(axis=1)).mean())
        unbound, own = accuracy, min(max(accuracy, before.accuracy - changed), before.accuracy + changed)
        lowest, highest = before.low - changed, before.high + changed
        if own != unbound:
            low, high = lowest, highest
            notes.append(
                f"confidence alone would say {unbound:.3f}, but only {changed:.1%} of the predictions differ"
                f" from the source model's, estimated at {before.accuracy:.3f}"
            )
        low, high = min(max(low, lowest), own), max(min(high, highest), own)
        accuracy, low, high = (before.accuracy + own) / 2, min(low, before.low), max(high, before.high)
        if abs(own - before.accuracy) > DISAGREEMENT:
            notes.append(
                f"halfway between the source model's {before.accuracy:.3f} and the adapted model's own {own:.3f}:"
                " self-training makes a model surer than it is right"
            )
    return Estimate(
        accuracy=accuracy,
        low=max(0.0, low),
        high=min(1.0, high),
        method="average thresholded confidence",
        source_accuracy=float(right.mean()),
        by_confidence=by_confidence,
        domain_error=domain_error,
        source_model=None if anchor is None else anchor[0].accuracy,
        notes=tuple(notes),
    )


def warnings(
    source_share: np.ndarray,
    before_scores: np.ndarray | None,
    after_scores: np.ndarray,
    texts: int,
    classes: Sequence[str],
    *,
    held_out: int | None = None,
) -> list[str]:
    """One line per thing to worry about.

    Parameters
    ----------
    source_share : [K] the classes' shares among the source labels.
    before_scores, after_scores : [T, K] on the same target texts, by the source model (None if there is no other) and
        by the model kept.
    texts : number of unlabeled target texts there are.
    classes : the K names.
    held_out : number of held-out source texts, if known.
    """
    count = len(classes)
    source_share = np.asarray(source_share, dtype=float)
    predicted = np.asarray(after_scores).argmax(axis=1)
    share = np.bincount(predicted, minlength=count) / max(1, len(predicted))
    found = []

    all_in_one = count > 1 and len(predicted) > 1 and share.max() == 1
    if all_in_one:
        found.append(
            f"collapse: all {len(predicted)} target texts are predicted {classes[int(share.argmax())]!r};"
            " do not use these predictions"
        )
    else:
        for k in np.flatnonzero((source_share >= min(0.05, 0.5 / count)) & (share < source_share / 10)):
            found.append(
                f"collapse: {classes[k]!r} is {source_share[k]:.1%} of the source labels but {share[k]:.1%} of the"
                f" target predictions{_before(before_scores, k)}; the class may have been driven out"
            )
    distance = float(np.abs(share - source_share).sum()) / 2
    by_chance = float(np.sqrt(source_share * (1 - source_share) / (2 * math.pi * max(1, len(predicted)))).sum())
    if not all_in_one and distance > max(0.15, 2 * by_chance):
        largest = np.argsort(-np.abs(share - source_share), kind="stable")[:5]
        found.append(
            f"class shares differ by {distance:.1%} between source labels and target predictions ("
            + ", ".join(f"{classes[k]!r} {source_share[k]:.1%} -> {share[k]:.1%}" for k in largest)
            + (", ..." if count > 5 else "")
            + "): either the target is like that or the model leans to a class; the estimate cannot tell which"
        )
    if before_scores is not None and len(predicted):
        changed = float((np.asarray(before_scores).argmax(axis=1) != predicted).mean())
        if changed > 0.3:
            found.append(
                f"drift: adaptation changed {changed:.1%} of the target predictions (more than 30.0%); look at some of"
                " them before relying on it"
            )
    if texts < FEW_TARGET_TEXTS:
        found.append(f"few texts: {texts} target texts, fewer than {FEW_TARGET_TEXTS}; adaptation may do harm")
    if held_out is not None and held_out < FEW_HELD_OUT_TEXTS:
        found.append(
            f"few texts: {held_out} held-out source texts, fewer than {FEW_HELD_OUT_TEXTS}; selection and the accuracy"
            " estimate are unreliable"
        )
    return found


def _before(scores: np.ndarray | None, k: int) -> str:
    return "" if scores is None else f" ({(np.asarray(scores).argmax(axis=1) == k).mean():.1%} before adaptation)"


def _class_weights(labels: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    """A weight for each text with which the classes that there are have the given shares; 1 on average."""
    if shares is None:
        return np.ones(len(labels))
    weights = np.asarray(shares, dtype=float)[labels] / np.bincount(labels, minlength=len(shares))[labels]
    return weights / weights.mean() if weights.any() else np.ones(len(labels))


def _share_at_least_as_sure(
    source: np.ndarray,
    error: float,
    target: np.ndarray,
    source_weights: np.ndarray | None = None,
    target_weights: np.ndarray | None = None,
) -> float:
    """P_T(c >= t) with t such that P_S(c < t) = error; the mass at t is divided on both sides as on the source's."""
    order = np.argsort(source, kind="stable")
    weights = np.full(len(source), 1.0) if source_weights is None else source_weights
    below = np.cumsum(weights[order])
    below = below / below[-1]
    place = int(np.searchsorted(below, error + 1e-12, side="right"))
    if place == len(source) or error >= 1:
        return 0.0
    threshold = source[order[place]]
    ties = source[order] == threshold
    at = float(weights[order][ties].sum() / weights.sum())
    up_to = float(below[np.flatnonzero(ties)[-1]])
    counted = min(1.0, max(0.0, (up_to - error) / at))
    weights = np.full(len(target), 1.0) if target_weights is None else target_weights
    return float((weights * ((target > threshold) + counted * (target == threshold))).sum() / weights.sum())


def _resample(
    source: np.ndarray,
    right: np.ndarray,
    weights: np.ndarray,
    target: np.ndarray,
    resamples: int,
    random: np.random.Generator,
) -> np.ndarray:
    """[resamples] estimates under Dirichlet weights of the texts: a share n/N becomes Beta(n + 1/2, N - n + 1/2)."""
    drawn = np.empty(resamples)
    for index in range(resamples):
        source_weights = weights * random.standard_exponential(len(source))
        target_weights = random.standard_exponential(len(target))
        more_wrong, more_right, more_below, more_above = random.standard_gamma(0.5, size=4)
        error = (source_weights[~right].sum() + more_wrong) / (source_weights.sum() + more_wrong + more_right)
        share = _share_at_least_as_sure(source, error, target, source_weights, target_weights)
        total = target_weights.sum()
        drawn[index] = (share * total + more_above) / (total + more_above + more_below)
    return drawn


def _error_across_domains(scores: np.ndarray, labels: np.ndarray, domains: np.ndarray, shares: np.ndarray | None) -> float | None:
    """Root of the mean, over source domains, of (estimate by the other domains - truth)^2 less sampling variance."""
    numbers, counts = np.unique(domains, return_counts=True)
    numbers = numbers[counts >= FEW_DOMAIN_TEXTS]
    if len(numbers) < 2:
        return None
    excess = []
    for number in numbers:
        inside = domains == number
        others, own = _class_weights(labels[~inside], shares), _class_weights(labels[inside], shares)
        temperature = calibrate(scores[~inside], labels[~inside], others)
        log_probs = log_softmax(scores, temperature)
        confidence, right = -entropy(log_probs), log_probs.argmax(axis=1) == labels
        error = 1 - float(np.average(right[~inside], weights=others))
        estimate = _share_at_least_as_sure(confidence[~inside], error, confidence[inside], others, own)
        smoothed = (right.sum() + 0.5) / (len(right) + 1)
        noise = smoothed * (1 - smoothed) * (1 / inside.sum() + 1 / (~inside).sum())
        excess.append((estimate - float(np.average(right[inside], weights=own))) ** 2 - noise)
    return math.sqrt(max(0.0, float(np.mean(excess))))
