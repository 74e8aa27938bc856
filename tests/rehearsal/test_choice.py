"""Choosing by the scores in rehearsed domains: collapse, chance, ties, and the interval of the gains."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mtem.rehearsal.choice import LEVEL, Configuration, Curve, choose, mean_scores, smoothed, student_interval, summarise
from mtem.selection.criteria import GUARD
from tests.conftest import examples

ONE, OTHER = Configuration("mtem", 1e-3, "none"), Configuration("fixmatch", 1e-3, "none")
SCORES = st.floats(0, 1).map(lambda value: round(value, 3))


def curve(scores, domain="books", configuration=ONE, infomax=None, rare="", classes=2):
    scores = np.array(scores, dtype=float)
    infomax = np.full(len(scores), 0.3) if infomax is None else np.array(infomax, dtype=float)
    return Curve(configuration, domain, rare, np.arange(len(scores), dtype=float), scores, infomax, classes)


# ---------------------------------------------------------------------- what a run would keep


def test_after_a_collapse_earlier_weights_count():
    fallen = 0.3 - 1.01 * GUARD * math.log(2)
    trial = curve([0.6, 0.7, 0.5, 0.8, 0.4], infomax=[0.3, 0.3, fallen, 0.31, 0.0])
    assert trial.guarded().tolist() == [0.6, 0.7, 0.7, 0.8, 0.8]
    assert curve([0.6, 0.9], infomax=[0.3, fallen]).guarded().tolist() == [0.6, 0.6], "also where it happens to score well"


def test_infomax_may_fall_a_little_and_more_with_more_classes():
    little = 0.3 - 0.99 * GUARD * math.log(2)
    assert curve([0.6, 0.7], infomax=[0.3, little]).guarded().tolist() == [0.6, 0.7]
    more = 0.3 - 0.99 * GUARD * math.log(10)
    assert curve([0.6, 0.7], infomax=[0.3, more]).guarded().tolist() == [0.6, 0.6]
    assert curve([0.6, 0.7], infomax=[0.3, more], classes=10).guarded().tolist() == [0.6, 0.7]


@given(st.lists(st.tuples(SCORES, st.floats(0, 0.7)), min_size=1, max_size=8))
@examples(60)
def test_guarded_scores_are_scores_of_candidates_that_hold_up(pairs):
    trial = curve([score for score, _ in pairs], infomax=[value for _, value in pairs])
    allowed = trial.infomax >= trial.infomax[0] - GUARD * math.log(2)
    for number, kept in enumerate(trial.guarded()):
        last = max(each for each in range(number + 1) if allowed[each])
        assert kept == trial.scores[last]


# ---------------------------------------------------------------------- the best of many is partly chance


def test_neighbours_are_averaged_and_the_source_model_is_none():
    assert smoothed(np.array([0.1, 0.4, 0.6, 0.8])) == pytest.approx([0.1, 0.5, 0.6, 0.7])
    assert smoothed(np.array([0.1, 0.4])) == pytest.approx([0.1, 0.4]) and smoothed(np.array([0.3])) == pytest.approx([0.3])


@given(st.lists(SCORES, min_size=1, max_size=9))
@examples(60)
def test_smoothing_by_its_formula(values):
    found = smoothed(np.array(values))
    assert found[0] == values[0]
    for number in range(1, len(values)):
        near = [values[each] for each in (number - 1, number, number + 1) if 1 <= each < len(values)]
        assert found[number] == pytest.approx(sum(near) / len(near))


def test_a_plateau_beats_a_peak():
    peak, plateau = curve([0.5, 0.5, 0.8, 0.5, 0.5]), curve([0.5, 0.7, 0.7, 0.7, 0.7], configuration=OTHER)
    assert choose([peak, plateau]).configuration == OTHER


# ---------------------------------------------------------------------- the choice


def test_the_highest_mean_over_the_domains_wins():
    curves = [curve([0.5, 0.6, 0.6]), curve([0.7, 0.8, 0.8], "dvd")]
    curves += [curve([0.5, 0.9, 0.9], configuration=OTHER), curve([0.7, 0.3, 0.3], "dvd", OTHER)]
    found = choose(curves)
    assert found.configuration == ONE and found.gains == pytest.approx({"books": 0.1, "dvd": 0.1})
    assert found.mean == pytest.approx(0.1) and found.score == pytest.approx(0.7)
    assert (found.low, found.high) == pytest.approx((0.1, 0.1)), "equal gains"


def test_the_source_model_wins_ties():
    assert choose([curve([0.5, 0.5, 0.5])]).epoch == 0
    tied = [curve([0.5, 0.6, 0.6]), curve([0.5, 0.4, 0.4], "dvd")]
    found = choose(tied)
    assert found.epoch == 0 and found.gains == {"books": 0.0, "dvd": 0.0} and found.mean == 0
    better = choose([*tied[:1], curve([0.5, 0.41, 0.41], "dvd")])
    assert better.epoch > 0 and better.mean == pytest.approx(0.005)


def test_of_equal_configurations_the_first_wins():
    assert choose([curve([0.5, 0.6]), curve([0.5, 0.6], configuration=OTHER)]).configuration == ONE
    assert choose([curve([0.5, 0.6], configuration=OTHER), curve([0.5, 0.6])]).configuration == OTHER


def test_of_level_configurations_the_steadier_one_wins():
    uneven = [curve([0.5, 0.7, 0.7]), curve([0.5, 0.5, 0.5], "dvd")]
    steady = [curve([0.5, 0.599, 0.599], configuration=OTHER), curve([0.5, 0.6, 0.6], "dvd", OTHER)]
    assert choose([*uneven, *steady]).configuration == OTHER
    behind = [curve([0.5, 0.59, 0.59], configuration=OTHER), curve([0.5, 0.59, 0.59], "dvd", OTHER)]
    assert choose([*uneven, *behind]).configuration == ONE, "not level"


def test_a_domain_counts_once_however_many_trials_it_has():
    common = [curve([0.5, 0.4, 0.4], rare=rare) for rare in ("", "bad", "good")]
    found = choose([*common, curve([0.5, 0.7, 0.7], "dvd")])
    assert found.epoch > 0 and found.gains == pytest.approx({"books": -0.1, "dvd": 0.2}) and found.mean == pytest.approx(0.05)


def test_collapsed_trials_do_not_count_as_gains():
    assert choose([curve([0.5, 0.9, 0.9], infomax=[0.3, 0.0, 0.0])]).epoch == 0


def test_nothing_to_choose_from():
    with pytest.raises(ValueError, match="no trials"):
        choose([])


@given(st.lists(st.lists(SCORES, min_size=4, max_size=4), min_size=1, max_size=4), st.data())
@examples(60)
def test_the_order_of_the_domains_does_not_matter(rows, data):
    curves = [curve(row, f"d{number}") for number, row in enumerate(rows)]
    found = choose(curves)
    mixed = data.draw(st.permutations(curves))
    assert choose(mixed) == found
    means = np.mean([c.scores for c in curves], axis=0)
    assert found.score == pytest.approx(means[int(found.epoch)])
    noise = literal_noise(rows)
    if found.epoch == 0:
        assert set(found.gains.values()) == {0.0}
    else:
        assert smoothed(means)[int(found.epoch)] >= smoothed(means).max() - LEVEL - 1e-9
        assert found.mean > noise - 1e-12
        later = smoothed(means)[int(found.epoch) + 1 :]
        assert not (later >= smoothed(means).max() - LEVEL + 1e-9).any(), "of equal passes the last"


def literal_noise(rows):
    """The typical change of a domain's score from one pass to the next."""
    squares = [(row[number + 1] - row[number]) ** 2 for row in rows for number in range(1, len(row) - 1)]
    return math.sqrt(sum(squares) / len(squares))


