"""The figures of a report, as data and layout of Plotly. Colours that begin with '@' are names that the page's theme fills in."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from mtem.report.answer import percent
from mtem.report.files import RunFiles, finite, inside
from mtem.run.overview import spread

Figure = dict[str, Any]

MOST_STEPS = 400  # points of a curve
MOST_DOTS = 1500  # points of a cloud
MAP_DOTS = 400  # of source and target each
BINS = 10  # of a reliability curve
LOSSES = {"source_loss": "source loss", "target_loss": "target loss", "meta_loss": "source loss after a virtual step"}
STAGES = {"pretrain": "pretraining", "source": "source model", "adapt": "adaptation"}


def charts(run: RunFiles) -> list[Figure]:
    """Return the figures that the files of a run allow, in the order of the page."""
    makers: Sequence[Callable[[RunFiles], Figure | None]] = (
        selection, losses, temperature, index_spread, index_against_confidence, index_against_right, balance, balance_along,
        reliability, feature_map, source_training, times,
    )  # fmt: skip
    found = []
    for maker in makers:
        made = maker(run)
        if made is not None:
            found.append({"id": maker.__name__.replace("_", "-"), **made})
    return found


def figure(title: str, note: str, alt: str, data: list[dict[str, Any]], **layout: Any) -> Figure:
    """Return a figure: `note` explains it below, `alt` tells its content to those who cannot see it."""
    return {"title": title, "note": note, "alt": alt, "data": data, "layout": layout}


def safe(text: Any) -> str:
    """Return a text that Plotly shows as it is: it reads some HTML."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in str(text))
    return html.escape(shown if len(shown) <= 60 else shown[:59] + "…", quote=False)


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many of some values, evenly spread, the first and the last among them."""
    return [values[number] for number in spread(len(values), most)]


def series(lines: Iterable[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the lines that have both."""
    pairs = [(finite(entry.get("step")), finite(entry.get(name))) for entry in lines]
    whole = thinned([(step, value) for step, value in pairs if step is not None and value is not None], MOST_STEPS)
    return [step for step, _ in whole], [value for _, value in whole]


def line(name: str, x: list[float], y: list[float], **more: Any) -> dict[str, Any]:
    """Return a curve."""
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, **more}


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


# ---------------------------------------------------------------------- along the run


def selection(run: RunFiles) -> Figure | None:
    """Return the scores of the candidates, with the chosen one."""
    lines = run.stage("evaluation")
    steps, accuracy = series(lines, "source-validation")
    if not steps:
        return None
    criterion_steps, infomax = series(lines, "infomax")
    data = [
        line("accuracy on held-out source texts", steps, accuracy, mode="lines+markers", line={"color": "@before"}),
        line("infomax on target texts", criterion_steps, infomax, mode="lines+markers", line={"color": "@after"}, yaxis="y2"),
    ]
    layout: dict[str, Any] = {
        "xaxis": _axis("step of the adaptation"),
        "yaxis": _axis("accuracy, source"),
        "yaxis2": _axis("infomax, target", overlaying="y", side="right", showgrid=False),
    }
    chosen, criterion = run.number("selection", "chosen_step"), run.get("selection", "criterion")
    note = "No target labels are used here. Infomax is high where single predictions are sure and all together are varied."
    alt = f"{len(steps)} candidates; source accuracy from {accuracy[0]:.3f} to {accuracy[-1]:.3f}"
    if chosen is not None:
        ends = {"x0": chosen, "x1": chosen, "yref": "paper", "y0": 0, "y1": 1}
        shape = {"type": "line", **ends, "line": {"dash": "dot", "color": "@text"}}
        label = {"x": chosen, "yref": "paper", "y": 1, "text": "chosen", "showarrow": False, "yanchor": "bottom"}
        layout |= {"shapes": [shape], "annotations": [label]}
        reason = "the last step, as the rehearsal said" if criterion == "last" else f"the highest '{safe(criterion)}'"
        note += f" Step {chosen:.0f} was chosen: it has {reason}."
        alt += f"; chosen: step {chosen:.0f}"
    return figure("Which weights were chosen", note, alt + ".", data, **layout)


def losses(run: RunFiles) -> Figure | None:
    """Return the losses of the adaptation."""
    note = "Losses of single batches: expect noise. The target loss is that of pseudo labels."
    return _curves(
        "Losses of the adaptation", note, "loss", [(run.stage("adapt"), name, title) for name, title in LOSSES.items()]
    )


