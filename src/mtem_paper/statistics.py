r"""Statistics over cells: means, standard deviations, paired comparisons with intervals and corrected p values.

A mean is taken over the targets first and then over the seeds. Its standard deviation is that over the seeds (n - 1) of the mean
over the targets. Only complete seeds count: those with a cell for every target.

The uncertainty of a difference of two methods is resampled over texts and over seeds. The test sets of different seeds share
texts, so the two levels are crossed, not nested: each is drawn separately, and their deviations are added. Let :math:`d_s` be the
difference of the means over the targets with seed s, d its mean over the n seeds, and :math:`x_b` the same mean on the texts of
draw b. Then

.. math::
    \text{drawn}_b = x_b + \sqrt{n / q_b} \, (\bar d_b - d), \qquad q_b \sim \chi^2_{n - 1},

where :math:`\bar d_b` is the mean of n of the :math:`d_s`, drawn with replacement. Without the factor, draws of 3 or 5 seeds are
too narrow: their variance is (n - 1) / n of that of a mean, and their tails are those of a normal distribution, although the
variance is estimated from n values only. The factor corrects both: sqrt(n / (n - 1)) the variance, and the division by
sqrt(q_b / (n - 1)) turns a normal distribution into Student's t with n - 1 degrees of freedom. Noise of the texts that differs
from seed to seed is part of both levels, which is conservative: in simulations the 95 % intervals contain the true difference in
95 to 99 % of all cases (tests/paper/test_statistics.py).

With one seed there is nothing to resample: the interval is over the texts only, and the difference is never called clear.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from mtem.errors import RequestError
from mtem_paper.cells import MAIN
from mtem_paper.protocol import DATASETS

Cell = dict[str, Any]
Figure = Callable[[Cell], float]
Key = TypeVar("Key")

DRAWS = 10_000
BLOCK = 1_000_000  # weights at a time: some 30 MB
LEVEL = 0.05  # a difference with a larger p, corrected for the number of comparisons, is not clear


def score(cell: Cell) -> float:
    """Return the score of a cell."""
    return float(cell["score"])


def name_of(cell: Cell) -> str:
    """Return how messages name a cell."""
    return ", ".join(str(cell[key]) for key in ("dataset", "model", "setting", "pool", "variant", "target", "seed"))


@dataclass(frozen=True)
class Difference:
    """The difference of two methods on the same test texts."""

    value: float
    low: float
    high: float
    """95 % of the resampled differences are between ``low`` and ``high``; not corrected for the number of comparisons."""
    p: float
    """Two-sided; below LEVEL if and only if 0 is outside of the interval."""
    seeds: int
    """Number of seeds that were resampled; with one, only the texts were."""
    adjusted: float | None = None
    """p, corrected for the comparisons of its family; None: not part of a family."""

    @property
    def clear(self) -> bool:
        """Whether the difference is significant."""
        return self.seeds > 1 and (self.p if self.adjusted is None else self.adjusted) < LEVEL

    def turned(self) -> Difference:
        """Return the difference with the methods exchanged."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values for their number, after Holm and Bonferroni.

    The k-th smallest of n is multiplied by n - k + 1, is at most 1, and is no smaller than the one before it. If those below
    LEVEL are called differences, the chance of any false call among the n is at most LEVEL, whatever their dependence.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = least
    return adjusted


def family(differences: Mapping[Key, Difference | None]) -> dict[Key, Difference | None]:
    """Return the same differences, corrected for their number. Those of one seed can never be clear and do not count."""
    tested = {key: value for key, value in differences.items() if value is not None and value.seeds > 1}
    adjusted = dict(zip(tested, holm([value.p for value in tested.values()]), strict=True))
    return {**differences, **{key: replace(value, adjusted=adjusted[key]) for key, value in tested.items()}}


