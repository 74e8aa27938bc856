"""Missing cells as jobs of the queue."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from mtem_paper import protocol, rehearsed_settings

ROOT = Path(__file__).parents[1]


def jobs(existing, *more):
    command = [sys.executable, ROOT / "benchmarks/gpu_jobs.py", "--dataset", "amazon", "--model", "minilm", "--data", "my data"]
    command += ["--pools", "natural", "--settings", "unsupervised", "--from", existing, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_job_has_the_missing_cells_of_one_group(tmp_path):
    (tmp_path / "rehearsals").symlink_to(ROOT / "results/rehearsals")
    variants, seeds = ["out", "mtem", "mtem-without-view"], [1, 2]
    cells = protocol.plan(
        ["general"], "amazon", "minilm", "minilm", seeds=seeds, settings_=["unsupervised"], pools=["natural"], variants=variants,
        rehearsed=rehearsed_settings.choices(tmp_path, "amazon", "minilm"),
    )  # fmt: skip
    for cell in cells:
        if cell.seed == 1 and (cell.target == "dvd" or cell.variant == "out"):
            (tmp_path / cell.address).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / cell.address).touch()
    found = jobs(tmp_path, "--seeds", "1,2", "--variants", ",".join(variants), "--memory", "7")
    names = [
        f"amazon-minilm-unsupervised-natural-{target}-{seed}-{first}"
        for seed, first in ((1, "mtem"), (2, "out"))
        for target in ("books", "dvd", "electronics", "kitchen")
    ]
    assert [job["name"] for job in found] == [name for name in names if "dvd-1" not in name]
    assert {job["memory"] for job in found} == {7.0}
    words = [word for word in shlex.split(found[0]["command"]) if word != "--quiet"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options["--data"] == "my data" and options["--variants"] == "mtem,mtem-without-view"
    assert (options["--targets"], options["--seeds"], options["--pools"]) == ("books", "1", "natural")
    assert "out,mtem,mtem-without-view" in found[-1]["command"]
    later = jobs(tmp_path, "--seeds", "1,2", "--variants", "mtem-without-view")
    assert not {job["name"] for job in later} & {job["name"] for job in found}, "the queue leaves out a name that it has seen"
