"""Statistics over cells: means, spreads, paired comparisons, and what the label-free figures were worth.

A mean is taken over the targets first and then over the seeds; its spread is the standard deviation over the seeds (n - 1) of the
mean over the targets. Only whole seeds count: those for which every target is there.

How sure a difference of two methods is, is resampled over texts and over seeds. The test sets of different seeds share texts, so
the two levels are crossed, not nested: each is drawn by itself, and their deviations are added. With d_s the difference of the
means over the targets with seed s, d their mean over the n seeds, and x_b the same mean when the texts are those of draw b:

    drawn_b = x_b + sqrt(n / q_b) * (mean of d_s over n seeds drawn with replacement - d),    q_b ~ chi-square, n - 1 degrees

Without the factor, draws of 3 or 5 seeds are too narrow: their variance is (n - 1) / n of a mean's, s^2 / n, and their tails
are no heavier than a normal distribution's, although s is known from n values only. The factor mends both: sqrt(n / (n - 1)) the
variance, and a division by sqrt(q_b / (n - 1)) is what makes Student's t with n - 1 degrees of freedom of a normal distribution.
Noise of the texts that differs from seed to seed is in both levels. That errs on the side of caution: in simulations the 95 %
intervals hold the truth in 95 to 99 % of all cases (tests/test_comparison.py).

With one seed there is nothing to draw from: the interval is that of the texts alone, and the difference is never called clear.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from mtem.errors import RequestError

Cell = dict[str, Any]
Figure = Callable[[Cell], float]
Key = TypeVar("Key")

DRAWS = 10_000
BLOCK = 1_000_000  # weights at a time: some 30 MB
LEVEL = 0.05  # a difference with a larger p, corrected for the number of comparisons, is not told apart from none
POSITIVE = {"amazon": None, "pheme": "rumour"}  # the class whose F1 is the score; None: accuracy is


def score(cell: Cell) -> float:
    return cell["score"]


def name_of(cell: Cell) -> str:
    return ", ".join(str(cell[key]) for key in ("dataset", "model", "setting", "pool", "variant", "target", "seed"))


@dataclass(frozen=True)
class Difference:
    """Of two methods on the same test texts."""

    value: float
    low: float
    high: float
    """Between ``low`` and ``high`` lie 95 % of the resampled differences; not corrected for the number of comparisons."""
    p: float
    """Two-sided; below LEVEL if and only if 0 is outside of the interval."""
    seeds: int
    """Over how many it was resampled; with one, over the texts alone."""
    adjusted: float | None = None
    """p, corrected for the comparisons of its family; None: not compared with others."""

    @property
    def clear(self) -> bool:
        return self.seeds > 1 and (self.p if self.adjusted is None else self.adjusted) < LEVEL

    def turned(self) -> Difference:
        """The other method less this one."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)


def holm(found: Sequence[float]) -> list[float]:
    """p values corrected for their number, after Holm and Bonferroni.

    The k-th smallest of n is multiplied by n - k + 1, and is 1 at most and no smaller than the one before it. If those below
    LEVEL are called differences, the chance of even one false call among the n is LEVEL at most, however they hang together.
    """
    adjusted, least = [0.0] * len(found), 0.0
    for rank, place in enumerate(sorted(range(len(found)), key=found.__getitem__)):
        least = max(least, min(1.0, (len(found) - rank) * found[place]))
        adjusted[place] = least
    return adjusted


def family(found: Mapping[Key, Difference | None]) -> dict[Key, Difference | None]:
    """The same differences, corrected for their number. Those of one seed can never be clear and do not count."""
    tested = {key: each for key, each in found.items() if each is not None and each.seeds > 1}
    adjusted = dict(zip(tested, holm([each.p for each in tested.values()]), strict=True))
    return {key: replace(each, adjusted=adjusted[key]) if key in adjusted else each for key, each in found.items()}


