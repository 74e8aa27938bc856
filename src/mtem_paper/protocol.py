"""What is compared with what: the data sets, the variants, the experiments, and the cells they are made of.

``DATASETS`` and ``VARIANTS`` are the only places where a data set or a variant is described. Titles, columns, pools, the
positive class, file names and the plan are derived from them. docs/protocol.md explains the choices.
"""

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
from mtem_paper.cells import AS_IS, SEMI_SUPERVISED, WITHOUT_PERTURBATION, Cell, view_radius

UNSUPERVISED = "unsupervised"
SETTINGS = (UNSUPERVISED, SEMI_SUPERVISED)
FACTORS = (1.0, 2.5)  # the search: learning rates of the adaptation, relative to the variant's own
# Settings that no score depends on, or that the search and the seed set.
FREE = ("device", "log_every", "checkpoint_seconds", "left_out_models", "calibrate", "learning_rate", "seed")
# Settings that are younger than some cells, with the value at which those cells are what they were: it moves no cell.
# Rows that assume class shares had even ones by default before these were given to them.
BEFORE: dict[str, Any] = {"neighbours": 0, "target_class_prior": "uniform", "view_radius": 0.0}
OF_SOURCE_MODEL = ("target_class_prior",)  # settings of a pool or a setting that Out has too

# Whose rehearsals choose for methods without any. On encoders MTEM with the recommended preset is FixMatch, so the second one
# chooses for MTEM too.
STAND_INS = ("mtem", "fixmatch")

# ---------------------------------------------------------------------- data sets


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of the experiments that the plan has for a model; None stands for all.

    Parameters
    ----------
    variants, settings, pools
        What is run.
    repeated
        The variants that are run with every seed of the data set; the others are run with the first.
    given
        Settings of all its cells.
    rehearsed_with
        The model whose rehearsals choose for targets and methods that this one was not rehearsed on; "" for none.
    """

    variants: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    pools: tuple[str, ...] | None = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rehearsed_with: str = ""
    repeated: tuple[str, ...] | None = None


UNPLANNED = Share(given={"pretrain_epochs": 0.0})  # of a model without a plan


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set of the paper.

    Parameters
    ----------
    title, measured
        Its name, and the caption of its table.
    domains
        All domains; those that are not the target are the sources.
    targets
        The domains that are targets, in the order of the paper's columns.
    pools
        The sets of unlabeled examples to adapt to. Where they are in files of their own, the value of the field ``source`` that
        each pool takes.
    labeled_file, unlabeled_file
        File names, with ``{domain}``. Without unlabeled files, the unlabeled examples are a part of the labeled ones.
    threads
        Whether an example is a thread of posts instead of a text.
    positive
        The class whose F1 is the score; None: the score is the accuracy.
    default_model
        The model of ``mtem reproduce`` without ``--model``.
    given
        Settings of all its cells. The defaults of some depend on the device, and a cell must not depend on the machine.
    adaptation
        Settings of its cells, where no rehearsal has found others and the preset is not "paper".
    of_pools, of_settings
        Settings of the cells of a pool, and of a setting, that adapt, unless the preset is "paper"; of Out those in
        `OF_SOURCE_MODEL`.
    seeds
        Seeds of the plan.
    planned
        The runs that the page of results expects of each model; of any other model it expects everything.
    oracle_labels
        The target labels that the oracle is trained on.
    planned_pools
        Pools of which the plan has only a part, whatever the model.
    """

    title: str
    measured: str
    domains: tuple[str, ...]
    targets: tuple[str, ...]
    pools: Mapping[str, tuple[str, ...]]
    labeled_file: str
    unlabeled_file: str | None
    threads: bool
    positive: str | None
    default_model: str
    given: Mapping[str, Any]
    adaptation: Mapping[str, Any]
    of_pools: Mapping[str, Mapping[str, Any]]
    of_settings: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    planned: Mapping[str, Share]
    oracle_labels: str
    planned_pools: Mapping[str, Share] = dataclasses.field(default_factory=dict)

    def share(self, model: str) -> Share:
        """Return the plan of a model."""
        return self.planned.get(model, UNPLANNED)

    def settings_of(self, model: str) -> dict[str, Any]:
        """Return the settings of all cells of a model."""
        return {**self.given, **self.share(model).given}

    def place(self, model: str, pool: str, setting: str) -> str:
        """Return the name of a place; the pool is named where there are several."""
        return ", ".join([self.title, model, *([f"{pool} pool"] if len(self.pools) > 1 else []), setting])


