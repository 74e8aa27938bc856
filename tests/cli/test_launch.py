"""`mtem adapt --processes`: what happens to the others when one process fails, and how a run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import psutil
import pytest
import torch

import mtem
from mtem import parallel
from mtem.cli import launch
from mtem.errors import RequestError
from tests.processes import content, wait_for
from tests.together import distance

SETTINGS = {
    "max_length": 16, "batch_size": 10, "source_epochs": 0, "steps": 120, "optimizer": "sgd", "learning_rate": 0.02,
    "evaluations": 1, "criterion": "last", "left_out_models": 0, "frozen_layers": 0, "index_mode": "per-text",
    "index_step": "raw", "index_learning_rate": 100.0, "threshold": 0.0, "view": "dropout", "checkpoint_seconds": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def without_dropout(encoder, tmp_path_factory):
    folder = shutil.copytree(encoder, tmp_path_factory.mktemp("without-dropout") / "encoder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_killed_process_ends_the_run_and_one_process_goes_on(without_dropout, reviews, tmp_path):
    data = {"source": [reviews["books"], reviews["dvd"]], "target": reviews["kitchen"], "model": without_dropout}
    options = [f"--set={name}={str(value).lower()}" for name, value in SETTINGS.items()]
    command = [
        sys.executable, "-m", "mtem", "adapt", "--processes", "2", "--output", tmp_path / "run", "--target", data["target"],
        "--model", data["model"], *(part for path in data["source"] for part in ("--source", path)), *options, "--quiet",
    ]  # fmt: skip
    run = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def checkpoint():
        assert run.poll() is None, run.communicate()[1]
        found = [content(path) for path in (tmp_path / "run" / "checkpoints").glob("step-*/record.json")]
        return any(json.loads(text)["done"] > 0 for text in found if text)

    wait_for(checkpoint, "a checkpoint")
    second = next(child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == "1")
    second.send_signal(signal.SIGKILL)
    _, told = run.communicate()
    assert run.returncode == 1
    assert "process 2 of 2 was ended by SIGKILL" in told and "--resume" in told and "Traceback" not in told

    adapted = mtem.adapt(**data, **SETTINGS, output=tmp_path / "run", resume=True)
    whole = mtem.adapt(**data, **SETTINGS)
    weights, wanted = adapted.model.state_dict(), whole.model.state_dict()
    assert max(distance(weights[name].tolist(), wanted[name].tolist()) for name in wanted) < 1e-3
    assert whole.indexes["index"].std() > 0
    assert (adapted.indexes["index"] - whole.indexes["index"]).abs().max() < 1e-2


@pytest.fixture
def scripts(monkeypatch):
    """Instead of mtem, each process runs a script with its rank in `rank`."""

    def replace(script):
        script = f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{script}"
        monkeypatch.setattr(launch, "command", lambda arguments: [sys.executable, "-c", script])
        monkeypatch.setattr(launch, "GRACE", 0.5)

    return replace


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("", 0, None),
        ("if rank == 1: sys.exit('mtem: no such thing')\ntime.sleep(600)", 1, "mtem: process 2 of 2: no such thing"),
        ("if rank == 1: sys.exit(3)\ntime.sleep(600)", 3, "mtem: process 2 of 2: ended with exit code 3"),
        ("sys.exit(2)", 2, None),  # the first process has told why
        ("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", 1, "mtem: process 1 of 2 was ended by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all(scripts, capfd, script, code, message):
    scripts(script)
    assert launch.launch(2, []) == code
    told = capfd.readouterr().err
    assert told.startswith(message) if message else told == ""


def test_signals_reach_all_processes(scripts, tmp_path):
    scripts(f"open(os.path.join({str(tmp_path)!r}, str(rank)), 'w').close()\ntime.sleep(600)")

    def end():
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "both processes")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    assert launch.launch(2, []) == 128 + signal.SIGTERM


def test_numbers_of_processes_that_do_not_fit(monkeypatch, command, tmp_path):
    assert not launch.check_processes(None) and not launch.check_processes(1) and launch.check_processes(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launch.check_processes(2)
    with pytest.raises(RequestError, match="--processes 3: 2 processes were started"):
        launch.check_processes(3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match="2 processes on this machine, but it has 1 GPU:"):
        parallel.start(torch.device("cuda"))
    with pytest.raises(RequestError, match="device mps: several processes"):
        parallel.start(torch.device("mps"))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RequestError, match="has started one process only"):
        launch.check_processes(None)
    monkeypatch.delenv("MASTER_PORT")
    code, _, told = command("adapt", "--source", "a", "--target", "b", "--output", tmp_path, "--rehearse", "--processes", 2)
    assert code == 2 and "'mtem rehearse' first" in told
