"""The queue of commands on one GPU: what begins when, and what is not run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu_queue import next_jobs

SCRIPT = Path(__file__).parents[1] / "benchmarks/gpu_queue.py"


def job(name, memory=0, *after, command="true"):
    return {"name": name, "memory": memory, "after": list(after), "command": command}


JOBS = [job("a", 40), job("b", 40, "a"), job("c", 70), job("d", 10), job("e")]


@pytest.mark.parametrize(
    ("running", "done", "memory", "most", "expected"),
    [
        ([], [], 130, 9, "acde"),
        ([], [], 100, 9, "a"),  # c does not fit beside a, so nothing behind it begins
        ([], [], 130, 2, "ac"),
        (["a"], [], 130, 9, "cde"),
        (["c", "d"], ["a"], 130, 9, "be"),
        ([], [], 10, 9, "a"),  # larger than the whole memory: alone
        ([], list("abcde"), 130, 9, ""),
    ],
)
def test_which_jobs_begin(running, done, memory, most, expected):
    assert "".join(found["name"] for found in next_jobs(JOBS, running, set(done), memory, most)) == expected


def test_jobs_run_in_order_and_only_failed_ones_again(tmp_path):
    jobs = [job("first", 1, command="echo 1 >> order"), job("second", 1, "first", command="echo 2 >> order; exit 3")]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)))
    for _ in range(2):
        subprocess.run([sys.executable, SCRIPT, "jobs.jsonl", "--logs", "logs"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "order").read_text().split() == ["1", "2", "2"]
    lines = [json.loads(line) for line in (tmp_path / "logs/done.jsonl").read_text().splitlines()]
    assert [(line["name"], line["code"]) for line in lines] == [("first", 0), ("second", 3), ("second", 3)]
