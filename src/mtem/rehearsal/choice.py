"""Choosing method, learning rate, assumed class shares and number of passes by the scores in rehearsed domains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import stdtrit

from mtem.selection.criteria import holds_up

LEVEL = 0.002  # scores that differ by less are the same; of such passes the last one is taken


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What the trials of a rehearsal compare."""

    method: str
    learning_rate: float
    prior: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """Scores along one trial.

    Attributes
    ----------
    configuration
        What was tried.
    domain, rare
        Where: which domain stood for the target, and which class was made rarer in it ("" for none).
    epochs, scores, infomax
        Of the candidates, [C]; the first is the source model.
    classes
        Number of classes.
    """

    configuration: Configuration
    domain: str
    rare: str
    epochs: np.ndarray
    scores: np.ndarray
    infomax: np.ndarray
    classes: int

    def kept(self) -> np.ndarray:
        """Return the number of the candidate that a run up to each candidate would keep: an earlier one after a collapse, [C]."""
        kept = [0]
        for number in range(1, len(self.scores)):
            held = holds_up(float(self.infomax[0]), float(self.infomax[number]), self.classes)
            kept.append(number if held else kept[-1])
        return np.array(kept)

    def guarded(self) -> np.ndarray:
        """Return the scores of the candidates that a run would keep, [C]."""
        return np.asarray(self.scores[self.kept()])


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a rehearsal recommends for one method, or in all.

    Attributes
    ----------
    configuration
        Method, learning rate, assumed class shares.
    epoch
        Number of passes; 0: do not adapt.
    gains
        Score after less score before, by domain (mean over its trials).
    mean, low, high
        Mean gain over the domains, and its 95 % interval by Student's t; None with one domain.
    score
        Mean score over the domains.
    """

    configuration: Configuration
    epoch: float
    gains: dict[str, float]
    mean: float
    low: float | None
    high: float | None
    score: float


def choose(curves: Sequence[Curve]) -> Choice:
    """Return the configuration and the number of passes with the highest mean score over the domains.

    Each domain counts once, whatever the number of its trials. All configurations must have been tried in the same domains.

    - A candidate's score is averaged with its neighbours', one pass before and after: the best of many is partly chance.
    - Of the passes from the best one on that are within `LEVEL` of it, the last is taken: the learning rate falls during a
      run, so later weights move less from one run to the next.
    - The source model is kept unless the mean gain is larger than what the score of one domain typically changes by from pass
      to pass: a smaller gain is chance.
    - Of configurations within `LEVEL` of the best, the one whose gain differs least between the domains is taken, since the
      target is one more domain; of equal ones, the first.
    """
    choices = []
    for configuration, group in _by_configuration(curves).items():
        epochs, scores = mean_scores(group)
        choices.append(summarise(configuration, group, float(epochs[_best_pass(scores)])))
    if not choices:
        raise ValueError("no trials to choose from")
    best = max(choices, key=lambda choice: choice.score)
    if not best.epoch:
        return best
    level = [choice for choice in choices if choice.epoch and choice.score >= best.score - LEVEL]
    return min(level, key=lambda choice: round(float(np.std(list(choice.gains.values()))), 12))


def _best_pass(scores: np.ndarray) -> int:
    """Return the number of the candidate to take, by the scores of the domains, [D, C]."""
    smooth = smoothed(scores.mean(axis=0))
    best = int(np.argmax(smooth))
    if best:
        best = max(number for number in range(best, len(smooth)) if smooth[number] >= smooth[best] - LEVEL)
    return best if float((scores[:, best] - scores[:, 0]).mean()) > pass_to_pass(scores) else 0


def pass_to_pass(scores: np.ndarray) -> float:
    """Return the root mean square change of a domain's score from one pass to the next, without the source model."""
    changes = np.diff(scores[:, 1:], axis=1)
    return float(np.sqrt(np.square(changes).mean())) if changes.size else 0.0


def summarise(configuration: Configuration, curves: Sequence[Curve], epoch: float) -> Choice:
    """Return the gains of a configuration at a number of passes."""
    epochs, scores = mean_scores(curves)
    number = int(np.argmin(np.abs(epochs - epoch)))
    gains = scores[:, number] - scores[:, 0]
    domains = sorted({curve.domain for curve in curves})
    low, high = student_interval(gains)
    return Choice(
        configuration, float(epochs[number]), dict(zip(domains, gains.tolist(), strict=True)), float(gains.mean()), low, high,
        float(scores[:, number].mean()),
    )  # fmt: skip


def mean_scores(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the passes of the candidates, [C], and the guarded scores by domain in alphabetical order, [D, C]."""
    domains = sorted({curve.domain for curve in curves})
    size = min(len(curve.epochs) for curve in curves)
    rows = [
        np.mean([curve.guarded()[:size] for curve in curves if curve.domain == domain], axis=0) for domain in domains
    ]  # fmt: skip
    return curves[0].epochs[:size], np.stack(rows)


def smoothed(scores: np.ndarray) -> np.ndarray:
    """Return the mean of each candidate and its neighbours; the source model keeps its own score and is no neighbour."""
    smooth = scores.astype(float)
    for number in range(1, len(scores)):
        smooth[number] = scores[max(1, number - 1) : number + 2].mean()
    return smooth


def student_interval(values: np.ndarray, level: float = 0.95) -> tuple[float | None, float | None]:
    """Return the interval of a mean; (None, None) for a single value."""
    if len(values) < 2:
        return None, None
    half = float(stdtrit(len(values) - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half


def _by_configuration(curves: Iterable[Curve]) -> dict[Configuration, list[Curve]]:
    groups: dict[Configuration, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.configuration, []).append(curve)
    return groups
