"""What is compared with what: data sets, variants, experiments, and the cells that they come to. docs/protocol.md tells why."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtem import methods, settings
from mtem.errors import RequestError
from mtem.run.adapt import find_settings
from mtem_paper import splits
from mtem_paper.cells import SEMI_SUPERVISED, Cell

UNSUPERVISED = "unsupervised"
SETTINGS = (UNSUPERVISED, SEMI_SUPERVISED)
FACTORS = (1.0, 2.5)  # the search: learning rates of the adaptation, relative to the variant's own
# What no score depends on, or what the search and the seed set.
FREE = ("device", "log_every", "checkpoint_seconds", "left_out_models", "learning_rate", "seed")


@dataclasses.dataclass(frozen=True)
class Dataset:
    targets: tuple[str, ...]
    pools: tuple[str, ...]
    score: str  # what is reported: "accuracy", or the class whose F1
    given: Mapping[str, Any]  # settings of all its cells
    seeds: tuple[int, ...]  # of the plan


DATASETS = {
    # On a CPU the encoder's lower layers would be frozen by default: a cell must not depend on the machine.
    "amazon": Dataset(splits.AMAZON, ("mixed", "natural"), "accuracy", {"frozen_layers": 0}, (0, 1, 2)),
    "pheme": Dataset(
        tuple(event for event in splits.EVENTS if event != "germanwings-crash"), ("event",), "rumour", {}, (0, 1, 2, 3, 4)
    ),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of a table."""

    method: str
    preset: str = "recommended"
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    oracle: bool = False  # trained on the labels of the unlabeled texts or, where nobody knows them, of the test set's other half
    datasets: tuple[str, ...] = ("amazon", "pheme")
    targets: tuple[str, ...] | None = None  # None: all


