"""Statistics over made-up cells, against slow literal versions and known cases."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from mtem.errors import RequestError
from mtem.experiments import comparison, published, tables
from mtem.experiments.comparison import Board, Difference, difference, recomputed, resampled
from mtem.experiments.search import bits
from tests.made_up import CLASSES, grid, make_cell


def held(cell) -> list[int]:
    """Which examples are in the test set: the digits of `rows`, four bits each, the highest first."""
    digits = "".join(f"{int(digit, 16):04b}" for digit in cell["test"]["rows"])
    return [place for place, bit in enumerate(digits) if bit == "1"]


def literal_score(cell, picks, positive):
    """The score on the test texts, each as often as its example was picked."""
    place = {row: k for k, row in enumerate(held(cell))}
    truth, predicted = ([int(cell[key][place[row]]) for row in picks if row in place] for key in ("truth", "predictions"))
    if positive is None:
        return statistics.fmean(a == b for a, b in zip(truth, predicted, strict=True))
    number = cell["classes"].index(positive)
    hits = sum(a == b == number for a, b in zip(truth, predicted, strict=True))
    precision, recall = hits / max(1, predicted.count(number)), hits / max(1, truth.count(number))
    return 2 * precision * recall / (precision + recall) if hits else 0.0


@pytest.mark.parametrize(("dataset", "positive"), [("amazon", None), ("pheme", "rumour")])
def test_resampled_scores_are_those_of_the_picked_examples(dataset, positive, monkeypatch):
    cells = [make_cell(v, "ottawa", seed, r, dataset, size=40) for v, r in (("mtem", 0.8), ("out", 0.7)) for seed in (0, 1, 4)]
    examples = sorted(set().union(*map(held, cells)))
    assert len(examples) > 40  # the seeds share most test texts, not all
    picks = np.array(examples)[np.random.default_rng(7).integers(len(examples), size=(50, len(examples)))]
    found = resampled(cells, positive, 50, seed=7)
    assert found == pytest.approx(np.array([[literal_score(cell, line, positive) for line in picks] for cell in cells]))
    monkeypatch.setattr(comparison, "BLOCK", 7 * len(examples))
    assert (resampled(cells, positive, 50, seed=7) == found).all()


@pytest.mark.parametrize(("dataset", "positive"), [("amazon", None), ("pheme", "rumour")])
def test_comparisons_agree_with_a_literal_bootstrap(dataset, positive):
    """Targets apart, one pick of a target's examples for all seeds; other random numbers."""
    targets, seeds = ("ottawa", "sydney"), (0, 1)
    cells = grid({"mtem": 0.8, "out": 0.7}, targets, seeds, dataset=dataset, size=50)
    board = Board(cells, ("out", "mtem"), targets, positive)
    random, drawn = np.random.default_rng(1), []
    for _ in range(600):
        differences = []
        for target in targets:
            here = {(cell["variant"], cell["seed"]): cell for cell in cells if cell["target"] == target}
            examples = sorted(set().union(*map(held, here.values())))
            picks = random.choice(examples, size=len(examples))
            for seed in seeds:
                differences.append(np.subtract(*(literal_score(here[v, seed], picks, positive) for v in ("mtem", "out"))))
        drawn.append(statistics.fmean(differences))
    found = board.compare("mtem", "out")
    scores = {
        variant: statistics.fmean(cell["score"] for cell in cells if cell["variant"] == variant) for variant in ("mtem", "out")
    }
    assert found.value == pytest.approx(scores["mtem"] - scores["out"])
    assert [found.low, found.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.012)
    tail = 2 * min((np.array(drawn) <= 0).mean(), (np.array(drawn) >= 0).mean())
    assert found.p == pytest.approx(tail, abs=0.02)


def answered(truth: str, predictions: str, seed: int = 0, rows=None, **changes):
    """A cell of given answers on the examples `rows`, the first ones without it."""
    rows = range(len(truth)) if rows is None else rows
    test = {"fingerprint": f"{seed}", "rows": bits(list(rows), max(rows) + 1)}
    cell = make_cell(seed=seed) | {"truth": truth, "predictions": predictions, "test": test} | changes
    return cell | {"score": recomputed(cell)}


def compared(first, second, positive=None) -> Difference:
    cells = [cell | {"variant": name} for name, cells in (("a", first), ("b", second)) for cell in cells]
    return Board(cells, ("a", "b"), (cells[0]["target"],), positive).compare("a", "b")


def test_comparisons_of_known_cases():
    cell = make_cell()
    assert compared([cell], [cell]) == Difference(0.0, 0.0, 0.0, 1.0)
    # n texts of which b favour the first and c the second: the variance of the difference is that of a trinomial.
    truth, deviation = "1" * 400, np.sqrt((40 / 400 - 0.1**2) / 400)
    ahead, behind = "1" * 360 + "0" * 40, "0" * 20 + "1" * 320 + "0" * 60
    interval = [0.1 - 1.96 * deviation, 0.1 + 1.96 * deviation]
    found = compared([answered(truth, ahead)], [answered(truth, behind)])
    assert found.value == pytest.approx(0.1) and found.p < 0.001 and found.clear
    assert [found.low, found.high] == pytest.approx(interval, abs=0.003)
    # The same texts and answers again are no news: three seeds that agree are as sure as one, not sqrt(3) times as sure.
    found = compared([answered(truth, ahead, seed) for seed in range(3)], [answered(truth, behind, seed) for seed in range(3)])
    assert [found.low, found.high] == pytest.approx(interval, abs=0.003)
    # Other texts are.
    apart = [range(400 * seed, 400 * seed + 400) for seed in range(3)]
    found = compared(*([answered(truth, answers, seed, rows) for seed, rows in enumerate(apart)] for answers in (ahead, behind)))
    reach = 1.96 * deviation / np.sqrt(3)
    assert [found.low, found.high] == pytest.approx([0.1 - reach, 0.1 + reach], abs=0.003)


