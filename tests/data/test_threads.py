"""Threads: posts in any order in, every post after its parent out; repairs, refusals, and their messages."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.data.threads import Repairs, Thread, build, dump, ordered, parse, read
from tests.conftest import examples
from tests.corpora import refusal


def node(identity, parent=None, text="", **more):
    return {"id": identity, "parent": parent, "text": text or f"text {identity}", **more}


def posts(parents):
    """A post for each position of `parents`; ids are unlike positions, and whole numbers, so that these are tried too."""
    return [node(1000 + i, None if p < 0 else 1000 + p, f"post {i}") for i, p in enumerate(parents)]


def depths(parents):
    """The distance of each position from its root, in whatever order they stand."""
    found = []
    for position in range(len(parents)):
        depth = 0
        while parents[position] >= 0:
            position, depth = parents[position], depth + 1
        found.append(depth)
    return found


# A thread over n posts in topological order, and a permutation of its positions.
shapes = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.tuples(*(st.integers(0, i - 1) for i in range(1, n))), st.permutations(range(n)))
)


# Order


@examples(150)
@given(shape=shapes)
def test_any_order_becomes_a_tree_with_the_same_replies(shape):
    replies, permutation = shape
    parents = [-1, *replies]
    nodes = posts(parents)
    thread, repairs = build([nodes[i] for i in permutation], "f: row 1")
    assert thread.parents[0] == -1 and all(0 <= p < i for i, p in enumerate(thread.parents) if i)
    assert sorted(thread.texts) == sorted(n["text"] for n in nodes) and repairs == Repairs()
    original = {n["text"]: (nodes[p]["text"] if p >= 0 else None) for n, p in zip(nodes, parents, strict=True)}
    assert {t: thread.texts[p] if p >= 0 else None for t, p in zip(*thread, strict=True)} == original
    depth = dict(zip((n["text"] for n in nodes), depths(parents), strict=True))
    assert [depth[text] for text in thread.texts] == depths(thread.parents)


@examples(100)
@given(shape=shapes)
def test_order_changes_only_where_it_must(shape):
    replies, permutation = shape
    parents = [-1, *replies]
    assert build(posts(parents), "f")[0] == Thread([f"post {i}" for i in range(len(parents))], parents)
    place = {old: new for new, old in enumerate(permutation)}
    moved = [-1 if parents[old] < 0 else place[parents[old]] for old in permutation]
    # Of the posts that may come next, always the one that stood first.
    expected, left = [], set(range(len(moved)))
    while left:
        expected.append(min(i for i in left if moved[i] < 0 or moved[i] in expected))
        left.remove(expected[-1])
    assert ordered(moved) == expected


def test_chains_of_any_length():
    count = 30_000
    chain = posts([-1, *range(count - 1)])
    thread, _ = build(chain[::-1], "f: row 1")
    assert thread.parents == list(range(-1, count - 1)) and thread.texts[-1] == f"post {count - 1}"
    assert parse(dump(thread)) == thread
    chain[0]["parent"] = chain[-1]["id"]
    refusal(lambda: build(chain, "f: row 1"), "circle", "...")


def test_a_thread_without_replies():
    assert build([node("1")], "f")[0] == Thread(["text 1"], [-1])
    assert build([{"text": "alone"}], "f") == (Thread(["alone"], [-1]), Repairs())


def test_ids_are_compared_as_text():
    nodes = [node(7), node("8", 7), node(np.int64(9), " 8 ")]
    assert build(nodes, "f") == (Thread(["text 7", "text 8", "text 9"], [-1, 0, 1]), Repairs())


# Mended


@examples(100)
@given(shape=shapes, data=st.data())
def test_what_is_mended_is_counted_and_the_rest_stays(shape, data):
    replies, _ = shape
    parents = [-1, *replies]
    nodes = posts(parents)
    spoiled = {i: data.draw(st.sampled_from(["", "unknown", "root", "marked", "blank", "twice"])) for i in range(1, len(nodes))}
    expected = list(parents)
    for i, kind in spoiled.items():
        if kind in ("unknown", "root", "marked"):
            nodes[i] |= {"unknown": {"parent": "gone"}, "root": {"parent": None}, "marked": {"parent": 1000, "orphan": True}}[
                kind
            ]
            expected[i] = 0
        if kind == "blank":
            nodes[i]["text"] = data.draw(st.sampled_from([None, "", " \n", "\0", float("nan")]))
    copies = [dict(nodes[i]) for i, kind in spoiled.items() if kind == "twice"]
    thread, repairs = build(nodes + copies, "f: row 1, thread '1000'")
    kinds = list(spoiled.values())
    assert thread.parents == expected
    assert thread.texts == [("" if spoiled.get(i) == "blank" else f"post {i}") for i in range(len(nodes))]
    assert repairs.unknown_parent == kinds.count("unknown") + kinds.count("marked")
    assert repairs.extra_root == kinds.count("root") and repairs.no_root == 0
    assert repairs.no_text == kinds.count("blank") and repairs.duplicate == kinds.count("twice")
    if "unknown" in kinds or "marked" in kinds:
        first = min(i for i, kind in spoiled.items() if kind in ("unknown", "marked"))
        assert repairs.first["unknown_parent"] == f"f: row 1, thread '1000', post '{1000 + first}'"


def test_the_first_root_is_the_root_wherever_it_stands():
    nodes = [node("3", "2"), node("2"), node("1"), node("4", "gone")]
    thread, repairs = build(nodes, "f")
    assert thread == Thread(["text 2", "text 3", "text 1", "text 4"], [-1, 0, 0, 0])
    assert (repairs.extra_root, repairs.unknown_parent) == (1, 1)


def test_an_orphan_is_no_root_if_there_is_another():
    thread, repairs = build([node("2", orphan=True), node("1")], "f")
    assert thread == Thread(["text 1", "text 2"], [-1, 0]) and repairs.unknown_parent == 1 and repairs.extra_root == 0


def test_a_root_that_replies_to_something_outside():
    thread, repairs = build([node("2", "1"), node("1", "0"), node("3", "0")], "f")
    assert thread == Thread(["text 1", "text 2", "text 3"], [-1, 0, 0])
    assert (repairs.no_root, repairs.unknown_parent) == (1, 1) and repairs.first["no_root"] == "f, post '1'"
    assert build([{"text": "x", "parent": "0", "orphan": True}], "f")[1].no_root == 1


def test_a_root_without_text_stays():
    thread, repairs = build([{"id": 1}, node(2, 1)], "f")
    assert thread == Thread(["", "text 2"], [-1, 0]) and repairs.no_text == 1 and not thread.blank
    assert build([{"id": 1}, {"id": 2, "parent": 1}], "f")[0].blank


def test_odd_texts():
    thread, _ = build(
        [node(1, text="half \ud800 of a pair"), node(2, 1, 12), node(3, 1, b"caf\xc3\xa9"), node(4, 1, "nu\0l")], "f"
    )
    assert thread.texts == ["half \ufffd of a pair", "12", "café", "nul"]


def test_repairs_add_up_and_are_told_in_one_line_each():
    one = Repairs(no_text=1, duplicate=2, first={"no_text": "a.jsonl: row 1, post '1'", "duplicate": "a.jsonl: row 1, post '2'"})
    two = Repairs(no_text=1, unknown_parent=1, first={"no_text": "later", "unknown_parent": "a.jsonl: row 2, post '3'"})
    both = Repairs() + one + two
    assert (both.no_text, both.duplicate, both.unknown_parent, both.extra_root) == (2, 2, 1, 0)
    assert both.notices(file="a.jsonl") == [
        "1 reply has an unknown parent and is attached to the root (first: row 2, post '3')",
        "2 posts have no text (first: row 1, post '1')",
        "2 repeated posts dropped (first: row 1, post '2')",
    ]
    several = Repairs(2, 1, 2, 2, 1, dict.fromkeys(["unknown_parent", "no_text", "extra_root", "no_root", "duplicate"], "x"))
    assert len(several.notices()) == 5 and "2 threads have no post without parent" in several.notices()[3]
    assert Repairs().notices() == []


# Refused


@pytest.mark.parametrize(
    "nodes, words",
    [
        ([], ["thread is empty"]),
        ("nodes", ["str", "list"]),
        ({"id": 1}, ["dict", "list"]),
        ([node(1), "text"], ["post 2 of 2", "str", "object"]),
        ([node(1), {"parent": 1, "text": "x"}], ["post 2 of 2", "no id"]),
        ([node(1), node(" ", 1)], ["post 2 of 2", "no id"]),
        ([node(1), node(2.0, 1)], ["post 2 of 2", "float"]),
        ([node(1), node(2, 1.5e17)], ["post '2'", "parent", "float"]),
        ([node(1), node(True, 1)], ["bool"]),
        ([node(1), node(2, 1, ["x"])], ["post '2'", "text", "list"]),
        ([node(1), node(2, 1, b"\xff")], ["post '2'", "UTF-8"]),
        ([node(1), node(2, 1), node("2", 1, "other")], ["post '2'", "twice", "texts"]),
        ([node(1), node(2, 1), node(2)], ["post '2'", "twice", "parents"]),
        ([node(1), node(2, 2)], ["post '2'", "itself"]),
        ([node(1, 1)], ["post '1'", "itself"]),
        ([node(0), node(4, 3), node(1, 2), node(2, 3), node(3, 1)], ["post '3'", "circle ('3' to '1' to '2' to '3')"]),
        ([node(1, 2), node(2, 1)], ["circle ('1' to '2' to '1')"]),
    ],
)
def test_refused_by_place_and_reason(nodes, words):
    refusal(lambda: build(nodes, "a.jsonl: row 3, thread '5'"), "a.jsonl: row 3, thread '5'", *words)


# Forms


@examples(100)
@given(texts=st.lists(st.text(), min_size=1, max_size=6), data=st.data())
def test_dump_and_parse(texts, data):
    thread = Thread(texts, [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, len(texts)))])
    string = dump(thread)
    assert parse(string) == thread
    assert json.loads(string) == [[p, t] for t, p in zip(*thread, strict=True)]
    assert dump(Thread(["é"], [-1])) == '[[-1,"é"]]'


def test_rows():
    nodes = [node("1"), node("2", "1")]
    thread = Thread(["text 1", "text 2"], [-1, 0])
    for form in (nodes, tuple(nodes), np.array(nodes, object), json.dumps(nodes), json.dumps(nodes).encode(), thread):
        assert read({"id": 1, "nodes": form, "text": "ignored"}, "f: row 2")[0] == thread
    assert read({"nodes": [*nodes, node(3, 9)]}, "f: row 2")[1].first == {"unknown_parent": "f: row 2, post '3'"}
    for absent in ({}, {"nodes": None}, {"nodes": float("nan")}, {"nodes": " "}):
        refusal(lambda absent=absent: read({"id": 1, **absent}, "f: row 2"), "f: row 2, thread '1'", "no 'nodes'")
    refusal(lambda: read({"nodes": "words"}, "f: row 2"), "f: row 2", "JSON")
    refusal(lambda: read({"nodes": []}, "f: row 2"), "f: row 2", "empty")


@pytest.mark.parametrize(
    "thread, words",
    [
        (Thread([], []), "empty"),
        (Thread(["a"], [0]), "post 0"),
        (Thread(["a", "b"], [-1]), "2 texts but 1 parents"),
        (Thread(["a", "b"], [-1, 1]), "post 1"),
        (Thread(["a", "b"], [-1, -1]), "post 1"),
        (Thread(["a", ["b"]], [-1, 0]), "list"),
    ],
)
def test_threads_made_by_hand_are_checked(thread, words):
    refusal(lambda: read({"nodes": thread}, "f: row 2"), "f: row 2", words)
