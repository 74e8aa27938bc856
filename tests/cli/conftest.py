"""The command line, called in the process of the tests."""

from __future__ import annotations

import sys

import pytest

from mtem.cli import main


@pytest.fixture
def mtem(monkeypatch, capsys):
    """The command line in this process: (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mtem", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
