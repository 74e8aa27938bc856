"""What runs read of a rehearsal: the folder, the corrected estimate, and warnings where the target was not rehearsed."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import mtem
from mtem.errors import RequestError
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.rehearsed import OUTSIDE, Advice, Rehearsal, correct_estimate, outside_warnings
from tests.conftest import examples
from tests.rehearsed import GOOD_RATE

CLASSES = ("bad", "good")


def estimate(accuracy=0.8):
    return Estimate(accuracy, accuracy - 0.1, min(1.0, accuracy + 0.1), "by confidence", 0.9, accuracy, 0.75, 0.02, left_out=3)


def advice(shares=((0.4, 0.3), (0.7, 0.6)), confidence=(0.7, 0.8)):
    return Advice(
        "mtem", {}, True, {}, 0.0, None, None, 0.5, {}, {}, {}, {}, 1.0, 1.0, [list(each) for each in shares], list(confidence)
    )  # fmt: skip


# ---------------------------------------------------------------------- the folder


def test_a_rehearsal_is_read_as_it_was_written(rehearsed):
    loaded, made = mtem.Rehearsal.load(rehearsed["path"]), rehearsed["rehearsal"]
    assert loaded.record == made.record and (loaded.method, loaded.why) == (made.method, made.why)
    assert loaded.path == rehearsed["path"] and loaded.methods == rehearsed["compared"]["method"]
    assert loaded.advice(loaded.method).settings["learning_rate"] == GOOD_RATE and loaded.advice("mtem") is None
    for one, other in zip(loaded.left_out(), made.left_out(), strict=True):
        assert one.name == other.name and np.array_equal(one.logits, other.logits) and np.array_equal(one.labels, other.labels)


@pytest.fixture
def copied(rehearsed, tmp_path):
    return shutil.copytree(rehearsed["path"], tmp_path / "copy")


def changed(path, **changes):
    record = json.loads((path / "rehearsal.json").read_text())
    record |= changes
    (path / "rehearsal.json").write_text(json.dumps({name: value for name, value in record.items() if value != "gone"}))


def test_a_folder_without_a_rehearsal_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"nowhere: holds no rehearsal .*give the --output folder of 'mtem rehearse'"):
        Rehearsal.load(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="holds no rehearsal"):
        Rehearsal.load(tmp_path)


def test_an_unfinished_rehearsal_is_refused(copied):
    changed(copied, status="running")
    with pytest.raises(RequestError, match=r"not finished; finish it with 'mtem rehearse \.\.\. --resume'"):
        Rehearsal.load(copied)


@pytest.mark.parametrize("name", ["recommended", "advice", "left_out"])
def test_a_record_that_lacks_something_is_damaged(copied, name):
    changed(copied, **{name: "gone"})
    with pytest.raises(RequestError, match=f"rehearsal.json: .*{name}.*rehearse again"):
        Rehearsal.load(copied)


def test_damaged_files_are_refused(copied):
    (copied / "left-out.safetensors").write_bytes(b"not tensors")
    with pytest.raises(RequestError, match=r"left-out.safetensors: is damaged .*; rehearse again"):
        Rehearsal.load(copied)
    (copied / "left-out.safetensors").unlink()
    with pytest.raises(RequestError, match=r"left-out.safetensors: no such file; rehearse again"):
        Rehearsal.load(copied)
    for text, words in (("[1]", "expected an object, got a list"), ("{}", "status is missing"), ("{", "not valid JSON")):
        (copied / "rehearsal.json").write_text(text)
        with pytest.raises(RequestError, match=words):
            Rehearsal.load(copied)


def test_another_model_or_other_classes_are_refused(rehearsed):
    found = rehearsed["rehearsal"]
    found.check(model=rehearsed["request"]["model"], classes=list(CLASSES), preset="recommended")
    with pytest.raises(RequestError, match=r"model was .* there and is minilm here; rehearse again"):
        found.check(model="minilm")
    with pytest.raises(RequestError, match=r"classes was \['bad', 'good'\] there and is \['bad', 'fair'\] here"):
        found.check(classes=["bad", "fair"])
    with pytest.raises(RequestError, match="preset was recommended there and is paper here"):
        found.check(preset="paper")


# ---------------------------------------------------------------------- the estimate


def literal_correction(accuracy, accuracies, errors):
    """The formula, term by term."""
    count = len(errors)
    mixed = []
    for own in range(count):
        others = [accuracies[other] for other in range(count) if other != own]
        label_free = accuracies[own] + errors[own]
        mixed.append((label_free + sum(others) / len(others)) / 2 - accuracies[own] if others else errors[own])
    freedom = 2 + count
    squares = 2 * 0.02**2 + sum(error**2 for error in mixed)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(squares / freedom) * math.sqrt(1 + 1 / count)
    corrected = (accuracy + sum(accuracies) / count) / 2
    return (corrected, max(0.0, corrected - half), min(1.0, corrected + half)), mixed


@given(st.floats(0, 1), st.lists(st.tuples(st.floats(0.2, 1), st.floats(-0.2, 0.2)), min_size=1, max_size=6))
@examples(80)
def test_the_correction_by_its_formula(accuracy, pairs):
    accuracies, errors = ([pair[which] for pair in pairs] for which in (0, 1))
    named = [{f"d{number}": value for number, value in enumerate(values)} for values in (accuracies, errors)]
    found = correct_estimate(estimate(accuracy), *named)
    wanted, mixed = literal_correction(accuracy, accuracies, errors)
    assert (found.accuracy, found.low, found.high) == pytest.approx(wanted, abs=1e-9)
    assert found.domain_error == pytest.approx(math.sqrt(np.mean(np.square(mixed)))) and found.left_out == len(errors)


def test_an_estimate_goes_halfway_to_the_rehearsed_accuracy_and_says_so():
    found = correct_estimate(estimate(0.8), {"books": 0.7, "dvd": 0.74}, {"books": 0.1, "dvd": 0.06})
    assert found.accuracy == pytest.approx((0.8 + 0.72) / 2)
    assert found.method == "by confidence, halfway to the rehearsed accuracy"
    assert found.notes == (
        "halfway between 0.800, estimated by confidence, and 0.720, the accuracy in 2 rehearsed domains; "
        "there such estimates were off by +0.070, +0.010",
    )
    assert found.low < 0.76 < found.high


def test_errors_that_differ_more_make_the_interval_wider():
    def width(*errors):
        names = [str(number) for number in range(len(errors))]
        found = correct_estimate(estimate(0.6), dict.fromkeys(names, 0.6), dict(zip(names, errors, strict=True)))
        return found.high - found.low

    assert width(0.0, 0.0) < width(0.05, -0.05) < width(0.1, -0.1)
    assert width(0.0) > width(0.0, 0.0, 0.0, 0.0, 0.0)


def test_without_errors_nothing_is_corrected():
    assert correct_estimate(estimate(), {}, {}) == estimate()


# ---------------------------------------------------------------------- what was not rehearsed


def test_a_target_like_the_rehearsed_domains_is_not_warned_of():
    assert outside_warnings(advice(), CLASSES, np.array([0.4, 0.6]), 0.75) == []
    assert outside_warnings(advice(), CLASSES, np.array([0.7 + 0.9 * OUTSIDE, 0.3 - 0.9 * OUTSIDE]), 0.7 - 0.9 * OUTSIDE) == []


@pytest.mark.parametrize("share", [0.4 - 1.1 * OUTSIDE, 0.7 + 1.1 * OUTSIDE])
def test_other_class_shares_are_told_once(share):
    (line,) = outside_warnings(advice(), CLASSES, np.array([share, 1 - share]), 0.75, "threads")
    assert f"'bad' for {share:.1%} of the target threads, for 40.0% to 70.0% in the rehearsed domains" in line


@pytest.mark.parametrize("confidence", [0.7 - 1.1 * OUTSIDE, 0.8 + 1.1 * OUTSIDE])
def test_another_confidence_is_told(confidence):
    (line,) = outside_warnings(advice(), CLASSES, np.array([0.5, 0.5]), confidence)
    assert f"mean confidence is {confidence:.1%} on the target texts, 70.0% to 80.0%" in line


def test_both_are_told():
    assert len(outside_warnings(advice(), CLASSES, np.array([1.0, 0.0]), 0.99)) == 2
