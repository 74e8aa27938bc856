import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.estimation import estimate_accuracy, warnings
from mtem.selection import calibrate, entropy, log_softmax
from tests.conftest import examples
from tests.reference import selection as reference


def calibrated(random, rows, classes=5, strength=3.0):
    """Scores, and labels drawn from their softmax: a model that is exactly as sure as it is right."""
    scores = strength * random.normal(size=(rows, classes))
    labels = (scores + random.gumbel(size=scores.shape)).argmax(axis=1)
    return scores, labels


def accuracy(scores, labels):
    return float((scores.argmax(axis=1) == labels).mean())


def easy_and_hard(random, rows, hard, classes=5):
    """Calibrated scores of texts that are either easy or next to hopeless."""
    scores = 0.5 * random.normal(size=(rows, classes))
    scores += 8 * np.eye(classes)[random.integers(0, classes, rows)] * (random.random(rows) >= hard)[:, None]
    return scores, (scores + random.gumbel(size=scores.shape)).argmax(axis=1)


@pytest.mark.parametrize("hard", [0.05, 0.15, 0.3, 0.4])
def test_estimate_follows_the_truth_under_shift(hard):
    """Hard texts are 15 % of the source and some other share of the target; the scores are all twice too large."""
    random = np.random.default_rng(0)
    source, labels = easy_and_hard(random, 5000, 0.15)
    target, hidden = easy_and_hard(random, 5000, hard)
    truth = accuracy(target, hidden)
    estimate = estimate_accuracy(2 * source, labels, 2 * target)
    assert estimate.accuracy == pytest.approx(truth, abs=0.03)
    assert estimate.low <= truth <= estimate.high
    assert hard == 0.15 or abs(estimate.source_accuracy - truth) > 0.05


def test_a_model_that_knows_how_unsure_it_is():
    """All texts get harder and the model notices: thresholding is too low, as documented; the interval reaches up."""
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 5000)
    target, hidden = calibrated(random, 5000, strength=2.0)
    estimate = estimate_accuracy(source, labels, target)
    assert estimate.accuracy < accuracy(target, hidden) - 0.1
    assert estimate.by_confidence == pytest.approx(accuracy(target, hidden), abs=0.03)
    assert estimate.high >= estimate.by_confidence


def test_interval_covers_the_truth():
    covered = wide = 0
    for seed in range(50):
        random = np.random.default_rng(seed)
        source, labels = calibrated(random, 300)
        target, hidden = calibrated(random, 600)
        estimate = estimate_accuracy(source, labels, target, seed=seed)
        covered += estimate.low <= accuracy(target, hidden) <= estimate.high
        wide += estimate.high - estimate.low > 0.2
    assert covered >= 42
    assert wide == 0


def test_estimate_matches_the_literal_reading():
    random = np.random.default_rng(3)
    for classes in (2, 5):
        source, labels = calibrated(random, 80, classes=classes)
        target, _ = calibrated(random, 50, classes=classes, strength=1.5)
        temperature = calibrate(source, labels)
        right = source.argmax(axis=1) == labels
        sure = [-reference.entropy(reference.softmax(row, temperature)) for row in source.tolist()]
        target_sure = [-reference.entropy(reference.softmax(row, temperature)) for row in target.tolist()]
        expected = reference.thresholded_confidence(sure, right.tolist(), target_sure)
        assert estimate_accuracy(source, labels, target).accuracy == pytest.approx(expected, abs=1e-12)
        np.testing.assert_allclose(-entropy(log_softmax(source, temperature)), sure, atol=1e-12)


@given(seed=st.integers(0, 1000), rows=st.integers(1, 60), classes=st.integers(2, 5))
@examples(40)
def test_source_as_its_own_target_gives_the_source_accuracy(seed, rows, classes):
    scores, labels = calibrated(np.random.default_rng(seed), rows, classes=classes)
    estimate = estimate_accuracy(scores, labels, scores, resamples=20)
    assert estimate.accuracy == pytest.approx(accuracy(scores, labels), abs=1e-9)
    assert estimate.by_confidence == pytest.approx(accuracy(scores, labels), abs=1e-9)
    assert 0 <= estimate.low <= estimate.accuracy <= estimate.high <= 1


def test_equally_sure_texts_share_the_source_accuracy():
    scores = np.tile([1.0, 0.0], (10, 1))
    labels = np.array([0] * 7 + [1] * 3)
    assert estimate_accuracy(scores, labels, scores[:4]).accuracy == pytest.approx(0.7)


def test_few_texts_without_an_error_are_no_certainty():
    sure = np.array([[4.0, 0.0], [0.0, 4.0]])
    few = estimate_accuracy(np.tile(sure, (5, 1)), np.array([0, 1] * 5), np.tile(sure, (5, 1)))
    many = estimate_accuracy(np.tile(sure, (500, 1)), np.array([0, 1] * 500), np.tile(sure, (500, 1)))
    assert few.accuracy == many.accuracy == 1.0
    assert few.low < 0.85
    assert many.low > 0.99
    wrong = estimate_accuracy(np.tile(sure, (5, 1)), np.array([1, 0] * 5), sure)
    assert wrong.accuracy == 0.0 and wrong.high > 0.1
    single = estimate_accuracy(sure[:1], np.array([0]), sure[:1])
    assert single.low < 0.3 and single.high == 1.0


