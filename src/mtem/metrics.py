"""How good the predictions are, where the labels are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_fscore_support

from mtem.errors import RequestError

NAME_WIDTH = 24  # of a class in a table


@dataclass(frozen=True)
class ClassMetrics:
    name: str
    precision: float
    """0 if the class was never predicted."""
    recall: float
    """0 if the class has no text."""
    f1: float
    support: int
    """Number of texts of this class."""
    trivial_f1: float = 0.0
    """F1 of calling every text so: what a classifier of this class has to beat."""
    average_precision: float | None = None
    """Of ranking the texts by the probability of this class; None without probabilities or texts of it."""


@dataclass(frozen=True)
class Metrics:
    n: int
    accuracy: float
    macro_f1: float
    """Mean F1 over the classes that occur among the labels or the predictions; the others say nothing."""
    per_class: tuple[ClassMetrics, ...]
    confusion: np.ndarray
    """[K, K] counts, rows true, columns predicted."""
    log_loss: float | None = None
    """Mean -log p of the true class, p at least 1e-15; None without probabilities."""
    calibration_error: float | None = None
    """Expected calibration error: |accuracy - confidence| in 15 equal bins of confidence, weighted by their size."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: numbers, strings, lists."""
        return {
            "n": self.n,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "log_loss": self.log_loss,
            "calibration_error": self.calibration_error,
            "classes": [vars(each).copy() for each in self.per_class],
            "confusion": self.confusion.tolist(),
        }


def evaluate(
    labels: Sequence[str] | np.ndarray,
    predictions: Sequence[str] | np.ndarray,
    classes: Sequence[str],
    probabilities: np.ndarray | None = None,
) -> Metrics:
    """Compare predictions with labels, each given as class names or as class numbers.

    ``probabilities`` ([N, K], columns in the order of ``classes``) add log loss and calibration error.
    """
    classes = [str(name) for name in classes]
    truth, predicted = _numbers(labels, classes, "label"), _numbers(predictions, classes, "prediction")
    if len(truth) != len(predicted):
        raise ValueError(f"{len(truth)} labels but {len(predicted)} predictions")
    if not len(truth):
        raise RequestError("nothing to evaluate: no labeled texts")
    numbers = np.arange(len(classes))
    figures = precision_recall_fscore_support(truth, predicted, labels=numbers, zero_division=0)
    precision, recall, f1, support = (np.asarray(figure) for figure in figures)
    occurring = np.union1d(truth, predicted)
    log_loss = calibration_error = None
    ranking: list[float | None] = [None] * len(classes)
    if probabilities is not None:
        probabilities = np.asarray(probabilities, dtype=np.float64)
        if probabilities.shape != (len(truth), len(classes)):
            raise ValueError(f"probabilities want shape {(len(truth), len(classes))}, got {probabilities.shape}")
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


def render(metrics: Metrics, console: Console, unit: str = "texts") -> None:
    """Print a headline, the figures by class and the confusion matrix; `unit` is what the examples are called.

    The matrix heads its columns with class names while they fit the console, with class numbers otherwise, and goes on
    below where even those do not fit.
    """
    headline = f"accuracy {metrics.accuracy:.4f}   macro-F1 {metrics.macro_f1:.4f}"
    if metrics.log_loss is not None:
        headline += f"   log loss {metrics.log_loss:.4f}   calibration error {metrics.calibration_error:.4f}"
    console.print(Text(f"{headline}   {metrics.n} {unit}", style="bold"))

    names = [_shortened(each.name) for each in metrics.per_class]
    table = Table(box=None, pad_edge=False)
    for column in ("class", "precision", "recall", "F1", "F1 if all", "avg precision", unit):
        table.add_column(column, justify="left" if column == "class" else "right", no_wrap=True)
    for name, each in zip(names, metrics.per_class, strict=True):
        figures = (f"{figure:.4f}" for figure in (each.precision, each.recall, each.f1))
        ranked = "" if each.average_precision is None else f"{each.average_precision:.4f}"
        table.add_row(Text(name), *figures, f"{each.trivial_f1:.4f}", ranked, str(each.support))
    console.print()
    console.print(table)
    console.print(Text(f"F1 if all: of a classifier that gives all {unit} this class", style="dim"))

    cells = [[str(count) if count else "·" for count in row] for row in metrics.confusion.tolist()]
    digits = max(len(cell) for row in cells for cell in row)
    heads, rows = names, names
    first = max(map(len, names))
    if first + sum(2 + max(digits, len(name)) for name in names) > console.width:
        heads = [str(k + 1) for k in range(len(names))]
        rows = [f"{k + 1:>{len(heads[-1])}} {name}" for k, name in enumerate(names)]
        first = max(map(len, rows))
        digits = max(digits, len(heads[-1]))
        fitting = max(1, (console.width - first) // (2 + digits))
    else:
        fitting = len(names)
    console.print("\nconfusion: rows true, columns predicted")
    for start in range(0, len(names), fitting):
        shown = range(start, min(start + fitting, len(names)))
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True, min_width=first)
        for k in shown:
            table.add_column(Text(heads[k]), justify="right", no_wrap=True, min_width=digits)
        for k, row in enumerate(rows):
            table.add_row(Text(row), *(Text(cells[k][j], style="bold" if j == k else "") for j in shown))
        console.print(table)


def _numbers(values: Sequence[str] | np.ndarray, classes: Sequence[str], what: str) -> np.ndarray:
    """Class numbers of class names or class numbers."""
    values = np.asarray(values)
    if values.dtype.kind in "iu" or not len(values):
        numbers = values.astype(np.int64)
        outside = (numbers < 0) | (numbers >= len(classes))
    else:
        known = {name: k for k, name in enumerate(classes)}
        numbers = np.array([known.get(str(value), -1) for value in values])
        outside = numbers < 0
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise RequestError(
            f"{what} {values.tolist()[row]!r} of text {row + 1} is none of the classes {', '.join(map(repr, classes))}"
        )
    return numbers


def _calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, weights=right - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def _shortened(name: str) -> str:
    """Without its middle if it is long: names often differ at their ends."""
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH // 2] + "…" + name[1 - NAME_WIDTH // 2 :]
