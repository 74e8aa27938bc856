"""Rehearsals against the truth, from made-up records: what is chosen for a target, and what its test set says of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mtem.errors import RequestError
from mtem.rehearsal.choice import Configuration, Curve
from mtem_paper import protocol, rehearsal_tables, rehearsals, rehearsed_settings
from mtem_paper.protocol import DATASETS

TARGETS = DATASETS["amazon"].targets
PASSES = 3


def record(
    target, domain, method, scores, *, factor=2.5, seed=0, prior="none", rare="", dataset="amazon", model="minilm", error=0.0
):
    rate = rehearsals.RATES[dataset] * factor
    candidates = [
        {
            "epoch": float(number), "score": score, "accuracy": score, "log_loss": 0.3, "calibration_error": 0.1, "infomax": 0.4,
            "estimate": score + error, "shares": [0.5, 0.5], "confidence": 0.8,
        }
        for number, score in enumerate(scores)
    ]  # fmt: skip
    return {
        "dataset": dataset, "model": model, "target": target, "seed": seed, "final": domain == target, "factor": factor,
        "trial": {"domain": domain, "method": method, "learning_rate": rate, "prior": prior, "rare": rare},
        "metric": "accuracy", "classes": ["negative", "positive"], "assumed_shares": None, "candidates": candidates,
        "seconds": 1.0, "machine": "a machine", "settings": {"epochs": float(PASSES)}, "overrides": {},
        "protocol": 4,
    }  # fmt: skip


def save(results, *records):
    for made in records:
        trial = made["trial"]
        folder = results / "rehearsals" / made["dataset"] / made["model"] / made["target"]
        folder.mkdir(parents=True, exist_ok=True)
        name = "final" if made["final"] else trial["domain"]
        parts = (name, trial["method"], f"{made['factor']:g}", trial["prior"], trial["rare"], str(made["seed"]))
        (folder / f"{'-'.join(part for part in parts if part)}.json").write_text(json.dumps(made))


def whole(method, rehearsed, final, **changes):
    """The trials of all targets with the same scores everywhere, and the finals."""
    for target in TARGETS:
        yield from (record(target, domain, method, rehearsed, **changes) for domain in TARGETS if domain != target)
        yield record(target, target, method, final, **changes)


@pytest.fixture
def results(tmp_path):
    save(tmp_path, *whole("mtem", [0.80, 0.83, 0.84, 0.84], [0.81, 0.83, 0.86, 0.85], error=0.02))
    save(tmp_path, *whole("mtem", [0.80, 0.80, 0.81, 0.81], [0.81, 0.82, 0.82, 0.82], factor=1.0))
    save(tmp_path, *whole("dann", [0.80, 0.70, 0.90, 0.79], [0.81, 0.70, 0.90, 0.60]))
    return tmp_path


def test_what_was_chosen_is_looked_up_in_the_final(results):
    records = list(rehearsals.read(results))
    found = rehearsal_tables.cases(records, "amazon")
    assert {case.method for case in found} == {"mtem", "dann"} and len(found) == 2 * len(TARGETS)
    mtem = next(case for case in found if case.method == "mtem")
    assert mtem.choice.configuration.learning_rate == pytest.approx(5e-5) and mtem.choice.epoch == 3 and mtem.wanted
    assert mtem.scores == pytest.approx({"before": 0.81, "chosen": 0.85, "last": 0.85, "infomax": 0.81, "best": 0.86})
    dann = next(case for case in found if case.method == "dann")
    assert dann.choice.epoch == 0 and dann.scores["chosen"] == 0.81, "its gain is less than its noise"
    table = rehearsal_tables.stopping(records)
    assert "| Amazon | DANN | 4 | .8100 | .8100 | .6000 |" in table
    assert "|  | MTEM | 4 | .8100 | .8500 | .8500 | .8100 | .8600 | +.040 | +.040 | +.040 |" in table
    assert "books MTEM, dvd MTEM" in rehearsal_tables.automatic(records)


def test_a_rate_without_a_final_is_told(results):
    for path in (results / "rehearsals").rglob("final-mtem-2.5*.json"):
        path.unlink()
    assert "4 (4 at another rate)" in rehearsal_tables.stopping(list(rehearsals.read(results)))


def test_seeds_count_where_all_targets_have_them(results):
    save(results, record("books", "books", "mtem", [0.1, 0.1, 0.1, 0.1], seed=1))
    assert {case.seed for case in rehearsal_tables.cases(list(rehearsals.read(results)), "amazon")} == {0}


def test_estimates_beside_the_truth(results):
    found = [case for case in rehearsal_tables.cases(list(rehearsals.read(results)), "amazon") if case.method == "mtem"]
    free, better, truth = found[0].estimate(3.0)
    assert (free, truth) == pytest.approx((0.87, 0.85)) and better.accuracy == pytest.approx((0.87 + 0.84) / 2)
    assert better.low < truth < better.high and better.left_out == 3
    table = rehearsal_tables.estimates(list(rehearsals.read(results)))
    assert "| Amazon | source model | 8 |" in table and "100 %" in table


def test_nothing_was_rehearsed(tmp_path):
    for make in (rehearsal_tables.stopping, rehearsal_tables.automatic, rehearsal_tables.estimates, rehearsal_tables.shares):
        assert make([]) == "Not run.\n"
    assert rehearsal_tables.calibration(tmp_path) == "Not run.\n"


def test_tables_show_the_default_model_of_a_data_set(results):
    before = rehearsals.of_default_models(rehearsals.read(results))
    save(results, *whole("mtem", [0.1] * 4, [0.1] * 4, model="another"))
    assert rehearsals.of_default_models(rehearsals.read(results)) == before and before
    assert len(rehearsals.read(results)) > len(before)


def test_trials_choose_for_rows_that_assume_what_they_did(tmp_path):
    """Whether class shares are assumed is a row's, however much better the others did."""
    events = [name for name in DATASETS["pheme"].domains if name != "ferguson"]

    def trials(prior, scores, rare=""):
        return [
            record("ferguson", name, "mtem", scores, prior=prior, rare=rare, dataset="pheme", model="bigcn") for name in events
        ]

    save(tmp_path, *trials("uniform", [0.5, 0.6, 0.6, 0.6]), *trials("none", [0.55, 0.4, 0.4, 0.4]))
    chosen = rehearsed_settings.choices(tmp_path, "pheme", "bigcn")
    assumed, plain = (chosen["ferguson", "mtem", uncorrected] for uncorrected in (False, True))
    assert (assumed["target_class_prior"], assumed["stop_epochs"] > 0) == ("uniform", True)
    assert (plain["target_class_prior"], plain["stop_epochs"]) == ("none", 0.0)
    save(tmp_path, *trials("uniform", [0.3, 0.3, 0.3, 0.3], rare="rumour"), *trials("none", [0.9, 0.9, 0.9, 0.9], rare="rumour"))
    chosen = rehearsed_settings.choices(tmp_path, "pheme", "bigcn")
    assert chosen["ferguson", "mtem", False]["target_class_prior"] == "uniform"
    assert "rarer" in rehearsal_tables.shares(list(rehearsals.read(tmp_path)))