def test_interval_shrinks_with_texts_and_repeats_with_the_seed():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 4000)
    target, _ = calibrated(random, 4000)
    small = estimate_accuracy(source[:100], labels[:100], target[:100])
    large = estimate_accuracy(source, labels, target)
    assert (large.high - large.low) < 0.35 * (small.high - small.low)
    assert estimate_accuracy(source, labels, target) == large
    assert estimate_accuracy(source, labels, target, seed=1).low != large.low


def test_domains_that_mislead_each_other_widen_the_interval():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 900)
    target, _ = calibrated(random, 900)
    domains = np.arange(900) % 3
    alone = estimate_accuracy(source, labels, target)
    alike = estimate_accuracy(source, labels, target, source_domains=domains)
    assert alone.domain_error is None
    assert alike.domain_error == pytest.approx(0, abs=0.03)
    # in the third domain the model is as sure as ever and right half as often
    spoiled = np.where((domains == 2) & (random.random(900) < 0.5), (labels + 1) % 5, labels)
    wide = estimate_accuracy(source, spoiled, target, source_domains=domains)
    plain = estimate_accuracy(source, spoiled, target)
    assert 0.15 < wide.domain_error < 0.5
    assert wide.accuracy == plain.accuracy
    # half-widths add in quadrature
    below = math.hypot(plain.accuracy - plain.low, 1.96 * wide.domain_error)
    assert wide.low == pytest.approx(max(0.0, plain.accuracy - below))
    above = math.hypot(plain.high - plain.accuracy, 1.96 * wide.domain_error)
    assert wide.high == pytest.approx(min(1.0, plain.accuracy + above))
    # one domain, or one with hardly a text, says nothing
    assert estimate_accuracy(source, labels, target, source_domains=np.zeros(900)).domain_error is None
    lonely = (np.arange(900) < 5).astype(int)
    assert estimate_accuracy(source, labels, target, source_domains=lonely).domain_error is None


def test_two_estimates_that_disagree_are_noted():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 2000)
    same = estimate_accuracy(source, labels, calibrated(random, 2000)[0])
    assert same.notes == ()
    hard = estimate_accuracy(source, labels, calibrated(random, 2000, strength=0.5)[0])
    assert abs(hard.accuracy - hard.by_confidence) > 0.05
    assert f"{hard.by_confidence:.3f}" in hard.notes[0]


def same(estimate, other):
    return (estimate.accuracy, estimate.low, estimate.high) == pytest.approx((other.accuracy, other.low, other.high), abs=1e-12)


def test_anchor_bounds_what_changed_predictions_can_gain():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 1000)
    target, _ = calibrated(random, 1000, strength=1.5)
    before = estimate_accuracy(source, labels, target)
    surer = 4 * target  # self-training: the same predictions, much surer of them
    surer[:20] = np.roll(surer[:20], 1, axis=1)  # 2 % of them changed
    naive = estimate_accuracy(source, labels, surer)
    after = estimate_accuracy(source, labels, surer, anchor=(before, target))
    assert naive.accuracy > before.accuracy + 0.1
    assert after.accuracy == pytest.approx(before.accuracy + 0.01)  # halfway to what the 2 % allow
    assert (after.low, after.high) == pytest.approx((before.low - 0.02, before.high + 0.02))
    assert "2.0%" in after.notes[-1] and f"{naive.accuracy:.3f}" in after.notes[-1]
    assert after.source_model == before.accuracy and before.source_model is None
    assert same(estimate_accuracy(source, labels, target, anchor=(before, target)), before)
    with pytest.raises(ValueError, match="1000 texts, got 3"):
        estimate_accuracy(source, labels, target, anchor=(before, target[:3]))


def test_the_estimate_is_halfway_to_the_models_own_confidence():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 1000)
    target, _ = calibrated(random, 1000, strength=0.5)
    before = estimate_accuracy(source, labels, target)
    surer = 4 * np.roll(target, 1, axis=1)  # every prediction is another: no bound
    own = estimate_accuracy(source, labels, surer)
    assert own.accuracy > before.high  # its own interval would not reach down to the source model's
    after = estimate_accuracy(source, labels, surer, anchor=(before, target))
    assert after.accuracy == pytest.approx((before.accuracy + own.accuracy) / 2)
    assert after.low == pytest.approx(min(before.low, own.low)) and after.high == pytest.approx(max(before.high, own.high))
    assert f"{before.accuracy:.3f}" in after.notes[-1] and f"{own.accuracy:.3f}" in after.notes[-1]


