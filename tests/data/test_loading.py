"""Loading: from whatever the texts are in, with rules for what is missing, and small in memory."""

import errno
import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from mtem.data.corpus import check_source, check_target
from mtem.data.loading import load_corpus
from mtem.data.records import find_column, find_file_columns
from mtem.data.splits import hold_out
from mtem.data.threads import Thread
from mtem.datasets.sample import sample_path
from mtem.errors import RunError
from tests.corpora import refusal, reviews, table


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Where texts come from


@pytest.mark.parametrize("extension", [".csv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_every_format_gives_the_same_corpus(tmp_path, extension):
    corpus = load_corpus(table(tmp_path, f"books{extension}", reviews()), labeled=True)
    assert corpus.texts() == [r["text"] for r in reviews()] and corpus.labels() == [r["label"] for r in reviews()]
    assert corpus.classes == ("bad", "good") and corpus.domains == ["books"] and corpus.labeled
    assert corpus.label_numbers(corpus.classes).tolist() == [0, 1] * 3
    first = 2 if "sv" in extension else 1
    assert corpus.rows.tolist() == list(range(first, first + 6))
    assert corpus.where(1) == f"{tmp_path}/books{extension}: row {first + 1}"
    assert corpus.notices == () and corpus.files[0]["rows"] == 6


def test_fingerprint_is_of_the_content_not_the_format(tmp_path):
    one = load_corpus(table(tmp_path, "a.csv", reviews()), labeled=True)
    other = load_corpus(pd.DataFrame(reviews()), labeled=True)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != load_corpus(table(tmp_path, "b.csv", reviews(5)), labeled=True).fingerprint
    assert one.fingerprint != load_corpus(tmp_path / "a.csv", labeled=False).fingerprint


def test_several_files_keep_their_domains_and_rows(tmp_path):
    a, b = table(tmp_path, "a.csv", reviews(3)), table(tmp_path, "b.jsonl", reviews(2, "other"))
    for data in ([a, b], [str(a), str(b)], [a, str(b)], [load_corpus(a, labeled=True), b]):
        corpus = load_corpus(data, labeled=True)
        assert corpus.domains == ["a", "b"] and corpus.domain_numbers().tolist() == [0, 0, 0, 1, 1]
        assert corpus.where(4) == f"{b}: row 2" and corpus.name == "a.csv, b.jsonl"
        assert [entry["name"] for entry in corpus.files] == ["a.csv", "b.jsonl"]
    named = load_corpus({"books": a, "films": [b, a]}, labeled=True)
    assert named.domains == ["books", "films"] and len(named) == 8
    assert load_corpus(a, labeled=True, domain="mine").domains == ["mine"]
    assert load_corpus(corpus, labeled=True, domain="all").domains == ["all"]


def test_frames_lists_and_pairs():
    frame = pd.DataFrame({"Review": ["x", None, "z"], "Sentiment": [1.0, 2.0, 1.0]}, index=[7, 8, 9])
    corpus = load_corpus(frame, labeled=True, name="frame")
    assert corpus.texts() == ["x", "z"] and corpus.labels() == ["1", "1"] and corpus.rows.tolist() == [0, 2]
    assert corpus.notices == ("frame: 1 empty text dropped (first: row 1, column 'Review')",)
    assert load_corpus(["one", "two"], labeled=False).texts() == ["one", "two"]
    assert load_corpus((["one", "two"], np.array([1, 0])), labeled=True).labels() == ["1", "0"]
    assert load_corpus({"a": ["one"], "b": pd.Series(["two"])}, labeled=False).domains == ["a", "b"]
    assert "ignored" in load_corpus((["one"], [1]), labeled=False).notices[0]
    refusal(lambda: load_corpus(["one", "two"], labeled=True), "expected labels")
    refusal(lambda: load_corpus((["one", "two"], [1]), labeled=True), "2 texts but 1 labels")
    refusal(lambda: load_corpus([("one", "good")], labeled=False), "row 0", "tuple")
    refusal(lambda: load_corpus([], labeled=False), "empty")
    refusal(lambda: load_corpus(3, labeled=False), "int")


def test_pandas_missing_values():
    frame = pd.DataFrame({"text": pd.array(["a", pd.NA], dtype="string"), "label": pd.array([1, 0], dtype="Int64")})
    assert load_corpus(frame, labeled=True).labels() == ["1"]
    frame = pd.DataFrame({"text": ["a", "b"], "label": [1, float("nan")]})
    refusal(lambda: load_corpus(frame, labeled=True, name="mine"), "mine: row 1, column 'label'", "missing")


def test_hugging_face_datasets(own_cache):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features)
    corpus = load_corpus(data, labeled=True, name="hub")
    assert corpus.labels() == ["pos", "neg", "pos"] and corpus.domains == ["hub"]
    both = load_corpus(datasets.DatasetDict({"train": data, "test": data}), labeled=False)
    assert both.domains == ["train", "test"] and len(both) == 6
    unknown = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=features)
    refusal(lambda: load_corpus(unknown, labeled=True), "row 1", "missing")


