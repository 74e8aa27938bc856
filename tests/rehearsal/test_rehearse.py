"""Whole rehearsals: what is recommended, kill and resume, processes, one domain, methods with their own head."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import mtem
from mtem.cli import main
from mtem.errors import RequestError
from mtem.models import frozen
from mtem.rehearsal import rehearse as module
from mtem.rehearsal.trials import SourceTask, Trial, Work
from tests.conftest import make_texts, write_jsonl
from tests.processes import wait_for_begun
from tests.rehearsed import GOOD_RATE, RUINOUS_RATE, SMALL, read, stripped, trial_arrays, write_domains
from tests.tolerance import assert_near

QUICK = {**SMALL, "epochs": 1, "source_epochs": 0.5}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Files of which only `toys` is large enough to stand for the target: one source model, one trial for each configuration."""
    return write_domains(tmp_path_factory.mktemp("single"), books=98, dvd=98, toys=110)


def same_arrays(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[trial][name], other[trial][name]) for trial in one for name in one[trial]
    )


# ---------------------------------------------------------------------- what is recommended


def test_the_sensible_learning_rate_is_preferred_to_the_ruinous_one(rehearsed):
    found, (method,) = rehearsed["rehearsal"], rehearsed["compared"]["method"]
    assert rehearsed["compared"]["learning_rates"][0] == RUINOUS_RATE, "it is not preferred for being the first"
    advice = found.advice(method)
    assert found.method == method and advice.adapt and advice.settings["learning_rate"] == GOOD_RATE
    assert advice.mean > 0.1 and set(advice.gains) == {"books", "dvd", "toys"} and advice.low < advice.mean < advice.high
    assert found.why.startswith(f"{method} gained {advice.mean:+.3f} ({advice.low:+.3f} to {advice.high:+.3f})")
    for trial in found.record["trials"]:
        if trial["learning_rate"] == RUINOUS_RATE:
            assert trial["last"] == pytest.approx(0.5, abs=0.05) and trial["after"] is None
        else:
            after = {entry["epoch"]: entry["score"] for entry in trial["candidates"]}[advice.settings["stop_epochs"]]
            assert trial["after"] == after and trial["best"] >= after
            assert advice.gains[trial["domain"]] == pytest.approx(after - trial["before"], abs=1e-5)


def test_the_advice_has_all_that_a_run_needs(rehearsed):
    advice = rehearsed["rehearsal"].advice(rehearsed["compared"]["method"][0])
    assert set(advice.settings) == {
        "learning_rate", "target_class_prior", "epochs", "stop_epochs", "evaluations", "criterion", "frozen_layers", "max_length",
        "pretrain_epochs", "view_radius",
    }  # fmt: skip
    assert advice.settings["epochs"] == 2.0 and advice.settings["evaluations"] == 2 and advice.settings["criterion"] == "last"
    assert advice.settings["frozen_layers"] == 0 and advice.settings["stop_epochs"] in (1.0, 2.0)
    assert advice.settings["max_length"] == 16 and advice.settings["pretrain_epochs"] == 0.0
    assert advice.settings["view_radius"] == 0.0


def test_a_rehearsal_refuses_to_adapt_with_a_method_that_makes_models_worse(worse):
    found = worse["rehearsal"]
    assert found.method == "source-only"
    assert found.why == "no gain was larger than the noise from pass to pass in the mean of 2 rehearsed domains"
    advice = found.advice(worse["method"])
    assert not advice.adapt and advice.settings["stop_epochs"] == 0 and set(advice.gains.values()) == {0.0}
    for trial in found.record["trials"]:
        assert trial["before"] > 0.7 and trial["last"] < trial["before"] - 0.1


def test_what_is_left_behind(rehearsed):
    path = rehearsed["path"]
    assert {entry.name for entry in path.iterdir()} == {"rehearsal.json", "left-out.safetensors", "trials"}
    assert len(trial_arrays(path)) == 6 and read(path) == rehearsed["rehearsal"].record