def temperature(run: RunFiles) -> Figure | None:
    """Return the temperature that pseudo labels are drawn at, and the share of texts that are learned from."""
    lines = run.stage("adapt")
    sure = lines, "confident_share", f"share of sure {run.unit}"
    if not any("temperature" in line for line in lines):
        return _curves(f"Sure {run.unit}", f"Only {run.unit} of which the model is sure are learned from.", "share", [sure])
    note = "At a high temperature pseudo labels are drawn at random, at a low one they are the likeliest class."
    return _curves("Temperature", note, "value", [(lines, "temperature", "temperature of the pseudo labels"), sure])


def source_training(run: RunFiles) -> Figure | None:
    """Return the losses of the stages before the adaptation."""
    stages = [(run.stage("pretrain"), "word_loss", "masked words"), (run.stage("source"), "source_loss", "source model")]
    return _curves("Training before the adaptation", "", "loss", stages)


def _curves(title: str, note: str, unit: str, sources: Iterable[tuple[list[dict[str, Any]], str, str]]) -> Figure | None:
    """Return fields of lines of the history by step: of each its lines, its name there and its name on the page."""
    data = [trace for lines, field, name in sources if (trace := line(name, *series(lines, field)))["x"]]
    if not data:
        return None
    alt = "; ".join(f"{trace['name']} from {trace['y'][0]:.3f} to {trace['y'][-1]:.3f}" for trace in data) + "."
    return figure(title, note, alt, data, xaxis=_axis("step"), yaxis=_axis(unit, rangemode="tozero"))


# ---------------------------------------------------------------------- indexes


def index_spread(run: RunFiles) -> Figure | None:
    """Return how the entropy indexes are spread along the run."""
    rows = []
    for entry in run.stage("adapt"):
        quantiles, step = entry.get("index_quantiles"), finite(entry.get("step"))
        numbers = [finite(value) for value in quantiles] if isinstance(quantiles, list) else []
        if step is not None and len(numbers) == 3 and None not in numbers:
            rows.append((step, *numbers))
    if len({number for row in rows for number in row[1:]}) < 2:
        return None  # none, or one index for all
    steps, low, middle, high = map(list, zip(*thinned(rows, MOST_STEPS), strict=True))
    band = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    data = [
        line("10 %", steps, low, **band),
        line("the middle 80 %", steps, high, line={"width": 0}, fill="tonexty", fillcolor="@band", hoverinfo="skip"),
        line("median", steps, middle, line={"color": "@after"}),
    ]
    alt = f"At the end the median is {middle[-1]:.2f}, and 80 % lie between {low[-1]:.2f} and {high[-1]:.2f}."
    note = "A large index takes weight from pseudo labels that the model finds unlikely. " + alt
    return figure("Entropy indexes along the run", note, alt, data, xaxis=_axis("step"), yaxis=_axis("index"))


def _cloud(run: RunFiles, needed: Sequence[str]) -> pd.DataFrame | None:
    if run.texts is None or any(name not in run.texts for name in needed):
        return None
    frame = run.texts.dropna(subset=[name for name in needed if name not in ("label", "prediction")])
    if "label" in needed:
        frame = frame[frame["label"] != ""]
    if "index" in needed and frame["index"].nunique() < 2:
        return None  # one index for all
    return frame if len(frame) else None


def index_against_confidence(run: RunFiles) -> Figure | None:
    """Return indexes against confidence; changed predictions, or wrong ones where labels are known, have another colour."""
    frame = _cloud(run, ["index", "confidence"])
    if frame is None:
        return None
    correlation = float(np.corrcoef(frame["index"].rank(), frame["confidence"].rank())[0, 1])
    frame = frame.iloc[thinned(range(len(frame)), MOST_DOTS)]
    if "label" in frame and (frame["label"] != "").any():
        frame = frame[frame["label"] != ""]
        groups = {"right": frame["label"] == frame["prediction"], "wrong": frame["label"] != frame["prediction"]}
    elif "source_prediction" in frame:
        changed = frame["prediction"] != frame["source_prediction"]
        groups = {"same prediction as before": ~changed, "changed prediction": changed}
    else:
        groups = {"texts": pd.Series(True, index=frame.index)}
    data = [
        {
            "type": "scatter", "mode": "markers", "name": name, "x": _rounded(frame["confidence"][chosen]),
            "y": _rounded(frame["index"][chosen]), "marker": {"color": color, "size": 5, "opacity": 0.6},
        }
        for (name, chosen), color in zip(groups.items(), ("@before", "@alarm"), strict=False)
        if chosen.any()
    ]  # fmt: skip
    alt = f"Rank correlation of index and confidence: {0.0 if math.isnan(correlation) else correlation:+.2f}."
    return figure(
        "Entropy index against confidence", alt, alt, data, xaxis=_axis("confidence of the final model"), yaxis=_axis("index")
    )  # fmt: skip