def test_a_rarer_class_is_compared_only_if_every_prior_has_it():
    def curve(prior, rare=""):
        return Curve(Configuration("mtem", 1e-3, prior), "kitchen", rare, np.arange(2), np.zeros(2), np.zeros(2), 2)

    both = [curve("none"), curve("none", "good"), curve("uniform")]
    assert [(entry.configuration.prior, entry.rare) for entry in rehearsed_settings.complete(both, 1)] == [
        ("none", ""), ("uniform", ""),
    ]  # fmt: skip
    assert len(rehearsed_settings.complete([*both, curve("uniform", "good")], 1)) == 4


def test_configurations_that_were_not_tried_on_all_sources_do_not_count(results):
    for path in (results / "rehearsals" / "amazon" / "minilm" / "books").glob("dvd-mtem-2.5*.json"):
        path.unlink()
    chosen = rehearsed_settings.choices(results, "amazon", "minilm")
    assert chosen["books", "mtem", False]["learning_rate"] == pytest.approx(2e-5)
    assert chosen["dvd", "mtem", False]["learning_rate"] == pytest.approx(5e-5)


def test_trials_under_earlier_rules_choose_nothing_and_are_read_while_there_are_more_of_them(tmp_path):
    earlier = [
        {name: value for name, value in made.items() if name != "protocol"}
        for made in whole("mtem", [0.80, 0.83, 0.84, 0.84], [0.81, 0.83, 0.86, 0.85])
    ]
    save(tmp_path, *earlier)
    assert not rehearsed_settings.choices(tmp_path, "amazon", "minilm")
    save(tmp_path, *list(whole("fixmatch", [0.7, 0.8, 0.8, 0.8], [0.7, 0.8, 0.8, 0.8]))[:-1])
    assert {trial.trial.method for trial in rehearsals.read(tmp_path)} == {"mtem"}
    assert {method for _, method, _ in rehearsed_settings.choices(tmp_path, "amazon", "minilm")} == {"fixmatch"}
    save(tmp_path, *whole("fixmatch", [0.7, 0.8, 0.8, 0.8], [0.7, 0.8, 0.8, 0.8]))
    assert {trial.trial.method for trial in rehearsals.read(tmp_path)} == {"fixmatch"}


# ---------------------------------------------------------------------- cells with rehearsed settings


def planned(results, **restricted):
    rehearsed = rehearsed_settings.choices(results, "amazon", "minilm")
    return protocol.plan(["general"], "amazon", "minilm", "minilm", seeds=[0], rehearsed=rehearsed, **restricted)


