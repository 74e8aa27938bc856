"""Kill runs at random moments, resume them, and compare what comes of them with a run that was left alone.

    python tools/faults.py --kills 20

Each configuration runs once to its end. Then it is started, killed (SIGKILL) and resumed, so many times; every other kill waits
until a checkpoint is being written, and some resumed runs are killed again. What is compared, bit for bit: the weights of the
chosen and of the source model, the table of texts with its indexes and confidences, the choice and the estimates. Encoders and
data are tiny, everything is on the CPU, and a checkpoint is written after every step. Runs are forked from this process, so
that most of their time is not spent on imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from tests.conftest import make_encoder, make_texts, write_jsonl
from tests.rehearsed import stripped, trial_arrays
from tests.threads import make_threads

import mtem
import mtem.rehearsal.rehearse
import mtem.run.adapt
from mtem import methods

COMPARED = ("selection", "estimate", "temperature", "class_shares", "left_out", "warnings", "target_class_prior")
LIMIT = 300.0  # seconds that a run may take

Run = Callable[[Path], Any]  # into a folder, resuming what is there


class FailureError(Exception):
    """A run that did not come to its end, or not to the same."""


def configurations(place: Path) -> dict[str, Run]:
    """Return what is killed: every method, and every stage and kind of model that writes something of its own."""
    encoder = make_encoder(place / "encoder")
    books = write_jsonl(place / "books.jsonl", make_texts(60, 1))
    dvd = write_jsonl(place / "dvd.jsonl", make_texts(60, 2, 0.3))
    kitchen = write_jsonl(place / "kitchen.jsonl", make_texts(80, 3, 0.7), labeled=False)
    few = write_jsonl(place / "few.jsonl", make_texts(20, 5, 0.7))
    domains = [str(write_jsonl(place / f"domain-{n}.jsonl", make_texts(160, 10 + n, 0.3 * n))) for n in range(2)]
    events = []
    for number, name in enumerate(("one", "two", "three")):
        threads = make_threads(40, number + 1, 0.3 * number)
        if name == "three":
            threads = [{key: value for key, value in thread.items() if key != "label"} for thread in threads]
        events.append(place / f"{name}.jsonl")
        events[-1].write_text("".join(json.dumps(thread) + "\n" for thread in threads))
    short = {
        "max_length": 16, "batch_size": 10, "source_epochs": 2, "epochs": 1, "source_learning_rate": 3e-3, "learning_rate": 1e-3,
        "evaluations": 3, "frozen_layers": 0, "checkpoint_seconds": 0.0, "device": "cpu",
    }  # fmt: skip
    texts = {"source": [str(books), str(dvd)], "target": str(kitchen), "model": str(encoder), **short}
    threads = {"source": [str(events[0]), str(events[1])], "target": str(events[2]), "model": "bigcn", **short, "hidden": 8}

    def adapting(**changes: Any) -> Run:
        return lambda output: mtem.adapt(**{**changes, "output": output, "resume": True})

    def rehearsing(output: Path) -> Any:
        given = {name: value for name, value in texts.items() if name not in ("target", "evaluations", "checkpoint_seconds")}
        return mtem.rehearse(**{**given, "source": domains, "epochs": 2, "validation_share": 0.2}, output=output, resume=True)

    made = {name: adapting(**texts, method=name) for name in methods.METHODS if not methods.get(name).needs_target_labels}
    made |= {
        name: adapting(**texts, method=name, target_labeled=str(few))
        for name in methods.METHODS
        if methods.get(name).needs_target_labels
    }
    made["mtem, learned indexes"] = adapting(**texts, preset="learned")
    made["frozen layers"] = adapting(**{**texts, "frozen_layers": -1})
    made["pretraining"] = adapting(**texts, pretrain_epochs=1, pretrain_batch_size=20)
    made["bigcn"] = adapting(**threads, features="tfidf")
    made["bigcn, pretrained posts"] = adapting(
        **threads, features="encoder", encoder=str(encoder), pretrain_epochs=1, pretrain_batch_size=20
    )
    made["rehearsal"] = rehearsing
    return made


def start(run: Run, output: Path, log: Path) -> int:
    """Fork a process that runs into a folder; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        run(output)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def finish(pid: int, log: Path) -> None:
    """Wait for a run; raise an error if it failed."""
    deadline = time.monotonic() + LIMIT
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise FailureError("did not come to an end")
        time.sleep(0.01)
    if status:
        raise FailureError(f"ended with status {status}: {log.read_text(errors='replace').strip()[-600:]}")


