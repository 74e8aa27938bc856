import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.errors import RequestError
from mtem.selection import calibration, criteria
from mtem.selection.calibration import calibrate
from mtem.selection.criteria import CRITERIA, DEFAULT_CRITERION, CandidateOutputs, choose, score, scores
from tests.conftest import examples
from tests.reference import selection as reference

seeds = st.integers(0, 10_000)


def synthetic(seed=0, source=120, target=150, classes=3, spread=1.0, scale=2.0, shift=0.0):
    """A softmax classifier on class centres in ``classes`` dimensions; the target's labels too, for the tests' eyes."""
    random = np.random.default_rng(seed)
    source_labels, target_labels = random.integers(0, classes, source), random.integers(0, classes, target)
    source_features = 2 * np.eye(classes)[source_labels] + spread * random.normal(size=(source, classes))
    target_features = 2 * np.eye(classes)[target_labels] + spread * random.normal(size=(target, classes)) + shift
    evidence = CandidateOutputs(
        source_logits=scale * source_features,
        source_labels=source_labels,
        target_logits=scale * target_features,
        source_features=source_features,
        target_features=target_features,
    )
    return evidence, target_labels


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_calibrate_matches_a_grid_search(classes, scale):
    evidence, _ = synthetic(source=40, classes=classes, scale=scale)
    ours = calibrate(evidence.source_logits, evidence.source_labels)
    theirs = reference.calibrate(evidence.source_logits.tolist(), evidence.source_labels.tolist())
    assert ours == pytest.approx(theirs, rel=5e-3)


def test_calibrate_finds_the_temperature_that_made_the_labels():
    random = np.random.default_rng(1)
    logits = 2 * random.normal(size=(20_000, 4))
    labels = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)  # labels drawn from softmax(logits)
    assert calibrate(3 * logits, labels) == pytest.approx(3, rel=0.05)