def test_f1_of_nothing_is_zero():
    truth, about = "10" * 50, {"dataset": "pheme", "classes": CLASSES["pheme"]}
    nothing, everything = answered(truth, "0" * 100, **about), answered(truth, "1" * 100, **about)
    assert compared([nothing], [nothing], "rumour") == Difference(0.0, 0.0, 0.0, 1.0)
    assert compared([everything], [nothing], "rumour").value == pytest.approx(2 / 3)
    empty = answered("0" * 9, "0" * 9, **about)
    assert (resampled([empty], "rumour", 10) == 0).all() and recomputed(empty) == 0.0


@pytest.mark.parametrize(
    "change", [{"fingerprint": "other"}, {"rows": bits(list(range(1, 301)), 400)}, {"rows": bits(list(range(299)), 400)}]
)
def test_different_texts_are_not_compared(change):
    first, second = make_cell("mtem"), make_cell("out")
    second["test"] |= change
    with pytest.raises(RequestError, match=r"cell amazon, .*out, kitchen, 0: tested on other texts than mtem"):
        resampled([first, second], None, 10)


def test_seeds_of_different_data_are_not_compared():
    with pytest.raises(RequestError, match="mtem, kitchen, 1: tested on other texts"):
        resampled([answered("01", "01"), answered("00", "01", seed=1)], None, 10)  # the second example has two labels


def test_a_cell_that_does_not_tell_its_examples_is_refused():
    cell = make_cell()
    del cell["test"]["rows"]
    with pytest.raises(RequestError, match=r"mtem, kitchen, 0: it does not say which examples .* run it again"):
        resampled([cell], None, 10)


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch):
    """Two methods with three seeds each, tested on mostly the same texts; 95 % of the intervals should hold the true difference.

    What is hard is hard for all seeds: a text has one answer of each method, which a seed turns round now and then. Drawing the
    texts of every seed by themselves takes the three test sets for independent, and its intervals are too narrow.
    """
    monkeypatch.setattr(comparison, "DRAWS", 1000)
    random, texts, turned = np.random.default_rng(0), 250, 0.05
    true, hits, apart = (0.80 - 0.76) * (1 - 2 * turned), 0, 0
    for _ in range(200):
        answers = {variant: random.random(texts) < right for variant, right in (("a", 0.80), ("b", 0.76))}
        cells, drawn = {"a": [], "b": []}, np.zeros(1000)
        for seed in range(3):
            rows = np.sort(random.permutation(texts)[:235])
            right = {variant: (answers[variant] ^ (random.random(texts) < turned))[rows].astype(int) for variant in answers}
            for variant in answers:
                cells[variant].append(answered("1" * len(rows), "".join(map(str, right[variant])), seed, rows.tolist()))
            drawn += (right["a"] - right["b"])[random.integers(len(rows), size=(1000, len(rows)))].mean(axis=1) / 3
        found, naive = compared(cells["a"], cells["b"]), difference(0.0, drawn)
        hits += found.low <= true <= found.high
        apart += naive.low <= true <= naive.high
    assert 180 <= hits <= 198
    assert apart < 170


def test_means_and_spreads():
    cells = grid({"mtem": 0.9, "out": 0.8})
    board = Board(cells, tables.GENERAL, published.AMAZON, None)
    mine = [cell for cell in cells if cell["variant"] == "mtem"]
    by_seed = [statistics.fmean(cell["score"] for cell in mine if cell["seed"] == seed) for seed in (0, 1, 2)]
    assert board.variants == ("out", "mtem")  # in the order of the table
    assert board.mean("mtem") == pytest.approx(statistics.fmean(by_seed))
    assert board.spread("mtem") == pytest.approx(statistics.stdev(by_seed))
    kitchen = [cell["score"] for cell in mine if cell["target"] == "kitchen"]
    assert board.mean("mtem", "kitchen") == pytest.approx(statistics.fmean(kitchen))
    assert board.spread("mtem", "kitchen") == pytest.approx(statistics.stdev(kitchen))
    assert board.compare("mtem", "out").value == pytest.approx(board.mean("mtem") - board.mean("out"))
    forth, back = board.compare("mtem", "out"), board.compare("out", "mtem")
    assert [back.value, back.low, back.high, back.p] == pytest.approx([-forth.value, -forth.high, -forth.low, forth.p])
    assert Board(grid({"mtem": 0.9}, seeds=(5,)), ["mtem"], published.AMAZON, None).spread("mtem") is None
