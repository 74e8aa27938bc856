"""Figures of candidates by the labels of the domain, and the advice that is made from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import f1_score, log_loss

from mtem.errors import RequestError
from mtem.rehearsal.advice import Scored, analyse, estimate_errors, temperature
from mtem.rehearsal.figures import candidate_figures, check_metric
from mtem.rehearsal.trials import Trial, TrialOutputs
from mtem.selection.accuracy_estimate import estimate_accuracy
from mtem.selection.calibration import calibrate, log_softmax
from mtem.selection.rehearsed import Advice

CLASSES = ("bad", "good")
FOUND = {"frozen_layers": 1, "max_length": 64, "pretrain_epochs": 3.0}
RESOLVED = {"epochs": 2, "settings": {"mtem": FOUND, "fixmatch": FOUND}}


def outputs_of(
    right, domain="books", method="mtem", rate=1e-3, prior="none", rare="", seed=0, scale=2.0, count=100, infomax=None
):
    """A trial whose candidates classify these shares of `count` texts correctly."""
    draw = np.random.default_rng([seed, len(domain)])
    labels, held_out_labels = np.arange(count) % 2, np.arange(60) % 2

    def logits(labels, share):
        said = np.where(np.arange(len(labels)) < round(share * len(labels)), labels, 1 - labels)
        return (scale * draw.uniform(0.5, 1.5, (len(labels), 1)) * np.eye(2)[said]).astype(np.float32)

    return TrialOutputs(
        Trial(domain, method, rate, prior, rare), epochs=np.arange(len(right), dtype=float),
        infomax=np.full(len(right), 0.3) if infomax is None else np.array(infomax),
        logits=np.stack([logits(labels, share) for share in right]), labels=labels,
        held_out_logits=np.stack([logits(held_out_labels, 0.9) for _ in right]), held_out_labels=held_out_labels,
        assumed_shares=None if prior == "none" else np.array([0.5, 0.5]), seconds=1.0, machine="m",
    )  # fmt: skip


# ---------------------------------------------------------------------- figures


def test_figures_by_their_definitions():
    outputs = outputs_of([0.6, 0.81, 0.7])
    for metric in ("accuracy", "macro-f1", "f1:bad", "f1:good"):
        for number, found in enumerate(candidate_figures(outputs, metric, CLASSES)):
            logits, said = outputs.logits[number], outputs.logits[number].argmax(axis=1)
            probabilities = np.exp(log_softmax(logits))
            wanted = {
                "accuracy": (said == outputs.labels).mean(), "macro-f1": f1_score(outputs.labels, said, average="macro"),
                "f1:bad": f1_score(outputs.labels, said, pos_label=0), "f1:good": f1_score(outputs.labels, said),
            }  # fmt: skip
            assert found.score == pytest.approx(wanted[metric]) and found.accuracy == pytest.approx(wanted["accuracy"])
            assert found.log_loss == pytest.approx(log_loss(outputs.labels, probabilities), rel=1e-6)
            assert found.shares == pytest.approx([(said == 0).mean(), (said == 1).mean()])
            assert found.confidence == pytest.approx(probabilities.max(axis=1).mean())
            assert found.epoch == number and found.infomax == 0.3


@pytest.mark.parametrize("prior", ["none", "uniform"])
def test_estimates_are_those_of_a_run(prior):
    """Without the rehearsal's labels: of the source model by itself, of the others anchored at it."""
    outputs = outputs_of([0.6, 0.81, 0.7], prior=prior)
    found = [entry.estimate for entry in candidate_figures(outputs, "accuracy", CLASSES)]
    shares = outputs.assumed_shares
    first = estimate_accuracy(outputs.held_out_logits[0], outputs.held_out_labels, outputs.logits[0], target_shares=shares)
    assert found[0] == pytest.approx(first.accuracy)
    for number in (1, 2):
        wanted = estimate_accuracy(
            outputs.held_out_logits[number], outputs.held_out_labels, outputs.logits[number], target_shares=shares,
            anchor=(first, outputs.logits[0]),
        )  # fmt: skip
        assert found[number] == pytest.approx(wanted.accuracy)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_have_diverged_have_no_estimate_and_can_be_written(wrong):
    outputs = outputs_of([0.6, 0.8])
    outputs.logits[1, 3:60, 0] = wrong
    first, second = candidate_figures(outputs, "accuracy", CLASSES)
    assert first.estimate is not None and second.estimate is None
    assert json.loads(json.dumps(second.to_dict(), allow_nan=False))["estimate"] is None


def test_metrics_are_checked():
    for metric in ("accuracy", "macro-f1", "f1:bad", "f1:good"):
        check_metric(metric, CLASSES)
    for metric in ("f1:fair", "F1", ""):
        with pytest.raises(RequestError, match=r"expected accuracy, macro-f1 or the F1 of a class \(f1:bad, f1:good\)"):
            check_metric(metric, CLASSES)


# ---------------------------------------------------------------------- advice


def analysed(*outputs, metric="accuracy"):
    record, left_out = analyse(outputs, CLASSES, metric, RESOLVED)
    json.dumps(record, allow_nan=False)
    return record, left_out