def kill(pid: int, when: Callable[[float], bool]) -> bool:
    """Kill a run as soon as `when` says so, given the seconds since its start; return whether it was still running."""
    begun = time.monotonic()
    while not when(time.monotonic() - begun):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def while_writing(output: Path, count: int) -> Callable[[float], bool]:
    """Return a moment: while some checkpoint is written, the `count`-th that is seen."""
    seen: set[str] = set()

    def when(seconds: float) -> bool:
        try:
            seen.update(name for name in os.listdir(output / "checkpoints") if name.startswith(".step-"))
        except OSError:
            return False
        return len(seen) >= count

    return when


def outcome(output: Path) -> dict[str, Any]:
    """Return what must be the same, and that nothing else is left."""
    left = [path.name for path in output.rglob(".*")]
    if left:
        raise FailureError(f"left behind: {', '.join(left)}")
    if (output / "rehearsal.json").exists():
        record = json.loads((output / "rehearsal.json").read_text())
        tensors = {name: value.tolist() for name, value in load_file(output / "left-out.safetensors").items()}
        trials = {name: {key: array.tolist() for key, array in arrays.items()} for name, arrays in trial_arrays(output).items()}
        return {"record": stripped(record), "left out": tensors, "trials": trials}
    record = json.loads((output / "run.json").read_text())
    tensors = {
        file: {name: value.flatten().tolist() for name, value in load_file(output / file).items()}
        for file in ("model/model.safetensors", "checkpoints/source.safetensors")
    }
    return {**tensors, "table": mtem.load(output).indexes.to_dict("list"), **{name: record[name] for name in COMPARED}}


def try_out(name: str, run: Run, place: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """Kill and resume one configuration; return the row of the table."""
    log = place / "log"
    begun = time.monotonic()
    finish(start(run, place / "whole", log), log)
    seconds = time.monotonic() - begun
    expected = outcome(place / "whole")
    writes = sum(1 for line in (place / "whole" / "history.jsonl").open()) if (place / "whole" / "history.jsonl").exists() else 0
    row = {"configuration": name, "runs": 0, "kills": 0, "writing": 0, "same": 0, "failures": []}
    while row["runs"] < kills:
        output = place / f"killed-{row['runs']}"
        row["runs"] += 1
        try:
            for attempt in range(draw.choice((1, 1, 2, 3))):
                writing = bool(writes) and (row["runs"] + attempt) % 2 == 0
                moment = draw.uniform(0, seconds)
                when = while_writing(output, draw.randint(1, 8)) if writing else (lambda passed, at=moment: passed >= at)
                if not kill(start(run, output, log), when):
                    break  # it was quicker
                row["kills"] += 1
                row["writing"] += writing
            finish(start(run, output, log), log)
            found = outcome(output)
            if different := [key for key, value in expected.items() if found.get(key) != value]:
                raise FailureError(f"other {', '.join(different)}")
            row["same"] += 1
        except FailureError as failure:
            row["failures"].append(f"{name}, run {row['runs']}: {failure}")
    return row


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="killed runs of each configuration")
    parser.add_argument("--only", action="append", help="a configuration; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mtem-faults-") as folder:
        place = Path(folder)
        before = os.environ.get("MTEM_CACHE")
        os.environ["MTEM_CACHE"] = str(place / "cache")
        try:
            print(f"{'configuration':<26}{'runs':>6}{'kills':>7}{'while writing':>15}{'the same':>10}", flush=True)
            for name, run in configurations(place).items():
                if chosen.only and name not in chosen.only:
                    continue
                (place / name).mkdir()
                row = try_out(name, run, place / name, chosen.kills, random.Random(f"{chosen.seed} {name}"))
                rows.append(row)
                print(f"{name:<26}{row['runs']:>6}{row['kills']:>7}{row['writing']:>15}{row['same']:>10}", flush=True)
                for failure in row["failures"]:
                    print(f"  {failure}", flush=True)
        finally:
            if before is None:
                del os.environ["MTEM_CACHE"]
            else:
                os.environ["MTEM_CACHE"] = before
    total = {key: sum(row[key] for row in rows) for key in ("runs", "kills", "writing", "same")}
    print(f"{'all':<26}{total['runs']:>6}{total['kills']:>7}{total['writing']:>15}{total['same']:>10}")
    return rows


if __name__ == "__main__":
    sys.exit(any(row["failures"] for row in main()))
