"""Runs that use a rehearsal: where each choice comes from, what is not done again, when a run stops or must not adapt."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.errors import RequestError
from mtem.run.candidates import DIVERGED
from mtem.run.pipeline import Run
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.rehearsed import Rehearsal, correct_estimate
from mtem.training.weights import clone, current
from tests.conftest import make_texts, write_jsonl
from tests.rehearsed import GOOD_RATE, write_method

CHOSEN = ("learning_rate", "epochs", "stop_epochs", "target_class_prior", "criterion", "frozen_layers")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(write_jsonl(tmp_path_factory.mktemp("target") / "kitchen.jsonl", make_texts(120, 30, 0.6), labeled=False))


def request_of(rehearsed):
    """The settings that a run shares with its rehearsal."""
    return {name: value for name, value in rehearsed["request"].items() if name != "epochs"}


@pytest.fixture(scope="module")
def used(rehearsed, target, tmp_path_factory):
    """A run with the method that the rehearsal recommends."""
    output = tmp_path_factory.mktemp("used") / "run"
    trained, left_out_model = [], Run.left_out_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "left_out_model", lambda run, part: trained.append(part.name) or left_out_model(run, part))
        adapted = mtem.adapt(
            target=target, **request_of(rehearsed), method="auto", rehearsal=rehearsed["path"], output=output
        )  # fmt: skip
    return adapted, trained


# ---------------------------------------------------------------------- what is used


def test_choices_come_from_the_rehearsal_unless_given(used, rehearsed):
    record = json.loads(Path(used[0].path, "run.json").read_text())
    advice = rehearsed["rehearsal"].advice(rehearsed["rehearsal"].method)
    assert record["method"] == advice.method == rehearsed["compared"]["method"][0]
    origins = {"method": "rehearsal", **dict.fromkeys(CHOSEN, "rehearsal"), "frozen_layers": "given", "max_length": "given"}
    assert origins.items() <= record["choices"].items()
    assert {name: record["settings"][name] for name in advice.settings} == advice.settings
    assert record["settings"]["learning_rate"] == GOOD_RATE and record["selection"]["criterion"] == "last"
    assert record["steps"]["adapt"] == advice.settings["stop_epochs"] * 12
    about = record["rehearsal"]
    assert about["path"] == str(rehearsed["path"]) and about["same_texts"] is True
    assert about["domains"] == ["books", "dvd", "toys"] and about["recommended"] == advice.method and "gained" in about["why"]


def test_what_is_given_beats_the_rehearsal(rehearsed, target, caplog):
    given = {"learning_rate": 1e-3, "stop_epochs": 1.0, "target_class_prior": "uniform", "method": rehearsed["rehearsal"].method}
    with caplog.at_level(logging.WARNING, logger="mtem"):
        record = mtem.adapt(target=target, **request_of(rehearsed), **given, rehearsal=rehearsed["rehearsal"]).record
    assert "not as rehearsed: learning_rate, target_class_prior, stop_epochs; the estimate and the temperature" in caplog.text
    assert record["temperature"]["from"] != "rehearsal" and "rehearsed accuracy" not in record["estimate"]["after"]["method"]
    assert {name: record["choices"][name] for name in ("method", *CHOSEN)} == {
        "method": "given", "learning_rate": "given", "epochs": "rehearsal", "stop_epochs": "given",
        "target_class_prior": "given", "criterion": "rehearsal", "frozen_layers": "given",
    }  # fmt: skip
    assert {name: record["settings"][name] for name in ("learning_rate", "stop_epochs", "target_class_prior")} == {
        name: given[name] for name in ("learning_rate", "stop_epochs", "target_class_prior")
    }
    assert record["steps"]["adapt"] == 12 and record["target_class_prior"]["kind"] == "uniform"


def test_settings_of_the_trials_are_those_of_the_run(rehearsed, target):
    """What was rehearsed with 16 tokens is run with 16 tokens, unless something else is given."""
    request = {name: value for name, value in request_of(rehearsed).items() if name not in ("max_length", "batch_size")}
    record = mtem.adapt(target=target, **request, method="auto", rehearsal=rehearsed["path"]).record
    for name in ("max_length", "batch_size"):
        assert record["settings"][name] == rehearsed["rehearsal"].record["settings"][name] != 256
        assert record["choices"][name] == "rehearsal"
    assert record["temperature"]["from"] == "rehearsal"


def test_without_a_rehearsal_the_defaults_hold(tiny):
    record = mtem.adapt(**{**tiny, "steps": 1, "left_out_models": 0}).record
    assert record["rehearsal"] is None and record["choices"]["criterion"] == "default" == record["choices"]["stop_epochs"]
    assert record["choices"]["method"] == record["choices"]["learning_rate"] == "given"
    paper = mtem.run.adapt.find_origins(tiny["model"], "mtem", "paper", {}, {})
    assert paper["learning_rate"] == paper["frozen_layers"] == "preset paper" and paper["epochs"] == "default"


def test_left_out_models_are_not_trained_again(used, rehearsed):
    adapted, trained = used
    assert trained == [] and adapted.record["left_out"] == rehearsed["rehearsal"].record["left_out"]
    assert [entry.name for entry in adapted.left_out()] == ["books", "dvd", "toys"]


def test_the_temperature_comes_from_the_rehearsal(used, rehearsed):
    advice = rehearsed["rehearsal"].advice(rehearsed["rehearsal"].method)
    adapted = used[0]
    assert not adapted.record["selection"]["kept_source_model"]
    assert adapted.record["temperature"] == {"value": advice.temperature_after, "from": "rehearsal"}
    assert advice.temperature_after != advice.temperature_before
    assert (
        "fitted on source domains that stood for the target in a rehearsal"
        in Path(adapted.path, "model", "README.md").read_text()
    )


def test_the_estimate_is_corrected(rehearsed, target, used, monkeypatch):
    seen, estimate = [], Run.estimate
    monkeypatch.setattr(Run, "estimate", lambda run, *given: seen.append(estimate(run, *given)) or seen[-1])
    record = mtem.adapt(target=target, **request_of(rehearsed), method="auto", rehearsal=rehearsed["path"]).record
    advice = rehearsed["rehearsal"].advice(rehearsed["rehearsal"].method)
    assert record["estimate"] == used[0].record["estimate"]
    for name, raw in (("before", seen[0]), ("after", seen[-1])):
        known, errors = (vars(advice)[f"{what}_{name}"] for what in ("accuracy", "errors"))
        assert list(known) == list(errors) == ["books", "dvd", "toys"]
        wanted, found = correct_estimate(raw, known, errors), record["estimate"][name]
        assert {**found, "notes": tuple(found["notes"])} == vars(wanted) and found["method"].endswith("the rehearsed accuracy")
    assert any(isinstance(each, Estimate) and each.accuracy != record["estimate"]["after"]["accuracy"] for each in seen)


def test_a_rehearsal_of_other_texts_warns(rehearsed, target, tmp_path, caplog, monkeypatch):
    trained = []
    monkeypatch.setattr(Run, "train_left_out_models", lambda run: trained.append(list(run.left_out)))
    source = [*rehearsed["request"]["source"][:2], str(write_jsonl(tmp_path / "toys.jsonl", make_texts(110, 55)))]
    with caplog.at_level(logging.WARNING, logger="mtem"):
        given = {**request_of(rehearsed), "source": source, "stop_epochs": 0.1}
        adapted = mtem.adapt(target=target, **given, method="auto", rehearsal=rehearsed["path"])
    assert f"{rehearsed['path']}: was rehearsed with other source texts" in caplog.text
    assert adapted.record["rehearsal"]["same_texts"] is False and trained == [[]], "its logits belong to other texts"
    assert adapted.record["settings"]["learning_rate"] == GOOD_RATE


@pytest.mark.parametrize(("seen", "warned"), [([0.0, 1.0], 0), ([2.0, 3.0], 2)])
def test_a_target_unlike_the_rehearsed_domains_warns(rehearsed, target, seen, warned):
    """Shares and confidences are in all that was seen, or in none."""
    record = json.loads(json.dumps(rehearsed["rehearsal"].record))
    for advice in record["advice"].values():
        advice["shares"], advice["confidence"] = [[seen[0]] * 2, [seen[1]] * 2], seen
        advice["settings"] |= {"stop_epochs": 0.1} if "stop_epochs" in advice["settings"] else {}
    changed = Rehearsal(record, rehearsed["rehearsal"].left_out())
    adapted = mtem.adapt(target=target, **request_of(rehearsed), method="auto", rehearsal=changed)
    lines = [line for line in adapted.record["warnings"] if line.startswith("not rehearsed")]
    assert len(lines) == warned and adapted.record["rehearsal"]["path"] is None


def test_labeled_target_texts_are_better_evidence(rehearsed, target, tmp_path):
    few = str(write_jsonl(tmp_path / "few.jsonl", make_texts(40, 32, 0.6)))
    record = mtem.adapt(
        target=target, target_labeled=few, **request_of(rehearsed), method="auto", rehearsal=rehearsed["path"], stop_epochs=0.1,
        left_out_models=2,
    ).record  # fmt: skip
    assert record["estimate"]["after"]["method"] == "labeled target texts, cross-fitted"
    assert {entry["kind"] for entry in record["left_out"]} == {"fold"}


# ---------------------------------------------------------------------- when it must not adapt


def test_auto_ships_the_source_model_if_nothing_is_better(worse, target, tmp_path):
    adapted = mtem.adapt(target=target, **request_of(worse), method="auto", rehearsal=worse["path"], output=tmp_path / "run")
    record = adapted.record
    assert record["method"] == "source-only" and record["choices"]["method"] == "rehearsal"
    assert record["selection"]["kept_source_model"] and record["steps"]["adapt"] == 0
    advice = worse["rehearsal"].advice("source-only")
    assert record["temperature"] == {"value": advice.temperature_before, "from": "rehearsal"}
    assert len(record["left_out"]) == 2 and record["estimate"]["before"] == record["estimate"]["after"]
    source, shipped = (
        load_file(tmp_path / "run/checkpoints/source.safetensors"),
        load_file(tmp_path / "run/model/model.safetensors"),
    )
    body = {name: value for name, value in source.items() if "classifier" not in name}
    assert body and all(torch.equal(value, shipped[name.removeprefix("network.")]) for name, value in body.items())


def test_settings_of_a_method_that_is_not_recommended_are_left_out(worse, target):
    record = json.loads(json.dumps(worse["rehearsal"].record))
    record["advice"]["fixmatch"] = record["advice"][worse["method"]]
    given = {"target": target, **request_of(worse), "rehearsal": Rehearsal(record, worse["rehearsal"].left_out())}
    adapted = mtem.adapt(**given, method="auto", weak="dropout")
    assert adapted.record["method"] == "source-only" and "weak" not in adapted.record["settings"]
    for changes, name in (
        ({"method": "auto", "index_initial": 2.0}, "index_initial"),
        ({"method": "mtem", "weak": "plain"}, "weak"),
    ):
        with pytest.raises(RequestError, match=f"unknown setting '{name}'"):
            mtem.adapt(**given, **changes)


def test_a_method_that_is_named_all_the_same_keeps_the_source_model_and_warns(worse, target, caplog):
    given = {"target": target, **request_of(worse), "method": worse["method"], "rehearsal": worse["path"]}
    with caplog.at_level(logging.WARNING, logger="mtem"):
        adapted = mtem.adapt(**given)
    assert f"the rehearsal advises against adapting with {worse['method']}" in caplog.text
    assert adapted.record["selection"]["kept_source_model"] and adapted.record["steps"]["adapt"] == 0
    assert adapted.record["method"] == worse["method"] and adapted.record["choices"]["stop_epochs"] == "rehearsal"
    forced = mtem.adapt(**given, stop_epochs=0.2)
    assert forced.record["steps"]["adapt"] > 0, "as the warning says"


def test_a_method_that_was_not_rehearsed_warns(rehearsed, target, caplog):
    with caplog.at_level(logging.WARNING, logger="mtem"):
        adapted = mtem.adapt(target=target, **request_of(rehearsed), method="fixmatch", rehearsal=rehearsed["path"], steps=1)
    assert f"the rehearsal did not try fixmatch (it tried {rehearsed['rehearsal'].method}); its defaults are used" in caplog.text
    assert adapted.record["choices"]["learning_rate"] == "default" and adapted.record["temperature"]["from"] != "rehearsal"
    assert len(adapted.record["left_out"]) == 3, "the source models are of use all the same"


def test_refusals(rehearsed, target, tmp_path, encoder):
    with pytest.raises(RequestError, match="--method auto: needs a rehearsal"):
        mtem.adapt(target=target, **request_of(rehearsed), method="auto")
    given = {"target": target, **request_of(rehearsed), "rehearsal": rehearsed["path"], "output": tmp_path / "run"}
    with pytest.raises(RequestError, match="holds no rehearsal"):
        mtem.adapt(**{**given, "rehearsal": tmp_path / "nowhere"})
    other = [(text, "fair" if number == 0 else label) for number, (text, label) in enumerate(make_texts(60, 1) * 2)]
    with pytest.raises(RequestError, match=r"classes was .* there and is .* here"):
        mtem.adapt(**{**given, "source": str(write_jsonl(tmp_path / "fair.jsonl", [*other, ("word1", "fair")]))})
    link = tmp_path / "other-name"
    link.symlink_to(encoder)
    with pytest.raises(RequestError, match=r"model was .* there and is .* here"):
        mtem.adapt(**{**given, "model": str(link)})
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- when a run stops


def candidates_of(given):
    """The weights of every candidate, by step."""
    found = {}

    def keep(line, model):
        if line["stage"] == "evaluation":
            found[line["step"]] = clone(current(model))

    return found, mtem.adapt(**given, observe=keep)


@pytest.mark.parametrize("method", ["mtem", "fixmatch"])
def test_a_run_that_stops_has_the_weights_of_the_whole_run_at_that_pass(tiny, tmp_path, method):
    given = {
        **tiny,
        "epochs": 3,
        "method": method,
        "left_out_models": 0,
        "criterion": "last",
        "batch_size": 16,
        "source_epochs": 1,
    }
    whole, all_of_it = candidates_of(given)
    stopped, run = candidates_of({**given, "stop_epochs": 2, "output": tmp_path / "run"})
    assert sorted(whole) == [0, 5, 10, 15] and sorted(stopped) == [0, 5, 10]
    for step, weights in stopped.items():
        assert all(torch.equal(value, whole[step][name]) for name, value in weights.items()), step
    moved = [name for name, value in stopped[10].items() if not torch.equal(value, stopped[5][name])]
    assert moved and run.record["steps"]["adapt"] == 10 and all_of_it.record["steps"]["adapt"] == 15
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()
             if '"stage": "adapt"' in line]  # fmt: skip
    assert rates[-1] > 0.2 * max(rates), "on the schedule of all epochs, not at its end"
    shorter, _ = candidates_of({**given, "epochs": 2})
    assert not all(torch.equal(value, shorter[10][name]) for name, value in stopped[10].items())


def test_a_stop_beyond_the_end_changes_nothing_and_a_stop_at_once_keeps_the_source_model(tiny):
    given = {**tiny, "left_out_models": 0, "method": "fixmatch", "source_epochs": 1}
    assert mtem.adapt(**given, stop_epochs=9).record["steps"]["adapt"] == 8
    record = mtem.adapt(**given, stop_epochs=0).record
    assert record["steps"]["adapt"] == 0 and record["selection"]["kept_source_model"]
    assert not any("source model is kept" in line for line in record["warnings"])


def test_the_last_weights_are_kept_unless_they_have_collapsed(tiny, tmp_path):
    given = {**tiny, "source_epochs": 6, "left_out_models": 0, "criterion": "last", "evaluations": 4, "epochs": 2}
    steady = mtem.adapt(**{**given, "learning_rate": 1e-6}, method=write_method(tmp_path, "further")).record["selection"]
    assert [entry["step"] for entry in steady["candidates"]] == [0, 4, 8, 12, 16] and steady["chosen_step"] == 16
    assert [entry["score"] for entry in steady["candidates"]] == [0, 4, 8, 12, 16]
    adapted = mtem.adapt(**{**given, "learning_rate": 5e-3}, method=write_method(tmp_path, "collapsing"), output=tmp_path / "run")
    choice = adapted.record["selection"]
    assert [entry["score"] for entry in choice["candidates"]] == [0, 4, 8, DIVERGED, DIVERGED], choice["candidates"]
    assert choice["candidates"][4]["infomax"] < choice["candidates"][0]["infomax"] - 0.1
    assert choice["chosen_step"] == 8 and adapted.indexes["prediction"].nunique() == 2
    assert np.mean(adapted.indexes["prediction"] == "bad") < 0.9
