"""Signs of life: a process that gives none is noticed, while the others need it."""

from __future__ import annotations

import threading

import pytest

from mtem import liveness
from tests.processes import wait_for


class Store:
    """A store in which one other process counts until it is gone."""

    def __init__(self, lives, fails=False):
        self.lives, self.fails, self.count = lives, fails, 0

    def clone(self):
        return self

    def add(self, name, number):
        if self.fails:
            raise RuntimeError("Broken pipe")
        self.count += self.lives or name == "alive-0"
        return self.count if self.lives or name == "alive-0" else 0


@pytest.mark.parametrize(
    ("store", "needed", "reason"),
    [
        (Store(lives=False), True, "process 2 of 2 gave no sign of life for 0 s"),
        (Store(lives=True, fails=True), True, "the place where they meet does not answer"),
        (Store(lives=True), True, None),
        (Store(lives=False), False, None),
    ],
)
def test_a_process_without_a_sign_of_life_is_noticed(monkeypatch, store, needed, reason):
    reasons, looked = [], threading.Event()

    def leave(text):
        reasons.append(text)
        liveness.end()

    def is_needed():
        looked.set()
        return needed

    monkeypatch.setattr(liveness, "_leave", leave)
    monkeypatch.setattr(liveness, "INTERVAL", 0.01)
    monkeypatch.setattr(liveness, "PATIENCE", 0.05)
    monkeypatch.setattr(liveness, "LAST_WORD", 0.05)
    thread = liveness.watch(store, 0, 2, is_needed)
    if reason is None:
        if not needed:
            wait_for(looked.is_set, "a look at the others")
        else:
            wait_for(lambda: store.count > 30, "signs of life")
        liveness.end()
    thread.join()
    assert reasons == ([reason] if reason else [])
