"""A pilot: which rule says how far a pseudo label is trusted, and whether the outer loop has a signal to learn one from.

    python benchmarks/pilots/trust.py --dataset amazon --data DIR --model DIR --target kitchen --out FILE.jsonl \
        --theta DIR --pretrain 24 --set max_length=512 --rules fixed-1,threshold,per-text,shared,shared-fold
    python benchmarks/pilots/trust.py --dataset pheme --data DIR --model bigcn --target ferguson --out FILE.jsonl \
        --theta DIR --set features=encoder --set encoder=DIR --rules fixed-1,per-text,shared-fold

All rules begin from one source model. A rule whose name ends in -fold is the rule before that, learned against a tenth of the
labeled texts that no weight is trained on (outer_share=0.1), from a second source model; "fixed-1-fold" is the comparison for the
others of them. Both source models have the same pretrained encoder. Target labels are used only for figures.

A row of the output has one entry for every pass, the source model's first:

- the score of the averaged weights on the test set, and infomax;
- `signal`: the mean cosine, over pairs of disjoint outer batches, of the gradient in the weights of the shared rule, and the mean
  correlation of the gradients in the texts' own indexes, for the same 50 unlabeled texts;
- `test`: how often the teacher's label is right, and the AUC by which confidence, agreement and the index of the rule tell right
  labels from wrong ones; `unlabeled`: the same on the unlabeled texts, where their labels are known, with their own indexes;
- `index`: quartiles over the unlabeled texts; `w`: the weights of a shared rule.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import Tensor

import mtem
from mtem import inference
from mtem.data.batching import sequential
from mtem.data.loading import load_corpus
from mtem.methods.base import without_dropout
from mtem.methods.mtem import Mtem, PseudoLabels
from mtem.methods.shared_index import SharedIndex
from mtem.models.base import EncodedCorpus, Model
from mtem.progress import Progress
from mtem.run import adapt as running
from mtem.run import pipeline
from mtem.run.pretrained import write_pretrained
from mtem.training import checkpoints
from mtem_paper import splits
from mtem_paper.protocol import DATASETS

FIXED = {"meta": False, "index_initial": 1.0, "index_low": 1.0, "threshold": 0.0}
LEARNED = {"meta": True, "index_initial": 1.0, "index_low": 1.0, "threshold": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "fixed-1": FIXED,
    "fixed-2": {**FIXED, "index_initial": 2.0},
    "threshold": {**FIXED, "threshold": 0.95},
    "per-text": LEARNED,
    "per-text-threshold": {**LEARNED, "threshold": 0.95},
    "shared": {**LEARNED, "index_mode": "shared"},
    "shared-threshold": {**LEARNED, "index_mode": "shared", "threshold": 0.95},
}
FOLD, FOLD_SHARE = "-fold", 0.1
DEFAULTS: dict[str, dict[str, Any]] = {"amazon": {"epochs": 12.0, "learning_rate": 5e-5}, "pheme": {"epochs": 10.0}}
POOLS = {"amazon": "mixed", "pheme": "event"}
BATCHES, TEXTS = 4, 50  # outer batches whose gradients are compared, and texts in each
TOKENS = 8192  # in a batch without gradients


class Seen(NamedTuple):
    """What a rule can know of some texts: all tensors have one row for each."""

    labels: Tensor  # the teacher's
    confidence: Tensor
    agreement: Tensor
    features: Tensor  # of the student's view


class Watch:
    """Scores and signals by step."""

    def __init__(self, args: argparse.Namespace, test: Any, truth: list[str], unlabeled_truth: list[str] | None) -> None:
        self.positive, self.seed = DATASETS[args.dataset].positive, args.seed
        self.test, self.truth = test, np.array(truth)
        self.unlabeled_truth = None if unlabeled_truth is None else np.array(unlabeled_truth)
        self.tokens: EncodedCorpus | None = None
        self.rows: dict[int, dict[str, Any]] = {}

    def encoded(self, model: Model) -> EncodedCorpus:
        if self.tokens is None:
            self.tokens = model.encode(self.test)
        return self.tokens

    def __call__(self, line: dict[str, Any], model: Model) -> None:
        """Score the evaluated weights, corrected as they would be in the end."""
        if line["stage"] != "evaluation":
            return
        logits = inference.compute_logits(model, self.encoded(model)).logits + np.asarray(line.get("bias", 0.0))
        row = {"step": line["step"], **self.scores(logits, model.classes), "infomax": line["infomax"]}
        row["source"] = line["source-validation"]
        self.rows[line["step"]] = row | self.rows.get(line["step"], {})
        print(json.dumps(row), flush=True)  # at once, in case the run is interrupted

    def scores(self, logits: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
        found = np.array(classes)[logits.argmax(axis=1)]
        result = {"accuracy": (found == self.truth).mean()}
        if self.positive is not None:
            true, value = self.truth == self.positive, inference.probabilities(logits)[:, classes.index(self.positive)]
            result["f1"] = f1_score(true, found == self.positive, zero_division=0.0)
            result["f1_half"] = f1_score(true, value > np.median(value), zero_division=0.0)
            result["average_precision"] = average_precision_score(true, value)
        return {name: round(float(score), 4) for name, score in result.items()}

    # ------------------------------------------------------------------ signals

    def measure(self, run: pipeline.Run, method: Mtem, step: int) -> None:
        """Measure while the model has the student's weights; changes nothing of the run, its random draws included."""
        state, training = checkpoints.random_state(run.generator), method.model.training
        run.generator.manual_seed(step)
        model, inputs = method.model, run.inputs
        outer = self.outer_batches(run, step)
        rule = self.rule(method, outer)
        test = self.seen(method, self.encoded(model))
        truth = torch.tensor([model.classes.index(label) for label in self.truth], device=model.device)
        row: dict[str, Any] = {
            "signal": self.signal(run, method, rule, outer),
            "test": figures(test, truth, None if method.shared is None else rule_index(rule, test)),
            "index": [round(float(np.quantile(method.index.cpu().numpy(), at)), 4) for at in (0.25, 0.5, 0.75)],
        }
        if self.unlabeled_truth is not None:
            truth = torch.tensor([model.classes.index(label) for label in self.unlabeled_truth], device=model.device)
            row["unlabeled"] = figures(self.seen(method, inputs.target_stream.tokens), truth, method.index)
        if method.shared is not None:
            row["w"] = [round(value, 4) for value in method.shared.w.tolist()]
        self.rows[step] = self.rows.get(step, {}) | row
        print(json.dumps({"step": step, **row}), flush=True)
        model.train(training)
        checkpoints.restore_random_state(state, run.generator)

    def outer_batches(self, run: pipeline.Run, step: int) -> list[Any]:
        inputs = run.inputs
        rows = inputs.outer_rows if len(inputs.outer_rows) else inputs.train_rows
        rows = np.random.default_rng([self.seed, step]).permutation(rows)
        size = min(TEXTS, len(rows) // BATCHES)
        return [inputs.source_stream.of(part) for part in rows[: BATCHES * size].reshape(BATCHES, size)]

    @torch.no_grad()
    def rule(self, method: Mtem, labeled: list[Any]) -> SharedIndex:
        """Return a copy of the method's rule, or one that has learned nothing; its centres are of these texts if it has none."""
        model, context = method.model, method.context
        rule = copy.deepcopy(method.shared)
        if rule is None:
            rule = SharedIndex(context.target_size, context.classes, model.head.in_features, 0.0, model.device)
        if not rule.centres.any():
            with without_dropout(model):
                for batch in labeled:
                    rule.see_labeled(model.logits_and_features(batch.inputs)[1], batch.labels)
        return rule

    @torch.no_grad()
    def seen(self, method: Mtem, tokens: EncodedCorpus, rows: np.ndarray | None = None) -> Seen:
        """Return the teacher's labels, and the student's view of the texts."""
        model = method.model
        rows = np.arange(len(tokens)) if rows is None else rows
        parts = sequential(np.asarray(tokens.lengths)[rows], tokens_per_batch=TOKENS)
        teacher, student, features = [], [], []
        for part in parts:
            inputs = model.collate(tokens, rows[part])
            teacher.append(method.teacher_logits(model.prepare(inputs)))
            with without_dropout(model):
                outputs = model.logits_and_features(model.prepare(method.student_view(inputs)))
            student.append(outputs[0])
            features.append(outputs[1])
        back = torch.from_numpy(np.argsort(np.concatenate(parts))).to(model.device)
        probabilities = torch.softmax(copy.deepcopy(method.context.align)(torch.cat(teacher)[back]), dim=1)
        confidence, labels = probabilities.max(dim=1)
        agreement = torch.softmax(torch.cat(student)[back], dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
        return Seen(labels, confidence, agreement, torch.cat(features)[back])

    def signal(self, run: pipeline.Run, method: Mtem, rule: SharedIndex, outer: list[Any]) -> dict[str, Any]:
        """Compare the gradients that disjoint outer batches have for the same unlabeled texts, in the same view."""
        model, context, stream = method.model, method.context, run.inputs.target_stream
        rows = np.sort(np.random.default_rng(self.seed).permutation(len(run.inputs.target))[:TEXTS])
        target = stream.of(rows)
        view = model.prepare(method.student_view(target.inputs))
        labels, confidence, *_ = self.seen(method, stream.tokens, rows)
        with torch.no_grad(), without_dropout(model):
            logits, features = model.logits_and_features(view)
        agreement = torch.softmax(logits, dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
        phi = rule.describe(target.rows, confidence, agreement, features)
        trusted = (confidence >= method.settings.threshold).to(confidence.dtype)
        index, rate = method.index.clone(), context.learning_rate
        method.index[target.rows] = rule.index(phi)
        context.learning_rate = lambda: run.learning_rate  # that of a schedule's end has hardly a virtual step
        try:
            pseudo = PseudoLabels(labels, confidence, trusted)
            of_texts = [method.index_gradient(view, pseudo, target.rows, batch).gradient.double() for batch in outer]
        finally:
            method.index.copy_(index)
            context.learning_rate = rate
        of_rule = [rule.gradient(gradient.float(), phi).double() for gradient in of_texts]
        centred = [gradient - gradient.mean() for gradient in of_texts]
        return {
            "rule_cosine": mean_of(pairs := cosines(of_rule)), "rule_cosines": pairs,
            "text_correlation": mean_of(cosines(centred)),
            "rule_gradient": [float(f"{value:.3g}") for value in torch.stack(of_rule).mean(dim=0).tolist()],
            "texts": len(outer[0].rows), "trusted": round(float(trusted.mean()), 4),
        }  # fmt: skip


def rule_index(rule: SharedIndex, seen: Seen) -> Tensor:
    """Return the indexes that a rule gives to texts that it never visited."""
    rule = copy.copy(rule)
    rule.stability = torch.ones_like(seen.confidence)
    rows = torch.arange(len(seen.labels), device=seen.labels.device)
    return rule.index(rule.describe(rows, seen.confidence, seen.agreement, seen.features))


def figures(seen: Seen, truth: Tensor, index: Tensor | None) -> dict[str, Any]:
    """Return how often the teacher's label is right, and the AUC of each sign of it; None: it is the same for all texts."""
    right = (seen.labels == truth).cpu().numpy()

    def auc(values: Tensor | None) -> float | None:
        if values is None or float(values.max() - values.min()) == 0 or right.all() or not right.any():
            return None
        return round(float(roc_auc_score(right, values.cpu().numpy())), 4)

    return {
        "right": round(float(right.mean()), 4), "confidence": auc(seen.confidence), "agreement": auc(seen.agreement),
        "index": auc(None if index is None else -index),
    }  # fmt: skip


def cosines(vectors: list[Tensor]) -> list[float]:
    """Return the cosine of every pair; nothing if one of the vectors is zero."""
    if any(not vector.norm() > 0 for vector in vectors):
        return []
    units = [vector / vector.norm() for vector in vectors]
    return [round(float(one @ other), 4) for one, other in itertools.combinations(units, 2)]


def mean_of(values: list[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


class WatchedRun(pipeline.Run):
    """A run that keeps its pretrained encoder, and whose watch sees the method at every evaluation, the beginning included."""

    pretrained: Path | None = None

    def pretrain(self, *arguments: Any) -> None:
        super().pretrain(*arguments)
        if WatchedRun.pretrained is not None:
            write_pretrained(WatchedRun.pretrained, self.model)

    def begin_stage(self, trainer: Any, tensors: dict[str, Tensor], number: int) -> None:
        super().begin_stage(trainer, tensors, number)
        watch = self.observe
        if trainer.name != "adapt" or not isinstance(watch, Watch):
            return
        watch.measure(self, trainer.method, 0)
        after_step = trainer.after_step

        def measured(done: int) -> None:
            after_step(done)
            if done in self.candidates.evaluation_steps:
                watch.measure(self, trainer.method, done)

        trainer.after_step = measured


class Data(NamedTuple):
    """The texts of a target: all of them, or a few for a trial."""

    sources: Any
    unlabeled: list[Any]
    unlabeled_truth: list[str] | None
    test: list[Any]
    truth: list[str]


def read(args: argparse.Namespace) -> Data:
    target = splits.read(args.dataset, args.data, args.target, POOLS[args.dataset])
    division = splits.divide(target, args.seed)
    sources: Any = dict(sorted(target.sources.items()))
    if not args.texts:
        return Data(sources, division.unlabeled, division.unlabeled_labels, division.test, division.truth)

    def few(values: Any) -> Any:  # spread: files have one class after the other
        return None if values is None else [values[int(i)] for i in spread(len(values))]

    def spread(count: int) -> np.ndarray:
        return np.linspace(0, count - 1, min(args.texts, count)).astype(int)

    sources = {name: load_corpus(path, labeled=True) for name, path in sources.items()}
    sources = {name: corpus.select(spread(len(corpus))) for name, corpus in sources.items()}
    parts = division.unlabeled, division.unlabeled_labels, division.test, division.truth
    return Data(sources, *map(few, parts))


def source_model(args: argparse.Namespace, data: Data, folder: Path, share: float, given: dict[str, Any]) -> mtem.Adapted:
    """Train the source model, or take the one in its folder; it must have been trained with the same settings."""
    kept = folder / f"pretrained-{args.pretrain:g}.safetensors"
    folder = folder / ("fold" if share else "all")
    begun = (folder / "run.json").is_file()
    if begun:
        earlier = json.loads((folder / "run.json").read_text())["pretrained"]
        pretrained = None if earlier is None else Path(earlier["path"])
    else:
        pretrained = kept if kept.is_file() else None
    WatchedRun.pretrained = kept if pretrained is None else None
    return mtem.adapt(
        data.sources, data.unlabeled, method="source-only", outer_share=share, output=folder, resume=begun,
        pretrained=pretrained, pretrain_epochs=args.pretrain, **given,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=tuple(POOLS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument(
        "--rules", required=True, help=f"RULE:SETTING=VALUE:..., separated by commas; {', '.join(RULES)}, each also with {FOLD}"
    )
    parser.add_argument("--theta", type=Path, help="folder of the source models: taken from there, or kept there once trained")
    parser.add_argument("--pretrain", type=float, default=0.0, help="passes of pretraining before the source training")
    parser.add_argument("--epochs", type=float, help="passes of the adaptation; by default 12, with pheme 10")
    parser.add_argument("--learning-rate", type=float, help="of the adaptation; by default 5e-5, with pheme the model's")
    parser.add_argument("--set", action="append", default=[], help="SETTING=VALUE of the source models and of all rules")
    parser.add_argument("--texts", type=int, help="a trial: this many texts of each kind, and of each source domain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rules = [text.split(":") for text in args.rules.split(",")]
    if unknown := [name for name, *_ in rules if name.removesuffix(FOLD) not in RULES]:
        parser.error(f"unknown rule '{unknown[0]}': there are {', '.join(RULES)}, each also with {FOLD}")
    running.Run = WatchedRun  # type: ignore[misc]
    data = read(args)
    test = load_corpus(data.test, labeled=False, name="test")
    chosen = {"epochs": args.epochs, "learning_rate": args.learning_rate}
    settings = DEFAULTS[args.dataset] | {name: value for name, value in chosen.items() if value is not None}
    settings |= {"criterion": "last", "evaluations": max(1, round(settings["epochs"]))}
    common = {"model": args.model, "seed": args.seed, "left_out_models": 0, "progress": Progress(quiet=True)}
    common |= {**DATASETS[args.dataset].given, **dict(item.split("=", 1) for item in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        models: dict[float, mtem.Adapted] = {}
        for name, *given in rules:
            share = FOLD_SHARE if name.endswith(FOLD) else 0.0
            if share not in models:
                models[share] = source_model(args, data, args.theta or Path(folder), share, common)
            started = time.monotonic()
            watch = Watch(args, test, data.truth, data.unlabeled_truth)
            rule = {**settings, **RULES[name.removesuffix(FOLD)], **common, **dict(item.split("=", 1) for item in given)}
            adapted = mtem.adapt(
                data.sources, data.unlabeled, method="mtem", source_model=models[share], observe=watch, outer_share=share, **rule
            )
            write(args, ":".join([name, *given]), watch, adapted, round(time.monotonic() - started, 1))


def write(args: argparse.Namespace, rule: str, watch: Watch, adapted: mtem.Adapted, seconds: float) -> None:
    record = adapted.record
    row = {
        "rule": rule, "dataset": args.dataset, "target": args.target, "seed": args.seed, "model": Path(args.model).name,
        "pretrain_epochs": args.pretrain, "epochs": record["settings"]["epochs"],
        "learning_rate": record["resolved"]["learning_rate"], "set": args.set, "trial": args.texts, "texts": record["texts"],
        "candidates": [watch.rows[step] for step in sorted(watch.rows)],
        "seconds": seconds, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": record["versions"],
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    measure = "f1" if watch.positive else "accuracy"
    print(args.target, args.seed, rule, [candidate[measure] for candidate in row["candidates"]], seconds, flush=True)


if __name__ == "__main__":
    main()
