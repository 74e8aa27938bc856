"""Timings before a run: they change nothing of it, and the plan has the work that the run then does."""

from __future__ import annotations

import io
import json
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import mtem
from mtem import inference
from mtem.cli import console
from mtem.progress import Progress
from mtem.run import forecast, pipeline, probe
from mtem.run.forecast import LOWER, METHOD, SCORE, TRAIN
from mtem.selection import criteria, left_out
from mtem.training import checkpoints
from mtem.training.trainer import Trainer
from tests.bench import stopped_after
from tests.conftest import make_texts, write_jsonl
from tests.threads import make_threads, write_threads


class Shown(Progress):
    """Progress in a file, as where output is piped."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        super().__init__(Console(file=self.stream, force_terminal=False, width=200))


@pytest.fixture
def long(monkeypatch):
    """Every run counts as long, and timings may take as long as they like."""
    for owner in (forecast, probe):
        monkeypatch.setattr(owner, "LONG", 0.0)
    monkeypatch.setattr(probe, "SECONDS", 1e9)
    monkeypatch.setattr(probe, "SHARE", 1e9)


@pytest.fixture
def forecasts(monkeypatch):
    """The forecasts that runs make; none of them may leave a random generator in another state."""
    made = []

    def make(run, *arguments):
        before = checkpoints.random_state(run.generator)
        made.append(probe.make_forecast(run, *arguments))
        after = checkpoints.random_state(run.generator)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return made[-1]

    monkeypatch.setattr(pipeline, "make_forecast", make)
    return made


def everything(path):
    """The final weights, the source model's, and the history without its times."""
    lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    weights = load_file(path / "model" / "model.safetensors") | {
        f"source {name}": value for name, value in load_file(path / "checkpoints" / "source.safetensors").items()
    }
    return weights, [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same(one, other):
    (weights, history), (other_weights, other_history) = everything(one), everything(other)
    assert weights.keys() == other_weights.keys() and history == other_history
    for name, value in weights.items():
        assert torch.equal(value, other_weights[name]), name


REQUESTS = {
    "mtem": {},
    "mtem, frozen": {"frozen_layers": 1},
    "mtem, outer": {"outer_share": 0.3, "frozen_layers": 1},
    "mtem, prior": {"target_class_prior": "estimated"},
    "dann": {"method": "dann"},
    "fixmatch": {"method": "fixmatch"},
    "cst": {"method": "cst", "frozen_layers": 2},
    "source-only": {"method": "source-only"},
    "wind": {"method": "wind", "target_labeled": 24, "frozen_layers": 1},
    "bigcn": {"model": "bigcn", "features": "tfidf", "hidden": 8, "source_learning_rate": 2e-2},
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_timings_change_nothing_of_the_run(tiny, tmp_path, long, forecasts, request_):
    given = {**tiny, **request_, "log_every": 1}
    if given["model"] == "bigcn":
        given["source"] = [str(write_threads(tmp_path / f"{seed}.jsonl", make_threads(60, seed, 0.3))) for seed in (1, 2)]
        given["target"] = str(write_threads(tmp_path / "target.jsonl", make_threads(80, 3, 0.7), labeled=False))
    if "target_labeled" in given:
        given["target_labeled"] = str(write_jsonl(tmp_path / "few.jsonl", make_texts(given["target_labeled"], 9, 0.7)))
    plain = mtem.adapt(**given, output=tmp_path / "plain")
    assert forecasts == [] and plain.record["forecast"] is None, "a quiet run has no forecast"
    timed = mtem.adapt(**given, output=tmp_path / "timed", progress=Shown())
    kinds = {TRAIN, SCORE} | ({METHOD} if request_.get("method") != "source-only" else set())
    assert set(forecasts[0].samples) == kinds | ({LOWER} if given["frozen_layers"] else set())
    assert_same(tmp_path / "plain", tmp_path / "timed")
    pd.testing.assert_frame_equal(plain.indexes, timed.indexes)


@pytest.mark.parametrize("texts", [10, 1000])
def test_the_plan_has_the_work_of_the_run(tiny, tmp_path, long, forecasts, monkeypatch, texts):
    """Every planned stage with a bar is met, in the order of the plan, and as many tokens are scored as planned."""
    monkeypatch.setattr(left_out, "FEWEST", 5)
    monkeypatch.setattr(criteria, "choose", lambda scores: len(scores) - 1)  # not the source model
    scored = Counter()
    compute = inference.compute_logits

    def counted(model, encoded, rows=None, **named):
        if forecasts:
            lengths = np.asarray(encoded.lengths)
            scored["tokens"] += int((lengths if rows is None else lengths[rows]).sum())
        return compute(model, encoded, rows, **named)

    monkeypatch.setattr(inference, "compute_logits", counted)
    given = {**tiny, "frozen_layers": 1, "target_class_prior": "estimated", "validation_share": 0.4, "evaluation_texts": texts}
    progress = Shown()
    adapted = mtem.adapt(**given, output=tmp_path / "run", progress=progress)
    (made,) = forecasts
    planned = Counter()
    for stage in made.stages:
        planned.update(stage.tokens(0))
    assert adapted.record["left_out"], "without them the plan would be simpler"
    assert {kind: made.measured[kind].tokens for kind in (LOWER, TRAIN, METHOD)} == {
        kind: planned[kind] for kind in (LOWER, TRAIN, METHOD)
    }
    assert scored["tokens"] == planned[SCORE]
    assert made.left() == 0 and progress.outlook is None


def test_the_record_has_the_first_forecast_and_what_came_of_it(tiny, tmp_path, long):
    progress = Shown()
    adapted = mtem.adapt(**tiny, output=tmp_path / "run", progress=progress)
    record = json.loads((tmp_path / "run" / "run.json").read_text())["forecast"]
    assert record == adapted.record["forecast"] and set(record) == {"after_seconds", "seconds", "measured_seconds"}
    assert 0 <= record["after_seconds"] <= min(record["seconds"], record["measured_seconds"])


def test_the_command_says_it_in_one_line(tiny, tmp_path, long, capsys, monkeypatch):
    monkeypatch.setattr(left_out, "FEWEST", 5)
    with console.logged_progress() as progress:
        mtem.adapt(**tiny, output=tmp_path / "run", progress=progress)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("about")]
    time = r"\d+ s"
    parts = ", ".join(f"{name} {time}" for name in ("source training", "adaptation", "left-out models", "prediction"))
    assert len(lines) == 1 and re.fullmatch(f"about {time} in all: {parts}", lines[0]), lines


def test_a_short_run_is_not_timed(tiny, tmp_path, forecasts, monkeypatch):
    names = []
    start = Trainer.__init__
    monkeypatch.setattr(
        Trainer, "__init__", lambda self, *given, name, **named: names.append(name) or start(self, *given, name=name, **named)
    )
    progress = Shown()
    adapted = mtem.adapt(**tiny, output=tmp_path / "run", progress=progress)
    assert forecasts == [None] and adapted.record["forecast"] is None
    assert "timing" not in names and "about" not in progress.stream.getvalue()


def test_what_fails_in_the_timings_does_not_stop_the_run(tiny, tmp_path, long, forecasts, monkeypatch):
    def fail(self):
        torch.rand(5)
        raise ValueError("only here")

    mtem.adapt(**tiny, output=tmp_path / "plain")
    monkeypatch.setattr(probe.Probe, "measure", fail)
    mtem.adapt(**tiny, output=tmp_path / "run", progress=Shown())
    assert forecasts == [None]
    assert_same(tmp_path / "plain", tmp_path / "run")


@pytest.mark.parametrize("where", [("source", 3), ("adapt", 5)])
def test_a_resumed_run_is_timed_too(tiny, tmp_path, long, forecasts, where):
    stage, stop = where
    given = {**tiny, "checkpoint_seconds": 0.0, "frozen_layers": 1}
    mtem.adapt(**given, output=tmp_path / "whole")
    with stopped_after(stop, stage):
        mtem.adapt(**given, output=tmp_path / "cut")
    mtem.adapt(**given, output=tmp_path / "cut", resume=True, progress=Shown())
    (made,) = forecasts
    begun = {stage.name: stage.first for stage in made.stages if stage.kind in (LOWER, TRAIN, METHOD)}
    assert made.resumed and not any(name.startswith("frozen") for name in begun)
    assert begun.get("source") == (None if stage == "adapt" else stop)
    assert begun["adapt"] == (stop if stage == "adapt" else 0)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_slow_models_are_timed_on_fewer_texts(tiny, tmp_path, long, forecasts, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    mtem.adapt(**tiny, progress=Shown())
    monkeypatch.setattr(probe, "SECONDS", 1e9)
    mtem.adapt(**tiny, progress=Shown())
    few, many = (made.samples[METHOD].tokens for made in forecasts)
    assert few < 0.7 * many