def index_against_right(run: RunFiles) -> Figure | None:
    """Return how the indexes of right and wrong predictions are spread, where labels are known."""
    frame = _cloud(run, ["index", "label", "prediction"])
    if frame is None:
        return None
    right = frame["label"] == frame["prediction"]
    if right.all() or not right.any():
        return None
    data = [
        {
            "type": "histogram", "name": name, "x": _rounded(frame["index"][chosen]), "histnorm": "probability", "nbinsx": 30,
            "opacity": 0.6, "marker": {"color": color},
        }
        for name, chosen, color in (("right", right, "@before"), ("wrong", ~right, "@alarm"))
    ]  # fmt: skip
    ranks = frame["index"].rank()
    wrong = int((~right).sum())
    area = float((ranks[~right].sum() - wrong * (wrong + 1) / 2) / (wrong * right.sum()))
    alt = f"A wrong prediction has a larger index than a right one in {percent(area)} of the pairs (50 % would be chance)."
    axes = {"xaxis": _axis("index"), "yaxis": _axis("share")}
    return figure("Entropy index of right and wrong predictions", alt, alt, data, barmode="overlay", **axes)


# ---------------------------------------------------------------------- predictions


def balance(run: RunFiles) -> Figure | None:
    """Return the shares of the classes among source labels and among predictions."""
    titles = {"source_labels": "source labels", "target_before": "predictions before", "target_after": "predictions after"}
    colors = {"source_labels": "@text", "target_before": "@before", "target_after": "@after"}
    data, told = [], {}
    for key, title in titles.items():
        shares = run.get("class_shares", key)
        if isinstance(shares, dict) and shares:
            numbers = {name: finite(value) for name, value in list(shares.items())[:40]}
            values = [0.0 if value is None else value for value in numbers.values()]
            told[title] = ", ".join(f"{safe(name)} {percent(value)}" for name, value in zip(numbers, values, strict=True))
            data.append(
                {
                    "type": "bar",
                    "name": title,
                    "x": [safe(name) for name in numbers],
                    "y": values,
                    "marker": {"color": colors[key]},
                }
            )
    assumed = run.get("target_class_prior", "shares")
    note = "Self-training may drive a class out: compare before and after."
    if isinstance(assumed, dict):
        known: dict[str, float | None] = {name: finite(value) for name, value in assumed.items()}
        note += " This run assumed shares of the target, and its predictions were brought to them: " + ", ".join(
            f"{safe(name)} {percent(share)}" for name, share in known.items() if share is not None
        ) + "."  # fmt: skip
    if not data:
        return None
    alt = "; ".join(f"{title}: {shares}" for title, shares in told.items()) + "."
    return figure(
        "Class balance", note, alt, data, barmode="group", xaxis={"type": "category"}, yaxis=_axis("share", tickformat=".0%")
    )


def balance_along(run: RunFiles) -> Figure | None:
    """Return the shares of the predicted classes along the run, before any assumed shares."""
    lines = [
        {"step": entry.get("step"), **shares}
        for entry in run.stage("evaluation")
        if isinstance(shares := entry.get("target_shares"), dict)
    ]
    data = [line(safe(name), *series(lines, name), mode="lines+markers") for name in run.classes[:10]]
    data = [trace for trace in data if len(trace["x"]) > 1]
    if not data:
        return None
    alt = "; ".join(f"{trace['name']} from {percent(trace['y'][0])} to {percent(trace['y'][-1])}" for trace in data) + "."
    note = "Shares of the classes among the predictions on the target, as the weights give them."
    axes = {"xaxis": _axis("step of the adaptation"), "yaxis": _axis("share", tickformat=".0%", rangemode="tozero")}
    return figure("Class balance along the run", note, alt, data, **axes)


