"""Defaults that depend on the device and on the model, and what runs make of them."""

from __future__ import annotations

import json

import pytest
import torch

import mtem
from mtem import methods, settings
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem.run import defaults, pipeline, probe
from mtem.run.adapt import find_settings
from mtem.training.pretraining import MaskedWords
from mtem.training.settings import TrainingSettings
from tests.bench import stopped_after
from tests.devices import Encoder, Threads

NAMES = ("max_length", "epochs", "pretrain_epochs", "learning_rate", "view_radius")
CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def resolved(model, preset="recommended", *, given=None, **options):
    training = settings.build({"training": TrainingSettings}, given or {})["training"]
    found = defaults.resolve(training, model, preset, **options)
    length = defaults.resolve_length(training, type(model), model.device, preset).max_length
    assert length == found.max_length
    return tuple(getattr(found, name) for name in NAMES)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Encoder(CPU), (256, 2.0, 0.0, 2e-5, 0.0)),
        (Encoder(CPU, frozen_layers=4), (256, 2.0, 0.0, 2e-4, 0.0)),
        (Encoder(CUDA), (512, 12.0, 24.0, 5e-5, 0.005)),
        (Encoder(MPS), (512, 12.0, 24.0, 5e-5, 0.005)),
        (Encoder(CUDA, hidden_width=511), (512, 12.0, 24.0, 5e-5, 0.005)),
        (Encoder(CUDA, hidden_width=512), (512, 12.0, 0.0, 5e-5, 0.005)),
        (Encoder(CUDA, frozen_layers=4), (512, 12.0, 0.0, 2e-4, 0.0)),
        (Encoder(CUDA, obstacle="no mask token"), (512, 12.0, 0.0, 5e-5, 0.005)),
        (Threads(CPU, obstacle="no encoder"), (256, 24.0, 0.0, 5e-4, 0.2)),
        (Threads(CUDA, obstacle="no encoder"), (256, 24.0, 0.0, 5e-4, 0.2)),
    ],
)
def test_defaults_of_devices_and_models(model, expected):
    assert resolved(model) == expected
    if not model.threads:
        rate = 2e-4 if model.frozen_layers else 2e-5
        assert resolved(model, "paper") == (256, 2.0, 0.0, rate, 0.0), "as before there were defaults of a GPU"
    given = {"max_length": 33, "epochs": 0.5, "pretrain_epochs": 0.0, "learning_rate": 0.0, "view_radius": 0.5}
    assert resolved(model, given=given) == (33, 0.5, 0.0, 0.0, 0.5)
    assert resolved(model, given={"pretrain_epochs": 3})[2] == 3.0, "what is asked for is not dropped in silence"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_threads_have_a_perturbed_view_where_nothing_is_known_of_their_classes(device):
    """Whatever the device; `auto` assumes shares over words, and with labeled threads."""
    words, encoder = Threads(device), Threads(device)
    words.default_view_radius, words.prior_without_labels = 0.0, "uniform"

    def radius(model, labeled, preset="recommended", **given):
        return resolved(model, preset, given=given, target_labeled=labeled)[-1]

    assert radius(encoder, False, "learned") == radius(encoder, False, "paper") == 0.0, "a learned index distrusts such views"
    assert radius(encoder, False, "learned", view_radius=0.1) == 0.1
    assert radius(encoder, False) == radius(encoder, False, target_class_prior="auto") == 0.2
    assert radius(encoder, False, target_class_prior="uniform") == radius(encoder, True) == 0.0
    assert radius(words, False, target_class_prior="auto") == 0.0
    assert radius(encoder, False, view_radius=0.1) == radius(encoder, True, view_radius=0.1) == 0.1


def test_a_source_model_is_not_pretrained_again():
    assert resolved(Encoder(CUDA), from_source_model=True) == (512, 12.0, 0.0, 5e-5, 0.005)
    assert resolved(Encoder(CUDA), given={"pretrain_epochs": 3}, from_source_model=True)[2] == 3.0


