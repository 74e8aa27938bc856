"""The forecast of a run, from invented timings."""

from __future__ import annotations

import numpy as np
import pytest

from mtem.run import forecast as module
from mtem.run.forecast import LOWER, METHOD, SCORE, TRAIN, Forecast, Sample, Stage, whole

EVEN = np.arange(11) * 100.0  # 10 units of 100 tokens


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def stages() -> list[Stage]:
    evaluated = np.zeros(11)
    evaluated[6] = 1000.0  # after step 5
    return [
        Stage("frozen layers, target texts", "frozen layers", LOWER, EVEN),
        Stage("source", "source training", TRAIN, EVEN),
        whole("the source model", "adaptation", SCORE, 1000),
        Stage("adapt", "adaptation", METHOD, EVEN, np.cumsum(evaluated)),
        Stage("without books", "left-out models", TRAIN, EVEN),
        Stage("predicting the target texts", "prediction", SCORE, EVEN),
    ]


# Of 1,000 tokens: 50 s below, 200 s of training, 500 s of the method, 30 s of scoring.
SAMPLES = {LOWER: Sample(100, 5), TRAIN: Sample(100, 20), METHOD: Sample(100, 50), SCORE: Sample(100, 3)}
IN_ALL = 50 + 200 + 30 + 500 + 30 + 200 + 30


def begin(forecast: Forecast, clock: Clock, name: str, seconds: float, units: int = 10, first: int = 0) -> None:
    """A stage of which every unit takes as many seconds."""
    forecast.begin(name)
    forecast.advance(first)
    for done in range(first + 1, units + 1):
        clock.now += seconds
        forecast.advance(done)


def test_with_samples_the_whole_run_is_known_at_once(clock):
    lines = []
    clock.now += 20
    forecast = Forecast(stages(), SAMPLES, started=50.0, say=lines.append, clock=clock)
    assert forecast.left() == pytest.approx(IN_ALL)
    assert lines == [
        "about 18 min in all: frozen layers 50 s, source training 3 min, adaptation 9 min, left-out models 3 min, prediction 30 s"
    ]
    clock.now += 1100
    assert forecast.record() == {"after_seconds": 20.0, "seconds": 20.0 + IN_ALL, "measured_seconds": 1120.0}


def test_a_run_as_forecast_counts_down_to_nothing(clock):
    lines = []
    forecast = Forecast(stages(), SAMPLES, started=50.0, say=lines.append, clock=clock)
    end = clock.now + IN_ALL
    for name, seconds in (("frozen layers, target texts", 5), ("source", 20)):
        begin(forecast, clock, name, seconds)
        assert forecast.left() == pytest.approx(end - clock.now)
        forecast.end()
    clock.now += 30
    forecast.begin("adapt")
    for done in range(1, 11):
        clock.now += 50 + 30 * (done == 6)
        forecast.advance(done)
        assert forecast.left() == pytest.approx(end - clock.now)
    forecast.end()
    for name, seconds in (("without books", 20), ("predicting the target texts", 3)):
        begin(forecast, clock, name, seconds)
        assert forecast.left() == pytest.approx(end - clock.now)
        forecast.end()
    assert forecast.left() == 0 and len(lines) == 1


def test_measured_work_outweighs_its_sample(clock):
    forecast = Forecast(stages(), SAMPLES, started=50.0, clock=clock)
    forecast.begin("source")
    rates = []
    for done in range(1, 11):
        clock.now += 40
        forecast.advance(done)
        rates.append(forecast.rate(TRAIN))
    assert rates == sorted(rates) and 0.38 < rates[-1] < 0.4  # 0.2 in the sample, 0.4 in the run
    forecast.end()
    begin(forecast, clock, "without books", 40, units=5)
    assert forecast.left() == pytest.approx(5 * 100 * forecast.rate(TRAIN) + 10 * 100 * forecast.rate(SCORE))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_work_that_has_not_begun_is_expected_to_deviate_as_the_rest_did(clock, factor):
    forecast = Forecast(stages(), SAMPLES, started=50.0, clock=clock)
    begin(forecast, clock, "source", 20 * factor)
    sample = SAMPLES[METHOD].rate
    assert abs(forecast.rate(METHOD) / sample - factor) < 0.1 * factor
    assert min(1, factor) < forecast.rate(METHOD) / sample < max(1, factor)


