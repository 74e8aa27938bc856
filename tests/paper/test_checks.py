"""What runs say of themselves, from made-up cells."""

from __future__ import annotations

import pytest

from mtem_paper import checks
from mtem_paper.checks import honesty, selection
from mtem_paper.protocol import DATASETS
from tests.made_up import grid, make_cell


def estimated(truth, estimate, method="source-only", **changes):
    place = {"dataset": "amazon", "model": "minilm", "pool": "mixed", "setting": "unsupervised", "target": "books", "seed": 0}
    return (
        place
        | {"oracle": False, "method": method, "settings": {}, "metrics": {"accuracy": truth}, "estimate": estimate}
        | changes
    )


def test_estimates_against_the_truth():
    cells = [
        estimated(0.9, {"accuracy": 0.92, "low": 0.89, "high": 0.95, "left_out": 3}),
        estimated(0.8, {"accuracy": 0.74, "low": 0.70, "high": 0.78, "left_out": 3}),
        estimated(0.8, None),
    ]
    found = honesty(cells)
    assert (found.cells, found.inside) == (2, 0.5)
    assert found.error == pytest.approx(0.04) and found.bias == pytest.approx(-0.02) and found.width == pytest.approx(0.07)
    assert honesty([]) is None


def test_estimates_made_before_models_were_left_out_do_not_count():
    made = {"accuracy": 0.8, "low": 0.7, "high": 0.9, "source_model": None}
    assert honesty([estimated(0.8, made), estimated(0.8, made | {"left_out": 0})]) is None
    cells = grid({"out": 0.8, "mtem": 0.8})
    assert checks.without_estimate(cells) == (0, 24) and "| all | 24 |" in checks.estimates(cells)
    for cell in cells[:5]:
        del cell["estimate"]["left_out"]
    assert checks.without_estimate(cells) == (5, 24) and "| all | 19 |" in checks.estimates(cells)


def test_selection_against_the_oracle():
    cell = make_cell()
    better = make_cell(source_score=0.99)
    found = selection([cell, better])
    assert found.target == pytest.approx(found.chosen + 0.01)
    assert found.last == pytest.approx(found.chosen - 0.02)
    assert (found.cells, found.harmed) == (2, 0.5)
    alone = make_cell(search=[{"candidates": [{"step": 0, "criterion_score": 0.1, "score": 0.8}]}])
    assert selection([alone]) is None


def test_estimates_are_told_with_and_without_assumed_shares():
    cells = grid({"out": 0.8, "out-as-is": 0.8, "mtem": 0.8}, DATASETS["pheme"].targets, dataset="pheme")
    for cell in cells:
        wrong = 0.3 if cell["variant"] == "out-as-is" else 0.0
        cell["settings"]["target_class_prior"] = "none" if wrong else "uniform"
        cell["estimate"] |= {key: cell["estimate"][key] - wrong for key in ("accuracy", "low", "high")}
    rows = [line.split(" | ") for line in checks.estimates(cells).splitlines() if "all, " in line]
    assert [(row[1], row[-1]) for row in rows] == [("all, class shares assumed", ".06 |"), ("all, uncorrected", ".06 |")]
    assert [row[-2] for row in rows] == ["100 %", "0 %"]
