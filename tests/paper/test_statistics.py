"""Statistics over made-up cells, against slow literal versions and known cases."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mtem.errors import RequestError
from mtem_paper import protocol
from mtem_paper import statistics as comparison
from mtem_paper.protocol import DATASETS
from mtem_paper.search import bits
from mtem_paper.statistics import (
    LEVEL,
    Board,
    Difference,
    difference,
    family,
    holm,
    interval,
    recomputed,
    resampled,
    seed_deviations,
)
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
    """Targets apart, one pick of a target's examples and of the seeds for all of them; other random numbers."""
    targets, seeds = ("ottawa", "sydney"), (0, 1, 2, 3, 4)
    cells = grid({"mtem": 0.8, "out": 0.7}, targets, seeds, dataset=dataset, size=50)
    board = Board(cells, ("out", "mtem"), targets, positive)
    random, drawn = np.random.default_rng(1), []
    sign = {"mtem": 1, "out": -1}
    measured = [sum(sign[cell["variant"]] * cell["score"] for cell in cells if cell["seed"] == seed) / 2 for seed in seeds]
    for _ in range(600):
        differences = []
        for target in targets:
            here = {(cell["variant"], cell["seed"]): cell for cell in cells if cell["target"] == target}
            examples = sorted(set().union(*map(held, here.values())))
            picks = random.choice(examples, size=len(examples))
            for seed in seeds:
                differences.append(np.subtract(*(literal_score(here[v, seed], picks, positive) for v in ("mtem", "out"))))
        again = statistics.fmean(random.choice(measured, size=len(seeds))) - statistics.fmean(measured)
        heavier = np.sqrt(len(seeds) / sum(random.normal(size=len(seeds) - 1) ** 2))
        drawn.append(statistics.fmean(differences) + heavier * again)
    found = board.compare("mtem", "out")
    scores = {
        variant: statistics.fmean(cell["score"] for cell in cells if cell["variant"] == variant) for variant in ("mtem", "out")
    }
    assert found.value == pytest.approx(scores["mtem"] - scores["out"])
    assert [found.low, found.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.015)
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
    assert compared([cell], [cell]) == Difference(0.0, 0.0, 0.0, 1.0, 1)
    # n texts of which b favour the first and c the second: the variance of the difference is that of a trinomial.
    truth, deviation = "1" * 400, np.sqrt((40 / 400 - 0.1**2) / 400)
    ahead, behind = "1" * 360 + "0" * 40, "0" * 20 + "1" * 320 + "0" * 60
    ends = [0.1 - 1.96 * deviation, 0.1 + 1.96 * deviation]
    found = compared([answered(truth, ahead)], [answered(truth, behind)])
    assert found.value == pytest.approx(0.1) and found.p < 0.001
    assert not found.clear  # with one seed nobody knows how much training varies
    assert [found.low, found.high] == pytest.approx(ends, abs=0.003)
    # The same texts and answers again are no news: three seeds that agree are as sure as one, not sqrt(3) times as sure.
    found = compared([answered(truth, ahead, seed) for seed in range(3)], [answered(truth, behind, seed) for seed in range(3)])
    assert [found.low, found.high] == pytest.approx(ends, abs=0.003) and found.clear
    # Other texts are.
    apart = [range(400 * seed, 400 * seed + 400) for seed in range(3)]
    found = compared(*([answered(truth, answers, seed, rows) for seed, rows in enumerate(apart)] for answers in (ahead, behind)))
    reach = 1.96 * deviation / np.sqrt(3)
    assert [found.low, found.high] == pytest.approx([0.1 - reach, 0.1 + reach], abs=0.003)


def test_f1_of_nothing_is_zero():
    truth, about = "10" * 50, {"dataset": "pheme", "classes": CLASSES["pheme"]}
    nothing, everything = answered(truth, "0" * 100, **about), answered(truth, "1" * 100, **about)
    assert compared([nothing], [nothing], "rumour") == Difference(0.0, 0.0, 0.0, 1.0, 1)
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
    with pytest.raises(RequestError, match=r"mtem, kitchen, 0: no test rows: .* run it again"):
        resampled([cell], None, 10)


