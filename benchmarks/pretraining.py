"""Time of the pretraining on masked words: the stage of a run with `pretrain_epochs`, without reading and tokenizing.

    python benchmarks/pretraining.py --encoder minilm --texts 11000 --epochs 12 --device cuda

The texts are the reviews of the bundled sample, repeated and numbered so that no two are the same; --data takes a file of texts
instead. The first pass of another stream warms up the device and is not counted. One row is added to --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_time import row, show

from mtem.atomic import read_json, write_json
from mtem.data import readers
from mtem.data.batching import padding_share
from mtem.data.loading import load_corpus
from mtem.data.records import find_file_columns
from mtem.datasets.sample import sample_path
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training.devices import find_device, find_precision
from mtem.training.pretraining import STAGE, all_texts, find_learning_rate, pretrain
from mtem.training.settings import TrainingSettings

SAMPLE = ("books", "dvd", "electronics", "kitchen")


class Losses(Progress):
    """Keeps the losses that are logged."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.values: list[float] = []

    def advance(self, done: int, figures: Any = None) -> None:
        """Keep the loss, if there is one."""
        if figures and "word loss" in figures:
            self.values.append(round(float(figures["word loss"]), 3))


def read_texts(path: Path | None, count: int) -> list[str]:
    files = [sample_path(f"{name}.jsonl.gz") for name in SAMPLE] if path is None else [path]
    texts = [str(record[find_file_columns(file).example]) for file in files for _, record in readers.read_rows(file)]
    return [f"{text} {number}" for number, text in zip(range(count), itertools.cycle(texts), strict=False)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = find_device(args.device)
    settings = TrainingSettings(
        seed=args.seed,
        max_length=args.length,
        pretrain_epochs=args.epochs,
        pretrain_batch_size=args.batch,
        log_every=args.log_every,
    )
    torch.manual_seed(args.seed)
    model = TextModel.create(args.encoder, ("a", "b"), max_length=args.length, attention=args.attention).to(device)
    model.precision = find_precision(args.precision, device)
    started = time.perf_counter()
    tokens = model.encode(load_corpus(read_texts(args.data, args.texts), labeled=False))
    encoding = time.perf_counter() - started
    stream = all_texts(model, [tokens], settings)
    batches = [stream.rows(step) for step in range(stream.per_epoch)]
    steps = round(args.epochs * stream.per_epoch)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if args.warm:
        pretrain(model, [tokens], dataclasses.replace(settings, pretrain_epochs=args.warm / stream.per_epoch), Losses())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = Losses()
    wait()
    started = time.perf_counter()
    pretrain(model, [tokens], settings, losses)
    wait()
    seconds = time.perf_counter() - started
    lengths = np.asarray(tokens.lengths, dtype=np.int64)
    return row(
        STAGE, seconds, args, device=device.type, precision=str(model.precision or torch.float32).removeprefix("torch."),
        attention=model.network.config._attn_implementation, texts=len(tokens), epochs=args.epochs, steps=steps,
        milliseconds_per_step=1000 * seconds / max(1, steps), tokens_per_second=float(lengths.sum()) * args.epochs / seconds,
        tokens_per_text=float(lengths.mean()), padding=padding_share(lengths, batches),
        learning_rate=find_learning_rate(model, settings),
        memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None, encoding_seconds=encoding,
        shapes=len({(len(rows), int(lengths[rows].max())) for rows in batches}),
        losses=losses.values[:: max(1, len(losses.values) // 12)],
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", "--model", dest="encoder", default="minilm")
    parser.add_argument("--texts", type=int, default=11_000)
    parser.add_argument("--data", type=Path, help="a file of texts, instead of the bundled sample")
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--attention")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--warm", type=int, default=20, help="steps before the measurement")
    parser.add_argument("--name", help="what the row calls the encoder")
    parser.add_argument("--json", type=Path, default=Path("results/cost/pretraining.json"))
    args = parser.parse_args()
    args.model = args.name or Path(args.encoder).name
    measured = measure(args)
    rows = [*(read_json(args.json) if args.json.is_file() else []), measured]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.json, rows)
    show(
        [measured],
        {
            "texts": "d", "epochs": "g", "steps": "d", "seconds": ".1f", "milliseconds_per_step": ".2f",
            "tokens_per_second": ".0f", "tokens_per_text": ".0f", "padding": ".3f", "shapes": "d",
        },
    )  # fmt: skip
    print("losses", *measured["losses"])


if __name__ == "__main__":
    main()
