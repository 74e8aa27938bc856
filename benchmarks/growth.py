"""Time and memory of an adaptation against the number of unlabeled texts, by stage, and the share of the indexes in a step.

    python benchmarks/growth.py [--sizes 1000,10000,100000,1000000]

The texts are beginnings of the sample's kitchen reviews, repeated and numbered so that no two are the same. The encoder is a
tiny one with random weights, and the number of steps is the same for all sizes. So only the work on the texts themselves grows:
reading, tokens, choosing batches, the final prediction, the table. Every size runs in its own process. Memory is that of the
process; "anonymous" excludes the pages of memory-mapped files, which the system can reclaim.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from run_time import Clock, apart, row, show
from transformers import AutoConfig, AutoModel, AutoTokenizer

import mtem
from mtem.atomic import write_json
from mtem.data import readers
from mtem.datasets.sample import sample_path
from mtem.methods.mtem import Mtem, MtemSettings
from mtem.models import encoders
from mtem.training.settings import TrainingSettings
from mtem.training.trainer import QUANTILE_SAMPLE

WORDS = 12
SETTINGS: dict[str, Any] = {"source_epochs": 1, "evaluations": 4, "frozen_layers": 0, "device": "cpu"}


def write_texts(path: Path, count: int) -> None:
    starts = [" ".join(record["text"].split()[:WORDS]) for _, record in readers.read_rows(sample_path("kitchen.jsonl.gz"))]
    with path.open("w", encoding="utf-8") as file:
        for number, start in zip(range(count), itertools.cycle(starts), strict=False):
            file.write(json.dumps({"text": f"{start} {number}"}) + "\n")


def write_encoder(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(encoders.find("minilm"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    AutoModel.from_config(AutoConfig.for_model("bert", vocab_size=len(tokenizer), **sizes)).save_pretrained(path)
    tokenizer.save_pretrained(path)


class Memory:
    """The largest memory of this process, by stage, in bytes; empty where the system has no /proc."""

    FIELDS = ("VmHWM", "RssAnon")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.largest: dict[str, dict[str, int]] = {name: defaultdict(int) for name in self.FIELDS}

    @contextmanager
    def sampled(self, every: float = 0.02) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(every):
                self.sample_once()

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def sample_once(self) -> None:
        status = Path("/proc/self/status")
        if status.exists():
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            for name in self.FIELDS:
                largest = self.largest[name]
                largest[self.clock.now] = max(largest[self.clock.now], int(lines[name].split()[0]) * 1024)


def measured(args: argparse.Namespace, size: int, folder: str) -> dict[str, Any]:
    """Run one adaptation in this process and measure it."""
    directory = Path(folder)
    clock = Clock()
    memory = Memory(clock)
    with mock.patch.dict(os.environ, MTEM_CACHE=str(directory / f"cache-{size}")), memory.sampled(), clock.watching():
        memory.sample_once()
        before = dict(memory.largest["RssAnon"])
        settings = {**SETTINGS, "steps": args.steps, "batch_size": args.batch, "max_length": args.length, "seed": args.seed}
        mtem.adapt(
            str(sample_path("books.jsonl.gz")), str(directory / f"{size}.jsonl"), model=directory / "encoder",
            output=directory / f"run-{size}", **settings,
        )  # fmt: skip
    step = clock.seconds["adaptation steps"] / args.steps
    index = index_seconds(size, args.batch)
    largest = {name: max(values.values(), default=None) for name, values in memory.largest.items()}
    return {
        "texts": size,
        "seconds": sum(clock.seconds.values()),
        "stages": dict(clock.seconds),
        "memory": largest["VmHWM"],
        "anonymous_memory": largest["RssAnon"],
        "anonymous_memory_at_start": max(before.values(), default=None),
        "anonymous_memory_by_stage": dict(memory.largest["RssAnon"]),
        "steps": args.steps,
        "step_seconds": step,
        "index_seconds": index,
        "index_share": index / step,
    }


def index_seconds(size: int, batch: int, repeats: int = 500) -> float:
    """Return the time of a step for the indexes without their gradient: read those of a batch, update, write, read again.

    The quantiles, which only every tenth step logs, count one tenth.
    """
    index = torch.full((size,), 2.0)
    method = types.SimpleNamespace(settings=MtemSettings())
    moves, quantiles = [], []
    for number in range(repeats):
        rows, gradient = torch.randint(size, (batch,)), torch.randn(batch)
        start = time.perf_counter()
        index[rows] = Mtem.updated_index(method, index[rows], gradient, number)  # type: ignore[arg-type]
        _ = index[rows]
        moved = time.perf_counter()
        moves.append(moved - start)
        if number % 10 == 0:
            torch.quantile(index[:: -(-size // QUANTILE_SAMPLE)], torch.tensor([0.1, 0.5, 0.9])).tolist()
            quantiles.append(time.perf_counter() - moved)
    return statistics.median(moves) + statistics.median(quantiles) / TrainingSettings().log_every


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the rows, with sizes in MiB."""
    large = ("memory", "anonymous_memory")
    shown = [{**line, **{name: line[name] and line[name] / 2**20 for name in large}} for line in rows]
    columns = {"seconds": ".1f", "memory": ".0f", "anonymous_memory": ".0f", "step_seconds": ".4f", "index_share": ".3%"}
    show(shown, columns)
    stages = list(dict.fromkeys(name for line in rows for name in line["stages"]))
    for unit, field, scale, form in (("seconds", "stages", 1, ".2f"), ("MiB", "anonymous_memory_by_stage", 2**20, ".0f")):
        lines = [
            {"engine": f"{stage}, {unit}", **{str(line["texts"]): line[field].get(stage, 0) / scale for line in rows}}
            for stage in stages
        ]
        show(lines, {str(line["texts"]): form for line in rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("results/cost/growth.json"))
    args = parser.parse_args()
    args.model = "bert, 1 layer of width 16, random"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder) / "encoder", args.seed)
        for size in map(int, args.sizes.split(",")):
            write_texts(Path(folder) / f"{size}.jsonl", size)
            result = apart(measured, args, size, folder)
            rows.append(row(f"adapt, {size} texts", result.pop("seconds"), args, **result))
    for line in rows:
        line["time_ratio"] = line["seconds"] / rows[0]["seconds"]
        line["memory_ratio"] = line["memory"] / rows[0]["memory"] if line["memory"] else None
    print_rows(rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