def test_list_of_strings_that_are_files_or_texts(tmp_path):
    a = table(tmp_path, "a.csv", reviews())
    refusal(lambda: load_corpus([str(a), str(tmp_path / "b.cvs")], labeled=False), "b.cvs")
    refusal(lambda: load_corpus(["gone.csv"], labeled=False), "gone.csv", "no such file")
    assert len(load_corpus(["see data.csv", "and this"], labeled=False)) == 2


# Columns


def test_columns_by_usual_names(tmp_path):
    path = table(tmp_path, "a.csv", [{"ID": "1", "Review": "r", "TEXT": "t", "Class": "c", "label": "l"}] * 2)
    corpus = load_corpus(path, labeled=True)
    assert corpus.texts() == ["t", "t"] and corpus.labels() == ["l", "l"]
    corpus = load_corpus(path, labeled=True, text_column="review", label_column="ID")
    assert corpus.texts() == ["r", "r"] and corpus.labels() == ["1", "1"]
    assert find_column(["x", "Tweet"], "text", None, "f") == "Tweet"


def test_missing_columns(tmp_path):
    path = table(tmp_path, "a.csv", [{"id": "1", "words": "x"}])
    refusal(lambda: load_corpus(path, labeled=False), "a.csv", "'id', 'words'", "--text-column")
    refusal(lambda: load_corpus(path, labeled=True, text_column="words"), "a.csv", "'id'", "--label-column")
    refusal(lambda: load_corpus(path, labeled=False, text_column="wrods"), "a.csv", "'wrods'", "'words'", "--text-column")


def test_label_column_of_unlabeled_data_is_ignored_and_said(tmp_path):
    corpus = load_corpus(table(tmp_path, "a.csv", reviews()), labeled=False)
    assert not corpus.labeled and corpus.classes == ()
    assert corpus.notices == ("a.csv: column 'label' is ignored: this data is used without labels",)


# Texts and labels


@pytest.mark.parametrize("missing", [None, "", "  ", "nan", float("nan"), [1]])
def test_missing_label_names_file_row_and_column(tmp_path, own_cache, missing):
    path = table(tmp_path, "a.jsonl", [{"text": "x", "label": 1}, {"text": "y", "label": missing}])
    refusal(lambda: load_corpus(path, labeled=True), "a.jsonl: row 2, column 'label'", "--label-column")
    assert list((own_cache / "corpora").iterdir()) == []


def test_empty_texts_are_dropped_with_a_count(tmp_path):
    values = ["a", "", None, " \t\n", "\u0000", float("nan"), "b"]
    path = table(tmp_path, "a.jsonl", [{"text": text, "label": "x"} for text in values])
    for _ in range(2):  # the second time from the cache
        corpus = load_corpus(path, labeled=True)
        assert corpus.texts() == ["a", "b"] and corpus.rows.tolist() == [1, 7]
        assert corpus.notices == ("a.jsonl: 5 empty texts dropped (first: row 2, column 'text')",)


