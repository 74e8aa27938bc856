"""benchmarks/peers.py: the other libraries take our step, and the command does without them. No timing is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtem_paper import cost
from tests.processes import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"
# A rate at which the virtual step matters; betty differentiates around its end, so it agrees where the step is small.
RATES = {"higher": 0.5, "torchopt MetaSGD": 0.5, "betty darts": cost.RATE}
TOLERANCES = {"higher": 1e-4, "torchopt MetaSGD": 1e-4, "betty darts": 5e-3}


def load_script():
    specification = importlib.util.spec_from_file_location("peers", SCRIPT)
    module = sys.modules["peers"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


peers = load_script()


def make(engine: str, encoder: Path):
    return peers.make(cost.Case(engine, 6, 8, str(encoder), "cpu", "fp32", "sdpa"), torch.device("cpu"))


def taken(bench):
    """One step: the index gradient, the indexes after it, and the gradient that reached the optimizer."""
    found = {}

    def look(*_) -> None:
        found.update({name: value.grad.clone() for name, value in bench.method.model.trainable().items()})

    handle = bench.trainer.optimizer.register_step_pre_hook(look)
    bench.step()
    handle.remove()
    return bench.method.gradient, bench.method.index.clone(), torch.cat([value.flatten() for value in found.values()])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(params=sorted(peers.PEERS))
def peer(request):
    pytest.importorskip(peers.PEERS[request.param].module)
    reason = peers.PEERS[request.param].missing()
    if reason:
        pytest.skip(reason)
    return request.param


def test_a_peer_takes_our_step(peer, encoder, monkeypatch):
    monkeypatch.setattr(cost, "RATE", RATES[peer])
    gradient, index, update = taken(make(peer, encoder))
    for engine in ("second-order", "layerwise"):
        our_gradient, our_index, our_update = taken(make(engine, encoder))
        assert error(gradient, our_gradient) < TOLERANCES[peer]
        assert torch.allclose(index, our_index, atol=1e-5) and not torch.equal(index, torch.full_like(index, 2.0))
        assert error(update, our_update) < 1e-4


def test_the_rate_of_these_tests_tells_the_virtual_step_from_none(encoder, monkeypatch):
    monkeypatch.setattr(cost, "RATE", RATES["higher"])
    exact, *_ = taken(make("second-order", encoder))
    assert error(taken(make("layerwise, v at theta", encoder))[0], exact) > 100 * TOLERANCES["higher"]


def test_a_peer_leaves_the_model_fit_for_the_next_step(peer, encoder):
    other, ours = make(peer, encoder), make("second-order", encoder)
    before = list(other.model.parameters())
    for _ in range(2):
        gradient, _, update = taken(other)
        our_gradient, _, our_update = taken(ours)
    assert all(now is then and now.is_leaf for now, then in zip(other.model.parameters(), before, strict=True))
    assert error(gradient, our_gradient) < 5e-3 and error(update, our_update) < 5e-3


def test_the_rows_are_those_of_cost(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "apart", peers.row_of)  # a process for each row is for the sake of its memory alone
    given = ["--model", str(encoder), "--batch", "3", "--length", "8", "--device", "cpu", "--repeats", "1"]
    wanted = ["plain", "layerwise", "second-order", *peers.PEERS]
    given += ["--rows", ";".join(wanted), "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["peers.py", *given])
    peers.main()
    rows = {row["engine"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == wanted
    assert rows["plain"]["time_ratio"] == rows["plain"]["memory_ratio"] == 1.0
    for name, row in rows.items():
        if "failed" in row:
            assert row["failed"] == "missing" and name in peers.PEERS
            continue
        for key in ("device", "model", "batch", "length", "precision", "attention", "seconds", "time_ratio", "memory_ratio"):
            assert row[key] is not None, (name, key)
        assert row["machine"] and row["seed"] == 0 and row["versions"]["torch"] == torch.__version__
        if name != "plain":
            assert row["cosine"] > 0.999 and row["relative_error"] < 0.05
    assert "second-order" in capsys.readouterr().out


def test_a_peer_that_breaks_is_a_row(encoder, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "higher", type("Broken", (peers.Peer,), {"module": "torch", "package": "torch"}))
    row = peers.row_of(cost.Case("higher", 3, 8, str(encoder), "cpu", "fp32", "sdpa", repeats=1))
    assert row["failed"] == "failed" and "NotImplementedError" in row["reason"]


def test_the_command_does_without_any_of_them(encoder, tmp_path):
    for peer in peers.PEERS.values():  # they may be installed here
        (tmp_path / f"{peer.module}.py").write_text("raise ImportError('not for this test')")
    given = ["--model", encoder, "--batch", "2", "--length", "4", "--device", "cpu", "--repeats", "1"]
    given += ["--rows", ";".join(["plain", *peers.PEERS]), "--json", tmp_path / "rows.json"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *given], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row.get("failed") for row in rows] == [None, "missing", "missing", "missing"]
    assert "pip install -e '.[peers]'" in done.stdout and rows[0]["seconds"] > 0


def test_wrong_requests(monkeypatch, capsys):
    for given, message in ((["--rows", "magic"], "expected some of plain; layerwise"), (["--batch", "1"], "at least 2")):
        monkeypatch.setattr(sys, "argv", ["peers.py", *given])
        with pytest.raises(SystemExit) as stopped:
            peers.main()
        assert stopped.value.code == 2 and message in capsys.readouterr().err
