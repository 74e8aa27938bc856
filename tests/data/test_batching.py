"""Batches: every row once, little padding, the same again from the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtem.data.batching import Batches, on_device, padding_share, sequential

row_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=200).map(np.array)


def amazon_like(count=6000, seed=0):
    """Median about 100 tokens, a long tail, cut at 256."""
    return np.clip(np.random.default_rng(seed).lognormal(4.6, 0.9, count), 3, 256).astype(np.int32)


@given(lengths=row_lengths, size=st.integers(1, 40), seed=st.integers(0, 5), bucket=st.integers(1, 5))
def test_every_row_once_an_epoch(lengths, size, seed, bucket):
    batches = Batches(lengths, size, seed, bucket)
    for epoch in range(2):
        start = epoch * batches.batches_per_epoch
        rows = [batches(step) for step in range(start, start + batches.batches_per_epoch)]
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
        assert all(len(r) <= size + 1 for r in rows)
        if size > 1 and len(lengths) > 1:
            assert all(len(r) > 1 for r in rows)


@given(lengths=row_lengths, size=st.integers(1, 40), step=st.integers(0, 100))
def test_a_step_needs_no_history(lengths, size, step):
    fresh, used = Batches(lengths, size, 3), Batches(lengths, size, 3)
    for earlier in range(step):
        used(earlier)
    assert fresh(step).tolist() == used(step).tolist()


def test_seeds_and_epochs_differ():
    lengths = amazon_like(640)
    one, other = Batches(lengths, 32, 0), Batches(lengths, 32, 1)
    assert any(one(s).tolist() != other(s).tolist() for s in range(20))
    first = {tuple(sorted(one(s))) for s in range(20)}
    assert first != {tuple(sorted(one(20 + s))) for s in range(20)}


def test_equal_lengths_are_mixed():
    batches = Batches(np.full(320, 7), 32, 0)
    assert any(np.ptp(batches(s)) > 150 for s in range(10))


def test_padding_is_below_a_tenth():
    lengths = amazon_like()
    for size in (16, 32, 64):
        batches = Batches(lengths, size, 0)
        assert padding_share(lengths, (batches(s) for s in range(batches.batches_per_epoch))) < 0.1
    unsorted = np.arange(3200).reshape(-1, 32)
    assert padding_share(lengths, unsorted) > 0.3


def test_batches_do_not_come_by_length():
    lengths = amazon_like()
    batches = Batches(lengths, 32, 0)
    means = [lengths[batches(s)].mean() for s in range(batches.batches_per_epoch)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


@given(lengths=row_lengths, size=st.none() | st.integers(1, 50), tokens=st.none() | st.integers(1, 2000))
def test_sequential_covers_all_within_the_caps(lengths, size, tokens):
    batches = sequential(lengths, size=size, tokens_per_batch=tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for rows in batches:
        assert size is None or len(rows) <= size
        assert tokens is None or len(rows) == 1 or lengths[rows].max() * len(rows) <= tokens


def test_nothing_and_nonsense():
    assert sequential(np.zeros(0, int)) == []
    assert padding_share(np.zeros(0, int), []) == 0.0
    for arguments in (([], 4, 0), ([1, 2], 0, 0)):
        with pytest.raises(ValueError):
            Batches(*arguments)


def test_arrays_arrive_as_they_are():
    rows = np.random.default_rng(0).permutation(1000)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        assert on_device(rows.copy(), torch.device(device)).tolist() == rows.tolist()
