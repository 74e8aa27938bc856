"""Pilot on PHEME: scores of frozen embeddings of the posts with a small network and self-training, without a graph.

    python benchmarks/pilots/pheme_features.py embed --data DIR --model minilm-folder --to features.npz
    python benchmarks/pilots/pheme_features.py table --features features.npz --seeds 5 --out FILE.jsonl

A thread is the root's embedding and the mean of its first eight replies'. One event is the target: all of its threads are
unlabeled and all are scored; the other four are the source. Target labels are used only for scores.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import Tensor, nn

from mtem.data.readers import read_rows
from mtem.run.record import machine
from mtem_paper.protocol import DATASETS

EVENTS = DATASETS["pheme"].domains

REPLIES = 8
MARKS = (300, 600, 1000, 1500)  # steps of self-training at which the average is scored


# ---------------------------------------------------------------------- embeddings


@torch.no_grad()
def embed(args: argparse.Namespace) -> None:
    from transformers import AutoModel, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), AutoModel.from_pretrained(args.model).to(device).eval()
    arrays: dict[str, np.ndarray] = {}
    for event in EVENTS:
        threads = [record for _, record in read_rows(args.data / f"{event}.jsonl.gz")][: args.small]
        posts = [node["text"] for thread in threads for node in thread["nodes"][: REPLIES + 1]]
        owner = np.repeat(np.arange(len(threads)), [min(len(thread["nodes"]), REPLIES + 1) for thread in threads])
        first = np.r_[True, owner[1:] != owner[:-1]]
        vectors = np.zeros((len(posts), model.config.hidden_size), np.float32)
        order = np.argsort([len(post) for post in posts])
        for rows in np.array_split(order, max(1, len(order) // 128)):
            inputs = tokenizer([posts[row] for row in rows], truncation=True, max_length=96, padding=True, return_tensors="pt")
            inputs = {name: value.to(device) for name, value in inputs.items()}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None].float()
            vectors[rows] = ((hidden.float() * mask).sum(dim=1) / mask.sum(dim=1)).cpu().numpy()
        replies = np.zeros((len(threads), vectors.shape[1]), np.float32)
        np.add.at(replies, owner[~first], vectors[~first])
        replies /= np.maximum(np.bincount(owner[~first], minlength=len(threads)), 1)[:, None]
        arrays[f"{event}.root"], arrays[f"{event}.replies"] = vectors[first].astype(np.float16), replies.astype(np.float16)
        arrays[f"{event}.rumour"] = np.array([thread["label"] == "rumour" for thread in threads])
        print(event, len(threads), len(posts), flush=True)
    np.savez_compressed(args.to, **arrays)


# ---------------------------------------------------------------------- scores


def scores(rumour: np.ndarray, logit: np.ndarray) -> dict[str, float]:
    half = logit > np.median(logit)
    values = {
        "f1": f1_score(rumour, logit > 0, zero_division=0.0), "f1_half": f1_score(rumour, half),
        "ap": average_precision_score(rumour, logit), "called": (logit > 0).mean(),
    }  # fmt: skip
    return {name: round(float(value), 4) for name, value in values.items()}


def load(path: Path, parts: tuple[str, ...], centred: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the features of each event and which threads are rumours; all features are divided by one number."""
    stored = np.load(path)
    data = {}
    for event in EVENTS:
        features = np.concatenate([stored[f"{event}.{part}"].astype(np.float32) for part in parts], axis=1)
        data[event] = features - features.mean(axis=0) if centred else features, stored[f"{event}.rumour"]
    scale = np.sqrt(np.mean(np.concatenate([features.var(axis=0) for features, _ in data.values()])))
    return {event: (features / scale, rumour) for event, (features, rumour) in data.items()}


def logistic(data: dict[str, tuple[np.ndarray, np.ndarray]], target: str) -> tuple[dict[str, float], float]:
    """Fit a balanced logistic regression; its penalty has the best average precision over source events left out in turn."""

    def fit(events: list[str], strength: float) -> LogisticRegression:
        x, y = (np.concatenate(values) for values in zip(*(data[event] for event in events), strict=True))
        return LogisticRegression(C=strength, class_weight="balanced", max_iter=300).fit(x, y)

    sources = [event for event in EVENTS if event != target]
    quality = {}
    for strength in (1e-4, 1e-3, 1e-2):
        left_out = [(fit([other for other in sources if other != event], strength), *data[event]) for event in sources]
        quality[strength] = np.mean([average_precision_score(y, model.decision_function(x)) for model, x, y in left_out])
    best = max(quality, key=lambda strength: quality[strength])
    x, y = data[target]
    return scores(y, fit(sources, best).decision_function(x)), best


