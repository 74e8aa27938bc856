import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mtem.errors import RequestError
from mtem.metrics import evaluate, render
from tests.conftest import examples


def shown(metrics, width=80):
    console = Console(file=io.StringIO(), width=width)
    render(metrics, console)
    return console.file.getvalue()


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
    assert "log loss" in shown(metrics)
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


def test_render_two_classes():
    text = shown(evaluate([0] * 60 + [1] * 40, [0] * 50 + [1] * 50, ["negative", "positive"]))
    lines = text.splitlines()
    assert "0.9000" in lines[0] and "100 texts" in lines[0]
    confusion = lines[next(i for i, line in enumerate(lines) if "rows true" in line) :]
    assert confusion[1].split() == ["negative", "positive"]
    assert [line.split() for line in confusion[2:4]] == [["negative", "50", "10"], ["positive", "·", "40"]]


def test_render_stays_readable_with_many_long_names():
    random = np.random.default_rng(0)
    labels = random.integers(0, 20, 50_000)
    names = [f"a rather long-winded name of class {k}" for k in range(19)] + ["[red]markup[/red]"]
    predictions = np.where(random.random(50_000) < 0.8, labels, random.integers(0, 20, 50_000))
    metrics = evaluate(labels, predictions, names)
    text = shown(metrics, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "[red]markup[/red]" in text
    blocks = text.split("rows true")[1]
    for count in metrics.confusion.ravel():
        assert str(count) in blocks.replace("…", "?")  # no number is cut off
    assert "…" in text and blocks.count("20 [red]") >= 2  # the matrix goes on below
    heads = [line.split() for line in blocks.splitlines() if line.split() and all(w.isdigit() for w in line.split())]
    assert [int(head) for line in heads for head in line] == list(range(1, 21))
    assert all(text.count(f"class {k} ") >= 2 for k in range(19))  # the tail that tells the names apart
    wide = shown(metrics, width=220)
    assert wide.count("20 [red]") == 1
