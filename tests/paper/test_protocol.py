"""The tables of data sets and variants, plans and addresses."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch

from mtem import methods
from mtem import settings as settings_module
from mtem.errors import RequestError
from mtem.run import adapt as adapt_module
from mtem.run import defaults
from mtem.run.adapt import find_settings
from mtem_paper import cells, protocol, published, rehearsed_settings
from tests.corpora import refusal
from tests.devices import Encoder, Threads


def test_a_plan_goes_seed_by_seed_and_unsupervised_first():
    plan = protocol.plan(["general"], "amazon", "minilm", "minilm", seeds=[1, 0])
    order = [(cell.seed, cell.setting, cell.pool) for cell in plan]
    assert list(dict.fromkeys(order)) == [
        (seed, setting, pool)
        for seed in (1, 0)
        for setting in ("unsupervised", "semi-supervised")
        for pool in ("mixed", "natural")
    ]
    kinds = {setting: {cell.variant for cell in plan if cell.setting == setting} for setting in protocol.SETTINGS}
    assert kinds["semi-supervised"] - kinds["unsupervised"] == {"wind"} and "oracle" in kinds["unsupervised"]
    assert len({cell.address for cell in plan}) == len(plan)


def test_experiments_share_cells():
    general, both = (protocol.plan(names, "pheme", "bigcn", "bigcn") for names in (["general"], ["general", "ablation"]))
    assert len(both) == len(general) + 5 * 4 * 5
    assert {cell.address for cell in general} < {cell.address for cell in both}
    sizes = protocol.plan(["batch-size"], "amazon", "minilm", "minilm", seeds=[0])
    assert len(sizes) == 18 and {cell.target for cell in sizes} == {"kitchen"}
    assert not protocol.plan(["batch-size"], "pheme", "bigcn", "bigcn")


def test_any_setting_changes_the_address():
    cell = protocol.plan(["general"], "pheme", "bigcn", "bigcn", variants=["mtem"])[0]
    assert cell.address == dataclasses.replace(cell).address
    assert {"target_class_prior", "epochs"} <= cell.changed.keys(), "BiGCN has others than the defaults"
    assert not {"device", "index_learning_rate", "left_out_models"} & cell.changed.keys()
    others = [
        dataclasses.replace(cell, changed={**cell.changed, name: "other"}) for name in (*cell.changed, "index_learning_rate")
    ]
    others += [
        dataclasses.replace(cell, seed=5),
        dataclasses.replace(cell, factors=(1.0,)),
        dataclasses.replace(cell, oracle=True),
    ]
    others += [
        dataclasses.replace(cell, **{name: "other"}) for name in ("dataset", "model", "setting", "pool", "target", "method")
    ]
    assert len({each.address.stem.split("-")[-1] for each in [cell, *others]}) == len(others) + 1
    for what in ({"index_learning_rate": 0.25}, {"target_class_prior": "none"}, {"hidden": 32}):
        given = protocol.plan(["general"], "pheme", "bigcn", "bigcn", variants=["mtem"], overrides=what)[0]
        assert given.address != cell.address
    unscaled = protocol.plan(["general"], "pheme", "bigcn", "bigcn", variants=["mtem"], overrides={"calibrate": "false"})[0]
    assert unscaled.changed == cell.changed, "no score depends on the temperature"


COMMITTED = Path(__file__).parents[2] / "results"
PLANS = (("amazon", "minilm"), ("pheme", "bigcn"))


def committed_plan():
    return [cell for dataset, model in PLANS for cell in protocol.plan(protocol.EXPERIMENTS, dataset, model, model)]


def test_a_new_setting_moves_no_cell(monkeypatch):
    """One with a neutral default, in the training's settings and in a method's."""
    from mtem.methods import mtem as method

    before = [cell.address for cell in committed_plan()]
    assert len(before) >= 100 and len(set(before)) == len(before)
    for module, name in ((adapt_module, "TrainingSettings"), (method.Mtem, "Settings")):
        kind = getattr(module, name)
        field = ("made_up", float, settings_module.setting(0.0, "made up"))
        monkeypatch.setattr(module, name, dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), frozen=True))
    cells_now = committed_plan()
    assert [cell.address for cell in cells_now] == before
    one = next(cell for cell in cells_now if cell.variant == "mtem")
    given = protocol.plan(["general"], one.dataset, one.model, one.model, variants=["mtem"], overrides={"made_up": 1.0})
    assert given[0].changed["made_up"] == 1.0, "it is there, and where it is used it counts"


def test_a_setting_at_its_value_from_before_it_existed_moves_no_cell():
    """The cells of threads that are read without neighbours were run before there were any."""
    rehearsed = rehearsed_settings.choices(COMMITTED, "pheme", "bigcn-minilm")
    found = {}
    for name in ("bigcn-minilm", "bigcn-minilm-neighbours"):
        plan = protocol.plan(["general"], "pheme", "bigcn", name, variants=["mtem-learned"], seeds=[0], rehearsed=rehearsed)
        found[name] = plan[0]
    alone, together = found.values()
    assert (COMMITTED / alone.address).is_file()
    assert alone.given["neighbours"] == 0 and "neighbours" not in alone.changed
    assert together.given["neighbours"] == together.changed["neighbours"] == 20
    assert alone.changed == {name: value for name, value in together.changed.items() if name != "neighbours"}


def moved(results):
    """The cells of the plan whose results were run with other settings than they would be today, and these settings."""
    found = []
    for cell in committed_plan():
        path = results / cell.address
        if not path.is_file():
            continue
        result = json.loads(path.read_text())
        today = find_settings(cell.model, cell.method, cell.preset, cell.given).record()
        unlabeled = cell.setting == protocol.UNSUPERVISED and not cell.oracle
        free = {*protocol.FREE, *(["target_labeled_share"] if unlabeled else []), *(["steps"] if cell.oracle else [])}
        names = (result["settings"].keys() & today.keys()) - free
        found += [(cell, name) for name in names if result["settings"][name] != json.loads(json.dumps(today[name]))]
        assert result["protocol"] == cell.protocol
    return found


def test_a_default_that_changes_needs_a_new_protocol(tmp_path):
    """An address leaves defaults out, so what committed cells were run with must be what would be run today."""
    assert moved(COMMITTED) == []
    cell = next(cell for cell in committed_plan() if cell.variant == "mtem")
    ran = {**find_settings(cell.model, cell.method, cell.preset, cell.given).record(), "device": "cuda"}
    cells.write(tmp_path, cell, {"protocol": cell.protocol, "settings": ran})
    assert moved(tmp_path) == []
    cells.write(tmp_path, cell, {"protocol": cell.protocol, "settings": {**ran, "warmup_ratio": 0.3}})
    assert moved(tmp_path) == [(cell, "warmup_ratio")]


@pytest.mark.parametrize(("dataset", "model"), [*PLANS, ("amazon", "mpnet"), ("amazon", "other"), ("pheme", "other")])
def test_a_cell_is_the_same_on_every_device(dataset, model):
    """What its settings leave open must have the same default on a CPU and on a GPU."""
    kind, network = (Encoder, "minilm") if dataset == "amazon" else (Threads, "bigcn")
    rehearsed = {
        (target, "mtem", uncorrected): {"learning_rate": 1e-4, "epochs": 12.0, "stop_epochs": 5.0, "evaluations": 12}
        for target in protocol.DATASETS[dataset].targets
        for uncorrected in (False, True)
    }
    for found in (None, rehearsed):
        for cell in protocol.plan(protocol.EXPERIMENTS, dataset, network, model, seeds=[0], rehearsed=found):
            training = find_settings(network, cell.method, cell.preset, cell.given).training
            width = {"mpnet": 768}.get(model, 384)
            obstacle = None if dataset == "amazon" else "no encoder"
            one, other = (
                defaults.resolve(training, kind(torch.device(name), 0, width, obstacle), cell.preset) for name in ("cpu", "cuda")
            )
            assert one == other, cell
            assert cell.protocol == (5 if training.view_radius else 4)
            assert training.frozen_layers == (0 if dataset == "amazon" or cell.preset == "paper" else None)


def test_settings_of_amazon_cells():
    def given(variant, model="minilm", **options):
        return protocol.plan(["general"], "amazon", "minilm", model, variants=[variant], seeds=[0], **options)[0].given

    text = {"frozen_layers": 0, "max_length": 512, "left_out_models": 0}
    common = {**text, "epochs": 12.0, "learning_rate": 5e-5, "view_radius": 0.0}
    perturbed = {**common, "view_radius": 0.005}
    assert given("mtem") == {**perturbed, "pretrain_epochs": 24.0}
    assert given("biat") == given("out") == {**common, "pretrain_epochs": 24.0}
    assert given("out-without-pretraining") == {**common, "pretrain_epochs": 0.0}
    assert given("mtem", "other") == {**perturbed, "pretrain_epochs": 0.0}
    assert given("mtem", "mpnet") == given("mtem", "other") | {"source_learning_rate": 2e-5}
    assert given("mtem-paper") == {**text, "pretrain_epochs": 24.0, "view_radius": 0.0}, "passes and rate are its own"
    own = {"epochs": "3", "pretrain_epochs": "1", "view_radius": "0.01"}
    assert given("mtem", overrides=own) == {**common, "epochs": 3.0, "pretrain_epochs": 1.0, "view_radius": 0.01}
    rows = list(protocol.VARIANTS)
    assert rows[rows.index("out") + 1] == "out-without-pretraining"
    assert "out-without-pretraining" not in {cell.variant for cell in protocol.plan(["general"], "pheme", "bigcn", "bigcn")}
    assert protocol.VARIANTS["out-without-pretraining"].title("semi-supervised") == "In+Out (no pretraining)"


def test_settings_of_a_place():
    """Those of a setting and of a pool; of Out only what the finished model has, and of a variant its own first."""

    def of(dataset, model, variant, setting, pool):
        given = {"variants": [variant], "settings_": [setting], "pools": [pool], "seeds": [0]}
        return protocol.plan(["general"], dataset, "bigcn" if dataset == "pheme" else model, model, **given)[0]

    cell = of("amazon", "minilm", "mtem", "semi-supervised", "natural")
    assert cell.changed.items() >= {"target_labeled_share": 0.1, "balance_target": True}.items()
    assert cell.given["left_out_models"] == 0 and "left_out_models" not in cell.changed
    for variant, setting, pool in (
        ("mtem", "unsupervised", "mixed"), ("out", "semi-supervised", "natural"), ("mtem-paper", "semi-supervised", "natural"),
    ):  # fmt: skip
        assert not {"target_labeled_share", "balance_target"} & set(of("amazon", "minilm", variant, setting, pool).given)
    for variant, assumed in (("out", "uniform"), ("mtem", "uniform"), ("out-as-is", "none"), ("biat-as-is", "none")):
        cell = of("pheme", "bigcn", variant, "unsupervised", "event")
        assert cell.given["target_class_prior"] == assumed
    committed = of("pheme", "bigcn-minilm-neighbours", "out", "unsupervised", "event")
    assert (COMMITTED / committed.address).is_file(), "rows with even shares are where they were"
    assert "target_class_prior" not in of("pheme", "bigcn", "mtem", "semi-supervised", "event").given


def test_a_rehearsal_never_has_the_address_of_a_result():
    plain = protocol.plan(["general"], "pheme", "bigcn", "bigcn", seeds=[0])
    default = {"epochs": "10"}  # even where it changes nothing
    for overrides in ({"steps": "4"}, default, {"learning_rate": "0.1"}):
        other = protocol.plan(["general"], "pheme", "bigcn", "bigcn", seeds=[0], overrides=overrides)
        assert not {cell.address for cell in plain} & {cell.address for cell in other}
    # a method's own setting touches that method alone
    other = protocol.plan(["general"], "pheme", "bigcn", "bigcn", seeds=[0], overrides={"index_learning_rate": "0.1"})
    same = {cell.variant for cell in plain} - {
        cell.variant for cell, twin in zip(plain, other, strict=True) if cell.address != twin.address
    }
    others = {"out", "oracle", "dann", "fixmatch", "cst", "mme", "biat", "wind"}
    assert same == others | {f"{name}-as-is" for name in ("out", "oracle", "fixmatch", "cst", "biat")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": ["toys"]}, ("--targets toys", "kitchen")),
        ({"variants": ["mtm"]}, ("--variants mtm", "mtem")),
        ({"pools": ["event"]}, ("--pools event", "natural")),
        ({"overrides": {"epoch": "1"}}, ("--set epoch",)),
        ({"overrides": {"epochs": "many"}}, ("epochs=many",)),
    ],
)
def test_unknown_names_are_refused(change, words):
    refusal(lambda: protocol.plan(["general"], "amazon", "minilm", "minilm", **change), *words)


def test_names_of_models(encoder):
    assert protocol.model_name("bigcn", None) == "bigcn" and protocol.model_name(str(encoder), "mini") == "mini"
    assert protocol.model_name(str(encoder), None) == encoder.name
    assert protocol.model_name("sentence-transformers/all-mpnet-base-v2", None) == "all-mpnet-base-v2"
    with pytest.raises(RequestError, match="--model-name"):
        protocol.model_name("minilm", "../elsewhere")


# ---------------------------------------------------------------------- the tables


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (protocol.Variant("mtem", " "), "variant 'new': no display name"),
        (protocol.Variant("mtem", "MTEM"), "two variants have the display name"),
        (protocol.Variant("mtme", "new"), "unknown method 'mtme'"),
        (protocol.Variant("mtem", "new", groups=("table-7",)), "unknown group"),
        (protocol.Variant("mtem", "new", groups=()), "unknown group"),
        (protocol.Variant("mtem", "new", datasets=("imdb",)), "unknown data set"),
        (protocol.Variant("mtem", "new", datasets=("pheme",), targets=("kitchen",)), "unknown target"),
    ],
)
def test_a_variant_that_is_not_complete_is_an_error_at_import(variant, message):
    protocol.check(protocol.DATASETS, {**protocol.VARIANTS, "new": protocol.Variant("mtem", "new")})
    with pytest.raises(ValueError, match=message):
        protocol.check(protocol.DATASETS, {**protocol.VARIANTS, "new": variant})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": ""}, "must not be empty"),
        ({"targets": ()}, "must not be empty"),
        ({"targets": ("books", "toys")}, "not one of the domains"),
        ({"default_model": "mpnet-large"}, "no plan for the default model"),
        ({"unlabeled_file": None}, "pools do not fit"),
        ({"planned": {"minilm": protocol.Share(("mtme",))}}, "plan of minilm: unknown name"),
        ({"planned": {"minilm": protocol.Share(pools=("event",))}}, "plan of minilm: unknown name"),
        ({"planned": {"minilm": protocol.Share(repeated=("mtme",))}}, "plan of minilm: unknown name"),
    ],
)
def test_a_data_set_that_is_not_complete_is_an_error_at_import(change, message):
    broken = dataclasses.replace(protocol.DATASETS["amazon"], **change)
    with pytest.raises(ValueError, match=message):
        protocol.check({**protocol.DATASETS, "amazon": broken}, protocol.VARIANTS)


def test_the_tables_are_checked_when_they_are_imported(monkeypatch):
    runpy.run_path(protocol.__file__)
    runpy.run_path(published.__file__)
    monkeypatch.delitem(methods.METHODS, "wind")
    with pytest.raises(ValueError, match="variant 'wind': unknown method"):
        runpy.run_path(protocol.__file__)
    monkeypatch.delitem(protocol.VARIANTS, "wind")
    with pytest.raises(ValueError, match="row WIND: no variant 'wind'"):
        runpy.run_path(published.__file__)


def test_names_in_a_table():
    assert (
        protocol.VARIANTS["out"].title("semi-supervised") == "In+Out" and protocol.VARIANTS["out"].title("unsupervised") == "Out"
    )
    assert protocol.VARIANTS["oracle"].title("semi-supervised") == "*oracle: target labels*"
    assert protocol.find("folder/mine.py").name == "mine" and protocol.find("mine").name == "mine"
    assert protocol.DATASETS["amazon"].place("minilm", "mixed", "unsupervised") == "Amazon, minilm, mixed pool, unsupervised"
    assert protocol.DATASETS["pheme"].place("bigcn", "event", "unsupervised") == "PHEME, bigcn, unsupervised"


def test_the_source_model_and_mtem_are_run_first():
    for dataset, model in PLANS:
        cells = protocol.plan(["general"], dataset, model, model, seeds=[0], settings_=["unsupervised"], pools=None)
        assert [cell.variant for cell in cells[:2]] == ["out", "mtem"]


def test_views_are_perturbed_where_rehearsals_found_it_better():
    """Number 5 of the protocol: methods that learn labels in a view, on reviews, and on threads as they were rehearsed."""

    def radii(dataset, model, variants, setting="unsupervised"):
        given = {"variants": variants, "settings_": [setting], "seeds": [0]}
        plan = protocol.plan(["general"], dataset, "bigcn" if dataset == "pheme" else model, model, **given)
        assert all(cell.protocol == (5 if cell.changed.get("view_radius") else 4) for cell in plan)
        assert all(cell.changed.get("view_radius", 0.0) == cell.given["view_radius"] for cell in plan)
        return {cell.given["view_radius"] for cell in plan}

    learners = ["mtem", "mtem-learned", "fixmatch", "cst", "mtem-without-pretraining"]
    for setting in protocol.SETTINGS:
        assert radii("amazon", "minilm", learners, setting) == radii("amazon", "mpnet", learners, setting) == {0.005}
        others = ["out", "dann", "mme", "biat", "mtem-paper", "mtem-without-perturbation"]
        assert radii("amazon", "minilm", others, setting) == {0.0}
    as_is = [f"{name}-as-is" for name in ("mtem", "fixmatch", "cst")]
    assert radii("pheme", "bigcn-minilm-neighbours", as_is) == {0.2}
    assert radii("pheme", "bigcn-minilm-neighbours", as_is, "semi-supervised") == radii("pheme", "bigcn", as_is) == {0.0}
    others = ["mtem", "fixmatch", "out-as-is", "biat-as-is", "mtem-paper"]
    assert radii("pheme", "bigcn-minilm-neighbours", others) == {0.0}


@pytest.mark.parametrize(("base", "radius"), [("fixmatch.FixMatch", 0.005), ("dann.Dann", 0.0)])
def test_a_method_of_ones_own_has_the_perturbed_view_if_it_learns_in_one(tmp_path, base, radius):
    module, name = base.split(".")
    path = tmp_path / "mine.py"
    path.write_text(f"from mtem.methods.{module} import {name}\n\n\nclass Mine({name}):\n    name = 'mine'\n")
    cell = protocol.plan(["general"], "amazon", "minilm", "minilm", variants=[str(path)], seeds=[0])[0]
    assert cell.given["view_radius"] == radius and cell.protocol == (5 if radius else 4)
    result = {**dataclasses.asdict(cell), "method": "mine", "protocol": cell.protocol}
    assert cells.is_current(result) and not cells.is_current({**result, "protocol": 3})


def test_methods_that_adapt_have_the_settings_of_their_pool():
    def changed(pool, variant, **overrides):
        made = protocol.plan(["general"], "amazon", "minilm", "minilm", pools=[pool], variants=[variant], overrides=overrides)
        return {cell.changed.get("balance_target", False) for cell in made}, {cell.given.get("balance_target") for cell in made}

    assert changed("natural", "mtem") == changed("natural", "dann") == ({True}, {True})
    assert changed("mixed", "mtem") == changed("natural", "out") == changed("natural", "mtem-paper") == ({False}, {None})
    assert changed("natural", "mtem", balance_target="false") == ({False}, {False})
    assert changed("natural", "mtem", learning_rate="1e-3") == ({True}, {True})


def test_a_model_whose_plan_names_rows_has_those_of_all_experiments():
    planned = protocol.planned("pheme", "bigcn-minilm-neighbours", "event", "unsupervised")
    assert {variant for variant, _, _ in planned["ablation"]} >= {"mtem", "mtem-without-view", "mtem-without-average"}
    assert "mtem-without-meta" not in {variant for variant, _, _ in planned["ablation"]} and "batch-size" not in planned
    assert "ablation" not in protocol.planned("pheme", "bigcn-minilm-neighbours", "event", "semi-supervised")


def test_of_the_natural_pool_the_plan_has_the_main_rows():
    planned = protocol.planned("amazon", "minilm", "natural", "unsupervised")
    assert {variant for variant, _, _ in planned["general"]} == {
        "out", "out-without-pretraining", "fixmatch", "biat", "mtem", "mtem-learned",
    }  # fmt: skip
    seeds = {name: {seed for variant, _, seed in planned["general"] if variant == name} for name in ("out", "mtem", "biat")}
    assert seeds == {"out": {0, 1, 2}, "mtem": {0, 1, 2}, "biat": {0}}, "and most rows with one seed"
    assert protocol.planned("amazon", "minilm", "natural", "semi-supervised") == {}
    assert protocol.planned("amazon", "mpnet", "natural", "unsupervised") == {}, "which the model's own plan leaves out"
