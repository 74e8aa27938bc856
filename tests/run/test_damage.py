"""Damaged and edited run directories: each ends in a message that names the file, or in the right result."""

from __future__ import annotations

import json
import logging
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.cli.adapt import print_summary
from mtem.errors import RequestError
from mtem.report.page import write_report
from mtem.tensors import write_tensors

SETTINGS = {
    "max_length": 16, "batch_size": 10, "source_epochs": 1, "epochs": 1, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
    "evaluations": 3, "frozen_layers": -1, "checkpoint_seconds": 0.0,
}  # fmt: skip


class StopError(Exception):
    pass


def stop(line, model):
    if line["stage"] == "evaluation" and line["step"] >= 5:
        raise StopError


@pytest.fixture(scope="module")
def runs(encoder, reviews, tmp_path_factory):
    """A finished run, the same run stopped in the middle of its adaptation, and the request."""
    place = tmp_path_factory.mktemp("runs")
    request = {"source": [str(reviews["books"]), str(reviews["dvd"])], "target": str(reviews["kitchen"]), "model": str(encoder)}
    request |= SETTINGS
    mtem.adapt(**request, output=place / "whole")
    with pytest.raises(StopError):
        mtem.adapt(**request, output=place / "cut", observe=stop)
    return place, request


def weights(run):
    return {file: load_file(run / file) for file in ("model/model.safetensors", "checkpoints/source.safetensors")}


def assert_same(one, other):
    for file, tensors in weights(one).items():
        others = weights(other)[file]
        assert tensors.keys() == others.keys() and all(torch.equal(value, others[key]) for key, value in tensors.items()), file


# ---------------------------------------------------------------------- tensors of an unfinished run


def contents(function):
    return lambda path: path.write_bytes(function(path.read_bytes()))


def rewritten(function):
    """Other tensors, with a valid checksum: what only an edited file can be."""
    return lambda path: write_tensors(path, function(load_file(path)))


def first_of(tensors, value):
    name = next(name for name in sorted(tensors, reverse=True) if name.startswith(("model.", "network.", "bert.")))
    return {**tensors, name: value(tensors[name])}


