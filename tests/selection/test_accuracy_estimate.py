import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from mtem.selection.accuracy_estimate import ONE_DOMAIN, _resample, _thresholded, estimate_accuracy
from mtem.selection.calibration import calibrate, entropy, log_softmax
from mtem.selection.diagnostics import result_warnings
from mtem.selection.left_out import DOMAIN, FOLD, LeftOut
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


def left_out(random, name="books", rows=2000, wrong=0.0, kind=DOMAIN):
    """What a calibrated model said; in the texts that were left out it is as sure as ever, and a share of it is wrong besides."""
    held, held_labels = calibrated(random, 600)
    scores, labels = calibrated(random, rows)
    labels = np.where(random.random(rows) < wrong, (scores.argmax(axis=1) + 1) % 5, labels)
    return LeftOut(kind, name, scores, labels, held, held_labels, scores)


def error_of(one):
    """The literal reading: the same estimate for the texts that were left out, less how often their labels are right."""
    return estimate_accuracy(one.held_out_logits, one.held_out_labels, one.logits).by_threshold - accuracy(one.logits, one.labels)


def test_errors_in_domains_that_were_left_out_widen_the_interval():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 900)
    target, _ = calibrated(random, 900)
    alone = estimate_accuracy(source, labels, target)
    assert alone.domain_error is None and alone.left_out == 0 and ONE_DOMAIN in alone.notes
    domains = [left_out(random, str(number), wrong=wrong) for number, wrong in enumerate((0.0, 0.1, 0.5))]
    errors = [error_of(one) for one in domains]
    assert abs(errors[0]) < 0.05 < errors[1] < 0.2 < errors[2]
    wide = estimate_accuracy(source, labels, target, left_out=domains)
    assert wide.domain_error == pytest.approx(math.sqrt(sum(error**2 for error in errors) / 3))
    assert wide.left_out == 3 and wide.accuracy == alone.accuracy and ONE_DOMAIN not in wide.notes
    # half-widths add in quadrature; 3.182 is Student's quantile of three domains, as any table has it
    assert wide.low < 0.1 and wide.high == 1.0
    narrow = estimate_accuracy(source, labels, target, left_out=domains[:1] * 3)
    plain = np.quantile(_resample(_thresholded(source, labels, target, None), 200, np.random.default_rng(0)), [0.025, 0.975])
    for found, end in zip((narrow.low, narrow.high), plain, strict=True):
        distance = math.hypot(end - narrow.accuracy, 3.182446 * abs(errors[0]))
        assert abs(found - narrow.accuracy) == pytest.approx(distance, rel=1e-6)


def test_few_domains_are_less_certain_than_many():
    random = np.random.default_rng(1)
    source, labels = calibrated(random, 900)
    target, _ = calibrated(random, 900)
    one = left_out(random, wrong=0.03)
    widths = [
        found.high - found.low
        for found in (estimate_accuracy(source, labels, target, left_out=[one] * count) for count in (2, 3, 20))
    ]
    assert widths[0] > widths[1] > widths[2]


def test_intervals_hold_the_truth_where_domains_differ():
    """A domain's error is drawn at random; the target's is one more of the kind. Three domains say how large they are."""
    random = np.random.default_rng(0)
    inside, runs = 0, 200
    for _ in range(runs):
        source, labels = calibrated(random, 300)
        domains = [left_out(random, rows=300, wrong=abs(random.normal(scale=0.08))) for _ in range(3)]
        target = left_out(random, rows=300, wrong=abs(random.normal(scale=0.08)))
        found = estimate_accuracy(source, labels, target.logits, left_out=domains, resamples=50)
        inside += found.low <= accuracy(target.logits, target.labels) <= found.high
    assert 0.9 * runs <= inside <= 0.995 * runs, inside


