"""What was read is told file by file, and what looks unmeant between files: labels and columns."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from mtem.data import summary
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from tests.threads import make_threads, write_threads


def table(place, name, texts, labels=None, text="text", label="label"):
    columns = {text: texts} if labels is None else {text: texts, label: labels}
    pd.DataFrame(columns).to_csv(place / name, index=False)
    return str(place / name)


def numbered(count, word="text"):
    return [f"{word} {number}" for number in range(count)]


def test_a_line_for_each_file(tmp_path):
    books = table(tmp_path, "books.csv", numbered(1200), ["negative", "positive"] * 600)
    dvd = table(tmp_path, "dvd.csv", [*numbered(3, "dvd"), ""], ["positive", "negative", "positive", "negative"])
    assert summary.lines(load_corpus([books, dvd], labeled=True)) == [
        "books.csv: 1,200 texts (column 'text'), labels (column 'label'): negative 600, positive 600",
        "dvd.csv: 3 texts (column 'text'), labels (column 'label'): negative 1, positive 2; 1 empty left out",
    ]
    assert summary.lines(load_corpus(dvd, labeled=False)) == ["dvd.csv: 3 texts (column 'text'); 1 empty left out"]
    assert summary.notices(load_corpus([books, dvd], labeled=True)) == []
    # from the cache too
    assert summary.lines(load_corpus(dvd, labeled=True))[0].endswith("1 empty left out")


def test_many_classes_are_told_by_the_largest(tmp_path):
    labels = [f"class {number}" for number in range(9) for _ in range(number + 2)]
    line = summary.lines(load_corpus(table(tmp_path, "a.csv", numbered(len(labels)), labels), labeled=True))[0]
    assert line.endswith("9 classes, 'class 8' 10, 'class 7' 9, 'class 6' 8, 'class 5' 7, 'class 4' 6, …")


def test_threads_are_threads(tmp_path):
    path = write_threads(tmp_path / "paris.jsonl", make_threads(6, 1))
    corpus = load_corpus(str(path), labeled=True)
    assert summary.lines(corpus) == ["paris.jsonl: 6 threads (column 'nodes'), labels (column 'label'): bad 3, good 3"]
    assert corpus.unit == "threads" and load_corpus(["a text"], labeled=False).unit == "texts"


def test_files_of_the_same_name_are_told_apart(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        table(tmp_path / folder, "x.csv", numbered(2, folder), ["p", "n"])
    paths = [str(tmp_path / folder / "x.csv") for folder in "ab"]
    assert [line.split(": ")[0] for line in summary.lines(load_corpus(paths, labeled=True))] == paths
    frames = {name: pd.read_csv(path) for name, path in zip("cd", paths, strict=True)}
    lines = summary.lines(load_corpus(frames, labeled=True, name="source"))
    assert [line.split(": ")[0] for line in lines] == ["source (c)", "source (d)"]


def test_a_selection_is_counted_as_it_is(tmp_path):
    corpus = load_corpus([table(tmp_path, name, numbered(4, name), ["n", "p"] * 2) for name in ("a.csv", "b.csv")], labeled=True)
    lines = summary.lines(corpus.select([5, 7, 4]))
    assert lines == ["b.csv: 3 texts (column 'text'), labels (column 'label'): n 1, p 2"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["0", "1"], ["books.csv: 'negative', 'positive'; dvd.csv: '0', '1'", "4 classes together", "mean the same alike"]),
        (["negative", "neutral"], ["'negative', 'neutral'", "3 classes together", "is that meant?"]),
    ],
)
def test_other_labels_in_another_file(tmp_path, labels, words):
    books = table(tmp_path, "books.csv", numbered(4), ["negative", "positive"] * 2)
    dvd = table(tmp_path, "dvd.csv", numbered(4, "dvd"), labels * 2)
    (notice,) = summary.notices(load_corpus([books, dvd], labeled=True))
    assert all(word in notice for word in words), notice
    assert summary.notices(load_corpus([books, dvd], labeled=False)) == []


def test_labels_that_differ_in_their_spelling_only(tmp_path):
    books = table(tmp_path, "books.csv", numbered(4), ["negative", "very positive"] * 2)
    dvd = table(tmp_path, "dvd.csv", numbered(4, "dvd"), ["Negative", "very_positive"] * 2)
    found = summary.notices(load_corpus([books, dvd], labeled=True))
    assert "'Negative' (dvd.csv) and 'negative' (books.csv)" in found[0] and "only in how they are written" in found[0]
    assert "'very positive' (books.csv) and 'very_positive' (dvd.csv)" in found[1] and len(found) == 2
    assert found[1].endswith("write them alike if they are one")
    # inside one file as well
    one = table(tmp_path, "one.csv", numbered(4), ["Good", "good", "bad", "bad"])
    assert len(summary.notices(load_corpus(one, labeled=True))) == 1


def test_signs_are_no_spelling(tmp_path):
    one = table(tmp_path, "one.csv", numbered(4), ["-1", "1", "-1", "1"])
    assert summary.notices(load_corpus(one, labeled=True)) == []


def test_an_unknown_label_that_is_another_spelling(tmp_path):
    few = load_corpus(table(tmp_path, "few.csv", ["a", "b"], ["Positive", "negative"]), labeled=True)
    with pytest.raises(RequestError, match=r"few\.csv: row 2, column 'label': label 'Positive' is unknown.*write 'positive' if"):
        few.label_numbers(["negative", "positive"])


def test_other_columns_in_another_file(tmp_path):
    books = table(tmp_path, "books.csv", numbered(4), ["n", "p"] * 2, text="review", label="sentiment")
    dvd = table(tmp_path, "dvd.csv", numbered(4, "dvd"), ["n", "p"] * 2)
    other = table(tmp_path, "other.csv", numbered(4, "other"), ["n", "p"] * 2, text="Text")
    found = summary.notices(load_corpus([books, dvd, other], labeled=True))
    assert "text column differs" in found[0] and "books.csv uses 'review', dvd.csv, other.csv use 'text'" in found[0]
    assert "label column differs" in found[1] and "books.csv uses 'sentiment'" in found[1] and len(found) == 2


def test_lists_of_corpora_without_files_are_no_trouble():
    corpus = load_corpus((["a", "b", "c", "d"], [0, 1, 0, 1]), labeled=True, name="source")
    assert summary.lines(corpus) == ["source: 4 texts (column 'text'), labels (column 'label'): '0' 2, '1' 2"]
    assert summary.notices(corpus) == []


def test_cells_are_read_alike_by_adapt_and_predict(tmp_path):
    from mtem.inference import predict_file
    from mtem.models.trees.model import BigcnModel, BigcnSettings

    model = BigcnModel.create(
        "bigcn", ("a", "b"), corpora=[load_corpus(["some words"], labeled=False)], settings=BigcnSettings(hidden=4)
    )
    pd.DataFrame({"text": [["a", "b"], ["c"]]}).to_parquet(tmp_path / "lists.parquet")
    (tmp_path / "lists.jsonl").write_text('{"text": "fine"}\n{"text": ["a", "b"]}\n')
    (tmp_path / "objects.jsonl").write_text('{"text": {"a": 1}}\n')
    (tmp_path / "mixed.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "b", "nodes": make_threads(1, 1)[0]["nodes"]}))
    pd.DataFrame({"text": [b"good", b"caf\xe9"]}).to_parquet(tmp_path / "bytes.parquet")
    for name in ("lists.parquet", "lists.jsonl", "objects.jsonl", "mixed.jsonl", "bytes.parquet"):
        messages = []
        for read in (
            lambda path: load_corpus(path, labeled=False),
            lambda path: predict_file(model, path, tmp_path / "out.csv"),
        ):
            with pytest.raises(RequestError) as caught:
                read(str(tmp_path / name))
            messages.append(str(caught.value))
        assert messages[0] == messages[1] and f"{name}: row " in messages[0], messages
        assert not (tmp_path / "out.csv").exists()
    assert "row 1, column 'text': is a dict, not a text; name another column with --text-column" in str(_refused(tmp_path))


def _refused(place):
    with pytest.raises(RequestError) as caught:
        load_corpus(str(place / "objects.jsonl"), labeled=False)
    return caught.value