def test_all_empty_or_no_rows(tmp_path):
    path = table(tmp_path, "a.csv", [{"text": " ", "label": "1"}] * 3)
    refusal(lambda: load_corpus(path, labeled=True), "a.csv: row 2, column 'text'", "all 3 texts are empty")
    (tmp_path / "b.csv").write_text("text,label\n")
    refusal(lambda: load_corpus(tmp_path / "b.csv", labeled=True), "b.csv", "no rows")


def test_odd_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 12}\n{"text": "\\ud800 half"}\n{"text": "nu\\u0000l"}\n{"text": 1.5}\n{"text": "\\ud83d\\ude00"}\n')
    assert load_corpus(path, labeled=False).texts() == ["12", "\ufffd half", "nul", "1.5", "\U0001f600"]
    path.write_text('{"text": "a"}\n{"text": ["a"]}\n')
    refusal(lambda: load_corpus(path, labeled=False), "a.jsonl: row 2, column 'text'", "list")


def test_repeated_texts_are_kept_and_counted(tmp_path):
    rows = [("a", "1"), ("b", "1"), ("a", "1"), ("b", "2"), ("a ", "1")]
    corpus = load_corpus(table(tmp_path, "a.csv", [{"text": t, "label": y} for t, y in rows]), labeled=True)
    assert len(corpus) == 5
    assert corpus.notices == (
        "a.csv: 3 repeated texts kept (first: rows 2 and 4)",
        "a.csv: 1 repeated text with different labels (first: rows 3 and 5)",
    )


# Threads


def thread(number, replies=2, label=True, **more):
    """A thread whose first replies form a chain."""
    nodes = [{"id": f"{number}0", "parent": None, "text": f"root {number}"}]
    nodes += [{"id": f"{number}{i + 1}", "parent": f"{number}{i}", "text": f"reply {i} to {number}"} for i in range(replies)]
    return {"id": str(number), **({"label": ["no", "yes"][number % 2]} if label else {}), "nodes": nodes, **more}


def tree(number, replies=2):
    return Thread([f"root {number}", *(f"reply {i} to {number}" for i in range(replies))], list(range(-1, replies)))


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".parquet", ".csv"])
def test_threads_in_every_format_give_the_same_corpus(tmp_path, extension):
    rows = [thread(i, replies=i, text="not this") for i in range(4)]
    path = table(tmp_path, f"event{extension}", rows)
    corpus = load_corpus(path, labeled=True)
    assert corpus.threaded and corpus.threads() == [tree(i, i) for i in range(4)]
    assert corpus.texts() == [f"root {i}" for i in range(4)] and corpus.labels() == ["no", "yes", "no", "yes"]
    assert corpus.domains == ["event"] and corpus.notices == () and corpus.files[0]["text_column"] == "nodes"
    first = 2 if extension == ".csv" else 1
    assert corpus.where(2) == f"{path}: row {first + 2}"
    in_memory = load_corpus(rows, labeled=True)
    assert corpus.fingerprint == in_memory.fingerprint and corpus.files[0]["texts"] == in_memory.files[0]["texts"]


def test_threads_as_json_in_a_column(tmp_path):
    rows = [{"nodes": json.dumps(thread(i)["nodes"]), "topic": "x"} for i in range(2)]
    corpus = load_corpus(table(tmp_path, "a.parquet", rows), labeled=True)
    assert corpus.threads() == [tree(0), tree(1)] and corpus.labels() == ["x", "x"]
    refusal(lambda: load_corpus(table(tmp_path, "b.csv", [*rows, {"nodes": "[", "topic": "x"}]), labeled=True), "row 4", "JSON")


