"""`mtem adapt` and `mtem predict` alone and beside busy processes: how many times as long they take.

    python benchmarks/busy.py                            about 5 minutes on 2 quiet cores
    python benchmarks/busy.py --busy 2 --rounds 1 --texts 300 --steps 12

Every run is the command itself, in a process of its own, on a part of the bundled sample; the imports count. Beside the busy
processes (each an endless loop of Python on one core) the adaptation runs as the command line sets torch's threads, which sleep
while they wait for each other, and as the threads are without it (GOMP_SPINCOUNT at its default, so that they spin). The rows
are added to those of earlier calls. On a machine that is not quiet "alone" is not alone: the load before each run is in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_time import row, show

from mtem.atomic import read_json, write_json
from mtem.data import readers
from mtem.data.writers import Writer
from mtem.datasets.sample import sample_path

SPINNING = {"GOMP_SPINCOUNT": "300000"}  # libgomp's default
SETTINGS = {"device": "cpu", "frozen_layers": -2, "evaluations": 2, "left_out_models": 0, "source_epochs": 1}


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep as many cores busy as there are processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(arguments: list[str], environment: dict[str, str]) -> float:
    """Return how long a command takes."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "mtem.cli", *arguments, "--quiet"], capture_output=True, text=True,
            env={**variables, "MTEM_CACHE": cache, **environment},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        return time.perf_counter() - start


def write_part(folder: Path, domain: str, count: int) -> str:
    """Write the first texts of a domain of the sample, and return the path."""
    path = folder / f"{domain}.jsonl"
    with Writer(path) as writer:
        for _, record in itertools.islice(readers.read_rows(sample_path(f"{domain}.jsonl.gz")), count):
            writer.write(record)
    return str(path)


def measured(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    books, kitchen, test = (write_part(folder, name, args.texts) for name in ("books", "kitchen", "kitchen-test"))
    settings = {**SETTINGS, "steps": args.steps, "batch_size": args.batch, "max_length": args.length, "seed": args.seed}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    numbers = itertools.count()

    def adapt(environment: dict[str, str]) -> float:
        output = str(folder / f"run-{next(numbers)}")
        return seconds(["adapt", "--source", books, "--target", kitchen, "--output", output, *options], environment)

    def predict(environment: dict[str, str]) -> float:
        output = str(folder / f"predicted-{next(numbers)}.jsonl")
        return seconds(["predict", str(folder / "run-0"), test, "--output", output, "--device", "cpu"], environment)

    beside = f"beside {args.busy} busy processes"
    cases = [
        ("adapt, alone", adapt, 0, {}),
        (f"adapt, {beside}", adapt, args.busy, {}),
        (f"adapt, {beside}, threads spin", adapt, args.busy, SPINNING),
        ("predict, alone", predict, 0, {}),
        (f"predict, {beside}", predict, args.busy, {}),
    ]
    times: dict[str, list[float]] = {name: [] for name, *_ in cases}
    loads: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, command, count, environment in cases:
            loads[name] = round(os.getloadavg()[0], 2)
            with busy(count):
                times[name].append(command(environment))
            print(f"{name}: {times[name][-1]:.1f} s", flush=True)
    rows = []
    for name, _, count, _ in cases:
        middle = statistics.median(times[name])
        alone = statistics.median(times[f"{name.split(',')[0]}, alone"])
        fields = {"busy": count, "texts": args.texts, "steps": args.steps, "rounds": args.rounds, "load_before": loads[name]}
        rows.append(row(name, middle, args, **fields) | {"time_ratio": middle / alone})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="busy processes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=300, help="of the source, of the target, and to predict")
    parser.add_argument("--steps", type=int, default=12, help="of the adaptation")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("results/cost/busy.json"))
    args = parser.parse_args()
    args.model = "minilm"
    with tempfile.TemporaryDirectory(prefix="mtem-") as folder:
        rows = measured(args, Path(folder))
    show(rows, {"seconds": ".1f", "time_ratio": ".2f", "load_before": ".2f"})
    write_json(args.json, [*(read_json(args.json) if args.json.exists() else []), *rows])


if __name__ == "__main__":
    main()
