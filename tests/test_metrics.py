import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.errors import RequestError
from mtem.metrics import evaluate
from tests.conftest import examples


def test_figures_by_hand():
    labels = ["pos", "pos", "pos", "neg", "neg", "mixed"]
    predictions = ["pos", "pos", "neg", "neg", "pos", "pos"]
    metrics = evaluate(labels, predictions, ["neg", "pos", "mixed"])
    assert metrics.n == 6
    assert metrics.accuracy == pytest.approx(3 / 6)
    neg, pos, mixed = metrics.per_class
    assert (neg.precision, neg.recall, neg.f1, neg.support) == pytest.approx((1 / 2, 1 / 2, 1 / 2, 2))
    assert (pos.precision, pos.recall, pos.f1, pos.support) == pytest.approx((2 / 4, 2 / 3, 4 / 7, 3))
    assert (mixed.precision, mixed.recall, mixed.f1, mixed.support) == (0, 0, 0, 1)
    assert metrics.macro_f1 == pytest.approx((1 / 2 + 4 / 7 + 0) / 3)
    np.testing.assert_array_equal(metrics.confusion, [[1, 1, 0], [1, 2, 0], [0, 1, 0]])
    assert metrics.confusion.dtype == np.int64
    assert metrics.log_loss is None and metrics.calibration_error is None


def test_names_and_numbers_are_the_same():
    labels, predictions = np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])
    names = np.array(["a", "b", "c"])
    by_number = evaluate(labels, predictions, names)
    by_name = evaluate(names[labels], list(names[predictions]), names)
    assert by_number.to_dict() == by_name.to_dict()
    assert evaluate(["0", "1"], ["1", "1"], ["0", "1"]).accuracy == 0.5  # classes that are named by digits


def test_macro_f1_leaves_out_classes_that_never_occur():
    metrics = evaluate([0, 0, 1], [0, 0, 1], ["a", "b", "c"])
    assert metrics.macro_f1 == 1.0
    assert metrics.per_class[2].support == 0
    # predicted without ever being true: it counts, with zero
    assert evaluate([0, 0, 1, 1], [0, 0, 1, 2], ["a", "b", "c"]).macro_f1 == pytest.approx((1 + 2 / 3 + 0) / 3)


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60), seed=st.integers(0, 100))
@examples(50)
def test_properties(pairs, seed):
    labels, predictions = np.array(pairs).T
    metrics = evaluate(labels, predictions, list("abcde"))
    assert metrics.confusion.sum() == metrics.n == sum(each.support for each in metrics.per_class)
    assert np.trace(metrics.confusion) == round(metrics.accuracy * metrics.n)
    order = np.random.default_rng(seed).permutation(5)
    renamed = evaluate(np.argsort(order)[labels], np.argsort(order)[predictions], list("abcde"))
    assert renamed.macro_f1 == pytest.approx(metrics.macro_f1)
    np.testing.assert_array_equal(renamed.confusion, metrics.confusion[np.ix_(order, order)])
    assert json.loads(json.dumps(metrics.to_dict())) == metrics.to_dict()


def test_probabilities_add_log_loss_and_calibration_error():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7]])
    metrics = evaluate([0, 0, 1, 1], [0, 0, 0, 1], ["a", "b"], probabilities)
    assert metrics.log_loss == pytest.approx(-np.log([0.9, 0.9, 0.1, 0.7]).mean())
    # three texts at .9 of which two are right, one at .7 and right
    assert metrics.calibration_error == pytest.approx((3 * abs(2 / 3 - 0.9) + abs(1 - 0.7)) / 4)
    impossible = evaluate([0], [1], ["a", "b"], np.array([[0.0, 1.0]]))
    assert np.isfinite(impossible.log_loss)
    with pytest.raises(ValueError, match=r"\(2, 2\), got \(2, 3\)"):
        evaluate([0, 1], [0, 1], ["a", "b"], np.ones((2, 3)))


def test_wrong_requests():
    with pytest.raises(RequestError, match=r"label 'neutral' of text 2 is none of the classes 'neg', 'pos'"):
        evaluate(["neg", "neutral"], ["neg", "neg"], ["neg", "pos"])
    with pytest.raises(RequestError, match="prediction 2 of text 1"):
        evaluate([0], [2], ["neg", "pos"])
    with pytest.raises(RequestError, match="no labeled texts"):
        evaluate([], [], ["neg", "pos"])
    with pytest.raises(ValueError, match="2 labels but 1"):
        evaluate([0, 1], [0], ["neg", "pos"])