def test_threads_in_lists_frames_and_pairs():
    rows = [thread(0), thread(1)]
    frame = pd.DataFrame(rows)
    bare = [{"nodes": row["nodes"]} for row in rows]
    for data in (rows, frame, (bare, ["no", "yes"]), ([tree(0), tree(1)], np.array(["no", "yes"]))):
        corpus = load_corpus(data, labeled=True)
        assert corpus.threads() == [tree(0), tree(1)] and corpus.labels() == ["no", "yes"], data
    assert load_corpus([tree(0), tree(1)], labeled=False).threads() == load_corpus(bare, labeled=False).threads()
    assert load_corpus(tree(1), labeled=False).threads() == [tree(1)]
    assert load_corpus(rows, labeled=True, label_column="id").labels() == ["0", "1"]
    assert load_corpus((rows, ["a", "b"]), labeled=True, label_column="id").labels() == ["a", "b"]
    assert load_corpus({"a": [tree(0)], "b": [thread(1)]}, labeled=False).domains == ["a", "b"]
    assert "ignored" in load_corpus(rows, labeled=False).notices[0]
    refusal(lambda: load_corpus(bare, labeled=True, name="mine"), "mine", "no label column")
    refusal(lambda: load_corpus((bare, ["no"]), labeled=True), "2 threads but 1 labels")
    refusal(lambda: load_corpus([*rows, "text"], labeled=False), "row 2", "str")
    refusal(lambda: load_corpus([*rows, {"text": "x"}], labeled=False), "row 2", "no 'nodes'")
    refusal(lambda: load_corpus(["text", rows[0]], labeled=False), "row 1", "dict")
    refusal(lambda: load_corpus(frame.iloc[:0], labeled=True), "no text column")
    refusal(lambda: load_corpus(pd.DataFrame([thread(0), thread(0)]), labeled=True), "row 1, thread '0'", "row 0")


def test_threads_in_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    corpus = load_corpus(datasets.Dataset.from_list([thread(0, 1), thread(1, 3)]), labeled=True)
    assert corpus.threads() == [tree(0, 1), tree(1, 3)] and corpus.labels() == ["no", "yes"]


def test_a_named_text_column_makes_texts_of_threads(tmp_path):
    path = table(tmp_path, "a.jsonl", [thread(i, summary=f"about {i}") for i in range(3)])
    corpus = load_corpus(path, labeled=True, text_column="summary")
    assert not corpus.threaded and corpus.texts() == ["about 0", "about 1", "about 2"]
    assert load_corpus(path, labeled=True).threaded  # not what was just put into the cache
    assert find_file_columns(path)[:3] == ("nodes", "label", True)
    assert find_file_columns(path, text_column="Summary")[:3] == ("summary", "label", False)
    refusal(lambda: load_corpus(path, labeled=True, text_column="none"), "'none'", "'nodes'")
    counts = table(tmp_path, "b.csv", [{"nodes": "12", "text": "x"}, {"nodes": "[13]", "text": "y"}])
    assert load_corpus(counts, labeled=False).texts() == ["x", "y"]
    counts = table(tmp_path, "c.jsonl", [{"nodes": 12, "text": "x"}])
    assert load_corpus(counts, labeled=False).texts() == ["x"]


def test_threads_and_texts_in_one_file(tmp_path):
    text = {"text": "alone", "label": "no"}
    path = table(tmp_path, "a.jsonl", [thread(0), thread(1), text])
    refusal(lambda: load_corpus(path, labeled=True), "a.jsonl: row 3", "no 'nodes'")
    path = table(tmp_path, "b.jsonl", [text, thread(1)])
    refusal(lambda: load_corpus(path, labeled=True), "b.jsonl: row 2", "thread")
    assert load_corpus([table(tmp_path, "c.jsonl", [thread(0)]), table(tmp_path, "d.csv", [text])], labeled=True).threaded


def test_bad_threads_name_file_row_thread_and_node(tmp_path, own_cache):
    circle = thread(1)
    circle["nodes"][1]["parent"] = "12"
    refusal(lambda: load_corpus(table(tmp_path, "a.jsonl", [thread(0), circle]), labeled=True),
            "a.jsonl: row 2, thread '1', post '11'", "circle")  # fmt: skip
    refusal(lambda: load_corpus(table(tmp_path, "b.jsonl", [thread(0), thread(1, nodes=[])]), labeled=True),
            "b.jsonl: row 2, thread '1'", "empty")  # fmt: skip
    refusal(lambda: load_corpus(table(tmp_path, "c.jsonl", [thread(0), thread(1, label="")]), labeled=True),
            "c.jsonl: row 2, column 'label'", "missing")  # fmt: skip
    again = [thread(0), thread(1), thread(2), {**thread(3), "id": "1"}]
    refusal(lambda: load_corpus(table(tmp_path, "d.jsonl", again), labeled=True), "d.jsonl: row 4, thread '1'", "row 2")
    assert list((own_cache / "corpora").iterdir()) == []
    odd = [thread(0, id="\ud800"), {"nodes": thread(1)["nodes"], "label": "x"}, {"nodes": thread(2)["nodes"], "label": "x"}]
    assert len(load_corpus(odd, labeled=True)) == 3


