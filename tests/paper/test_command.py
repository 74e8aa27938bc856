"""The command `mtem reproduce`."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from mtem.cli import main
from mtem.errors import RequestError
from mtem_paper import runner
from mtem_paper.protocol import DATASETS
from tests.paper.tiny import TINY, write_method


def command(*words):
    return CliRunner().invoke(main.app, ["reproduce", *map(str, words)])


def test_list_says_what_is_there_and_runs_nothing(ran, encoder):
    folder, found, _ = ran
    words = ["general", "--model", encoder, "--model-name", "tiny", "--results", folder, "--seeds", "0", "--targets", "kitchen"]
    words += ["--settings", "unsupervised", "--pools", "natural", "--variants", "out,cst", "--list"]
    told = command(*words, *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}")))
    assert told.exit_code == 0 and "1 of 2 cells exist" in told.output
    assert f"exists  {found[0].address}" in told.output and "missing cells/amazon/tiny/unsupervised/natural/cst-" in told.output
    assert "0 of 2 cells" in command(*words).output, "rehearsals are no results"


def test_the_command_says_what_is_wrong(amazon, tmp_path):
    def refused(*words):
        told = command(*words)
        assert isinstance(told.exception, RequestError), told.output
        return str(told.exception)

    assert "mtem data prepare amazon" in refused("general")
    assert "expected one of general, ablation" in refused("table-1")
    assert "--seeds 0,x" in refused("general", "--seeds", "0,x")
    assert "unknown data set 'imdb'" in refused("general", "--dataset", "imdb")
    assert "nothing to run" in refused("batch-size", "--dataset", "pheme")
    assert "no such directory" in refused("general", "--data", amazon, "--model", tmp_path / "nothing", "--model-name", "x")


def test_a_failed_cell_makes_the_command_fail(amazon, encoder, tmp_path):
    broken = write_method(tmp_path, "broken", "raise ValueError('no such luck')")
    words = ["general", "--data", amazon, "--model", encoder, "--results", tmp_path / "r", "--seeds", "0", "--targets", "dvd"]
    words += ["--settings", "unsupervised", "--pools", "natural", "--variants", broken, "--device", "cpu", "-q"]
    told = command(*words, *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}")))
    assert told.exit_code == 1 and "1 failed" in told.output and "no such luck" in told.output


def test_a_page_that_cannot_be_drawn_is_refused_before_anything_is_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("run"))
    for what in ("page", "all"):
        told = command(what, "--results", tmp_path, "--docs", tmp_path)
        assert "pip install 'mtem[figures]'" in str(told.exception)


def test_the_default_model_is_that_of_the_data_set(tmp_path):
    for dataset, about in DATASETS.items():
        told = command("general", "--dataset", dataset, "--results", tmp_path, "--seeds", "0", "--list")
        assert f"cells/{dataset}/{about.default_model}/" in told.output
