"""Storage: whole or not at all, for files, folders, tensors and checkpoints."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from mtem import atomic, tensors
from mtem.atomic import read_json, replaced, write_json
from mtem.errors import RequestError, RunError
from mtem.tensors import read_tensors, write_tensors
from mtem.training.checkpoints import Checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(place, content, folder):
    if folder:
        place.mkdir()
    (place / "inside" if folder else place).write_text(content)


def content(place):
    return (place / "inside" if place.is_dir() else place).read_text()


# Files and folders


@pytest.mark.parametrize("folder", [False, True])
def test_replaced_makes_and_replaces(tmp_path, folder):
    place = tmp_path / "new" / "place"
    for text in ("one", "two"):
        with replaced(place) as temporary:
            assert temporary.parent == place.parent
            fill(temporary, text, folder)
            assert not place.exists() if text == "one" else content(place) == "one"
        assert content(place) == text and names(place.parent) == ["place"]


def test_replaced_folder_keeps_nothing_of_the_old_one(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "old").write_text("old")
    with replaced(tmp_path / "place") as temporary:
        fill(temporary, "new", True)
    assert names(tmp_path / "place") == ["inside"]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_leaves_the_old_content_alone(tmp_path, folder, error):
    place = tmp_path / "place"
    fill(place, "old", folder)
    with pytest.raises(error), replaced(place) as temporary:
        fill(temporary, "new", folder)
        raise error
    assert content(place) == "old" and names(tmp_path) == ["place"]
    with pytest.raises(error), replaced(place):  # before anything is written
        raise error
    assert content(place) == "old" and names(tmp_path) == ["place"]


def test_folder_that_cannot_be_renamed_puts_the_old_one_back(tmp_path, monkeypatch):
    fill(tmp_path / "place", "old", True)
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".part"):
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(PermissionError), replaced(tmp_path / "place") as temporary:
        fill(temporary, "new", True)
    assert content(tmp_path / "place") == "old" and names(tmp_path) == ["place"]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: StorageFull"),
    ],
)
def test_full_disk_is_told(tmp_path, folder, error):
    fill(tmp_path / "place", "old", folder)
    with (
        pytest.raises(RunError, match=r"place: the disk is full; make room and run again$") as caught,
        replaced(tmp_path / "place") as temporary,
    ):
        fill(temporary, "new", folder)
        raise error
    assert "\n" not in str(caught.value)
    assert content(tmp_path / "place") == "old" and names(tmp_path) == ["place"]


def test_files_reach_the_disk_before_their_name(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for write in (lambda: write_json(tmp_path / "a", 1), lambda: write_tensors(tmp_path / "a", {"x": torch.ones(1)})):
        with pytest.raises(RunError, match="the disk is full"):
            write()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "No space left, says nobody"), ValueError("no"), RequestError("No space left")]
)
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(type(error)) as caught, replaced(tmp_path / "place"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("folder", [False, True])
def test_links_are_followed(tmp_path, folder):
    fill(tmp_path / "real", "old", folder)
    (tmp_path / "link").symlink_to("real")
    with replaced(tmp_path / "link") as temporary:
        fill(temporary, "new", folder)
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "real") == "new"
    assert names(tmp_path) == ["link", "real"]


def test_two_writers_and_long_names(tmp_path):
    place = tmp_path / ("ä" * 120)
    with replaced(place) as one, replaced(place) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert place.read_text() == "one" and names(tmp_path) == [place.name]


def test_file_that_a_user_names_needs_its_folder(tmp_path):
    with pytest.raises(RequestError, match="gone does not exist"), atomic.atomic_write(tmp_path / "gone" / "a"):
        pass
    with pytest.raises(RequestError, match="is a folder"), atomic.atomic_write(tmp_path):
        pass
    with atomic.atomic_write(tmp_path / "a") as stream:
        stream.write(b"bytes")
    assert (tmp_path / "a").read_bytes() == b"bytes" and names(tmp_path) == ["a"]


def test_reading_and_writing_data_needs_no_torch():
    code = "import sys, mtem.data.readers, mtem.data.loading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# JSON


def test_json_round_trip(tmp_path):
    value = {"a": [1, 2.5, None, True], "ä": "ö\n"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "ä" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_nan(tmp_path, value):
    write_json(tmp_path / "a.json", "old")
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"loss": value})
    assert read_json(tmp_path / "a.json") == "old" and names(tmp_path) == ["a.json"]


def test_json_that_cannot_be_read(tmp_path):
    with pytest.raises(RequestError, match=r"a\.json: no such file"):
        read_json(tmp_path / "a.json")
    for damaged in (b'{"a": ', b"\xff"):
        (tmp_path / "a.json").write_bytes(damaged)
        with pytest.raises(RequestError, match=r"a\.json: not valid JSON"):
            read_json(tmp_path / "a.json")


# Tensors


def test_tensors_round_trip(tmp_path):
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "plain": base,
        "shared": base,
        "turned": base.t(),
        "part": base[1:, ::2],
        "half": torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "state": torch.get_rng_state(),
        "leaf": torch.nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    found = read_tensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape and torch.equal(found[name], value), name
    assert not found["leaf"].requires_grad and names(tmp_path) == ["a.safetensors"]


# Checkpoints


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