# Rows of threads: with even class shares assumed, without, and those that only the first networks have.
_ASSUMED = ("out", "fixmatch", "cst", "biat", "mtem", "mtem-learned")
_AS_IS = tuple(f"{name}{AS_IS}" for name in ("out", "fixmatch", "cst", "biat", "mtem"))
_OTHERS = ("out-as-is", "mtem-as-is", "dann", "mme", "wind", "mtem-paper", "oracle", "oracle-as-is")


def _ablations(*parts: str) -> tuple[str, ...]:
    return tuple(f"mtem-without-{part}" for part in parts)


DATASETS: dict[str, Dataset] = {
    "amazon": Dataset(
        title="Amazon",
        measured="accuracy on Amazon",
        domains=("books", "dvd", "electronics", "kitchen"),
        targets=("books", "dvd", "electronics", "kitchen"),
        # "blitzer" is what `mtem data prepare` calls the unlabeled reviews of the original
        pools={"mixed": ("fdu", "hatn"), "natural": ("fdu", "blitzer")},
        labeled_file="{domain}.labeled.jsonl.gz",
        unlabeled_file="{domain}.unlabeled.jsonl.gz",
        threads=False,
        positive=None,
        default_model="minilm",
        # Left-out models would take as long as the adaptation. So estimates have no interval, but those of MiniLM that were made
        # before have: of Out and MTEM, unsupervised, and of the first seed of protocol 5.
        given={"frozen_layers": 0, "max_length": 512, "left_out_models": 0},
        adaptation={"epochs": 12.0, "learning_rate": 5e-5},
        of_pools={"natural": {"balance_target": True}},  # by rehearsal
        of_settings={SEMI_SUPERVISED: {"target_labeled_share": 0.1}},  # by rehearsal
        seeds=(0, 1, 2),
        planned={
            "minilm": Share(given={"pretrain_epochs": 24.0}, repeated=("out", "fixmatch", "cst", "biat", "mtem")),
            "mpnet": Share(
                ("out", "dann", "fixmatch", "cst", "biat", "mtem", "mtem-learned", "oracle"),
                (UNSUPERVISED,),
                ("mixed",),
                {"pretrain_epochs": 0.0, "source_learning_rate": 2e-5},
                rehearsed_with="minilm",
                repeated=("out", "mtem"),
            ),
        },
        oracle_labels="half of the test set",
        planned_pools={
            "natural": Share(
                ("out", "out-without-pretraining", "fixmatch", "biat", "mtem", "mtem-learned"),
                (UNSUPERVISED,),
                repeated=("out", "mtem"),
            )
        },
    ),
    "pheme": Dataset(
        title="PHEME",
        measured="F1 of the class rumour on PHEME (the paper's TWITTER)",
        domains=("charliehebdo", "ferguson", "germanwings-crash", "ottawashooting", "sydneysiege"),
        targets=("charliehebdo", "ferguson", "ottawashooting", "sydneysiege"),
        pools={"event": ()},
        labeled_file="{domain}.jsonl.gz",
        unlabeled_file=None,
        threads=True,
        positive="rumour",
        default_model="bigcn",
        given={},  # BiGCN has the same defaults on all devices
        adaptation={},
        of_pools={},
        of_settings={UNSUPERVISED: {"target_class_prior": "uniform"}},  # of the rows that assume shares
        seeds=(0, 1, 2, 3, 4),
        # The first is like the paper's: a graph network over words. The others read the posts with an encoder: each thread by
        # itself, with its neighbours in the event (the default of the program), or after pretraining on the posts of the run.
        planned={
            "bigcn": Share(
                (*_ASSUMED, *_OTHERS, *_ablations("average", "view", "meta", "annealing", "sampling")),
                given={"features": "tfidf"},
            ),
            "bigcn-minilm": Share(
                ("out", "out-as-is", "fixmatch", "mtem", "mtem-as-is", "mtem-learned", *_ablations("meta")),
                given={"features": "encoder", "neighbours": 0},
            ),
            "bigcn-minilm-neighbours": Share(
                (*_ASSUMED, *_AS_IS, *_OTHERS, *_ablations("average", "view", "annealing", "sampling")),
                given={"features": "encoder", "neighbours": 20},
                rehearsed_with="bigcn-minilm",
            ),
            "bigcn-minilm-pretrained": Share(
                ("out", "mtem-learned"),
                (UNSUPERVISED,),
                given={"features": "encoder", "neighbours": 0, "pretrain_epochs": 10.0, "pretrain_batch_size": 256},
                rehearsed_with="bigcn-minilm",
                repeated=(),
            ),
        },
        oracle_labels="70 % of the event",
    ),
}

