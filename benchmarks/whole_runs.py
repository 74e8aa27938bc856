"""Time of steps and of whole adaptations with and without CUDA graphs. Prints lines and appends JSON rows.

    python benchmarks/whole_runs.py steps --model DIR --device cuda --json FILE
    python benchmarks/whole_runs.py adapt --model DIR --data DIR --device cuda --json FILE

`steps` measures one step of each method with its recommended settings, dropout included, on batches of full length, in turn with
a plain step. `adapt` runs 12 passes over the 5,000 unlabeled reviews of kitchen, evaluations included, and scores the test set.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mtem
from mtem import methods
from mtem.atomic import read_json, write_json
from mtem.data.loading import load_corpus
from mtem.data.tokens import Tokens
from mtem.methods.base import Context
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training.devices import find_device, find_precision
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem_paper import cost, splits

METHODS = ("source-only", "mtem", "fixmatch", "cst", "dann", "mme", "biat", "wind")


class Steps:
    """A method and its trainer on random tokens of full length."""

    def __init__(self, args: argparse.Namespace, name: str, graphs: bool) -> None:
        device = find_device(args.device)
        torch.manual_seed(args.seed)
        kind = methods.get(name)
        model = TextModel.create(args.model, ["0", "1"], max_length=args.length).to(device)
        model.precision = find_precision(args.precision, device)
        kind.prepare_model(model, kind.Settings())
        draw = np.random.default_rng(args.seed)
        count = 4 * args.batch
        tokens = Tokens.of_ids([draw.integers(1000, 20000, args.length).tolist() for _ in range(count)])
        labels = draw.integers(0, 2, count)
        few = np.arange(args.batch)
        source, target, labeled = (
            Stream(model, tokens, rows, given, args.batch, seed)
            for seed, (rows, given) in enumerate(((np.arange(count), labels), (np.arange(count), None), (few, labels)))
        )
        context = Context(
            1000, count, 2, torch.Generator().manual_seed(0), lambda: 2e-5, source_size=count,
            target_labeled_rows=torch.from_numpy(few).to(device), target_labeled=labeled,
            **TrainingSettings().teacher_and_view(1000),
        )  # fmt: skip
        settings = TrainingSettings(cuda_graphs=graphs, log_every=1000)
        self.trainer = Trainer(
            kind(model, kind.Settings(), context), settings, name=name, steps=1000, learning_rate=2e-5, source=source,
            target=target, progress=Progress(quiet=True),
        )  # fmt: skip
        self.done = 0

    def timed(self, count: int) -> float:
        trainer = self.trainer
        trainer.last_step = self.done + count
        _wait()
        start = time.perf_counter()
        trainer.run(self.done)
        _wait()
        self.done += count
        return (time.perf_counter() - start) / count


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for graphs in (False, True):
        plain = Steps(args, "source-only", graphs)
        for name in args.methods.split(","):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            bench = Steps(args, name, graphs)
            bench.timed(3)
            memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
            times = [(bench.timed(args.steps), plain.timed(args.steps)) for _ in range(args.repeats)]
            seconds, plain_seconds = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append(
                _row(args, f"{name}, {'graphs' if graphs else 'launched'}", seconds, plain_seconds=plain_seconds, memory=memory,
                     time_ratio=seconds / plain_seconds)
            )  # fmt: skip
            print(f"{rows[-1]['engine']:28} {1e3 * seconds:8.2f} ms  {seconds / plain_seconds:5.2f}x plain", flush=True)
            del bench
    return rows


def adapt(args: argparse.Namespace) -> list[dict[str, Any]]:
    data = splits.read("amazon", args.data, args.target, "mixed")
    division = splits.divide(data, args.seed)
    sources = {name: path for name, path in sorted(data.sources.items())}
    unlabeled = list(division.unlabeled)[: args.texts]
    rows = []
    for graphs in (True, False) if args.both else (not args.launched,):
        started = time.monotonic()
        adapted = mtem.adapt(
            sources, unlabeled, method=args.method, model=args.model, epochs=args.passes, learning_rate=5e-5, criterion="last",
            seed=args.seed, evaluations=12, left_out_models=0, frozen_layers=0, device=args.device, precision=args.precision,
            cuda_graphs=graphs, max_length=args.length, pretrain_epochs=0, progress=Progress(quiet=True),
        )  # fmt: skip
        seconds = time.monotonic() - started
        test = load_corpus(division.test, labeled=False, name="test")
        found = adapted.model.classes
        logits = mtem.inference.compute_logits(adapted.model, adapted.model.encode(test)).logits
        accuracy = float(
            np.mean([found[number] == truth for number, truth in zip(logits.argmax(1), division.truth, strict=True)])
        )
        stages = adapted.record["seconds"]
        rows.append(
            _row(args, f"adapt {args.method}, {'graphs' if graphs else 'launched'}", seconds, stages=stages, accuracy=accuracy,
                 texts=len(unlabeled), passes=args.passes)
        )  # fmt: skip
        print(f"{rows[-1]['engine']:28} {seconds:7.1f} s {stages} accuracy {accuracy:.4f}", flush=True)
    return rows


def _row(args: argparse.Namespace, engine: str, seconds: float, **fields: Any) -> dict[str, Any]:
    about = {"engine": engine, "device": args.device, "model": Path(args.model).name, "batch": args.batch, "length": args.length}
    about |= {"precision": args.precision, "attention": "sdpa", "seed": args.seed, "seconds": seconds}
    return {**about, "time_ratio": None, "memory_ratio": None, **fields, **cost.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "adapt"))
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--target", default="kitchen")
    parser.add_argument("--method", default="mtem")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=float, default=12.0)
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--both", action="store_true", help="also without CUDA graphs")
    parser.add_argument("--launched", action="store_true", help="only without CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = steps(args) if args.what == "steps" else adapt(args)
    if args.json:
        write_json(args.json, [*(read_json(args.json) if args.json.is_file() else []), *rows])


if __name__ == "__main__":
    main()