def test_nothing_is_written_without_an_output(single, encoder, tmp_path, monkeypatch, rehearsed):
    monkeypatch.chdir(tmp_path)
    found = mtem.rehearse(single, model=str(encoder), method=rehearsed["compared"]["method"], learning_rates=[1e-3], **QUICK)
    assert not list(tmp_path.iterdir()) and found.path is None and found.record["rehearsed"] == ["toys"]
    assert found.record["notes"][-1].startswith("source models that have hardly learned: toys (0.")
    assert found.record["notes"][-2] == "only toys could stand for the target: one domain is weak evidence"
    advice = found.advice(found.methods[0])
    assert advice.low is None and advice.high is None and len(found.left_out()) == 1


# ---------------------------------------------------------------------- kill, interrupt, resume

# The command line, but for one thing: in some trial it says so and waits to be stopped.
WAITS = """
import sys, time
from pathlib import Path
from mtem.cli import main
from mtem.rehearsal.trials import Work

run_trial, begun = Work.run_trial, []

def waiting(self, *given, **named):
    begun.append(given)
    if len(begun) == {last}:
        Path({sign!r}).touch()
        time.sleep(3600)
    return run_trial(self, *given, **named)

Work.run_trial = waiting
main.main()
"""


def words_of(rehearsed, output):
    words = ["rehearse", "--output", str(output), "--jobs", "1", "--method", *rehearsed["compared"]["method"]]
    words += ["--learning-rates", ",".join(map(str, rehearsed["compared"]["learning_rates"]))]
    for name, value in rehearsed["request"].items():
        if name == "source":
            words += [word for path in value for word in ("--source", path)]
        else:
            words += ["--model", value] if name == "model" else ["--set", f"{name}={value}"]
    return words


def kill_in_trial(words, last, folder):
    """Run the command until it has begun that trial, and kill it."""
    sign = folder / "waiting"
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(last=last, sign=str(sign)), *words], stdout=subprocess.DEVNULL,
        stderr=(folder / "errors").open("wb"), env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        wait_for_begun(process, sign.exists, "the trial")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, (folder / "errors").read_text()


def test_a_killed_and_an_interrupted_rehearsal_resume_to_the_same_figures(rehearsed, tmp_path, monkeypatch, capsys):
    output = tmp_path / "cut"
    words = words_of(rehearsed, output)
    kill_in_trial(words, 3, tmp_path)
    assert read(output)["status"] == "running" and len(trial_arrays(output)) == 2

    ran, interrupt = [], []
    for name in ("run_trial", "train_source"):
        original = getattr(Work, name)

        def watched(self, task, *more, original=original):
            ran.append(task)
            if len(ran) in interrupt:
                raise KeyboardInterrupt
            return original(self, task, *more)

        monkeypatch.setattr(Work, name, watched)

    interrupt.append(2)
    monkeypatch.setattr(sys, "argv", ["mtem", *words, "--resume"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    errors = capsys.readouterr().err
    assert stopped.value.code == 130 and "Traceback" not in errors
    assert errors.splitlines()[-1] == "mtem: interrupted; the same command with --resume continues"
    assert read(output)["status"] == "running" and len(trial_arrays(output)) == 3

    ran.clear()
    interrupt.clear()
    resumed = mtem.rehearse(**rehearsed["request"], **rehearsed["compared"], output=output, resume=True)
    assert len(ran) == 3 and all(isinstance(task, Trial) for task in ran), "no source model, and no finished trial again"
    assert stripped(resumed.record) == stripped(rehearsed["rehearsal"].record) and resumed.record == read(output)
    assert same_arrays(trial_arrays(output), trial_arrays(rehearsed["path"]))
    assert {entry.name for entry in output.iterdir()} == {"rehearsal.json", "left-out.safetensors", "trials"}
    ran.clear()
    again = mtem.rehearse(**rehearsed["request"], **rehearsed["compared"], output=output, resume=True)
    assert not ran and again.record == resumed.record


@pytest.fixture
def unfinished(rehearsed, tmp_path):
    path = shutil.copytree(rehearsed["path"], tmp_path / "unfinished")
    (path / "rehearsal.json").write_text(json.dumps({**read(path), "status": "running"}))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mtem"}, "cannot resume, methods was"),
        ({"learning_rates": [1e-3]}, r"cannot resume, learning_rates was \[3.0, 0.003\] and is now \[0.001\]"),
        ({"metric": "macro-f1"}, "cannot resume, metric was accuracy and is now macro-f1"),
        ({"epochs": 3}, "cannot resume, epochs was 2 and is now 3"),
        ({"batch_size": 11}, "cannot resume, settings was"),
        ({"class_priors": ["uniform"]}, "cannot resume, class_priors was None"),
    ],
)
@pytest.mark.parametrize("status", ["running", "done"])
def test_another_request_is_not_resumed(rehearsed, unfinished, changes, words, status):
    path = unfinished if status == "running" else rehearsed["path"]
    before = read(path)
    with pytest.raises(RequestError, match=words):
        mtem.rehearse(**{**rehearsed["request"], **rehearsed["compared"], **changes}, output=path, resume=True)
    assert read(path) == before


