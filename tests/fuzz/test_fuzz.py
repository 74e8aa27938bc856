"""A few hundred cases of `make fuzz`, and every input that once failed, within two gigabytes and a minute each."""

from __future__ import annotations

import pytest

from tests.fuzz import cases, past, workers
from tests.fuzz.misbehave import misbehave
from tests.fuzz.targets import TARGETS, attempt
from tests.fuzz.workers import Case, run_all
from tests.fuzz.workshop import Workshop

COUNT = 200
ONLY_IN_MAKE_FUZZ = ("checkpoint",)  # it takes seconds a case


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    patch = pytest.MonkeyPatch()
    patch.setenv("MTEM_CACHE", str(folder / "cache"))
    Workshop(folder).make()
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def outcomes(shop):
    """What came of the past failures and of the drawn cases."""
    targets = [name for name in TARGETS if name not in ONLY_IN_MAKE_FUZZ]
    drawn = list(cases.cases(COUNT, seed=0, targets=targets))
    assert {case.target for case in drawn} == set(targets)
    return list(run_all([*cases.past_cases(), *drawn], shop, cases.run))


@pytest.mark.parametrize("name", sorted(past.FAILURES))
def test_what_once_failed(outcomes, name):
    number = sorted(past.FAILURES).index(name)
    (problem,) = (outcome.problem for outcome in outcomes if outcome.case == Case(cases.PAST, number))
    assert not problem, problem


def test_drawn_cases(outcomes):
    drawn = [outcome for outcome in outcomes if outcome.case.target != cases.PAST]
    failed = [f"{outcome.case}: {outcome.problem}" for outcome in drawn if outcome.problem]
    assert len(drawn) == COUNT and not failed, "\n".join(failed[:3])


def test_a_case_is_the_same_in_every_run():
    case = Case("csv", 7, seed=3)
    assert (
        workers.drawn(case).randbytes(8)
        == workers.drawn(case).randbytes(8)
        != workers.drawn(case._replace(number=8)).randbytes(8)
    )


def test_what_the_workers_notice(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "SECONDS", 3.0)
    found = {}
    for outcome in run_all([Case("any", number) for number in (0, 1, 3, 4)], tmp_path, misbehave):
        found[outcome.case.number] = outcome.problem
    assert "KeyError: 'a bug'" in found[0] and "ended with 9" in found[1] and "hangs" in found[3] and not found[4]
    (outcome,) = run_all([Case("any", 4)], tmp_path, misbehave, memory=1 << 20)
    assert "MB of memory" in outcome.problem


def test_a_bug_is_no_refusal():
    with pytest.raises(KeyError):
        attempt(lambda: {}["a"])
