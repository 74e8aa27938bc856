"""A pilot: rules compared on the unlabeled reviews of source domains, scored on reviews that they do not contain.

    python benchmarks/pilots/rehearsed_pools.py --data DIR --model DIR --target books --domain dvd --pool natural --work DIR \
        --out FILE.jsonl --rule 'plain: method=fixmatch' --rule 'balanced: method=fixmatch balance_target=true'

A source domain of the target stands for it: the two others are the sources, its own unlabeled reviews are adapted to, and its
labeled ones score. So a rehearsal has what a target has: a pool with the same class shares, and a test set that was not read.
The target itself is not read at all. With --labeled so many reviews are labeled target texts, which neither are adapted to nor
score; --set holds for the source model and for all rules. With --store and `--set frozen_layers=-2` the output of the frozen
layers is computed once for the texts of all domains.
"""

from __future__ import annotations

import argparse
import hashlib
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
from mtem.rehearsal import rehearse
from mtem.rehearsal.plan import make_plan
from mtem.run.record import versions
from mtem_paper import splits
from mtem_paper.protocol import DATASETS


class Watch:
    """Accuracy on the domain's labeled reviews and the recall of its classes, at every evaluation."""

    def __init__(self, test: Any, truth: list[str], store: Path | None) -> None:
        self.test, self.truth, self.store, self.tokens = test, np.array(truth), store, None
        self.rows: list[dict[str, Any]] = []

    def __call__(self, line: dict[str, Any], model: Any) -> None:
        if line["stage"] != "evaluation":
            return
        if self.tokens is None:
            self.tokens = model.encode(self.test)
            if self.store is not None:  # which has these texts, so that nothing is written
                self.tokens = model.keep_lower(self.tokens, Path("unused"), Progress(quiet=True), "", np.inf, self.store)
        found = np.array(model.classes)[inference.compute_logits(model, self.tokens).logits.argmax(axis=1)]
        recall = {name: round(float((found == self.truth)[self.truth == name].mean()), 4) for name in model.classes}
        accuracy = round(float((found == self.truth).mean()), 4)
        self.rows.append({"step": line["step"], "accuracy": accuracy, "recall": recall, "infomax": line["infomax"]})


def store_frozen(path: Path, args: argparse.Namespace, common: dict[str, Any]) -> None:
    """Store the output of the frozen layers for all texts of all rehearsals; the labels of pools are made up and not used."""
    texts: list[str] = []
    for domain in DATASETS["amazon"].domains:
        data = splits.read("amazon", args.data, domain, args.pool)
        texts += data.examples + list(splits.divide(data, args.seed).unlabeled)[: args.texts]
    corpus = load_corpus((texts, ["negative", "positive"] * (len(texts) // 2) + ["negative"] * (len(texts) % 2)), labeled=True)
    given = {name: common[name] for name in ("max_length", "frozen_layers", "seed")}
    rehearse.store_frozen(
        corpus, make_plan(("mtem",), args.model, "recommended", None, None, False, given), path, Progress(quiet=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--domain", required=True)
    parser.add_argument("--pool", choices=("mixed", "natural"), required=True)
    parser.add_argument("--texts", type=int, help="unlabeled reviews at most")
    parser.add_argument("--labeled", action="store_true", help="with the 100 labeled reviews of the protocol")
    parser.add_argument("--rule", action="append", required=True, help="'NAME: method=NAME SETTING=VALUE ...'")
    parser.add_argument("--set", action="append", default=[], help="SETTING=VALUE")
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, required=True, help="folder of the source models")
    parser.add_argument("--store", type=Path, help="file of the frozen layers' output")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = splits.read("amazon", args.data, args.domain, args.pool)
    division = splits.divide(data, args.seed)
    sources = {name: path for name, path in sorted(data.sources.items()) if name != args.target}
    unlabeled = list(division.unlabeled)[: args.texts]
    common: dict[str, Any] = {
        "model": args.model, "seed": args.seed, "left_out_models": 0, "frozen_layers": 0, "progress": Progress(quiet=True),
        "max_length": 512, "calibrate": False, "target_labeled": None, **dict(item.split("=", 1) for item in args.set),
    }  # fmt: skip
    if args.labeled:
        examples = division.target_labeled, division.target_labeled_labels
        common["target_labeled"] = load_corpus(examples, labeled=True, name="target_labeled", domain=args.domain)
    if args.store is not None:
        if not list(args.store.parent.glob(f"{args.store.stem}-*")):
            store_frozen(args.store, args, common)
        common["frozen_store"] = args.store
    test = load_corpus(division.test, labeled=False, name="test")
    about = {name: getattr(args, name) for name in ("target", "domain", "pool", "texts", "labeled", "set", "seed")}
    done = {(row["rule"], *(row[name] for name in ("target", "domain", "pool", "seed")), *row["set"]) for row in read(args.out)}
    # A source model that is not pretrained knows no unlabeled text, so the pools share it.
    known = {name: about[name] for name in ("target", "domain", "labeled", "set", "seed")}
    path = args.work / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
    if (path / "run.json").is_file():
        theta = mtem.load(path)
    else:
        theta = mtem.adapt(sources, unlabeled, method="source-only", output=path, pretrain_epochs=0, **common)
    for rule in args.rule:
        name, _, given = rule.partition(":")
        if (name, args.target, args.domain, args.pool, args.seed, *args.set) in done:
            continue
        settings: dict[str, Any] = {
            "learning_rate": 5e-5, "criterion": "last", "epochs": args.epochs, "evaluations": args.evaluations,
            **dict(item.split("=", 1) for item in given.split()),
        }  # fmt: skip
        started, watch = time.monotonic(), Watch(test, division.truth, args.store)
        adapted = mtem.adapt(sources, unlabeled, source_model=theta, observe=watch, **{**common, **settings})
        prior = adapted.record["target_class_prior"]
        row = {
            "rule": name, **about, "given": settings, "texts": len(unlabeled), "candidates": watch.rows,
            "shares": None if prior is None else prior["shares"], "seconds": round(time.monotonic() - started, 1),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "versions": versions(),
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(args.target, args.domain, name, *(entry["accuracy"] for entry in watch.rows), row["seconds"], flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
