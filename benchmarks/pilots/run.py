"""Pilots of the recipe on the Amazon reviews: pretraining on masked words, then self-training with different index rules.

    python benchmarks/pilots/run.py pretrain --data DIR --model minilm --target kitchen --to DIR
    python benchmarks/pilots/run.py adapt --data DIR --model DIR --target kitchen --seed 0 --config shared-kept --out FILE.jsonl

Target labels are used only for scores. A row has the accuracy of the averaged weights on the test set at every pass, and how well
index and confidence separate right from wrong labels of the test texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import mtem
from mtem import inference, methods
from mtem.data.batching import Batches
from mtem.data.loading import load_corpus
from mtem.methods import registry
from mtem.progress import Progress
from mtem_paper import splits
from mtem_paper.protocol import DATASETS

HERE = Path(__file__).parent
CONFIGS: dict[str, dict[str, Any]] = {
    "fixed-1": {"trust": "fixed"},
    "fixed-2": {"trust": "fixed", "index_initial": 2.0},
    "threshold-95": {"trust": "threshold"},
    "per-text": {"trust": "per-text", "index_low": 1.0},
    "shared-source": {"trust": "shared", "outer": "source"},
    "shared-fold": {"trust": "shared", "outer": "kept"},  # a tenth of each source domain is kept out for the outer loop
    "shared-kept": {"trust": "shared", "outer": "kept"},  # one source domain is kept out
    "fixed-1-two": {"trust": "fixed"},  # without that domain, for comparison
}
TWO = ("shared-kept", "fixed-1-two")


def read(data: Path, target: str, seed: int, small: int | None = None) -> tuple[dict[str, Path], splits.Division]:
    target_data = splits.read("amazon", data, target, "mixed")
    division = splits.divide(target_data, seed)
    if small:
        cut = {name: getattr(division, name)[:: len(getattr(division, name)) // small] for name in ("unlabeled", "test", "truth")}
        division = dataclasses.replace(division, **cut)
    return target_data.sources, division


def write(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------------- masked words


class Head(nn.Module):
    """A new head over the vocabulary whose weight matrix is shared with the word embeddings."""

    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__()
        size = embeddings.embedding_dim
        self.dense, self.norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.bias = nn.Parameter(torch.zeros(embeddings.num_embeddings))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor, embeddings: nn.Embedding) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(hidden))), embeddings.weight, self.bias)


def pretrain(args: argparse.Namespace) -> None:
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(args.model).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sources, division = read(args.data, args.target, args.seed, args.small)
    texts = [*load_corpus(sources, labeled=True).texts(), *division.unlabeled][: args.small]
    ids = tokenizer(texts, truncation=True, max_length=256, return_special_tokens_mask=True)
    lengths = np.array([len(tokens) for tokens in ids["input_ids"]])
    words = torch.full((len(texts), int(lengths.max())), tokenizer.pad_token_id)
    fixed = torch.ones_like(words, dtype=torch.bool)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.tensor(ids["input_ids"][row])
        fixed[row, :length] = torch.tensor(ids["special_tokens_mask"][row]).bool()
    embeddings = model.get_input_embeddings()
    head = Head(embeddings).to(device)
    parameters = [*model.parameters(), *head.parameters()]
    batches = Batches(lengths, args.batch, args.seed)
    steps = round(args.passes * batches.batches_per_epoch) if args.steps is None else args.steps
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.06 * steps + 1), (steps - step) / (0.94 * steps))
    )
    started, losses = time.monotonic(), []
    model.train()
    for step in range(steps):
        rows = batches(step)
        longest = int(lengths[rows].max())
        inputs, special = words[rows, :longest], fixed[rows, :longest]
        mask = (inputs != tokenizer.pad_token_id).long()
        chosen = (torch.rand(inputs.shape) < 0.15) & ~special
        drawn = torch.rand(inputs.shape)
        masked = inputs.masked_fill(chosen & (drawn < 0.8), tokenizer.mask_token_id)
        random_words = torch.randint(len(tokenizer), inputs.shape)
        masked = torch.where(chosen & (drawn > 0.9), random_words, masked)
        positions = torch.nonzero(chosen.reshape(-1)).view(-1).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = model(input_ids=masked.to(device), attention_mask=mask.to(device)).last_hidden_state
            logits = head(hidden.reshape(-1, hidden.shape[-1])[positions], embeddings)
        loss = F.cross_entropy(logits.float(), inputs.reshape(-1).to(device)[positions])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            losses.append(round(float(loss.detach()), 3))
            print("step", step, losses[-1], round(time.monotonic() - started, 1), flush=True)
    args.to.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.to)
    tokenizer.save_pretrained(args.to)
    row = {
        "pretrained": args.target, "encoder": args.encoder, "seed": args.seed, "texts": len(texts), "steps": steps,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "passes": args.passes, "batch": args.batch, "learning_rate": args.rate, "losses": losses,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    if args.out:
        write(args.out, row)
    print("pretrained", args.target, steps, losses[-1], row["seconds"], flush=True)


# ---------------------------------------------------------------------- adaptation


class Watch:
    """Scores the averaged weights on the test set at every evaluation, and signals that may separate right from wrong labels."""

    def __init__(self, test: Any, truth: np.ndarray) -> None:
        self.test, self.truth, self.tokens, self.rows, self.predictions = test, truth, None, [], []

    def __call__(self, line: dict[str, Any], model: Any) -> None:
        if line["stage"] != "evaluation":
            return
        if self.tokens is None:
            self.tokens = model.encode(self.test)
        logits = inference.compute_logits(model, self.tokens).logits
        labels = logits.argmax(axis=1)
        self.predictions.append(labels)
        right = labels == self.truth
        row = {
            "step": line["step"],
            "accuracy": float(right.mean()),
            "infomax": line["infomax"],
            "source": line["source-validation"],
        }
        pilot = methods_pilot().current
        if pilot is not None and line["step"] and hasattr(pilot, "phi"):
            sure = inference.probabilities(logits).max(axis=1)
            agreement = self.agreement(model, labels, pilot)
            stable = np.mean([labels == earlier for earlier in self.predictions], axis=0)
            phi = pilot.phi(
                *(torch.as_tensor(values, dtype=torch.float32, device=pilot.w.device) for values in (sure, agreement, stable))
            )
            index = (phi @ pilot.w).cpu().numpy()
            auc = lambda values: round(float(roc_auc_score(right, values)), 4)  # noqa: E731
            row |= {
                "auc_confidence": auc(sure),
                "auc_agreement": auc(agreement),
                "auc_stable": auc(stable),
                "auc_index": auc(-index),
            }
            row |= {"w": [round(float(value), 4) for value in pilot.w], "sure_share": float((sure >= 0.95).mean())}
            row["signal"] = self.signal(pilot)
        self.rows.append(row)
        print("candidate", json.dumps(row), flush=True)  # printed at once, in case the run is interrupted

    @torch.no_grad()
    def agreement(self, model: Any, labels: np.ndarray, pilot: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(0)
        result = np.zeros(len(labels))
        model.eval()
        for rows in np.array_split(np.argsort(np.asarray(self.tokens.lengths)), max(1, len(labels) // 100)):
            inputs = model.augment(model.collate(self.tokens, rows), pilot.context.view, pilot.context.view_strength, generator)
            probs = torch.softmax(model(model.prepare(inputs)).float(), dim=-1).cpu().numpy()
            result[rows] = probs[np.arange(len(rows)), labels[rows]]
        return result

    def signal(self, pilot: Any) -> dict[str, Any] | None:
        context = pilot.context
        if not hasattr(self, "streams") or self.streams is None:
            return None
        source, target = self.streams
        rows = context.target_labeled_rows if context.target_labeled is not None and pilot.settings.outer == "kept" else None
        number = len(self.rows)
        if rows is not None:
            drawn = np.random.default_rng(number).permutation(rows.cpu().numpy())  # files have one class after the other
            outers = [source.of(drawn[first : first + 50]) for first in range(0, min(len(drawn), 200), 50)]
        else:
            outers = [source(10_000 + 4 * number + each) for each in range(4)]
        return pilot.signal(target(20_000 + number), outers) if len(outers) > 1 else None


def methods_pilot() -> Any:
    return methods.get(str(HERE / "shared_index.py"))


def adapt(args: argparse.Namespace) -> None:
    sources, division = read(args.data, args.target, args.seed, args.small)
    method = str(HERE / "shared_index.py")
    pilot = methods.get(method)
    registry._from_file = lambda path: pilot  # always the same class object, so that its `current` is the running method
    labeled: dict[str, Any] = {}
    kept: tuple[list[str], list[str]] | None = None
    names = sorted(sources)
    left_out = names[DATASETS["amazon"].domains.index(args.target) % len(names)]
    draw = np.random.default_rng(args.seed)
    for name in names:
        corpus = load_corpus({name: sources[name]}, labeled=True)
        texts, labels = list(corpus.texts()), [corpus.classes[number] for number in corpus.label_numbers(corpus.classes)]
        texts, labels = (values[:: max(1, len(values) // args.small)] if args.small else values for values in (texts, labels))
        if args.config in TWO and name == left_out:
            kept = texts, labels
            continue
        if args.config == "shared-fold":
            out = set(draw.permutation(len(texts))[: len(texts) // 10].tolist())
            kept = kept or ([], [])
            for number in out:
                kept[0].append(texts[number])
                kept[1].append(labels[number])
            texts, labels = ([each for number, each in enumerate(values) if number not in out] for values in (texts, labels))
        labeled[name] = (texts, labels)
    common = {
        "model": args.model, "seed": args.seed, "left_out_models": 0, "frozen_layers": 0, "max_length": 256, "pretrain_epochs": 0,
        "progress": Progress(quiet=True), **dict(item.split("=", 1) for item in args.set),
    }  # fmt: skip
    started = time.monotonic()
    if args.theta and (args.theta / "run.json").is_file():
        theta = mtem.load(args.theta)
    else:
        theta = mtem.adapt(labeled, division.unlabeled, method="source-only", output=args.theta, **common)
    print("source model", round(time.monotonic() - started, 1), flush=True)
    watch = Watch(
        load_corpus(division.test, labeled=False, name="test"), np.array([theta.classes.index(each) for each in division.truth])
    )
    from mtem.run import pipeline as running

    prepare = running.Run.prepare

    def prepared(self: Any) -> None:
        prepare(self)
        watch.streams = self.inputs.source_stream, self.inputs.target_stream

    running.Run.prepare = prepared
    config = CONFIGS[args.config]
    given = {"epochs": args.passes, "learning_rate": args.rate, "evaluations": max(1, round(args.passes)), **common, **config}
    adapted = mtem.adapt(
        labeled, division.unlabeled, target_labeled=kept if config.get("outer") == "kept" else None, method=method,
        source_model=theta, observe=watch, **given,
    )  # fmt: skip
    row = {
        "config": args.config, "encoder": args.encoder, "target": args.target, "seed": args.seed,
        "model": Path(args.model).name, "passes": args.passes, "learning_rate": args.rate, "changed": config, "set": args.set,
        "candidates": watch.rows, "kept_out": left_out if args.config in TWO else None,
        "chosen_step": adapted.record["selection"]["chosen_step"], "seconds": round(time.monotonic() - started, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "versions": adapted.record["versions"],
    }  # fmt: skip
    write(args.out, row)
    print(
        args.config,
        args.target,
        args.seed,
        [round(candidate["accuracy"], 4) for candidate in watch.rows],
        row["seconds"],
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pretrain", "adapt"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--target", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--theta", type=Path, help="folder of the source model: taken from there, or kept there once trained")
    parser.add_argument("--encoder", help="what the rows call the encoder")
    parser.add_argument("--config", choices=tuple(CONFIGS))
    parser.add_argument("--passes", type=float, default=12)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--small", type=int, help="a trial: this many texts of each kind")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    pretrain(args) if args.what == "pretrain" else adapt(args)


if __name__ == "__main__":
    main()
