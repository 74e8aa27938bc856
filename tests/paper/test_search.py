"""One cell at tiny size: what it may see, what it records."""

from __future__ import annotations

import dataclasses

import numpy as np

from mtem import adapt
from mtem_paper import pretrained as paper_pretrained
from mtem_paper import protocol, runner, search
from tests.paper.tiny import TINY, planned, results_of


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
        assert rates == [5e-5 * factor for factor in ((1,) if result["variant"] == "out" else (1, 2.5))]
        assert ("history" in result) == (result["variant"] == "mtem")
        assert result["classes"] == ["negative", "positive"] and result["selected_by"] == "infomax" and not result["oracle"]
        assert result["overrides"] and result["machine"] and result["versions"]["torch"] and result["settings"]["steps"] == 2
        assert result["settings"]["calibrate"] is False, "labels are scored, as the weights were trained"


def test_theta_1_and_the_test_set_are_shared(ran):
    found = {(each["setting"], each["variant"]): each for each in results_of(*ran[:2]).values()}
    assert len({each["test"]["fingerprint"] for each in found.values()}) == 1
    out, mtem = found["unsupervised", "out"], found["unsupervised", "mtem"]
    assert out["score"] == mtem["source_score"] == out["source_score"]
    shares = {name: found["semi-supervised", name]["settings"]["target_labeled_share"] for name in ("out", "mtem")}
    assert shares == {"out": 0.5, "mtem": 0.1}, "methods begin from a source model that saw the labels as often as they do"


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
        assumed = "uniform" if result["setting"] == "unsupervised" else "auto"
        assert result["settings"]["target_class_prior"] == ("none" if result["variant"] == "out-as-is" else assumed)


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


def test_theta_1_is_there_for_who_comes_later(ran, amazon, encoder, monkeypatch):
    folder, found, _ = ran
    kept = list((folder / runner.SOURCE_MODELS).glob("*/*/*/*/*"))
    assert len(kept) == 3 and all((place / "run.json").is_file() for place in kept), "with labels, In+Out has its own"
    begun = []
    monkeypatch.setattr(search, "adapt", lambda *given, **options: begun.append(options["method"]) or adapt(*given, **options))
    later = planned(encoder, ["dann"])
    assert runner.run(later, folder, data=amazon, model=str(encoder), device="cpu").done == 1
    assert begun == ["dann", "dann"], "the search, and no training of the source model"
    scores = results_of(folder, [found[0], *later]).values()
    assert len({each["source_score"] for each in scores}) == 1
    (folder / later[0].address).unlink()


def test_a_calibrated_model_begins_from_the_same_theta_1_and_scores_the_same(ran, amazon, encoder, monkeypatch):
    folder, found, _ = ran
    begun = []
    monkeypatch.setattr(search, "adapt", lambda *given, **options: begun.append(options) or adapt(*given, **options))
    later = planned(encoder, ["mtem"], overrides={**TINY, "calibrate": True})
    assert runner.run(later, folder, data=amazon, model=str(encoder), device="cpu").done == 1
    assert [(options["method"], options["calibrate"]) for options in begun] == [("mtem", True)] * 2, "no training of theta_1"
    (calibrated,) = results_of(folder, later).values()
    same = {"variant": "mtem", "setting": "unsupervised"}.items()
    plain = next(result for result in results_of(folder, found).values() if same <= result.items())
    for name in ("score", "predictions", "source_score", "target_selected", "estimate"):
        assert calibrated[name] == plain[name], name
    (folder / later[0].address).unlink()


def test_a_variant_without_pretraining_has_its_own_theta_1(amazon, encoder, tmp_path, monkeypatch):
    about = protocol.DATASETS["amazon"]
    share = protocol.Share(given={"pretrain_epochs": 1.0})
    monkeypatch.setitem(protocol.DATASETS, "amazon", dataclasses.replace(about, planned={**about.planned, "tiny": share}))
    pretrained, trained = [], []

    def watched(*given, **options):
        adapted = adapt(*given, **options)
        if "source_model" not in options:
            pretrained.append((options["method"], adapted.record["pretrained"] is not None))
            assert adapted.record["steps"]["pretrain"] == 0, "all share one encoder"
        return adapted

    original = paper_pretrained.pretrain_model
    monkeypatch.setattr(search, "adapt", watched)
    monkeypatch.setattr(paper_pretrained, "pretrain_model", lambda *given: trained.append(1) or original(*given))
    found = planned(encoder, ["out", "out-without-pretraining", "fixmatch", "mme", "oracle"])
    assert not runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu").failed
    source, halves = ("source-only", True), [("source-only", True)] * 2
    assert pretrained == [source, ("source-only", False), ("mme", True), *halves] and len(trained) == 1
    scores = {each["variant"]: each for each in results_of(tmp_path, found).values()}
    assert scores["fixmatch"]["source_score"] == scores["out"]["score"]
    assert scores["out"]["settings"]["pretrain_epochs"] == 1.0 == scores["fixmatch"]["settings"]["pretrain_epochs"]
    assert scores["out-without-pretraining"]["settings"]["pretrain_epochs"] == 0.0
    encoders = tmp_path / runner.SOURCE_MODELS / paper_pretrained.FOLDER
    assert len(list(encoders.glob("*/*/*/*.safetensors"))) == 1
    assert len([path for path in (tmp_path / runner.SOURCE_MODELS).glob("*/*/*/*/*") if encoders not in path.parents]) == 2
