"""The page of results from made-up cells: what others published, tables, figures, and what the page says."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mtem.errors import RequestError
from mtem_paper import cases, figures, page, published, tables
from mtem_paper import statistics as comparison
from mtem_paper.bound import bound_table
from mtem_paper.statistics import Board
from tests.made_up import grid, make_cell, save


@pytest.fixture
def few_draws(monkeypatch):
    """What is tested is what the page says, not how sure it is."""
    monkeypatch.setattr(comparison, "DRAWS", 1000)


# ---------------------------------------------------------------------- what others published


def test_printed_means_are_those_of_the_scores_or_corrected():
    for table in published.TABLES:
        for row in table.rows:
            exact = sum(Decimal(str(score)) for score in row.scores) / 4
            assert Decimal(str(row.mean)) == exact.quantize(Decimal("0.001"), ROUND_HALF_UP), (table.number, row.name)
    corrected = {
        (t.number, r.variant, t.setting[0]): r.correction[8:12] for t in published.TABLES for r in t.rows if r.correction
    }
    assert corrected == {
        (1, "cst", "u"): ".598", (1, "mme", "s"): ".567", (1, "mtem", "s"): ".709", (2, "cst", "u"): ".920",
        (4, "mtem-without-meta", "u"): ".916", (4, "mtem-without-annealing", "u"): ".930",
    }  # fmt: skip


def test_claims_of_the_text_are_those_of_the_tables():
    mean = {(table.number, table.setting, row.variant): row.mean for table in published.TABLES for row in table.rows}
    assert mean[1, "unsupervised", "mtem"] - mean[1, "unsupervised", "cst"] == pytest.approx(0.078)
    assert mean[3, "unsupervised", "mtem"] - mean[3, "unsupervised", "mtem-without-meta"] == pytest.approx(0.083)
    assert sum(rumours for rumours, _ in published.EVENT_SIZES.values()) == 1972
    trivial = [round(published.trivial_f1(*published.EVENT_SIZES[event]), 3) for event in published.EVENTS]
    assert trivial == [0.361, 0.398, 0.691, 0.599]
    below = [e for e, t in zip(published.EVENTS, trivial, strict=True) if published.PHEME_UNSUPERVISED.score("out", e) < t]
    assert below == ["ferguson", "ottawashooting", "sydneysiege"]


# ---------------------------------------------------------------------- tables


def test_only_whole_seeds_are_averaged(few_draws):
    cells = grid({"mtem": 0.9, "out": 0.8, "cst": 0.85, "dann": 0.85})
    cells = [cell for cell in cells if (cell["variant"], cell["target"], cell["seed"]) != ("cst", "dvd", 1)]
    cells += grid({"mtem": 0.9}, seeds=(3,))  # a seed that only one method has
    cells += grid({"mme": 0.99}, ["books"])  # a method that is not finished
    board = Board(cells, tables.GENERAL, published.AMAZON, None)
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
    assert "| CST (seed 0, 2) |" in text and "| MME (unfinished) |" in text and "Left out, as not complete: seed 3." in text
    with pytest.raises(ValueError, match="two cells"):
        Board([*cells, cells[0]], tables.GENERAL, published.AMAZON, None)


def test_an_unfinished_table_has_its_targets_and_no_winner(few_draws):
    cells = grid({"mtem": 0.9, "out": 0.8, "cst": 0.7}, ["kitchen"]) + grid({"out": 0.8}, ["dvd"], seeds=(0,))
    board = Board(cells, tables.GENERAL, published.AMAZON, None)
    assert board.seeds == (0,) and board.ran == (0, 1, 2)  # the seed with the most cells
    assert board.mean("mtem") is None and board.mean("mtem", "kitchen") is not None
    assert board.best() is None and board.best("kitchen") == "mtem" and board.best("dvd") is None
    text = tables.general("amazon", tables.boards(cells))
    assert (
        "**Unfinished**: seed 0" in text
        and re.search(r"\| Out \| — \| \.\d+ \| — \| \.\d+≈ \|\n", text)  # one seed: nothing is clear
        and "(unfinished)" not in text
    )
    assert "unfinished |" in tables.headline(tables.boards(cells))


def test_oracles_take_no_part(few_draws):
    cells = grid({"out": 0.7, "mtem": 0.75, "mtem-paper": 0.76, "oracle": 0.95}, published.EVENTS, dataset="pheme")
    board = Board(cells, tables.GENERAL, published.EVENTS, "rumour")
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
    assert tables.digits(value, sign=sign) == wanted


# ---------------------------------------------------------------------- figures


def test_entropy_figure_has_a_curve_for_each_index():
    assert figures.entropy_figure().count("<polyline") == len(figures.ENTROPY_INDEXES)


def test_cost_figure_of_rows_and_of_none():
    engines = ("plain", "taylor", "second-order")
    rows = [{"engine": engine, "batch": size, "seconds": 1.0, "memory": 2**30} for size in (10, 20, 30) for engine in engines]
    del rows[-1]["seconds"], rows[-1]["memory"]  # out of memory
    svg = figures.cost_figure(rows)
    assert svg.count("<polyline") == 2 * 3 and svg.count("stroke-dasharray") == 2 * 2
    assert [engine for engine in engines if f">{engine}<" not in svg] == []
    assert "length 256" in figures.cost_figure([{**row, "length": 128 + 128 * (k % 2)} for k, row in enumerate(rows)])
    assert "no data" in figures.cost_figure([])


def test_trajectories_are_medians_over_runs():
    def history(top):
        return [{"step": step, "index_quantiles": [1.0, middle, 9.0]} for step, middle in ((0, 2.0), (10, top))]

    found = figures._over_cells("", [history(2.0), history(3.0), history(9.0)], lambda point: point["index_quantiles"][1])
    assert (found.ys[0], found.ys[-1]) == (2.0, 3.0) and (found.low[-1], found.high[-1]) == (2.0, 9.0)
    assert len(found.ys) == len(figures.GRID)
    assert figures._over_cells("", [], lambda point: point).ys == [None] * len(figures.GRID)
    assert figures.trajectory_figure(grid({"mtem": 0.9})).count("<polyline") == 1 + 3
    assert "no data" in figures.trajectory_figure([make_cell("out")])


# ---------------------------------------------------------------------- the page


def fill(results: Path) -> None:
    methods = {"out": 0.80, "dann": 0.81, "fixmatch": 0.84, "cst": 0.83, "mtem": 0.85, "mtem-paper": 0.7}
    save(results, *grid(methods))
    save(results, *grid({"out": 0.82, "wind": 0.83, "mtem": 0.86}, setting="semi-supervised"))
    save(results, *grid({name: 0.83 for name in tables.ABLATION if name != "mtem"}))
    save(results, *grid({"out": 0.7, "mtem": 0.75, "oracle": 0.9}, published.EVENTS, dataset="pheme"))
    save(results, *grid({f"mtem-taylor-{size}": 0.8 for size in (10, 50)}, ["kitchen"]))
    peers = [{**cost("betty darts", 50), "cosine": 0.5}, {**cost("higher", 50, None), "failed": "missing"}]
    other = [cost("mtem predict", size) for size in (10, 20, 30)]
    for kind, name, content in (
        ("cost", "gpu", [cost(engine, size) for engine in ("plain", "taylor", "second-order") for size in (10, 50, 60)]),
        ("cost", "few", [cost("layerwise", size) for size in (16, 32)]), ("cost", "peers-gpu", peers),
        ("cost", "predict-cpu", other), ("cost", "growth", {"something": "else"}), ("theory", "convergence", CONVERGENCE),
        ("theory", "bound-kitchen", BOUND), ("cases", "kitchen", made_up_cases()),
    ):  # fmt: skip
        (results / kind).mkdir(exist_ok=True, parents=True)
        (results / kind / f"{name}.json").write_text(json.dumps(content))


def cost(engine, batch, ratio=2.25):
    about = {"model": "minilm", "device": "cuda", "precision": "bf16", "length": 128, "machine": "a card"}
    return {"engine": engine, "batch": batch, "seconds": 0.1, "memory": 1e9, "time_ratio": ratio, "memory_ratio": ratio, **about}


def made_up_cases():
    source, target = ["a film and a story"] * 300, ["a ladle and a lid | bowl"] * 300
    table = pd.DataFrame({"text": [f"{text} {k}" for k, text in enumerate(source[:10] + target[:10])], "prediction": "positive"})
    table["index"], table["confidence"] = np.linspace(1.2, 3.5, 20), np.linspace(0.6, 0.9, 20)
    about = {"target": "kitchen", "model": "minilm", "seed": 0, "chosen_step": 6}
    about["settings"] = {"epochs": 2.0, "steps": None, "batch_size": 5, "index_step": "sign", "index_learning_rate": 0.5}
    return {"cases": cases.cases(table, source, target, count=2), "summary": cases.summary(table, source, target), **about}


STEPS = [1, 10, 100]
CONVERGENCE = {
    "curves": [
        {"name": "theorem-1", "case": "paper", "steps": STEPS, "seed": seed, "values": [1.0, 0.5, 0.2], "exponent": 0.35,
         "interval": [0.3, 0.4], "promised": 1 / 3} | change
        for change in ({}, {"case": "larger", "exponent": 1.87}, {"case": "fixed", "exponent": 1.91})
        for seed in (0, 1, None)
    ],
    "settings": {"model": "a perceptron", "names": {"theorem-1": "a gradient"}, "cases": {"paper": {"k1": 0.005}}},
}  # fmt: skip


TERMS = {"ramp": 0.2, "corrected": 0.5, "printed": 0.3, "index_above_2": 0.4, "ramp_above_doubled": 0.1}
BOUND = {
    "terms": {"source": TERMS, "target": TERMS}, "complexity_at_least": {"source": 0.1, "target": 0.1}, "classes": 2,
    "robustness": [{"radius": 0.1, "R_at_least": 0.2, "least_of_2q_and_R": 1.2}], "least": [{"radius": 0.1, "theorem-3": 2.0}],
    "unknown": {"q, c": "nobody knows"}, "zeta_order": 0.05,
}  # fmt: skip


def test_the_page_says_it_all_and_says_it_twice_alike(tmp_path, few_draws):
    fill(tmp_path / "results")
    page.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs/results.md").read_text()
    first, second = text.splitlines()[0], tmp_path / "again"
    assert "Generated by `mtem reproduce page`" in first
    page.write(tmp_path / "results", second)
    written = sorted(path.relative_to(tmp_path / "docs") for path in (tmp_path / "docs").rglob("*.*"))
    assert written == sorted(path.relative_to(second) for path in second.rglob("*.*"))
    for path in written:
        assert (tmp_path / "docs" / path).read_bytes() == (second / path).read_bytes()
    for link in page_links(text):
        assert (tmp_path / "docs" / link).is_file() or link in ("cost.md", "protocol.md", "errata.md", "#how-to-read-this")
    for wanted in (
        "In+Out", "**.8", "+.039", "printed .598", "published elsewhere", "fitted in log-log", "the largest index, 3.50",
        "**ladle**",
        "as in the paper, texts in the target's own words", "updated 2 times by ± 0.5", "coin in its place would leave 25 %",
        "R ≥ ", "all called rumours", "target labels chosen (oracle)", "truth inside", "layerwise, ours",
        "BiAT", "Seeds 0, 1, 2.", "a = 1.91, beside 1.87", "1,000 times", "after holm's correction",
        "with **one seed** nobody can know",
        "| betty darts | 2.25 | 2.25 | .50000 |", "| higher | missing | missing | — |",
    ):  # fmt: skip
        assert wanted.lower() in " ".join(text.lower().split()), wanted
    assert str(tmp_path) not in text and "mtem predict" not in text
    drawn = {path.stem for path in (tmp_path / "docs/figures").iterdir()}
    assert {name for name in drawn if name.startswith("cost")} == {"cost-gpu"}  # three batch sizes, and an engine's


def test_figures_of_an_earlier_page_go_and_others_stay(tmp_path, few_draws):
    folder = tmp_path / "docs/figures"
    folder.mkdir(parents=True)
    for name in ("cost-old", "theory-old-case", "logo", "costs"):
        (folder / f"{name}.svg").write_text("<svg/>")
    (folder / "cases-old.html").write_text("<html>")
    page.write(tmp_path / "results", tmp_path / "docs")
    assert {path.stem for path in folder.iterdir()} == {"entropy", "logo", "costs"}


def test_the_page_tells_what_is_missing(tmp_path, few_draws):
    save(tmp_path / "results", *grid({"out": 0.8, "mtem": 0.9, "cst": 0.85}, seeds=(0, 1))[:-1])
    save(tmp_path / "results", make_cell("mtem-taylor-10"))
    page.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs/results.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| Amazon") and " of " in line and "hours" not in line)
    general, ablation, sizes = 9, 3, 18  # no WIND: it needs labels
    assert f"| 24 of {3 * (4 * (general + ablation) + sizes)} |" in line
    for wanted in ("seed 2", "DANN", "BiAT", "MTEM (paper's settings)", "ablation,", "batch size (17 of 18 rows)"):
        assert wanted in line
    assert "WIND" not in line and "1 run of CST, 1 run of batch size |" in line and "of MTEM" not in line
    assert "- Not run: the theorems" in text
    begun = next(
        line for line in text.splitlines() if line.startswith("- Not begun: Amazon, minilm, mixed pool, semi-supervised (")
    )
    assert "; Amazon, minilm, natural pool" in begun and "; Amazon, mpnet, mixed pool, unsupervised (72 runs)" in begun
    assert begun.count("mpnet") == 1 and "; PHEME, bigcn, unsupervised (" in begun


def test_of_mpnet_only_the_planned_methods_are_missed(tmp_path, few_draws):
    save(tmp_path / "results", *grid({"out": 0.8, "mtem": 0.9, "biat": 0.9}, seeds=(0, 1, 2), model="mpnet"))
    page.write(tmp_path / "results", tmp_path / "docs")
    line = next(line for line in (tmp_path / "docs/results.md").read_text().splitlines() if "| 24 of 72 |" in line)
    assert "| DANN, FixMatch, CST, *oracle: target labels* |" in line and "ablation" not in line


def page_links(text: str) -> list[str]:
    return [part.split(")")[0] for part in text.split("](")[1:]]


def test_a_page_from_nothing_says_so(tmp_path):
    page.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs/results.md").read_text()
    assert "There are no results of runs yet" in text and "Not run." in text and "mtem reproduce page" in text.splitlines()[0]
    assert (tmp_path / "docs/figures/entropy.svg").is_file()


def test_ours_is_bold_and_its_equal_marked(few_draws):
    cells = grid({"out": 0.6, "cst": 0.85, "mtem": 0.85})
    lines = tables.general("amazon", tables.boards(cells)).splitlines()
    header, *rows = ([cell.strip() for cell in line.split("|")] for line in lines[: lines.index("The paper's:")] if "|" in line)
    means = {row[1]: row[header.index("mean")] for row in rows}
    best, other = sorted(("CST", "MTEM"), key=lambda name: "**" not in means[name])
    assert means[best].startswith("**.8") and "≈" in means[other]
    assert "≈" not in means["Out"] and "**" not in means["Out"]  # far behind
    over = {row[1]: row[header.index("over the best other")].removeprefix("≈ ").split()[0] for row in rows if len(row) > 6}
    assert over[best].startswith("+") and over[best][1:] == over[other][1:] and over["Out"].startswith("-.2")
    said = next(line for line in lines if line.startswith("**Best"))
    assert said.startswith(f"**Best: {best}, .8") and f"cannot be told apart from {other}." in said
    assert "a clear gain; in the paper +.039" in said


def test_a_method_of_ones_own_is_a_row_too(few_draws):
    text = tables.general("amazon", tables.boards(grid({"out": 0.7, "mymethod": 0.8})))
    assert "mymethod" in text


def test_a_score_that_its_predictions_deny_is_refused(tmp_path):
    save(tmp_path, make_cell(score=0.99))
    with pytest.raises(RequestError, match=r"mtem, kitchen, 0: its score is 0.99, its predictions give"):
        page.load(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    save(tmp_path, make_cell())
    file = next(tmp_path.rglob("*.json"))
    file.write_text("{")
    with pytest.raises(RequestError, match=r"mtem-kitchen-0-0.json: not a readable cell"):
        page.write(tmp_path, tmp_path / "docs")


@pytest.mark.parametrize(("turned", "said"), [(1, "As in the paper"), (-1, "Other than in the paper"), (0, "not seen here")])
def test_the_case_study_has_a_verdict(turned, said):
    study = made_up_cases()
    found = study["summary"]["index_and_weight"]
    assert found["interval"][0] > 0
    found["interval"] = {1: found["interval"], -1: [-0.5, -0.1], 0: [-0.1, 0.1]}[turned]
    assert said in page._verdict(study)
    study["summary"]["index_and_weight"] = None
    assert "nothing to tell" in page._verdict(study)
    study["settings"]["steps"] = 6  # 30 texts drawn of 20
    assert "updated 1.5 times; the" in page._verdict(study)


def test_batch_sizes_are_told_beside_the_seeds(few_draws):
    cells = grid({"mtem-taylor-10": 0.6, "mtem-taylor-50": 0.9}, ["kitchen"])
    assert "not less than the seeds" in tables.batch_sizes(cells) and "from .873 to .935" in tables.batch_sizes(cells)
    alike = [
        {**cell, "score": 0.8 + 0.02 * cell["seed"]} for cell in grid({"mtem-taylor-10": 0.8, "mtem-taylor-50": 0.8}, ["kitchen"])
    ]
    assert "engines, less than the seeds" in tables.batch_sizes(alike)


def test_what_the_runs_tell_about_the_paper(few_draws):
    low = tables.general("amazon", tables.boards(grid({"out": 0.8, "mtem": 0.82, "oracle": 0.82})))
    assert "and .898 in the paper, more than a model has here that learned from target labels (.8" in low
    assert "the paper's MTEM, without them, by +.039" in low and "class shares" not in low
    assert "by target labels (the paper does not say how its own were), it would be better by .010 at most" in low
    assert "more than a model" not in tables.general("amazon", tables.boards(grid({"out": 0.6, "mtem": 0.7, "oracle": 0.95})))
    rows = {
        "out": 0.8,
        "out-as-is": 0.5,
        "mtem": 0.82,
        "mtem-as-is": 0.6,
        "mtem-paper": 0.5,
        "oracle": 0.85,
        "oracle-as-is": 0.95,
    }
    boards = tables.boards(grid(rows, published.EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    said = tables.general("pheme", boards)
    assert f"- Out (uncorrected) has {tables.digits(board.mean('out-as-is'))} here and .441 in the paper" in said
    labels = tables.told(board.compare("oracle-as-is", "out-as-is"))
    assert f"changes it by {labels}; the paper's MTEM, without them, by +.217" in said
    shares = tables.told(board.compare("out", "out-as-is"))
    assert f"Assuming even class shares changes it by {shares} before any" in said


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
    assert tables.told(column["cst"]).startswith("≈ ") and tables.told(column["cst"])[2:] == tables.told(given("cst", "out"))
    assert f"| {tables.told(column['cst'])} |" in "\n".join(lines)
    assert "clearly better than Out in 1 and" in tables.headline(boards)  # there it is the only comparison


def test_families_count_what_they_say(few_draws):
    rows = {"out": 0.7, "out-as-is": 0.5, "dann": 0.75, "mtem": 0.8, "mtem-as-is": 0.55, "oracle": 0.9}
    boards = tables.boards(grid(rows, published.EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    assert set(tables.over(board, "out")) == set(rows) - {"out"}
    assert set(tables.behind(board, "mtem")) == set(rows) - {"mtem", "oracle"}
    by_target = tables.behind_by_target(board)
    assert len(by_target) == 4 * (len(rows) - 2) and not any(variant == "oracle" for variant, _ in by_target)
    assert len(tables._gains(boards)) == 2


def test_one_seed_tells_nothing_for_sure(few_draws):
    cells = grid({"out": 0.6, "cst": 0.7, "mtem": 0.9}, seeds=(4,)) + grid({"mtem-without-meta": 0.5}, seeds=(4,))
    boards = tables.boards(cells)
    text = tables.general("amazon", boards)
    said = next(line for line in text.splitlines() if line.startswith("**Best"))
    assert "cannot be told apart from any other" in said and "one seed, so not known; in the paper" in said
    assert "One seed (4): how much training varies is not known" in said and "has to be about" not in said
    assert "MTEM is clearly better than Out in 0" in tables.headline(boards) and "(≈ all others)" in tables.headline(boards)
    assert re.search(r"without learned indexes ≈ -\.\d+ \[.*\], one seed, so not known \(in the paper", tables.ablation(cells))


def test_what_few_seeds_cannot_show(few_draws):
    boards = tables.boards(grid({"out": 0.8, "cst": 0.81, "mtem": 0.9}))
    board = next(iter(boards.values()))
    middle = statistics.median(board.reach(variant, "out", 0.05 / 2) for variant in ("cst", "mtem"))
    wanted = f"With 3 seeds and 2 comparisons, a difference from Out has to be about {tables.digits(middle)} (median"
    assert wanted in tables.general("amazon", boards)


@pytest.mark.parametrize(
    ("near", "after", "level"),
    [(0, 2, ""), (2, 0, " (≈ all others)"), (1, 0, " (≈ n0)"), (2, 3, " (≈ n0, n1)"), (4, 1, " (≈ all but a0)")],
)
def test_who_is_level_with_the_best(near, after, level):
    compared = {f"n{k}": comparison.Difference(0.1, -0.1, 0.3, 0.5, 3) for k in range(near)}
    compared |= {f"a{k}": comparison.Difference(0.1, 0.05, 0.15, 0.001, 3) for k in range(after)} | {"unknown": None}
    assert tables._level(compared, published.AMAZON_UNSUPERVISED) == level


def test_rows_are_compared_with_the_source_model_that_was_corrected_alike(few_draws):
    rows = {"out": 0.8, "out-as-is": 0.5, "mtem": 0.85, "mtem-as-is": 0.6, "mtem-paper": 0.55}
    boards = tables.boards(grid(rows, published.EVENTS, dataset="pheme"))
    board = next(iter(boards.values()))
    lines = [[cell.strip() for cell in line.split("|")] for line in tables.general("pheme", boards).splitlines()]
    header = next(line for line in lines if "over Out" in line)
    over = {line[1]: line[header.index("over Out")] for line in lines if len(line) == len(header)}
    for name, variant, other in (
        ("MTEM", "mtem", "out"), ("MTEM (uncorrected)", "mtem-as-is", "out-as-is"), ("Out (uncorrected)", "out-as-is", "out"),
        ("MTEM (paper's settings)", "mtem-paper", "out-as-is"),
    ):  # fmt: skip
        assert over[name].removeprefix("≈ ") == tables.told(board.compare(variant, other)).removeprefix("≈ ")
    short = tables.headline(boards)
    assert "Of 2 comparisons, MTEM is clearly better than Out in 2" in short
    plain = next(line for line in short.splitlines() if "no class shares assumed" in line)
    assert plain.count("MTEM (uncorrected) .") == 1 and tables.told(board.compare("mtem-as-is", "out-as-is")) in plain
    assert "the best, in 2" in short  # of its own kind each


def test_shares_that_are_called_rumours(few_draws):
    cells = grid({"out": 0.8, "mtem": 0.85}, published.EVENTS, dataset="pheme")
    text = tables.general("pheme", tables.boards(cells))
    called = np.mean([cell["predictions"].count("1") / len(cell["predictions"]) for cell in cells if cell["variant"] == "out"])
    more = text[text.index("More of our runs") :].splitlines()
    header, row = ([cell.strip() for cell in line.split("|")] for line in (more[2], more[4]))
    assert row[1] == "Out" and row[header.index("called rumours")] == tables.digits(called)


def test_source_models_that_differ_are_told_by_data_set(tmp_path):
    cells = grid({"out": 0.8, "mtem": 0.9, "cst": 0.85}, seeds=(0, 1))
    for cell in cells:
        cell["source_score"] = 0.8 + (0.004 if cell["variant"] == "mtem" and cell["target"] == "books" else 0.0)
    (line,) = page._source_models(cells)
    assert (
        line.startswith("- Amazon, minilm: in 2 of 8 groups") and "by .0040 at most between methods, their means by .0010" in line
    )
    assert page._source_models([cell for cell in cells if cell["target"] != "books"]) == []


def test_a_bound_that_says_nothing_is_called_so():
    assert "The bound is 2.00 at least, and no error exceeds 1: it says nothing" in bound_table(BOUND)
    assert "hangs on what is not known" in bound_table({**BOUND, "least": [{"radius": 0.1, "theorem-3": 0.7}]})


def test_ablations_are_told_in_words(few_draws):
    cells = grid({"mtem": 0.85, "mtem-without-meta": 0.851, "mtem-without-sampling": 0.6})
    text = tables.ablation(cells)
    said = next(line for line in text.splitlines() if line.startswith("Against MTEM"))
    assert "without learned indexes" in said and "no clear difference (in the paper -.020)" in said
    assert "without sampling -.2" in said and "clearly worse (in the paper -.015)" in said and "annealing" not in said
