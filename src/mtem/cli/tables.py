"""Tables on the console."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtem.metrics import Metrics
from mtem.terminal import visible

NAME_WIDTH = 24  # of a class in a table
LARGEST_MATRIX = 50  # classes
CONFUSIONS = 30  # printed instead of a larger matrix


def print_metrics(metrics: Metrics, console: Console, unit: str = "texts") -> None:
    """Print a headline, the metrics of each class and the confusion matrix.

    Parameters
    ----------
    metrics : Metrics
        As `mtem.metrics.evaluate` returns them.
    console : rich.console.Console
        Where to print.
    unit : str
        What the examples are called.

    Notes
    -----
    The columns of the matrix are headed by class names if they fit the console, otherwise by class numbers; if these do not fit
    either, the matrix continues below. Of more than `LARGEST_MATRIX` classes the most frequent confusions are printed instead.
    """
    headline = f"accuracy {metrics.accuracy:.4f}   macro-F1 {metrics.macro_f1:.4f}"
    if metrics.log_loss is not None:
        headline += f"   log loss {metrics.log_loss:.4f}   calibration error {metrics.calibration_error:.4f}"
    console.print(Text(f"{headline}   {metrics.n} {unit}", style="bold"))

    names = [shorten(class_metrics.name) for class_metrics in metrics.per_class]
    table = Table(box=None, pad_edge=False)
    for column in ("class", "precision", "recall", "F1", "F1 if all", "avg precision", unit):
        table.add_column(column, justify="left" if column == "class" else "right", no_wrap=True)
    for name, class_metrics in zip(names, metrics.per_class, strict=True):
        figures = (f"{figure:.4f}" for figure in (class_metrics.precision, class_metrics.recall, class_metrics.f1))
        ranked = "" if class_metrics.average_precision is None else f"{class_metrics.average_precision:.4f}"
        table.add_row(Text(name), *figures, f"{class_metrics.trivial_f1:.4f}", ranked, str(class_metrics.support))
    console.print()
    console.print(table)
    console.print(Text(f"F1 if all: F1 of predicting this class for all {unit}", style="dim"))

    if len(names) > LARGEST_MATRIX:
        _print_confusions(metrics, names, console)
    else:
        _print_matrix(metrics, names, console)


def _print_confusions(metrics: Metrics, names: list[str], console: Console) -> None:
    """Print which classes are most often taken for which."""
    wrong = metrics.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:CONFUSIONS]
    table = Table(box=None, pad_edge=False)
    for column in ("true", "predicted", "count"):
        table.add_column(column, justify="right" if column == "count" else "left", no_wrap=True)
    for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, predicted]:
            table.add_row(Text(names[true]), Text(names[predicted]), str(wrong[true, predicted]))
    console.print(f"\nthe most frequent confusions of {len(names)} classes; --json has them all")
    console.print(table)


def _print_matrix(metrics: Metrics, names: list[str], console: Console) -> None:
    cells = [[str(count) if count else "·" for count in row] for row in metrics.confusion.tolist()]
    digits = max(len(cell) for row in cells for cell in row)
    heads, rows = names, names
    name_width = max(map(len, names))
    if name_width + sum(2 + max(digits, len(name)) for name in names) > console.width:
        heads = [str(k + 1) for k in range(len(names))]
        rows = [f"{k + 1:>{len(heads[-1])}} {name}" for k, name in enumerate(names)]
        name_width = max(map(len, rows))
        digits = max(digits, len(heads[-1]))
        fitting = max(1, (console.width - name_width) // (2 + digits))
    else:
        fitting = len(names)
    console.print("\nconfusion: rows true, columns predicted")
    for start in range(0, len(names), fitting):
        shown = range(start, min(start + fitting, len(names)))
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True, min_width=name_width)
        for k in shown:
            table.add_column(Text(heads[k]), justify="right", no_wrap=True, min_width=digits)
        for k, row in enumerate(rows):
            table.add_row(Text(row), *(Text(cells[k][j], style="bold" if j == k else "") for j in shown))
        console.print(table)


def shorten(name: str) -> str:
    """Return a name for the console: control characters visible, and the middle of a long one cut out, not its end.

    Names often differ at their ends.
    """
    name = visible(name)
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH // 2] + "…" + name[1 - NAME_WIDTH // 2 :]
