"""Which examples are in which part of a target's data."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mtem.data.corpus import text_key
from mtem_paper import splits
from mtem_paper.protocol import DATASETS
from tests.conftest import make_texts
from tests.corpora import refusal, table


def test_reviews_of_the_test_set_are_nowhere_else(amazon):
    target = splits.read("amazon", amazon, "kitchen", "mixed")
    division = splits.divide(target, 0)
    sides = [{text_key(text) for text in part} for part in (division.target_labeled, division.test, division.unlabeled)]
    assert not sides[0] & sides[1] and not sides[1] & sides[2] and not sides[0] & sides[2]
    assert len(division.target_labeled) == 100 and len(division.target_labeled) + len(division.test) == 248, (
        "the repeated ones are all in the test set"
    )
    known = dict(zip(target.examples, target.labels, strict=True))
    assert [known[text] for text in division.target_labeled + division.test] == division.target_labeled_labels + division.truth
    assert division.unlabeled_labels is None and set(target.sources) == {"books", "dvd", "electronics"}


def test_pools_are_what_their_names_say(amazon):
    mixed, natural = (splits.read("amazon", amazon, "kitchen", pool).pool for pool in ("mixed", "natural"))
    assert len(natural) == 60 and len(mixed) == 90 and set(natural) < set(mixed)
    assert set(make_texts(60, 13, 0.5)[0][:1]) <= set(natural)


def test_large_pools_are_cut_to_a_sample_of_the_seed(amazon, monkeypatch):
    monkeypatch.setattr(splits, "POOL", 30)
    target = splits.read("amazon", amazon, "kitchen", "mixed")
    one, again, other = (splits.divide(target, seed) for seed in (0, 0, 1))
    assert (
        len(one.unlabeled) == 30
        and one == again
        and one.unlabeled != other.unlabeled
        and one.target_labeled != other.target_labeled
    )


def test_threads_of_the_test_set_are_nowhere_else(pheme):
    target = splits.read("pheme", pheme, "ferguson", "event")
    division = splits.divide(target, 3)
    key = {thread["id"]: same for thread, same in zip(target.examples, target.keys, strict=True)}
    assert len(set(target.keys)) == 250 and max(Counter(target.keys).values()) == 2
    sides = [{key[thread["id"]] for thread in part} for part in (division.target_labeled, division.test, division.unlabeled)]
    assert not sides[0] & sides[1] and not sides[1] & sides[2] and not sides[0] & sides[2]
    assert [len(part) for part in (division.target_labeled, division.test, division.unlabeled)] == [100, 48, 112]
    shares = [labels.count("rumour") / len(labels) for labels in (division.truth, division.unlabeled_labels)]
    assert abs(shares[0] - shares[1]) < 0.02
    assert not any("label" in thread for part in (division.target_labeled, division.test, division.unlabeled) for thread in part)


def test_held_out_takes_its_share_of_every_class():
    draw = np.random.default_rng(0)
    labels = ["a"] * 200 + ["b"] * 40
    rows = splits.held_out([str(number // 2) for number in range(240)], labels, 0.3, draw)
    assert Counter(labels[row] for row in rows) == {"a": 60, "b": 12}
    assert set(rows // 2 * 2) | set(rows // 2 * 2 + 1) == set(rows), "pairs stay together"


def test_missing_data_say_what_to_do(amazon, tmp_path):
    refusal(lambda: splits.read("pheme", amazon, "ferguson", "event"), "charliehebdo.jsonl.gz", "mtem data prepare pheme")
    for domain in DATASETS["amazon"].domains:
        table(tmp_path, f"{domain}.labeled.jsonl.gz", [{"text": "a", "label": "positive"}])
    table(tmp_path, "kitchen.unlabeled.jsonl.gz", [{"text": "b", "source": "blitzer"}])
    refusal(lambda: splits.read("amazon", tmp_path, "kitchen", "mixed"), "fdu and hatn", "blitzer 1", "--pools")
    assert splits.read("amazon", tmp_path, "kitchen", "natural").pool == ["b"]
