"""Rehearsals with pretraining: one for all source models and for the run after them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.cli import main
from mtem.errors import RequestError
from mtem.rehearsal.trials import Work
from mtem.run.pretrained import begin_pretrained, file_name
from mtem.training.pretraining import MaskedWords
from mtem.training.settings import TrainingSettings
from tests.conftest import make_texts, write_jsonl
from tests.rehearsed import SMALL, read, write_domains, write_method

QUICK = {**SMALL, "epochs": 1, "source_epochs": 0.5, "pretrain_epochs": 1, "pretrain_batch_size": 30}


@pytest.fixture
def steps(monkeypatch):
    """The numbers of the texts in every step of pretraining."""
    seen, step = [], MaskedWords.step
    monkeypatch.setattr(
        MaskedWords, "step", lambda self, number, batch, *rest: seen.append(len(batch.rows)) or step(self, number, batch, *rest)
    )
    return seen


@pytest.fixture(scope="module")
def data(encoder, tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    target = write_jsonl(place / "kitchen.jsonl", make_texts(60, 30, 0.6), labeled=False)
    few = write_jsonl(place / "few.jsonl", make_texts(10, 31, 0.6))
    return {
        "source": write_domains(place, books=110, dvd=98, toys=110), "target": str(target), "few": str(few),
        "method": write_method(place, "further"), "model": str(encoder),
    }  # fmt: skip


def rehearse(data, output=None, **changes):
    given = {"source": data["source"], "model": data["model"], "method": [data["method"]], "learning_rates": [1e-3], **QUICK}
    return mtem.rehearse(**{**given, **changes}, output=output)


def test_one_pretraining_is_shared_by_all_source_models(data, tmp_path, steps, monkeypatch):
    begun, train_source = [], Work.train_source
    monkeypatch.setattr(
        Work,
        "train_source",
        lambda work, task, report: train_source(work, task, report) or begun.append(work.source_model_path(task)),
    )
    records = []
    monkeypatch.setattr(
        Work, "remove_intermediate", lambda work: records.extend(json.loads(Path(path, "run.json").read_text()) for path in begun)
    )
    rehearse(data, tmp_path / "rehearsal")
    assert sum(steps) == 318, "every text of all domains once"
    assert len(records) == 2 and all(record["steps"]["pretrain"] == 0 for record in records)
    assert len({record["pretrained"]["sha256"] for record in records}) == 1
    assert not list((tmp_path / "rehearsal").glob("pretrained-*")), "no run has the source texts alone"


def test_pretraining_changes_the_trials(data):
    scores = [rehearse(data, pretrain_epochs=epochs).record["trials"][0]["candidates"] for epochs in (0, 3)]
    assert scores[0] != scores[1]


def test_a_rehearsal_without_pretraining_has_no_trace_of_it(data, tmp_path, steps):
    rehearse(data, tmp_path / "rehearsal", pretrain_epochs=0, pretrain_on=[data["target"]])
    assert not steps and "pretrained_on" not in read(tmp_path / "rehearsal")
    assert not list((tmp_path / "rehearsal").glob("pretrained-*"))


def test_a_run_begins_from_the_encoder_of_its_rehearsal(data, tmp_path, steps):
    """And has the weights that it would have if it had pretrained itself."""
    rehearse(data, tmp_path / "rehearsal", pretrain_on=[data["few"], data["target"]])
    assert sum(steps) == 318 + 10 + 60
    steps.clear()
    request = {
        "source": data["source"], "target": data["target"], "target_labeled": data["few"], "model": data["model"],
        "method": "source-only", **QUICK, "left_out_models": 0,
    }  # fmt: skip
    shared = mtem.adapt(**request, rehearsal=tmp_path / "rehearsal", output=tmp_path / "shared")
    assert not steps and shared.record["steps"]["pretrain"] == 0
    (file,) = (tmp_path / "rehearsal").glob("pretrained-*")
    assert shared.record["pretrained"]["path"] == str(file)
    assert not [name for name in load_file(file) if "classifier" in name]
    own = mtem.adapt(**request)
    assert sum(steps) == 388 and own.record["pretrained"] is None and own.record["steps"]["pretrain"] == 13
    one, other = shared.source_weights(), own.source_weights()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    steps.clear()
    mtem.adapt(**{**request, "target_labeled": None}, rehearsal=tmp_path / "rehearsal")
    assert sum(steps) == 378, "other texts: it pretrains itself"
    begun = mtem.adapt(**request, rehearsal=tmp_path / "rehearsal", source_model=shared)
    assert begun.record["pretrained"] is None


def test_a_run_resumes_with_that_encoder_only(data, tmp_path):
    from tests.bench import stopped_after

    rehearse(data, tmp_path / "rehearsal", pretrain_on=[data["target"]])
    request = {
        "source": data["source"], "target": data["target"], "model": data["model"], "method": "source-only", **QUICK,
        "rehearsal": tmp_path / "rehearsal", "output": tmp_path / "run", "checkpoint_seconds": 0.0,
    }  # fmt: skip
    with stopped_after(3, "source"):
        mtem.adapt(**request)
    (file,) = (tmp_path / "rehearsal").glob("pretrained-*")
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="cannot resume, the rehearsal whose pretrained encoder"):
        mtem.adapt(**request, resume=True)
    (tmp_path / "elsewhere").rename(file)
    resumed = mtem.adapt(**request, resume=True)
    whole = mtem.adapt(**{**request, "output": tmp_path / "whole"})
    assert all(torch.equal(value, whole.source_weights()[name]) for name, value in resumed.source_weights().items())
    assert np.array_equal(resumed.indexes["confidence"], whole.indexes["confidence"])


def test_an_interrupted_rehearsal_does_not_pretrain_twice(data, tmp_path, steps, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "train_source", killed)
        with pytest.raises(KeyboardInterrupt):
            rehearse(data, tmp_path / "rehearsal", pretrain_on=[data["target"]])
    assert sum(steps) == 378
    rehearse(data, tmp_path / "rehearsal", pretrain_on=[data["target"]], resume=True)
    assert sum(steps) == 378
    with pytest.raises(RequestError, match="cannot resume, pretrained_on was"):
        rehearse(data, tmp_path / "rehearsal", pretrain_on=[data["few"]], resume=True)


def test_adapt_with_rehearse_pretrains_once(data, tmp_path, steps, monkeypatch):
    monkeypatch.setattr("mtem.cli.adapt.default_jobs", lambda given: 1)
    words = ["adapt", "--target", data["target"], "--model", data["model"], "--method", data["method"], "--rehearse", "--quiet"]
    words += [word for path in data["source"] for word in ("--source", path)] + ["--output", str(tmp_path / "run")]
    words += [word for name, value in QUICK.items() for word in ("--set", f"{name}={value}")]
    monkeypatch.setattr("sys.argv", ["mtem", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code in (0, None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert sum(steps) == 378 and record["steps"]["pretrain"] == 0 and record["settings"]["pretrain_epochs"] == 1
    assert Path(record["pretrained"]["path"]).parent == tmp_path / "run" / "rehearsal"


def test_frozen_layers_are_refused_before_any_trial(data, tmp_path):
    with pytest.raises(RequestError, match=r"pretrain_epochs=1: .*set frozen_layers=0"):
        rehearse(data, tmp_path / "rehearsal", frozen_layers=1)
    assert not (tmp_path / "rehearsal").exists()


def test_a_method_with_its_own_head_begins_from_the_same_encoder(data, tmp_path, steps):
    found = rehearse(data, method=["mme", data["method"]])
    assert sum(steps) == 318 and {trial["method"] for trial in found.record["trials"]} == {"mme", data["method"]}


# ---------------------------------------------------------------------- the file


@pytest.mark.parametrize("change", [{"pretrain_epochs": 2}, {"seed": 1}, {"max_length": 17}, {"weight_decay": 0.0}], ids=str)
def test_the_name_of_the_file_depends_on_the_settings(change):
    files = [[{"sha256": "a", "texts": 1, "domain": "x"}], []]
    settings = {"pretrain_epochs": 1, "max_length": 16}
    name = file_name("minilm", TrainingSettings(**settings), files)
    assert name == file_name("minilm", TrainingSettings(**settings, batch_size=3), [*files, []])
    others = [file_name("minilm", TrainingSettings(**{**settings, **change}), files)]
    others += [
        file_name("mpnet", TrainingSettings(**settings), files),
        file_name("minilm", TrainingSettings(**settings), files * 2),
    ]
    assert name not in others


def test_a_file_of_another_encoder_is_refused(encoder, tmp_path):
    from mtem.models.text import TextModel
    from mtem.tensors import write_tensors

    write_tensors(tmp_path / "other.safetensors", {"network.bert.pooler.dense.bias": torch.zeros(3)})
    with pytest.raises(RequestError, match="does not fit this model; rehearse again"):
        begin_pretrained(TextModel.create(encoder, ("a", "b")), tmp_path / "other.safetensors")