# ---------------------------------------------------------------------- variants

GROUPS = {"general": "general", "ablation": "ablation", "batch-size": "batch size"}  # experiment -> its title
GENERAL, ABLATION, BATCH_SIZE = GROUPS
LEARNED, PAPER = "learned", "paper"  # presets of MTEM; the first learns an index for each text, or one that all threads share
ENGINES = ("taylor", "second-order", "layerwise")
BATCH_SIZES = (10, 20, 30, 40, 50, 60)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with its settings: a row of a table.

    Parameters
    ----------
    method
        Name of the method, or the file of one.
    name
        What tables call it.
    groups
        The experiments it is part of.
    preset, given
        The method's preset, and settings in addition to those of the preset.
    oracle
        Whether it is trained on the labels of the unlabeled examples or, where these are unknown, of half of the test set.
    uncorrected
        Whether it assumes no class shares on any data set, as in the paper.
    datasets, targets
        Where it is run; ``targets=None`` stands for all.
    """

    method: str
    name: str
    groups: tuple[str, ...] = (GENERAL,)
    preset: str = "recommended"
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    oracle: bool = False
    uncorrected: bool = False
    datasets: tuple[str, ...] = tuple(DATASETS)
    targets: tuple[str, ...] | None = None

    def title(self, setting: str) -> str:
        """Return the name in a table of the setting: the source model has seen labeled target texts if there are any."""
        source_model = self.method == "source-only" and not self.oracle
        return f"In+{self.name}" if source_model and setting == SEMI_SUPERVISED else self.name


def _as_is(method: str, name: str, oracle: bool = False) -> Variant:
    """Return a variant without assumed class shares. On Amazon no variant assumes any."""
    return Variant(method, name, given={"target_class_prior": "none"}, oracle=oracle, uncorrected=True, datasets=("pheme",))


# In the order of the tables' rows.
VARIANTS: dict[str, Variant] = {
    "out": Variant("source-only", "Out"),
    "out-without-pretraining": Variant(
        "source-only", "Out (no pretraining)", given={"pretrain_epochs": 0.0}, datasets=("amazon",)
    ),
    "out-as-is": _as_is("source-only", "Out (uncorrected)"),
    "dann": Variant("dann", "DANN"),
    "fixmatch": Variant("fixmatch", "FixMatch"),
    "cst": Variant("cst", "CST"),
    "mme": Variant("mme", "MME"),
    "biat": Variant("biat", "BiAT"),
    "wind": Variant("wind", "WIND"),
    "mtem": Variant("mtem", "MTEM", groups=(GENERAL, ABLATION)),
    "mtem-learned": Variant("mtem", "MTEM (learned indexes)", (GENERAL, ABLATION), preset=LEARNED),
    "fixmatch-as-is": _as_is("fixmatch", "FixMatch (uncorrected)"),
    "cst-as-is": _as_is("cst", "CST (uncorrected)"),
    "biat-as-is": _as_is("biat", "BiAT (uncorrected)"),
    "mtem-as-is": _as_is("mtem", "MTEM (uncorrected)"),
    "mtem-paper": Variant("mtem", "MTEM (paper's settings)", preset=PAPER, uncorrected=True),
    "oracle": Variant("source-only", "*oracle: target labels*", oracle=True),
    "oracle-as-is": _as_is("source-only", "*oracle (uncorrected)*", oracle=True),
    # Of the recipe, with the recommended preset; of what the paper has, with indexes that are learned.
    "mtem-without-pretraining": Variant(
        "mtem", "w/o pretraining", (ABLATION,), given={"pretrain_epochs": 0.0}, datasets=("amazon",)
    ),
    "mtem-without-average": Variant("mtem", "w/o averaged weights", (ABLATION,), given={"ema_decay": 0.0}),
    "mtem-without-view": Variant("mtem", "w/o changed view", (ABLATION,), given={"view": "dropout"}),
    WITHOUT_PERTURBATION: Variant(
        "mtem", "w/o perturbed view", (ABLATION,), given={"view_radius": 0.0}, datasets=("amazon",)
    ),
    "mtem-without-meta": Variant("mtem", "w/o M: one index", (ABLATION,), LEARNED, {"meta": False}),
    "mtem-without-annealing": Variant("mtem", "w/o A: no annealing", (ABLATION,), LEARNED, {"annealing": False}),
    "mtem-without-sampling": Variant("mtem", "w/o S: no sampling", (ABLATION,), LEARNED, {"sampling": False}),
    **{
        f"mtem-{engine}-{size}": Variant(
            "mtem", f"MTEM, {engine}, batch {size}", (BATCH_SIZE,), LEARNED, {"engine": engine, "batch_size": size},
            datasets=("amazon",), targets=("kitchen",),
        )
        for engine in ENGINES
        for size in BATCH_SIZES
    },
}  # fmt: skip


def check(datasets: Mapping[str, Dataset], variants: Mapping[str, Variant]) -> None:
    """Check that the tables agree with each other; called at import.

    Raises
    ------
    ValueError
        If an entry is missing, empty or inconsistent.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    for key, dataset in datasets.items():
        where = f"data set '{key}'"
        texts = (dataset.title, dataset.measured, dataset.default_model, dataset.labeled_file, dataset.oracle_labels)
        require(all(texts), f"{where}: title, measured, default_model, labeled_file and oracle_labels must not be empty")
        require(bool(dataset.targets and dataset.pools and dataset.seeds), f"{where}: targets, pools and seeds must not be empty")
        require(set(dataset.targets) <= set(dataset.domains), f"{where}: a target is not one of the domains")
        require(dataset.default_model in dataset.planned, f"{where}: no plan for the default model {dataset.default_model}")
        separate = dataset.unlabeled_file is not None
        require(all(bool(sources) is separate for sources in dataset.pools.values()), f"{where}: pools do not fit unlabeled_file")
        require(set(dataset.planned_pools) <= set(dataset.pools), f"{where}: planned_pools: unknown pool")
        for model, share in (*dataset.planned.items(), *dataset.planned_pools.items()):
            lenders = (share.rehearsed_with,) if share.rehearsed_with else ()
            for names, allowed in (
                (share.variants, variants), (share.repeated, variants), (share.settings, SETTINGS), (share.pools, dataset.pools),
                (lenders, dataset.planned),
            ):  # fmt: skip
                require(set(names or ()) <= set(allowed), f"{where}: plan of {model}: unknown name in {names}")
    for key, variant in variants.items():
        where = f"variant '{key}'"
        require(bool(variant.name.strip()), f"{where}: no display name")
        require(variant.method in methods.METHODS, f"{where}: unknown method '{variant.method}'")
        require(bool(variant.groups) and set(variant.groups) <= set(GROUPS), f"{where}: unknown group in {variant.groups}")
        require(bool(variant.datasets) and set(variant.datasets) <= set(datasets), f"{where}: unknown data set")
        targets = {target for name in variant.datasets for target in datasets[name].targets}
        require(variant.targets is None or set(variant.targets) <= targets, f"{where}: unknown target in {variant.targets}")
    titles = [variant.name for variant in variants.values()]
    repeated = sorted({title for title in titles if titles.count(title) > 1})
    require(not repeated, f"two variants have the display name {repeated}")


