"""Pilot on PHEME: BiGCN over the embeddings of an encoder, with and without the parts that are new.

    python benchmarks/pilots/pheme_graph.py encoder --data DIR --encoder minilm-folder --epochs 12 --to folder
    python benchmarks/pilots/pheme_graph.py run --data DIR --target ferguson --seed 0 --set features=encoder \
        --set encoder=folder --runs mtem,fixmatch:threshold=0.9 --out FILE.jsonl

`encoder` continues the pretraining of an encoder on all posts. `run` trains one source model and adapts it with several methods.
With `--rehearse` every source event is adapted to in turn, as if it were the target, and scored with its labels (with `--labeled`
100 of its threads are labeled and the others scored); the target is
not read. Without it the target's test set is scored. Labels of what is adapted to are used only for scores.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score, f1_score

import mtem
from mtem import inference
from mtem.data.loading import load_corpus
from mtem.data.readers import read_rows
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run.record import machine, versions
from mtem.training.devices import find_device, find_precision
from mtem.training.pretraining import pretrain
from mtem.training.settings import TrainingSettings
from mtem_paper import splits
from mtem_paper.protocol import DATASETS

EVENTS = DATASETS["pheme"].domains


def encoder(args: argparse.Namespace) -> None:
    posts = {
        node["text"]: None for event in EVENTS for _, row in read_rows(args.data / f"{event}.jsonl.gz") for node in row["nodes"]
    }
    texts = [text for text in posts if text.strip()][: args.texts]
    device = find_device("auto")
    settings = TrainingSettings(pretrain_epochs=args.epochs, pretrain_batch_size=args.batch)
    torch.manual_seed(0)
    model = TextModel.create(args.encoder, ("a", "b"), max_length=96).to(device)
    model.precision = find_precision("auto", device, model)
    started = time.monotonic()
    pretrain(model, [model.encode(load_corpus(texts, labeled=False, name="posts"))], settings, Progress(quiet=True))
    print(f"{len(texts)} posts, {args.epochs:g} passes, {time.monotonic() - started:.0f} s", flush=True)
    model.network.base_model.save_pretrained(args.to)
    model.tokenizer.save_pretrained(args.to)


def scores(truth: list[str], logits: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    rumour, number = np.array(truth) == "rumour", classes.index("rumour")
    margin = logits[:, number] - logits[:, 1 - number]
    values = {
        "f1": f1_score(rumour, margin > 0, zero_division=0.0), "f1_half": f1_score(rumour, margin > np.median(margin)),
        "ap": average_precision_score(rumour, margin), "called": (margin > 0).mean(),
    }  # fmt: skip
    return {name: round(float(value), 4) for name, value in values.items()}


class Watch:
    """Scores the weights at every evaluation, as they would be saved."""

    def __init__(self, test: Any, truth: list[str]) -> None:
        self.test, self.truth, self.encoded, self.rows = test, truth, None, []

    def __call__(self, line: dict[str, Any], model: Any) -> None:
        if line["stage"] == "evaluation":
            self.encoded = model.encode(self.test) if self.encoded is None else self.encoded
            logits = inference.compute_logits(model, self.encoded).logits + np.float32(line.get("bias", 0.0))
            self.rows.append({"step": line["step"], "infomax": line["infomax"], **scores(self.truth, logits, model.classes)})


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    logging.getLogger("mtem").setLevel(logging.CRITICAL)
    data = splits.read("pheme", args.data, args.target, "event")
    labeled: tuple[Any, Any] | None = None
    if not args.rehearse:
        division = splits.divide(data, args.seed)
        labeled = (division.target_labeled, division.target_labeled_labels) if args.labeled else None
        adapt_to(
            args, args.target, dict(sorted(data.sources.items())), division.unlabeled, division.test, division.truth, labeled
        )
    for event in (args.event or sorted(data.sources)) if args.rehearse else ():
        rows = [record for _, record in read_rows(data.sources[event])]
        threads = [{"id": record["id"], "nodes": record["nodes"]} for record in rows]
        others = {name: path for name, path in sorted(data.sources.items()) if name != event}
        truth = [record["label"] for record in rows]
        order = np.random.default_rng([args.seed, 1]).permutation(len(rows)) if args.labeled else np.arange(len(rows))
        few, rest = order[: 100 if args.labeled else 0], order[100 if args.labeled else 0 :]
        labeled = ([threads[row] for row in few], [truth[row] for row in few]) if args.labeled else None
        unlabeled = [threads[row] for row in rest]
        adapt_to(args, event, others, unlabeled, unlabeled, [truth[row] for row in rest], labeled)


def adapt_to(
    args: argparse.Namespace, event: str, sources: dict[str, Path], unlabeled: list[Any], test: list[Any], truth: list[str],
    labeled: tuple[Any, Any] | None,
) -> None:  # fmt: skip
    common: dict[str, Any] = {
        "model": "bigcn", "seed": args.seed, "left_out_models": 0, "calibrate": False, "device": args.device,
        "progress": Progress(quiet=True), **dict(item.split("=", 1) for item in args.set),
    }  # fmt: skip
    target, scored = (
        load_corpus(part, labeled=False, name=name, domain=event) for part, name in ((unlabeled, "target"), (test, "test"))
    )
    if labeled is not None:
        common["target_labeled"] = load_corpus(labeled, labeled=True, name="target_labeled", domain=event)
    started = time.monotonic()
    theta = mtem.adapt(sources, target, method="source-only", **common)
    logits = inference.compute_logits(theta.model, theta.model.encode(scored)).logits
    write(args, event, "source-only", [{"step": 0, **scores(truth, logits, theta.model.classes)}], started)
    for text in args.runs.split(","):
        method, *given = text.split(":")
        started, watch = time.monotonic(), Watch(scored, truth)
        settings = {"criterion": "last", "evaluations": 6, **dict(item.split("=", 1) for item in given)}
        mtem.adapt(sources, target, method=method, source_model=theta, observe=watch, **{**common, **settings})
        write(args, event, text, watch.rows, started)


def write(args: argparse.Namespace, event: str, name: str, candidates: list[dict[str, Any]], started: float) -> None:
    seconds = round(time.monotonic() - started, 1)
    row = {
        "name": args.name, "target": args.target, "adapted_to": event, "seed": args.seed, "labeled": args.labeled,
        "set": [own_name(item) for item in args.set], "run": name, "candidates": candidates, "seconds": seconds,
        "machine": machine(args.device), "versions": versions(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    last = candidates[-1]
    print(args.name, args.target, event, args.seed, name, last["f1"], last["f1_half"], last["ap"], seconds, flush=True)


def own_name(item: str) -> str:
    """Return a setting; of a folder, its last name."""
    name, _, value = item.partition("=")
    return f"{name}={Path(value).name}" if name == "encoder" else item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("encoder", "run"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the events' files")
    parser.add_argument("--encoder", help="encoder: the folder to begin from")
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--texts", type=int, help="a trial: this many posts")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--event", action="append", help="with --rehearse: only this event")
    parser.add_argument("--labeled", action="store_true", help="with 100 labeled threads of the target")
    parser.add_argument("--set", action="append", default=[], help="SETTING=VALUE of the source model and of all runs")
    parser.add_argument("--runs", default="mtem", help="METHOD:SETTING=VALUE:..., separated by commas")
    parser.add_argument("--name", default="", help="what the rows are called")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    encoder(args) if args.what == "encoder" else run(args)


if __name__ == "__main__":
    main()
