"""What stands for the target: domains that are large enough and have two classes, or clusters of the texts of one domain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.rehearsal.domains import (
    CLUSTERS,
    DOMAINS,
    FEWEST_IN_CLUSTER,
    FEWEST_LABELED,
    MOST_CLUSTERS,
    cluster,
    find_domains,
    keep_rows,
)
from tests.conftest import examples


def corpus_of(**labels):
    """Domain name -> its labels."""
    data = {name: ([f"{name} {number}" for number in range(len(given))], given) for name, given in labels.items()}
    return load_corpus(data, labeled=True, name="reviews")


def mixed(count):
    return ["bad", "good"] * (count // 2)


def unused():
    raise AssertionError("features are only for texts of one domain")


def clouds(*sizes, seed=0, spread=0.05):
    """Features in as many directions, of any length."""
    draw = np.random.default_rng(seed)
    centers = np.repeat(np.eye(len(sizes), 6), sizes, axis=0)
    return (centers + spread * draw.standard_normal((sum(sizes), 6))) * draw.uniform(0.1, 10, (sum(sizes), 1))


def test_every_domain_stands_for_the_target():
    found = find_domains(corpus_of(books=mixed(120), dvd=mixed(100), toys=mixed(140)), unused, 0)
    assert found.kind == DOMAINS and found.names == ("books", "dvd", "toys") and found.rehearsed == (0, 1, 2)
    assert found.notes == ()
    assert found.rows(1).tolist() == list(range(120, 220))
    assert sorted([*found.rows(1), *found.others(1)]) == list(range(360)) and not set(found.rows(1)) & set(found.others(1))


def test_a_domain_that_is_too_small_only_serves_as_source():
    found = find_domains(corpus_of(books=mixed(150), dvd=mixed(98), toys=mixed(150)), unused, 0)
    assert found.rehearsed == (0, 2) and 1 in found.numbers[found.others(0)]
    assert found.notes == ("dvd does not stand for the target: it has 98 texts, at least 100 are needed",)


def test_a_domain_with_one_class_only_serves_as_source():
    found = find_domains(corpus_of(books=mixed(150), dvd=["good"] * 150, toys=mixed(150)), unused, 0)
    assert found.rehearsed == (0, 2)
    assert found.notes == ("dvd does not stand for the target: all its labels are the same",)


def test_a_class_must_occur_in_the_other_domains():
    fair = ["bad", "good", "fair"] * 50
    found = find_domains(corpus_of(books=mixed(150), dvd=fair, toys=mixed(150)), unused, 0)
    assert found.rehearsed == (0, 2) and found.notes == ("dvd does not stand for the target: 1 of the classes occurs only there",)
    with pytest.raises(RequestError, match=r"nothing can be rehearsed.*2 of the classes occur only there"):
        find_domains(corpus_of(books=["good"] * 200, dvd=["bad", "fair"] * 80), unused, 0)


def test_one_domain_alone_is_weak_evidence():
    found = find_domains(corpus_of(books=mixed(150), dvd=mixed(98), toys=mixed(98)), unused, 0)
    assert found.rehearsed == (0,) and found.notes[-1] == "only books could stand for the target: one domain is weak evidence"


def test_nothing_can_be_rehearsed():
    with pytest.raises(RequestError, match=r"nothing can be rehearsed. books does not .*98 texts.*; d4 does not"):
        find_domains(corpus_of(books=mixed(98), d2=mixed(98), d3=mixed(98), d4=mixed(98)), unused, 0)


@pytest.mark.parametrize("count", [FEWEST_LABELED - 2, FEWEST_LABELED])
def test_too_few_labeled_texts(count):
    corpus = corpus_of(books=mixed(count - 120), dvd=mixed(120))
    if count >= FEWEST_LABELED:
        assert find_domains(corpus, unused, 0).rehearsed == (0, 1)
        return
    with pytest.raises(RequestError, match=r"needs at least 300 labeled texts, got 298; give more labeled texts, or adapt"):
        find_domains(corpus, unused, 0)


# ---------------------------------------------------------------------- one domain


def test_clusters_stand_for_domains_and_the_user_is_told_that_this_is_weaker():
    found = find_domains(corpus_of(books=mixed(600)), lambda: clouds(300, 300), 0)
    assert found.kind == CLUSTERS and found.names == ("cluster 1", "cluster 2") and found.rehearsed == (0, 1)
    assert len(set(found.numbers[:300])) == 1 and len(set(found.numbers[300:])) == 1
    assert "one source domain: 2 clusters of its texts stand for domains" in found.notes[0]
    assert "take this rehearsal as weaker evidence" in found.notes[0]


def test_one_domain_without_clusters():
    with pytest.raises(RequestError, match=r"clusters of at least 200 texts, and its 360 texts.*give a second source domain"):
        find_domains(corpus_of(books=mixed(360)), lambda: clouds(180, 180), 0)
    with pytest.raises(RequestError, match="do not form any"):
        find_domains(corpus_of(books=mixed(600)), lambda: clouds(590, 10, spread=0.001), 0)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((250, 250), 2), ((250, 250, 250), 3), ((210, 210, 210, 210), 4), ((210, 210, 210, 210, 210), None), ((390,), 1)],
)
def test_as_many_clusters_as_leave_none_too_small(sizes, wanted):
    numbers = cluster(clouds(*sizes), seed=0)
    counts = np.bincount(numbers)
    assert len(counts) <= MOST_CLUSTERS and (len(counts) == 1 or counts.min() >= FEWEST_IN_CLUSTER)
    assert wanted is None or len(counts) == wanted
    assert np.array_equal(numbers, cluster(clouds(*sizes), seed=0))


def test_small_clusters_are_joined_with_others():
    numbers = cluster(clouds(300, 300, 50), seed=0)
    assert np.bincount(numbers).min() >= FEWEST_IN_CLUSTER and len(np.bincount(numbers)) == 2


def test_lengths_of_features_do_not_matter():
    features = clouds(250, 250)
    assert np.array_equal(cluster(features, 0), cluster(features / np.linalg.norm(features, axis=1, keepdims=True), 0))


def test_features_of_zeros_are_one_cluster():
    with np.errstate(all="raise"), pytest.warns(UserWarning, match="distinct clusters"):
        assert set(cluster(np.zeros((450, 4)), 0)) == {0}


# ---------------------------------------------------------------------- rarer classes


@given(st.lists(st.integers(0, 2), min_size=3, max_size=200), st.integers(0, 5))
@examples(40)
def test_a_third_of_a_class_is_kept_and_all_of_the_others(labels, seed):
    labels = np.array(labels)
    kept = keep_rows(labels, 1, seed)
    assert np.array_equal(kept, np.unique(kept)) and set(np.flatnonzero(labels != 1)) <= set(kept)
    count = int((labels == 1).sum())
    assert (labels[kept] == 1).sum() == min(count, max(2, round(count / 3)))
    assert np.array_equal(kept, keep_rows(labels, 1, seed))