def test_the_best_method_at_its_best_rate_is_recommended():
    record, left_out = analysed(
        outputs_of([0.6, 0.7, 0.7]), outputs_of([0.5, 0.6, 0.6], "dvd"),
        outputs_of([0.6, 0.75, 0.75], rate=2e-3), outputs_of([0.5, 0.65, 0.65], "dvd", rate=2e-3),
        outputs_of([0.6, 0.8, 0.8], method="fixmatch"), outputs_of([0.5, 0.7, 0.7], "dvd", "fixmatch"),
    )  # fmt: skip
    assert record["recommended"] == "fixmatch"
    assert (
        record["why"] == "fixmatch gained +0.200 (+0.200 to +0.200) in the mean of 2 rehearsed domains; next is mtem with +0.150"
    )
    assert list(record["advice"]) == ["mtem", "fixmatch", "source-only"]
    advice = Advice(**record["advice"]["mtem"])
    assert advice.settings == {
        "learning_rate": 2e-3, "target_class_prior": "none", "epochs": 2.0, "stop_epochs": 2.0, "evaluations": 2,
        "criterion": "last", **FOUND,
    }  # fmt: skip
    assert advice.gains == pytest.approx({"books": 0.15, "dvd": 0.15}) and advice.score == pytest.approx(0.7)
    source = Advice(**record["advice"]["source-only"])
    assert not source.adapt and source.score == pytest.approx(0.55) and source.settings == {
        "target_class_prior": "none", **FOUND,
    }  # fmt: skip
    assert source.errors_after == source.errors_before == Advice(**record["advice"]["fixmatch"]).errors_before
    assert source.temperature_after == source.temperature_before
    assert [entry.name for entry in left_out] == ["books", "dvd"] and [entry["name"] for entry in record["left_out"]] == [
        "books",
        "dvd",
    ]
    after = {(t["method"], t["learning_rate"], t["domain"]): t["after"] for t in record["trials"]}
    assert after["mtem", 1e-3, "books"] is None and after["mtem", 2e-3, "books"] == 0.75


def test_no_method_is_recommended_if_none_gains():
    record, _ = analysed(outputs_of([0.6, 0.5, 0.5]), outputs_of([0.6, 0.6, 0.6], "dvd"))
    assert record["recommended"] == "source-only" and not record["advice"]["mtem"]["adapt"]
    assert record["why"] == "no gain was larger than the noise from pass to pass in the mean of 2 rehearsed domains"
    record, _ = analysed(outputs_of([0.6, 0.5, 0.5]))
    assert record["why"].endswith("in the mean of 1 rehearsed domain")


def test_errors_and_temperatures_are_those_at_the_advised_pass():
    trials = [outputs_of([0.6, 0.7, 0.7], count=100), outputs_of([0.6, 0.9, 0.9], "dvd", count=300)]
    scored = [Scored(each, candidate_figures(each, "accuracy", CLASSES)) for each in trials]
    errors = estimate_errors(scored, 1.0)
    assert errors == {
        each.outputs.trial.domain: pytest.approx(each.figures[1].estimate - each.figures[1].accuracy, abs=1e-5) for each in scored
    }
    found = temperature(scored, 1.0)
    logits, labels = (np.concatenate(parts) for parts in zip(*((each.logits[1], each.labels) for each in trials), strict=True))
    weights = np.repeat([1 / 100, 1 / 300], [100, 300])
    assert found == pytest.approx(calibrate(logits, labels, weights), abs=1e-5)
    assert found != pytest.approx(calibrate(logits, labels), rel=1e-3), "every domain counts the same"


def test_rarer_classes_count_in_the_choice_and_in_what_was_seen_but_not_in_the_errors():
    plain = outputs_of([0.6, 0.7, 0.7])
    rare = outputs_of([0.7, 0.6, 0.6], rare="bad", seed=5)
    rare = TrialOutputs(**{**vars(rare), "logits": rare.logits - np.array([1.5, 0.0], dtype=np.float32)})
    record, left_out = analysed(plain, rare)
    advice = Advice(**record["advice"]["mtem"])
    whole = [Scored(plain, candidate_figures(plain, "accuracy", CLASSES))]
    assert advice.errors_before == estimate_errors(whole, 0.0) and len(left_out) == 1
    seen = [candidate_figures(each, "accuracy", CLASSES)[0].shares[0] for each in (plain, rare)]
    assert advice.shares[0][0] == pytest.approx(min(seen), abs=1e-4) and advice.shares[1][0] == pytest.approx(max(seen), abs=1e-4)
    assert min(seen) < max(seen) - 0.05


def test_left_out_logits_are_those_without_a_prior_if_there_are_such():
    corrected, plain = outputs_of([0.6, 0.7], prior="uniform", seed=1), outputs_of([0.6, 0.7], seed=2)
    for trials in ((corrected, plain), (plain, corrected)):
        (found,) = analysed(*trials)[1]
        assert np.array_equal(found.logits, plain.logits[0]) and np.array_equal(found.labels, plain.labels)
        assert np.array_equal(found.target_logits, found.logits) and len(found.held_out_labels) == 60
    (found,) = analysed(corrected)[1]
    assert np.array_equal(found.logits, corrected.logits[0])
