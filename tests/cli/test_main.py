"""What nobody foresaw: one line and exit code 1; the traceback with --debug."""

from __future__ import annotations

import pytest

from mtem.errors import RequestError
from mtem.run.result import Adapted


class PanicError(BaseException):
    """As libraries in Rust raise it."""


def failing(monkeypatch, error):
    def load(path):
        raise error

    monkeypatch.setattr(Adapted, "load", load)
    return "predict", "run", "file.csv", "--output", "out.csv"


@pytest.mark.parametrize("error", [KeyError("seconds"), PanicError("seconds"), ValueError("seconds\nmore\n")])
def test_one_line(monkeypatch, command, error):
    code, out, err = command(*failing(monkeypatch, error))
    assert code == 1 and out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"mtem: unexpected error: {type(error).__name__}: ") and "seconds" in err and "--debug" in err


def test_out_of_memory(monkeypatch, command):
    code, _, err = command(*failing(monkeypatch, MemoryError()))
    assert code == 1 and err.startswith("mtem: out of memory")


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_prints_the_traceback(monkeypatch, command, place):
    arguments = list(failing(monkeypatch, KeyError("seconds")))
    arguments.insert(place, "--debug")
    code, _, err = command(*arguments)
    assert code == 1 and "Traceback" in err and "in load" in err and "mtem: unexpected error: KeyError" in err


def test_debug_of_a_wrong_request(monkeypatch, command):
    code, _, err = command(*failing(monkeypatch, RequestError("a\nb")), "--debug")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1] == "mtem: a b"


def test_no_option_after_the_end_of_options(monkeypatch, command):
    code, _, err = command("predict", "run", "--output", "out.csv", "--", "--debug")
    assert code == 2 and "Traceback" not in err


def test_an_interruption_is_not_unforeseen(monkeypatch, command):
    code, _, err = command(*failing(monkeypatch, KeyboardInterrupt()))
    assert code == 130 and "unexpected" not in err