def test_evaluations_do_not_count_as_steps_of_the_method(clock):
    forecast = Forecast(stages(), SAMPLES, started=50.0, clock=clock)
    forecast.begin("adapt")
    for done in range(1, 8):
        clock.now += 50 + 30 * (done == 6)
        forecast.advance(done)
    assert forecast.rate(METHOD) == pytest.approx(0.5)


def test_without_samples_it_is_known_once_every_kind_of_work_is(clock):
    lines = []
    forecast = Forecast(stages(), {}, started=50.0, say=lines.append, clock=clock)
    assert forecast.left() is None and forecast.record() is None
    begin(forecast, clock, "frozen layers, target texts", 5)
    forecast.end()
    begin(forecast, clock, "source", 20)
    forecast.end()
    assert forecast.left() is None
    begin(forecast, clock, "adapt", module.ENOUGH / 10, units=9)
    assert forecast.left() is None, "a few fast steps prove little"
    forecast.end()
    forecast = Forecast(stages(), {}, started=50.0, say=lines.append, clock=clock)
    begin(forecast, clock, "source", 20)
    forecast.end()
    begin(forecast, clock, "adapt", 50, units=2)
    scoring = module.SCORING_SHARE * 0.2
    assert forecast.left() == pytest.approx(8 * 50 + 1000 * scoring + 200 + 1000 * scoring)
    assert len(lines) == 1 and lines[0].startswith("about ")


def test_a_stage_that_was_short_is_known_when_it_is_over(clock):
    forecast = Forecast(stages()[1:2] + stages()[4:5], {}, started=50.0, clock=clock)
    begin(forecast, clock, "source", 0.1)
    assert forecast.left() is None
    forecast.end()
    assert forecast.left() == pytest.approx(1)


def test_short_runs_have_none(clock):
    lines = []
    quick = {kind: Sample(sample.tokens, sample.seconds / 100) for kind, sample in SAMPLES.items()}
    forecast = Forecast(stages(), quick, started=50.0, say=lines.append, clock=clock)
    assert lines == [] and forecast.record() is None
    begin(forecast, clock, "source", 40)  # unless they turn out to be long
    assert len(lines) == 1 and forecast.record()["seconds"] > module.LONG


def test_a_resumed_run_forecasts_the_rest(clock):
    lines = []
    rest = [Stage("adapt", "adaptation", METHOD, EVEN, first=4), *stages()[4:]]
    forecast = Forecast(rest, SAMPLES, started=50.0, say=lines.append, resumed=True, clock=clock)
    assert forecast.left() == pytest.approx(300 + 200 + 30)
    assert lines == ["about 9 min more: adaptation 5 min, left-out models 3 min, prediction 30 s"]
    begin(forecast, clock, "adapt", 50, units=5, first=4)
    assert forecast.rate(METHOD) == pytest.approx(0.5) and forecast.left() == pytest.approx(250 + 200 + 30)


def test_an_unplanned_stage_stops_the_forecast_while_it_lasts(clock):
    forecast = Forecast(stages(), SAMPLES, started=50.0, clock=clock)
    forecast.begin("another stage")
    clock.now += 500
    forecast.advance(3)
    assert forecast.left() is None
    forecast.end()
    assert forecast.left() == pytest.approx(IN_ALL)


def test_stages_that_were_skipped_are_over(clock):
    forecast = Forecast(stages(), SAMPLES, started=50.0, clock=clock)
    forecast.begin("adapt")
    assert forecast.left() == pytest.approx(500 + 30 + 200 + 30)


def test_the_work_of_a_stage_need_not_be_even(clock):
    longest_first = np.concatenate([[0], np.cumsum([500, 300, 100, 100])])
    forecast = Forecast([Stage("frozen", "frozen", LOWER, longest_first)], {LOWER: Sample(1, 1)}, started=50.0, clock=clock)
    forecast.begin("frozen")
    clock.now += 500
    forecast.advance(1)
    assert forecast.left() == pytest.approx(500)
