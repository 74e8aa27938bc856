"""`--from`: a run repeated bit for bit; what has changed since is noticed."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.errors import RequestError
from mtem.run.repeat import read_request


@pytest.fixture(scope="module")
def repeated(encoder, reviews, tmp_path_factory):
    """A run with files of its own, so that they can be changed."""
    place = tmp_path_factory.mktemp("repeated")
    files = {name: str(shutil.copy(path, place)) for name, path in reviews.items()}
    model = shutil.copytree(encoder, place / "encoder")
    settings = {
        "max_length": 16, "batch_size": 10, "source_epochs": 1, "epochs": 1, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
        "evaluations": 2, "frozen_layers": 0, "seed": 7,
    }  # fmt: skip
    mtem.adapt({"paper": files["books"], "dvd": files["dvd"]}, files["kitchen"], model=model, output=place / "run", **settings)
    return place


@pytest.fixture
def place(repeated, tmp_path):
    """A copy of its files under the same paths, put back afterwards."""
    kept = shutil.copytree(repeated, tmp_path / "kept")
    yield repeated
    shutil.rmtree(repeated)
    shutil.copytree(kept, repeated)


def test_a_run_is_repeated_bit_for_bit(place, command, tmp_path):
    code, _, errors = command("adapt", "--from", place / "run" / "run.json", "--output", tmp_path / "again", "--quiet")
    assert code == 0, errors
    for name in ("model/model.safetensors", "checkpoints/source.safetensors"):
        one, other = load_file(place / "run" / name), load_file(tmp_path / "again" / name)
        assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items()), name
    tables = [mtem.load(path).indexes for path in (place / "run", tmp_path / "again")]
    assert tables[0].equals(tables[1])
    records = [json.loads((path / "run.json").read_text()) for path in (place / "run", tmp_path / "again")]
    for name in ("settings", "data", "selection", "estimate", "classes", "resolved"):
        assert records[0][name] == records[1][name], name


def test_changed_files_are_named(place):
    for name in ("books.jsonl", "kitchen.jsonl"):
        before = (place / name).read_bytes()
        (place / name).write_bytes(before.replace(b"word1", b"word2", 1))
        with pytest.raises(RequestError, match=rf"{name}: a file of the (source|target) data has changed since the run of"):
            read_request(place / "run")
        (place / name).write_bytes(before)
    read_request(place / "run")
    weights = (place / "encoder" / "model.safetensors").read_bytes()
    (place / "encoder" / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(RequestError, match="encoder: the model has changed since"):
        read_request(place / "run")
    (place / "encoder" / "model.safetensors").write_bytes(weights)
    (place / "dvd.jsonl").unlink()
    with pytest.raises(RequestError, match=r"dvd.jsonl: no such file"):
        read_request(place / "run")


def changed(place, **values):
    record = json.loads((place / "run" / "run.json").read_text())
    (place / "run" / "run.json").write_text(json.dumps({**record, **values}))
    return record


def test_other_versions_are_told(place, caplog):
    record = changed(place)
    changed(place, versions={**record["versions"], "torch": "1.0"}, resolved={**record["resolved"], "device": "cuda:0"})
    with caplog.at_level(logging.WARNING, logger="mtem"):
        read_request(place / "run")
    assert f"was made with torch 1.0 (now {torch.__version__})" in caplog.messages[0]
    assert "was run on cuda and is repeated on cpu" in caplog.messages[1]


def test_what_cannot_be_repeated_is_refused(place, command, tmp_path):
    code, _, errors = command("adapt", "--from", place / "run", "--output", tmp_path / "x", "--seed", "3")
    assert code == 2 and "--seed: --from repeats a run as it was" in errors and not (tmp_path / "x").exists()
    code, _, errors = command("adapt", "--output", tmp_path / "x")
    assert code == 2 and "--source: is missing" in errors
    record = changed(place)
    entry = {**record["data"]["source"][0], "path": None, "sha256": None}
    changed(place, data={**record["data"], "source": [entry]})
    with pytest.raises(RequestError, match="the source data were given in memory"):
        read_request(place / "run")
    changed(place, data=record["data"], source_model={"path": None, "sha256": "x"})
    with pytest.raises(RequestError, match="its source model was given in memory"):
        read_request(place / "run")
    (place / "run" / "run.json").unlink()
    with pytest.raises(RequestError, match=r"run.json: no such file"):
        read_request(place / "run")
    (place / "run" / "run.json").write_text("[]")
    with pytest.raises(RequestError, match=r"expected an object, got a list; give the run\.json of a run"):
        read_request(place / "run" / "run.json")
