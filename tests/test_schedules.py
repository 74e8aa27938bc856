import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtem import schedules


def test_assumption_theta() -> None:
    assert schedules.assumption_theta(1, 5.0) == 1.0
    assert schedules.assumption_theta(5, 5.0) == 1.0
    assert schedules.assumption_theta(20, 5.0) == 0.25


def test_assumption_index() -> None:
    assert schedules.assumption_index(1, 3.0, smoothness=4.0) == 0.25
    assert schedules.assumption_index(1000, 3.0, smoothness=4.0) == pytest.approx(0.03)
    assert schedules.assumption_index(8, 0.1, smoothness=4.0) == pytest.approx(0.025)


@pytest.mark.parametrize("step", [0, -1])
def test_assumption_counts_from_one(step: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        schedules.assumption_theta(step, 1.0)
    with pytest.raises(ValueError, match="expected 1 or more"):
        schedules.assumption_index(step, 1.0, 1.0)
    with pytest.raises(ValueError, match="smoothness"):
        schedules.assumption_index(1, 1.0, 0.0)


def test_the_shapes() -> None:
    assert set(schedules.SCHEDULES) == {"constant", "linear", "cosine"}
    assert [schedules.constant(step, 6, 1) for step in range(6)] == [0.5, 1, 1, 1, 1, 1]
    assert [schedules.linear(step, 6, 2) for step in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    fall = [(1 + math.cos(math.pi * gone / 4)) / 2 for gone in range(4)]
    assert [schedules.cosine(step, 6, 2) for step in range(6)] == pytest.approx([1 / 3, 2 / 3, *fall])


@given(
    name=st.sampled_from(sorted(schedules.SCHEDULES)),
    total=st.integers(1, 10**9),
    warmup=st.integers(0, 10**9),
    share=st.floats(0, 1),
)
@example(name="cosine", total=1, warmup=10**9, share=1.0)
@example(name="cosine", total=10**9, warmup=0, share=1.0)
def test_every_step_taken_has_a_positive_multiplier(name: str, total: int, warmup: int, share: float) -> None:
    schedule = schedules.SCHEDULES[name]
    for step in (0, int(share * (total - 1)), total - 1):
        assert 0 < schedule(step, total, warmup) <= 1
    assert schedule(total + 5, total, min(warmup, total)) == schedule(max(total - 1, warmup), total, min(warmup, total))


@given(name=st.sampled_from(["linear", "cosine"]), total=st.integers(2, 300), warmup=st.integers(0, 100))
def test_rises_then_falls(name: str, total: int, warmup: int) -> None:
    warmup = min(warmup, total - 1)
    values = [schedules.SCHEDULES[name](step, total, warmup) for step in range(total)]
    assert max(values) == values[warmup] == 1.0
    assert values[: warmup + 1] == sorted(values[: warmup + 1])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    if total - warmup > 1:
        assert values[-1] < 1.0


def test_negative_steps_are_refused() -> None:
    for schedule in schedules.SCHEDULES.values():
        with pytest.raises(ValueError, match="expected no negative values"):
            schedule(-1, 10, 0)
