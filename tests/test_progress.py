"""Progress: a bar with figures on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mtem import progress as module
from mtem.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def shown(terminal: bool, **options) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(Console(file=stream, force_terminal=terminal, width=80), **options), stream


def test_elsewhere_a_line_every_ten_seconds_at_most(clock):
    progress, stream = shown(False)
    with progress.stage("adapt", 100):
        for done in range(1, 101):
            clock[0] += 3
            progress.advance(done, {"target loss": 0.123456})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[0] == "adapt 10/100  30 s, 270 s left  target loss 0.123"
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_short_stage_says_nothing_elsewhere(clock):
    progress, stream = shown(False)
    with progress.stage("adapt", 10):
        for done in range(1, 11):
            clock[0] += 0.1
            progress.advance(done)
    assert stream.getvalue() == ""


def test_work_of_unknown_size_is_counted(clock):
    progress, stream = shown(False)
    with progress.stage("predicting", None):
        for done in range(1, 6):
            clock[0] += 6
            progress.advance(1000 * done)
    assert stream.getvalue().splitlines() == ["predicting 2000  12 s", "predicting 4000  24 s"]
    progress, stream = shown(True)
    with progress.stage("predicting", None):
        progress.advance(4096)
    assert "4096/?" in stream.getvalue()


def test_a_terminal_of_80_columns_shows_every_figure():
    progress, stream = shown(True)
    figures = {"temperature": 0.998, "meta loss": 0.693, "target loss": 0.234, "index": "1.05/2.00/4.50"}
    with progress.stage("adapt", 10):
        progress.advance(4, figures)
    text = stream.getvalue()
    assert "adapt" in text and "4/10" in text
    for words in ("temperature 0.998", "meta loss 0.693", "target loss 0.234", "1.05/2.00/4.50"):
        assert words in text, words


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_lets_only_notices_through(terminal, clock):
    progress, stream = shown(terminal, quiet=True)
    with progress.stage("adapt", 10):
        for done in range(1, 11):
            clock[0] += 60
            progress.advance(done, {"loss": 1.0})
    progress.say("resuming")
    progress.notice("[b]three empty texts[/b] dropped " + "x" * 100)
    assert "resuming" not in stream.getvalue() and "adapt" not in stream.getvalue()
    assert "[b]three empty texts[/b] dropped" in stream.getvalue()
    assert stream.getvalue().count("\n") == (3 if terminal else 1)  # on a terminal lines are broken


class Outlook:
    """Says that two minutes less are left with every unit; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list = []

    def begin(self, name):
        self.told.append(name)

    def advance(self, done):
        self.told.append(done)

    def end(self):
        self.told.append("end")

    def left(self):
        return None if self.told[-1] == 0 else 1200 - 120 * self.told[-1]


def test_the_time_left_of_the_whole_run(clock):
    progress, stream = shown(False)
    progress.outlook = Outlook()
    with progress.stage("adapt", 4):
        progress.advance(0)
        for done in (1, 2):
            clock[0] += 30
            progress.advance(done, {"loss": 0.5})
    assert progress.outlook.told == ["adapt", 0, 1, 2, "end"]
    assert stream.getvalue().splitlines() == [
        "adapt 1/4  30 s, 90 s left, whole run: 18 min left  loss 0.5",
        "adapt 2/4  60 s, 60 s left, whole run: 16 min left  loss 0.5",
    ]
    progress, stream = shown(True)
    progress.outlook = Outlook()
    with progress.stage("adapt", 4):
        progress.advance(0)
        assert "whole run" not in stream.getvalue()
        progress.advance(1, {"loss": 0.5})
    assert "whole run: 18 min left" in stream.getvalue() and "loss 0.5" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.3, "0 s"), (89, "89 s"), (91, "2 min"), (1100, "18 min"), (5399, "90 min"), (9000, "2.5 h")]
)
def test_durations_for_people(seconds, text):
    assert module.duration(seconds) == text


def test_a_failing_stage_gives_the_terminal_back():
    progress, stream = shown(True)
    with pytest.raises(ValueError), progress.stage("adapt", 10):
        raise ValueError
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back
    progress.advance(3)
    with progress.stage("again", 2):
        progress.advance(1)
    assert "again" in stream.getvalue()
