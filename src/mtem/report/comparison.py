"""Several runs side by side: a table, their figures in one chart, and which is best where labels say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtem.report.answer import CLEAR, Answer, changed_share, correct, duration, percent, points
from mtem.report.charts import Figure, figure, line, safe, series
from mtem.report.files import RunFiles, finite

AFTER = "after"


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Return a name for each run: that of its folder, with as many of the folders above as make them different."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def compare(runs: Sequence[RunFiles]) -> Answer:
    """Return what the comparison says."""
    names = names_of(runs)
    measured = {name: right for name, run in zip(names, runs, strict=True) if (right := correct(run, AFTER)) is not None}
    same = len(measured) == len(runs) and len({tuple(run.evaluation.get("texts") or ()) for run in runs}) == 1
    worries = [f"{name}: not finished." for name, run in zip(names, runs, strict=True) if not run.finished]
    if not same:
        estimates = {
            name: value for name, run in zip(names, runs, strict=True) if (value := run.number("estimate", AFTER, "accuracy"))
        }
        shown = told(list(estimates), list(estimates.values()))
        headline = "These runs were not measured on the same labeled texts, so none can be called the best."
        if shown:
            headline += f" Estimated accuracy without labels: {shown}."
        step = "Measure all of them on one file: mtem evaluate RUN labeled.csv --compare."
        return Answer("unclear", headline, [("runs", str(len(runs)))], worries, [step])
    order = sorted(names, key=lambda name: -float(measured[name].mean()))
    first, second = order[0], order[1]
    difference = measured[first] - measured[second]
    error = float(difference.std(ddof=1) / math.sqrt(len(difference))) if len(difference) > 1 else math.inf
    gap = float(difference.mean())
    clear = gap > CLEAR * error
    headline = (
        f"{first} has the highest accuracy, {percent(float(measured[first].mean()))} of {len(difference):,} labeled "
        f"{runs[0].unit}; {second} is next with {percent(float(measured[second].mean()))}. "
        f"The difference ({points(gap)}) is {'clear' if clear else 'not clear'}: "
        f"its 95 % interval is {points(gap - CLEAR * error)} to {points(gap + CLEAR * error)}."
    )
    return Answer("helped" if clear else "unclear", headline, [("runs", str(len(runs)))], worries, [])


def table(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table of runs."""

    def optional(value: float | None, shown: Callable[[float], str] = percent) -> str:
        return "" if value is None else shown(value)

    columns = ["run", "method", "model", "seed", "estimated", "measured", "before", "labeled", "changed", "chosen step", "time"]
    rows = []
    for name, run in zip(names_of(runs), runs, strict=True):
        after, before = correct(run, AFTER), correct(run, "before")
        seconds = run.get("seconds")
        taken = sum(value for value in map(finite, seconds.values()) if value) if isinstance(seconds, dict) else None
        rows.append(
            [
                name, *(str(run.get(key) if run.get(key) is not None else "") for key in ("method", "model", "seed")),
                optional(run.number("estimate", AFTER, "accuracy")), optional(None if after is None else float(after.mean())),
                optional(None if before is None else float(before.mean())), "" if after is None else f"{len(after):,}",
                optional(changed_share(run)), optional(run.number("selection", "chosen_step"), lambda value: f"{value:,.0f}"),
                optional(taken, duration),
            ]
        )  # fmt: skip
    return columns, rows


def told(names: Sequence[str], values: Sequence[float | None]) -> str:
    """Return the values by name, as text."""
    return ", ".join(f"{name} {percent(value)}" for name, value in zip(names, values, strict=True) if value is not None)


def charts(runs: Sequence[RunFiles]) -> list[Figure]:
    """Return the figures of a comparison."""
    names = [safe(name) for name in names_of(runs)]
    found = []
    estimated = [run.number("estimate", AFTER, "accuracy") for run in runs]
    measured = [correct(run, AFTER) for run in runs]
    data: list[dict[str, Any]] = []
    if any(value is not None for value in estimated):
        low, high = ([run.number("estimate", AFTER, end) for run in runs] for end in ("low", "high"))
        bars = {
            "type": "data", "symmetric": False,
            "array": [None if a is None or b is None else b - a for a, b in zip(estimated, high, strict=True)],
            "arrayminus": [None if a is None or b is None else a - b for a, b in zip(estimated, low, strict=True)],
        }  # fmt: skip
        mode = {"type": "scatter", "mode": "markers", "marker": {"color": "@before", "size": 9}}
        data.append({**mode, "name": "estimated without labels", "x": names, "y": estimated, "error_y": bars})
    if any(value is not None for value in measured):
        values = [None if value is None else round(float(np.mean(value)), 4) for value in measured]
        mode = {"type": "scatter", "mode": "markers", "marker": {"color": "@after", "size": 11, "symbol": "diamond"}}
        data.append({**mode, "name": "measured", "x": names, "y": values})
    if data:
        alt = "; ".join(f"{trace['name']} {told(names, trace['y'])}" for trace in data)
        axes = {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": "accuracy"}, "tickformat": ".0%"}}
        made = figure("Accuracy on the target", "Whiskers are 95 % intervals.", alt + ".", data, **axes)
        found.append({"id": "accuracy", **made})
    for key, title in (("infomax", "Infomax on the target"), ("source-validation", "Accuracy on held-out source texts")):
        traces = [line(name, *series(run.stage("evaluation"), key)) for name, run in zip(names, runs, strict=True)]
        traces = [trace for trace in traces if trace["x"]]
        if traces:
            alt = "; ".join(f"{trace['name']} ends at {trace['y'][-1]:.3f}" for trace in traces) + "."
            made = figure(title, "No target labels are used here.", alt, traces, xaxis={"title": {"text": "step"}})
            found.append({"id": key, **made})
    return found
