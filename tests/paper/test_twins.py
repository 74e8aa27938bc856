"""Runs that stand for two rows."""

from __future__ import annotations

import json

import pytest

from mtem.run.adapt import find_settings
from mtem_paper import cells as cell_files
from mtem_paper import coverage, protocol, statistics, tables, twins
from tests.made_up import make_cell

AMAZON = protocol.DATASETS["amazon"].targets


def run(variant, seed=0, preset="recommended", **changes):
    model = "bigcn" if changes.get("dataset") == "pheme" else "minilm"
    settings = find_settings(model, variant, preset, changes.pop("given", {})).record()
    return make_cell(variant, seed=seed, settings=settings, **changes)


def test_a_run_stands_for_the_other_row_where_that_is_missing():
    cells = [run("mtem", 0), run("fixmatch", 0), run("mtem", 1), run("fixmatch", 2), run("biat", 3)]
    found = twins.fill(cells, twins.TWINS)
    rows = sorted((cell["variant"], cell["seed"], cell.get(twins.RUN_OF)) for cell in found if cell["variant"] != "biat")
    assert rows == [
        ("fixmatch", 0, None), ("fixmatch", 1, "mtem"), ("fixmatch", 2, None),
        ("mtem", 0, None), ("mtem", 1, None), ("mtem", 2, "fixmatch"),
    ]  # fmt: skip
    of_seed = {cell["variant"]: cell for cell in found if cell["seed"] == 1}
    assert of_seed["fixmatch"]["predictions"] == of_seed["mtem"]["predictions"] and of_seed["fixmatch"]["method"] == "fixmatch"
    assert twins.lent(found) == 2 and twins.fill(found, twins.TWINS) == found
    for_tables = twins.fill(cells)
    assert len(for_tables) == 6 and for_tables[-1]["variant"] == "mtem", "no second row of the same runs"


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("mtem", {"preset": "learned"}),
        ("mtem", {"given": {"sampling": True}}),
        ("mtem", {"given": {"index_initial": 2.0}}),
        ("mtem", {"given": {"threshold": 0.9}}),
        ("fixmatch", {"given": {"threshold": 0.9}}),
        ("fixmatch", {"given": {"weight": 0.5}}),
        ("fixmatch", {"preset": "paper"}),
        ("mtem", {"dataset": "pheme", "target": "ferguson"}),
        ("fixmatch", {"dataset": "pheme", "target": "ferguson"}),
        ("fixmatch", {"protocol": 3}),
    ],
)
def test_other_runs_stand_for_themselves(variant, changes):
    cells = [run(variant, **changes)]
    assert twins.fill(cells, twins.TWINS) == cells


def test_time_is_counted_once():
    cells = [run("fixmatch", seconds=3600.0)]
    line = next(row for row in coverage.runs(twins.fill(cells)).splitlines() if "minilm, mixed pool, unsupervised" in row)
    assert "| 2 of " in line and "| 1.0 |" in line


def test_rules_of_today_are_shown_once_runs_of_both_names_together_are_all_there(tmp_path):
    def write(cell):
        name = "-".join(str(cell[key]) for key in ("variant", "seed", "protocol"))
        path = tmp_path / f"cells/amazon/minilm/unsupervised/mixed/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(cell))

    def shown():
        found = cell_files.read(tmp_path, twins.fill).cells
        return sorted((cell["variant"], cell["seed"], cell["protocol"]) for cell in found)

    for seed in (0, 1):
        write(run("mtem", seed, protocol=4))
        write(run("cst", seed, protocol=4))
    write(run("mtem", 0, protocol=5))
    assert {number for *_, number in shown()} == {4}
    write(run("fixmatch", 1, protocol=5))
    assert shown() == [("fixmatch", 1, 5), ("mtem", 0, 5), ("mtem", 1, 5)]


def test_rows_of_the_same_runs_are_the_best_together():
    cells = twins.fill(
        [
            make(variant, seed=seed, target=target, right=right)
            for make, variant, right in ((make_cell, "out", 0.7), (run, "fixmatch", 0.9), (run, "biat", 0.8))
            for seed in (0, 1)
            for target in AMAZON
        ]
    )
    board = statistics.Board(cells, protocol.in_group("general"), AMAZON, None)
    assert board.best() == "fixmatch" and board.all_best() == board.all_best("dvd") == ["fixmatch", "mtem"]
    assert board.all_best(among=["out", "mtem"]) == ["mtem"]
    text = tables.general("amazon", tables.boards(cells))
    assert "| best method | FixMatch, MTEM ." in text
    ours = text.split("The paper's:")[0]
    rows = [line for line in ours.splitlines() if line.startswith(("| FixMatch | ", "| MTEM | "))]
    assert [line.count("**") for line in rows] == [10, 10], "each target and the mean are bold"