class Board:
    """The cells of one table: variants x targets x seeds.

    Its seeds are those that at least half of the variants have for every target, so that an extra seed of one method, or one
    method that was not finished, does not spoil the table; if there is no such seed, the one with the most cells.
    """

    def __init__(self, cells: Iterable[Cell], variants: Sequence[str], targets: Sequence[str], positive: str | None) -> None:
        self.targets, self.positive = tuple(targets), positive
        self.cells: dict[tuple[str, str, int], Cell] = {}
        self._drawn: dict[str, dict[tuple[str, int], np.ndarray]] = {}
        for cell in cells:
            if cell["variant"] not in variants or cell["target"] not in targets:
                continue
            key = (cell["variant"], cell["target"], cell["seed"])
            if key in self.cells:
                raise ValueError(f"two cells for {key}")
            self.cells[key] = cell
        self.variants = tuple(variant for variant in variants if any(key[0] == variant for key in self.cells))
        self.ran = tuple(sorted({seed for *_, seed in self.cells}))
        whole = {seed: sum(self._whole(variant, seed) for variant in self.variants) for seed in self.ran}
        self.seeds = tuple(seed for seed in self.ran if 2 * whole[seed] >= len(self.variants))
        if self.ran and not self.seeds:
            self.seeds = (max(self.ran, key=lambda seed: sum(key[2] == seed for key in self.cells)),)

    def _whole(self, variant: str, seed: int) -> bool:
        return all((variant, target, seed) in self.cells for target in self.targets)

    def seeds_of(self, variant: str, target: str | None = None) -> tuple[int, ...]:
        """Those of the table's seeds that the variant has for every target; if it has none, those of the target that is named."""
        whole = tuple(seed for seed in self.seeds if self._whole(variant, seed))
        if whole or target is None:
            return whole
        return tuple(seed for seed in self.seeds if (variant, target, seed) in self.cells)

    def found(self, variant: str, target: str | None = None) -> list[Cell]:
        """Seed by seed, target by target."""
        names = [target] if target else self.targets
        return [self.cells[variant, name, seed] for seed in self.seeds_of(variant, target) for name in names]

    def complete(self, variant: str, target: str | None = None) -> bool:
        return self.seeds_of(variant, target) == self.seeds

    def mean(self, variant: str, target: str | None = None, figure: Figure = score) -> float | None:
        """Over its seeds, and over the targets unless one is named; None if there are none."""
        found = self.found(variant, target)
        return statistics.fmean(map(figure, found)) if found else None

    def spread(self, variant: str, target: str | None = None) -> float | None:
        """Standard deviation over the seeds of the mean over the targets; None for fewer than two seeds."""
        values, seeds = [cell["score"] for cell in self.found(variant, target)], len(self.seeds_of(variant, target))
        return statistics.stdev(map(statistics.fmean, np.split(np.array(values), seeds))) if seeds > 1 else None

    def oracle(self, variant: str) -> bool:
        """Whether it saw labels that a method cannot have."""
        return any(cell["oracle"] for (name, *_), cell in self.cells.items() if name == variant)

    def best(self, target: str | None = None, but: str | None = None, among: Sequence[str] | None = None) -> str | None:
        """The complete variant with the highest mean, oracles and `but` left out; the first of equals.

        None unless half of the variants (`among` some of them, if given) are complete: among fewer there is not much to win.
        """
        rivals = [variant for variant in self.variants if not self.oracle(variant) and (among is None or variant in among)]
        ready = [variant for variant in rivals if self.complete(variant, target)]
        if 2 * len(ready) < len(rivals):
            return None
        return max(
            (variant for variant in ready if variant != but), key=lambda each: self.mean(each, target) or 0.0, default=None
        )

    def paired(self, variant: str, other: str, target: str | None = None) -> tuple[int, ...]:
        """The seeds that both have."""
        own = self.seeds_of(other, target)
        return tuple(seed for seed in self.seeds_of(variant, target) if seed in own)

    def compare(self, variant: str, other: str, target: str | None = None) -> Difference | None:
        """How much better ``variant`` is, over the seeds that both have; None if there are none."""
        by_seed = self._by_seed(variant, other, target)
        if not by_seed:
            return None
        return difference(statistics.fmean(by_seed), self._resampled(variant, other, target), len(by_seed))

    def reach(self, variant: str, other: str, level: float = LEVEL, target: str | None = None) -> float | None:
        """How large their difference had to be, varying as it does, to have p < ``level``; None with fewer than two seeds.

        Half the length of the interval of the level.
        """
        if len(self.paired(variant, other, target)) < 2:
            return None
        low, high = interval(self._resampled(variant, other, target), level)
        return (high - low) / 2

    def _by_seed(self, variant: str, other: str, target: str | None) -> list[float]:
        """The difference of the means over the targets, for each seed."""
        names = [target] if target else self.targets
        return [
            statistics.fmean(self.cells[variant, name, seed]["score"] - self.cells[other, name, seed]["score"] for name in names)
            for seed in self.paired(variant, other, target)
        ]

    def _resampled(self, variant: str, other: str, target: str | None) -> np.ndarray:
        """Their difference in DRAWS resamplings of texts and seeds."""
        names, seeds = [target] if target else self.targets, self.paired(variant, other, target)
        texts = [self.drawn(name)[variant, seed] - self.drawn(name)[other, seed] for name in names for seed in seeds]
        return np.mean(texts, axis=0) + seed_deviations(self._by_seed(variant, other, target), DRAWS)

    def drawn(self, target: str) -> dict[tuple[str, int], np.ndarray]:
        """The scores of all variants and seeds on the target in DRAWS resamplings of its examples."""
        if target not in self._drawn:
            keys = [key for key in self.cells if key[1] == target and key[2] in self.seeds]
            scores = resampled([self.cells[key] for key in keys], self.positive, DRAWS, self.targets.index(target))
            self._drawn[target] = {(variant, seed): line for (variant, _, seed), line in zip(keys, scores, strict=True)}
        return self._drawn[target]


