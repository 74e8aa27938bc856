"""Checkpoints: the newest complete one is kept, whatever happens while the next is written."""

import errno
import json
import shutil

import pytest
import torch

from mtem import atomic, tensors
from mtem.errors import RunError
from mtem.training.checkpoints import Checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_checkpoint_is_the_only_one_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    (tmp_path / "source.safetensors").write_text("not a checkpoint")
    for step in (9, 10, 10):
        checkpoints.write(f"step-{step}", {"weight": torch.full((2,), float(step))}, {"step": step})
        assert names(tmp_path) == ["source.safetensors", f"step-{step}"]
    tensors, record = checkpoints.newest()
    assert tensors["weight"].tolist() == [10.0, 10.0] and record == {"step": 10}
    checkpoints.clear()
    assert checkpoints.newest() is None and names(tmp_path) == ["source.safetensors"]


def test_newest_counts_by_number(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a")
    for step in (9, 10):  # as a process leaves them that ends before it removes the older one
        Checkpoints(tmp_path / "b").write(f"step-{step}", {"weight": torch.ones(1)}, {"step": step})
        shutil.copytree(tmp_path / "b" / f"step-{step}", tmp_path / "a" / f"step-{step}")
    assert checkpoints.newest()[1] == {"step": 10}


def test_unfinished_checkpoint_is_ignored_then_removed(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write("step-5", {"weight": torch.ones(1)}, {"step": 5})
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_remove", lambda path: None)  # a killed process tidies nothing
        with pytest.raises(ValueError):
            checkpoints.write("step-6", {"weight": torch.ones(1)}, {"loss": float("nan")})
    assert len(names(tmp_path)) == 2 and checkpoints.newest()[1] == {"step": 5}
    checkpoints.write("step-7", {"weight": torch.ones(1)}, {"step": 7})
    assert names(tmp_path) == ["step-7"]


def test_failed_checkpoint_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write("step-5", {"weight": torch.ones(1)}, {"step": 5})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(RunError, match="step-6: the disk is full"):
        checkpoints.write("step-6", {"weight": torch.ones(1)}, {"step": 6})
    assert names(tmp_path) == ["step-5"]
    assert json.loads((tmp_path / "step-5" / "record.json").read_text()) == {"step": 5}
