"""The run directory: its files, what may be written where, and what is left after a run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtem.errors import RequestError
from mtem.run.directory import SOURCE, RunDirectory
from mtem.selection.left_out import DOMAIN, LeftOut


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "run")
    made.start({"status": "running"})
    return made


def left_out(seed=0):
    draw = np.random.default_rng(seed)
    logits, labels = draw.normal(size=(7, 2)), draw.integers(2, size=7)
    return LeftOut(DOMAIN, "books", logits, labels, logits[:3], labels[:3], logits)


def test_a_free_folder_is_accepted(tmp_path):
    RunDirectory(tmp_path / "new").check_available(resume=False)
    RunDirectory(tmp_path / "new").check_available(resume=True)
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "empty").check_available(resume=False)


def test_an_occupied_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="is a file; --output expects a folder"):
        RunDirectory(tmp_path / "file").check_available(resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(RequestError, match="is not empty; give another --output"):
        RunDirectory(tmp_path / "other").check_available(resume=False)
    with pytest.raises(RequestError, match="holds no run to resume"):
        RunDirectory(tmp_path / "other").check_available(resume=True)
    (tmp_path / "other" / "run.json").write_text("{}")
    with pytest.raises(RequestError, match="holds another run"):
        RunDirectory(tmp_path / "other").check_available(resume=False)
    RunDirectory(tmp_path / "other").check_available(resume=True)


def test_the_record_must_be_an_object(directory):
    assert directory.has_record() and directory.read_record() == {"status": "running"}
    directory.record_path.write_text("[1]")
    with pytest.raises(RequestError, match="expected an object, got a list; give the --output folder"):
        directory.read_record()


def test_history_is_appended_and_cut_back_to_a_checkpoint(directory):
    directory.append_history({"step": 1})
    size = directory.history_size()
    directory.append_history({"step": 2})
    directory.truncate_history(size)
    assert [json.loads(line) for line in directory.history_path.read_text().splitlines()] == [{"step": 1}]
    directory.truncate_history(10**9)
    assert directory.history_size() == size
    directory.truncate_history(0)
    assert directory.history_size() == 0


def test_only_the_best_weights_of_one_step_stay(directory):
    for step in (4, 8):
        directory.write_weights(f"best-{step}", {"w": torch.full((2,), float(step))})
    directory.write_weights(SOURCE, {"w": torch.zeros(2)})
    directory.keep_best({8, 0})
    assert not directory.weights_path("best-4").exists()
    assert directory.read_weights("best-8", {"w": torch.zeros(2)})["w"].tolist() == [8.0, 8.0]
    directory.remove_intermediate()
    assert [path.name for path in directory.workspace.iterdir()] == ["source.safetensors"]


def test_left_out_logits_come_back(directory):
    directory.write_left_out_part(0, left_out())
    assert directory.has_left_out_part(0) and not directory.has_left_out_part(1)
    one = directory.read_left_out_part(0, DOMAIN, "books")
    np.testing.assert_array_equal(one.logits, left_out().logits)
    directory.write_left_out([left_out(), left_out(1)])
    both = directory.read_left_out([{"kind": DOMAIN, "name": "books"}, {"kind": DOMAIN, "name": "dvd"}])
    assert [each.name for each in both] == ["books", "dvd"]
    np.testing.assert_array_equal(both[1].labels, left_out(1).labels)
    assert directory.read_left_out([]) == []


def test_left_out_logits_are_checked(directory, caplog):
    directory.write_left_out_part(0, left_out())
    path = directory.weights_path("left-out-0")
    tensors = load_file(path)
    for damaged in (
        {}, {**tensors, "0.labels": tensors["0.labels"].double()}, {**tensors, "0.labels": tensors["0.labels"] + 7},
        {**tensors, "0.logits": tensors["0.logits"][:-1]}, {**tensors, "0.logits": tensors["0.logits"] * float("inf")},
        {**tensors, "0.held_out_logits": tensors["0.held_out_logits"][0]},
    ):  # fmt: skip
        save_file(damaged, path)
        shutil.copy(path, directory.left_out_path)
        caplog.clear()
        assert directory.read_left_out_part(0, DOMAIN, "books") is None
        assert str(path) in caplog.text and "it is computed again" in caplog.text
        with pytest.raises(RequestError, match=r"left-out\.safetensors: does not hold what its run says"):
            directory.read_left_out([{"kind": DOMAIN, "name": "books"}])


def test_a_run_in_memory_writes_no_record_and_no_weights(tmp_path):
    made = RunDirectory(None, tmp_path)
    made.start({"status": "running"})
    made.write_record({"status": "running"})
    made.append_history({"step": 1})
    made.write_weights(SOURCE, {"w": torch.zeros(1)})
    assert not made.persistent and not made.has_record() and list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no output folder"):
        _ = made.record_path
    with pytest.raises(ValueError, match="a path or a workspace"):
        RunDirectory(None)
