"""The figures: SVG documents from committed results, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtem_paper.plots import Series, line_plot, side_by_side

ENTROPY_INDEXES = (1.0, 1.5, 2.0, 3.0, 5.0)
GRID = np.linspace(0.0, 1.0, 41)  # shares of a run at which trajectories of different lengths are compared


def entropy_figure() -> str:
    """Figure 1: the Tsallis entropy of two classes against the probability of one, for several indexes."""
    import torch  # not needed for the other figures

    from mtem import tsallis

    share = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    probs = torch.stack([share, 1 - share], dim=1)
    curves = [
        Series(f"ψ = {index:g}" + (" (Gibbs)" if index == 1 else ""), share.tolist(), tsallis.entropy(probs, index).tolist())
        for index in ENTROPY_INDEXES
    ]
    return line_plot(curves, "Tsallis entropy of two classes", "probability of the first class", "entropy")


def cost_figure(rows: Sequence[dict[str, Any]]) -> str:
    """Figure 3: time and memory of a step against the batch size, for each engine, from the rows of `mtem cost`."""
    shared = [name for name in ("model", "length", "precision", "machine") if len({row.get(name) for row in rows}) == 1]
    said = [f"length {rows[0][name]}" if name == "length" else str(rows[0][name]) for name in shared if rows[0].get(name)]
    apart = [name for name in ("model", "length", "precision", "machine") if rows and name not in shared]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        lines.setdefault(", ".join([row["engine"], *(f"{name} {row.get(name)}" for name in apart)]), []).append(row)
    order = list(dict.fromkeys(row["engine"] for row in rows))
    lines = dict(sorted(lines.items(), key=lambda line: order.index(line[1][0]["engine"])))

    def plot(figure: str, unit: float, title: str, label: str) -> str:
        curves = []
        for name, found in lines.items():
            values = [row[figure] / unit if row.get(figure) is not None else None for row in found]  # None: out of memory
            curves.append(Series(name, [row["batch"] for row in found], values, dashed=found[0]["engine"] == "plain"))
        return line_plot(curves, ", ".join([title, *said]), "batch size", label, from_zero=True)

    return side_by_side(
        plot("seconds", 1e-3, "Time of a step", "milliseconds"), plot("memory", 2.0**30, "Memory of a step", "GiB")
    )


def trajectory_figure(cells: Sequence[dict[str, Any]]) -> str:
    """Temperature and entropy indexes along the run: three quantiles of the indexes of a target's texts.

    Lines are medians over the cells, whatever their target and seed; bands reach from the least to the largest of them.
    """
    histories = [cell["history"] for cell in cells if cell.get("history")]
    temperature = _over_cells("κ", histories, lambda point: point.get("temperature"))
    names = ("10 % of the texts are below", "half of the texts are below", "90 % of the texts are below")
    indexes = [_over_cells(name, histories, lambda point, k=k: _quantile(point, k)) for k, name in enumerate(names)]
    return side_by_side(
        line_plot([temperature], "Temperature κ", "share of the run", "κ"),
        line_plot(indexes, "Entropy indexes ψ of the target's texts", "share of the run", "ψ"),
    )


def theory_figure(curves: Sequence[dict[str, Any]], title: str) -> str:
    """What was measured (``values`` at ``steps``), on logarithmic axes, mean and range over the seeds.

    ``exponent`` is the a of a fitted law t^-a; dashed, the one that is ``promised``, drawn from the first point on.
    """
    means = [curve for curve in curves if curve.get("seed") is None]
    series, slopes = [], []
    for curve in means:
        runs = [each["values"] for each in curves if each["name"] == curve["name"] and each.get("seed") is not None]
        low, high = (([f(column) for column in zip(*runs, strict=True)] if runs else None) for f in (min, max))
        fitted, promised = curve.get("exponent"), curve.get("promised")
        name = curve["name"] + (f", fitted t^{-fitted:.2f}" if fitted is not None else "")
        series.append(Series(name, curve["steps"], curve["values"], low, high))
        start = next(((x, y) for x, y in zip(curve["steps"], curve["values"], strict=True) if y and y > 0), None)
        if promised is not None and start is not None:
            law = [start[1] * (step / start[0]) ** -promised for step in curve["steps"]]
            slopes.append(Series(f"{curve['name']}, promised t^{-promised:.2f}", curve["steps"], law, dashed=True))
    return line_plot([*series, *slopes], title, "step t", "", log_x=True, log_y=True, width=760, height=440)


def _quantile(point: dict[str, Any], number: int) -> float | None:
    quantiles = point.get("index_quantiles")
    return None if quantiles is None else quantiles[number]


def _over_cells(name: str, histories: Sequence[Sequence[dict[str, Any]]], figure: Callable[..., float | None]) -> Series:
    """Median and range over the histories at each share of the run; None where there is nothing."""
    lines = []
    for history in histories:
        points = [(point["step"], figure(point)) for point in history if figure(point) is not None]
        if points:
            steps, values = np.array(points, dtype=float).T
            lines.append(np.interp(GRID, steps / max(1.0, max(point["step"] for point in history)), values))
    if not lines:
        return Series(name, GRID.tolist(), [None] * len(GRID))
    middle, low, high = (f(lines, axis=0).tolist() for f in (np.median, np.min, np.max))
    return Series(name, GRID.tolist(), middle, low, high)
