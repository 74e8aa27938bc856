"""Tables from made-up cells."""

from __future__ import annotations

import dataclasses
import re
import statistics

import numpy as np
import pytest

from mtem_paper import formatting, protocol, tables
from mtem_paper.protocol import DATASETS
from mtem_paper.statistics import Board
from tests.made_up import grid

AMAZON, EVENTS = DATASETS["amazon"].targets, DATASETS["pheme"].targets


def test_only_whole_seeds_are_averaged(few_draws):
    cells = grid({"mtem": 0.9, "out": 0.8, "cst": 0.85, "dann": 0.85})
    cells = [cell for cell in cells if (cell["variant"], cell["target"], cell["seed"]) != ("cst", "dvd", 1)]
    cells += grid({"mtem": 0.9}, seeds=(3,))  # a seed that only one method has
    cells += grid({"mme": 0.99}, ["books"])  # a method that is not finished
    board = Board(cells, protocol.in_group("general"), AMAZON, None)
    assert board.seeds == (0, 1, 2) and board.ran == (0, 1, 2, 3)
    kept = [cell for cell in cells if cell["variant"] == "cst" and cell["seed"] != 1]
    assert board.seeds_of("cst") == board.seeds_of("cst", "books") == (0, 2) and not board.complete("cst", "books")
    assert board.mean("cst") == pytest.approx(statistics.fmean(cell["score"] for cell in kept))
    paired = [cell["score"] for cell in cells if cell["variant"] == "mtem" and cell["seed"] in (0, 2)]
    gain = board.compare("mtem", "cst")
    assert gain.value == pytest.approx(statistics.fmean(paired) - board.mean("cst"))  # over the seeds that both have
    assert board.mean("mme") is None and board.mean("mme", "books") > 0.95 and board.compare("mtem", "mme") is None
    assert board.best() == "mtem" and board.best(but="mtem") not in (None, "mtem")
    text = tables.general("amazon", tables.boards(cells))
    assert "| CST (seed 0, 2) |" in text and "| MME (unfinished) |" in text and "| seeds left out, not complete | 3 |" in text
    with pytest.raises(ValueError, match="two cells"):
        Board([*cells, cells[0]], protocol.in_group("general"), AMAZON, None)


def test_the_seeds_are_those_of_the_source_model_and_mtem(few_draws):
    cells = grid({"mtem": 0.9, "out": 0.8}, seeds=range(5)) + grid({"cst": 0.85, "dann": 0.85, "biat": 0.85}, seeds=(1,))
    cells += grid({"mtem": 0.9}, seeds=(7,))
    board = Board(cells, protocol.in_group("general"), AMAZON, None)
    assert board.seeds == (0, 1, 2, 3, 4) and board.ran == (0, 1, 2, 3, 4, 7)
    text = tables.general("amazon", tables.boards(cells))
    assert "| best method | unfinished |" in text and re.search(r"\| CST \(seed 1\) \|.* \| ≈ \+\.\d+ \[.*\] \|\n", text)
    assert re.search(r"\| MTEM \|.* ± \.\d+ \| \+\.\d+ \[.*\] \|\n", text), "means, though the best is not known yet"


def test_an_unfinished_table_has_its_targets_and_no_winner(few_draws):
    cells = grid({"mtem": 0.9, "out": 0.8, "cst": 0.7}, ["kitchen"]) + grid({"out": 0.8}, ["dvd"], seeds=(0,))
    board = Board(cells, protocol.in_group("general"), AMAZON, None)
    assert board.seeds == (0,) and board.ran == (0, 1, 2)  # the seed with the most cells
    assert board.mean("mtem") is None and board.mean("mtem", "kitchen") is not None
    assert board.best() is None and board.best("kitchen") == "mtem" and board.best("dvd") is None
    text = tables.general("amazon", tables.boards(cells))
    assert (
        "| best method | unfinished |" in text
        and re.search(r"\| Out \| — \| \.\d+ \| — \| \.\d+≈ \|\n", text)  # one seed: nothing is clear
        and "(unfinished)" not in text
    )
    assert "| unfinished |" in tables.headline(tables.boards(cells)).table


def test_oracles_take_no_part(few_draws):
    cells = grid({"out": 0.7, "mtem": 0.75, "mtem-paper": 0.76, "oracle": 0.95}, EVENTS, dataset="pheme")
    board = Board(cells, protocol.in_group("general"), EVENTS, "rumour")
    assert board.best() in ("mtem", "mtem-paper")
    text = tables.general("pheme", tables.boards(cells))
    oracle = next(line for line in text.splitlines() if line.startswith("| *oracle"))
    assert "**" not in oracle and "≈" not in oracle


@pytest.mark.parametrize(
    ("value", "sign", "wanted"),
    [(0.9374, False, ".937"), (1.0, False, "1.000"), (-0.0004, True, "+.000"), (-0.02, True, "-.020"), (0.02, True, "+.020"),
     (None, False, "—"), (float("nan"), False, "—"), (10.5, False, "10.500")],
)  # fmt: skip
def test_digits(value, sign, wanted):
    assert formatting.digits(value, sign=sign) == wanted