check(DATASETS, VARIANTS)


def in_group(group: str) -> tuple[str, ...]:
    """Return the variants of an experiment, in the order of the table's rows."""
    return tuple(name for name, variant in VARIANTS.items() if group in variant.groups)


def find(variant: str) -> Variant:
    """Return the entry of a variant; a method from a file (or the stem of its name, as in results) is one of its own."""
    return VARIANTS[variant] if variant in VARIANTS else Variant(variant, Path(variant).stem)


# ---------------------------------------------------------------------- experiments


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The variants that are run side by side, in order, and where; None stands for all pools of the data set."""

    variants: tuple[str, ...]
    settings: tuple[str, ...] = SETTINGS
    pools: tuple[str, ...] | None = None


EXPERIMENTS = {
    # The source model and MTEM first: the page needs them most, if time is short.
    GENERAL: Experiment(tuple(sorted(in_group(GENERAL), key=lambda name: name not in ("out", "mtem")))),
    ABLATION: Experiment(in_group(ABLATION), (UNSUPERVISED,), ("mixed", "event")),
    BATCH_SIZE: Experiment(in_group(BATCH_SIZE), (UNSUPERVISED,), ("mixed",)),
}


def planned(dataset: str, model: str, pool: str, setting: str) -> dict[str, list[tuple[str, str, int]]]:
    """Return the (variant, target, seed) that the plan has for a place, by experiment."""
    about = DATASETS[dataset]
    share, part = about.share(model), about.planned_pools.get(pool, Share())
    if pool not in (share.pools or about.pools) or any(setting not in (of.settings or SETTINGS) for of in (share, part)):
        return {}
    return {
        name: [
            (variant, target, seed)
            for variant in experiment.variants
            for target in about.targets
            for seed in about.seeds
            if fits(variant, dataset, setting, target)
            and all(variant in (of.variants or experiment.variants) for of in (share, part))
            and (seed == about.seeds[0] or all(of.repeated is None or variant in of.repeated for of in (share, part)))
        ]
        for name, experiment in EXPERIMENTS.items()
        if setting in experiment.settings and pool in (experiment.pools or (pool,))
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
    rehearsed: Mapping[tuple[str, str, bool], Mapping[str, Any]] | None = None,
) -> list[Cell]:
    """Return the cells of some experiments: seed by seed, the unsupervised setting first, the data set's first pool first.

    Parameters
    ----------
    experiments
        Names in ``EXPERIMENTS``.
    dataset, model
        A name in ``DATASETS``, and a model as for ``mtem adapt``.
    name
        What the cells call the model.
    seeds, targets, settings_, pools, variants
        Restrictions; None stands for what the plan has. A variant may be the file of a method.
    overrides
        Settings of a trial, whose cells never count as results.
    rehearsed
        Settings from rehearsals by target, method and whether no class shares are assumed, as `rehearsed_settings.choices`
        returns them. Without it, cells are planned as before there were rehearsals: with a search over `FACTORS`.

    Raises
    ------
    RequestError
        If a name or an override is unknown.
    """
    if dataset not in DATASETS:
        raise RequestError(f"unknown data set '{dataset}': expected {' or '.join(DATASETS)}")
    about = DATASETS[dataset]
    for option, names, allowed in (
        ("--targets", targets, about.targets), ("--settings", settings_, SETTINGS), ("--pools", pools, tuple(about.pools)),
        ("--variants", [value for value in variants or () if not value.endswith(".py")], tuple(VARIANTS)),
    ):  # fmt: skip
        if unknown := [value for value in names or () if value not in allowed]:
            raise RequestError(f"{option} {unknown[0]}: for {dataset}, expected some of {', '.join(allowed)}")
    for key, option in (("seed", "--seeds"), ("device", "--device")):
        if key in (overrides or {}):
            raise RequestError(f"--set {key}: use {option} instead")
    requested: dict[tuple[str, str, str], None] = {}  # (setting, pool, variant), each once, in order
    for experiment in (EXPERIMENTS[key] for key in experiments):
        for setting in SETTINGS:
            for pool in about.pools:
                if setting not in (settings_ or experiment.settings) or pool not in (pools or experiment.pools or about.pools):
                    continue
                for variant in experiment.variants if variants is None else variants:
                    requested[setting, pool, variant] = None
    rows = {key[2]: row(dataset, model, name, key[2], overrides or {}) for key in requested}
    order = list(about.pools)
    groups = sorted({key[:2] for key in requested}, key=lambda group: (SETTINGS.index(group[0]), order.index(group[1])))
    cells = [
        in_place(dataclasses.replace(rows[variant], setting=setting, pool=pool, target=target, seed=seed))
        for seed in (about.seeds if seeds is None else seeds)
        for setting, pool in groups
        for target in about.targets
        for variant in [key[2] for key in requested if key[:2] == (setting, pool)]
        if (targets is None or target in targets) and fits(variant, dataset, setting, target)
    ]
    if rehearsed is not None:
        cells = [with_rehearsal(cell, rehearsed) for cell in cells]
    if cells and (unused := set(overrides or {}).difference(*(cell.overrides for cell in rows.values()))):
        raise RequestError(f"--set {sorted(unused)[0]}=...: not a setting of the methods to run")
    return cells


def in_place(cell: Cell) -> Cell:
    """Return the cell with the settings of its pool and of its setting, and its radius, where its variant has no own."""
    about = DATASETS[cell.dataset]
    given = {**about.of_pools.get(cell.pool, {}), **about.of_settings.get(cell.setting, {})}
    own = {**find(cell.variant if cell.variant in VARIANTS else cell.method).given, **cell.overrides}
    names = OF_SOURCE_MODEL if cell.method == "source-only" else tuple(given)
    new = {name: given[name] for name in names if name in given and name not in own and cell.preset != PAPER}
    if "view_radius" not in own:
        new["view_radius"] = view_radius(dataclasses.asdict(cell))  # the default depends on the device
    changed = {name: value for name, value in new.items() if name not in FREE and (name not in BEFORE or value != BEFORE[name])}
    return dataclasses.replace(cell, given={**cell.given, **new}, changed={**cell.changed, **changed})


def with_rehearsal(cell: Cell, rehearsed: Mapping[tuple[str, str, bool], Mapping[str, Any]]) -> Cell:
    """Return the cell with the settings that were rehearsed for its target and method.

    A method that was not rehearsed (it may need labeled target texts, or be the user's own) has the settings of `STAND_INS`. A
    variant with the preset "paper" keeps its own.

    Raises
    ------
    RequestError
        If there is no rehearsal.
    """
    if cell.method == "source-only":
        return cell
    if cell.preset == PAPER:  # the constants are what they are
        return dataclasses.replace(cell, factors=(1.0,), rehearsed=True)
    uncorrected = find(cell.variant if cell.variant in VARIANTS else cell.method).uncorrected
    found = next(
        (rehearsed[key] for name in (cell.method, *STAND_INS) if (key := (cell.target, name, uncorrected)) in rehearsed), None
    )
    if found is None:
        raise RequestError(
            f"{cell}: no rehearsal on its sources; first run 'mtem reproduce rehearsal --dataset {cell.dataset} ...'"
        )
    if cell.setting == SEMI_SUPERVISED and found.get("target_class_prior") == "uniform":
        found = {**found, "target_class_prior": "auto"}  # rehearsals have no labeled target texts, which show the shares
    own = find(cell.variant if cell.variant in VARIANTS else cell.method).given
    given = {**cell.given, **found, **own, **cell.overrides}
    changed = {**cell.changed, **{name: given[name] for name in found}}
    return dataclasses.replace(cell, given=given, changed=changed, factors=(1.0,), rehearsed=True)


def fits(variant: str, dataset: str, setting: str, target: str) -> bool:
    """Return whether a variant is run on a target in a setting."""
    about = find(variant)
    if methods.get(about.method).needs_target_labels and setting == UNSUPERVISED:
        return False
    return dataset in about.datasets and (about.targets is None or target in about.targets)


def row(dataset: str, model: str, name: str, variant: str, overrides: Mapping[str, Any]) -> Cell:
    """Return the cell of a variant, with setting, pool, target and seed left open."""
    about = find(variant)
    accepted = settings.names(*map(type, find_settings(model, about.method, about.preset, {})))
    own = {key: value for key, value in overrides.items() if key in accepted}
    usual = {} if about.preset == PAPER else DATASETS[dataset].adaptation
    given = {**usual, **DATASETS[dataset].settings_of(name), **about.given, **own}
    parts = find_settings(model, about.method, about.preset, given)
    parsed = settings.record(*parts)
    given, own = ({key: parsed[key] for key in part} for part in (given, own))  # "4" is 4
    changed = {
        key: value for key, value in settings.changed(*parts).items()
        if key not in FREE and (key not in BEFORE or value != BEFORE[key])
    }  # fmt: skip
    if variant.endswith(".py"):
        changed["method_file"] = hashlib.sha256(Path(variant).read_bytes()).hexdigest()
        variant = Path(variant).stem
    factors = FACTORS if about.method != "source-only" else (1.0,)
    return Cell(
        dataset, name, variant, "", "", "", 0, about.method, about.preset, given, changed, factors, about.oracle, own
    )  # fmt: skip


def model_name(model: str, given: str | None) -> str:
    """Return what cells call the model: a name that can be part of a path.

    Raises
    ------
    RequestError
        If the name has other characters than letters, digits, '-', '_' and '.'.
    """
    name = given or (Path(model).resolve().name if os.path.isdir(model) else model.rsplit("/", 1)[-1])
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name) or name.startswith("."):
        raise RequestError(f"--model-name {name!r}: expected letters, digits, '-', '_' and '.'")
    return name
