"""Class shares to assume for a new event, chosen without that event: nested leave-one-event-out on PHEME with BiGCN.

For each event T of the paper's targets, and each other event s: train on the remaining three, adapt to 70 % of s without labels,
score the other 30 %. T is never used, so a setting chosen by the mean over s may be used on T.

    python benchmarks/prior.py --data pheme/ --output results/recipe/prior.jsonl [--configurations out,mtem-uniform] [--jobs 2]
    python benchmarks/prior.py --show results/recipe/prior.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

EVENTS = ("charliehebdo", "ferguson", "germanwings-crash", "ottawashooting", "sydneysiege")
TARGETS = ("charliehebdo", "ferguson", "ottawashooting", "sydneysiege")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "out": {"method": "source-only", "target_class_prior": "none"},
    "out-uniform": {"method": "source-only", "target_class_prior": "uniform"},
    "mtem": {"method": "mtem", "target_class_prior": "none"},
    "mtem-uniform": {"method": "mtem", "target_class_prior": "uniform"},
    "mtem-uniform-balanced": {"method": "mtem", "target_class_prior": "uniform", "class_weights": "balanced"},
    "mtem-source": {"method": "mtem", "target_class_prior": "source"},
    "mtem-estimated": {"method": "mtem", "target_class_prior": "estimated"},
}


def cell(data: str, left_out: str, target: str, name: str, seed: int) -> dict[str, Any]:
    import torch
    from sklearn.model_selection import train_test_split

    import mtem
    from mtem import metrics

    torch.set_num_threads(1)
    start = time.monotonic()
    with gzip.open(Path(data) / f"{target}.jsonl.gz", "rt", encoding="utf-8") as file:
        threads = [json.loads(line) for line in file]
    labels = [thread.pop("label") for thread in threads]
    unlabeled, test, _, truth = train_test_split(threads, labels, test_size=0.3, random_state=seed, stratify=labels)
    source = {event: str(Path(data) / f"{event}.jsonl.gz") for event in EVENTS if event not in (left_out, target)}
    adapted = mtem.adapt(source, unlabeled, model="bigcn", features="tfidf", seed=seed, device="cpu", **CONFIGURATIONS[name])
    probabilities = adapted.predict_proba(test)
    predicted = [adapted.classes[number] for number in probabilities.argmax(axis=1)]
    figures = metrics.evaluate(truth, predicted, adapted.classes, probabilities)
    rumour = next(metric for metric in figures.per_class if metric.name == "rumour")
    return {
        "left_out": left_out, "target": target, "configuration": name, "seed": seed, "f1": rumour.f1,
        "average_precision": rumour.average_precision, "trivial_f1": rumour.trivial_f1, "macro_f1": figures.macro_f1,
        "accuracy": figures.accuracy, "step": adapted.record["selection"]["chosen_step"],
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def show(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["configuration"], row["left_out"]].append(row)
        groups[row["configuration"], "mean"].append(row)
    columns = [*TARGETS, "mean"]
    print(
        f"rumour F1 (average precision) on the other events, by the event left out\n{'':24}"
        + "".join(f"{c[:14]:>16}" for c in columns)
    )
    for name in dict.fromkeys(row["configuration"] for row in rows):
        cells = []
        for column in columns:
            group = groups[name, column]
            f1, ranked = (sum(row[key] for row in group) / len(group) for key in ("f1", "average_precision"))
            cells.append(f"{f1:.3f} ({ranked:.3f})")
        print(f"{name:24}" + "".join(f"{value:>16}" for value in cells))
    print(f"calling every thread a rumour: {sum(row['trivial_f1'] for row in rows) / len(rows):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pheme")
    parser.add_argument("--output", type=Path, default=Path("results/recipe/prior.jsonl"))
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    done = set()
    if args.output.exists():
        rows = map(json.loads, args.output.read_text(encoding="utf-8").splitlines())
        done = {(row["left_out"], row["target"], row["configuration"], row["seed"]) for row in rows}
    cells = [
        (left_out, target, name, int(seed))
        for name in args.configurations.split(",")
        for seed in args.seeds.split(",")
        for left_out in TARGETS
        for target in EVENTS
        if left_out != target
    ]
    with ProcessPoolExecutor(args.jobs) as pool, args.output.open("a", encoding="utf-8") as file:
        for future in as_completed([pool.submit(cell, args.data, *key) for key in cells if key not in done]):
            file.write(json.dumps(future.result()) + "\n")
            file.flush()
    show(args.output)


if __name__ == "__main__":
    main()