def test_labeled_target_texts_are_the_estimate():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 900)
    target, _ = calibrated(random, 400)
    folds = [left_out(random, str(number), rows=25, wrong=0.4, kind=FOLD) for number in range(4)]
    right = np.concatenate([one.logits.argmax(axis=1) == one.labels for one in folds])
    before = estimate_accuracy(source, labels, target, left_out=folds)
    assert before.method == "labeled target texts, cross-fitted" and before.left_out == 4 and before.domain_error is None
    assert before.accuracy == pytest.approx(right.mean())
    chance = 1.96 * math.sqrt(right.mean() * (1 - right.mean()) / 400)
    low, high = beta.ppf([0.025, 0.975], right.sum() + 0.5, (~right).sum() + 0.5)  # Jeffreys' interval
    spread = 3.182446 * np.std([part.mean() for part in np.split(right, 4)], ddof=1) / 2  # Student's, of four means
    for found, end in ((before.low, low), (before.high, high)):
        distance = math.hypot(max(abs(end - right.mean()), spread), chance)
        assert abs(found - right.mean()) == pytest.approx(distance, abs=2e-3)
    alike = estimate_accuracy(source, labels, target, left_out=folds[:1] * 4)  # parts that agree: Jeffreys' is wider
    assert alike.high - alike.low > 2 * chance
    # an adapted model: its own confidence, less what that was off by in the source model's
    surer = 2 * target
    surer[:200] = np.roll(surer[:200], 1, axis=1)
    own = estimate_accuracy(source, labels, surer)
    after = estimate_accuracy(source, labels, surer, left_out=folds, anchor=(before, target))
    expected = own.by_threshold + before.accuracy - before.by_threshold
    bound = min(max(expected, before.accuracy - 0.5), before.accuracy + 0.5)
    assert after.accuracy == pytest.approx((before.accuracy + bound) / 2)
    assert after.low <= after.accuracy <= after.high


def test_models_without_a_domain_are_corrected_as_the_shipped_one_is():
    random = np.random.default_rng(0)
    shares = np.array([0.4, 0.3, 0.1, 0.1, 0.1])
    one = left_out(random).with_shares(shares)
    probs = np.exp(log_softmax(one.target_logits))
    np.testing.assert_allclose(probs.mean(axis=0), shares, atol=1e-5)
    plain = left_out(np.random.default_rng(0))
    np.testing.assert_allclose(
        one.logits - plain.logits, np.broadcast_to(one.held_out_logits[0] - plain.held_out_logits[0], one.logits.shape)
    )
    assert plain.with_shares(None) is plain


def test_two_estimates_that_disagree_are_noted():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 2000)
    same = estimate_accuracy(source, labels, calibrated(random, 2000)[0])
    assert same.notes == (ONE_DOMAIN,)
    hard = estimate_accuracy(source, labels, calibrated(random, 2000, strength=0.5)[0])
    assert abs(hard.accuracy - hard.by_confidence) > 0.05
    assert f"{hard.by_confidence:.3f}" in hard.notes[-1]


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
    assert before.low - 0.02 <= after.low <= before.low and before.high <= after.high <= before.high + 0.02
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
    weighted = estimate_accuracy(source, labels, target, target_shares=np.full(3, 1 / 3))
    plain = estimate_accuracy(source, labels, target)
    often = np.concatenate([np.arange(90), np.tile(np.arange(90, 150), 3)])
    repeated = estimate_accuracy(source[often], labels[often], target)
    for one, other in ((weighted, repeated), (plain, repeated)):  # the temperature's smoothing knows the number of texts
        alike = abs(one.accuracy - other.accuracy) < 5e-3 and abs(one.by_confidence - other.by_confidence) < 5e-3
        assert alike == (one is weighted), (weighted, repeated, plain)
    assert weighted.source_accuracy == plain.source_accuracy
    alike = estimate_accuracy(source, labels, target, target_shares=[0.6, 0.2, 0.2])  # as they are
    assert same(alike, estimate_accuracy(source, labels, target))


