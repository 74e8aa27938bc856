"""Pretraining of the encoder of the posts: what it changes, what it reads, kill and resume, rehearsals."""

from __future__ import annotations

import json

import pytest
import torch

import mtem
from mtem.errors import RequestError
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.model import BigcnModel
from mtem.training import pretraining
from mtem.training.pretraining import MaskedWords
from tests.bench import stopped_after
from tests.conftest import make_encoder
from tests.models.trees.test_model import SMALL, make_model
from tests.threads import make_threads, write_threads
from tests.tolerance import assert_near

PRETRAINED = {"pretrain_epochs": 1, "pretrain_batch_size": 40, "pretrain_learning_rate": 1e-3, "left_out_models": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("threads")
    return {
        "paris": write_threads(place / "paris.jsonl", make_threads(40, 1)),
        "ottawa": write_threads(place / "ottawa.jsonl", make_threads(40, 2, 0.3)),
        "ferguson": write_threads(place / "ferguson.jsonl", make_threads(40, 3, 0.7), labeled=False),
    }


@pytest.fixture
def given(files, encoder):
    source, target = [str(files["paris"]), str(files["ottawa"])], str(files["ferguson"])
    model = {"features": "encoder", "encoder": str(encoder), "max_length": 16}
    return {"source": source, "target": target, **SMALL, **model, **PRETRAINED}


def weights_of(model) -> dict[str, torch.Tensor]:
    return model.features.network.state_dict()


def test_posts_are_read_with_the_pretrained_encoder(given, encoder, tmp_path):
    adapted = mtem.adapt(**given, output=tmp_path / "run")
    before = Embeddings.find(str(encoder), 16)
    moved = [
        name for name, value in weights_of(adapted.model).items() if not torch.equal(value, before.network.state_dict()[name])
    ]
    assert any("word_embeddings" in name for name in moved) and any("layer.0" in name for name in moved)
    assert adapted.model.features.fingerprint != before.fingerprint
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["steps"]["pretrain"] > 1 and record["seconds"]["pretrain"] > 0
    assert record["resolved"]["pretrain_learning_rate"] == 1e-3
    test = make_threads(10, 9)
    assert_near(mtem.load(tmp_path / "run").predict_proba(test), adapted.predict_proba(test), dtype=torch.float32)
    assert not (tmp_path / "run" / "checkpoints" / "pretrained.safetensors").exists()
    again = mtem.adapt(**given, source_model=adapted, output=tmp_path / "again")
    assert again.record["steps"]["pretrain"] == 0, "it has the encoder of its source model"
    assert again.model.features.fingerprint == adapted.model.features.fingerprint


def test_every_post_of_the_run_is_read_once_in_a_pass_and_no_label(given, files, monkeypatch):
    seen = 0
    step = MaskedWords.step

    def watched(self, number, source, target, update):
        nonlocal seen
        assert source.labels is None and target is None
        seen += len(source.inputs["input_ids"])
        return step(self, number, source, target, update)

    monkeypatch.setattr(MaskedWords, "step", watched)
    mtem.adapt(**given, method="source-only")
    rows = [json.loads(line) for path in files.values() for line in path.read_text().splitlines()]
    posts = {node["text"] for row in rows for node in row["nodes"] if node["text"].strip()}
    assert len(posts) - 40 < seen <= len(posts), "an incomplete batch is left out"


def test_a_killed_run_resumes_without_pretraining_again(given, tmp_path, monkeypatch):
    whole = mtem.adapt(**given, output=tmp_path / "whole")
    with stopped_after(3):
        mtem.adapt(**given, output=tmp_path / "cut", checkpoint_seconds=0)
    monkeypatch.setattr(pretraining, "pretrain", None)
    resumed = mtem.adapt(**given, output=tmp_path / "cut", resume=True, checkpoint_seconds=0)
    for one, other in ((whole.model, resumed.model), (whole.model.features.network, resumed.model.features.network)):
        other_state = other.state_dict()
        assert all(torch.equal(value, other_state[name]) for name, value in one.state_dict().items())
    assert resumed.record["steps"] == whole.record["steps"]


def test_a_rehearsal_pretrains_once_and_the_run_after_it_takes_the_encoder(given, tmp_path, monkeypatch):
    trained = []
    original = pretraining.pretrain
    monkeypatch.setattr(pretraining, "pretrain", lambda *values: trained.append(1) or original(*values))
    many = [write_threads(tmp_path / f"{name}.jsonl", make_threads(160, seed)) for name, seed in (("paris", 4), ("ottawa", 5))]
    given["source"] = list(map(str, many))
    common = {name: value for name, value in given.items() if name not in ("source", "target", "evaluations", "left_out_models")}
    rehearsal = mtem.rehearse(
        given["source"], method="fixmatch", learning_rates=[1e-3], pretrain_on=[given["target"]], output=tmp_path / "rehearsal",
        **common,
    )  # fmt: skip
    assert len(trained) == 1
    adapted = mtem.adapt(given["source"], given["target"], method="fixmatch", rehearsal=rehearsal, model="bigcn")
    assert len(trained) == 1 and adapted.record["pretrained"] is not None


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "distilbert"])
def test_an_encoder_survives_the_way_there_and_back(tmp_path, architecture):
    rows = make_threads(6, 3)
    place = make_encoder(tmp_path / architecture, architecture)
    model = make_model(rows, features="encoder", encoder=str(place))
    before = {name: value.clone() for name, value in weights_of(model).items()}
    texts = model.encoder_of_posts()
    model.take_encoder(texts)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    with torch.no_grad():
        texts.word_embeddings.weight += 1
    model.take_encoder(texts)
    changed = [name for name, value in weights_of(model).items() if not torch.equal(value, before[name])]
    assert [name.split(".")[-2] for name in changed] == ["word_embeddings"]


def test_less_than_a_step_of_pretraining(given):
    adapted = mtem.adapt(**{**given, "pretrain_epochs": 1e-6}, method="source-only")
    assert adapted.record["steps"]["pretrain"] == 0


def test_words_have_no_encoder_to_pretrain(given):
    with pytest.raises(RequestError, match="bigcn has one only with features=encoder"):
        mtem.adapt(**{**given, "features": "tfidf"})
    assert BigcnModel.pretrained_weights(make_model(make_threads(6, 3))) == {}