def test_settings_do_not_depend_on_the_device(monkeypatch):
    def found():
        combinations = [(model, name) for model in ("minilm", "bigcn") for name in methods.METHODS]
        return {
            (model, name, preset): find_settings(model, name, preset, {}).record()
            for model, name in combinations
            for preset in methods.get(name).presets
        }

    before = found()
    assert all(before["minilm", "mtem", "recommended"][name] is None for name in NAMES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert found() == before


@pytest.mark.parametrize("method", list(methods.METHODS))
@pytest.mark.parametrize("model", ["minilm", "bigcn"])
def test_presets_of_papers_have_no_defaults_of_a_device(method, model):
    record = find_settings(model, method, "paper", {}).record()
    assert (record["max_length"], record["pretrain_epochs"]) == (256, 0.0)
    assert record["epochs"] == {"minilm": 2.0, "bigcn": 10.0}[model]
    rates = {"minilm": 5e-5, "bigcn": 5e-3}
    assert record["learning_rate"] == (rates[model] if method == "mtem" else None), "the model's default, on every device"


# ---------------------------------------------------------------------- runs


@pytest.fixture
def free(tiny) -> dict:
    """Arguments of a short adaptation with all of these defaults but the learning rate, which one test has."""
    short = {"pretrain_batch_size": 50, "left_out_models": 0, "steps": 2, "evaluations": 1, "source_epochs": 0.5}
    return {**{name: value for name, value in tiny.items() if name not in NAMES}, **short}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Give runs on the CPU the defaults of a GPU, with a shorter pretraining."""
    monkeypatch.setattr(defaults, "has_gpu_defaults", lambda device, preset: preset != "paper")
    monkeypatch.setitem(defaults.ON_GPU, "pretrain_epochs", 2.0)


@pytest.fixture
def steps(monkeypatch):
    """The numbers of all steps of pretraining."""
    seen, step = [], MaskedWords.step
    monkeypatch.setattr(MaskedWords, "step", lambda self, number, *rest: seen.append(number) or step(self, number, *rest))
    return seen


def found_in(record):
    assert all(record["settings"][name] is None for name in NAMES)
    return tuple(record["resolved"][name] for name in NAMES)


def test_a_run_on_a_cpu_has_the_defaults_that_it_always_had(free, steps, caplog):
    caplog.set_level("INFO", logger="mtem")
    adapted = mtem.adapt(**{**free, "steps": None, "method": "dann"})
    assert "defaults on" not in caplog.text
    assert found_in(adapted.record) == (64, 2.0, 0.0, 2e-5, 0.0), "the encoder takes 64 tokens"
    assert adapted.record["steps"] == {"pretrain": 0, "source": 6, "adapt": 16} and not steps


def test_a_run_on_a_gpu_has_its_own(free, steps, as_on_a_gpu, caplog):
    caplog.set_level("INFO", logger="mtem")
    adapted = mtem.adapt(**{**free, "steps": None, "method": "dann", "batch_size": 40})
    assert "defaults on cpu: max_length=512, epochs=12, pretrain_epochs=2, view_radius=0.005, learning_rate=5e-05" in caplog.text
    assert found_in(adapted.record) == (64, 12.0, 2.0, 5e-5, 0.005)
    assert adapted.record["steps"] == {"pretrain": 8, "source": 2, "adapt": 24} and len(steps) == 8
    steps.clear()
    begun = mtem.adapt(**free, source_model=adapted)
    assert found_in(begun.record) == (64, 12.0, 0.0, 5e-5, 0.005) and not steps
    frozen = mtem.adapt(**{**free, "frozen_layers": 1})
    assert found_in(frozen.record) == (64, 12.0, 0.0, 2e-4, 0.0) and not steps
    paper = mtem.adapt(**free, method="dann", preset="paper").record
    assert [paper["resolved"][name] for name in NAMES] == [64, 2.0, 0.0, 2e-5, 0.0] and not steps


def test_the_length_reaches_the_model(free, as_on_a_gpu, monkeypatch):
    monkeypatch.setitem(defaults.ON_GPU, "max_length", 9)
    adapted = mtem.adapt(**free, method="source-only")
    assert adapted.model.max_length == adapted.record["resolved"]["max_length"] == 9


def test_the_forecast_has_a_pretraining_that_is_a_default(free, as_on_a_gpu, monkeypatch):
    plans = []
    monkeypatch.setattr(pipeline, "make_forecast", lambda run, stage, done: plans.append(probe.plan(run, stage, done, LOWER)))
    mtem.adapt(**free, method="source-only", progress=Shown())
    ((first, *_),) = plans
    assert first.title == "pretraining" and len(first.work) - 1 == 8


LOWER = {"labeled": False, "target": False}


class Shown(Progress):
    """Quiet, but not for the run."""

    def __init__(self):
        super().__init__(quiet=True)
        self.quiet = False

    def advance(self, done, figures=None):
        pass


# ---------------------------------------------------------------------- resuming


def stop(free, output):
    with stopped_after(1, "adapt"):
        mtem.adapt(**free, output=output)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"run: cannot resume, setting epochs was 2.0 \(device cpu\) and would now be 12.0 \(device cpu\); resume it on"),
        ({"epochs": 1}, r"setting pretrain_epochs was 0.0 .* would now be 2.0"),
        ({"epochs": 1, "pretrain_epochs": 0}, r"setting learning_rate was 2e-05 .* would now be 5e-05"),
    ],
)
def test_a_run_that_began_on_a_cpu_does_not_go_on_with_the_defaults_of_a_gpu(free, tmp_path, request, given, message):
    free = {**free, "method": "dann", **given}
    stop(free, tmp_path / "run")
    kept = (tmp_path / "run" / "run.json").read_bytes()
    request.getfixturevalue("as_on_a_gpu")
    with pytest.raises(RequestError, match=message):
        mtem.adapt(**free, output=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == kept


def test_a_run_that_began_on_a_gpu_does_not_go_on_with_the_defaults_of_a_cpu(free, tmp_path, as_on_a_gpu, monkeypatch):
    monkeypatch.setitem(defaults.ON_GPU, "max_length", 9)
    stop(free, tmp_path / "run")
    mtem.adapt(**free, output=tmp_path / "run", resume=True)
    stop(free, tmp_path / "other")
    monkeypatch.undo()
    with pytest.raises(RequestError, match=r"setting max_length was 9 .* would now be 64"):
        mtem.adapt(**free, output=tmp_path / "other", resume=True)
    finished = mtem.adapt(**free, output=tmp_path / "run", resume=True)
    assert finished.record["resolved"]["max_length"] == 9, "a finished run is only read"


@pytest.mark.parametrize("missing", [("epochs", "pretrain_epochs"), ("resolved",)])
def test_a_record_without_these_values_can_be_resumed(free, tmp_path, missing):
    stop(free, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    for name in missing:
        (record if name == "resolved" else record["resolved"]).pop(name)
    path.write_text(json.dumps(record))
    assert found_in(mtem.adapt(**free, output=tmp_path / "run", resume=True).record) == (64, 2.0, 0.0, 2e-5, 0.0)


def test_frozen_layers_of_another_device_are_refused(free, tmp_path, monkeypatch):
    free = {**free, "frozen_layers": None, "learning_rate": 1e-3}
    stop(free, tmp_path / "run")
    monkeypatch.setattr("mtem.run.adapt.layers_to_freeze", lambda training, model: 0)  # as on a GPU
    with pytest.raises(RequestError, match=r"setting frozen_layers was 1 .* would now be 0"):
        mtem.adapt(**free, output=tmp_path / "run", resume=True)
