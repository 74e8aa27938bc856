"""The temperature of the final model: where it comes from, what it changes, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem import inference
from mtem.run.pipeline import Run
from mtem.selection import criteria
from mtem.selection.calibration import log_softmax
from mtem.selection.criteria import CandidateOutputs
from mtem.training.settings import TrainingSettings
from tests.bench import stopped_after
from tests.threads import make_threads, write_threads
from tests.tolerance import assert_near

SMALL = {
    "max_length": 16, "batch_size": 10, "source_epochs": 3, "epochs": 1, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
    "evaluations": 2, "left_out_models": 0, "validation_share": 0.3,
}  # fmt: skip


class Pair(NamedTuple):
    """The same request with and without calibration, and what the temperature was chosen from."""

    given: dict[str, Any]
    on: mtem.Adapted
    off: mtem.Adapted
    run: Run
    outputs: CandidateOutputs

    @property
    def temperature(self) -> float:
        return self.on.record["temperature"]["value"]


def weights(adapted: mtem.Adapted, name: str = "model/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(Path(adapted.path, name))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", params=["mtem", "source-only", "mme", "bigcn"])
def pair(request, tmp_path_factory, encoder, reviews):
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "bigcn":
        source = [str(write_threads(place / f"{seed}.jsonl", make_threads(60, seed, 0.3))) for seed in (1, 2)]
        target = str(write_threads(place / "target.jsonl", make_threads(80, 3, 0.7), labeled=False))
        given = {
            **SMALL,
            "source": source,
            "target": target,
            "model": "bigcn",
            "features": "tfidf",
            "hidden": 8,
            "source_learning_rate": 2e-2,
        }
    else:
        given = {**SMALL, "source": [str(reviews["books"]), str(reviews["dvd"])], "target": str(reviews["kitchen"])}
        given |= {"model": encoder, "method": request.param, "frozen_layers": 1}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteria, "choose", lambda scores: len(scores) - 1)  # not the source model
        choose = Run.choose_temperature
        patch.setattr(Run, "choose_temperature", lambda run, outputs: seen.append((run, outputs)) or choose(run, outputs))
        on = mtem.adapt(**given, output=place / "on")
        off = mtem.adapt(**given, output=place / "off", calibrate=False)
    return Pair(given, on, off, *seen[0])


def test_only_the_head_changes(pair):
    unit = "threads" if pair.given["model"] == "bigcn" else "texts"
    assert pair.on.record["temperature"]["from"] == f"held-out source {unit}" and abs(pair.temperature - 1) > 0.02
    assert pair.off.record["temperature"] == {"value": 1.0, "from": "calibrate=false"}
    on, off = weights(pair.on), weights(pair.off)
    head = pair.on.model.head_path.removeprefix("network.") + "."
    assert [name for name in on if name.startswith(head)]
    for name, value in on.items():
        assert_near(value, off[name] / (pair.temperature if name.startswith(head) else 1.0), 2, msg=name)


def test_labels_shares_estimates_and_the_choice_stay(pair):
    assert list(pair.on.indexes["prediction"]) == list(pair.off.indexes["prediction"])
    for name in ("class_shares", "estimate", "selection", "target_class_prior", "warnings", "left_out"):
        assert pair.on.record[name] == pair.off.record[name], name
    source = "checkpoints/source.safetensors"
    assert same(weights(pair.on, source), weights(pair.off, source))


def test_the_table_has_the_confidence_of_the_shipped_model(pair):
    run, rows = pair.run, np.arange(len(pair.run.inputs.target))
    tokens = run.inputs.target_stream.tokens
    for adapted, temperature in ((pair.on, pair.temperature), (pair.off, 1.0)):
        wanted = inference.probabilities(inference.compute_logits(pair.off.model, tokens, rows).logits / temperature)
        assert_near(adapted.indexes["confidence"].to_numpy(), wanted.max(axis=1), dtype=torch.float32, size=20.0)
    assert not np.allclose(pair.on.indexes["confidence"], pair.off.indexes["confidence"], atol=1e-3)


def test_the_saved_model_has_the_temperature(pair):
    loaded = mtem.load(pair.on.path)
    examples = make_threads(20, 9) if pair.given["model"] == "bigcn" else ["good1 word1", "bad2 word3", "word7", ""]
    wanted = pair.on.predict_proba(examples)
    assert_near(loaded.predict_proba(examples), wanted, dtype=torch.float32, size=20.0)
    assert_near(wanted, np.exp(log_softmax(np.log(pair.off.predict_proba(examples)), pair.temperature)), dtype=torch.float32,
                size=20.0)  # fmt: skip
    before = inference.predict_texts(loaded.source_model(), examples)
    assert_near(before, inference.predict_texts(mtem.load(pair.off.path).source_model(), examples), dtype=torch.float32)


def test_held_out_texts_are_fitted_better(pair):
    """By the loss that is minimised: labels are smoothed, and weighted as if their classes had the assumed shares."""
    run, outputs = pair.run, pair.outputs
    rows = run.inputs.held_out_rows
    assert len(rows) == 36 and (outputs.source_weights is not None) == (pair.given["model"] == "bigcn")

    def loss(logits):
        smoothed = np.full(logits.shape, 1 / 37 / 2) + (1 - 1 / 37) * np.eye(2)[outputs.source_labels]
        return np.average(-(smoothed * log_softmax(logits)).sum(axis=1), weights=outputs.source_weights)

    shipped, trained = (
        inference.compute_logits(adapted.model, run.inputs.source_stream.tokens, rows).logits for adapted in (pair.on, pair.off)
    )
    assert_near(outputs.source_logits, trained, dtype=torch.float32, size=20.0, msg="chosen from the corrected outputs")
    assert loss(shipped) < loss(trained)
    for factor in (0.97, 1.03):
        assert loss(shipped) < loss(shipped * factor)


def test_the_model_card_names_the_temperature(pair):
    card, plain = (Path(adapted.path, "model", "README.md").read_text() for adapted in (pair.on, pair.off))
    origin = pair.on.record["temperature"]["from"]
    assert f"Confidences were scaled by a temperature of {pair.temperature:.3g}, fitted on {origin}" in card
    assert "Confidences were not scaled by a temperature (calibrate=false)." in plain


def test_a_record_of_an_older_run_has_no_temperature(pair):
    from mtem.run.model_card import model_card

    record = {name: value for name, value in pair.on.record.items() if name != "temperature"}
    assert "emperature" not in model_card(record, type(pair.on.model))


@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_a_run_from_its_source_model_starts_from_unscaled_weights(tiny, tmp_path, kept):
    tiny |= {"validation_share": 0.3, "left_out_models": 0}
    whole = mtem.adapt(**tiny, output=tmp_path / "whole")
    assert whole.record["temperature"]["value"] != 1
    source_model = whole if kept == "in memory" else tmp_path / "whole"
    begun = mtem.adapt(**tiny, output=tmp_path / "begun", source_model=source_model)
    source = "checkpoints/source.safetensors"
    assert same(weights(whole, source), weights(begun, source)) and same(weights(whole), weights(begun))
    assert begun.record["temperature"] == whole.record["temperature"]


@pytest.mark.parametrize("where", [("source", 3), ("adapt", 5)])
def test_a_resumed_run_has_the_same_temperature(tiny, tmp_path, where):
    stage, stop = where
    tiny |= {"validation_share": 0.3, "left_out_models": 0, "checkpoint_seconds": 0.0}
    whole = mtem.adapt(**tiny, output=tmp_path / "whole")
    with stopped_after(stop, stage):
        mtem.adapt(**tiny, output=tmp_path / "cut")
    resumed = mtem.adapt(**tiny, output=tmp_path / "cut", resume=True)
    assert resumed.record["temperature"] == whole.record["temperature"] and whole.record["temperature"]["value"] != 1
    assert same(weights(whole), weights(resumed))


def test_a_run_killed_after_the_scaling_does_not_scale_twice(tiny, tmp_path, monkeypatch):
    tiny |= {"validation_share": 0.3, "left_out_models": 0}
    whole = mtem.adapt(**tiny, output=tmp_path / "whole")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mtem.run.pipeline.index_table", killed)
        with pytest.raises(KeyboardInterrupt):
            mtem.adapt(**tiny, output=tmp_path / "cut")
    assert same(weights(whole), weights(mtem.adapt(**tiny, output=tmp_path / "cut", resume=True)))


def test_too_few_held_out_texts_leave_the_head_as_trained(tiny, tmp_path):
    adapted = mtem.adapt(**tiny, output=tmp_path / "on")
    assert adapted.record["texts"]["source_held_out"] == 12
    assert json.loads((tmp_path / "on" / "run.json").read_text())["temperature"] == {
        "value": 1.0, "from": "only 12 source texts were held out",
    }  # fmt: skip
    assert same(weights(adapted), weights(mtem.adapt(**tiny, output=tmp_path / "off", calibrate=False)))


# ---------------------------------------------------------------------- the choice alone


def outputs_of(count, *, source_weights=None, logits=None):
    """A model that is sure of itself everywhere (logits of 12 and 0) and right on three texts of four."""
    labels = np.arange(count) // 4 % 2
    said = np.where(np.arange(count) % 4 == 0, 1 - labels, labels)
    logits = 12.0 * np.eye(2)[said] if logits is None else logits
    return CandidateOutputs(logits, labels, logits, logits, logits, source_weights=source_weights)


def choose(outputs, unit="texts", **settings):
    run = SimpleNamespace(advice=None, settings=TrainingSettings(**settings), inputs=SimpleNamespace(unit=unit))
    return Run.choose_temperature(run, outputs)


def test_a_model_that_is_too_sure_gets_a_temperature_above_one():
    outputs = outputs_of(400)
    temperature, origin = choose(outputs)
    assert origin == "held-out source texts"
    assert temperature == pytest.approx(12 / np.log(3), rel=0.02), "so that its confidence is three in four"
    rows = np.arange(400)
    losses = [-log_softmax(outputs.source_logits, each)[rows, outputs.source_labels].mean() for each in (temperature, 1.0)]
    assert losses[0] < losses[1] / 4


def test_texts_count_by_their_weights():
    right = np.arange(400) % 4 != 0
    heavier = choose(outputs_of(400, source_weights=np.where(right, 1.2, 0.4)))[0]
    assert heavier < choose(outputs_of(400))[0], "of a model that is right nine times in ten"
    assert heavier == pytest.approx(12 / np.log(9), rel=0.05)


@pytest.mark.parametrize(("count", "fitted"), [(19, False), (20, True)])
def test_from_twenty_texts_on(count, fitted):
    temperature, origin = choose(outputs_of(count), unit="threads")
    assert (temperature > 1) == fitted
    assert origin == ("held-out source threads" if fitted else "only 19 source threads were held out")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_outputs_that_are_not_finite(wrong):
    logits = np.full((40, 2), 1.0)
    logits[7, 1] = wrong
    assert choose(outputs_of(40, logits=logits)) == (1.0, "the model's outputs are not finite")


def test_the_setting_turns_it_off():
    assert choose(outputs_of(400), calibrate=False) == (1.0, "calibrate=false")