def test_other_data_are_not_resumed(rehearsed, unfinished, tmp_path):
    source = [*rehearsed["request"]["source"][:2], str(write_jsonl(tmp_path / "toys.jsonl", make_texts(110, 77)))]
    with pytest.raises(RequestError, match="cannot resume, the source data have changed since"):
        mtem.rehearse(**{**rehearsed["request"], **rehearsed["compared"], "source": source}, output=unfinished, resume=True)


def test_another_rehearsal_is_never_overwritten(rehearsed, tmp_path, caplog):
    given = {**rehearsed["request"], **rehearsed["compared"]}
    with pytest.raises(RequestError, match="holds another rehearsal; give another --output, or --resume"):
        mtem.rehearse(**given, output=rehearsed["path"])
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(RequestError, match="is not empty and holds no rehearsal"):
        mtem.rehearse(**given, output=tmp_path)
    with pytest.raises(RequestError, match="is a file; --output expects a folder"):
        mtem.rehearse(**given, output=tmp_path / "thesis.doc")
    with caplog.at_level(logging.WARNING, logger="mtem"):
        assert not module.is_finished(tmp_path / "new", True, {})
    assert "nothing to resume" in caplog.text


# ---------------------------------------------------------------------- processes, frozen layers


def test_several_processes_give_the_same_figures(single, encoder, rehearsed, tmp_path):
    given = {"model": str(encoder), **rehearsed["compared"], **QUICK}
    one = mtem.rehearse(single, **given, output=tmp_path / "one")
    two = mtem.rehearse(single, **given, output=tmp_path / "two", jobs=2)
    assert stripped(one.record) == stripped(two.record) and two.record["jobs"] == 2
    arrays = trial_arrays(tmp_path / "one")
    assert len(arrays) == 2 and same_arrays(arrays, trial_arrays(tmp_path / "two"))


def test_the_frozen_layers_run_once_and_change_nothing(single, encoder, rehearsed, tmp_path, monkeypatch):
    given = {"model": str(encoder), **rehearsed["compared"], **QUICK, "frozen_layers": 2, "learning_rates": [1e-3]}
    written, write = [], frozen._write
    monkeypatch.setattr(frozen, "_write", lambda path, tokens, *more: written.append(len(tokens)) or write(path, tokens, *more))
    found = mtem.rehearse(single, **given, output=tmp_path / "stored")
    assert written == [306], "all texts, once"
    assert found.advice(found.methods[0]).settings["frozen_layers"] == 2
    assert not list((tmp_path / "stored").glob("frozen*"))
    monkeypatch.setattr(module, "store_frozen", lambda *_: None)
    mtem.rehearse(single, **given, output=tmp_path / "without")
    assert len(written) > 3
    (stored,), (without,) = (trial_arrays(tmp_path / name).values() for name in ("stored", "without"))
    for name in ("logits", "held_out_logits", "infomax"):
        assert_near(stored[name], without[name], 1000, dtype=torch.float32, size=10.0)
    assert np.abs(stored["logits"]).max() > 0.01
    assert np.array_equal(stored["labels"], without["labels"])


# ---------------------------------------------------------------------- one domain, own heads, priors


