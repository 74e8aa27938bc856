"""Holding out: shares, classes on both sides, repeats on one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.data.corpus import Corpus, text_key
from mtem.data.loading import load_corpus
from mtem.data.splits import hold_out
from tests.conftest import examples


def corpus_of(pairs, domain="d"):
    return load_corpus(([t for t, _ in pairs], [y for _, y in pairs]), labeled=True, domain=domain)


pairs = st.lists(st.tuples(st.sampled_from(["One", "one!", "two", "Two", "three", "4", ":)", ":("]), st.just("x")), min_size=1)


@examples(60)
@given(rows=pairs, others=st.integers(0, 12), share=st.floats(0.01, 0.9), seed=st.integers(0, 3))
def test_both_sides_have_every_class_and_no_text_in_common(rows, others, share, seed):
    rows = rows + [(f"other {i}", "y") for i in range(others)]
    corpus = corpus_of(rows)
    train, held = hold_out(corpus, corpus.classes, share, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(rows)))
    keys = [text_key(text) for text, _ in rows]
    assert not {keys[i] for i in train} & {keys[i] for i in held}
    for label in corpus.classes:
        different = {key for key, (_, y) in zip(keys, rows, strict=True) if y == label}
        sides = [{rows[i][1] for i in side} for side in (train, held)]
        assert label in sides[0] and (label in sides[1]) == (len(different) > 1)


def test_shares_by_class_and_domain():
    parts = [
        corpus_of([(f"{domain} {i}", "good" if i % 4 == 0 else "bad") for i in range(size)], domain)
        for domain, size in (("a", 1000), ("b", 200))
    ]
    corpus = Corpus.concatenate(parts)
    train, held = hold_out(corpus, corpus.classes, 0.1)
    labels, domains = corpus.label_numbers(corpus.classes), corpus.domain_numbers()
    counts = np.bincount(labels[held] * 2 + domains[held], minlength=4)
    assert np.abs(counts - [75, 15, 25, 5]).max() <= 1 and len(train) + len(held) == 1200


def test_repeats_by_the_same_seed_only():
    corpus = corpus_of([(f"text {i}", i % 3) for i in range(300)])
    first, again, other = (hold_out(corpus, corpus.classes, seed=seed)[1].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_rows_among_which_others_are_held_out():
    """Twice in a row: three parts without a text in common, each with its share of the classes."""
    corpus = corpus_of([(f"text {i % 250}", i % 250 % 2) for i in range(300)])
    rest, held = hold_out(corpus, corpus.classes, 0.1)
    train, again = hold_out(corpus, corpus.classes, 0.2, among=rest)
    assert sorted([*train, *held, *again]) == list(range(300))
    texts = [{i % 250 for i in rows} for rows in (train, held, again)]
    assert sum(map(len, texts)) == 250 and [len(part) for part in texts] == [180, 24, 46]
    assert abs(np.mean(corpus.label_numbers(corpus.classes)[again]) - 0.5) < 0.05


def test_at_most():
    corpus = corpus_of([(f"text {i}", i % 2) for i in range(1000)])
    assert len(hold_out(corpus, corpus.classes, 0.5, most=100)[1]) == 100
    assert len(hold_out(corpus, corpus.classes, 0.5, most=0)[1]) == 2


def test_nonsense_share():
    corpus = corpus_of([("a", 1), ("b", 2)])
    with pytest.raises(ValueError):
        hold_out(corpus, corpus.classes, 1.0)