def test_calibrate_at_the_edges():
    separated = np.array([[5.0, -5.0], [-5.0, 5.0]] * 10)
    labels = np.array([0, 1] * 10)
    confident = calibrate(separated, labels)
    # 20 right texts attest a confidence of 1 - (1/21)/2, which is where the margin of 10 has to come to
    assert 1 / (1 + math.exp(-10 / confident)) == pytest.approx(1 - 1 / 42)
    assert calibrate(1e4 * separated, labels) == calibration.HIGHEST_TEMPERATURE
    assert calibrate(1e-4 * separated, labels) == calibration.LOWEST_TEMPERATURE
    assert calibrate(separated, 1 - labels) == calibration.HIGHEST_TEMPERATURE  # worse than chance: as flat as allowed
    assert calibrate(np.ones((4, 3)), np.array([0, 1, 2, 0])) == 1.0
    one_class = calibrate(np.array([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), np.zeros(3, dtype=int))
    assert calibration.LOWEST_TEMPERATURE <= one_class <= calibration.HIGHEST_TEMPERATURE


@given(seed=seeds, factor=st.floats(0.5, 2.0))
@examples(30)
def test_temperature_scales_with_the_scores(seed, factor):
    evidence, _ = synthetic(seed, source=60)
    plain = calibrate(evidence.source_logits, evidence.source_labels)
    scaled = calibrate(factor * evidence.source_logits, evidence.source_labels)
    assert scaled == pytest.approx(factor * plain, rel=1e-6)


# -- information maximisation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
def test_infomax_matches_the_literal_reading(classes):
    evidence, _ = synthetic(source=40, target=30, classes=classes, scale=4.0)
    temperature = calibrate(evidence.source_logits, evidence.source_labels)
    rows = evidence.target_logits.tolist()
    assert score("infomax-raw", evidence) == pytest.approx(reference.infomax(rows), abs=1e-12)
    assert score("infomax", evidence) == pytest.approx(reference.infomax(rows, temperature), abs=1e-12)
    assert temperature != pytest.approx(1, abs=0.05)


def test_infomax_analytic():
    evidence, _ = synthetic(classes=4, target=4)
    certain = replace(evidence, target_logits=1e6 * np.eye(4))
    assert score("infomax-raw", certain) == pytest.approx(math.log(4))
    assert score("infomax", certain) == pytest.approx(math.log(4))
    assert score("infomax", replace(evidence, target_logits=np.zeros((4, 4)))) == 0.0
    assert score("infomax", replace(evidence, target_logits=1e6 * np.eye(4)[[2, 2, 2, 2]])) == 0.0


@given(seed=seeds, classes=st.integers(2, 6), rows=st.integers(1, 40), scale=st.floats(0.01, 100))
@examples(50)
def test_infomax_is_between_zero_and_log_k(seed, classes, rows, scale):
    evidence, _ = synthetic(seed, source=10, target=rows, classes=classes, scale=scale)
    for name in ("infomax", "infomax-raw"):
        assert 0 <= score(name, evidence) <= math.log(classes) + 1e-9


@given(seed=seeds, factor=st.floats(0.5, 2.0))
@examples(30)
def test_calibrated_infomax_does_not_see_a_common_scale(seed, factor):
    evidence, _ = synthetic(seed)
    sharper = replace(evidence, source_logits=factor * evidence.source_logits, target_logits=factor * evidence.target_logits)
    assert score("infomax", sharper) == pytest.approx(score("infomax", evidence), abs=1e-6)


def test_collapse_loses_to_the_source_model():
    evidence, _ = synthetic(classes=2)
    push = np.array([100.0, 0.0])
    collapsed = replace(evidence, target_logits=5 * evidence.target_logits + push)
    assert (collapsed.target_logits.argmax(axis=1) == 0).all()
    for name in ("infomax", "infomax-raw"):
        assert choose([score(name, evidence), score(name, collapsed)]) == 0
    # surer of every single text, which is what plain entropy would reward
    assert (
        criteria.entropy(criteria.log_softmax(collapsed.target_logits)).mean()
        < criteria.entropy(criteria.log_softmax(evidence.target_logits)).mean()
    )


def test_sharpening_alone_gains_nothing_by_the_default():
    evidence, _ = synthetic(scale=1.0)
    sharper = replace(evidence, source_logits=3 * evidence.source_logits, target_logits=3 * evidence.target_logits)
    assert choose([score("infomax-raw", evidence), score("infomax-raw", sharper)]) == 1
    assert choose([score(DEFAULT_CRITERION, evidence), score(DEFAULT_CRITERION, sharper)], tolerance=1e-6) == 0


def test_forgetting_the_source_task_is_punished_by_the_default():
    evidence, _ = synthetic()
    mixed = np.random.default_rng(0).permutation(len(evidence.source_logits))
    forgetful = replace(evidence, source_logits=evidence.source_logits[mixed], target_logits=1.5 * evidence.target_logits)
    assert score("infomax-raw", forgetful) > score("infomax-raw", evidence)
    assert score("infomax", forgetful) < 0.5 * score("infomax", evidence)


def test_separating_the_target_better_is_rewarded_by_the_default():
    noisy, _ = synthetic(spread=1.5)
    clean, _ = synthetic(spread=0.7)
    assert score("infomax", clean) > score("infomax", noisy) + 0.1


# -- source validation ------------------------------------------------------------------------------------------------


def test_source_validation_counts_first_and_breaks_ties_by_likelihood():
    evidence, _ = synthetic(source=4, classes=2)
    right = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    labels = np.array([0, 0, 1, 1])
    weak, strong = (
        replace(evidence, source_logits=scale * right, source_labels=labels, source_features=right) for scale in (0.01, 5.0)
    )
    one_wrong = replace(strong, source_logits=5 * right * np.array([[1], [1], [1], [-1]]))
    assert score("source-validation", strong) > score("source-validation", weak) > score("source-validation", one_wrong)
    expected = (3 + math.exp((3 * math.log(1 / (1 + math.exp(-10))) + math.log(1 / (1 + math.exp(10)))) / 4)) / 5
    assert score("source-validation", one_wrong) == pytest.approx(expected)


# -- density ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
def test_density_matches_the_literal_reading_whatever_the_block(classes):
    evidence, _ = synthetic(target=37, classes=classes)
    expected = reference.density(evidence.target_logits.tolist())
    assert score("density", evidence) == pytest.approx(expected, rel=1e-10)
    assert criteria.density(evidence, block=10) == pytest.approx(expected, rel=1e-10)


def test_density_analytic():
    evidence, _ = synthetic(classes=2, target=10)
    alike = replace(evidence, target_logits=np.tile([3.0, 1.0], (10, 1)))
    assert score("density", alike) == pytest.approx(math.log(9))
    halves = replace(evidence, target_logits=1e4 * np.eye(2)[[0] * 5 + [1] * 5])
    assert score("density", halves) == pytest.approx(math.log(4), abs=1e-6)  # each sees its own half only


def test_density_takes_an_even_sample_of_many_texts():
    evidence, _ = synthetic(target=100)
    every_other = replace(evidence, target_logits=evidence.target_logits[::2][:50], target_features=evidence.target_features[:50])
    many = replace(
        evidence,
        target_logits=np.repeat(every_other.target_logits, 2, axis=0)[:-1],
        target_features=evidence.target_features[:-1],
    )
    assert criteria.density(many, rows=50) == pytest.approx(score("density", every_other))


@given(seed=seeds, rows=st.integers(2, 30), scale=st.floats(0.01, 100))
@examples(40)
def test_density_bounds(seed, rows, scale):
    evidence, _ = synthetic(seed, source=4, target=rows, scale=scale)
    assert -1e-12 <= score("density", evidence) <= math.log(rows - 1) + 1e-9


# -- deep embedded validation -----------------------------------------------------------------------------------------


def two_regions(seed=0, rows=400):
    """Source texts in two regions, target texts nearly all in the second; which source texts lie in the second."""
    random = np.random.default_rng(seed)
    second = np.arange(rows) % 2 == 1
    source = random.normal(size=(rows, 3))
    source[:, 0] += np.where(second, 1.5, -1.5)
    target = random.normal(size=(rows, 3))
    target[:, 0] += np.where(random.random(rows) < 0.9, 1.5, -1.5)
    return source, target, second


def test_dev_counts_errors_where_the_target_is():
    source, target, second = two_regions(rows=4000)
    labels = np.zeros(len(source), dtype=int)
    errs = np.random.default_rng(1).random(len(source)) < 0.4

    def candidate(wrong):
        return CandidateOutputs(np.eye(2)[wrong.astype(int)], labels, np.zeros((len(target), 2)), source, target)

    wrong_there = errs & second
    wrong_elsewhere = np.roll(wrong_there, 1)  # as many errors, all in the first region
    assert wrong_there.sum() == wrong_elsewhere.sum()
    there, elsewhere = candidate(wrong_there), candidate(wrong_elsewhere)
    assert score("source-validation", there) == pytest.approx(score("source-validation", elsewhere))
    rate = wrong_there.sum() / second.sum()
    assert score("dev", there) == pytest.approx(-0.9 * rate, abs=0.06)
    assert score("dev", elsewhere) == pytest.approx(-0.1 * rate, abs=0.06)


def test_dev_is_the_literal_risk_of_its_weights():
    source, target, second = two_regions(rows=100)
    wrong = second & (np.arange(100) % 3 == 0)
    evidence = CandidateOutputs(np.eye(2)[wrong.astype(int)], np.zeros(100, dtype=int), np.zeros((100, 2)), source, target)
    weights = criteria.density_ratio(source, target)
    expected = reference.controlled_risk((weights * wrong).tolist(), weights.tolist())
    assert score("dev", evidence) == pytest.approx(-expected)
    assert expected != pytest.approx((weights * wrong).mean(), abs=1e-6)  # the control variate does something


def test_density_ratio_of_known_densities():
    random = np.random.default_rng(0)
    source, target = random.normal(size=(3000, 1)), random.normal(size=(1500, 1)) + 1
    ratio = criteria.density_ratio(source, target)
    known = np.exp(source[:, 0] - 0.5)  # N(1, 1) over N(0, 1)
    assert ratio.mean() == pytest.approx(1, abs=0.1)
    assert np.abs(np.log(ratio) - np.log(known)).mean() < 0.2


def test_dev_without_shift_is_the_source_error():
    evidence, _ = synthetic(source=600, target=600, spread=1.5)
    error = (evidence.source_logits.argmax(axis=1) != evidence.source_labels).mean()
    assert score("dev", evidence) == pytest.approx(-error, abs=0.02)
    constant = replace(evidence, source_features=np.ones((600, 2)), target_features=np.ones((600, 2)))
    assert score("dev", constant) == pytest.approx(-error, abs=1e-9)


# -- reverse validation -----------------------------------------------------------------------------------------------


def test_reverse_prefers_right_pseudo_labels_to_shuffled_ones():
    evidence, labels = synthetic(classes=5, target=300, source=300, spread=0.6)
    right = score("reverse", replace(evidence, target_logits=np.eye(5)[labels]))
    shuffled = np.random.default_rng(0).permutation(labels)
    wrong = score("reverse", replace(evidence, target_logits=np.eye(5)[shuffled]))
    assert right > 0.85
    assert wrong < 0.45


def test_reverse_is_balanced_and_knows_collapse():
    evidence, labels = synthetic(classes=3, target=300, source=300, spread=0.3)
    two = np.where(labels == 2, 1, labels)  # the third class is never predicted
    assert score("reverse", replace(evidence, target_logits=np.eye(3)[two])) == pytest.approx(2 / 3, abs=0.03)
    collapsed = replace(evidence, target_logits=np.eye(3)[np.zeros_like(labels)])
    assert score("reverse", collapsed) == pytest.approx(1 / 3)


# -- all of them ------------------------------------------------------------------------------------------------------


@given(seed=seeds)
@examples(25)
def test_order_of_texts_does_not_matter(seed):
    evidence, _ = synthetic(seed, source=30, target=40)
    random = np.random.default_rng(seed)
    s, t = random.permutation(30), random.permutation(40)
    shuffled = CandidateOutputs(
        evidence.source_logits[s],
        evidence.source_labels[s],
        evidence.target_logits[t],
        evidence.source_features[s],
        evidence.target_features[t],
    )
    for name in ("infomax", "infomax-raw", "source-validation", "density"):
        assert score(name, shuffled) == pytest.approx(score(name, evidence), abs=1e-9)


@given(seed=seeds)
@examples(25)
def test_order_of_classes_does_not_matter(seed):
    evidence, _ = synthetic(seed, source=30, target=40, classes=4)
    order = np.random.default_rng(seed).permutation(4)
    renamed = replace(
        evidence,
        source_logits=evidence.source_logits[:, order],
        target_logits=evidence.target_logits[:, order],
        source_labels=np.argsort(order)[evidence.source_labels],
    )
    for name in ("infomax", "infomax-raw", "source-validation", "density"):
        assert score(name, renamed) == pytest.approx(score(name, evidence), abs=1e-9)


def degenerate():
    plain, _ = synthetic(source=12, target=12)
    yield "one row", synthetic(source=1, target=1)[0]
    yield "few rows", synthetic(source=3, target=5)[0]
    yield "one source row", synthetic(source=1, target=20)[0]
    yield "equal scores", replace(plain, source_logits=np.zeros((12, 3)), target_logits=np.zeros((12, 3)))
    yield "huge scores", replace(plain, source_logits=1e30 * plain.source_logits, target_logits=1e30 * plain.target_logits)
    yield "constant features", replace(plain, source_features=np.full((12, 2), 0.1), target_features=np.full((12, 2), 0.1))
    yield "huge features", replace(plain, source_features=1e200 * plain.source_features)
    yield "identical rows", replace(plain, target_logits=np.tile([1.0, 2, 0], (12, 1)), target_features=np.ones((12, 3)))
    yield "one source class", replace(plain, source_labels=np.zeros(12, dtype=int))
    yield (
        "one class in all",
        CandidateOutputs(np.ones((5, 1)), np.zeros(5, int), np.ones((5, 1)), np.ones((5, 2)), np.ones((5, 2))),
    )
    yield "half precision", replace(plain, source_logits=plain.source_logits.astype(np.float16))


@pytest.mark.parametrize("case, evidence", list(degenerate()), ids=lambda value: value if isinstance(value, str) else "")
def test_finite_input_gives_finite_scores(case, evidence):
    for name, value in scores(evidence).items():
        assert math.isfinite(value), (case, name)


def test_diverged_candidates_never_win():
    evidence, _ = synthetic()
    for broken in (math.nan, math.inf):
        diverged = replace(evidence, target_logits=np.full_like(evidence.target_logits, broken), meta_loss=0.1)
        assert set(scores(diverged).values()) == {-math.inf}
    assert score("meta", replace(evidence, meta_loss=math.nan)) == -math.inf


def test_scores_lists_what_can_be_computed():
    evidence, _ = synthetic()
    assert set(scores(evidence)) == set(CRITERIA) - {"meta"}
    with_meta = scores(replace(evidence, meta_loss=0.25))
    assert set(with_meta) == set(CRITERIA)
    assert with_meta["meta"] == -0.25
    assert DEFAULT_CRITERION in CRITERIA


def test_wrong_requests():
    evidence, _ = synthetic()
    with pytest.raises(RequestError, match=r"'best'.*infomax.*reverse"):
        score("best", evidence)
    with pytest.raises(RequestError, match=r"virtual step.*mtem.*infomax"):
        score("meta", evidence)


def test_wrong_shapes_say_what_was_wanted():
    evidence, _ = synthetic(source=12, target=15)
    with pytest.raises(ValueError, match=r"target_logits: expected shape \(15, 3\), got \(15, 2\)"):
        replace(evidence, target_logits=np.zeros((15, 2)))
    with pytest.raises(ValueError, match=r"target_features: expected shape \[rows >= 1, columns\], got \(0, 3\)"):
        replace(evidence, target_features=np.zeros((0, 3)))
    with pytest.raises(ValueError, match="class numbers 0 to 2"):
        replace(evidence, source_labels=np.full(12, 3))


@pytest.mark.parametrize(
    "candidates, tolerance, chosen",
    [
        ([0.5], 0, 0),
        ([0.1, 0.3, 0.2], 0, 1),
        ([0.3, 0.3, 0.3], 0, 0),
        ([0.1, 0.3, 0.3], 0, 1),
        ([math.nan, 0.1], 0, 1),
        ([0.1, math.nan, -math.inf], 0, 0),
        ([math.nan, math.nan], 0, 0),
        ([-math.inf, -math.inf], 0.1, 0),
        ([0.28, 0.3, 0.31], 0.05, 0),
        ([0.2, 0.28, 0.31], 0.05, 1),
    ],
)
def test_choose(candidates, tolerance, chosen):
    assert choose(candidates, tolerance) == chosen


def test_choose_from_nothing():
    with pytest.raises(ValueError, match="no candidates"):
        choose([])


# ---------------------------------------------------------------------- the guard of the criterion "last"


@pytest.mark.parametrize(("classes", "factor"), [(2, 1.0), (10, math.log(10) / math.log(2)), (1, 1.0)])
def test_weights_hold_up_unless_infomax_falls_by_more_than_a_twentieth_of_its_range(classes, factor):
    most = 0.05 * math.log(2) * factor
    assert criteria.holds_up(0.3, 0.3 - 0.99 * most, classes) and not criteria.holds_up(0.3, 0.3 - 1.01 * most, classes)
    assert criteria.holds_up(0.3, 0.6, classes) and not criteria.holds_up(0.3, -1e9, classes)


def test_last_is_no_function_of_one_candidate():
    assert criteria.LAST not in criteria.CRITERIA
