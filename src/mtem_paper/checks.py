"""What runs say of themselves without labels, beside the truth: how right they are, and which weights are best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mtem_paper.statistics import Cell
from mtem_paper.tables import GENERAL, SETTINGS, TITLES, digits, markdown, of, once, places, told_place


@dataclass(frozen=True)
class Honesty:
    """Label-free estimates of the accuracy against the truth, over cells."""

    cells: int
    error: float
    """Mean of |estimate - truth|."""
    bias: float
    """Mean of estimate - truth: above 0, it promised too much."""
    inside: float
    """Share of the truths inside the interval."""
    width: float
    """Mean width of the interval."""


def honesty(cells: Sequence[Cell]) -> Honesty | None:
    """Of the cells whose estimate rests on models that had not seen what they were tested on."""
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
    """Whether the cell's estimate was made as estimation.py makes it now."""
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
    """Over the cells in which there was something to choose."""
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


def _groups(cells: Sequence[Cell]) -> list[tuple[list[str], list[Cell]]]:
    """Cells without oracles by dataset, model, pool and setting: all methods that adapt, and MTEM."""
    groups = []
    for dataset in TITLES:
        for model, pool in places(cells, dataset):
            for setting in SETTINGS:
                found = of(cells, dataset=dataset, model=model, pool=pool, setting=setting)
                found = [cell for cell in found if not cell["oracle"] and cell["variant"] in GENERAL]
                where = told_place((dataset, model, pool, setting))
                groups += [([where, "all"], found), ([where, "MTEM"], of(found, variant="mtem"))]
    return groups


def estimates(cells: Sequence[Cell]) -> str:
    rows, counted = [], []
    for (where, methods), found in _groups(cells):
        assumed = [cell for cell in found if cell["settings"].get("target_class_prior", "none") != "none"]
        groups = {methods: found}
        if methods == "all":
            counted += found
        if methods == "all" and assumed:
            groups = {"all, class shares assumed": assumed, "all, uncorrected": [cell for cell in found if cell not in assumed]}
        for name, part in groups.items():
            honest = honesty(part)
            if honest:
                inside = f"{100 * honest.inside:.0f} %"
                errors = digits(honest.error), digits(honest.bias, sign=True)
                rows.append([where, name, str(honest.cells), *errors, inside, digits(honest.width, 2)])
    if not rows:
        return ""
    without = sum(not estimated(cell) for cell in counted)
    said = (
        "A run estimates its accuracy on the target without labels. The mean error is the estimate less the accuracy on the test "
        "set: above 0, it promised too much. A 95 % interval should hold the truth in about 95 % of the runs, and should be no "
        "wider than that takes. Its width comes from models that have not seen what they are tested on: unsupervised, each is "
        "trained without one source domain; with labeled target texts, without a part of these. A change was needed, as was seen "
        "in earlier versions of this table; nothing is fitted to it."
    )
    if without:
        said += f" {without} of {len(counted)} runs were made before such intervals existed, and are left out."
    header = ["where", "methods", "runs", "mean size of the error", "mean error", "truth inside the interval", "its mean width"]
    return f"## Is the estimate honest?\n\n{said}\n\n{markdown(header, once(rows))}"


def choices(cells: Sequence[Cell]) -> str:
    rows = []
    for where, found in _groups(cells):
        picked = selection(found)
        if picked:
            scores = (picked.source, picked.last, picked.chosen, picked.target)
            rows.append([*where, str(picked.cells), *map(digits, scores), f"{100 * picked.harmed:.0f} %"])
    said = (
        "Mean scores of four ways to choose: the model before adaptation, the last weights of the first rate, the weights that "
        "the label-free criterion picks among all candidates of the search (what the tables show), and those that target labels "
        "would pick, which nobody has.\n"
    )
    header = ["where", "methods", "runs", "before", "last", "picked", "by target labels", "picked worse than before"]
    return f"## What choosing without labels costs\n\n{said}\n{markdown(header, once(rows))}" if rows else ""
