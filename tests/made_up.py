"""Made-up cells: what `mtem reproduce` would have written."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np

from mtem_paper.cells import PROTOCOL
from mtem_paper.protocol import DATASETS
from mtem_paper.search import bits
from mtem_paper.statistics import recomputed

CLASSES = {"amazon": ["negative", "positive"], "pheme": ["non-rumour", "rumour"]}


def make_cell(
    variant="mtem", target="kitchen", seed=0, right=0.85, dataset="amazon", setting="unsupervised", size=300, **changes
):
    """A cell whose predictions are right in about so many of its texts.

    An example's label depends on the target alone, and which examples are tested on target and seed.
    """
    own = int(hashlib.sha256(f"{variant}{target}{seed}{setting}".encode()).hexdigest()[:8], 16)
    examples = np.random.default_rng([len(target), ord(target[0])]).integers(2, size=size + size // 3)
    rows = np.sort(np.random.default_rng([len(target), ord(target[0]), seed]).permutation(len(examples))[:size])
    truth = examples[rows]
    predicted = np.where(np.random.default_rng(own).random(size) < right, truth, 1 - truth)
    cell = {
        "dataset": dataset, "model": "minilm" if dataset == "amazon" else "bigcn", "variant": variant,
        "method": "source-only" if variant in ("out", "out-as-is", "oracle") else variant.split("-")[0],
        "setting": setting, "pool": "mixed" if dataset == "amazon" else "event", "target": target, "seed": seed,
        "preset": "recommended", "selected_by": "infomax", "oracle": variant == "oracle", "classes": CLASSES[dataset],
        "truth": "".join(map(str, truth)), "predictions": "".join(map(str, predicted)),
        "test": {"size": size, "fingerprint": f"{target}-{seed}", "rows": bits(rows.tolist(), len(examples))},
        "overrides": {}, "protocol": PROTOCOL,
        "finished": "2024-01-01T00:00:00+00:00", "seconds": 20.0, "machine": "a machine",
    }  # fmt: skip
    score = recomputed(cell)
    accuracy = float((truth == predicted).mean())
    candidates = [{"step": 10 * k, "criterion_score": 0.4, "score": score - 0.01 * k} for k in range(3)]
    cell |= {
        "score": score, "source_score": score - 0.02, "target_selected": {"score": score + 0.01, "search": 0, "step": 20},
        "metrics": {"accuracy": accuracy, "average_precision": {name: 0.7 for name in CLASSES[dataset]}, "trivial_f1": 0.5},
        "estimate": {
            "accuracy": accuracy + 0.02, "low": accuracy - 0.01, "high": accuracy + 0.05, "source_model": None, "left_out": 3
        },
        "search": [{"settings": {}, "chosen_step": 0, "criterion_score": 0.4, "score": score, "candidates": candidates}],
        "chosen": 0, "settings": {},
    }  # fmt: skip
    if cell["method"] == "mtem":
        cell["history"] = [
            {"step": step, "temperature": 1 - step / 50, "index_quantiles": [2 - step / 50, 2.0, 2 + step / 40]}
            for step in range(0, 41, 4)
        ]
    return cell | changes


def save(results: Path, *cells):
    for cell in cells:
        where = results / "cells" / cell["dataset"] / cell["model"] / cell["setting"] / cell["pool"]
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{cell['variant']}-{cell['target']}-{cell['seed']}-0.json").write_text(json.dumps(cell))


def grid(variants, targets=DATASETS["amazon"].targets, seeds=(0, 1, 2), **changes):
    return [
        make_cell(variant, target, seed, **{"right": right, **changes})
        for (variant, right), target, seed in itertools.product(variants.items(), targets, seeds)
    ]
