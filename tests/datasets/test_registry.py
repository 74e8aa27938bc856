"""The table of data sets."""

import pytest

from mtem.datasets import amazon, pheme, registry
from mtem.errors import RequestError


def test_every_data_set_has_a_reader_and_one_line():
    assert {name: dataset.prepare for name, dataset in registry.DATASETS.items()} == {
        "amazon": amazon.prepare,
        "pheme": pheme.prepare,
    }
    assert all(dataset.description and "\n" not in dataset.description for dataset in registry.DATASETS.values())
    assert registry.get("pheme") is registry.DATASETS["pheme"]


def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match="unknown data set 'imdb': there are amazon and pheme"):
        registry.get("imdb")