class Board:
    """The cells of one table: variants x targets x seeds.

    Its seeds are those that the rows it is about (`cells.MAIN`) have for every target. Where one of these is missing, they are
    those that at least half of the variants have: neither an extra seed of one method nor an unfinished method changes the seeds
    of the others. If there is no such seed, it is the one with the most cells.

    Parameters
    ----------
    cells
        Results; those of other variants or targets are ignored.
    variants, targets
        Rows and columns of the table.
    positive
        The class whose F1 is the score; None: accuracy.
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
        complete = {seed: sum(self._has_all_targets(variant, seed) for variant in self.variants) for seed in self.ran}
        self.seeds = tuple(seed for seed in self.ran if all(self._has_all_targets(variant, seed) for variant in MAIN))
        self.seeds = self.seeds or tuple(seed for seed in self.ran if 2 * complete[seed] >= len(self.variants))
        if self.ran and not self.seeds:
            self.seeds = (max(self.ran, key=lambda seed: sum(key[2] == seed for key in self.cells)),)

    def _has_all_targets(self, variant: str, seed: int) -> bool:
        return all((variant, target, seed) in self.cells for target in self.targets)

    def seeds_of(self, variant: str, target: str | None = None) -> tuple[int, ...]:
        """Return those of the table's seeds that the variant has for every target; if there are none, those of `target`."""
        complete = tuple(seed for seed in self.seeds if self._has_all_targets(variant, seed))
        if complete or target is None:
            return complete
        return tuple(seed for seed in self.seeds if (variant, target, seed) in self.cells)

    def cells_of(self, variant: str, target: str | None = None) -> list[Cell]:
        """Return the cells of a variant, seed by seed, target by target."""
        names = [target] if target else self.targets
        return [self.cells[variant, name, seed] for seed in self.seeds_of(variant, target) for name in names]

    def complete(self, variant: str, target: str | None = None) -> bool:
        """Return whether the variant has all seeds of the table."""
        return self.seeds_of(variant, target) == self.seeds

    def mean(self, variant: str, target: str | None = None, figure: Figure = score) -> float | None:
        """Return the mean of a figure over the seeds, and over the targets unless one is named; None without cells."""
        cells = self.cells_of(variant, target)
        return statistics.fmean(map(figure, cells)) if cells else None

    def spread(self, variant: str, target: str | None = None) -> float | None:
        """Return the standard deviation over the seeds of the mean over the targets; None for fewer than two seeds."""
        values, seeds = [cell["score"] for cell in self.cells_of(variant, target)], len(self.seeds_of(variant, target))
        return statistics.stdev(map(statistics.fmean, np.split(np.array(values), seeds))) if seeds > 1 else None

    def oracle(self, variant: str) -> bool:
        """Return whether a variant was trained on labels that a method does not have."""
        return any(cell["oracle"] for (name, *_), cell in self.cells.items() if name == variant)

    def best(self, target: str | None = None, but: str | None = None, among: Sequence[str] | None = None) -> str | None:
        """Return the complete variant with the highest mean, without oracles and `but`; the first of equals.

        None unless at least half of the variants (or of those in `among`) are complete.
        """
        rivals = self._rivals(among)
        ready = [variant for variant in rivals if self.complete(variant, target)]
        if 2 * len(ready) < len(rivals):
            return None
        return max(
            (variant for variant in ready if variant != but), key=lambda variant: self.mean(variant, target) or 0.0, default=None
        )

    def all_best(self, target: str | None = None, among: Sequence[str] | None = None) -> list[str]:
        """Return the best variant and its equals: runs that stand for two methods make two rows with the same mean."""
        best = self.best(target, among=among)
        if best is None:
            return []
        mean = self.mean(best, target)
        return [
            variant for variant in self._rivals(among) if self.complete(variant, target) and self.mean(variant, target) == mean
        ]

    def _rivals(self, among: Sequence[str] | None) -> list[str]:
        return [variant for variant in self.variants if not self.oracle(variant) and (among is None or variant in among)]

    def paired(self, variant: str, other: str, target: str | None = None) -> tuple[int, ...]:
        """Return the seeds that both variants have."""
        own = self.seeds_of(other, target)
        return tuple(seed for seed in self.seeds_of(variant, target) if seed in own)

    def compare(self, variant: str, other: str, target: str | None = None) -> Difference | None:
        """Return how much better ``variant`` is, over the seeds that both have; None without such seeds."""
        by_seed = self._by_seed(variant, other, target)
        if not by_seed:
            return None
        return difference(statistics.fmean(by_seed), self._resampled(variant, other, target), len(by_seed))

    def reach(self, variant: str, other: str, level: float = LEVEL, target: str | None = None) -> float | None:
        """Return how large their difference would have to be for p < ``level``; None with fewer than two seeds.

        That is half the length of the interval of the level.
        """
        if len(self.paired(variant, other, target)) < 2:
            return None
        low, high = interval(self._resampled(variant, other, target), level)
        return (high - low) / 2

    def _by_seed(self, variant: str, other: str, target: str | None) -> list[float]:
        """Return the difference of the means over the targets, for each seed."""
        names = [target] if target else self.targets
        return [
            statistics.fmean(self.cells[variant, name, seed]["score"] - self.cells[other, name, seed]["score"] for name in names)
            for seed in self.paired(variant, other, target)
        ]

    def _resampled(self, variant: str, other: str, target: str | None) -> np.ndarray:
        """Their difference in DRAWS resamplings of texts and seeds."""
        names, seeds = [target] if target else self.targets, self.paired(variant, other, target)
        texts = [self.drawn(name)[variant, seed] - self.drawn(name)[other, seed] for name in names for seed in seeds]
        return np.asarray(np.mean(texts, axis=0) + seed_deviations(self._by_seed(variant, other, target), DRAWS))

    def drawn(self, target: str) -> dict[tuple[str, int], np.ndarray]:
        """Return the scores of all variants and seeds on the target in DRAWS resamplings of its examples."""
        if target not in self._drawn:
            keys = [key for key in self.cells if key[1] == target and key[2] in self.seeds]
            scores = resampled([self.cells[key] for key in keys], self.positive, DRAWS, self.targets.index(target))
            self._drawn[target] = {(variant, seed): line for (variant, _, seed), line in zip(keys, scores, strict=True)}
        return self._drawn[target]


