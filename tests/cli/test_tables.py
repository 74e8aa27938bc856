"""Tables of metrics on the console."""

import io

import numpy as np
from rich.console import Console

from mtem.cli.tables import print_metrics
from mtem.metrics import evaluate


def shown(metrics, width=80):
    console = Console(file=io.StringIO(), width=width)
    print_metrics(metrics, console)
    return console.file.getvalue()


def test_metrics_two_classes():
    text = shown(evaluate([0] * 60 + [1] * 40, [0] * 50 + [1] * 50, ["negative", "positive"]))
    lines = text.splitlines()
    assert "0.9000" in lines[0] and "100 texts" in lines[0]
    confusion = lines[next(i for i, line in enumerate(lines) if "rows true" in line) :]
    assert confusion[1].split() == ["negative", "positive"]
    assert [line.split() for line in confusion[2:4]] == [["negative", "50", "10"], ["positive", "·", "40"]]


def test_metrics_stays_readable_with_many_long_names():
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


def test_metrics_of_probabilities():
    probabilities = np.array([[0.9, 0.1], [0.3, 0.7]])
    assert "log loss" in shown(evaluate([0, 1], [0, 1], ["a", "b"], probabilities))
    assert "log loss" not in shown(evaluate([0, 1], [0, 1], ["a", "b"]))


def test_of_many_classes_the_most_frequent_confusions():
    classes = [f"class {k}" for k in range(1000)]
    truth = np.arange(1000).repeat(2)
    predicted = np.where(truth == 7, 9, truth)
    stream = io.StringIO()
    print_metrics(evaluate(truth, predicted, classes), Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert len(lines) < 1010 and "the most frequent confusions of 1000 classes; --json has them all" in lines
    assert lines[-1].split() == ["class", "7", "class", "9", "2"]