def reliability(run: RunFiles) -> Figure | None:
    """Return how often predictions of a confidence are right, where labels exist."""
    labels, data, told = run.evaluation.get("labels"), [], []
    for key, color in (("before", "@before"), ("after", "@after")):
        predictions, confidence = (inside(run.evaluation, key, name) for name in ("predictions", "confidence"))
        lists = [value for value in (labels, predictions, confidence) if isinstance(value, list)]
        if len(lists) < 3 or len({len(value) for value in lists}) != 1 or not lists[0]:
            continue
        sure = np.array([finite(value) or 0.0 for value in lists[2]])
        right = np.array([str(a) == str(b) for a, b in zip(lists[0], lists[1], strict=True)])
        bins = np.minimum((sure * BINS).astype(int), BINS - 1)
        kept = [number for number in range(BINS) if (bins == number).any()]
        x, y = [sure[bins == n].mean() for n in kept], [right[bins == n].mean() for n in kept]
        gap = sum(abs(a - b) * (bins == n).mean() for a, b, n in zip(x, y, kept, strict=True))
        sizes = [f"{(bins == n).sum():,} {run.unit}" for n in kept]
        data.append(
            line(f"{key} the adaptation", _rounded(x), _rounded(y), mode="lines+markers", text=sizes, line={"color": color})
        )
        told.append(f"{key} the adaptation confidence and accuracy differ by {percent(gap)} on average")
    if not data:
        return None
    data.insert(0, line("perfect", [0, 1], [0, 1], line={"dash": "dot", "color": "@text"}, hoverinfo="skip"))
    alt = "; ".join(told).capitalize() + "."
    axes = {"xaxis": _axis("confidence", range=[0, 1.02]), "yaxis": _axis("accuracy", range=[0, 1.02])}
    return figure("Is the confidence honest?", alt, alt, data, **axes)


def feature_map(run: RunFiles) -> Figure | None:
    """Return source and target texts in the two main directions of the model's features, before and after."""
    points = run.points
    if points is None or not len(points):
        return None
    of_target = points["position"] >= 0
    data: list[dict[str, Any]] = []
    # the classes in the order of the run, at most as many as can be told apart
    classes = [name for name in run.classes if (points["prediction_after"] == name).any()][:6]
    for column, ending in enumerate(("before", "after")):
        axes = {"xaxis": f"x{column + 1 if column else ''}", "yaxis": f"y{column + 1 if column else ''}"}
        for chosen, origin, symbol in ((~of_target, "source", "circle-open"), (of_target, "target", "x-thin-open")):
            for number, name in enumerate(classes):
                frame = points[chosen & (points[f"prediction_{ending}"] == name)]
                frame = frame.iloc[thinned(range(len(frame)), MAP_DOTS // max(len(classes), 1))]
                data.append(
                    {
                        "type": "scatter", "mode": "markers", "name": f"{origin}, {safe(name)}",
                        "legendgroup": f"{origin} {number}", "showlegend": column == 1,
                        "x": _rounded(frame[f"x_{ending}"]), "y": _rounded(frame[f"y_{ending}"]),
                        "hoverinfo": "name", **axes,
                        "marker": {"symbol": symbol, "size": 6, "color": f"@class{number}", "opacity": 0.7},
                    }
                )  # fmt: skip
    hidden = {"showticklabels": False, "zeroline": False}
    layout = {
        "xaxis": {**hidden, "domain": [0, 0.48], "title": {"text": "before the adaptation"}},
        "xaxis2": {**hidden, "domain": [0.52, 1], "title": {"text": "after the adaptation"}},
        "yaxis": hidden, "yaxis2": {**hidden, "anchor": "x2"},
    }  # fmt: skip
    counts = f"{int((~of_target).sum()):,} source {run.unit} and {int(of_target.sum()):,} target {run.unit}"
    alt = f"{counts}, coloured by the predicted class."
    note = f"The two main directions of what the last layer reads. It is unsure of the target {run.unit} between the clouds."
    return figure(f"A map of the {run.unit}", note, alt, data, **layout)


def times(run: RunFiles) -> Figure | None:
    """Return the time of each stage."""
    seconds = run.get("seconds")
    if not isinstance(seconds, dict):
        return None
    values = {STAGES.get(name, str(name)): finite(value) for name, value in seconds.items()}
    shown = {safe(name): value for name, value in values.items() if value}
    if not shown:
        return None
    data = [{"type": "bar", "orientation": "h", "y": list(shown), "x": list(shown.values()), "marker": {"color": "@before"}}]
    alt = "; ".join(f"{name}: {value:.0f} s" for name, value in shown.items()) + "."
    machine = run.get("resolved", "device")
    note = f"On {safe(machine)}." if isinstance(machine, str) else ""
    return figure("Time", note, alt, data, xaxis=_axis("seconds"), yaxis={"automargin": True}, showlegend=False)


def _rounded(values: Iterable[Any]) -> list[float]:
    return [round(float(value), 4) for value in values]
