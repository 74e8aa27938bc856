"""How fast `mtem predict` is on the processor, beside the pipeline of transformers; and how its memory grows with the file.

    python benchmarks/predict.py --model run/ --texts kitchen.jsonl --json predict-cpu.json
    python benchmarks/predict.py --model run/ --texts kitchen.jsonl --growth 10000,100000,1000000 --json predict-memory.json

Each engine lives in a process of its own; they take turns, so that all see the same machine. The pipeline gets a list of texts in
memory, `mtem predict` reads a file and writes one; neither is charged for loading the model. All cut texts at the model's length.
The floor is the arithmetic that `mtem predict` cannot avoid, at the speed of one large matrix product on all cores.

With --growth a file is repeated (a number before each text, so that no two are equal) and passed through the command in a process
for each size. A drawn encoder of one narrow layer stands in for the model, whose size does not depend on the file's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MTEM, FLOOR = "mtem predict", "floor"
LETTERS = 120  # of a text in the growing file


# ---------------------------------------------------------------------- the engines, each in its process

_engine: Callable[[list[str]], list[str]]


def start(name: str, place: str, batch: int, threads: int, folder: str) -> dict[str, Any]:
    global _engine
    import torch

    from mtem_paper import cost

    torch.set_num_threads(threads)
    _engine, about = {MTEM: _mtem, FLOOR: _floor}.get(name, _pipeline)(place, batch, Path(folder))
    return {"precision": "fp32", "attention": "sdpa", **about, **cost.machine()}


def run(texts: list[str]) -> dict[str, Any]:
    """Seconds, processor seconds and the labels found."""
    begun, used = time.perf_counter(), time.process_time()
    labels = _engine(texts)
    seconds = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - used}
    return {**seconds, "memory": peak(), "labels": labels}


def _pipeline(place: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    import torch
    from transformers import pipeline

    from mtem.models.pretrained import quietly
    from mtem.models.text import TextModel

    with quietly():
        classify = pipeline("text-classification", place, device="cpu")
    assert classify.model.dtype == torch.float32
    length = TextModel.load(place).max_length

    def engine(texts: list[str]) -> list[str]:
        return [one["label"] for one in classify(texts, batch_size=batch, truncation=True, max_length=length)]

    return engine, {"attention": classify.model.config._attn_implementation, "length": length}


def _mtem(place: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    from mtem import inference
    from mtem.data import readers
    from mtem.models.text import TextModel

    model = TextModel.load(place)

    def engine(texts: list[str]) -> list[str]:
        inference.predict_file(model, folder / f"{len(texts)}.jsonl", folder / "out.jsonl")
        return [record["prediction"] for _, record in readers.read_rows(folder / "out.jsonl")]

    return engine, {"attention": model.network.config._attn_implementation, "length": model.max_length}


def _floor(place: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    """Products of two large matrices, until they have taken as many operations as the texts would."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mtem.models.scoring import scorers
    from mtem.models.text import TextModel

    model = TextModel.load(place, attention="eager")  # whose products are counted
    scorer = scorers(model, 1)[0]

    def operations(length: int) -> float:
        ids = torch.ones((1, length), dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            scorer({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return counter.get_total_flops()

    # a l + b l^2 + c in the length l
    short, middle, long = (operations(length) for length in (8, 16, 24))
    square = (long - 2 * middle + short) / 128
    slope = (middle - short) / 8 - 24 * square
    rest = short - 8 * slope - 64 * square
    left = torch.randn(2048, 2048)

    def engine(texts: list[str]) -> list[str]:
        lengths = model.encode_texts(texts).lengths.astype(float)
        wanted = float((rest + slope * lengths + square * lengths**2).sum())
        for _ in range(max(1, round(wanted / (2 * 2048**3)))):
            torch.mm(left, left)
        return []

    return engine, {"length": model.max_length, "operations_per_token": slope}


def peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------- speed


def speed(place: str, texts: list[str], batches: list[int], rounds: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    from mtem.progress import Progress

    engines = [(f"pipeline, batch {batch}", batch) for batch in batches] + [(MTEM, 0), (FLOOR, 0)]
    warm = texts[:40]
    for some in (warm, texts):
        write_texts(folder / f"{len(some)}.jsonl", some)
    pools = {name: ProcessPoolExecutor(1, get_context("spawn")) for name, _ in engines}
    progress = Progress()
    try:
        about = {name: pools[name].submit(start, name, place, batch, threads, str(folder)).result() for name, batch in engines}
        for pool in pools.values():
            pool.submit(run, warm).result()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in pools}
        with progress.stage("measuring", rounds * len(engines)):
            for number in range(rounds):
                for name in list(pools)[:: -1 if number % 2 else 1]:
                    found[name].append(pools[name].submit(run, texts).result())
                    progress.advance(sum(map(len, found.values())))
    finally:
        for pool in pools.values():
            pool.shutdown()
    rows = []
    base = found[engines[0][0]]
    for name, batch in engines:
        ours = found[name]
        seconds = statistics.median(one["seconds"] for one in ours)
        rows.append(
            {
                "device": "cpu", "model": Path(place).name, "batch": batch or None, "engine": name, "texts": len(texts),
                "seconds": seconds, "cpu_seconds": statistics.median(one["cpu_seconds"] for one in ours),
                "texts_per_second": len(texts) / seconds,
                "time_ratio": statistics.median(o["seconds"] / b["seconds"] for o, b in zip(ours, base, strict=True)),
                "memory": ours[-1]["memory"], "memory_ratio": ours[-1]["memory"] / base[-1]["memory"],
                "same_labels": None if name == FLOOR else all(one["labels"] == base[0]["labels"] for one in ours),
                "rounds": rounds, "seed": 0, **about[name],
            }
        )  # fmt: skip
    return rows


def show_speed(rows: list[dict[str, Any]]) -> None:
    one = rows[0]
    print(f"{one['model']}, {one['texts']} texts of at most {one['length']} tokens, {one['precision']}, {one['cores']} threads")
    print(f"{'':22}{'seconds':>9}{'CPU s':>8}{'texts/s':>9}{'x first':>9}{'MiB':>7}  same labels")
    for row in rows:
        print(
            f"{row['engine']:22}{row['seconds']:9.1f}{row['cpu_seconds']:8.1f}{row['texts_per_second']:9.1f}"
            f"{1 / row['time_ratio']:9.2f}{row['memory'] / 2**20:7.0f}  {row['same_labels'] if row['engine'] != FLOOR else ''}"
        )


# ---------------------------------------------------------------------- memory


def growth(place: str, texts: list[str], sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    from mtem.progress import Progress
    from mtem_paper import cost

    length = make_tiny(place, folder / "tiny")
    progress = Progress()
    rows: list[dict[str, Any]] = []
    with progress.stage("measuring", len(sizes)):
        for size in sizes:
            write_texts(folder / "in.jsonl", (f"{number} {texts[number % len(texts)]}"[:LETTERS] for number in range(size)))
            command = [sys.executable, "-m", "mtem.cli", "predict", str(folder / "tiny"), str(folder / "in.jsonl")]
            command += ["--output", str(folder / "out.jsonl"), "--device", "cpu", "--quiet"]
            begun = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"mtem predict failed on {size} texts")
            with (folder / "out.jsonl").open("rb") as file:
                assert sum(1 for _ in file) == size
            seconds = time.perf_counter() - begun
            memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            base = rows[0]["memory"] if rows else memory
            rows.append(
                {
                    "device": "cpu", "model": "one layer of width 32, drawn", "engine": MTEM, "texts": size, "length": length,
                    "letters": LETTERS, "precision": "fp32", "attention": "sdpa", "seconds": seconds,
                    "texts_per_second": size / seconds, "memory": memory, "memory_ratio": memory / base, "seed": 0,
                    **cost.machine(),
                }
            )  # fmt: skip
            progress.advance(len(rows))
    return rows


def make_tiny(place: str, directory: Path) -> int:
    """A classifier of next to no size with the model's tokenizer, and the length it cuts texts at."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from mtem.models.text import TextModel

    model = TextModel.load(place)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("bert", vocab_size=len(model.tokenizer), num_labels=2, **shape)
    TextModel(AutoModelForSequenceClassification.from_config(config), model.tokenizer, model.max_length).save(directory)
    return model.max_length


def show_growth(rows: list[dict[str, Any]]) -> None:
    print(f"mtem predict, {rows[0]['model']}, texts of at most {LETTERS} letters")
    print(f"{'texts':>10}{'peak MiB':>10}{'x first':>9}{'texts/s':>9}")
    for row in rows:
        print(f"{row['texts']:10}{row['memory'] / 2**20:10.0f}{row['memory_ratio']:9.3f}{row['texts_per_second']:9.0f}")


# ---------------------------------------------------------------------- both


def read_texts(path: str, limit: int | None) -> list[str]:
    from mtem.data import readers
    from mtem.data.records import find_file_columns

    columns = find_file_columns(path)
    if columns.threaded:
        raise SystemExit(f"{path}: holds threads; the pipeline takes texts")
    texts = [str(record[columns.example]) for _, record in readers.read_rows(path) if record.get(columns.example)]
    return [text for text in texts if text.strip()][:limit]


def write_texts(path: Path, texts: Any) -> None:
    from mtem.data import writers

    with writers.Writer(path) as writer:
        for text in texts:
            writer.write({"text": text})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a run's folder, or a text classifier's")
    parser.add_argument("--texts", required=True, help="a file of texts")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128", help="of the pipeline; the first is what ratios are against")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    parser.add_argument("--limit", type=int, help="so many texts at most")
    parser.add_argument("--growth", help="sizes of files with commas between: measure memory instead")
    parser.add_argument("--name", help="what the rows call the model; without it the name of its folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    place = os.path.join(given.model, "model") if os.path.exists(os.path.join(given.model, "run.json")) else given.model
    texts = read_texts(given.texts, given.limit)
    with tempfile.TemporaryDirectory(prefix="mtem-") as temporary:
        folder = Path(temporary)
        if given.growth:
            rows = growth(place, texts, [int(size) for size in given.growth.split(",")], folder)
        else:
            rows = speed(place, texts, [int(size) for size in given.batches.split(",")], given.rounds, given.threads, folder)
            rows = [{**row, "model": given.name or Path(given.model).name} for row in rows]
    if given.json:
        from mtem.atomic import write_json

        given.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.json, rows)
    (show_growth if given.growth else show_speed)(rows)


if __name__ == "__main__":
    main()