def test_estimate_is_ready_for_json():
    random = np.random.default_rng(0)
    source, labels = calibrated(random, 50)
    domains = [left_out(random, rows=50)] * 2
    estimate = estimate_accuracy(source.astype(np.float32), labels, source, left_out=domains)
    assert json.loads(json.dumps(asdict(estimate)))["accuracy"] == estimate.accuracy
    with pytest.raises(ValueError, match="at least one"):
        estimate_accuracy(source, labels, source[:0])


# -- warnings ---------------------------------------------------------------------------------------------------------


def predicted(*counts):
    """Scores whose predictions have these counts."""
    return np.eye(len(counts))[np.repeat(np.arange(len(counts)), counts)]


def test_nothing_to_warn_of():
    assert result_warnings([0.5, 0.5], predicted(260, 240), predicted(240, 260), 500, ["neg", "pos"], held_out=50) == []
    assert result_warnings([0.5, 0.5], None, predicted(100, 100), 200, ["neg", "pos"]) == []


def test_collapse_into_one_class():
    found = result_warnings([0.5, 0.5], predicted(300, 200), predicted(500, 0), 500, ["neg", "pos"])
    assert len([line for line in found if "collapse" in line]) == 1
    assert "all 500" in found[0] and "'neg'" in found[0]
    assert not any("class shares" in line for line in found)


def test_a_class_driven_out():
    found = result_warnings([0.66, 0.34], predicted(400, 100), predicted(490, 10), 500, ["non-rumour", "rumour"])
    collapse = next(line for line in found if "collapse" in line)
    assert all(piece in collapse for piece in ("'rumour'", "34.0%", "2.0%", "20.0% before"))
    # just above a tenth of its share is no collapse
    mild = result_warnings([0.66, 0.34], predicted(400, 100), predicted(482, 18), 500, ["non-rumour", "rumour"])
    assert not any("collapse" in line for line in mild)
    # a class that was rare in the source may be missing
    rare = result_warnings([0.97, 0.03], None, predicted(500, 0, 0)[:, :2], 500, ["a", "b"])
    assert [line for line in rare if "driven out" in line] == []


def test_many_classes_scale_the_share_that_counts():
    share = np.full(20, 0.05)
    share[0], share[1] = 0.07, 0.03
    counts = [0 if k == 1 else 50 for k in range(20)]
    found = result_warnings(share, None, predicted(*counts), 950, [f"class {k}" for k in range(20)])
    assert len(found) == 1 and "'class 1'" in found[0] and "3.0%" in found[0]


def test_shifted_shares():
    found = result_warnings([0.5, 0.5], None, predicted(150, 350), 500, ["neg", "pos"])
    assert len(found) == 1
    assert all(piece in found[0] for piece in ("20.0%", "'neg' 50.0% -> 30.0%", "'pos' 50.0% -> 70.0%"))
    assert result_warnings([0.5, 0.5], None, predicted(180, 320), 500, ["neg", "pos"]) == []
    # forty texts in twenty classes are that uneven by chance
    random = np.random.default_rng(0)
    chance = np.eye(20)[random.integers(0, 20, 40)]
    found = result_warnings(np.full(20, 0.05), None, chance, 500, [str(k) for k in range(20)])
    assert not any("class shares" in line for line in found)


def test_drift():
    before = predicted(250, 250)
    moved = before.copy()
    moved[170:330] = moved[170:330][:, ::-1]
    found = result_warnings([0.5, 0.5], before, moved, 500, ["neg", "pos"])
    assert len(found) == 1 and "drift" in found[0] and "32.0%" in found[0]
    assert result_warnings([0.5, 0.5], before, np.roll(before, 75, axis=0), 500, ["neg", "pos"]) == []  # 30 % exactly


def test_few_texts():
    found = result_warnings([0.5, 0.5], None, predicted(100, 99), 199, ["neg", "pos"], held_out=49)
    assert len(found) == 2
    assert "199 target texts" in found[0] and "49 held-out source texts" in found[1]
