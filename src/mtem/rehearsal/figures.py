"""What the candidates of a trial are worth, by the labels of the domain that stood for the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtem import metrics
from mtem.errors import RequestError
from mtem.rehearsal.trials import TrialOutputs
from mtem.selection.accuracy_estimate import Estimate, estimate_accuracy
from mtem.selection.calibration import log_softmax

ACCURACY, MACRO_F1, F1 = "accuracy", "macro-f1", "f1:"


def check_metric(metric: str, classes: Sequence[str]) -> None:
    """Refuse a metric that there is not."""
    if metric not in (ACCURACY, MACRO_F1) and metric.removeprefix(F1) not in classes:
        names = ", ".join(f"{F1}{name}" for name in classes)
        raise RequestError(f"--metric {metric}: expected {ACCURACY}, {MACRO_F1} or the F1 of a class ({names})")


def score(metric: str, result: metrics.Metrics) -> float:
    """Return the score that candidates are compared by."""
    if metric == ACCURACY:
        return result.accuracy
    if metric == MACRO_F1:
        return result.macro_f1
    return next(entry.f1 for entry in result.per_class if entry.name == metric.removeprefix(F1))


@dataclasses.dataclass(frozen=True)
class Figures:
    """One candidate of a trial.

    Attributes
    ----------
    epoch
        Passes over the unlabeled texts.
    score, accuracy, log_loss, calibration_error
        By the labels of the domain.
    infomax
        Without labels.
    estimate
        The accuracy that a run estimates without labels and without a rehearsal.
    shares
        Predicted class shares, [K].
    confidence
        Mean probability of the predicted class.
    """

    epoch: float
    score: float
    accuracy: float
    log_loss: float
    calibration_error: float
    infomax: float
    estimate: float | None
    shares: tuple[float, ...]
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, rounded, for JSON."""
        return {
            name: [round(x, 4) for x in value] if isinstance(value, tuple) else None if value is None else round(value, 5)
            for name, value in vars(self).items()
        }


def candidate_figures(outputs: TrialOutputs, metric: str, classes: Sequence[str]) -> list[Figures]:
    """Return the figures of every candidate of a trial."""
    anchor: tuple[Estimate, np.ndarray] | None = None
    figures = []
    for number, logits in enumerate(outputs.logits):
        probabilities = np.exp(log_softmax(np.nan_to_num(logits)))
        result = metrics.evaluate(outputs.labels, logits.argmax(axis=1), classes, probabilities)
        estimate = raw_estimate(outputs, number, anchor)
        if number == 0 and estimate is not None:
            anchor = estimate, logits
        shares = np.bincount(logits.argmax(axis=1), minlength=len(classes)) / len(logits)
        assert result.log_loss is not None and result.calibration_error is not None
        figures.append(
            Figures(
                float(outputs.epochs[number]), score(metric, result), result.accuracy, result.log_loss,
                result.calibration_error, float(outputs.infomax[number]), None if estimate is None else estimate.accuracy,
                tuple(shares.tolist()), float(probabilities.max(axis=1).mean()),
            )
        )  # fmt: skip
    return figures


def raw_estimate(outputs: TrialOutputs, number: int, anchor: tuple[Estimate, np.ndarray] | None) -> Estimate | None:
    """Return what a run estimates for a candidate without labels; None for weights that have diverged."""
    logits, held_out = outputs.logits[number], outputs.held_out_logits[number]
    if not (np.isfinite(logits).all() and np.isfinite(held_out).all()):
        return None
    return estimate_accuracy(
        held_out, outputs.held_out_labels, logits, target_shares=outputs.assumed_shares, anchor=anchor if number else None,
        resamples=1,
    )  # fmt: skip