def difference(value: float, drawn: np.ndarray, seeds: int) -> Difference:
    """Return a difference with interval and p, given its value in each resampling."""
    drawn = np.where(np.abs(drawn) < 1e-12, 0.0, drawn)  # rounding errors of equal scores
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Difference(value, *interval(drawn, LEVEL), min(1.0, 2 * (tail + 1) / (len(drawn) + 1)), seeds)


def interval(drawn: np.ndarray, level: float) -> tuple[float, float]:
    """Return the values that a two-sided test of the level, p = 2 (draws beyond + 1) / (draws + 1), does not exclude."""
    beyond = max(0, math.ceil(level * (len(drawn) + 1) / 2) - 2)  # the most draws beyond a value that it excludes
    ordered = np.sort(drawn)
    return float(ordered[beyond]), float(ordered[len(drawn) - 1 - beyond])


def seed_deviations(by_seed: Sequence[float], draws: int) -> np.ndarray:
    """Return draws of the mean over the seeds minus its expectation: the second term of the module's formula.

    The same seeds and factors are drawn for every comparison of the same number of seeds. Zeros for a single seed.
    """
    count, values = len(by_seed), np.array(by_seed)
    if count < 2:
        return np.zeros(draws)
    random = np.random.default_rng([count, draws])
    picks = random.integers(count, size=(draws, count))
    return np.asarray(np.sqrt(count / random.chisquare(count - 1, draws)) * (values[picks].mean(axis=1) - values.mean()))


def resampled(cells: Sequence[Cell], positive: str | None, draws: int, seed: int = 0) -> np.ndarray:
    """Return the scores of cells of one target when its labeled examples are drawn with replacement, [cells, draws].

    A draw weighs every example by how often it was drawn, for all test sets that contain it: those of different seeds share most
    of their texts, and a text that is hard with one seed is hard with another.

    Raises
    ------
    RequestError
        If the cells were not tested on the same texts.
    """
    rows = _rows(cells)
    examples, numbers = np.unique(np.concatenate(rows), return_inverse=True)
    shares = np.zeros((len(examples), 2, len(cells)), dtype=np.float32)  # sums of small integers: exact
    for column, (cell, own) in enumerate(zip(cells, np.split(numbers, np.cumsum(list(map(len, rows)))[:-1]), strict=True)):
        shares[own, :, column] = _shares(cell, positive).T
    columns = shares.reshape(len(examples), -1)
    random, size, sums = np.random.default_rng(seed), len(examples), []
    for start in range(0, draws, step := max(1, BLOCK // size)):
        count = min(step, draws - start)
        picks = random.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        weights = np.bincount(picks.ravel(), minlength=count * size).reshape(count, size)
        sums.append(weights.astype(np.float32) @ columns)
    above, below = np.concatenate(sums).astype(float).T.reshape(2, len(cells), draws)
    return np.asarray(above / np.maximum(below, 1))


def _rows(cells: Sequence[Cell]) -> list[np.ndarray]:
    """Which of the target's labeled examples each cell was tested on, in order."""
    rows: list[np.ndarray] = []
    tests: dict[int, tuple[str, str]] = {}
    labels: dict[int, str] = {}
    for cell in cells:
        bits = cell["test"].get("rows")
        if bits is None:
            raise RequestError(f"cell {name_of(cell)}: no test rows: which examples it was tested on is unknown; run it again")
        rows.append(np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8))))
        consistent = tests.setdefault(cell["seed"], (bits, cell["test"]["fingerprint"])) == (bits, cell["test"]["fingerprint"])
        consistent = consistent and len(rows[-1]) == len(cell["truth"]) == len(cell["predictions"])
        labeled = zip(rows[-1].tolist(), cell["truth"], strict=True) if consistent else ()
        if not consistent or any(labels.setdefault(row, label) != label for row, label in labeled):
            raise RequestError(
                f"cell {name_of(cell)}: tested on other texts than {cells[0]['variant']}, so they cannot be compared; "
                "run both again on the same data"
            )
    return rows


def _shares(cell: Cell, positive: str | None) -> np.ndarray:
    """Return what each test text contributes to the score's numerator and denominator, [2, texts].

    Accuracy is right / all; F1 = 2 hits / (predicted + true).
    """
    truth, predicted = (np.frombuffer(cell[key].encode("ascii"), dtype=np.uint8) - ord("0") for key in ("truth", "predictions"))
    if positive is None:
        return np.stack([truth == predicted, np.ones_like(truth)])
    true, called = (classes == cell["classes"].index(positive) for classes in (truth, predicted))
    return np.stack([2 * (true & called), true.astype(int) + called])


def recomputed(cell: Cell) -> float:
    """Return the score, computed from truth and predictions."""
    above, below = _shares(cell, DATASETS[cell["dataset"]].positive).sum(axis=1, dtype=int)
    return float(above / max(below, 1))
