"""Nearest rows against a slow search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtem.models.trees import neighbours
from mtem.models.trees.neighbours import bank_of, neighbour_means
from tests.tolerance import assert_near


def slow(values: np.ndarray, bank: np.ndarray, count: int) -> np.ndarray:
    means = []
    for value in values:
        cosines = [float(value @ other / max(np.linalg.norm(value) * np.linalg.norm(other), 1e-12)) for other in bank]
        order = sorted((number for number, cosine in enumerate(cosines) if cosine <= 0.9999), key=lambda number: -cosines[number])
        means.append(np.mean([bank[number] for number in order[:count]], axis=0) if order and count else value)
    return np.stack(means)


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 5, 39, 100])
def test_means_are_those_of_the_nearest_rows(rows, monkeypatch, count):
    monkeypatch.setattr(neighbours, "_ROWS", 7)
    values = np.concatenate([rows[:15] * 3, np.random.default_rng(1).normal(size=(10, 6)).astype(np.float32)])
    found = neighbour_means(values, rows, count)
    assert found.dtype == np.float16 and found.shape == (25, 6)
    assert_near(found, slow(values, rows, count), dtype=torch.float16)


def test_a_row_is_not_its_own_neighbour(rows):
    without = np.delete(rows, 4, axis=0)
    assert_near(neighbour_means(rows[4:5], rows, 3), neighbour_means(rows[4:5], without, 3), dtype=torch.float16)
    twice = np.concatenate([rows, rows])
    assert_near(neighbour_means(rows[4:5], twice, 40), slow(rows[4:5], twice, 40), dtype=torch.float16)


def test_a_row_without_neighbours_gets_itself(rows):
    for bank in (rows[:0], rows[3:4], np.repeat(rows[3:4], 5, axis=0)):
        assert np.array_equal(neighbour_means(rows[3:4], bank, 2), rows[3:4].astype(np.float16))
    assert neighbour_means(rows[:0], rows, 2).shape == (0, 6)
    nothing = np.zeros((1, 6), np.float32)  # a post without known words
    assert np.isfinite(neighbour_means(nothing, np.concatenate([nothing, rows]), 2)).all()


def test_a_large_bank_is_thinned(rows, monkeypatch):
    assert np.array_equal(bank_of(rows), rows.astype(np.float16)) and len(bank_of(rows[:0])) == 0
    for limit, kept in ((40, 40), (39, 20), (10, 10), (9, 8)):
        monkeypatch.setattr(neighbours, "BANK", limit)
        assert len(bank_of(rows)) == kept
        assert np.array_equal(bank_of(rows)[0], rows[0].astype(np.float16))
