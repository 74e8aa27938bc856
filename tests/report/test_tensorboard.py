"""The history of a run in TensorBoard's files."""

from __future__ import annotations

import importlib.util

import pytest

from mtem.errors import RequestError
from mtem.report.tensorboard import TensorBoard, require_tensorboard, scalars


def test_every_number_of_a_line_has_a_name():
    line = {
        "stage": "evaluation", "step": 3, "seconds": 1.0, "infomax": 0.5, "target_shares": {"good": 0.25}, "bias": [0.1, -0.1],
        "index_quantiles": [1, 2, 3], "text": "x", "nothing": None, "broken": float("nan"), "flag": True,
    }  # fmt: skip
    assert scalars(line) == {
        "infomax": 0.5, "target_shares/good": 0.25, "bias/0": 0.1, "bias/1": -0.1,
        "index_quantiles/10 %": 1, "index_quantiles/median": 2, "index_quantiles/90 %": 3,
    }  # fmt: skip


def test_what_is_written_can_be_read_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observer = TensorBoard(tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists(), "the run checks first whether its folder is empty"
    for step in (1, 2):
        observer({"stage": "adapt", "step": step, "source_loss": step / 4}, None)
    observer({"stage": "adapt", "source_loss": 9.0}, None)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("adapt/source_loss")] == [(1, 0.25), (2, 0.5)]


def test_without_the_package_the_request_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'mtem\[tensorboard\]'"):
        require_tensorboard()