def difference(value: float, drawn: np.ndarray, seeds: int) -> Difference:
    """How sure ``value`` is, given what it was in each resampling."""
    drawn = np.where(np.abs(drawn) < 1e-12, 0.0, drawn)  # sums of thirds and the like: equal is equal
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Difference(value, *interval(drawn, LEVEL), min(1.0, 2 * (tail + 1) / (len(drawn) + 1)), seeds)


def interval(drawn: np.ndarray, level: float) -> tuple[float, float]:
    """The values that a two-sided test of the level, p = 2 (draws beyond + 1) / (draws + 1), does not exclude."""
    beyond = max(0, math.ceil(level * (len(drawn) + 1) / 2) - 2)  # the most draws beyond a value that it excludes
    ordered = np.sort(drawn)
    return float(ordered[beyond]), float(ordered[len(drawn) - 1 - beyond])


def seed_deviations(by_seed: Sequence[float], draws: int) -> np.ndarray:
    """How far the mean over the seeds may be from the one over all seeds there could be: the second term of the formula above.

    The same seeds and factors are drawn for every comparison of so many seeds. Zeros for a single seed.
    """
    count, values = len(by_seed), np.array(by_seed)
    if count < 2:
        return np.zeros(draws)
    random = np.random.default_rng([count, draws])
    picks = random.integers(count, size=(draws, count))
    return np.sqrt(count / random.chisquare(count - 1, draws)) * (values[picks].mean(axis=1) - values.mean())


def resampled(cells: Sequence[Cell], positive: str | None, draws: int, seed: int = 0) -> np.ndarray:
    """The scores of cells of one target when its labeled examples are drawn with replacement, [cells, draws].

    A draw weighs every example once, by how often it was drawn, for all test sets that hold it: those of different seeds share
    most of their texts, and what is hard in one is hard in the other.
    """
    rows = _rows(cells)
    examples, places = np.unique(np.concatenate(rows), return_inverse=True)
    columns = np.zeros((len(examples), 2, len(cells)), dtype=np.float32)  # sums of small integers: exact
    for number, (cell, place) in enumerate(zip(cells, np.split(places, np.cumsum(list(map(len, rows)))[:-1]), strict=True)):
        columns[place, :, number] = _shares(cell, positive).T
    columns = columns.reshape(len(examples), -1)
    random, size, found = np.random.default_rng(seed), len(examples), []
    for start in range(0, draws, step := max(1, BLOCK // size)):
        count = min(step, draws - start)
        picks = random.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        weights = np.bincount(picks.ravel(), minlength=count * size).reshape(count, size)
        found.append(weights.astype(np.float32) @ columns)
    above, below = np.concatenate(found).astype(float).T.reshape(2, len(cells), draws)
    return above / np.maximum(below, 1)


def _rows(cells: Sequence[Cell]) -> list[np.ndarray]:
    """Which of the target's labeled examples each cell was tested on, in order."""
    rows: list[np.ndarray] = []
    tests: dict[int, tuple[str, str]] = {}
    labels: dict[int, str] = {}
    for cell in cells:
        held = cell["test"].get("rows")
        if held is None:
            raise RequestError(f"cell {name_of(cell)}: it does not say which examples its test set holds; run it again")
        rows.append(np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(held), dtype=np.uint8))))
        same = tests.setdefault(cell["seed"], (held, cell["test"]["fingerprint"])) == (held, cell["test"]["fingerprint"])
        same = same and len(rows[-1]) == len(cell["truth"]) == len(cell["predictions"])
        known = zip(rows[-1].tolist(), cell["truth"], strict=True) if same else ()
        if not same or any(labels.setdefault(row, label) != label for row, label in known):
            raise RequestError(
                f"cell {name_of(cell)}: tested on other texts than {cells[0]['variant']}, so they cannot be compared; "
                "run both again on the same data"
            )
    return rows


def _shares(cell: Cell, positive: str | None) -> np.ndarray:
    """What each test text adds to the score's numerator and denominator, [2, texts].

    Accuracy is right / all; F1 = 2 hits / (predicted + true).
    """
    truth, predicted = (np.frombuffer(cell[key].encode("ascii"), dtype=np.uint8) - ord("0") for key in ("truth", "predictions"))
    if positive is None:
        return np.stack([truth == predicted, np.ones_like(truth)])
    true, called = (each == cell["classes"].index(positive) for each in (truth, predicted))
    return np.stack([2 * (true & called), true.astype(int) + called])


def recomputed(cell: Cell) -> float:
    """The score, from truth and predictions."""
    above, below = _shares(cell, POSITIVE[cell["dataset"]]).sum(axis=1, dtype=int)
    return float(above / max(below, 1))