def simulated(random, count: int, texts: int = 250, turned: float = 0.5, varied: float = 0.13):
    """Cells of two methods with so many seeds, and their true difference.

    A method is right where its skill exceeds how hard a text is: for the method and all seeds (1), and for this seed (`turned`).
    The skill varies with the seed (`varied`). As in our tables, the seeds' standard error is a little larger than the texts'.
    """
    scale, skills, cells = np.sqrt(1 + turned**2 + varied**2), {"a": 0.95, "b": 0.80}, {"a": [], "b": []}
    shared = random.normal(size=texts)
    hard = {name: 0.9 * shared + np.sqrt(1 - 0.9**2) * random.normal(size=texts) for name in skills}
    for seed in range(count):
        rows = np.sort(random.permutation(texts)[: texts * 19 // 20])
        for name, skill in skills.items():
            level = skill + varied * random.normal()
            right = (hard[name] + turned * random.normal(size=texts) < level)[rows].astype(int)
            cells[name].append(answered("1" * len(rows), "".join(map(str, right)), seed, rows.tolist()))
    return cells, stats.norm.cdf(skills["a"] / scale) - stats.norm.cdf(skills["b"] / scale)


@pytest.mark.parametrize("count", [3, 5])
def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch, count):
    """95 % of the intervals should hold the true difference: that of all texts and all seeds.

    Between 93 and 99.5 % are asked for, as texts count twice. Drawing texts alone takes the seeds that were run for all there
    are, and its intervals hold the truth too seldom.
    """
    monkeypatch.setattr(comparison, "DRAWS", 1500)
    random, runs, hits, fixed = np.random.default_rng(count), 250, 0, 0
    for _ in range(runs):
        cells, true = simulated(random, count)
        board = Board([each | {"variant": name} for name in cells for each in cells[name]], ("a", "b"), ("kitchen",), None)
        found, drawn = board.compare("a", "b"), board.drawn("kitchen")
        low, high = interval(np.mean([drawn["a", seed] - drawn["b", seed] for seed in range(count)], axis=0), LEVEL)
        hits += found.low <= true <= found.high
        fixed += low <= true <= high
    assert 0.93 <= hits / runs <= 0.995
    assert fixed / runs < 0.88


@pytest.mark.parametrize("by_seed", [[0.1, 0.3, 0.35], [0.1, 0.2, 0.0, 0.5, 0.3]])
def test_few_seeds_deviate_as_students_t(by_seed):
    found = seed_deviations(by_seed, 200_000) / stats.sem(by_seed)
    for tail in (0.025, 0.005, 0.0025):
        low, high = np.quantile(found, [tail, 1 - tail])
        assert (high - low) / 2 == pytest.approx(stats.t.ppf(1 - tail, len(by_seed) - 1), rel=0.08)
    assert (seed_deviations([0.3], 10) == 0).all()
    assert abs(seed_deviations([0.3, 0.3, 0.3], 10)).max() < 1e-12


def test_seeds_count_by_how_much_they_differ():
    """The same mean difference on the same texts: sure if all seeds agree, not sure if one makes all of it."""
    truth, ahead, far, level = "1" * 400, "1" * 380 + "0" * 20, "1" * 400, "1" * 340 + "0" * 60
    alike = compared([answered(truth, ahead, seed) for seed in range(3)], [answered(truth, level, seed) for seed in range(3)])
    one = [answered(truth, far if seed == 0 else "1" * 370 + "0" * 30, seed) for seed in range(3)]
    apart = compared(one, [answered(truth, level, seed) for seed in range(3)])
    assert alike.value == pytest.approx(apart.value) == pytest.approx(0.1)
    assert alike.clear and not apart.clear and apart.low < 0


@given(st.lists(st.integers(-30, 30), min_size=50, max_size=400), st.integers(-20, 20))
def test_p_and_interval_agree(values, shift):
    """p is below the level if and only if 0 is outside of the interval, if there are draws enough to say so."""
    drawn = np.array(values * 2 if len(values) < 100 else values) / 10 + shift / 10
    found = difference(shift / 10, drawn, 3)
    assert (found.p < LEVEL) == (found.low > 0 or found.high < 0)
    assert found.low <= found.high
    back = difference(-shift / 10, -drawn, 3)
    assert found.turned() == back


def literal_holm(found):
    """As Holm tells it: the smallest against level / n, the next against level / (n - 1), ... until one fails.

    The corrected p is the least level at which it is still reached.
    """
    order = sorted(found)
    return [min(1.0, max((len(found) - k) * order[k] for k in range(order.index(p) + 1))) for p in found]


@given(st.lists(st.floats(0, 1), max_size=12), st.randoms())
def test_holms_correction(found, random):
    adjusted = holm(found)
    assert adjusted == pytest.approx(literal_holm(found))
    assert all(p <= more <= 1 for p, more in zip(found, adjusted, strict=True))
    pairs = sorted(zip(found, adjusted, strict=True))
    assert all(one[1] <= two[1] for one, two in itertools.pairwise(pairs))  # a smaller p stays the smaller
    order = list(range(len(found)))
    random.shuffle(order)
    assert holm([found[k] for k in order]) == pytest.approx([adjusted[k] for k in order])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.3]) == [0.3]


def test_a_family_is_corrected_together():
    def of(p, seeds=3):
        return Difference(0.1, 0.01, 0.2, p, seeds)

    found = family({"a": of(0.03), "b": of(0.04), "c": None, "d": of(0.001, seeds=1)})
    assert of(0.04).clear and not found["b"].clear  # by itself, and as one of two
    assert (found["a"].adjusted, found["b"].adjusted) == pytest.approx((0.06, 0.06))
    assert found["c"] is None and found["d"].adjusted is None and not found["d"].clear  # one seed: not counted, never clear
    assert (found["a"].low, found["a"].p) == (0.01, 0.03)  # the interval stays


def test_how_large_a_difference_has_to_be():
    board = Board(grid({"mtem": 0.9, "out": 0.8, "cst": 0.85}), protocol.in_group("general"), DATASETS["amazon"].targets, None)
    found = board.compare("mtem", "out")
    assert board.reach("mtem", "out") == pytest.approx((found.high - found.low) / 2)
    assert board.reach("mtem", "out", 0.01) > board.reach("mtem", "out") > 0
    assert (
        Board(grid({"mtem": 0.9, "out": 0.8}, seeds=(0,)), protocol.in_group("general"), DATASETS["amazon"].targets, None).reach(
            "mtem", "out"
        )
        is None
    )


def test_means_and_spreads():
    cells = grid({"mtem": 0.9, "out": 0.8})
    board = Board(cells, protocol.in_group("general"), DATASETS["amazon"].targets, None)
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
    assert Board(grid({"mtem": 0.9}, seeds=(5,)), ["mtem"], DATASETS["amazon"].targets, None).spread("mtem") is None