def rows_of(text, first):
    """The cells of the table whose header begins with `first`, by the first cell of their row."""
    table = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_ours_is_bold_and_its_equal_marked(few_draws):
    text = tables.general("amazon", tables.boards(grid({"out": 0.6, "cst": 0.85, "mtem": 0.85})))
    rows, figures = rows_of(text, "method"), rows_of(text, "figure")
    best, other = sorted(("CST", "MTEM"), key=lambda name: "**" not in rows[name]["mean"])
    assert rows[best]["mean"].startswith("**.8") and "≈" in rows[other]["mean"]
    assert "≈" not in rows["Out"]["mean"] and "**" not in rows["Out"]["mean"]  # far behind
    over = {name: row["over the best other"].removeprefix("≈ ").split()[0] for name, row in rows.items()}
    assert over[best].startswith("+") and over[best][1:] == over[other][1:] and over["Out"].startswith("-.2")
    assert figures["best method"]["here"].startswith(f"{best} .8")
    assert figures["clearly worse than the best"]["here"] == "Out"
    assert figures["MTEM over Out"] == {
        "figure": "MTEM over Out", "here": rows["MTEM"]["over Out"], "in the paper": "+.039"
    }  # fmt: skip


def test_a_method_of_ones_own_is_a_row_too(few_draws):
    text = tables.general("amazon", tables.boards(grid({"out": 0.7, "mymethod": 0.8})))
    assert "mymethod" in text


def test_marks_are_those_of_a_family(few_draws, monkeypatch):
    """What is clear by itself need not be among others; the interval stays."""
    boards = tables.boards(grid({"out": 0.8, "dann": 0.81, "cst": 0.82, "mtem": 0.9}, size=600))
    board = next(iter(boards.values()))
    p = {"dann": 0.9, "cst": 0.03, "mtem": 0.001}
    plain = board.compare

    def given(variant, other, target=None):
        found = plain(variant, other, target)
        return dataclasses.replace(found, p=p.get(variant if other == "out" else other, 0.5))

    monkeypatch.setattr(board, "compare", given)
    column = tables.over(board, "out")
    assert [round(column[name].adjusted, 6) for name in ("dann", "cst", "mtem")] == [0.9, 0.06, 0.003]
    assert column["mtem"].clear and not column["cst"].clear and given("cst", "out").clear
    lines = tables.general("amazon", boards).splitlines()
    assert formatting.difference(column["cst"]).startswith("≈ ") and formatting.difference(column["cst"])[
        2:
    ] == formatting.difference(given("cst", "out"))
    assert f"| {formatting.difference(column['cst'])} |" in "\n".join(lines)
    assert tables.headline(boards)[1:4] == (1, 1, 0)  # there it is the only comparison


