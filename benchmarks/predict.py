"""Speed of `mtem predict` on a CPU, compared with the pipeline of transformers; and its memory against the size of the file.

    python benchmarks/predict.py --model run/ --texts kitchen.jsonl --json predict-cpu.json
    python benchmarks/predict.py --model run/ --texts kitchen.jsonl --growth 10000,100000,1000000 --json predict-memory.json

Each engine runs in its own process; they take turns, so that all see the same state of the machine. The pipeline gets a list of
texts in memory, `mtem predict` reads a file and writes one. Loading the model is not timed. All truncate texts to the model's
length. The floor is the arithmetic that `mtem predict` cannot avoid, at the speed of one large matrix product on all cores.

With --growth a file is repeated (a number before each text, so that no two are equal) and passed through the command in a process
for each size. The model is an encoder with one narrow layer and random weights, since its size does not depend on the file.
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


def start(name: str, path: str, batch: int, threads: int, folder: str) -> dict[str, Any]:
    global _engine
    import torch

    from mtem_paper import cost

    torch.set_num_threads(threads)
    _engine, about = {MTEM: _mtem, FLOOR: _floor}.get(name, _pipeline)(path, batch, Path(folder))
    return {"precision": "fp32", "attention": "sdpa", **about, **cost.machine()}


def run(texts: list[str]) -> dict[str, Any]:
    """Return seconds, processor seconds, peak memory and the predicted labels."""
    from mtem_paper import cost

    start_time, used = time.perf_counter(), time.process_time()
    labels = _engine(texts)
    seconds = {"seconds": time.perf_counter() - start_time, "cpu_seconds": time.process_time() - used}
    return {**seconds, "memory": cost.resident(), "labels": labels}


def _pipeline(path: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    import torch
    from transformers import pipeline

    from mtem.models.pretrained import quietly
    from mtem.models.text import TextModel

    with quietly():
        classify = pipeline("text-classification", path, device="cpu")
    assert classify.model.dtype == torch.float32
    length = TextModel.load(path).max_length

    def engine(texts: list[str]) -> list[str]:
        return [prediction["label"] for prediction in classify(texts, batch_size=batch, truncation=True, max_length=length)]

    return engine, {"attention": classify.model.config._attn_implementation, "length": length}


def _mtem(path: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    from mtem import inference
    from mtem.data import readers
    from mtem.models.text import TextModel

    model = TextModel.load(path)

    def engine(texts: list[str]) -> list[str]:
        inference.predict_file(model, folder / f"{len(texts)}.jsonl", folder / "out.jsonl")
        return [record["prediction"] for _, record in readers.read_rows(folder / "out.jsonl")]

    return engine, {"attention": model.network.config._attn_implementation, "length": model.max_length}


def _floor(path: str, batch: int, folder: Path) -> tuple[Callable[[list[str]], list[str]], dict[str, Any]]:
    """Multiply two large matrices, as often as it takes for the number of operations that the texts need."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mtem.models.scoring import scorers
    from mtem.models.text import TextModel

    model = TextModel.load(path, attention="eager")  # whose products are counted
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
    constant = short - 8 * slope - 64 * square
    matrix = torch.randn(2048, 2048)

    def engine(texts: list[str]) -> list[str]:
        lengths = model.encode_texts(texts).lengths.astype(float)
        total = float((constant + slope * lengths + square * lengths**2).sum())
        for _ in range(max(1, round(total / (2 * 2048**3)))):
            torch.mm(matrix, matrix)
        return []

    return engine, {"length": model.max_length, "operations_per_token": slope}


# ---------------------------------------------------------------------- speed