def test_repaired_threads_are_told_per_file(tmp_path):
    rows = [thread(0), thread(1), thread(2), thread(3), thread(4)]
    rows[1]["nodes"][1]["parent"] = "gone"
    rows[2]["nodes"][2] |= {"parent": "20", "orphan": True}
    rows[2]["nodes"][1]["text"] = None
    rows[3]["nodes"] = [{"id": "30", "parent": None, "text": " "}, {"id": "31", "parent": "99"}]
    rows[4]["nodes"][0]["text"] = "Root 0"
    rows.append(thread(5, nodes=[{"id": "50", "text": "root 1"}]))
    path = table(tmp_path, "a.jsonl", rows)
    for _ in range(2):  # the second time from the cache
        corpus = load_corpus(path, labeled=True)
        assert corpus.rows.tolist() == [1, 2, 3, 5, 6]
        assert corpus.threads([1, 2]) == [
            Thread(tree(1).texts, [-1, 0, 1]),
            Thread(["root 2", "", "reply 1 to 2"], [-1, 0, 0]),
        ]
        assert corpus.notices == (
            "a.jsonl: 1 empty thread dropped (first: row 4)",
            "a.jsonl: 2 replies have an unknown parent and are attached to the root (first: row 2, thread '1', post '11')",
            "a.jsonl: 1 post has no text (first: row 3, thread '2', post '21')",
            "a.jsonl: 1 repeated root text kept (first: rows 2 and 6)",
        )
    blank = table(tmp_path, "b.jsonl", [rows[3]])
    refusal(lambda: load_corpus(blank, labeled=True), "b.jsonl: row 1", "all 1 threads are empty")


def test_roots_without_text_are_not_repeats_of_each_other():
    nodes = [[{"id": 1}, {"id": 2, "parent": 1, "text": text}] for text in "abb"]
    corpus = load_corpus([{"nodes": each} for each in nodes], labeled=False)
    assert corpus.texts() == ["", "", ""]
    assert corpus.notices[1] == "threads: 1 repeated root text kept (first: rows 1 and 2)"


def test_fingerprint_of_threads_covers_the_trees():
    one, other = thread(0), thread(0)
    other["nodes"][2]["parent"] = "00"
    prints = {load_corpus(data, labeled=False).fingerprint for data in ([one], [other], ["root 0"], [Thread(["root 0"], [-1])])}
    assert len(prints) == 4
    source = load_corpus([one], labeled=True)
    refusal(lambda: check_target(load_corpus([one], labeled=False, name="again"), source), "again", "threads", "the same")
    check_target(load_corpus([other], labeled=False), source)


def test_second_load_of_threads_reuses_the_file(tmp_path, own_cache, monkeypatch):
    path = table(tmp_path, "a.jsonl.gz", [thread(0), thread(1)])
    first = load_corpus(path, labeled=True)
    (stored,) = (own_cache / "corpora").iterdir()
    before = stored.stat()
    monkeypatch.setattr("mtem.data.threads.build", lambda *_: pytest.fail("read again"))
    second = load_corpus(path, labeled=True)
    assert (before.st_ino, before.st_mtime_ns) == (stored.stat().st_ino, stored.stat().st_mtime_ns)
    assert second.threads() == first.threads() == [tree(0), tree(1)] and second.fingerprint == first.fingerprint


