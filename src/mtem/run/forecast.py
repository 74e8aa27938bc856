"""How long a run will take: a plan of its stages, and the speed of each kind of work, measured before and during the run.

The work of every stage is counted in tokens (in posts, for threads). Stages of the same kind have the same speed.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtem.progress import duration

LOWER, PRETRAIN, TRAIN, METHOD, SCORE = "lower", "pretrain", "train", "method", "score"  # kinds of work
LONG = 60.0  # seconds: shorter runs have no forecast
ENOUGH = 5.0  # seconds of a kind of work after which its speed is known without a sample
SLOW_TO_DRIFT = 10.0  # seconds that the speed of the samples counts for, against what was measured since
SCORING_SHARE = 0.25  # of the time of training: where scoring has not been measured


class Sample(NamedTuple):
    """Work that was timed."""

    tokens: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Any) -> Sample:
        """Return both together."""
        return Sample(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        """Seconds per token."""
        return self.seconds / self.tokens


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes
    ----------
    name : str
        Of the progress bar; a part without a bar has any other name.
    title : str
        What the forecast calls it. Stages of the same title are added up.
    kind : str
        The kind of work.
    work : array of float, shape (units + 1,)
        The tokens that are done after so many units of the progress bar, from 0 on.
    scored : array of float, shape (units + 1,), optional
        The tokens that were scored besides, in evaluations.
    first : int
        The unit at which a resumed stage begins.
    """

    name: str
    title: str
    kind: str
    work: np.ndarray
    scored: np.ndarray | None = None
    first: int = 0

    def tokens(self, start: int, end: int | None = None) -> dict[str, float]:
        """Return the tokens by kind of work between two units of the progress bar, by default up to the last."""
        end = len(self.work) - 1 if end is None else min(end, len(self.work) - 1)
        parts = {self.kind: float(self.work[end] - self.work[start])}
        if self.scored is not None:
            parts[SCORE] = parts.get(SCORE, 0.0) + float(self.scored[end] - self.scored[start])
        return parts


def whole(name: str, title: str, kind: str, tokens: float) -> Stage:
    """Return a stage without a progress bar."""
    return Stage(name, title, kind, np.array([0.0, tokens]))


class Forecast:
    """The time that is left of a run.

    Parameters
    ----------
    stages
        All stages, in their order.
    samples
        Work of each kind that was timed before; kinds may be missing.
    started
        When the run began, by the clock.
    say
        Called once with a line for the user, as soon as the forecast is known and the run is long.
    resumed
        Whether a part of the run was done earlier.
    clock
        The time in seconds.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        samples: Mapping[str, Sample],
        *,
        started: float,
        say: Callable[[str], None] = lambda line: None,
        resumed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages, self.samples, self.started, self.say, self.resumed = list(stages), samples, started, say, resumed
        self.clock = clock
        self.measured: dict[str, Sample] = defaultdict(Sample)
        self.first: dict[str, float] | None = None  # the first forecast, for run.json
        self._next = 0  # stages before it are over
        self._current: Stage | None = None
        self._done, self._since = 0, 0.0
        self._unplanned = False
        self._announce()

    # ------------------------------------------------------------------ what the progress bar reports

    def begin(self, name: str) -> None:
        """Begin the stage of a progress bar; all stages before it are over."""
        later = range(self._next, len(self.stages))
        position = next((number for number in later if self.stages[number].name == name), None)
        self._unplanned = position is None
        if position is not None:
            self._next, self._current = position, self.stages[position]
            self._done, self._since = self._current.first, self.clock()

    def advance(self, done: int) -> None:
        """Take note that so many units of the stage are done."""
        stage = self._current
        if stage is None or not self._done <= done < len(stage.work):
            return
        now, tokens = self.clock(), stage.tokens(self._done, done)
        seconds = now - self._since
        own = tokens.pop(stage.kind)
        seconds -= sum(count * (self.rate(kind) or 0.0) for kind, count in tokens.items())
        self.measured[stage.kind] += Sample(own, max(0.0, seconds))
        self._done, self._since = done, now
        self._announce()

    def end(self) -> None:
        """End the stage."""
        if self._current is not None:
            self._next, self._current = self._next + 1, None
        self._unplanned = False

    # ------------------------------------------------------------------ the forecast

    def rate(self, kind: str) -> float | None:
        """Return the seconds per token of a kind of work; None if they are not known yet."""
        sample, measured = self.samples.get(kind), self.measured.get(kind)
        if measured is not None and measured.tokens > 0:
            ended = self._current is None or self._current.kind != kind
            if sample is not None:
                return (sample + measured).rate
            if measured.seconds >= ENOUGH or ended:
                return measured.rate
        if sample is not None:
            return sample.rate * self._drift()
        if kind == SCORE and (training := self.rate(TRAIN)) is not None:
            return SCORING_SHARE * training
        return None

    def _drift(self) -> float:
        """Return how much slower the run is than the samples were: other processes may have begun or ended."""
        both = [(self.samples[kind].rate, sample) for kind, sample in self.measured.items() if kind in self.samples]
        expected = sum(rate * sample.tokens for rate, sample in both)
        return (SLOW_TO_DRIFT + sum(sample.seconds for _, sample in both)) / (SLOW_TO_DRIFT + expected)

    def left(self) -> float | None:
        """Return the seconds that are left of the run; None if they are not known yet."""
        parts = self._parts()
        return None if parts is None else sum(parts.values())

    def _parts(self) -> dict[str, float] | None:
        """Return the seconds that are left by title; None if they are not known yet."""
        if self._unplanned:
            return None
        parts: dict[str, float] = defaultdict(float)
        rates: dict[str, float | None] = {}
        for stage in self.stages[self._next :]:
            start = self._done if stage is self._current else stage.first
            for kind, tokens in stage.tokens(start).items():
                if tokens:
                    rate = rates[kind] if kind in rates else rates.setdefault(kind, self.rate(kind))
                    if rate is None:
                        return None
                    parts[stage.title] += tokens * rate
        return parts

    def _announce(self) -> None:
        """Tell the user, once, how long the run will take."""
        if self.first is not None or (parts := self._parts()) is None:
            return
        elapsed, left = self.clock() - self.started, sum(parts.values())
        if elapsed + left < LONG:
            return
        self.first = {"after_seconds": round(elapsed, 1), "seconds": round(elapsed + left, 1)}
        about = f"about {duration(left)} more" if self.resumed else f"about {duration(elapsed + left)} in all"
        self.say(f"{about}: " + ", ".join(f"{title} {duration(seconds)}" for title, seconds in parts.items()))

    def record(self) -> dict[str, float] | None:
        """Return the first forecast beside what the run has taken by now, for run.json; None if there was none."""
        return None if self.first is None else {**self.first, "measured_seconds": round(self.clock() - self.started, 1)}
