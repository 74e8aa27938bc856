"""A pilot: settings of a method compared on rehearsals, so without any label of the target.

    python benchmarks/pilots/rehearsed_rules.py --dataset amazon --data DIR --model DIR --model-name minilm --target books \
        --domain dvd --work DIR --out FILE.jsonl --rule 'greedy-1: meta=false sampling=false' --rule 'fixmatch: method=fixmatch'

A source domain stands for the target: its labels are hidden from the run and only score it. All rules begin from the source model
that `mtem reproduce rehearsal` would train (with the encoder pretrained for the target, if the plan has one), which is kept in
--work. A rule is a name and settings of `mtem adapt`; `method=NAME` takes another method than mtem. A row has the score after
every pass, the source model's first, and `balanced`, the mean over the classes of the share that is found. With --rare only a
third of the texts of that class is adapted to, and with --set the source models have other settings. With --labeled so many texts
of the domain are labeled target texts, and neither adapted to nor scored; another number needs another --work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtem.rehearsal.figures import candidate_figures
from mtem.rehearsal.trials import Trial, TrialOutputs, quiet_logging
from mtem.run.record import versions
from mtem_paper import rehearsals


def parse(rule: str) -> tuple[str, dict[str, str]]:
    name, _, given = rule.partition(":")
    return name.strip(), dict(item.split("=", 1) for item in given.split())


def run(args: argparse.Namespace, rehearser: rehearsals.Rehearser, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run one rule, and return its row."""
    place = rehearsals.Place(args.dataset, args.model_name, args.target, args.seed)
    rate = float(given.pop("learning_rate", args.learning_rate))
    method, epochs = given.pop("method", "mtem"), int(given.pop("epochs", args.epochs or rehearsals.PASSES[args.dataset]))
    trial = Trial(args.domain, method, rate, given.pop("target_class_prior", args.prior), args.rare)
    task = rehearsals.Task(place, trial, 1.0, json.dumps(dict(item.split("=", 1) for item in args.set), sort_keys=True))
    rehearser(rehearsals.source_of(task))
    work = rehearser.work_of(task)
    plan = dataclasses.replace(work.plan, given={**work.plan.given, **given}, epochs=epochs)
    assert isinstance(task.work, Trial)
    with quiet_logging():
        outputs = dataclasses.replace(work, plan=plan).run_trial(task.work)
    figures = candidate_figures(outputs, rehearsals.metric_of(args.dataset), work.corpus.classes)
    return {
        "rule": name, "dataset": args.dataset, "model": args.model_name, "target": args.target, "domain": args.domain,
        "rare": args.rare, "labeled": args.labeled, "set": args.set, "seed": args.seed, "method": method, "given": given,
        "learning_rate": rate, "epochs": epochs, "balanced": balanced(outputs),
        "scores": [round(entry.score, 4) for entry in figures], "infomax": [round(float(x), 4) for x in outputs.infomax],
        "seconds": outputs.seconds, "machine": outputs.machine, "versions": versions(),
    }  # fmt: skip


def balanced(outputs: TrialOutputs) -> list[float]:
    """Return the mean over the classes of the share of their texts that is found, for each candidate."""
    found = outputs.logits.argmax(axis=2) == outputs.labels
    return [round(float(np.mean([row[outputs.labels == k].mean() for k in np.unique(outputs.labels)])), 4) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("amazon", "pheme"), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", required=True, help="what the plan calls it")
    parser.add_argument("--target", required=True, help="the target, which is not read but for the pretraining")
    parser.add_argument("--domain", required=True, help="the source domain that stands for it")
    parser.add_argument("--rule", action="append", required=True, help="'NAME: SETTING=VALUE ...'")
    parser.add_argument("--rare", default="", help="a class of which only a third of the texts is adapted to")
    parser.add_argument("--labeled", type=int, default=0, help="labeled texts of the domain that stands for the target")
    parser.add_argument("--set", action="append", default=[], help="SETTING=VALUE of the source model and of all rules")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--prior", default="none")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, required=True, help="folder of the source models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rehearser = rehearsals.Rehearser(args.data, args.model, args.device, args.work, args.labeled)
    done = {
        (row["rule"], row["target"], row["domain"], row["seed"]) for row in read(args.out) if row.get("rare", "") == args.rare
    }
    for name, given in map(parse, args.rule):
        if (name, args.target, args.domain, args.seed) in done:
            continue
        row = run(args, rehearser, name, given)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(args.target, args.domain, name, row["balanced"][0], row["balanced"][-1], row["seconds"], flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