# ---------------------------------------------------------------------- a small network, then self-training


def network(size: int, hidden: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.3), nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 1))


def even(logits: Tensor) -> Tensor:
    """Return the number to subtract from the logits so that the mean probability is a half."""
    low, high = logits.min(), logits.max()
    for _ in range(20):
        middle = (low + high) / 2
        above = torch.sigmoid(logits - middle).mean() > 0.5
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


class Trial:
    """One target event and one seed."""

    def __init__(self, data: dict[str, tuple[np.ndarray, np.ndarray]], target: str, seed: int) -> None:
        sources = [data[event] for event in EVENTS if event != target]
        self.x, self.y = (torch.as_tensor(np.concatenate(values)).float() for values in zip(*sources, strict=True))
        self.classes = [torch.nonzero(self.y == value).view(-1) for value in (0, 1)]
        self.target, self.truth = torch.as_tensor(data[target][0]).float(), data[target][1]
        self.seed = seed

    def source_loss(self, model: nn.Module, size: int = 128) -> Tensor:
        rows = torch.cat([rows[torch.randint(len(rows), (size // 2,))] for rows in self.classes])
        return F.binary_cross_entropy_with_logits(model(self.x[rows])[:, 0], self.y[rows])

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        model.eval()
        result = model(self.target)[:, 0]
        model.train()
        return result

    def source(self, steps: int = 600) -> nn.Module:
        torch.manual_seed(self.seed)
        model = network(self.x.shape[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            self.source_loss(model).backward()
            optimizer.step()
        return model

    def adapted(self, theta: nn.Module, threshold: float, marks: tuple[int, ...]) -> dict[int, dict[str, float]]:
        """Mean teacher .98; hard labels after the teacher's mean probability over the event was brought to a half."""
        torch.manual_seed(1000 + self.seed)
        student, teacher = copy.deepcopy(theta), copy.deepcopy(theta).eval()
        optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.01)
        results = {}
        for step in range(1, max(marks) + 1):
            if step % 10 == 1:
                bias = even(self.logits(teacher))
            rows = torch.randint(len(self.target), (128,))
            with torch.no_grad():
                teacher.eval()
                probability = torch.sigmoid(teacher(self.target[rows])[:, 0] - bias)
            labels = (probability > 0.5).float()
            trusted = (torch.maximum(probability, 1 - probability) >= threshold).float()
            losses = F.binary_cross_entropy_with_logits(student(self.target[rows])[:, 0], labels, reduction="none")
            optimizer.zero_grad()
            (self.source_loss(student) + (losses * trusted).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.02)
            if step in marks:
                results[step] = self.evaluate(teacher)
        return results

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits = self.logits(model)
        shifted = logits - even(logits)
        right = (shifted > 0).numpy() == self.truth
        sure = float(roc_auc_score(right, shifted.abs().numpy()))
        return {**scores(self.truth, logits.numpy()), "auc_confidence": round(sure, 4)}


def table(args: argparse.Namespace) -> None:
    targets = args.targets or DATASETS["pheme"].targets
    marks = tuple(max(1, round(mark * args.shorter)) for mark in MARKS)
    started = time.monotonic()

    def write_row(**row: Any) -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        row = {"encoder": args.encoder, "machine": machine("cuda" if torch.cuda.is_available() else "cpu"), **row}
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(round(time.monotonic() - started, 1), row, flush=True)

    if args.first_seed == 0:
        for name, parts, centred in (
            ("logistic, root", ("root",), False),
            ("logistic, root, centred", ("root",), True),
            ("logistic, root and replies, centred", ("root", "replies"), True),
        ):
            data = load(args.features, parts, centred)
            for target in targets:
                result, strength = logistic(data, target)
                write_row(what=name, target=target, C=strength, **result)
    data = load(args.features, ("root", "replies"), True)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for target in targets:
            trial = Trial(data, target, seed)
            theta = trial.source(max(1, round(600 * args.shorter)))
            write_row(what="network", target=target, seed=seed, **trial.evaluate(theta))
            for threshold in (0.0, 0.9):
                for step, result in trial.adapted(theta, threshold, marks).items():
                    write_row(what="self-training", threshold=threshold, steps=step, target=target, seed=seed, **result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("embed", "table"))
    parser.add_argument("--data", type=Path, help="folder of the events' files")
    parser.add_argument("--model", help="folder of the encoder")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--encoder", help="what the rows call the encoder")
    parser.add_argument("--targets", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", type=int, help="a trial: this many threads of each event")
    parser.add_argument("--shorter", type=float, default=1.0, help="a trial: this part of all steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    embed(args) if args.what == "embed" else table(args)


if __name__ == "__main__":
    main()