def test_families_count_what_they_say(few_draws):
    rows = {"out": 0.7, "out-as-is": 0.5, "dann": 0.75, "mtem": 0.8, "mtem-as-is": 0.55, "oracle": 0.9}
    boards = tables.boards(grid(rows, EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    assert set(tables.over(board, "out")) == set(rows) - {"out"}
    assert set(tables.behind(board, "mtem")) == set(rows) - {"mtem", "oracle"}
    by_target = tables.behind_by_target(board)
    assert len(by_target) == 4 * (len(rows) - 2) and not any(variant == "oracle" for variant, _ in by_target)
    assert len(tables.gains(boards)) == 2


def test_one_seed_tells_nothing_for_sure(few_draws):
    cells = grid({"out": 0.6, "cst": 0.7, "mtem": 0.9}, seeds=(4,)) + grid({"mtem-without-meta": 0.5}, seeds=(4,))
    boards = tables.boards(cells)
    text = tables.general("amazon", boards)
    figures = rows_of(text, "figure")
    assert figures["clearly worse than the best"]["here"] == "none" and figures["MTEM over Out"]["here"].startswith("≈ +")
    assert figures["seeds"]["here"] == "4" and "smallest clear difference" not in text
    headline = tables.headline(boards)
    assert (headline.better, headline.worse) == (0, 0) and "| none |" in headline.table
    assert rows_of(tables.ablation(cells), "method")["w/o M: one index"]["over MTEM"].startswith("≈ -.")


def test_what_few_seeds_cannot_show(few_draws):
    boards = tables.boards(grid({"out": 0.8, "cst": 0.81, "mtem": 0.9}))
    board = next(iter(boards.values()))
    middle = statistics.median(board.reach(variant, "out", 0.05 / 2) for variant in ("cst", "mtem"))
    wanted = f"| smallest clear difference from Out, median of 2 comparisons | {formatting.digits(middle)} |"
    assert wanted in tables.general("amazon", boards)


def test_rows_are_compared_with_the_source_model_that_was_corrected_alike(few_draws):
    rows = {"out": 0.8, "out-as-is": 0.5, "mtem": 0.85, "mtem-as-is": 0.6, "mtem-paper": 0.55}
    boards = tables.boards(grid(rows, EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    lines = [[cell.strip() for cell in line.split("|")] for line in tables.general("pheme", boards).splitlines()]
    header = next(line for line in lines if "over Out" in line)
    over = {line[1]: line[header.index("over Out")] for line in lines if len(line) == len(header)}
    for name, variant, other in (
        ("MTEM", "mtem", "out"), ("MTEM (uncorrected)", "mtem-as-is", "out-as-is"), ("Out (uncorrected)", "out-as-is", "out"),
        ("MTEM (paper's settings)", "mtem-paper", "out-as-is"),
    ):  # fmt: skip
        assert over[name].removeprefix("≈ ") == formatting.difference(board.compare(variant, other)).removeprefix("≈ ")
    short = tables.headline(boards)
    assert (short.comparisons, short.better) == (2, 2)
    plain = next(line for line in short.table.splitlines() if "no class shares assumed" in line)
    assert plain.count("MTEM (uncorrected) .") == 1 and formatting.difference(board.compare("mtem-as-is", "out-as-is")) in plain
    assert short.best == 2  # of its own kind each


def test_shares_that_are_called_rumours(few_draws):
    cells = grid({"out": 0.8, "mtem": 0.85}, EVENTS, dataset="pheme")
    text = tables.general("pheme", tables.boards(cells))
    called = np.mean([cell["predictions"].count("1") / len(cell["predictions"]) for cell in cells if cell["variant"] == "out"])
    more = text[text.index("More of our runs") :].splitlines()
    header, row = ([cell.strip() for cell in line.split("|")] for line in (more[2], more[4]))
    assert row[1] == "Out" and row[header.index("called rumours")] == formatting.digits(called)


def test_main_figures_beside_the_papers(few_draws):
    boards = tables.boards(grid({"out": 0.8, "mtem": 0.82, "oracle": 0.82}))
    board = next(iter(boards.values()))
    figures = rows_of(tables.general("amazon", boards), "figure")
    assert figures["Out"]["here"] == formatting.digits(board.mean("out")) and figures["Out"]["in the paper"] == ".898"
    assert figures["MTEM, gain if target labels chose the weights"]["here"] == ".010"
    assert not any("uncorrected" in name for name in figures)
    rows = {
        "out": 0.8,
        "out-as-is": 0.5,
        "mtem": 0.82,
        "mtem-as-is": 0.6,
        "mtem-paper": 0.5,
        "oracle": 0.85,
        "oracle-as-is": 0.95,
    }
    boards = tables.boards(grid(rows, EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    figures = rows_of(tables.general("pheme", boards), "figure")
    assert figures["Out (uncorrected)"]["here"] == formatting.digits(board.mean("out-as-is"))
    assert figures["Out (uncorrected)"]["in the paper"] == ".441"
    for name, variant, other in (
        ("*oracle (uncorrected)* over Out (uncorrected)", "oracle-as-is", "out-as-is"),
        ("Out over Out (uncorrected)", "out", "out-as-is"),
        ("MTEM (uncorrected) over Out (uncorrected)", "mtem-as-is", "out-as-is"),
    ):
        assert figures[name]["here"].removeprefix("≈ ") == formatting.difference(board.compare(variant, other)).removeprefix("≈ ")


def test_batch_sizes_by_engine(few_draws):
    cells = grid({"mtem-taylor-10": 0.6, "mtem-taylor-50": 0.9, "mtem-layerwise-60": 0.9}, ["kitchen"])
    cells = [cell for cell in cells if (cell["variant"], cell["seed"]) != ("mtem-layerwise-60", 2)]
    rows = rows_of(tables.batch_sizes(cells), "engine")
    mean = statistics.fmean(cell["score"] for cell in cells if cell["variant"] == "mtem-taylor-10")
    assert rows["taylor, ours"]["10"].startswith(f"{formatting.digits(mean)} ± ") and rows["taylor, ours"]["20"] == "not run"
    assert rows["layerwise, ours"]["60"].endswith("(seed 0, 1)")
    assert rows["second-order, the paper"]["40"] == ".927" and rows["second-order, the paper"]["50"] == "—"
    assert tables.batch_sizes(grid({"mtem": 0.9})) == formatting.NOT_RUN


def test_ablations(few_draws):
    text = tables.ablation(grid({"mtem": 0.85, "mtem-without-meta": 0.851, "mtem-without-sampling": 0.6}))
    rows = rows_of(text, "method")
    assert list(rows) == ["MTEM", "w/o M: one index", "w/o S: no sampling"]
    assert rows["w/o M: one index"]["over MTEM"].startswith("≈ ") and rows["w/o S: no sampling"]["over MTEM"].startswith("-.2")
    assert "smallest clear difference from MTEM, median of 2 comparisons" in text and "### Table 3" not in text
    assert "| w/o M | .912 | .917 | .919 | .919 | .917 | -.020 |" in text