def test_one_domain_is_rehearsed_by_clusters(encoder, tmp_path, monkeypatch, caplog, rehearsed):
    path = write_jsonl(tmp_path / "all.jsonl", make_texts(220, 1) + make_texts(220, 2, 1.0))
    features, seen = module.text_features, []

    def watched(*given):
        seen.append(features(*given))
        directions = np.repeat(np.eye(2, seen[0].shape[1]), 220, axis=0)  # the tiny encoder, which is random, has no clusters
        return directions + 0.01 * seen[0] / np.abs(seen[0]).max()

    monkeypatch.setattr(module, "text_features", watched)
    with caplog.at_level(logging.WARNING, logger="mtem"):
        found = mtem.rehearse(
            path, model=str(encoder), method=rehearsed["compared"]["method"], learning_rates=[1e-3], **QUICK
        )  # fmt: skip
    assert seen[0].shape == (440, 32) and np.isfinite(seen[0]).all()
    assert found.record["kind"] == "clusters" and found.record["rehearsed"] == ["cluster 1", "cluster 2"]
    assert [entry["texts"] for entry in found.record["domains"].values()] == [220, 220]
    assert "weaker evidence" in found.record["notes"][0] and "weaker evidence" in caplog.text


def test_a_method_with_a_head_of_its_own_trains_its_own_source_model(single, encoder, rehearsed, tmp_path, monkeypatch):
    trained, train = [], Work.train_source
    monkeypatch.setattr(Work, "train_source", lambda self, task, report: trained.append(task) or train(self, task, report))
    methods = [*rehearsed["compared"]["method"], "mme", "fixmatch"]
    found = mtem.rehearse(single, model=str(encoder), method=methods, learning_rates=[1e-3], output=tmp_path / "out", **QUICK)
    assert trained == [SourceTask("toys", "source-only"), SourceTask("toys", "mme")]
    assert found.methods == methods
    arrays = trial_arrays(tmp_path / "out")
    names = {method: f"trials/2-1-passes/{Trial('toys', method, 1e-3).name}.safetensors" for method in methods}
    logits = {method: arrays[name]["logits"][0] for method, name in names.items()}
    assert np.array_equal(logits[methods[0]], logits["fixmatch"]), "they share their source model"
    assert not np.allclose(logits["mme"], logits["fixmatch"], atol=1e-3)


def test_priors_are_compared_with_rarer_classes(single, encoder, rehearsed, tmp_path):
    found = mtem.rehearse(
        single, model=str(encoder), method=rehearsed["compared"]["method"], learning_rates=[1e-3], metric="f1:bad",
        class_priors=["uniform", "none"], output=tmp_path / "out", **QUICK,
    )  # fmt: skip
    trials = found.record["trials"]
    assert {(trial["prior"], trial["rare"], trial["texts"]) for trial in trials} == {
        (prior, rare, 110 if not rare else 73) for prior in ("uniform", "none") for rare in ("", "bad", "good")
    }
    for trial in trials:
        shares = trial["candidates"][0]["shares"]
        if trial["prior"] == "uniform":
            assert shares[0] == pytest.approx(0.5, abs=0.15), "the assumed shares"
    assert found.advice(found.methods[0]).settings["target_class_prior"] in ("uniform", "none")
    (left_out,) = found.left_out()
    plain = trial_arrays(tmp_path / "out")
    name = Trial("toys", found.methods[0], 1e-3, "none").name
    assert np.array_equal(left_out.logits, plain[f"trials/2-1-passes/{name}.safetensors"]["logits"][0]), "not corrected"


# ---------------------------------------------------------------------- requests


def test_too_few_texts_leave_nothing_behind(encoder, tmp_path):
    source = write_domains(tmp_path, books=140, dvd=140)
    with pytest.raises(RequestError, match="a rehearsal needs at least 300 labeled texts, got 280"):
        mtem.rehearse(source, model=str(encoder), output=tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metric", ["auc", "f1", "f1:fair"])
def test_an_unknown_metric_is_refused(rehearsed, tmp_path, metric):
    with pytest.raises(RequestError, match=rf"--metric {metric}: expected accuracy, macro-f1 .*\(f1:bad, f1:good\)"):
        mtem.rehearse(**rehearsed["request"], metric=metric, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