def test_of_passes_that_are_level_the_last_is_taken():
    assert choose([curve([0.5, 0.6, 0.7, 0.7, 0.699, 0.699])]).epoch == 5
    assert choose([curve([0.5, 0.6, 0.7, 0.7, 0.68, 0.66])]).epoch == 3


def test_a_gain_below_the_noise_from_pass_to_pass_is_chance():
    wild = [curve([0.5, 0.56, 0.46, 0.58, 0.50, 0.57, 0.48]), curve([0.5, 0.45, 0.55, 0.46, 0.56, 0.45, 0.57], "dvd")]
    assert choose(wild).epoch == 0
    calm = [curve([0.5, 0.51, 0.52, 0.53, 0.53, 0.53, 0.53]), curve([0.5, 0.5, 0.51, 0.51, 0.51, 0.51, 0.51], "dvd")]
    assert choose(calm).epoch == 6 and choose(calm).mean == pytest.approx(0.02)


def test_curves_of_different_length_are_compared_where_all_have_candidates():
    epochs, scores = mean_scores([curve([0.1, 0.2, 0.3]), curve([0.3, 0.4], "art")])
    assert epochs.tolist() == [0, 1] and scores.tolist() == [[0.3, 0.4], [0.1, 0.2]], "domains in alphabetical order"


def test_gains_of_a_configuration_at_some_passes():
    found = summarise(ONE, [curve([0.5, 0.7, 0.6]), curve([0.4, 0.5, 0.7], "art")], 2.0)
    assert found.epoch == 2 and list(found.gains) == ["art", "books"] and found.gains == pytest.approx({"art": 0.3, "books": 0.1})


# ---------------------------------------------------------------------- the interval


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
@examples(40)
def test_the_interval_is_students(values):
    low, high = student_interval(np.array(values))
    mean, half = np.mean(values), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=1e-9)


def test_one_domain_has_no_interval():
    assert student_interval(np.array([0.1])) == (None, None)
    found = choose([curve([0.5, 0.6, 0.6])])
    assert (found.low, found.high) == (None, None) and found.mean == pytest.approx(0.1)
