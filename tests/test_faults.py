"""A few runs killed at random moments; `make faults` kills every kind of run twenty times."""

import random

import pytest
from tools import faults


@pytest.mark.parametrize("name", ["mtem", "bigcn"])
def test_killed_runs_resume_to_the_same_result(name, tmp_path):
    run = faults.configurations(tmp_path)[name]
    place = tmp_path / name
    place.mkdir()
    row = faults.try_out(name, run, place, 2, random.Random(name))
    assert row["failures"] == [] and row["same"] == row["runs"] == 2
    assert row["kills"] > 0


def test_another_result_would_be_noticed(tmp_path):
    """The comparison is not blind: a run with another seed is told from the first."""

    def run(output):
        import mtem

        texts = [f"text {number} with {'good' if number % 2 else 'bad'}{number % 7}" for number in range(60)]
        labels = ["good" if number % 2 else "bad" for number in range(60)]
        seed = 1 if output.name == "killed-0" else 0
        settings = {"max_length": 8, "batch_size": 10, "source_epochs": 1, "epochs": 0, "device": "cpu", "seed": seed}
        encoder = str(tmp_path / "encoder")
        return mtem.adapt((texts, labels), texts[:20], model=encoder, output=output, resume=True, frozen_layers=0, **settings)

    faults.configurations(tmp_path)
    (tmp_path / "place").mkdir()
    row = faults.try_out("seeds", run, tmp_path / "place", 1, random.Random(0))
    assert row["same"] == 0 and "other model/model.safetensors" in row["failures"][0]
