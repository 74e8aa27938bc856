"""Records are read the same way for training and for prediction."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.inference import predict_file
from mtem.models.trees.model import BigcnModel, BigcnSettings
from tests.threads import make_threads


def test_cells_are_read_alike_by_adapt_and_predict(tmp_path):
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
    assert "row 1, column 'text': expected a text, got a dict; name another column with --text-column" in str(_refused(tmp_path))


def _refused(place):
    with pytest.raises(RequestError) as caught:
        load_corpus(str(place / "objects.jsonl"), labeled=False)
    return caught.value
