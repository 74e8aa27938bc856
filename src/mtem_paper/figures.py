"""The figures, drawn with matplotlib as SVG documents from committed results.

The same results give the same bytes: no date, fixed ids, matplotlib's own font and default style. matplotlib is imported only
when a figure is drawn.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mtem.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours for colour-blind readers, without the yellow, which is too light on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">")  # one more than the colours, so that pairs repeat late
MOST_MARKERS = 12  # per line
ENTROPY_INDEXES = (1.0, 1.5, 2.0, 3.0, 5.0)
GRID = np.linspace(0.0, 1.0, 41)  # shares of a run at which trajectories of different lengths are compared
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "mtem", "svg.fonttype": "none", "figure.dpi": 72, "savefig.dpi": 72, "font.size": 10,
    "axes.grid": True, "grid.color": "#e4e4e4", "axes.edgecolor": "#777777", "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.titlesize": 11, "axes.titleweight": "bold", "legend.frameon": False,
    "lines.markersize": 5, "lines.markeredgecolor": "white", "lines.markeredgewidth": 0.6,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line: its points in order, and a band around it if ``low`` and ``high`` are given. None leaves a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot. ``from_zero``: the vertical axis starts at zero, so that heights can be compared."""

    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    log: bool = False
    from_zero: bool = False
    legend_columns: int = 2


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises
    ------
    RequestError
        If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("figures need matplotlib, which is not installed; run: pip install 'mtem[figures]'") from None


