"""The paper's experiments at tiny size: who sees what, addresses, resuming, failures, several processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mtem import adapt
from mtem import settings as settings_module
from mtem.cli import main
from mtem.data.corpus import text_key
from mtem.errors import RequestError
from mtem.run import adapt as adapt_module
from mtem.run.adapt import find_settings
from mtem_paper import cells, page, protocol, runner, search, splits
from tests.conftest import make_texts
from tests.corpora import refusal, table
from tests.processes import LIMIT, interruptible, is_group, wait_for, wait_for_begun
from tests.threads import make_threads

TINY = {"max_length": 12, "batch_size": 20, "source_epochs": 0.5, "source_learning_rate": 3e-3, "steps": 2, "evaluations": 2}
RUMOUR = {"good": "rumour", "bad": "non-rumour"}
RAISES = """
from mtem.methods.source_only import SourceOnly

class Broken(SourceOnly):
    name = "broken"

    def step(self, *arguments):
        {what}
"""


@pytest.fixture(scope="module")
def amazon(tmp_path_factory):
    """Four domains with 240 labeled reviews, some of them twice, and a pool that has some of the labeled ones in it."""
    folder = tmp_path_factory.mktemp("amazon")
    for number, domain in enumerate(splits.AMAZON):
        rows = make_texts(240, number, number / 5)
        labeled = [{"text": text, "label": {"bad": "negative", "good": "positive"}[label]} for text, label in rows + rows[:8]]
        table(folder, f"{domain}.labeled.jsonl.gz", labeled)
        pool = [{"text": text, "source": "fdu"} for text, _ in make_texts(60, 10 + number, 0.5) + rows[:5]]
        pool += [{"text": text, "source": ("hatn", "wind-tok")[i % 2]} for i, (text, _) in enumerate(make_texts(60, 20 + number))]
        table(folder, f"{domain}.unlabeled.jsonl.gz", pool)
    return folder


@pytest.fixture(scope="module")
def pheme(tmp_path_factory):
    """Five events of 260 threads; ten roots come again with another link."""
    folder = tmp_path_factory.mktemp("data") / "pheme"
    folder.mkdir()
    for number, event in enumerate(splits.EVENTS):
        threads = [{**thread, "label": RUMOUR[thread["label"]]} for thread in make_threads(250, number, number / 5, largest=3)]
        for i in range(10):
            root = {**threads[i]["nodes"][0], "text": threads[i]["nodes"][0]["text"] + f" https://t.co/{i}"}
            threads.append({**threads[i], "id": f"again-{i}", "nodes": [root]})
        table(folder, f"{event}.jsonl.gz", threads)
    return folder.parent


def planned(encoder, variants, **changes):
    given = {"seeds": [0], "targets": ["kitchen"], "settings_": ["unsupervised"], "pools": ["natural"], "overrides": TINY}
    return protocol.plan(["general"], "amazon", str(encoder), "tiny", variants=variants, **{**given, **changes})


def results_of(folder, found):
    return {cell.address: json.loads((folder / cell.address).read_text()) for cell in found}


def stripped(result):
    """Without what differs from run to run."""
    kept = {name: value for name, value in result.items() if name not in ("seconds", "source_seconds", "finished", "resolved")}
    return {**kept, "search": [{**entry, "seconds": 0} for entry in result["search"]]}


def write_method(folder, name, what):
    (folder / f"{name}.py").write_text(RAISES.format(what=what))
    return str(folder / f"{name}.py")


# ---------------------------------------------------------------------- splits


def test_reviews_of_the_test_set_are_nowhere_else(amazon):
    target = splits.read("amazon", amazon, "kitchen", "mixed")
    division = splits.divide(target, 0)
    sides = [{text_key(text) for text in part} for part in (division.few, division.test, division.unlabeled)]
    assert not sides[0] & sides[1] and not sides[1] & sides[2] and not sides[0] & sides[2]
    assert len(division.few) == 100 and len(division.few) + len(division.test) == 248, "the repeated ones are all in the test set"
    known = dict(zip(target.examples, target.labels, strict=True))
    assert [known[text] for text in division.few + division.test] == division.target_labeled_labels + division.truth
    assert division.unlabeled_labels is None and set(target.sources) == {"books", "dvd", "electronics"}


def test_pools_are_what_their_names_say(amazon):
    mixed, natural = (splits.read("amazon", amazon, "kitchen", pool).pool for pool in ("mixed", "natural"))
    assert len(natural) == 60 and len(mixed) == 90 and set(natural) < set(mixed)
    assert set(make_texts(60, 13, 0.5)[0][:1]) <= set(natural)


def test_large_pools_are_cut_to_a_sample_of_the_seed(amazon, monkeypatch):
    monkeypatch.setattr(splits, "POOL", 30)
    target = splits.read("amazon", amazon, "kitchen", "mixed")
    one, again, other = (splits.divide(target, seed) for seed in (0, 0, 1))
    assert len(one.unlabeled) == 30 and one == again and one.unlabeled != other.unlabeled and one.few != other.few


def test_threads_of_the_test_set_are_nowhere_else(pheme):
    target = splits.read("pheme", pheme, "ferguson", "event")
    division = splits.divide(target, 3)
    key = {thread["id"]: same for thread, same in zip(target.examples, target.keys, strict=True)}
    assert len(set(target.keys)) == 250 and max(Counter(target.keys).values()) == 2
    sides = [{key[thread["id"]] for thread in part} for part in (division.few, division.test, division.unlabeled)]
    assert not sides[0] & sides[1] and not sides[1] & sides[2] and not sides[0] & sides[2]
    assert [len(part) for part in (division.few, division.test, division.unlabeled)] == [100, 48, 112]
    shares = [labels.count("rumour") / len(labels) for labels in (division.truth, division.unlabeled_labels)]
    assert abs(shares[0] - shares[1]) < 0.02
    assert not any("label" in thread for part in (division.few, division.test, division.unlabeled) for thread in part)


def test_held_out_takes_its_share_of_every_class():
    draw = np.random.default_rng(0)
    labels = ["a"] * 200 + ["b"] * 40
    rows = splits.held_out([str(number // 2) for number in range(240)], labels, 0.3, draw)
    assert Counter(labels[row] for row in rows) == {"a": 60, "b": 12}
    assert set(rows // 2 * 2) | set(rows // 2 * 2 + 1) == set(rows), "pairs stay together"


def test_missing_data_say_what_to_do(amazon, tmp_path):
    refusal(lambda: splits.read("pheme", amazon, "ferguson", "event"), "charliehebdo.jsonl.gz", "mtem data prepare pheme")
    for domain in splits.AMAZON:
        table(tmp_path, f"{domain}.labeled.jsonl.gz", [{"text": "a", "label": "positive"}])
    table(tmp_path, "kitchen.unlabeled.jsonl.gz", [{"text": "b", "source": "blitzer"}])
    refusal(lambda: splits.read("amazon", tmp_path, "kitchen", "mixed"), "fdu and hatn", "blitzer 1", "--pools")
    assert splits.read("amazon", tmp_path, "kitchen", "natural").pool == ["b"]


# ---------------------------------------------------------------------- plans and addresses


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
    assert len(both) == len(general) + 3 * 4 * 5
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


COMMITTED = Path(__file__).parent.parent / "results"
PLANS = (("amazon", "minilm"), ("pheme", "bigcn"))


def committed_plan():
    return [cell for dataset, model in PLANS for cell in protocol.plan(protocol.EXPERIMENTS, dataset, model, model)]


def test_a_new_setting_moves_no_cell(monkeypatch):
    """One with a neutral default, in the training's settings and in a method's."""
    from mtem.methods import mtem as method

    before = [cell.address for cell in committed_plan()]
    there = [address for address in before if (COMMITTED / address).is_file()]
    assert len(there) >= 300 and len(set(before)) == len(before)
    for module, name in ((adapt_module, "TrainingSettings"), (method.Mtem, "Settings")):
        kind = getattr(module, name)
        field = ("made_up", float, settings_module.setting(0.0, "made up"))
        monkeypatch.setattr(module, name, dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), frozen=True))
    cells_now = committed_plan()
    assert [cell.address for cell in cells_now] == before
    one = next(cell for cell in cells_now if cell.variant == "mtem")
    given = protocol.plan(["general"], one.dataset, one.model, one.model, variants=["mtem"], overrides={"made_up": 1.0})
    assert given[0].changed["made_up"] == 1.0, "it is there, and where it is used it counts"


def test_a_default_that_changes_needs_a_new_protocol():
    """An address leaves defaults out, so what committed cells were run with must be what would be run today."""
    checked = 0
    for cell in committed_plan():
        path = COMMITTED / cell.address
        if not path.is_file():
            continue
        result = json.loads(path.read_text())
        parts = find_settings(cell.model, cell.method, cell.preset, cell.given)
        today = settings_module.record(*parts.values())
        unlabeled = cell.setting == protocol.UNSUPERVISED and not cell.oracle
        free = {*protocol.FREE, *(["target_labeled_share"] if unlabeled else []), *(["steps"] if cell.oracle else [])}
        for name in (result["settings"].keys() & today.keys()) - free:
            assert result["settings"][name] == json.loads(json.dumps(today[name])), (str(cell.address), name)
        assert result["protocol"] == cell.protocol
        checked += 1
    assert checked >= 300


def test_places_show_the_earlier_rules_until_as_much_was_run_under_the_new_ones(tmp_path):
    from tests.made_up import make_cell

    def result(protocol, seed, variant="mtem", prior="uniform"):
        made = make_cell(variant, "ferguson", seed, dataset="pheme", settings={"target_class_prior": prior}, protocol=protocol)
        path = tmp_path / f"cells/pheme/bigcn/unsupervised/event/{variant}-{prior}-{seed}-{protocol}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))

    for seed in (0, 1):
        result(1, seed)
        result(1, seed, prior="none", variant="mtem-as-is")  # nothing has changed for these
    result(2, 0)
    found = cells.read(tmp_path)
    assert sorted((cell["variant"], cell["seed"], cell["protocol"]) for cell in found.cells) == [
        ("mtem", 0, 1), ("mtem", 1, 1), ("mtem-as-is", 0, 1), ("mtem-as-is", 1, 1),
    ]  # fmt: skip
    current = [("mtem", 2), ("mtem-as-is", 1), ("mtem-as-is", 1)]
    assert sorted((cell["variant"], cell["protocol"]) for cell in found.current) == current
    assert "2 of the 4 runs shown were made under protocol 1; 1 have been run again" in "".join(
        page._earlier(found.cells, found.current)
    )
    result(2, 1)
    found = cells.read(tmp_path)
    assert {cell["protocol"] for cell in found.cells if cell["variant"] == "mtem"} == {2}
    assert page._earlier(found.cells, found.current) == []


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
    assert same == {"out", "out-as-is", "oracle", "oracle-as-is", "dann", "fixmatch", "cst", "mme", "biat", "wind"}


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


# ---------------------------------------------------------------------- reading results


def test_damaged_files_and_rehearsals_are_no_results(tmp_path):
    cell = protocol.plan(["general"], "pheme", "bigcn", "bigcn", variants=["mtem"], seeds=[0])[0]
    names = ("dataset", "model", "setting", "pool", "variant", "target", "seed")
    result = {
        **{name: getattr(cell, name) for name in names},
        "overrides": {},
        "protocol": 2,
        "oracle": False,
        "settings": {"target_class_prior": "uniform"},
        "finished": "2026-01-01",
        "score": 1,
    }
    path = cells.write(tmp_path, cell, result)
    cells.write(tmp_path, dataclasses.replace(cell, target="b"), {**result, "target": "b", "overrides": {"steps": "1"}})
    cells.write(tmp_path, dataclasses.replace(cell, target="c"), {**result, "target": "c", "protocol": 3})
    cells.write(tmp_path, dataclasses.replace(cell, factors=(9.0,)), {**result, "finished": "2025-01-01", "score": 0})
    path.with_name("half-a-0-00000000.json").write_text(path.read_text()[:40])
    path.with_name("list-a-0-00000000.json").write_text("[]")
    path.with_name(".mtem.json.abc.part").write_text("{")
    found, damaged, current = cells.read(tmp_path)
    assert [each["score"] for each in found] == [1] and cells.read_all(tmp_path) == found == current
    assert len(damaged) == 2 and all("run it again" in line for line in damaged)
    assert cells.read_all(tmp_path / "nothing") == []


# ---------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def ran(amazon, encoder, tmp_path_factory):
    """Both settings of a few variants, in this process."""
    folder = tmp_path_factory.mktemp("results")
    found = planned(encoder, ["out", "mtem", "mme"], settings_=None)
    summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    return folder, found, summary


def test_cells_say_all_that_tables_need(ran):
    folder, found, summary = ran
    assert (summary.done, summary.failed, summary.left) == (6, [], 0)
    for address, result in results_of(folder, found).items():
        assert address.name.startswith(f"{result['variant']}-kitchen-0-")
        truth, predicted = np.array(list(result["truth"])), np.array(list(result["predictions"]))
        assert result["score"] == result["metrics"]["accuracy"] == (truth == predicted).mean()
        assert len(truth) == result["test"]["size"] == result["texts"]["test"] == 148 and result["texts"]["source"] == 744
        assert result["texts"]["target_labeled"] == (100 if result["setting"] == "semi-supervised" else 0)
        assert result["target_selected"]["score"] >= result["score"]
        assert len(result["search"]) == (1 if result["variant"] == "out" else 2)
        for entry in result["search"]:
            assert entry["candidates"][0]["step"] == 0 and entry["candidates"][0]["score"] == result["source_score"]
            assert entry["criterion_score"] == max(each["criterion_score"] for each in entry["candidates"])
        chosen = result["search"][result["chosen"]]
        assert chosen["score"] == result["score"], "the observer saw what the finished model says"
        assert chosen["criterion_score"] == max(entry["criterion_score"] for entry in result["search"])
        rates = [entry["settings"]["learning_rate"] for entry in result["search"]]
        assert rates == [2e-5 * factor for factor in ((1,) if result["variant"] == "out" else (1, 2.5))]
        assert ("history" in result) == (result["variant"] == "mtem")
        assert result["classes"] == ["negative", "positive"] and result["selected_by"] == "infomax" and not result["oracle"]
        assert result["overrides"] and result["machine"] and result["versions"]["torch"] and result["settings"]["steps"] == 2


def test_theta_1_and_the_test_set_are_shared(ran):
    found = {(each["setting"], each["variant"]): each for each in results_of(*ran[:2]).values()}
    assert len({each["test"]["fingerprint"] for each in found.values()}) == 1
    for setting in protocol.SETTINGS:
        assert found[setting, "out"]["score"] == found[setting, "mtem"]["source_score"] == found[setting, "out"]["source_score"]


def test_what_is_there_is_not_run_again(ran, amazon, encoder, monkeypatch):
    folder, found, _ = ran
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    with monkeypatch.context() as patch:
        patch.setattr(search, "Group", None)
        summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    assert (summary.done, summary.there, summary.left) == (0, 6, 0)
    (folder / found[1].address).unlink()
    summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    assert (summary.done, summary.there) == (1, 5)
    for path, content in before.items():
        if path == folder / found[1].address:
            assert stripped(json.loads(path.read_bytes())) == stripped(json.loads(content))
        else:
            assert path.read_bytes() == content


def test_test_texts_and_their_labels_never_reach_adapt(pheme, tmp_path, monkeypatch):
    seen = []
    original = search.adapt

    def watched(source, target, **given):
        seen.append(
            (target, given["target_labeled"], {name: given[name] for name in given if name not in ("observe", "progress")})
        )
        return original(source, target, **given)

    monkeypatch.setattr(search, "adapt", watched)
    overrides = {name: value for name, value in TINY.items() if name != "max_length"} | {"vocabulary": 60}
    found = protocol.plan(
        ["general"], "pheme", "bigcn", "bigcn", seeds=[1], targets=["ferguson"], overrides=overrides,
        variants=["out", "out-as-is", "oracle"],
    )  # fmt: skip
    summary = runner.run(found, tmp_path, data=pheme, model="bigcn", device="cpu")
    assert not summary.failed, summary.failed
    test = {tuple(tree.texts) for tree in search.Group(found[0], pheme, "bigcn", "cpu", tmp_path).test.threads()}
    for target, few, _ in seen:
        for corpus in (target, few):
            assert corpus is None or not test & {tuple(tree.texts) for tree in corpus.threads()}
        assert not target.labeled and (few is None or len(few) in (100, 112, 212))
    results = {(each["setting"], each["variant"]): each for each in results_of(tmp_path, found).values()}
    assert {key: each["texts"]["target_labeled"] for key, each in results.items()} == {
        ("unsupervised", "out"): 0, ("unsupervised", "out-as-is"): 0, ("unsupervised", "oracle"): 112,
        ("semi-supervised", "out"): 100, ("semi-supervised", "out-as-is"): 100, ("semi-supervised", "oracle"): 212,
    }  # fmt: skip
    for result in results.values():
        assert result["score"] == result["metrics"]["f1"]["rumour"] and 0 < result["metrics"]["trivial_f1"] < 1
        assert result["search"][0]["score"] == result["score"] and result["oracle"] == (result["variant"] == "oracle")
        assert result["settings"]["target_class_prior"] == ("none" if result["variant"] == "out-as-is" else "uniform")


def test_without_labels_of_the_pool_the_oracle_learns_one_half_of_the_test_set_to_predict_the_other(
    amazon, encoder, tmp_path, monkeypatch
):
    seen = []
    original = search.adapt

    def watched(source, target, **given):
        adapted = original(source, target, **given)
        seen.append((set(given["target_labeled"].texts()), adapted))
        return adapted

    monkeypatch.setattr(search, "adapt", watched)
    found = planned(encoder, ["oracle"])
    summary = runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu")
    assert not summary.failed, summary.failed
    group = search.Group(found[0], amazon, str(encoder), "cpu", tmp_path)
    texts = list(group.test.texts())
    result = results_of(tmp_path, found)[found[0].address]
    assert result["oracle"] and len(seen) >= 2
    (first, one), (second, other) = seen[:2]
    assert not first & second and first | second == set(texts)
    for known, adapted in ((first, other), (second, one)):  # who predicts a text has not learned its label
        rows = [number for number, text in enumerate(texts) if text in known]
        expected = adapted.predict([texts[row] for row in rows])
        assert [result["classes"][int(result["predictions"][row])] for row in rows] == expected
    meant = np.unpackbits(np.frombuffer(bytes.fromhex(result["test"]["rows"]), dtype=np.uint8))
    assert meant.sum() == len(texts)


def test_a_failing_cell_does_not_stop_the_others(amazon, encoder, tmp_path):
    broken = write_method(tmp_path, "broken", "raise ValueError('no such luck')")
    found = planned(encoder, ["out", broken, "dann"])
    summary = runner.run(found, tmp_path / "results", data=amazon, model=str(encoder), device="cpu")
    assert summary.done == 2 and [cell.variant for cell, _ in summary.failed] == ["broken"]
    told = cells.failure_path(tmp_path / "results", found[1])
    assert "Traceback" in told.read_text() and "no such luck" in told.read_text() and str(told) in summary.failed[0][1]
    write_method(tmp_path, "broken", "return super().step(*arguments)")
    mended = planned(encoder, ["out", broken, "dann"])
    assert mended[1].address != found[1].address, "another file is another method"


def test_when_theta_1_fails_so_do_all_that_begin_there(amazon, encoder, tmp_path, monkeypatch):
    tries = []

    def failing(*arguments, **given):
        tries.append(given["method"])
        raise RequestError("out of paper")

    monkeypatch.setattr(search, "adapt", failing)
    summary = runner.run(planned(encoder, ["out", "mtem", "mme"]), tmp_path, data=amazon, model=str(encoder), device="cpu")
    assert summary.done == 0 and len(summary.failed) == 3 and tries == ["source-only", "mme"]


def test_no_cell_is_begun_after_the_limit(amazon, encoder, tmp_path, monkeypatch):
    found = planned(encoder, ["out", "dann"])
    summary = runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu", limit=0)
    assert (summary.done, summary.left) == (0, 2) and not list(tmp_path.iterdir())
    clock = [1000.0]
    solve = search.solve

    def slow(cell, group):
        clock[0] += 60
        return solve(cell, group)

    monkeypatch.setattr(search, "solve", slow)
    monkeypatch.setattr(runner.time, "time", lambda: clock[0])
    summary = runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu", limit=30)
    assert (summary.done, summary.left) == (1, 1) and (tmp_path / found[0].address).is_file()


def test_on_threads_out_is_what_every_method_begins_from(pheme, tmp_path):
    """The correction of the prior, too, must be the same for all."""
    overrides = {"source_epochs": 1, "epochs": 1, "evaluations": 1, "vocabulary": 60, "batch_size": 20}
    given = {"seeds": [0], "targets": ["ferguson"], "settings_": ["unsupervised"], "variants": ["out", "fixmatch", "mtem"]}
    found = protocol.plan(["general"], "pheme", "bigcn", "bigcn", overrides=overrides, **given)
    assert not runner.run(found, tmp_path, data=pheme, model="bigcn", device="cpu").failed
    results = list(results_of(tmp_path, found).values())
    assert len({each["source_score"] for each in results}) == 1 and results[0]["score"] == results[0]["source_score"]
    for result in results:
        assert result["search"][result["chosen"]]["score"] == result["score"] <= result["target_selected"]["score"]


def test_several_processes_find_the_same_and_survive_one_another(ran, amazon, encoder, tmp_path):
    """One of them ends in the middle of a cell."""
    dies = write_method(tmp_path, "dies", "import os; os._exit(3)")
    folder, found, _ = ran
    both = [*found, *planned(encoder, [dies], targets=["dvd"])]
    summary = runner.run(both, tmp_path / "results", data=amazon, model=str(encoder), device="cpu", jobs=2)
    assert summary.done == 6 and [cell.variant for cell, _ in summary.failed] == ["dies"]
    assert "exit code 3" in summary.failed[0][1]
    alone, together = results_of(folder, found), results_of(tmp_path / "results", found)
    assert {key: stripped(each) for key, each in together.items()} == {key: stripped(each) for key, each in alone.items()}


@dataclasses.dataclass
class Meeting(runner.Solver):
    """Waits until another process is at a cell, too; at `out` it ends."""

    def __call__(self, cell):
        (self.source_models / str(os.getpid())).touch()
        wait_for(lambda: len(list(self.source_models.iterdir())) > 1, "another process")  # files only ever come there
        return os._exit(5) if cell.variant == "out" else runner.Outcome(cell, {}, None)


def test_who_has_nothing_to_do_helps_with_a_group_and_who_ends_takes_one_cell_along(encoder, tmp_path):
    found = planned(encoder, ["out", "mtem", "dann", "cst"])
    outcomes = list(runner.in_processes([found], Meeting(tmp_path, "", "", tmp_path), 2, 1, float("inf")))
    assert sorted(found.index(each.cell) for each in outcomes) == [0, 1, 2, 3]
    failed = [each for each in outcomes if each.failure]
    assert [each.cell.variant for each in failed] == ["out"] and "exit code 5" in failed[0].failure


def test_theta_1_is_there_for_who_comes_later(ran, amazon, encoder, monkeypatch):
    folder, found, _ = ran
    kept = list((folder / runner.SOURCE_MODELS).glob("*/*/*/*/*"))
    assert len(kept) == 2 and all((place / "run.json").is_file() for place in kept)
    begun = []
    monkeypatch.setattr(search, "adapt", lambda *given, **options: begun.append(options["method"]) or adapt(*given, **options))
    later = planned(encoder, ["dann"])
    assert runner.run(later, folder, data=amazon, model=str(encoder), device="cpu").done == 1
    assert begun == ["dann", "dann"], "the search, and no training of the source model"
    scores = results_of(folder, [found[0], *later]).values()
    assert len({each["source_score"] for each in scores}) == 1
    (folder / later[0].address).unlink()


def begun_run(amazon, encoder, tmp_path, variants, **options):
    """A run by the command line in two processes, and the method of its last variant, which says that it began and waits."""
    begun = tmp_path / "begun"
    waits = write_method(tmp_path, "waits", f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(3600)")
    words = f"--data {amazon} --model {encoder} --results {tmp_path / 'r'} --seeds 0 --targets dvd --settings unsupervised"
    words += f" --pools natural --variants {','.join([*variants, waits])} --jobs 2 --device cpu"
    words += "".join(f" --set {name}={value}" for name, value in TINY.items())
    process = subprocess.Popen(
        [sys.executable, "-m", "mtem.cli", "reproduce", "general", *words.split()], env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True, preexec_fn=interruptible, **options,
    )  # fmt: skip
    given = {"seeds": [0], "targets": ["dvd"], "settings_": ["unsupervised"], "pools": ["natural"], "overrides": TINY}
    found = protocol.plan(["general"], "amazon", str(encoder), encoder.name, variants=[*variants, waits], **given)
    return process, begun, [tmp_path / "r" / cell.address for cell in found]


def test_a_killed_run_takes_its_workers_along(amazon, encoder, tmp_path):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process, begun, (address,) = begun_run(amazon, encoder, tmp_path, [], **silent)
    try:
        wait_for_begun(process, begun.exists, "the cell that waits")
        assert is_group(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not is_group(process.pid), "the end of the workers")
    assert not address.exists()


def test_an_interrupted_run_leaves_whole_cells_and_no_process(amazon, encoder, tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process, begun, (out, waiting) = begun_run(amazon, encoder, tmp_path, ["out"], **pipes)
    try:
        wait_for_begun(process, lambda: out.exists() and begun.exists(), "one cell that is there and one that waits")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert "1 of 2 cells" in output and "the same command continues from here" in errors
    wait_for(lambda: not is_group(process.pid), "the end of the workers")
    # nobody writes there any more
    assert [path for path in (tmp_path / "r" / "cells").rglob("*") if path.is_file()] == [out] and not waiting.exists()
    assert json.loads(out.read_text())["variant"] == "out"


# ---------------------------------------------------------------------- the command


def command(*words):
    return CliRunner().invoke(main.app, ["reproduce", *map(str, words)])


def test_list_says_what_is_there_and_runs_nothing(ran, encoder):
    folder, found, _ = ran
    words = ["general", "--model", encoder, "--model-name", "tiny", "--results", folder, "--seeds", "0", "--targets", "kitchen"]
    words += ["--settings", "unsupervised", "--pools", "natural", "--variants", "out,cst", "--list"]
    told = command(*words, *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}")))
    assert told.exit_code == 0 and "1 of 2 cells are there" in told.output
    assert f"there   {found[0].address}" in told.output and "missing cells/amazon/tiny/unsupervised/natural/cst-" in told.output
    assert "0 of 2 cells" in command(*words).output, "rehearsals are no results"


def test_the_command_says_what_is_wrong(amazon, tmp_path):
    def refused(*words):
        told = command(*words)
        assert isinstance(told.exception, RequestError), told.output
        return str(told.exception)

    assert "mtem data prepare amazon" in refused("general")
    assert "there are general, ablation" in refused("table-1")
    assert "--seeds 0,x" in refused("general", "--seeds", "0,x")
    assert "unknown data set 'imdb'" in refused("general", "--dataset", "imdb")
    assert "nothing to run" in refused("batch-size", "--dataset", "pheme")
    assert "no such directory" in refused("general", "--data", amazon, "--model", tmp_path / "nothing", "--model-name", "x")


def test_a_failed_cell_makes_the_command_fail(amazon, encoder, tmp_path):
    broken = write_method(tmp_path, "broken", "raise ValueError('no such luck')")
    words = ["general", "--data", amazon, "--model", encoder, "--results", tmp_path / "r", "--seeds", "0", "--targets", "dvd"]
    words += ["--settings", "unsupervised", "--pools", "natural", "--variants", broken, "--device", "cpu", "-q"]
    told = command(*words, *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}")))
    assert told.exit_code == 1 and "1 failed" in told.output and "no such luck" in told.output
