"""Which runs of the plan exist, which are missing, and what has to be known about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtem_paper import protocol, twins
from mtem_paper.cells import SEMI_SUPERVISED, is_current
from mtem_paper.formatting import blank_repeats, digits, table
from mtem_paper.protocol import DATASETS, SETTINGS, VARIANTS
from mtem_paper.statistics import Cell
from mtem_paper.tables import Place, at, places


def runs(cells: Sequence[Cell]) -> str:
    """Return a row for each place of the plan or with cells: how many runs there are, what is missing, hours, machines."""
    rows = []
    for dataset, about in DATASETS.items():
        others = sorted({cell["model"] for cell in cells if cell["dataset"] == dataset})
        for model in dict.fromkeys([*about.planned, *others]):
            for place in (Place(dataset, model, pool, setting) for pool in about.pools for setting in SETTINGS):
                present = at(cells, place)
                experiments = protocol.planned(dataset, model, place.pool, place.setting)
                planned = {run for runs_ in experiments.values() for run in runs_}
                if not present and not planned:
                    continue
                done = {(cell["variant"], cell["target"], cell["seed"]) for cell in twins.fill(present, twins.TWINS)}
                absent = planned - done
                hours = sum(cell.get("seconds") or 0.0 for cell in present if twins.RUN_OF not in cell) / 3600
                machines = ", ".join(sorted({str(cell.get("machine") or "unknown") for cell in present})) or "—"
                share = f"{len(planned) - len(absent)} of {len(planned)}"
                rows.append([place.title, share, missing(absent) if present else "everything", f"{hours:.1f}", machines])
    return table(["where", "runs of the plan", "missing", "hours", "machine"], rows)


def missing(absent: set[tuple[str, str, int]]) -> str:
    """Return how many runs of which methods are missing; those of other experiments than the general one by experiment."""
    counts: Counter[str] = Counter()
    for name, variant in VARIANTS.items():
        title = variant.name if protocol.GENERAL in variant.groups else protocol.GROUPS[variant.groups[0]]
        counts[title] += sum(run[0] == name for run in absent)
    return ", ".join(f"{title} {count}" for title, count in counts.items() if count) or "nothing"


def failures(results: Path) -> list[str]:
    """Return the cells whose last run failed."""
    return [
        f"Failed: {path.relative_to(results / 'failures').with_suffix('').as_posix()}"
        for path in sorted((results / "failures").rglob("*.txt"))
    ]


def source_models(cells: Sequence[Cell]) -> str:
    """Return where the methods of a group did not all start from the same source model, and how much its scores differ."""
    rows = []
    fair = [cell for cell in cells if cell["method"] != "mme" and not cell["oracle"]]
    for dataset, model in dict.fromkeys((cell["dataset"], cell["model"]) for cell in fair):
        by_group: dict[tuple[Any, ...], set[float]] = {}
        by_method: dict[tuple[Any, ...], dict[str, list[float]]] = {}
        for cell in fair:
            if (cell["dataset"], cell["model"]) == (dataset, model):
                settings = cell["settings"]
                own = settings.get("target_class_prior"), settings.get("pretrain_epochs") or 0.0
                labeled = settings.get("target_labeled_share") if cell["setting"] == SEMI_SUPERVISED else None
                condition = cell["pool"], cell["setting"], labeled, *own
                by_group.setdefault((*condition, cell["target"], cell["seed"]), set()).add(cell["source_score"])
                by_method.setdefault(condition, {}).setdefault(cell["variant"], []).append(cell["source_score"])
        apart = [max(scores) - min(scores) for scores in by_group.values() if len(scores) > 1]
        if apart:
            gap = max(_largest_gap(list(methods.values())) for methods in by_method.values())
            share = f"{len(apart)} of {len(by_group)}"
            rows.append([f"{DATASETS[dataset].title}, {model}", share, digits(max(apart), 4), digits(gap, 4)])
    header = ["where", "groups (target, seed, setting)", "largest difference in a group", "largest difference of means"]
    return table(header, rows) if rows else "None.\n"


def _largest_gap(scores: Sequence[Sequence[float]]) -> float:
    """Of the mean source scores of methods with the most runs."""
    most = max(map(len, scores))
    means = [sum(own) / len(own) for own in scores if len(own) == most]
    return max(means) - min(means)


def earlier_rules(cells: Sequence[Cell], current: Sequence[Cell]) -> str:
    """Return where the tables show runs of earlier rules, and how many there are under the rules of today."""
    rows = []
    for place in places(cells):
        shown = at(cells, place)
        old = [cell for cell in shown if not is_current(cell)]
        if old:
            rerun = [cell for cell in at(current, place) if is_current(cell)]
            rows.append([place.title, str(len(shown)), str(len(old)), str(len(rerun))])
    header = ["where", "runs shown", "of earlier rules", "run again so far"]
    return table(header, rows) if rows else "None.\n"


def so_far(cells: Sequence[Cell], current: Sequence[Cell]) -> str:
    """Return the scores of runs under the rules of today where the tables still show earlier ones.

    A row is a variant with its mean over the targets; seeds that have not all targets are left out.
    """
    rows = []
    for place in places(current):
        if all(map(is_current, at(cells, place))):
            continue  # the tables show them
        new = [cell for cell in at(current, place) if is_current(cell)]
        targets = DATASETS[place.dataset].targets
        for variant in (name for name in VARIANTS if any(cell["variant"] == name for cell in new)):
            by_seed: dict[int, dict[str, float]] = {}
            for cell in new:
                if cell["variant"] == variant:
                    by_seed.setdefault(cell["seed"], {})[cell["target"]] = cell["score"]
            whole = [scores for scores in by_seed.values() if len(scores) == len(targets)]
            if whole:
                means = [sum(scores[target] for scores in whole) / len(whole) for target in targets]
                figures = [digits(value, 4) for value in (*means, sum(means) / len(means))]
                name = VARIANTS[variant].title(place.setting)
                rows.append([place.title, name, str(len(whole)), " ".join(figures[:-1]), figures[-1]])
    return table(["where", "row", "seeds", "by target", "mean"], blank_repeats(rows)) if rows else "None.\n"
