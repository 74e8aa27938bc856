"""The lock of a folder: one process at a time; a dead one's is taken over."""

import json
import os
import subprocess
import sys
import time

import pytest

from mtem import locks
from mtem.errors import RequestError, RunError
from mtem.locks import NAME, FolderLock


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_lock(folder, age=0.0, **changes):
    folder.mkdir(exist_ok=True)
    own = {**locks._identity(), "token": "other", **changes}
    (folder / NAME).write_text(json.dumps(own))
    then = time.time() - age
    os.utime(folder / NAME, (then, then))
    return own


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_second_is_refused_at_once_and_told_by_whom(tmp_path):
    with FolderLock(tmp_path / "run"):
        with pytest.raises(RequestError) as refused, FolderLock(tmp_path / "run"):
            pass
        assert f"process {os.getpid()} on " in str(refused.value) and "is writing to this folder" in str(refused.value)
        assert names(tmp_path / "run") == [NAME]
    assert not (tmp_path / "run").exists()  # nothing was written there
    with FolderLock(tmp_path / "above" / "run"):
        pass
    assert names(tmp_path) == []
    with FolderLock(tmp_path / "run"):
        (tmp_path / "run" / "file").write_text("x")
    assert names(tmp_path / "run") == ["file"]


def test_a_live_process_of_this_machine_keeps_its_lock_however_old(tmp_path):
    write_lock(tmp_path, age=10 * locks.STALE)
    with pytest.raises(RequestError, match="is writing"), FolderLock(tmp_path):
        pass


@pytest.mark.parametrize(
    "changes, age",
    [
        ({"pid": "dead"}, 0.0),
        ({"started": "1"}, 0.0),  # its number was given to a new process
        ({"machine": "another", "host": "elsewhere"}, 2 * locks.STALE),
    ],
)
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, changes, age):
    if changes.get("pid") == "dead":
        changes = {"pid": dead_process()}
    write_lock(tmp_path, age, **changes)
    with FolderLock(tmp_path) as lock:
        assert lock._is_own() and names(tmp_path) == [NAME]


@pytest.mark.parametrize("content", ["", "null", "[]", "{", "[" * 100_000, '{"pid": {}}', '{"pid": 10e400}'])
def test_a_damaged_lock_counts_until_it_is_old(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(RequestError, match="is writing to this folder"), FolderLock(tmp_path):
        pass
    then = time.time() - 2 * locks.STALE
    os.utime(tmp_path / NAME, (then, then))
    with FolderLock(tmp_path):
        assert names(tmp_path) == [NAME]


def test_another_machine_keeps_its_lock_while_it_renews_it(tmp_path):
    write_lock(tmp_path, age=locks.STALE / 2, machine="another", host="elsewhere", pid=7)
    with pytest.raises(RequestError, match="process 7 on elsewhere"), FolderLock(tmp_path):
        pass


def test_the_lock_is_renewed_and_a_lost_one_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    with FolderLock(tmp_path) as lock:
        os.utime(lock.path, (1, 1))
        deadline = time.monotonic() + 30
        while lock.path.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 1
        lock.check()
        other = write_lock(tmp_path)
        while not lock._lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RunError, match="another process has taken this folder over"):
            lock.check()
    assert json.loads(lock.path.read_text()) == other  # it is not this process's to remove


def test_a_stale_lock_that_was_renewed_in_the_meantime_is_put_back(tmp_path):
    stale = write_lock(tmp_path, pid=dead_process())
    fresh = write_lock(tmp_path, token="fresh")
    FolderLock(tmp_path)._remove_stale(stale)
    assert json.loads((tmp_path / NAME).read_text()) == fresh and names(tmp_path) == [NAME]


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path / NAME))

    monkeypatch.setattr(locks.os, "open", denied)
    with pytest.raises((RequestError, RunError), match=r"cannot be written.*Permission denied"), FolderLock(tmp_path):
        pass