SIZES = (10, 20, 30, 40, 50, 60)
VARIANTS: dict[str, Variant] = {
    "out": Variant("source-only"),
    **{name: Variant(name) for name in ("dann", "fixmatch", "cst", "mme", "biat", "wind", "mtem")},
    "mtem-paper": Variant("mtem", "paper"),
    "out-as-is": Variant("source-only", given={"target_class_prior": "none"}, datasets=("pheme",)),
    "mtem-as-is": Variant("mtem", given={"target_class_prior": "none"}, datasets=("pheme",)),
    "oracle": Variant("source-only", oracle=True),
    "oracle-as-is": Variant("source-only", given={"target_class_prior": "none"}, oracle=True, datasets=("pheme",)),
    "mtem-without-meta": Variant("mtem", given={"meta": False}),
    "mtem-without-annealing": Variant("mtem", given={"annealing": False}),
    "mtem-without-sampling": Variant("mtem", given={"sampling": False}),
    **{
        f"mtem-{engine}-{size}": Variant(
            "mtem", given={"engine": engine, "batch_size": size}, datasets=("amazon",), targets=("kitchen",)
        )
        for engine in ("taylor", "second-order", "layerwise")
        for size in SIZES
    },
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    variants: tuple[str, ...]
    settings: tuple[str, ...] = SETTINGS
    pools: tuple[str, ...] | None = None  # None: all of the data set


EXPERIMENTS = {
    "general": Experiment(
        ("out", "mtem", "dann", "fixmatch", "cst", "mme", "biat", "wind", "mtem-paper", "out-as-is", "mtem-as-is", "oracle",
         "oracle-as-is")
    ),
    "ablation": Experiment(
        ("mtem", "mtem-without-meta", "mtem-without-annealing", "mtem-without-sampling"), (UNSUPERVISED,), ("mixed", "event")
    ),
    "batch-size": Experiment(tuple(name for name, v in VARIANTS.items() if v.targets), (UNSUPERVISED,), ("mixed",)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Share:
    """What the plan has for a model; None: all."""

    variants: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    pools: tuple[str, ...] | None = None


# The runs that the page of results expects; of another model it expects everything.
PLANNED: dict[str, dict[str, Share]] = {
    "amazon": {
        "minilm": Share(),
        "mpnet": Share(("out", "dann", "fixmatch", "cst", "mtem", "oracle"), (UNSUPERVISED,), ("mixed",)),
    },
    "pheme": {"bigcn": Share()},
}


def planned(dataset: str, model: str, pool: str, setting: str) -> dict[str, list[tuple[str, str]]]:
    """For each experiment the variants and targets that are to be run."""
    share = PLANNED[dataset].get(model, Share())
    if setting not in (share.settings or SETTINGS) or pool not in (share.pools or DATASETS[dataset].pools):
        return {}
    return {
        name: [
            (variant, target)
            for variant in what.variants
            for target in DATASETS[dataset].targets
            if fits(variant, dataset, setting, target) and variant in (share.variants or what.variants)
        ]
        for name, what in EXPERIMENTS.items()
        if setting in what.settings and pool in (what.pools or (pool,)) and (name == "general" or share.variants is None)
    }


def plan(
    experiments: Sequence[str],
    dataset: str,
    model: str,
    name: str,
    *,
    seeds: Sequence[int] | None = None,
    targets: Sequence[str] | None = None,
    settings_: Sequence[str] | None = None,
    pools: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """The cells of some experiments, group after group: seed by seed, unsupervised first, mixed pools first.

    `name` is what the cells call the model; `overrides` are settings of a rehearsal.
    """
    if dataset not in DATASETS:
        raise RequestError(f"unknown data set '{dataset}': there are {' and '.join(DATASETS)}")
    about = DATASETS[dataset]
    for option, given, known in (
        ("--targets", targets, about.targets), ("--settings", settings_, SETTINGS), ("--pools", pools, about.pools),
        ("--variants", [each for each in variants or () if not each.endswith(".py")], VARIANTS),
    ):  # fmt: skip
        if unknown := [each for each in given or () if each not in known]:
            raise RequestError(f"{option} {unknown[0]}: for {dataset} there are {', '.join(known)}")
    for key, option in (("seed", "--seeds"), ("device", "--device")):
        if key in (overrides or {}):
            raise RequestError(f"--set {key}: give {option}")
    wanted: dict[tuple[str, str, str], None] = {}  # (setting, pool, variant), each once, in order
    for experiment in (EXPERIMENTS[each] for each in experiments):
        for setting in SETTINGS:
            for pool in about.pools:
                if setting not in (settings_ or experiment.settings) or pool not in (pools or experiment.pools or about.pools):
                    continue
                for variant in experiment.variants if variants is None else variants:
                    wanted[setting, pool, variant] = None
    rows = {key[2]: row(dataset, model, name, key[2], overrides or {}) for key in wanted}
    groups = sorted({key[:2] for key in wanted}, key=lambda each: (SETTINGS.index(each[0]), about.pools.index(each[1])))
    cells = [
        dataclasses.replace(rows[variant], setting=setting, pool=pool, target=target, seed=seed)
        for seed in (about.seeds if seeds is None else seeds)
        for setting, pool in groups
        for target in about.targets
        for variant in [key[2] for key in wanted if key[:2] == (setting, pool)]
        if (targets is None or target in targets) and fits(variant, dataset, setting, target)
    ]
    if cells and (unused := set(overrides or {}).difference(*(cell.overrides for cell in rows.values()))):
        raise RequestError(f"--set {sorted(unused)[0]}=...: no setting of the methods that are to be run")
    return cells


def find(variant: str) -> Variant:
    return Variant(variant) if variant.endswith(".py") else VARIANTS[variant]


def fits(variant: str, dataset: str, setting: str, target: str) -> bool:
    what = find(variant)
    if methods.get(what.method).needs_target_labels and setting == UNSUPERVISED:
        return False
    return dataset in what.datasets and (what.targets is None or target in what.targets)


def row(dataset: str, model: str, name: str, variant: str, overrides: Mapping[str, Any]) -> Cell:
    """The cell of a variant, for any setting, pool, target and seed."""
    what = find(variant)
    known = settings.names(*map(type, find_settings(model, what.method, what.preset, {})))
    own = {key: value for key, value in overrides.items() if key in known}
    given = {**DATASETS[dataset].given, **what.given, **own}
    parts = find_settings(model, what.method, what.preset, given)
    found = settings.record(*parts)
    given, own = ({key: found[key] for key in part} for part in (given, own))  # as they were understood: "4" is 4
    changed = {key: value for key, value in settings.changed(*parts).items() if key not in FREE}
    if variant.endswith(".py"):
        changed["method_file"] = hashlib.sha256(Path(variant).read_bytes()).hexdigest()
        variant = Path(variant).stem
    factors = FACTORS if what.method != "source-only" else (1.0,)
    return Cell(
        dataset, name, variant, "", "", "", 0, what.method, what.preset, given, changed, factors, what.oracle, own
    )  # fmt: skip


def model_name(model: str, given: str | None) -> str:
    """What cells call the model: a name that can be part of a path."""
    name = given or (Path(model).resolve().name if os.path.isdir(model) else model.rsplit("/", 1)[-1])
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name) or name.startswith("."):
        raise RequestError(f"--model-name {name!r}: letters, digits, '-', '_' and '.' are wanted")
    return name