def draw(panels: Sequence[Panel], width: float = 5.8, height: float = 4.4) -> str:
    """Return an SVG document with the panels side by side, each of the given size in inches.

    Raises
    ------
    RequestError
        If matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's style
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            _draw_panel(axes, panel)
        document = io.StringIO()
        title = "; ".join(panel.title for panel in panels)
        figure.savefig(document, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return document.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    empty = True
    for number, series in enumerate(panel.series):
        xs = np.array(series.xs, dtype=float)
        ys, low, high = (_values(values, len(xs), panel.log) for values in (series.ys, series.low, series.high))
        empty = empty and not np.isfinite(ys).any()
        every = max(1, math.ceil(len(xs) / MOST_MARKERS))
        start = (number * every // 3) % every  # lines that overlap show their markers at different points
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            xs, ys, label=series.name, color=colour, linewidth=1.8, linestyle="--" if series.dashed else "-",
            marker=MARKERS[number % len(MARKERS)], markevery=(start, every),
        )  # fmt: skip
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, wrap=True)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if empty:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#777777")
    if len(panel.series) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=panel.legend_columns)


def _values(values: Sequence[float | None] | None, count: int, log: bool) -> np.ndarray:
    """Return the values as an array, with NaN for what cannot be drawn."""
    array = np.array(
        [math.nan if value is None else value for value in (values if values is not None else [None] * count)], float
    )
    return np.where(np.isfinite(array) & ((array > 0) | (not log)), array, math.nan)


# ---------------------------------------------------------------------- the page's figures


def entropy_figure() -> str:
    """Draw Figure 1: the Tsallis entropy of two classes against the probability of one, for several indexes."""
    import torch  # not needed for the other figures

    from mtem import tsallis

    share = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    probs = torch.stack([share, 1 - share], dim=1)
    curves = [
        Series(f"ψ = {index:g}" + (" (Gibbs)" if index == 1 else ""), share.tolist(), tsallis.entropy(probs, index).tolist())
        for index in ENTROPY_INDEXES
    ]
    title, x_label = "Tsallis entropy of two classes", "probability of the first class"
    return draw([Panel(curves, title, x_label, "entropy", from_zero=True, legend_columns=3)])


def cost_figure(rows: Sequence[dict[str, Any]]) -> str:
    """Draw Figure 3: time and memory of a step against the batch size, for each engine, from the rows of ``mtem cost``."""
    conditions = ("model", "length", "precision", "machine")
    shared = [name for name in conditions if len({row.get(name) for row in rows}) == 1 and rows[0].get(name)]
    apart = [name for name in conditions if len({row.get(name) for row in rows}) > 1]
    subtitle = ", ".join(f"length {rows[0][name]}" if name == "length" else str(rows[0][name]) for name in shared)
    order = list(dict.fromkeys(row["engine"] for row in rows))
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (order.index(row["engine"]), row["batch"])):
        lines.setdefault(", ".join([row["engine"], *(f"{name} {row.get(name)}" for name in apart)]), []).append(row)

    def panel(figure: str, unit: float, title: str, label: str) -> Panel:
        curves = []
        for name, own in lines.items():
            values = [row[figure] / unit if row.get(figure) is not None else None for row in own]  # None: out of memory
            curves.append(Series(name, [row["batch"] for row in own], values, dashed=own[0]["engine"] == "plain"))
        heading = f"{title}\n{subtitle}" if subtitle else title
        return Panel(curves, heading, "batch size", label, from_zero=True, legend_columns=1 if apart else 4)

    return draw([panel("seconds", 1e-3, "Time of a step", "milliseconds"), panel("memory", 2.0**30, "Memory of a step", "GiB")])


def trajectory_figure(cells: Sequence[dict[str, Any]]) -> str:
    """Draw temperature and entropy indexes along the run: three quantiles of the indexes of a target's texts.

    Lines are medians over the cells, all targets and seeds together; bands are their range.
    """
    histories = [cell["history"] for cell in cells if cell.get("history")]
    temperature = over_histories("κ", histories, lambda point: point.get("temperature"))
    names = ("10 % of the texts are below", "half of the texts are below", "90 % of the texts are below")
    indexes = [over_histories(name, histories, functools.partial(_quantile, number)) for number, name in enumerate(names)]
    return draw(
        [
            Panel([temperature], "Temperature κ", "share of the run", "κ", from_zero=True),
            Panel(indexes, "Entropy indexes ψ of the target's texts", "share of the run", "ψ"),
        ]
    )


def theory_figure(curves: Sequence[dict[str, Any]], title: str) -> str:
    """Draw measured quantities (``values`` at ``steps``) on logarithmic axes, mean and range over the seeds.

    ``exponent`` is the a of a fitted law t^-a; the ``promised`` law is dashed and starts at the first point.
    """
    series, slopes = [], []
    for curve in (curve for curve in curves if curve.get("seed") is None):
        runs = [other["values"] for other in curves if other["name"] == curve["name"] and other.get("seed") is not None]
        low, high = (([f(column) for column in zip(*runs, strict=True)] if runs else None) for f in (min, max))
        fitted, promised = curve.get("exponent"), curve.get("promised")
        name = curve["name"] + (f", fitted t^{-fitted:.2f}" if fitted is not None else "")
        series.append(Series(name, curve["steps"], curve["values"], low, high))
        start = next(((x, y) for x, y in zip(curve["steps"], curve["values"], strict=True) if y and y > 0), None)
        if promised is not None and start is not None:
            law = [start[1] * (step / start[0]) ** -promised for step in curve["steps"]]
            slopes.append(Series(f"{curve['name']}, promised t^{-promised:.2f}", curve["steps"], law, dashed=True))
    return draw([Panel([*series, *slopes], title, "step t", "squared norm", log=True)], width=8, height=5.2)


def _quantile(number: int, point: dict[str, Any]) -> float | None:
    quantiles = point.get("index_quantiles")
    return None if quantiles is None else float(quantiles[number])


def over_histories(
    name: str, histories: Sequence[Sequence[dict[str, Any]]], figure: Callable[[dict[str, Any]], float | None]
) -> Series:
    """Return median and range over the histories at each share of the run; None where there is nothing."""
    lines = []
    for history in histories:
        points = [(point["step"], figure(point)) for point in history if figure(point) is not None]
        if points:
            steps, values = np.array(points, dtype=float).T
            lines.append(np.interp(GRID, steps / max(1.0, max(point["step"] for point in history)), values))
    if not lines:
        return Series(name, GRID.tolist(), [None] * len(GRID))
    middle, low, high = (np.asarray(f(lines, axis=0)).tolist() for f in (np.median, np.min, np.max))
    return Series(name, GRID.tolist(), middle, low, high)
