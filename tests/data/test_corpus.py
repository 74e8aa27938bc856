"""Corpora: names and order of classes, what an adaptation refuses, selecting and joining."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.data.corpus import Corpus, check_source, check_target, label_name, sort_classes
from mtem.data.loading import load_corpus
from mtem.data.threads import Thread, dump
from tests.conftest import examples
from tests.corpora import refusal, reviews, table


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Classes


@pytest.mark.parametrize(
    "value, name",
    [(1, "1"), (1.0, "1"), ("1", "1"), ("1.0", "1"), (" good ", "good"), (True, "True"), (1.5, "1.5"), (np.int64(3), "3"),
     (np.bool_(False), "False"), (-2.0, "-2"), ("v1.0", "v1.0")],
)  # fmt: skip
def test_label_names(value, name):
    assert label_name(value) == name


def test_order_of_classes():
    assert sort_classes(["10", "9", "-1"]) == ("-1", "9", "10")
    assert sort_classes(["10", "9", "x"]) == ("10", "9", "x")


# Checks


def test_source_with_one_class_or_a_label_seen_once(tmp_path):
    one = load_corpus(table(tmp_path, "a.csv", [{"text": str(i), "Label": "good"} for i in range(3)]), labeled=True)
    refusal(lambda: check_source(one), "a.csv", "'Label'", "'good'", "two classes")
    rare = [*reviews(), {"text": "x", "label": "odd"}]
    source = load_corpus([table(tmp_path, "b.csv", reviews()), table(tmp_path, "c.csv", rare)], labeled=True)
    refusal(lambda: check_source(source), "c.csv: row 8, column 'label'", "'odd'", "once")
    check_source(load_corpus(tmp_path / "b.csv", labeled=True))


def test_target_that_is_the_source(tmp_path):
    path = table(tmp_path, "a.csv", reviews())
    source = load_corpus([table(tmp_path, "b.csv", reviews(4, "b")), path], labeled=True)
    refusal(lambda: check_target(load_corpus(path, labeled=False), source), "a.csv", "same file")
    copy = table(tmp_path, "copy.jsonl", [{"text": r["text"]} for r in reviews()])
    refusal(lambda: check_target(load_corpus(copy, labeled=False), source), "copy.jsonl", "same texts", "a.csv")
    check_target(load_corpus(["other"], labeled=False), source)


def test_unknown_label_names_its_place(tmp_path):
    path = table(tmp_path, "a.csv", reviews())
    refusal(lambda: load_corpus(path, labeled=True).label_numbers(["bad"]), "a.csv: row 3, column 'label'", "'good'", "'bad'")
    refusal(lambda: load_corpus(path, labeled=False).labels(), "a.csv", "no labels")


# Selecting and joining


def test_select_keeps_order_and_places(tmp_path, own_cache, monkeypatch):
    a, b = table(tmp_path, "a.csv", reviews(5)), table(tmp_path, "b.csv", reviews(5, "other"))
    corpus = load_corpus([a, b], labeled=True)
    chosen = corpus.select([7, 0, 7])
    assert chosen.texts() == ["other number 2", "review number 0", "other number 2"]
    assert chosen.labels() == ["bad", "bad", "bad"] and chosen.where(0) == f"{b}: row 4"
    assert chosen.domain_numbers().tolist() == [1, 0, 1] and chosen.select(np.array([False, True, False])).domains == ["a"]
    assert chosen.fingerprint != corpus.fingerprint == load_corpus([a, b], labeled=True).fingerprint
    assert corpus.text(9) == "other number 4" and corpus.texts([]) == []
    with pytest.raises(IndexError):
        corpus.select([10])
    monkeypatch.setattr("mtem.data.corpus._IN_MEMORY", 0)
    before = set((own_cache / "corpora").iterdir())
    assert corpus.select([7, 0, 7]).texts() == chosen.texts()
    assert len(set((own_cache / "corpora").iterdir()) - before) == 1


def test_concatenate_labeled_with_unlabeled():
    one = load_corpus((["a", "b"], [1, 2]), labeled=True)
    both = Corpus.concatenate([one, load_corpus(["c"], labeled=False)])
    assert not both.labeled and both.texts() == ["a", "b", "c"]
    assert Corpus.concatenate([one]) is one
    refusal(lambda: Corpus.concatenate([]), "no data")
    assert not load_corpus(one, labeled=False).labeled
    refusal(lambda: load_corpus(both, labeled=True), "no labels")


# EncodedThreads


def threads(count, word="post"):
    return [Thread([f"{word} {i}", *(f"{word} {i}, reply {j}" for j in range(i))], [-1, *[0] * i]) for i in range(count)]


def test_threads_are_selected_like_texts(own_cache, monkeypatch):
    corpus = load_corpus((threads(5), ["x", "y", "x", "y", "x"]), labeled=True)
    assert corpus.threaded and corpus.threads() == threads(5) and corpus.threads([]) == []
    assert corpus.threads([3, 1, 3]) == [threads(5)[i] for i in (3, 1, 3)] and "5 threads" in repr(corpus)
    chosen = corpus.select([3, 1, 3])
    assert chosen.threads() == corpus.threads([3, 1, 3]) and chosen.texts() == ["post 3", "post 1", "post 3"]
    assert chosen.select([2]).threads() == [threads(5)[3]] and chosen.labels() == ["y", "y", "y"]
    hidden = chosen.unlabeled()
    assert hidden.threads() == chosen.threads() and not hidden.labeled and hidden.fingerprint != chosen.fingerprint
    with pytest.raises(IndexError):
        corpus.threads([5])
    monkeypatch.setattr("mtem.data.corpus._IN_MEMORY", 0)
    assert corpus.select([3, 1, 3]).threads() == chosen.threads()
    assert len(list((own_cache / "corpora").iterdir())) == 1  # on disk, and read from there


def test_a_long_tree_goes_to_disk_however_short_its_root(own_cache, monkeypatch):
    long = Thread(["root", "reply " * 1000], [-1, 0])
    corpus = load_corpus([long, long], labeled=False)
    monkeypatch.setattr("mtem.data.corpus._IN_MEMORY", 5000)
    assert corpus.select([1]).threads() == [long] and len(list((own_cache / "corpora").iterdir())) == 1


def test_texts_among_threads_are_threads_without_replies(own_cache, monkeypatch):
    plain, threaded = load_corpus(["a", 'b "quoted"'], labeled=False), load_corpus(threads(3), labeled=False)
    single = [Thread(["a"], [-1]), Thread(['b "quoted"'], [-1])]
    assert not plain.threaded and plain.threads() == single and plain.threads([1]) == single[1:]
    for where in ("memory", "disk"):
        for parts, trees in (([plain, threaded], single + threads(3)), ([threaded, plain], threads(3) + single)):
            both = Corpus.concatenate(parts)
            assert both.threaded and both.threads() == trees and both.texts() == [tree.texts[0] for tree in trees], where
            assert both.threads([4, 0]) == [trees[4], trees[0]] and both.select([4, 1]).threads() == [trees[4], trees[1]]
            assert both.domains == [part.domains[0] for part in parts] and both.where(4).startswith(parts[1].name)
        monkeypatch.setattr("mtem.data.corpus._IN_MEMORY", 0)
    assert not Corpus.concatenate([plain, plain]).threaded
    as_trees = load_corpus(single, labeled=False)
    assert as_trees.table.column("tree").to_pylist() == [dump(tree) for tree in single]


def test_columns_may_be_cut_into_different_chunks():
    corpus = load_corpus(threads(6), labeled=False)
    table = corpus.table
    cut = pa.chunked_array([table.column("tree").slice(0, 4).combine_chunks(), table.column("tree").slice(4).combine_chunks()])
    other = Corpus(table.set_column(1, "tree", cut), corpus.name, corpus.fingerprint, files=corpus.files)
    assert other.threads([5, 0, 4, 3]) == [threads(6)[i] for i in (5, 0, 4, 3)] and other.texts([5]) == ["post 5"]


@examples(100)
@given(st.lists(st.integers(min_value=-(10**30), max_value=10**30)))
def test_classes_that_are_numbers_are_in_numeric_order(numbers):
    assert [int(name) for name in sort_classes(map(str, numbers))] == sorted(numbers)


def test_numbers_of_more_digits_than_python_converts():
    long = "9" * 5000
    assert sort_classes([long, "-" + long, "7", "-7", "00", "-" + "8" * 5000]) == (
        "-" + long,
        "-" + "8" * 5000,
        "-7",
        "00",
        "7",
        long,
    )
    with pytest.raises(TypeError, match="digits"):
        label_name(10**5000)
