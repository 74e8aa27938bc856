"""Metrics of predictions, where the labels are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_fscore_support

from mtem.errors import RequestError


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class.

    Attributes
    ----------
    name : str
        Of the class.
    precision : float
        0 if the class was never predicted.
    recall : float
        0 if there are no examples of the class.
    f1 : float
        Harmonic mean of precision and recall.
    support : int
        Number of examples of the class.
    trivial_f1 : float
        F1 of predicting this class for every example.
    average_precision : float or None
        Of ranking the examples by the probability of the class; None without probabilities or examples of it.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    trivial_f1: float = 0.0
    average_precision: float | None = None


@dataclass(frozen=True)
class Metrics:
    """Metrics of a classifier.

    Attributes
    ----------
    n : int
        Number of examples.
    accuracy : float
        Share of correct predictions.
    macro_f1 : float
        Mean F1 of the classes that occur among the labels or the predictions.
    per_class : tuple of ClassMetrics
        In the order of the classes.
    confusion : array of int, shape (K, K)
        Counts; rows are labels, columns predictions.
    log_loss : float or None
        Mean of -log p of the true class, with p at least 1e-15; None without probabilities.
    calibration_error : float or None
        Expected calibration error: abs(accuracy - confidence) in 15 equal bins of confidence, weighted by their size; None
        without probabilities.
    """

    n: int
    accuracy: float
    macro_f1: float
    per_class: tuple[ClassMetrics, ...]
    confusion: np.ndarray
    log_loss: float | None = None
    calibration_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as numbers, strings and lists, ready for JSON."""
        return {
            "n": self.n,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "log_loss": self.log_loss,
            "calibration_error": self.calibration_error,
            "classes": [vars(metrics).copy() for metrics in self.per_class],
            "confusion": self.confusion.tolist(),
        }


def evaluate(
    labels: Sequence[str] | np.ndarray,
    predictions: Sequence[str] | np.ndarray,
    classes: Sequence[str],
    probabilities: np.ndarray | None = None,
) -> Metrics:
    """Compare predictions with labels.

    Parameters
    ----------
    labels, predictions : sequence of str or array of int, shape (N,)
        Names of classes, or their numbers.
    classes : sequence of str
        The names of all classes.
    probabilities : array of float, shape (N, K), optional
        Columns in the order of `classes`; needed for log loss, calibration error and average precision.

    Raises
    ------
    RequestError
        If there are no labels, or a label or prediction is not one of the classes.
    ValueError
        If the sizes do not agree.
    """
    classes = [str(name) for name in classes]
    truth, predicted = _numbers(labels, classes, "label"), _numbers(predictions, classes, "prediction")
    if len(truth) != len(predicted):
        raise ValueError(f"{len(truth)} labels but {len(predicted)} predictions")
    if not len(truth):
        raise RequestError("nothing to evaluate: there are no labeled texts")
    numbers = np.arange(len(classes))
    figures = precision_recall_fscore_support(truth, predicted, labels=numbers, zero_division=0)
    precision, recall, f1, support = (np.asarray(figure) for figure in figures)
    occurring = np.union1d(truth, predicted)
    log_loss = calibration_error = None
    ranking: list[float | None] = [None] * len(classes)
    if probabilities is not None:
        probabilities = np.asarray(probabilities, dtype=np.float64)
        if probabilities.shape != (len(truth), len(classes)):
            raise ValueError(f"probabilities: expected shape {(len(truth), len(classes))}, got {probabilities.shape}")
        log_loss = float(-np.log(np.maximum(probabilities[np.arange(len(truth)), truth], 1e-15)).mean())
        ranking = [
            float(average_precision_score(truth == k, probabilities[:, k])) if support[k] else None for k in range(len(classes))
        ]
        calibration_error = _calibration_error(probabilities.max(axis=1), probabilities.argmax(axis=1) == truth)
    return Metrics(
        n=len(truth),
        accuracy=float((truth == predicted).mean()),
        macro_f1=float(f1[occurring].mean()),
        per_class=tuple(
            ClassMetrics(
                name,
                float(precision[k]),
                float(recall[k]),
                float(f1[k]),
                int(support[k]),
                trivial_f1=float(2 * support[k] / (support[k] + len(truth))),
                average_precision=ranking[k],
            )
            for k, name in enumerate(classes)
        ),
        confusion=np.asarray(confusion_matrix(truth, predicted, labels=numbers), dtype=np.int64),
        log_loss=log_loss,
        calibration_error=calibration_error,
    )


def _numbers(values: Sequence[str] | np.ndarray, classes: Sequence[str], role: str) -> np.ndarray:
    """Return class numbers, given class names or class numbers."""
    values = np.asarray(values)
    if values.dtype.kind in "iu" or not len(values):
        numbers = values.astype(np.int64)
        outside = (numbers < 0) | (numbers >= len(classes))
    else:
        number_of = {name: k for k, name in enumerate(classes)}
        numbers = np.array([number_of.get(str(value), -1) for value in values])
        outside = numbers < 0
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise RequestError(
            f"{role} {values.tolist()[row]!r} of text {row + 1} is none of the classes {', '.join(map(repr, classes))}"
        )
    return numbers


def _calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, weights=right - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))
