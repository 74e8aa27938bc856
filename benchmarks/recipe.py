"""Which settings of MTEM work, by evidence that needs no target label; target accuracy is recorded beside it and never used.

    python benchmarks/recipe.py --data DIR --model minilm --out recipe.jsonl [--targets kitchen] [--seeds 0,1] [--only NAME]

    python benchmarks/recipe.py --show results/recipe/FILE.jsonl

One line per cell (target, seed, configuration). A cell that is in the file already is skipped. theta_1 is trained once per
target and seed and shared by the configurations. DIR holds <domain>.labeled.jsonl.gz and <domain>.unlabeled.jsonl.gz.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mtem
from mtem import adaptation, inference, selection
from mtem.data import files
from mtem.methods import Method
from mtem.progress import Progress
from mtem.run import Run, clone, current, load
from mtem.storage import read_tensors, write_tensors

DOMAINS = ("books", "dvd", "electronics", "kitchen")
COMMON: dict[str, Any] = {"max_length": 256, "batch_size": 50, "source_epochs": 3, "frozen_layers": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "soft": {"index_step": "soft", "index_rate": 1.0},
    "fixed": {"meta": False},
    "source-continued": {"meta": False, "target_weight": 0.0},
    "corruption-0": {"corruption": 0.0},
    "corruption-30": {"corruption": 0.3},
    "greedy": {"sampling": False},
    "no-dropout": {"dropout": False},
    "no-teacher": {"teacher": 0.0},
    "teacher-99": {"teacher": 0.99},
    "rate-5e-5": {"rate": 5e-5},
    "epochs-4": {"epochs": 4},
    "paper": {"preset": "paper"},
    "paper-adam": {"preset": "paper", "optimizer": "adamw", "rate": 2e-5},
}


class Observed(Run):
    """A run whose theta_1 may be given, and which also notes what target labels would have said of every candidate."""

    shared: Path
    texts: list[str]
    truth: np.ndarray

    def train_source(self, done: int, tensors: dict[str, torch.Tensor]) -> None:
        if self.shared.exists():
            self.source_weights = {k: v.to(self.model.device) for k, v in read_tensors(self.shared).items()}
            return
        super().train_source(done, tensors)
        write_tensors(self.shared, self.source_weights)

    def judge(self, method: Method, step: int) -> None:
        super().judge(method, step)
        kept = clone(current(self.model))
        load(self.model, clone(method.weights()))
        evidence = self.evidence()
        found = {name: value for name, value in selection.scores(evidence).items() if np.isfinite(value)}
        if not hasattr(self, "test_tokens"):
            self.test_tokens = self.model.encode_texts(self.texts)
        predicted = inference.score(self.model, self.test_tokens).scores.argmax(axis=1)
        self.candidates[-1] |= {"criteria": found, "target_accuracy": float((predicted == self.truth).mean())}
        load(self.model, kept)


def cell(arguments: argparse.Namespace, target: str, seed: int, name: str, workspace: Path) -> dict[str, Any]:
    data = arguments.data
    labeled = [record for _, record in files.read_rows(data / f"{target}.labeled.jsonl.gz")]
    pool = [record["text"] for _, record in files.read_rows(data / f"{target}.unlabeled.jsonl.gz")]
    Observed.shared = workspace / f"{target}-{seed}.safetensors"
    Observed.texts = [record["text"] for record in labeled]
    Observed.truth = np.array([("negative", "positive").index(record["label"]) for record in labeled])
    adaptation.Run = Observed  # type: ignore[misc]
    started = time.monotonic()
    given = {**COMMON, **CONFIGURATIONS[name], "seed": seed}
    sources = [str(data / f"{domain}.labeled.jsonl.gz") for domain in DOMAINS if domain != target]
    adapted = mtem.adapt(sources, pool[: arguments.texts], model=arguments.model, progress=Progress(quiet=True), **given)
    record = adapted.record
    index = adapted.indexes.get("index")
    return {
        "target": target,
        "seed": seed,
        "configuration": name,
        "changed": CONFIGURATIONS[name],
        "texts": min(arguments.texts, len(pool)),
        "chosen_step": record["selection"]["chosen_step"],
        "candidates": record["selection"]["candidates"],
        "estimate": {when: value["accuracy"] for when, value in record["estimate"].items()},
        "index_quantiles": None if index is None else [round(float(q), 3) for q in np.quantile(index, [0.1, 0.5, 0.9])],
        "seconds": round(time.monotonic() - started, 1),
        "stages": record["seconds"],
        "settings": record["settings"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": record["versions"],
    }


def show(path: Path) -> None:
    """The cells as a table: means over those (target, seed) pairs that every configuration in the file has."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cells: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["configuration"], {})[row["target"], row["seed"]] = row
    most = max(map(len, cells.values()))
    cells = {name: found for name, found in cells.items() if len(found) == most}
    pairs = sorted(set.intersection(*(set(found) for found in cells.values())))
    print(f"{len(pairs)} cells each: {', '.join(f'{target}/{seed}' for target, seed in pairs)}; {rows[0]['device']}\n")
    print(
        "| configuration | infomax | source validation | estimate | kept source | source acc. | chosen | last | best (oracle) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, found in cells.items():
        lines = []
        for pair in pairs:
            candidates = found[pair]["candidates"]
            chosen = next(entry for entry in candidates if entry["step"] == found[pair]["chosen_step"])
            truth = [entry["target_accuracy"] for entry in candidates]
            evidence = [chosen["infomax"], chosen["source-validation"], found[pair]["estimate"]["after"], chosen["step"] == 0]
            lines.append([*evidence, truth[0], chosen["target_accuracy"], truth[-1], max(truth)])
        means = np.mean(np.array(lines, dtype=float), axis=0)
        shown = [f"{value:.4f}" for value in means]
        shown[3] = f"{round(means[3] * len(pairs))} of {len(pairs)}"
        print(f"| {name} | {' | '.join(shown)} |")
    print("\n| criterion | mean accuracy of the candidate it chooses, over all cells of the file |\n|---|---|")
    for name in rows[0]["candidates"][0]["criteria"]:
        picked = [max(row["candidates"], key=lambda entry: entry["criteria"].get(name, -1e9)) for row in rows]
        print(f"| {name} | {np.mean([entry['target_accuracy'] for entry in picked]):.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a file's cells as tables and do nothing else")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--targets", default=",".join(DOMAINS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default=",".join(CONFIGURATIONS))
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for all cells")
    parser.add_argument("--workspace", type=Path, default=Path(tempfile.gettempdir()) / "mtem-recipe")
    arguments = parser.parse_args()
    if arguments.show:
        show(arguments.show)
        return
    if not (arguments.data and arguments.out):
        parser.error("--data and --out are needed (or --show)")
    COMMON.update(item.split("=", 1) for item in arguments.set)
    arguments.workspace.mkdir(parents=True, exist_ok=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = set()
    if arguments.out.exists():
        lines = map(json.loads, arguments.out.read_text().splitlines())
        done = {(line["target"], line["seed"], line["configuration"]) for line in lines}
    for seed in map(int, arguments.seeds.split(",")):
        for target in arguments.targets.split(","):
            for name in arguments.only.split(","):
                if (target, seed, name) in done:
                    continue
                result = cell(arguments, target, seed, name, arguments.workspace)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                found = {entry["step"]: entry["target_accuracy"] for entry in result["candidates"]}
                print(target, seed, name, result["seconds"], found[0], found[result["chosen_step"]], flush=True)


if __name__ == "__main__":
    main()