TENSORS = {
    "empty": contents(lambda content: b""),
    "cut off": contents(lambda content: content[: len(content) // 2]),
    "garbage": contents(lambda content: bytes(range(256)) * 4),
    "a flipped bit": contents(lambda content: content[:-9] + bytes([content[-9] ^ 16]) + content[-8:]),
    "nothing in it": rewritten(lambda tensors: {}),
    "other names": rewritten(lambda tensors: {"x" + name: value for name, value in tensors.items()}),
    "another shape": rewritten(lambda tensors: first_of(tensors, lambda value: torch.ones(3, 5, 7))),
    "no shape": rewritten(lambda tensors: first_of(tensors, lambda value: torch.tensor(1.0))),
    "whole numbers": rewritten(lambda tensors: first_of(tensors, lambda value: value.long())),
    "not finite": rewritten(lambda tensors: first_of(tensors, lambda value: torch.full_like(value, float("nan")))),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    "file, damage",
    [("newest", damage) for damage in TENSORS]
    + [("source.safetensors", damage) for damage in ("cut off", "another shape", "not finite", "a folder")],
)
def test_a_run_goes_on_from_what_is_left(runs, tmp_path, file, damage, caplog):
    place, request = runs
    run = shutil.copytree(place / "cut", tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    TENSORS[damage](path := newest / "tensors.safetensors" if file == "newest" else run / "checkpoints" / file)
    if file != "newest" and damage == "a folder":
        with pytest.raises(mtem.RunError, match=r"source\.safetensors: is a folder; remove it"):
            mtem.adapt(**request, output=run, resume=True)
        path.rmdir()
    with caplog.at_level(logging.WARNING, logger="mtem"):
        mtem.adapt(**request, output=run, resume=True)
    told = [message for message in caplog.messages if str(path) in message or str(path.parent) in message]
    assert told and told[0].endswith("the run goes on from step-15")
    if file != "newest":  # no checkpoint of the adaptation is of use without the weights that it began from
        assert told[1].endswith("the run starts from the beginning")
    assert_same(run, place / "whole")


@pytest.mark.parametrize("part", ["method.", "optimizer.", "random."])
def test_a_checkpoint_of_another_method_or_optimizer_is_told(runs, tmp_path, part):
    place, request = runs
    run = shutil.copytree(place / "cut", tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    tensors = load_file(newest / "tensors.safetensors")
    name = next(name for name in sorted(tensors) if name.startswith(part))
    write_tensors(newest / "tensors.safetensors", {**tensors, name: torch.zeros(2, 2).to(tensors[name].dtype)})
    with pytest.raises(RequestError, match=rf"{newest}: .*; remove this folder, and --resume goes on from an older one"):
        mtem.adapt(**request, output=run, resume=True)
    shutil.rmtree(newest)
    mtem.adapt(**request, output=run, resume=True)
    assert_same(run, place / "whole")


def test_without_any_checkpoint_a_run_starts_again(runs, tmp_path):
    place, request = runs
    run = shutil.copytree(place / "cut", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "step-abc").mkdir(parents=True)
    (run / ".run.json.0123456789ab.part").write_text("{")
    mtem.adapt(**request, output=run, resume=True)
    assert_same(run, place / "whole")
    assert not list(run.glob(".*")) and (run / "checkpoints" / "step-abc").is_dir()


def shaped(values):
    return lambda path: np.save(path, values)


def spoiled(path):
    values = np.load(path)
    values[3] = np.inf
    np.save(path, values)


CACHES = {
    "empty": contents(lambda content: b""),
    "cut off": contents(lambda content: content[: len(content) // 2]),
    "garbage": contents(lambda content: b"\x93NUMPY" + bytes(100)),
    "another shape": shaped(np.ones((4, 4), dtype=np.float32)),
    "another type": shaped(np.array(["a", "b"])),
    "pickled": lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
    "not finite": spoiled,
}


@pytest.mark.parametrize("damage", CACHES)
def test_a_damaged_cache_of_frozen_layers_is_computed_again(runs, tmp_path, damage, caplog):
    place, request = runs
    run = shutil.copytree(place / "cut", tmp_path / "run")
    CACHES[damage](path := run / "checkpoints" / "frozen-target.npy")
    mtem.adapt(**request, output=run, resume=True)
    assert any(str(path) in message and message.endswith("it is computed again") for message in caplog.messages)
    assert_same(run, place / "whole")


@pytest.mark.parametrize("folder", ["tokens", "corpora"])
def test_a_damaged_cache_of_data_is_made_again(runs, tmp_path, folder, monkeypatch):
    place, request = runs
    monkeypatch.setenv("MTEM_CACHE", str(tmp_path / "cache"))
    mtem.adapt(**request, output=tmp_path / "first")
    files = sorted((tmp_path / "cache" / folder).glob("*.arrow"))
    assert files
    damages = (lambda c: c[: len(c) // 2], lambda c: c[:400] + bytes(120) + c[520:], lambda c: c[:-300] + b"\xff" * 300)
    for number in range(2):
        for place_in_list, file in enumerate(files):  # each file another damage
            file.write_bytes(damages[(number + place_in_list) % 3](file.read_bytes()))
        mtem.adapt(**request, output=tmp_path / f"run-{number}")
        assert_same(tmp_path / f"run-{number}", place / "whole")


# ---------------------------------------------------------------------- JSON

JSON = {
    "empty": "", "a list": "[]", "null": "null", "nothing": "{}", "brackets": "[" * 100_000, "braces": '{"a":' * 50_000,
    "cut off": '{"status": "done", "classes": [', "digits": '{"status": ' + "9" * 5000 + "}", "nan": '{"status": NaN}',
    "status": '{"status": ["done"]}', "a number": "5", "text": '"done"',
}  # fmt: skip


@pytest.mark.parametrize("content", JSON)
@pytest.mark.parametrize("which", ["whole", "cut"])
def test_run_json_of_another_shape_is_refused_with_its_name(runs, tmp_path, content, which):
    place, request = runs
    run = shutil.copytree(place / which, tmp_path / "run")
    (run / "run.json").write_text(JSON[content])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=r"run/run\.json: .*without it the run cannot be resumed"):
        mtem.adapt(**request, output=run, resume=True)
    with pytest.raises(RequestError, match=r"run/run\.json: "):
        mtem.load(run)
    with pytest.raises(RequestError, match=r"run/run\.json: "):
        mtem.adapt(**request, source_model=run)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_report(run, tmp_path / "report.html")


VALUES = (None, [], {}, "x", -1, True, 1e300, [[1]])


def edits(record):
    """The record without each of its parts, and with other things in their place."""
    for name, value in record.items():
        yield f"{name} gone", {key: other for key, other in record.items() if key != name}
        for other in VALUES:
            if other != value:
                yield f"{name} is {other!r}", {**record, name: other}
        if isinstance(value, dict):
            for inner in value:
                yield f"{name}.{inner} is 'x'", {**record, name: {**value, inner: "x"}}


def test_edited_records_end_in_a_message_or_in_a_result(runs, tmp_path, monkeypatch):
    """Every part of run.json in turn, read by whatever reads it without a model."""
    place, request = runs
    run = shutil.copytree(place / "whole", tmp_path / "run")
    model = mtem.load(run).model
    monkeypatch.setattr("mtem.run.result.models.load", lambda directory: model)
    refused = 0
    for name, record in edits(json.loads((run / "run.json").read_text())):
        (run / "run.json").write_text(json.dumps(record))
        try:
            if record.get("status") == "done":  # else it would be resumed
                print_summary(mtem.adapt(**request, output=run, resume=True).record, run)
            adapted = mtem.load(run)
            adapted.left_out(), adapted.source_weights()
        except RequestError as error:
            assert str(run) in str(error) and "\n" not in str(error), name
            refused += 1
    assert refused > 200


# ---------------------------------------------------------------------- a finished run


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("file", ["model/model.safetensors", "checkpoints/source.safetensors"])
def test_damaged_weights_of_a_finished_run_are_refused(runs, tmp_path, damage, file):
    place, request = runs
    run = shutil.copytree(place / "whole", tmp_path / "run")
    TENSORS[damage](run / file)
    if file == "model/model.safetensors" and damage == "a flipped bit":
        return  # written by transformers, without a checksum
    with pytest.raises(RequestError, match=str(run)):
        mtem.load(run).source_weights()
    with pytest.raises(RequestError, match=str(run)):
        mtem.adapt(**request, source_model=run)


def test_a_damaged_table_is_refused(runs, tmp_path):
    run = shutil.copytree(runs[0] / "whole", tmp_path / "run")
    (run / "indexes.parquet").write_bytes(b"PAR1" * 10)
    with pytest.raises(RequestError, match=r"indexes\.parquet: cannot be read"):
        _ = mtem.load(run).indexes


def test_files_have_the_permissions_that_the_umask_leaves(runs, tmp_path):
    before = os.umask(0o027)
    try:
        mtem.adapt(**runs[1], output=tmp_path / "run")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert len(modes) > 8 and set(modes.values()) == {0o640}, modes