def test_repeated_roots_are_held_out_together():
    rows = [thread(i) for i in range(40)]
    for i in range(0, 40, 4):
        rows[i + 2]["nodes"][0]["text"] = f"ROOT {i}!"  # the same text as that of thread i, and the same label
    corpus = load_corpus(rows, labeled=True)
    train, held = hold_out(corpus, corpus.classes, 0.3, seed=1)
    assert len(held) and not {i - i % 4 for i in held if i % 2 == 0} & {i - i % 4 for i in train if i % 2 == 0}
    chosen = corpus.select(held)
    assert chosen.threads() == corpus.threads(held) and chosen.threaded


# The cache


def test_second_load_reuses_the_file(tmp_path, own_cache, monkeypatch):
    path = table(tmp_path, "a.csv", reviews())
    first = load_corpus(path, labeled=True)
    (stored,) = (own_cache / "corpora").iterdir()
    before = stored.stat()
    moved = path.rename(tmp_path / "moved.csv")
    monkeypatch.setattr("mtem.data.readers._table_rows", lambda *a: (["text", "label"], iter(())))  # not read again
    second = load_corpus(moved, labeled=True)
    after = stored.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert second.texts() == first.texts() and second.domains == ["moved"] and second.fingerprint == first.fingerprint


def test_damaged_cache_is_made_again(tmp_path, own_cache):
    path = table(tmp_path, "a.csv", reviews())
    load_corpus(path, labeled=True)
    (stored,) = (own_cache / "corpora").iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    assert len(load_corpus(path, labeled=True)) == 6
    (stored,) = (own_cache / "corpora").iterdir()


def test_changed_file_or_columns_are_read_anew(tmp_path):
    path = table(tmp_path, "a.csv", reviews(2))
    assert len(load_corpus(path, labeled=True)) == 2
    assert len(load_corpus(table(tmp_path, "a.csv", reviews(3)), labeled=True)) == 3
    assert load_corpus(path, labeled=False, text_column="label").texts() == ["bad", "good", "bad"]


def test_truncated_gzip_leaves_no_cache(tmp_path, own_cache):
    whole = gzip.compress("".join(json.dumps(r) + "\n" for r in reviews(5000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    refusal(lambda: load_corpus(tmp_path / "a.jsonl.gz", labeled=True), "a.jsonl.gz", "truncated", "row")
    assert list((own_cache / "corpora").iterdir()) == []


def test_full_disk_under_the_cache(tmp_path, own_cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    path = tmp_path / "a.csv"
    path.write_text("text\nx\n")
    with pytest.raises(RunError, match="the disk is full"):
        load_corpus(path, labeled=False)
    assert list((own_cache / "corpora").iterdir()) == []


_MEASURE = """
import resource, sys
from mtem.data.loading import load_corpus
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = used()
corpus = load_corpus(sys.argv[1], labeled=True)
assert len(corpus) == 200_000 and corpus.classes == ("0", "1")
print(used() - before)
"""


def test_many_rows_in_little_memory(tmp_path):
    path = tmp_path / "big.csv"
    with path.open("w") as out:
        out.write("text,label\n")
        filler = "word " * 120
        for i in range(200_000):
            out.write(f"{i} {filler},{i % 2}\n")
    assert path.stat().st_size > 100 << 20
    # What an allocator keeps for later depends on its kind and on the number of cores; this one gives everything back.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 80  # megabytes, for a file of 120


def test_bundled_sample():
    source = load_corpus([sample_path(f"{d}.jsonl.gz") for d in ("books", "dvd", "electronics")], labeled=True)
    target = load_corpus(sample_path("kitchen.jsonl.gz"), labeled=False)
    test = load_corpus(sample_path("kitchen-test.jsonl.gz"), labeled=True)
    assert [len(source), len(target), len(test)] == [1260, 1200, 600]
    assert source.classes == test.classes == ("negative", "positive")
    for corpus in (source, test):
        assert np.bincount(corpus.label_numbers(corpus.classes)).tolist() == [len(corpus) // 2] * 2
    assert not set(target.texts()) & set(test.texts())
    check_source(source)
    check_target(target, source)
    assert (sample_path() / "README.md").is_file()
    refusal(lambda: sample_path("toys.jsonl.gz"), "toys.jsonl.gz", "books.jsonl.gz")
