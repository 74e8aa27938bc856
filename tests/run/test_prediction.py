"""Predictions for folders of Parquet files; those on a Ray cluster are in test_ray_pool."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mtem
from mtem.run.prediction import MARK, predict_folder
from tests.conftest import make_texts


@pytest.fixture(scope="module")
def run(encoder, reviews, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    data = {"source": [reviews["books"], reviews["dvd"]], "target": reviews["kitchen"], "model": encoder}
    mtem.adapt(**data, method="source-only", source_epochs=0.2, max_length=16, left_out_models=0, output=path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three files, one of them in a folder of a partition, and files that are none of the data."""
    place = tmp_path / "texts"
    (place / "year=2024").mkdir(parents=True)
    for number, name in enumerate(("a.parquet", "b.parquet", "year=2024/part-0.parquet")):
        texts = [text for text, _ in make_texts(20, number)] + [""]
        pq.write_table(pa.table({"text": texts, "id": list(range(21))}), place / name)
    (place / "_SUCCESS").touch()
    shutil.copy(place / "a.parquet", place / "_metadata.parquet")
    return place


def tables(output):
    return {str(path.relative_to(output)): pq.read_table(path).to_pydict() for path in sorted(output.rglob("*.parquet"))}


def test_every_file_has_its_predictions(run, folder, tmp_path):
    done = predict_folder(run, folder, tmp_path / "out", all_probabilities=True)
    assert (done.rows, done.empty, sum(done.counts.values())) == (63, 3, 60)
    found = tables(tmp_path / "out")
    assert list(found) == ["a.parquet", "b.parquet", "year=2024/part-0.parquet"]
    for name, table in found.items():
        assert table["id"] == list(range(21))
        alone = tmp_path / "alone" / name
        alone.parent.mkdir(parents=True, exist_ok=True)
        predict_folder(run, folder / name, alone, all_probabilities=True)
        assert pq.read_table(alone).to_pydict() == table


def test_the_same_command_continues(run, folder, tmp_path, command):
    arguments = ["predict", run, folder, "--output", tmp_path / "out"]
    pq.write_table(pa.table({"number": [1, 2]}), folder / "b.parquet")
    code, _, told = command(*arguments)
    assert code == 1 and "1 of 3 files failed: b.parquet: " in told and "tries only these again" in told
    first = (tmp_path / "out" / "a.parquet").stat().st_mtime_ns
    pq.write_table(pa.table({"text": ["good1", "bad1"]}), folder / "b.parquet")
    code, printed, told = command(*arguments)
    assert code == 0 and "2 of 3 files are predicted already" in told and "2 rows" in printed
    assert (tmp_path / "out" / "a.parquet").stat().st_mtime_ns == first


def test_folders_that_are_refused(run, folder, tmp_path, command):
    def refused(*words, source=folder, output=tmp_path / "out", options=()):
        code, _, told = command("predict", run, source, "--output", output, *options)
        assert code == 2, told
        for word in words:
            assert word in told

    refused("must not be written into it", output=folder / "out")
    (tmp_path / "empty").mkdir()
    refused("no Parquet file in this folder", source=tmp_path / "empty")
    (tmp_path / "file").touch()
    refused("is a file", output=tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    refused("is not empty", output=tmp_path / "other")
    assert command("predict", run, folder, "--output", tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / MARK).read_text())["probabilities"] is False
    refused("another model or with other options", options=["--probabilities"])
