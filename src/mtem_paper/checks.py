"""What runs report about themselves without labels, compared with the truth: estimated accuracies and chosen weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mtem_paper import protocol
from mtem_paper.formatting import blank_repeats, digits, percent, table
from mtem_paper.statistics import Cell
from mtem_paper.tables import at, places


@dataclass(frozen=True)
class Honesty:
    """Label-free estimates of the accuracy against the truth, over cells."""

    cells: int
    error: float
    """Mean of |estimate - truth|."""
    bias: float
    """Mean of estimate - truth: above 0, the estimate was too high."""
    inside: float
    """Share of the cells with the truth inside the interval."""
    width: float
    """Mean width of the interval."""


def honesty(cells: Sequence[Cell]) -> Honesty | None:
    """Compare estimates with the truth, in cells whose interval rests on left-out models; None without such cells."""
    gaps, inside, widths = [], [], []
    for cell in cells:
        if estimated(cell):
            estimate, truth = cell["estimate"], cell["metrics"]["accuracy"]
            gaps.append(estimate["accuracy"] - truth)
            inside.append(estimate["low"] <= truth <= estimate["high"])
            widths.append(estimate["high"] - estimate["low"])
    if not gaps:
        return None
    error = statistics.fmean(map(abs, gaps))
    return Honesty(len(gaps), error, statistics.fmean(gaps), statistics.fmean(inside), statistics.fmean(widths))


def estimated(cell: Cell) -> bool:
    """Return whether the cell's estimate was made with left-out models, as it is today."""
    return bool((cell.get("estimate") or {}).get("left_out"))


@dataclass(frozen=True)
class Selection:
    """Mean scores of the weights that different ways of choosing would have kept, over cells."""

    cells: int
    source: float
    """The model before adaptation."""
    last: float
    """No choice: the last weights of the first search entry."""
    chosen: float
    """By the label-free criterion."""
    target: float
    """By the target's labels: an oracle."""
    harmed: float
    """Share of the cells whose chosen weights are worse than the model before adaptation."""


def selection(cells: Sequence[Cell]) -> Selection | None:
    """Compare ways of choosing, in the cells with several candidates; None without such cells."""
    cells = [cell for cell in cells if cell.get("target_selected") and sum(len(run["candidates"]) for run in cell["search"]) > 1]
    if not cells:
        return None
    return Selection(
        len(cells),
        statistics.fmean(cell["source_score"] for cell in cells),
        statistics.fmean(cell["search"][0]["candidates"][-1]["score"] for cell in cells),
        statistics.fmean(cell["score"] for cell in cells),
        statistics.fmean(cell["target_selected"]["score"] for cell in cells),
        statistics.fmean(cell["score"] < cell["source_score"] - 1e-12 for cell in cells),
    )


# ---------------------------------------------------------------------- tables


def _groups(cells: Sequence[Cell]) -> list[tuple[str, list[Cell], list[Cell]]]:
    """Return the cells of each place without oracles: all methods of the general comparison, and MTEM."""
    general = protocol.in_group(protocol.GENERAL)
    groups = []
    for place in places(cells):
        methods = [cell for cell in at(cells, place) if not cell["oracle"] and cell["variant"] in general]
        groups.append((place.title, methods, [cell for cell in methods if cell["variant"] == "mtem"]))
    return groups


def without_estimate(cells: Sequence[Cell]) -> tuple[int, int]:
    """Return how many runs have no estimate made with left-out models, and of how many."""
    counted = [cell for _, methods, _ in _groups(cells) for cell in methods]
    return sum(not estimated(cell) for cell in counted), len(counted)


def estimates(cells: Sequence[Cell]) -> str:
    """Return a table of the estimates' errors, apart for runs with and without assumed class shares."""
    rows = []
    for where, methods, mtem in _groups(cells):
        assumed = [cell for cell in methods if cell["settings"].get("target_class_prior", "none") != "none"]
        groups = {"all": methods, "MTEM": mtem}
        if assumed:
            plain = [cell for cell in methods if cell not in assumed]
            groups = {"all, class shares assumed": assumed, "all, uncorrected": plain, "MTEM": mtem}
        for name, part in groups.items():
            result = honesty(part)
            if result:
                errors = digits(result.error), digits(result.bias, sign=True)
                rows.append([where, name, str(result.cells), *errors, percent(result.inside), digits(result.width, 2)])
    header = ["where", "methods", "runs", "mean size of the error", "mean error", "truth inside the interval", "its mean width"]
    return table(header, blank_repeats(rows))


def choices(cells: Sequence[Cell]) -> str:
    """Return a table of the mean scores of four ways to choose the weights."""
    rows = []
    for where, methods, mtem in _groups(cells):
        for name, part in (("all", methods), ("MTEM", mtem)):
            result = selection(part)
            if result:
                scores = (result.source, result.last, result.chosen, result.target)
                rows.append([where, name, str(result.cells), *map(digits, scores), percent(result.harmed)])
    header = ["where", "methods", "runs", "before", "last", "picked", "by target labels", "picked worse than before"]
    return table(header, blank_repeats(rows))
