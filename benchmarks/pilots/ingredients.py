"""Pilots of the recipe with the product's own stages: pretraining, source training, then methods with different settings.

    python benchmarks/pilots/ingredients.py --data DIR --model DIR --target kitchen --out FILE.jsonl \
        --theta DIR --pretrain 12 --runs fixmatch:epochs=12,fixmatch:epochs=24

The source model is trained once and shared by the runs. Target labels are used only for scores: a row has the accuracy on the
test set at every pass.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mtem
from mtem import inference
from mtem.data.loading import load_corpus
from mtem.progress import Progress
from mtem_paper import splits


class Watch:
    """Scores the weights on the test set at every evaluation."""

    def __init__(self, test: Any, truth: list[str]) -> None:
        self.test, self.truth, self.tokens, self.rows = test, truth, None, []

    def __call__(self, line: dict[str, Any], model: Any) -> None:
        if line["stage"] != "evaluation":
            return
        if self.tokens is None:
            self.tokens = model.encode(self.test)
        found = inference.compute_logits(model, self.tokens).logits.argmax(axis=1)
        right = np.array([model.classes[number] for number in found]) == np.array(self.truth)
        scores = {"accuracy": round(float(right.mean()), 4), "infomax": line["infomax"], "source": line["source-validation"]}
        self.rows.append({"step": line["step"], **scores})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--theta", type=Path, required=True)
    parser.add_argument("--pretrain", type=float, default=0.0)
    parser.add_argument("--runs", required=True, help="METHOD:SETTING=VALUE:..., separated by commas")
    parser.add_argument("--set", action="append", default=[], help="SETTING=VALUE of the source model and of all runs")
    parser.add_argument("--texts", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = splits.read("amazon", args.data, args.target, "mixed")
    division = splits.divide(data, args.seed)
    unlabeled = list(division.unlabeled)[: args.texts]
    common = {
        "model": args.model, "seed": args.seed, "left_out_models": 0, "frozen_layers": 0, "progress": Progress(quiet=True),
        "max_length": 256, "pretrain_epochs": args.pretrain, **dict(item.split("=", 1) for item in args.set),
    }  # fmt: skip
    test = load_corpus(division.test, labeled=False, name="test")
    sources = dict(sorted(data.sources.items()))
    started = time.monotonic()
    watch = Watch(test, list(division.truth))
    theta = mtem.adapt(sources, unlabeled, method="source-only", output=args.theta, observe=watch, **common)
    write(args, {"run": "source-only", "candidates": watch.rows, "seconds": round(time.monotonic() - started, 1)}, theta)
    common.pop("pretrain_epochs")
    for text in args.runs.split(","):
        method, *given = text.split(":")
        settings = {"epochs": 12.0, "learning_rate": 5e-5, "criterion": "last", **dict(item.split("=", 1) for item in given)}
        started = time.monotonic()
        watch = Watch(test, list(division.truth))
        settings.setdefault("evaluations", int(float(settings["epochs"])))
        adapted = mtem.adapt(
            sources, unlabeled, method=method, source_model=theta, observe=watch, **{**common, **settings}
        )  # fmt: skip
        write(args, {"run": text, "candidates": watch.rows, "seconds": round(time.monotonic() - started, 1)}, adapted)


def write(args: argparse.Namespace, row: dict[str, Any], adapted: Any) -> None:
    about = {"target": args.target, "seed": args.seed, "model": Path(args.model).name, "pretrain_epochs": args.pretrain}
    row = {**about, "set": args.set, **row}
    row |= {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "stages": adapted.record["seconds"]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(row | {"versions": adapted.record["versions"]}) + "\n")
    accuracies = [candidate["accuracy"] for candidate in row["candidates"]]
    print(args.target, args.pretrain, row["run"], accuracies, row["seconds"], flush=True)


if __name__ == "__main__":
    main()