def test_cells_have_the_settings_of_their_rehearsals(results):
    cell = planned(results, variants=["mtem"], targets=["books"])[0]
    wanted = {"learning_rate": 5e-5, "epochs": 3.0, "stop_epochs": 3.0, "criterion": "last", "target_class_prior": "none"}
    assert wanted.items() <= cell.given.items() and cell.factors == (1.0,) and cell.protocol == 5
    searched = protocol.plan(["general"], "amazon", "minilm", "minilm", seeds=[0], variants=["mtem"], targets=["books"])[0]
    assert searched.protocol == 5 and searched.address != cell.address
    save(results, *whole("mtem", [0.80, 0.80, 0.85, 0.85], [0.81] * 4, factor=1.0))
    other = planned(results, variants=["mtem"], targets=["books"])[0]
    assert other.given["learning_rate"] == pytest.approx(2e-5) and other.address != cell.address


def test_a_model_without_rehearsals_has_those_of_the_model_that_the_plan_names(results):
    assert protocol.DATASETS["amazon"].share("mpnet").rehearsed_with == "minilm"
    lent = rehearsed_settings.choices(results, "amazon", "minilm")
    assert lent and rehearsed_settings.choices(results, "amazon", "mpnet") == lent
    assert rehearsed_settings.choices(results, "amazon", "another") == {}
    own = [{**made, "model": "mpnet"} for made in whole("mtem", [0.80, 0.80, 0.85, 0.85], [0.81] * 4, factor=1.0)]
    save(results, *own)
    mixed = rehearsed_settings.choices(results, "amazon", "mpnet")
    assert mixed["books", "mtem", False]["learning_rate"] == pytest.approx(2e-5)
    assert {key: value for key, value in mixed.items() if key[1] != "mtem"} == {k: v for k, v in lent.items() if k[1] != "mtem"}


def test_labeled_target_texts_show_the_shares_that_rehearsals_had_to_assume():
    def prior(setting, rehearsed, variant="mtem"):
        found = dict.fromkeys(("learning_rate", "epochs", "stop_epochs", "evaluations", "criterion"), 1) | {
            "target_class_prior": rehearsed
        }
        choices = {("ferguson", "mtem", uncorrected): found for uncorrected in (False, True)}
        options = {"settings_": [setting], "variants": [variant], "targets": ["ferguson"], "seeds": [0]}
        return protocol.plan(["general"], "pheme", "bigcn", "bigcn", rehearsed=choices, **options)[0].given["target_class_prior"]

    assert prior("unsupervised", "uniform") == "uniform" and prior("semi-supervised", "uniform") == "auto"
    assert prior("semi-supervised", "none") == "none" == prior("semi-supervised", "uniform", "mtem-as-is")


def test_what_cannot_be_rehearsed_has_the_settings_of_mtem(results):
    wind = planned(results, variants=["wind"], targets=["books"])[0]
    assert wind.method == "wind" and wind.given["learning_rate"] == 5e-5 and wind.protocol == 4
    paper = planned(results, variants=["mtem-paper"], targets=["books"])[0]
    assert "learning_rate" not in paper.given and paper.factors == (1.0,) and paper.protocol == 4
    out = planned(results, variants=["out"], targets=["books"])[0]
    assert out.protocol == 4 and out.given == protocol.plan(["general"], "amazon", "minilm", "minilm", variants=["out"])[0].given


def test_without_a_rehearsal_a_cell_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no rehearsal on its sources; first run 'mtem reproduce rehearsal --dataset amazon"):
        planned(tmp_path, variants=["mtem"], targets=["books"])


def test_confidence_is_measured_with_each_temperature():
    logits = np.array([[4.0, 0.0]] * 8 + [[0.0, 4.0]] * 2)
    labels = np.zeros(10, dtype=int)
    sure, calmer = (rehearsal_tables._confidence(logits, labels, temperature) for temperature in (1.0, 2.885))
    assert sure["calibration_error"] == pytest.approx(0.182, abs=1e-3) and calmer["calibration_error"] < 0.01
    assert calmer["log_loss"] < sure["log_loss"]


def test_cases_without_their_outputs_keep_what_was_measured(results):
    path = results / "rehearsals" / "calibration.json"
    (results / "rehearsal-outputs").mkdir()
    assert rehearsal_tables.measure_calibration(results, results / "rehearsal-outputs") == 0, "outputs are not committed"
    known = {"dataset": "amazon", "target": "dvd", "method": "mtem", "seed": 0, "after": {"log_loss": 0.5}}
    path.write_text(json.dumps([known, {**known, "target": "gone"}]))
    assert rehearsal_tables.measure_calibration(results, results / "rehearsal-outputs") == 1
    assert json.loads(path.read_text()) == [known]
