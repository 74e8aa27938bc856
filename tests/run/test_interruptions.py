"""Signals, a full disk, a lost file and a second process: each ends in a message, and the run goes on to the same result."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem.cli import main
from mtem.locks import FolderLock

WAIT = 120.0
SETTINGS = {
    "max_length": 16, "batch_size": 10, "source_epochs": 2, "epochs": 3, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
    "evaluations": 3, "frozen_layers": 0, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def request_(encoder, reviews, tmp_path_factory):
    place = tmp_path_factory.mktemp("whole")
    given = {"source": [str(reviews["books"]), str(reviews["dvd"])], "target": str(reviews["kitchen"]), "model": str(encoder)}
    given |= SETTINGS
    mtem.adapt(**given, output=place / "run")
    return given, place / "run"


def arguments(given, output):
    words = ["adapt", "--output", str(output), "--target", given["target"], "--model", given["model"]]
    words += [word for path in given["source"] for word in ("--source", path)]
    return words + [word for name in SETTINGS for word in ("--set", f"{name}={given[name]}")]


def fork(words, errors, prepare=lambda: None):
    """The command in a process of its own, without the imports."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        sys.stdout = sys.stderr = errors.open("w", buffering=1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        prepare()
        sys.argv = ["mtem", *words]
        main.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid):
    deadline = time.monotonic() + WAIT
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the process did not end")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


def wait_for(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_same(one, other):
    for file in ("model/model.safetensors", "checkpoints/source.safetensors"):
        tensors, others = load_file(one / file), load_file(other / file)
        assert tensors.keys() == others.keys() and all(torch.equal(value, others[key]) for key, value in tensors.items()), file


def slow_steps():
    """Time for a signal between two steps, and a mark that one was begun."""
    from mtem.training.trainer import Trainer

    step = Trainer._step

    def slow(self, *batches):
        time.sleep(0.05)
        return step(self, *batches)

    Trainer._step = slow


@pytest.mark.parametrize(
    "name, stage, code, words",
    [("SIGINT", "source", 130, "interrupted"), ("SIGTERM", "adapt", 143, "terminated"), ("SIGHUP", "adapt", 129, "was closed")],
)
def test_a_signal_finishes_the_step_and_saves(request_, tmp_path, name, stage, code, words):
    given, whole = request_
    run, errors = tmp_path / "run", tmp_path / "errors"
    command = [*arguments(given, run), "--set", "log_every=1"]
    pid = fork(command, errors, slow_steps)
    history = run / "history.jsonl"
    wait_for(lambda: history.exists() and f'"stage": "{stage}"' in history.read_text())
    os.kill(pid, getattr(signal, name))
    assert wait(pid) == code, errors.read_text()
    said = errors.read_text()
    assert "finishing the step and saving" in said and "Traceback" not in said
    assert said.splitlines()[-1].startswith("mtem: ") and words in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("the same command with --resume continues")
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    saved = json.loads((newest / "record.json").read_text())
    steps = [json.loads(line) for line in history.read_text().splitlines()]
    assert (saved["stage"], saved["done"]) == (stage, [line for line in steps if line["stage"] == stage][-1]["step"])
    assert not (run / ".lock").exists()
    assert wait(fork([*command, "--resume"], errors)) == 0, errors.read_text()
    assert_same(run, whole)


def test_the_second_run_into_a_folder_is_refused_at_once(request_, tmp_path, command):
    given, _ = request_
    run = tmp_path / "run"
    with FolderLock(run):
        for more in ((), ("--resume",)):
            code, _, errors = command(*arguments(given, run), *more)
            assert code == 2 and f"process {os.getpid()} on " in errors and "is writing to this folder" in errors
        (run / "run.json").write_text("{}")  # it has begun
        code, _, errors = command(*arguments(given, run))
        assert code == 2 and "is writing to this folder" in errors
        (run / "run.json").unlink()
        code, _, errors = command("rehearse", "--source", given["source"][0], "--output", run)
        assert code == 2 and "is writing to this folder" in errors
        assert [path.name for path in run.iterdir()] == [".lock"]


def test_two_processes_at_once_leave_one_whole_run(request_, tmp_path):
    given, whole = request_
    run = tmp_path / "run"
    pids = [fork(arguments(given, run), tmp_path / f"errors-{number}") for number in range(2)]
    assert sorted(wait(pid) for pid in pids) == [0, 2]
    refused = min((tmp_path / f"errors-{number}").read_text() for number in range(2))
    assert "Traceback" not in refused
    assert_same(run, whole)


@pytest.mark.parametrize("limit", [1_000, 250_000])
def test_a_full_disk_leaves_a_run_that_goes_on(request_, tmp_path, limit):
    import resource

    given, whole = request_
    run, errors = tmp_path / "run", tmp_path / "errors"
    command = [*arguments(given, run), "--set", "checkpoint_seconds=0"]

    def full():  # no file may become larger
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    assert wait(fork(command, errors, full)) == 1, errors.read_text()
    said = errors.read_text().splitlines()[-1]
    assert "the disk is full" in said and said.endswith("make room and run again with --resume"), said
    assert not [path for path in run.rglob(".*")]
    assert wait(fork([*command, "--resume"], errors)) == 0, errors.read_text()
    assert_same(run, whole)


def test_a_lost_input_is_named_and_the_run_goes_on_when_it_is_back(request_, tmp_path, command):
    given, whole = request_
    target = tmp_path / "kitchen.jsonl"
    with open(given["target"], "rb") as file:
        target.write_bytes(content := file.read())
    given = {**given, "target": str(target)}

    def stop(line, model):
        if line["stage"] == "adapt":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mtem.adapt(**given, output=tmp_path / "run", observe=stop)
    target.unlink()
    code, _, errors = command(*arguments(given, tmp_path / "run"), "--resume")
    assert code == 2 and f"{target}: no such file" in errors
    target.write_bytes(content)
    mtem.adapt(**given, output=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", whole)


def test_a_read_only_folder_ends_in_a_message(request_, tmp_path, monkeypatch):
    given, whole = request_
    from mtem import atomic

    replace, calls = os.replace, []

    def read_only(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(30, "Read-only file system", str(target))
        replace(source, target)

    monkeypatch.setattr(atomic.os, "replace", read_only)
    with pytest.raises(mtem.RunError, match=r"cannot be written \(Read-only file system\); make the folder writable"):
        mtem.adapt(**given, output=tmp_path / "run")
    monkeypatch.undo()
    mtem.adapt(**given, output=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", whole)
