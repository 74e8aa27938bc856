"""What came of a run, in a few sentences: did it help, by how much, what to worry about, what to do next."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from mtem.report.files import RunFiles, finite, inside

CLEAR = 1.96  # standard errors: a 95 % interval
MANY_CHANGES = 0.3  # share of changed predictions that deserves a look
LARGE_SHIFT = 0.1  # of a class's share of the predictions
WIDE = 0.2  # of an interval


@dataclasses.dataclass(frozen=True)
class Answer:
    """The top of the page.

    Attributes
    ----------
    verdict
        "helped", "hurt", "unclear" or "unfinished": decides the colour.
    headline
        One sentence.
    figures
        Pairs of a name and a value, the most important first.
    worries, next_steps
        One sentence each.
    """

    verdict: str
    headline: str
    figures: list[tuple[str, str]]
    worries: list[str]
    next_steps: list[str]


def answer(run: RunFiles) -> Answer:
    """Return the answer for a run."""
    if not run.finished:
        return _unfinished(run)
    measured = measured_difference(run)
    kept = bool(run.get("selection", "kept_source_model"))
    verdict, headline = _measured(run, *measured) if measured is not None else _estimated(run)
    if kept:
        verdict, headline = "unclear", "The source model was kept: no adapted weights looked better without labels."
        if measured is not None:
            headline += f" On {measured[3]:,} labeled {run.unit} its accuracy is {percent(measured[1])}."
    return Answer(verdict, headline, _figures(run), _worries(run), _next_steps(run, measured is not None, kept))


def measured_difference(run: RunFiles) -> tuple[float, float, float, int] | None:
    """Return accuracy before and after, the standard error of the difference, and the number of texts, if both were measured."""
    before, after = (correct(run, name) for name in ("before", "after"))
    if before is None or after is None or len(before) != len(after) or not len(before):
        return None
    difference = after - before
    error = float(difference.std(ddof=1) / math.sqrt(len(difference))) if len(difference) > 1 else math.inf
    return float(before.mean()), float(after.mean()), error, len(difference)


def correct(run: RunFiles, name: str) -> np.ndarray | None:
    """Return for every evaluated text whether the prediction is right."""
    predictions, labels = inside(run.evaluation, name, "predictions"), run.evaluation.get("labels")
    if not isinstance(predictions, list) or not isinstance(labels, list) or len(predictions) != len(labels):
        return None
    return np.array([str(one) == str(other) for one, other in zip(predictions, labels, strict=True)], dtype=float)


def _unfinished(run: RunFiles) -> Answer:
    lines = [line for line in run.history if isinstance(line.get("step"), int)]
    stages = {"pretrain": "the pretraining", "source": "the training of the source model", "adapt": "the adaptation"}
    last = next((line for line in reversed(lines) if line.get("stage") in stages), None)
    where = f" It got to step {last['step']:,} of {stages[last['stage']]}." if last else ""
    if not run.record:
        return Answer("unfinished", f"The record of this run (run.json) is missing or damaged.{where}", [], _worries(run), [])
    return Answer(
        "unfinished", f"This run is not finished.{where}", _figures(run), _worries(run),
        ["Continue it: the same 'mtem adapt' command with --resume."],
    )  # fmt: skip


def _measured(run: RunFiles, before: float, after: float, error: float, count: int) -> tuple[str, str]:
    difference = after - before
    what = f"On {count:,} labeled {run.unit} the accuracy went from {percent(before)} to {percent(after)}"
    interval = ""
    if math.isfinite(error):
        low, high = difference - CLEAR * error, difference + CLEAR * error
        interval = f" ({points(difference)}, 95 % interval {points(low)} to {points(high)})"
    if difference > CLEAR * error:
        return "helped", f"The adaptation helped. {what}{interval}."
    if difference < -CLEAR * error:
        return "hurt", f"The adaptation did harm. {what}{interval}."
    return "unclear", f"The adaptation made no clear difference. {what}{interval}."


def _estimated(run: RunFiles) -> tuple[str, str]:
    before, after = run.number("estimate", "before", "accuracy"), run.number("estimate", "after", "accuracy")
    low, high = run.number("estimate", "after", "low"), run.number("estimate", "after", "high")
    if after is None:
        return "unclear", "Whether the adaptation helped is not known: there are no labels and no estimate."
    interval = f" (95 % interval {percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    text = f"Without labels, the accuracy on the target is estimated at {percent(after)}{interval}"
    if before is None or run.get("method") == "source-only":
        return "unclear", f"{text}."
    difference = after - before
    if abs(difference) < 0.005:
        sign = "The adaptation seems to have changed little"
    else:
        sign = "The adaptation seems to have helped" if difference > 0 else "The adaptation does not seem to have helped"
    return "unclear", f"{sign}; only labels can tell. {text}; before the adaptation at {percent(before)}."


def _figures(run: RunFiles) -> list[tuple[str, str]]:
    found: list[tuple[str, str | None]] = [
        ("method", _text(run.get("method"))),
        ("model", _text(run.get("model"))),
        (f"labeled source {run.unit}", _count(run.get("texts", "source_trained_on"))),
        (f"unlabeled target {run.unit}", _count(run.get("texts", "target"))),
        (
            f"labeled target {run.unit}",
            _count(run.get("texts", "target_labeled")) if run.get("texts", "target_labeled") else None,
        ),
    ]
    if (share := changed_share(run)) is not None:
        found.append(("changed predictions", percent(share)))
    step, total = run.get("selection", "chosen_step"), run.get("steps", "adapt")
    if isinstance(step, int) and isinstance(total, int) and total:
        found.append(("chosen weights", f"step {step:,} of {total:,}"))
    seconds = run.get("seconds")
    if isinstance(seconds, dict):
        found.append(("time", duration(sum(value for value in map(finite, seconds.values()) if value is not None))))
    for key, name in (("process", "memory"), ("gpu", "GPU memory")):
        if (size := run.number("memory", key)) is not None:
            found.append((name, f"{size / 2**30:.1f} GiB"))
    return [(name, value) for name, value in found if value is not None]


def _worries(run: RunFiles) -> list[str]:
    warnings = run.get("warnings")
    found = [str(line) for line in warnings] if isinstance(warnings, list) else []
    low, high = run.number("estimate", "after", "low"), run.number("estimate", "after", "high")
    if low is not None and high is not None and high - low > WIDE:
        found.append(f"The estimate is wide ({percent(low)} to {percent(high)}): take it as a rough guess.")
    if (share := changed_share(run)) is not None and share > MANY_CHANGES:
        found.append(f"{percent(share)} of the predictions changed: look at some of them below.")
    before, after = run.get("class_shares", "target_before"), run.get("class_shares", "target_after")
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before:
            one, other = finite(before[name]), finite(after.get(name))
            if one is not None and other is not None and abs(other - one) > LARGE_SHIFT:
                found.append(f"The share of '{name}' among the predictions went from {percent(one)} to {percent(other)}.")
    found += [f"{line}: the report shows the rest." for line in run.problems]
    return list(dict.fromkeys(found))


def _next_steps(run: RunFiles, measured: bool, kept: bool) -> list[str]:
    steps = []
    if not measured:
        steps.append(
            f"Label about 200 target {run.unit}, drawn at random, and measure: "
            f"mtem evaluate {run.path.name}/ labeled.csv --compare."
        )
    if kept:
        steps.append("Rehearse on your source domains: 'mtem rehearse' says whether adaptation pays, and with which settings.")
    elif measured:
        steps.append(f"Use the model: mtem predict {run.path.name}/ new.csv --output predictions.csv.")
    steps.append(f"Read the {run.unit} below whose prediction changed: they show what the adaptation learned.")
    return steps


def changed_share(run: RunFiles) -> float | None:
    """Return the share of target texts with another prediction than before."""
    if run.texts is None or "source_prediction" not in run.texts or not len(run.texts):
        return None
    return float((run.texts["prediction"] != run.texts["source_prediction"]).mean())


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    """Return a difference in percentage points, with its sign."""
    return f"{100 * value:+.1f} points"


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else None
