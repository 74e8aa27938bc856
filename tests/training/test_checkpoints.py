"""Checkpoints: the newest two are kept, whatever happens while the next is written, and a damaged one is passed over."""

import errno
import json
import logging
import shutil

import pytest
import torch

from mtem import atomic, tensors
from mtem.errors import RequestError, RunError
from mtem.training.checkpoints import Checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def record(done):
    entry = {"step": 0, "score": 0.5, "infomax": 0.5}
    return {"stage": "adapt", "done": done, "candidates": [entry], "seconds": {"adapt": 1.5}, "history": 10}


def write(checkpoints, step):
    checkpoints.write(f"step-{step}", {"weight": torch.full((2,), float(step))}, record(step))


def test_the_newest_two_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    (tmp_path / "source.safetensors").write_text("not a checkpoint")
    (tmp_path / "step-abc").mkdir()
    for step in (8, 9, 10, 10):
        write(checkpoints, step)
        assert names(tmp_path) == sorted(["source.safetensors", *{f"step-{max(8, step - 1)}", f"step-{step}"}, "step-abc"])
    found = checkpoints.newest()
    assert found.path.name == "step-10" and found.tensors["weight"].tolist() == [10.0, 10.0] and found.record == record(10)
    checkpoints.clear()
    assert checkpoints.newest() is None and names(tmp_path) == ["source.safetensors", "step-abc"]


def test_newest_counts_by_number(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 9):
        write(checkpoints, step)
    assert checkpoints.newest().record == record(10)


def damage_tensors(content):
    return lambda folder: (folder / "tensors.safetensors").write_bytes(content((folder / "tensors.safetensors").read_bytes()))


def damage_record(content):
    return lambda folder: (folder / "record.json").write_text(content(json.loads((folder / "record.json").read_text())))


def rewrite_tensors(**values):
    return lambda folder: tensors.write_tensors(folder / "tensors.safetensors", values)


def flipped(content):
    return content[:-3] + bytes([content[-3] ^ 0xFF]) + content[-2:]


DAMAGES = {
    "empty": damage_tensors(lambda content: b""),
    "cut off": damage_tensors(lambda content: content[:-3]),
    "garbage": damage_tensors(lambda content: b"\xff" * 500),
    "one byte": damage_tensors(flipped),
    "missing": lambda folder: (folder / "tensors.safetensors").unlink(),
    "a folder": lambda folder: ((folder / "tensors.safetensors").unlink(), (folder / "tensors.safetensors").mkdir()),
    "not finite": rewrite_tensors(weight=torch.tensor([1.0, float("nan")])),
    "no record": lambda folder: (folder / "record.json").unlink(),
    "a list": damage_record(lambda value: "[]"),
    "null": damage_record(lambda value: "null"),
    "brackets": damage_record(lambda value: "[" * 100_000),
    "no stage": damage_record(lambda value: json.dumps({**value, "stage": None})),
    "true as a step": damage_record(lambda value: json.dumps({**value, "done": True})),
    "a huge step": damage_record(lambda value: json.dumps({**value, "done": 10**30})),
    "4,000 digits and more": damage_record(lambda value: json.dumps(value).replace('"history": 10', '"history": ' + "1" * 5000)),
    "a bad candidate": damage_record(lambda value: json.dumps({**value, "candidates": [[]]})),
    "infinite": damage_record(lambda value: json.dumps({**value, "seconds": {"adapt": float("inf")}})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_older_one_is_taken(tmp_path, damage, caplog):
    checkpoints = Checkpoints(tmp_path)
    for step in (8, 9):
        write(checkpoints, step)
    DAMAGES[damage](tmp_path / "step-9")
    with caplog.at_level(logging.WARNING, logger="mtem"):
        assert checkpoints.newest().record == record(8)
    (message,) = caplog.messages
    assert str(tmp_path / "step-9") in message and message.endswith("the run goes on from step-8") and "\n" not in message
    write(checkpoints, 5)  # the damaged one must not stay the newest
    assert names(tmp_path) == ["step-5", "step-8"]


def test_without_a_good_checkpoint_the_run_starts_anew(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 9)

    def refuse(found):
        raise RequestError(f"{found.path}: no")

    assert checkpoints.newest(refuse) is None
    assert caplog.messages == [f"{tmp_path / 'step-9'}: no; the run starts from the beginning"]


def test_unfinished_checkpoint_is_ignored_then_removed(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_remove", lambda path: None)  # a killed process tidies nothing
        with pytest.raises(ValueError):
            checkpoints.write("step-6", {"weight": torch.ones(1)}, {"loss": float("nan")})
    assert len(names(tmp_path)) == 2 and checkpoints.newest().record == record(5)
    atomic.clear_parts(tmp_path)
    assert names(tmp_path) == ["step-5"]


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    shutil.move(tmp_path / "step-5", tmp_path / ".step-5.0123456789ab.old")
    (tmp_path / ".step-5.0123456789ab.part").mkdir()
    assert atomic.clear_parts(tmp_path) == [tmp_path / ".step-5.0123456789ab.part"]
    assert names(tmp_path) == ["step-5"] and checkpoints.newest().record == record(5)


def test_failed_checkpoint_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(RunError, match="step-6: the disk is full"):
        write(checkpoints, 6)
    assert names(tmp_path) == ["step-5"] and checkpoints.newest().record == record(5)
