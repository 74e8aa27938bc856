"""`mtem cost`: rows, errors, and what it refuses. No timing is asserted."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from mtem.cli.main import app
from mtem_paper import cost
from tests.conftest import make_encoder

ENGINES = "plain; layerwise; layerwise, 2 microbatches; layerwise, v at theta; forward; taylor; second-order"
KEYS = ("device", "model", "batch", "length", "precision", "attention", "seconds", "time_ratio", "memory_ratio", "torch", "seed")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("cost")
    given = ["cost", "--model", str(make_encoder(path / "encoder")), "--batch", "3", "--length", "8", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "apart", cost.row_of)  # a process for each row is for the sake of its memory alone
        done = CliRunner().invoke(
            app,
            [
                *given,
                "--repeats",
                "1",
                "--engines",
                ENGINES,
                "--json",
                str(path / "rows.json"),
                "--figure",
                str(path / "cost.svg"),
            ],
        )
    assert done.exit_code == 0, done.output
    assert (path / "cost.svg").read_text().startswith("<?xml") and "milliseconds" in (path / "cost.svg").read_text()
    return json.loads((path / "rows.json").read_text()), done.output


def test_every_row_has_what_it_must(rows):
    found, shown = rows
    assert [row["engine"] for row in found][:2] == ["plain", "layerwise"]
    for row in found:
        for key in (
            "device",
            "model",
            "batch",
            "length",
            "precision",
            "attention",
            "seconds",
            "time_ratio",
            "memory_ratio",
            "torch",
        ):
            assert row[key] is not None, (row["engine"], key)
        assert row["seconds"] > 0 and row["engine"].split(",")[0] in shown
    assert found[0]["time_ratio"] == 1.0


def test_the_exact_engines_are_exact_and_the_others_say_how_far_off_they_are(rows):
    by_engine = {row["engine"]: row for row in rows[0]}
    for name in ("layerwise", "forward", "second-order"):
        assert by_engine[name]["relative_error"] < 1e-4 and by_engine[name]["cosine"] > 0.99999
    assert by_engine["taylor"]["relative_error"] > by_engine["forward"]["relative_error"]
    assert 1e-7 < by_engine["layerwise, v at theta"]["relative_error"] < 0.1


def test_settings_that_save_memory_have_rows_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "apart", cost.row_of)
    given = [
        "--model",
        str(make_encoder(tmp_path / "encoder")),
        "--batch",
        "5",
        "--length",
        "8",
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    given += ["--engines", "layerwise;second-order", "--microbatches", "2", "--activation-checkpointing"]
    done = CliRunner().invoke(app, ["cost", *given, "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "rows.json").read_text())
    saving = ", microbatches=2, activation_checkpointing"
    assert [row["engine"] for row in found] == ["plain", f"plain{saving}", f"layerwise{saving}", f"second-order{saving}"]
    assert found[0]["time_ratio"] == 1.0 and all(row["memory_ratio"] and row["time_ratio"] for row in found)
    assert all(row["relative_error"] < 1e-4 for row in found[2:]), "against second order"
    assert [row["microbatches"] for row in found] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--engines", "magic"], "expected some of plain; layerwise"),
        (["--batch", "ten"], "whole numbers"),
        (["--batch", "1"], "at least 2"),
    ],
)
def test_wrong_requests(given, message):
    done = CliRunner().invoke(app, ["cost", "--device", "cpu", *given])
    assert message in str(done.exception)


def test_a_shape_is_drawn_without_any_weights_at_hand():
    case = cost.Case("plain", 2, 8, "minilm", "cpu", "fp32", "sdpa")
    model = cost.make_model(case)
    assert model.network.config.num_hidden_layers == 6 and model.classes == ("LABEL_0", "LABEL_1")


def test_a_figure_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cost, "measure", lambda *_: pytest.fail("measured"))
    done = CliRunner().invoke(app, ["cost", "--device", "cpu", "--figure", str(tmp_path / "cost.svg")])
    assert "pip install 'mtem[figures]'" in str(done.exception)