def speed(path: str, texts: list[str], batches: list[int], rounds: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    from mtem.progress import Progress

    engines = [(f"pipeline, batch {batch}", batch) for batch in batches] + [(MTEM, 0), (FLOOR, 0)]
    warm = texts[:40]
    for part in (warm, texts):
        write_texts(folder / f"{len(part)}.jsonl", part)
    pools = {name: ProcessPoolExecutor(1, get_context("spawn")) for name, _ in engines}
    progress = Progress()
    try:
        about = {name: pools[name].submit(start, name, path, batch, threads, str(folder)).result() for name, batch in engines}
        for pool in pools.values():
            pool.submit(run, warm).result()
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in pools}
        with progress.stage("measuring", rounds * len(engines)):
            for number in range(rounds):
                for name in list(pools)[:: -1 if number % 2 else 1]:
                    results[name].append(pools[name].submit(run, texts).result())
                    progress.advance(sum(map(len, results.values())))
    finally:
        for pool in pools.values():
            pool.shutdown()
    rows = []
    base = results[engines[0][0]]
    for name, batch in engines:
        ours = results[name]
        seconds = statistics.median(result["seconds"] for result in ours)
        rows.append(
            {
                "device": "cpu", "model": Path(path).name, "batch": batch or None, "engine": name, "texts": len(texts),
                "seconds": seconds, "cpu_seconds": statistics.median(result["cpu_seconds"] for result in ours),
                "texts_per_second": len(texts) / seconds,
                "time_ratio": statistics.median(o["seconds"] / b["seconds"] for o, b in zip(ours, base, strict=True)),
                "memory": ours[-1]["memory"], "memory_ratio": ours[-1]["memory"] / base[-1]["memory"],
                "same_labels": None if name == FLOOR else all(result["labels"] == base[0]["labels"] for result in ours),
                "rounds": rounds, "seed": 0, **about[name],
            }
        )  # fmt: skip
    return rows


def show_speed(rows: list[dict[str, Any]]) -> None:
    base = rows[0]
    print(
        f"{base['model']}, {base['texts']} texts of at most {base['length']} tokens, {base['precision']}, {base['cores']} threads"
    )
    print(f"{'':22}{'seconds':>9}{'CPU s':>8}{'texts/s':>9}{'x first':>9}{'MiB':>7}  same labels")
    for row in rows:
        print(
            f"{row['engine']:22}{row['seconds']:9.1f}{row['cpu_seconds']:8.1f}{row['texts_per_second']:9.1f}"
            f"{1 / row['time_ratio']:9.2f}{row['memory'] / 2**20:7.0f}  {row['same_labels'] if row['engine'] != FLOOR else ''}"
        )


# ---------------------------------------------------------------------- memory


def growth(path: str, texts: list[str], sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    from mtem.progress import Progress
    from mtem_paper import cost

    length = make_tiny(path, folder / "tiny")
    progress = Progress()
    rows: list[dict[str, Any]] = []
    with progress.stage("measuring", len(sizes)):
        for size in sizes:
            write_texts(folder / "in.jsonl", (f"{number} {texts[number % len(texts)]}"[:LETTERS] for number in range(size)))
            command = [sys.executable, "-m", "mtem.cli", "predict", str(folder / "tiny"), str(folder / "in.jsonl")]
            command += ["--output", str(folder / "out.jsonl"), "--device", "cpu", "--quiet"]
            start_time = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"mtem predict failed on {size} texts")
            with (folder / "out.jsonl").open("rb") as file:
                assert sum(1 for _ in file) == size
            seconds = time.perf_counter() - start_time
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


def make_tiny(path: str, directory: Path) -> int:
    """Save a tiny classifier with the model's tokenizer, and return its maximum length."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from mtem.models.text import TextModel

    model = TextModel.load(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("bert", vocab_size=len(model.tokenizer), num_labels=2, **sizes)
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
    parser.add_argument("--limit", type=int, help="use at most this many texts")
    parser.add_argument("--growth", help="sizes of files with commas between: measure memory instead")
    parser.add_argument("--name", help="what the rows call the model; without it the name of its folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = os.path.join(args.model, "model") if os.path.exists(os.path.join(args.model, "run.json")) else args.model
    texts = read_texts(args.texts, args.limit)
    with tempfile.TemporaryDirectory(prefix="mtem-") as temporary:
        folder = Path(temporary)
        if args.growth:
            rows = growth(path, texts, [int(size) for size in args.growth.split(",")], folder)
        else:
            rows = speed(path, texts, [int(size) for size in args.batches.split(",")], args.rounds, args.threads, folder)
            rows = [{**row, "model": args.name or Path(args.model).name} for row in rows]
    if args.json:
        from mtem.atomic import write_json

        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, rows)
    (show_growth if args.growth else show_speed)(rows)


if __name__ == "__main__":
    main()