def test_assumed_shares_weight_the_source_texts():
    """Every text of the rarer class three times is what a weight of three says."""
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 1500, classes=3)
    target, _ = calibrated(random, 500, classes=3, strength=1.5)
    kept = np.concatenate([np.flatnonzero(labels == 0)[:90], *(np.flatnonzero(labels == k)[:30] for k in (1, 2))])
    source, labels = source[kept] + np.array([0.7, 0.0, 0.0]), labels[kept]  # a model that leans as its texts do
    domains = np.arange(len(labels)) % 2
    weighted = estimate_accuracy(source, labels, target, target_shares=np.full(3, 1 / 3), source_domains=domains)
    plain = estimate_accuracy(source, labels, target, source_domains=domains)
    often = np.concatenate([np.arange(90), np.tile(np.arange(90, 150), 3)])
    repeated = estimate_accuracy(source[often], labels[often], target)
    for one, other in ((weighted, repeated), (plain, repeated)):  # the temperature's smoothing knows the number of texts
        alike = abs(one.accuracy - other.accuracy) < 5e-3 and abs(one.by_confidence - other.by_confidence) < 5e-3
        assert alike == (one is weighted), (weighted, repeated, plain)
    assert weighted.source_accuracy == plain.source_accuracy and weighted.domain_error is not None
    alike = estimate_accuracy(source, labels, target, target_shares=[0.6, 0.2, 0.2])  # as they are
    assert same(alike, estimate_accuracy(source, labels, target))


def test_estimate_is_ready_for_json():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 50)
    estimate = estimate_accuracy(source.astype(np.float32), labels, source, source_domains=np.arange(50) % 2)
    assert json.loads(json.dumps(asdict(estimate)))["accuracy"] == estimate.accuracy
    with pytest.raises(ValueError, match="at least one"):
        estimate_accuracy(source, labels, source[:0])


# -- warnings ---------------------------------------------------------------------------------------------------------


def predicted(*counts):
    """Scores whose predictions have these counts."""
    return np.eye(len(counts))[np.repeat(np.arange(len(counts)), counts)]


def test_nothing_to_warn_of():
    assert warnings([0.5, 0.5], predicted(260, 240), predicted(240, 260), 500, ["neg", "pos"], held_out=50) == []
    assert warnings([0.5, 0.5], None, predicted(100, 100), 200, ["neg", "pos"]) == []


def test_collapse_into_one_class():
    found = warnings([0.5, 0.5], predicted(300, 200), predicted(500, 0), 500, ["neg", "pos"])
    assert len([line for line in found if "collapse" in line]) == 1
    assert "all 500" in found[0] and "'neg'" in found[0]
    assert not any("class shares" in line for line in found)


def test_a_class_driven_out():
    found = warnings([0.66, 0.34], predicted(400, 100), predicted(490, 10), 500, ["non-rumour", "rumour"])
    collapse = next(line for line in found if "collapse" in line)
    assert all(piece in collapse for piece in ("'rumour'", "34.0%", "2.0%", "20.0% before"))
    # just above a tenth of its share is no collapse
    mild = warnings([0.66, 0.34], predicted(400, 100), predicted(482, 18), 500, ["non-rumour", "rumour"])
    assert not any("collapse" in line for line in mild)
    # a class that was rare in the source may be missing
    rare = warnings([0.97, 0.03], None, predicted(500, 0, 0)[:, :2], 500, ["a", "b"])
    assert [line for line in rare if "driven out" in line] == []


def test_many_classes_scale_the_share_that_counts():
    share = np.full(20, 0.05)
    share[0], share[1] = 0.07, 0.03
    counts = [0 if k == 1 else 50 for k in range(20)]
    found = warnings(share, None, predicted(*counts), 950, [f"class {k}" for k in range(20)])
    assert len(found) == 1 and "'class 1'" in found[0] and "3.0%" in found[0]


def test_shifted_shares():
    found = warnings([0.5, 0.5], None, predicted(150, 350), 500, ["neg", "pos"])
    assert len(found) == 1
    assert all(piece in found[0] for piece in ("20.0%", "'neg' 50.0% -> 30.0%", "'pos' 50.0% -> 70.0%"))
    assert warnings([0.5, 0.5], None, predicted(180, 320), 500, ["neg", "pos"]) == []
    # forty texts in twenty classes are that uneven by chance
    random = np.random.default_rng(0)
    chance = np.eye(20)[random.integers(0, 20, 40)]
    found = warnings(np.full(20, 0.05), None, chance, 500, [str(k) for k in range(20)])
    assert not any("class shares" in line for line in found)


def test_drift():
    before = predicted(250, 250)
    moved = before.copy()
    moved[170:330] = moved[170:330][:, ::-1]
    found = warnings([0.5, 0.5], before, moved, 500, ["neg", "pos"])
    assert len(found) == 1 and "drift" in found[0] and "32.0%" in found[0]
    assert warnings([0.5, 0.5], before, np.roll(before, 75, axis=0), 500, ["neg", "pos"]) == []  # 30 % exactly


def test_few_texts():
    found = warnings([0.5, 0.5], None, predicted(100, 99), 199, ["neg", "pos"], held_out=49)
    assert len(found) == 2
    assert "199 target texts" in found[0] and "49 held-out source texts" in found[1]
