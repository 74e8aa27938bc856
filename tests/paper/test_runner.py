"""Running cells: resuming, failures, limits, several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from mtem.errors import RequestError
from mtem_paper import cells, protocol, runner, search
from tests.paper.tiny import TINY, planned, results_of, stripped, write_method
from tests.processes import LIMIT, interruptible, is_group, wait_for, wait_for_begun


def test_what_is_there_is_not_run_again(ran, amazon, encoder, monkeypatch):
    folder, found, _ = ran
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    with monkeypatch.context() as patch:
        patch.setattr(search, "Group", None)
        summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    assert (summary.done, summary.existed, summary.left) == (0, 6, 0)
    (folder / found[1].address).unlink()
    summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    assert (summary.done, summary.existed) == (1, 5)
    for path, content in before.items():
        if path == folder / found[1].address:
            assert stripped(json.loads(path.read_bytes())) == stripped(json.loads(content))
        else:
            assert path.read_bytes() == content


def test_a_failing_cell_does_not_stop_the_others(amazon, encoder, tmp_path):
    broken = write_method(tmp_path, "broken", "raise ValueError('no such luck')")
    found = planned(encoder, ["out", broken, "dann"])
    summary = runner.run(found, tmp_path / "results", data=amazon, model=str(encoder), device="cpu")
    assert summary.done == 2 and [cell.variant for cell, _ in summary.failed] == ["broken"]
    told = cells.failure_path(tmp_path / "results", found[1])
    assert "Traceback" in told.read_text() and "no such luck" in told.read_text() and str(told) in summary.failed[0][1]
    write_method(tmp_path, "broken", "return super().step(*arguments)")
    mended = planned(encoder, ["out", broken, "dann"])
    assert mended[1].address != found[1].address, "another file is another method"


def test_when_theta_1_fails_so_do_all_that_begin_there(amazon, encoder, tmp_path, monkeypatch):
    tries = []

    def failing(*arguments, **given):
        tries.append(given["method"])
        raise RequestError("out of paper")

    monkeypatch.setattr(search, "adapt", failing)
    summary = runner.run(planned(encoder, ["out", "mtem", "mme"]), tmp_path, data=amazon, model=str(encoder), device="cpu")
    assert summary.done == 0 and len(summary.failed) == 3 and tries == ["source-only", "mme"]


def test_a_ray_cluster_finds_the_same(ran, amazon, encoder, tmp_path):
    pytest.importorskip("ray")
    folder, found, _ = ran
    summary = runner.run(found[:1], tmp_path, data=amazon, model=str(encoder), device="cpu", pool="ray")
    assert (summary.done, summary.failed) == (1, [])
    ours, theirs = (json.loads((place / found[0].address).read_bytes()) for place in (tmp_path, folder))
    assert stripped(ours) == stripped(theirs)


def test_no_cell_is_begun_after_the_limit(amazon, encoder, tmp_path, monkeypatch):
    found = planned(encoder, ["out", "dann"])
    summary = runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu", limit=0)
    assert (summary.done, summary.left) == (0, 2) and not list(tmp_path.iterdir())
    clock = [1000.0]
    solve = search.solve

    def slow(cell, group):
        clock[0] += 60
        return solve(cell, group)

    monkeypatch.setattr(search, "solve", slow)
    monkeypatch.setattr(runner.time, "time", lambda: clock[0])
    summary = runner.run(found, tmp_path, data=amazon, model=str(encoder), device="cpu", limit=30)
    assert (summary.done, summary.left) == (1, 1) and (tmp_path / found[0].address).is_file()


def test_several_processes_find_the_same_and_survive_one_another(ran, amazon, encoder, tmp_path):
    """One of them ends in the middle of a cell."""
    dies = write_method(tmp_path, "dies", "import os; os._exit(3)")
    folder, found, _ = ran
    both = [*found, *planned(encoder, [dies], targets=["dvd"])]
    summary = runner.run(both, tmp_path / "results", data=amazon, model=str(encoder), device="cpu", jobs=2)
    assert summary.done == 6 and [cell.variant for cell, _ in summary.failed] == ["dies"]
    assert "exit code 3" in summary.failed[0][1]
    alone, together = results_of(folder, found), results_of(tmp_path / "results", found)
    assert {key: stripped(each) for key, each in together.items()} == {key: stripped(each) for key, each in alone.items()}


def begun_run(amazon, encoder, tmp_path, variants, **options):
    """A run by the command line in two processes, and the method of its last variant, which says that it began and waits."""
    begun = tmp_path / "begun"
    waits = write_method(tmp_path, "waits", f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(3600)")
    words = f"--data {amazon} --model {encoder} --results {tmp_path / 'r'} --seeds 0 --targets dvd --settings unsupervised"
    words += f" --pools natural --variants {','.join([*variants, waits])} --jobs 2 --device cpu"
    words += "".join(f" --set {name}={value}" for name, value in TINY.items())
    process = subprocess.Popen(
        [sys.executable, "-m", "mtem.cli", "reproduce", "general", *words.split()], env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True, preexec_fn=interruptible, **options,
    )  # fmt: skip
    given = {"seeds": [0], "targets": ["dvd"], "settings_": ["unsupervised"], "pools": ["natural"], "overrides": TINY}
    found = protocol.plan(["general"], "amazon", str(encoder), encoder.name, variants=[*variants, waits], **given)
    return process, begun, [tmp_path / "r" / cell.address for cell in found]


def test_a_killed_run_takes_its_workers_along(amazon, encoder, tmp_path):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process, begun, (address,) = begun_run(amazon, encoder, tmp_path, [], **silent)
    try:
        wait_for_begun(process, begun.exists, "the cell that waits")
        assert is_group(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not is_group(process.pid), "the end of the workers")
    assert not address.exists()


def test_an_interrupted_run_leaves_whole_cells_and_no_process(amazon, encoder, tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process, begun, (out, waiting) = begun_run(amazon, encoder, tmp_path, ["out"], **pipes)
    try:
        wait_for_begun(process, lambda: out.exists() and begun.exists(), "one cell that is there and one that waits")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert "1 of 2 cells" in output and "the same command continues from here" in errors
    wait_for(lambda: not is_group(process.pid), "the end of the workers")
    # nobody writes there any more
    assert [path for path in (tmp_path / "r" / "cells").rglob("*") if path.is_file()] == [out] and not waiting.exists()
    assert json.loads(out.read_text())["variant"] == "out"
