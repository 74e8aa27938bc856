"""From the records of rehearsals to the settings of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mtem.rehearsal.choice import Choice, Configuration, Curve, choose
from mtem.selection.criteria import LAST
from mtem_paper.cells import PROTOCOL
from mtem_paper.protocol import DATASETS
from mtem_paper.rehearsals import read

Choices: TypeAlias = Mapping[tuple[str, str, bool], Mapping[str, Any]]  # by target, method, and whether without a prior


def choices(results: Path, dataset: str, model: str) -> Choices:
    """Return the settings that rehearsals choose, by target, method and whether no class shares may be assumed.

    Rows say whether they assume class shares, so a trial chooses only for rows that assume what it did. Trials with a rarer class
    are there to compare assumptions (docs/recipe.md), and choose nothing here.

    Of each target and method, only configurations that were tried on all of its sources are compared. Trials under earlier rules
    choose nothing. What was not rehearsed with this model comes from the one that the plan names for it, if it names one.
    """
    lender = DATASETS[dataset].share(model).rehearsed_with
    borrowed = _own_choices(results, dataset, lender) if lender else {}
    return {**borrowed, **_own_choices(results, dataset, model)}


def _own_choices(results: Path, dataset: str, model: str) -> Choices:
    """Return the settings that the rehearsals with a model choose."""
    curves: dict[tuple[str, str], list[Curve]] = {}
    passes: dict[tuple[str, str], float] = {}
    for trial in read(results, lambda record: not record["overrides"] and record.get("protocol") == PROTOCOL):
        record = trial.record
        if record["dataset"] == dataset and record["model"] == model and record["seed"] == 0 and not record["final"]:
            key = record["target"], trial.trial.method
            curves.setdefault(key, []).append(trial.curve())
            passes[key] = float(record["settings"]["epochs"])
    found: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for (target, method), own in curves.items():
        for uncorrected in (False, True):
            allowed = [curve for curve in own if not curve.rare and (curve.configuration.prior == "none") is uncorrected]
            if not uncorrected and not allowed:  # nobody assumes any
                allowed = [curve for curve in own if not curve.rare]
            compared = complete(allowed, len(DATASETS[dataset].domains) - 1)
            if compared:
                found[target, method, uncorrected] = settings_from(choose(compared), passes[target, method])
    return found


def complete(curves: Sequence[Curve], domains: int) -> list[Curve]:
    """Return the curves of the configurations that were tried on all source domains, in the same variations of their shares."""
    groups: dict[Configuration, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.configuration, []).append(curve)
    whole = {key: group for key, group in groups.items() if len({curve.domain for curve in group if not curve.rare}) == domains}
    priors = {key.prior for key in whole}
    rare = {curve.rare for group in whole.values() for curve in group}
    for prior in priors:  # made rarer for one prior only, a class would favour the other one
        tried = {curve.rare for key, group in whole.items() if key.prior == prior for curve in group}
        rare &= tried
    varied = {key: group for key, group in whole.items() if {curve.rare for curve in group} >= rare}
    return [curve for group in varied.values() for curve in group if curve.rare in rare]


def settings_from(choice: Choice, passes: float) -> dict[str, Any]:
    """Return a choice as settings of `adapt`."""
    return {
        "learning_rate": choice.configuration.learning_rate, "target_class_prior": choice.configuration.prior, "epochs": passes,
        "stop_epochs": choice.epoch, "evaluations": int(passes), "criterion": LAST,
    }  # fmt: skip
