"""Atomic writes: files and folders appear complete or not at all."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from mtem import atomic
from mtem.atomic import read_json, replaced, write_json
from mtem.errors import RequestError, RunError
from mtem.tensors import write_tensors


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
