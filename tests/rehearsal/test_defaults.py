"""Rehearsals with defaults that depend on the device: what is recorded, and what runs on another device make of it."""

from __future__ import annotations

import pytest

import mtem
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.rehearsal.plan import make_plan
from mtem.rehearsal.rehearse import resolve_plan
from mtem.run import defaults
from tests.conftest import make_texts, write_jsonl
from tests.rehearsed import SMALL, read, write_domains, write_method
from tests.threads import make_threads, write_threads

FREE = {name: value for name, value in SMALL.items() if name not in ("max_length", "epochs")}
GPU = {"max_length": 9, "epochs": 8.0, "pretrain_epochs": 1.0, "view_radius": 0.01}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Give the CPU the defaults of a GPU, with shorter texts and fewer passes."""
    monkeypatch.setattr(defaults, "has_gpu_defaults", lambda device, preset: preset != "paper")
    for name, value in GPU.items():
        monkeypatch.setitem(defaults.ON_GPU, name, value)


@pytest.fixture(scope="module")
def data(encoder, tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    return {
        "source": write_domains(place, books=98, dvd=98, toys=110), "model": str(encoder),
        "method": write_method(place, "further"),
        "target": str(write_jsonl(place / "kitchen.jsonl", make_texts(60, 30, 0.6), labeled=False)),
    }  # fmt: skip


def rehearse(data, **changes):
    request = {**FREE, "source_epochs": 0.5, "source": data["source"], "model": data["model"], "method": data["method"]}
    return mtem.rehearse(**{**request, **changes})


def resolved(methods, data, preset="recommended", **given):
    corpus, model = load_corpus(data["source"], labeled=True), data["model"]
    plan = make_plan(methods, model, preset, None, None, None, given)
    return resolve_plan(plan, corpus, any_passes="epochs" not in given)


def test_on_a_cpu_a_plan_is_what_it_always_was(data):
    plan, found = resolved(("mtem", "mme"), data, frozen_layers=0)
    assert plan.epochs == 6 and plan.given == {"frozen_layers": 0}
    assert plan.settings_of("mtem") == {"frozen_layers": 0, "max_length": 256, "pretrain_epochs": 0.0, "view_radius": 0.0}
    assert found["mme"] == found["source-only"] == {
        "max_length": 256, "pretrain_epochs": 0.0, "view_radius": 0.0, "learning_rate": 2e-5, "frozen_layers": 0
    }  # fmt: skip
    assert resolved(("mtem",), data)[1]["mtem"] == {
        "max_length": 256, "pretrain_epochs": 0.0, "view_radius": 0.0, "learning_rate": 2e-4, "frozen_layers": 1
    }  # fmt: skip


def test_on_a_gpu_a_plan_begins_with_its_defaults(data, as_on_a_gpu):
    plan, found = resolved(("mtem",), data, frozen_layers=0)
    assert plan.epochs == 8 and plan.training_of("source-only").pretrain_epochs == 1.0
    assert found["mtem"] == {
        "max_length": 9, "pretrain_epochs": 1.0, "view_radius": 0.01, "learning_rate": 5e-5, "frozen_layers": 0
    }  # fmt: skip
    plan, found = resolved(("mtem",), data, frozen_layers=0, epochs=3, max_length=12, pretrain_epochs=0)
    assert plan.epochs == 3 and plan.training_of("mtem").max_length == found["mtem"]["max_length"] == 12
    assert plan.training_of("mtem").pretrain_epochs == 0.0
    plan, found = resolved(("mtem", "fixmatch"), data, "paper")
    assert plan.epochs == 6 and {(values["max_length"], values["pretrain_epochs"]) for values in found.values()} == {(256, 0.0)}
    assert (found["mtem"]["learning_rate"], found["fixmatch"]["learning_rate"]) == (5e-5, 2e-4)


def test_bigcn_has_the_same_plan_on_all_devices(tmp_path, request):
    path = write_threads(tmp_path / "events.jsonl", make_threads(40, 1))
    data = {"source": [str(path)], "model": "bigcn"}
    plans = [resolved(("mtem",), data)]
    request.getfixturevalue("as_on_a_gpu")
    plans.append(resolved(("mtem",), data))
    assert plans[0] == plans[1] and plans[0][0].epochs == 6
    assert plans[0][1]["mtem"] == {
        "max_length": 256, "pretrain_epochs": 0.0, "view_radius": 0.2, "learning_rate": 5e-4, "frozen_layers": 0
    }  # fmt: skip


def test_a_run_on_another_device_is_what_was_rehearsed(data, tmp_path, as_on_a_gpu, monkeypatch):
    folder = tmp_path / "rehearsal"
    found = rehearse(data, output=folder, pretrain_on=[data["target"]])
    record = read(folder)
    assert record["epochs"] == 8 and record["settings"] == {
        **FREE, "source_epochs": 0.5, "max_length": 9, "pretrain_epochs": 1.0, "view_radius": 0.01
    }  # fmt: skip
    assert sorted({trial["learning_rate"] for trial in record["trials"]}) == [5e-5, 1.25e-4]
    for method in (data["method"], "source-only"):
        assert found.advice(method).settings.items() >= {"max_length": 9, "pretrain_epochs": 1.0, "frozen_layers": 0}.items()
    monkeypatch.undo()
    request = {"source": data["source"], "target": data["target"], "model": data["model"], "left_out_models": 0}
    adapted = mtem.adapt(**request, method=data["method"], rehearsal=folder).record
    expected = {"max_length": 9, "pretrain_epochs": 1.0, "epochs": 8.0, "view_radius": 0.01}
    assert expected.items() <= adapted["settings"].items() and expected.items() <= adapted["resolved"].items()
    assert adapted["pretrained"] and adapted["choices"]["max_length"] == adapted["choices"]["pretrain_epochs"] == "rehearsal"
    assert adapted["temperature"]["from"] == "rehearsal"


def test_a_rehearsal_does_not_go_on_with_the_defaults_of_another_device(data, tmp_path, request):
    from mtem.rehearsal.trials import Work

    def killed(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Work, "train_source", killed)
        rehearse(data, output=tmp_path / "rehearsal")
    request.getfixturevalue("as_on_a_gpu")
    with pytest.raises(RequestError, match=r"cannot resume, setting max_length of .*further.py was 256 and would now be 9; "):
        rehearse(data, output=tmp_path / "rehearsal", resume=True)
