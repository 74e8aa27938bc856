"""One adaptation from the loaded corpora on: its two stages, the judging of candidates, checkpoints, the final record."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtem import inference
from mtem.atomic import disk_errors, write_json
from mtem.data.corpus import Corpus
from mtem.data.splits import hold_out
from mtem.errors import RequestError
from mtem.methods.alignment import Alignment
from mtem.methods.base import Context, Method
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.progress import Progress
from mtem.run.record import named, now, shares, versions
from mtem.run.result import Adapted, index_table
from mtem.selection import accuracy_estimate, criteria, diagnostics, priors
from mtem.selection.left_out import FOLD, LeftOut, Part, find_parts, from_tensors, to_tensors
from mtem.tensors import read_tensors, write_tensors
from mtem.training import checkpoints
from mtem.training.checkpoints import Checkpoints, random_state, restore_random_state
from mtem.training.settings import TrainingSettings, find_learning_rates
from mtem.training.streams import Stream, share_of
from mtem.training.trainer import Trainer
from mtem.training.weights import add_bias, clone, current, head_buffers, load

Observer = Callable[[dict[str, Any], Any], None]
FROZEN_LIMIT = 4 * 2**30  # bytes of frozen layers' output kept on disk for each corpus


class Run:
    """One adaptation, from the loaded corpora on."""

    def __init__(
        self,
        model: Any,
        kind: type[Method],
        training: TrainingSettings,
        method_settings: Any,
        source: Corpus,
        target: Corpus,
        few: Corpus | None,
        directory: Path | None,
        workspace: Path,
        progress: Progress,
        request: dict[str, Any],
        *,
        observe: Observer | None = None,
        left_out: list[LeftOut] | None = None,
    ) -> None:
        """With a "source_model" in the request, `model` has that theta_1 already; `left_out` came with it."""
        if training.target_class_prior == "labeled" and few is None:
            raise RequestError(
                "target_class_prior=labeled: there are no labeled target texts; give --target-labeled, or another prior"
            )
        self.model, self.kind, self.settings, self.method_settings = model, kind, training, method_settings
        self.target, self.directory, self.workspace, self.progress = target, directory, workspace, progress
        self.request, self.observe, self.unit = request, observe, target.unit
        self.source_learning_rate, self.rate = find_learning_rates(training, model.default_learning_rates())
        self.checkpoints = Checkpoints(workspace)
        self.generator = torch.Generator().manual_seed(training.seed)
        self.started = self.saved = time.monotonic()
        self.seconds = {"source": 0.0, "adapt": 0.0}
        self.candidates: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self.seen: dict[int, criteria.CandidateOutputs] = {}  # of theta_1 and of the best candidate, by step
        self.source_weights: dict[str, Tensor] = {}
        self.initial = {} if request["source_model"] else clone({**current(model), **head_buffers(model)})
        self.left_out = left_out or []

        # Labeled target texts join the source set; all of them are trained on, so validation is the source's alone.
        train, self.held = hold_out(source, source.classes, training.validation_share, training.seed)
        self.labeled = source if few is None else Corpus.concatenate([source, few])
        self.labels = self.labeled.label_numbers(source.classes)
        self.extra = np.arange(len(source), len(self.labeled))
        self.train = np.concatenate([train, self.extra])
        self.domains, self.domain_numbers = source.domains, source.domain_numbers()
        self.classes = source.classes
        self.shares = np.bincount(self.labels[self.train], minlength=len(self.classes)) / len(self.train)
        self.align = Alignment()

    # ------------------------------------------------------------------ the course of a run

    def go(self, resume: bool) -> Adapted:
        resumed = self.checkpoints.newest() if resume and self.workspace.is_dir() else None
        if self.directory is not None:
            self.workspace.mkdir(parents=True, exist_ok=True)
            if resumed is None:
                history(self.directory).unlink(missing_ok=True)
            write_json(self.directory / "run.json", {"status": "running", **self.about()})
        self.prepare()
        stage, done = "source", 0
        tensors: dict[str, Tensor] = {}
        if resumed is not None:
            tensors, record = resumed
            stage, done = record["stage"], record["done"]
            self.candidates, self.seconds = record["candidates"], record["seconds"]
            truncate(history(self.directory), record["history"])
            self.progress.say(f"resuming: stage {stage}, {done} steps done")
        if stage == "source":
            if not self.request["source_model"]:
                self.train_source(done, tensors)
            self.keep_source()
            tensors, done = {}, 0
        else:
            self.source_weights = self.read_weights("source")
        method = self.adapt(done, tensors)
        return self.finish(method)

    def prepare(self) -> None:
        """Tokens of both corpora, the frozen layers' output if there are any, and the batches."""
        size, seed = self.settings.batch_size, self.settings.seed
        labeled = self.encoded(self.labeled, "labeled")
        target = self.encoded(self.target, "target")
        share = self.settings.target_labeled_share or 0.0
        self.source_stream = Stream(
            self.model, labeled, self.train, self.labels, size, 2 * seed, extra=self.extra, extra_share=share
        )
        self.target_stream = Stream(self.model, target, np.arange(len(self.target)), None, size, 2 * seed + 1)
        self.target_labeled_stream = None
        if len(self.extra):  # the very texts that the labeled batches have of them
            often = self.settings.target_labeled_share or len(self.extra) / len(self.train)
            self.target_labeled_stream = Stream(self.model, labeled, self.extra, self.labels, share_of(size, often), 2 * seed + 1)
        steps = self.settings.steps
        self.steps = round(self.settings.epochs * self.target_stream.per_epoch) if steps is None else steps
        if self.kind is SourceOnly:
            self.steps = 0
        given = bool(self.request["source_model"])
        self.source_steps = 0 if given else round(self.settings.source_epochs * self.source_stream.per_epoch)
        self.choose_evaluations(size)

    def encoded(self, corpus: Corpus, name: str) -> Any:
        with self.progress.stage(f"tokens of the {name} {self.unit}", len(corpus)):
            tokens = self.model.encode(corpus, progress=lambda done, _: self.progress.advance(done))
        path = self.workspace / f"frozen-{name}.npy"
        return self.model.keep_lower(tokens, path, self.progress, f"frozen layers, {name} {self.unit}", FROZEN_LIMIT)

    def choose_evaluations(self, size: int) -> None:
        """When candidates are judged and on how many texts: about a tenth of the adaptation's cost at most.

        The final estimate is made once, and uses all held-out texts.
        """
        count = min(self.settings.evaluations, max(self.steps, 1))
        self.evaluate_at = {round(self.steps * (number + 1) / count) for number in range(count)} if self.steps else set()
        affordable = max(200, int(1.4 * size * self.steps / count / 2))
        most = min(self.settings.evaluation_texts, affordable)
        draw = np.random.default_rng([self.settings.seed, 3])
        # A correction of the prior is no better than its sample: it must not depend on how many steps a method takes.
        seen = most if self.settings.target_class_prior == "none" else self.settings.evaluation_texts
        self.target_sample = np.sort(draw.permutation(len(self.target))[:seen])
        self.evaluated_rows = self.held[np.sort(draw.permutation(len(self.held))[:most])]

    def train_source(self, done: int, tensors: dict[str, Tensor]) -> None:
        """Stage 1: theta_1."""
        method = SourceOnly(self.model, SourceOnlySettings(), self.context(self.source_steps))
        trainer = self.trainer(method, "source", self.source_steps, self.source_learning_rate, None, "adamw", "linear")
        self.begin(trainer, tensors, stage=1)
        trainer.run(done)

    def keep_source(self) -> None:
        self.source_weights = clone({**current(self.model), **head_buffers(self.model)})
        if self.directory is not None:
            write_tensors(self.workspace / "source.safetensors", self.source_weights)

    def adapt(self, done: int, tensors: dict[str, Tensor]) -> Method:
        """Stage 2: the method, from theta_1, with candidate 0 = theta_1."""
        load(self.model, self.source_weights)
        self.align = self.assumed_shares()
        context = self.context(self.steps)
        torch.manual_seed(self.settings.seed * 10 + 3)  # what the method draws for its own parts
        method = self.kind(self.model, self.method_settings, context)
        trainer = self.trainer(method, "adapt", self.steps, self.rate, self.target_stream)
        context.learning_rate = trainer.learning_rate
        self.begin(trainer, tensors, stage=2)
        if not self.candidates:
            self.judge(method, 0)
            self.checkpoint(trainer, 0)
        trainer.run(done)
        return method

    def finish(self, method: Method) -> Adapted:
        """Choose, estimate, write."""
        chosen = criteria.choose([entry["score"] for entry in self.candidates])
        step = self.candidates[chosen]["step"]
        self.train_left_out()
        load(self.model, self.source_weights)
        before = self.final_outputs(0)
        if step:
            load(self.model, self.best or self.read_weights(f"best-{step}"))
        after = self.final_outputs(step) if step else before
        source_alike = self.with_prior(before)  # the source model as this one is: corrected, if it is
        corrected, after = self.correct_prior(after)
        first = self.estimate(before)
        then = first
        if after is not before:
            alike = self.estimate(source_alike, self.assumed()) if step else None
            anchor = None if alike is None else (alike, source_alike.target_logits)
            then = self.estimate(after, self.assumed(), anchor)
        told = diagnostics.warnings(
            self.shares,
            before.target_logits,
            after.target_logits,
            len(self.target),
            self.classes,
            held_out=len(self.held),
            unit=self.unit,
        )
        if self.steps and step == 0:
            told.insert(
                0,
                f"the source model is kept: by {self.settings.criterion} no weights of the adaptation were better than it "
                f"({self.candidates[0]['score']:.4f}); the adapted ones were not used",
            )
        with self.progress.stage(f"predicting the target {self.unit}", len(self.target)):
            scores = inference.compute_logits(self.model, self.target_stream.tokens, progress=self.progress).logits
        record = {
            "status": "done",
            **self.about(),
            "finished": now(),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "steps": {"source": self.source_steps, "adapt": self.steps},
            "selection": {
                "criterion": self.settings.criterion,
                "chosen_step": step,
                "kept_source_model": step == 0,
                "candidates": self.candidates,
            },
            "estimate": {
                name: None if one is None else dataclasses.asdict(one) for name, one in (("before", first), ("after", then))
            },
            "left_out": [
                {"kind": one.kind, "name": one.name, "texts": len(one.labels), "accuracy": round(float(one.right.mean()), 4)}
                for one in self.left_out
            ],
            "class_shares": {
                "source_labels": named(self.classes, self.shares),
                "target_before": named(self.classes, shares(before.target_logits)),
                "target_after": named(self.classes, shares(scores)),
            },
            "target_class_prior": corrected,
            "warnings": told,
        }
        index = method.indexes()
        adapted = Adapted(
            self.model, record, index_table(self.target, self.classes, scores, index), self.source_weights, self.directory,
            self.left_out,
        )  # fmt: skip
        if self.directory is not None:
            adapted.save(self.directory)
            self.tidy()
        for line in told:
            self.progress.notice(line)
        return adapted

    # ------------------------------------------------------------------ class shares of the target

    def assumed_shares(self) -> Alignment:
        """By the setting `prior`; what is estimated is estimated with the source model."""
        kind = self.settings.target_class_prior
        if kind == "none":
            return Alignment()
        seen = self.evidence(self.held)
        evidence = seen.source_logits, seen.source_labels, seen.target_logits
        shares = priors.assumed(kind, self.shares, evidence, self.labels[self.extra])
        return Alignment(torch.tensor(shares, dtype=torch.float32, device=self.model.device))

    def correct_prior(self, seen: criteria.CandidateOutputs) -> tuple[dict[str, Any] | None, criteria.CandidateOutputs]:
        """Give the model the biases with which its mean prediction on target texts is what is assumed; and what it says then."""
        if self.align.shares is None:
            return None, seen
        bias = self.prior_bias(seen.target_logits)
        add_bias(self.model, bias)
        shares = self.align.shares.cpu().numpy()
        told = {
            "kind": self.settings.target_class_prior,
            "shares": named(self.classes, shares),
            "bias": named(self.classes, bias),
        }
        return told, self.with_prior(seen)

    def with_prior(self, seen: criteria.CandidateOutputs) -> criteria.CandidateOutputs:
        """What the model would say with those biases; source texts count as if their classes had the assumed shares too."""
        if self.align.shares is None or not seen.finite:
            return seen
        bias = self.prior_bias(seen.target_logits)
        return dataclasses.replace(
            seen, source_logits=seen.source_logits + bias, target_logits=seen.target_logits + bias,
            source_weights=priors.class_weights(seen.source_labels, self.assumed()),
        )  # fmt: skip

    def assumed(self) -> np.ndarray | None:
        return None if self.align.shares is None else self.align.shares.double().cpu().numpy()

    def prior_bias(self, scores: np.ndarray) -> np.ndarray:
        assert self.align.shares is not None
        return priors.correction(scores, self.align.shares.double().cpu().numpy())

    # ------------------------------------------------------------------ judging candidates

    def judge(self, method: Method, step: int) -> None:
        """Score the method's weights without target labels; keep them if they are the best so far."""
        weights = clone(method.weights())
        kept = clone(current(self.model))
        load(self.model, weights)
        meta_loss = None
        if self.settings.criterion == "meta":
            size = self.settings.batch_size
            meta_loss = method.meta_loss(
                self.source_stream.of(self.held[:size]), self.target_stream.of(self.target_sample[:size])
            )
        evidence = self.evidence(self.evaluated_rows, meta_loss)
        shipped = self.with_prior(evidence)
        cheap = {name: criteria.score(name, shipped) for name in ("source-validation", "infomax")}
        entry = {"step": step, "score": criteria.score(self.settings.criterion, shipped), **cheap}
        entry = {name: value if np.isfinite(value) else -1e9 for name, value in entry.items()}
        self.candidates.append(entry)
        line = {"stage": "evaluation", **entry, "target_shares": named(self.classes, shares(evidence.target_logits))}
        if self.align.shares is not None and evidence.finite:
            line["bias"] = self.prior_bias(evidence.target_logits).tolist()
        self.record(line)
        load(self.model, kept)
        if step == 0:
            self.seen = {0: evidence}
        elif criteria.choose([entry["score"] for entry in self.candidates]) == len(self.candidates) - 1:
            self.best = weights
            self.seen = {number: self.seen[number] for number in self.seen if number == 0} | {step: evidence}
            if self.directory is not None:
                write_tensors(self.workspace / f"best-{step}.safetensors", weights)

    def evidence(self, held: np.ndarray, meta_loss: float | None = None) -> criteria.CandidateOutputs:
        """What the model as it is now says about held-out source texts and a sample of the target."""
        source = inference.compute_logits(self.model, self.source_stream.tokens, held, features=True)
        target = inference.compute_logits(self.model, self.target_stream.tokens, self.target_sample, features=True)
        return criteria.CandidateOutputs(
            source.logits, self.labels[held], target.logits, source.features, target.features, meta_loss
        )

    def final_outputs(self, step: int) -> criteria.CandidateOutputs:
        """That of the weights of `step`, which the model has now, on all held-out texts."""
        seen = self.seen.get(step)  # a resumed run has not seen them
        return seen if seen is not None and len(self.evaluated_rows) == len(self.held) else self.evidence(self.held)

    def estimate(
        self,
        seen: criteria.CandidateOutputs,
        shares: np.ndarray | None = None,
        anchor: tuple[accuracy_estimate.Estimate, np.ndarray] | None = None,
    ) -> accuracy_estimate.Estimate | None:
        """Of a model that is corrected for these class shares, if any. None where there is too little to estimate from."""
        if not seen.finite or (len(self.held) < accuracy_estimate.FEWEST_HELD_OUT_TEXTS and not self.left_out):
            return None
        return accuracy_estimate.estimate_accuracy(
            seen.source_logits, seen.source_labels, seen.target_logits, left_out=self.left_out, target_shares=shares,
            anchor=anchor, seed=self.settings.seed,
        )  # fmt: skip

    # ------------------------------------------------------------------ models that have not seen what they are tested on

    def train_left_out(self) -> None:
        """`self.left_out`, unless it came with the source model; the model's weights are others afterwards."""
        if self.request["source_model"] or not self.source_steps:
            return
        parts = find_parts(
            self.domains, self.domain_numbers, self.labels, self.train, self.held, self.extra,
            most=self.settings.left_out_models, texts=self.settings.evaluation_texts, seed=self.settings.seed,
        )  # fmt: skip
        state = random_state(self.generator)
        for number, part in enumerate(parts):
            path, about = self.workspace / f"left-out-{number}.safetensors", [{"kind": part.kind, "name": part.name}]
            if not path.exists():
                write_tensors(path, to_tensors([self.left_out_model(part, number)]))
            self.left_out += from_tensors(read_tensors(path), about)
        restore_random_state(state, self.generator)

    def left_out_model(self, part: Part, number: int) -> LeftOut:
        """A source model from the same start as theta_1, trained without the part, and what it says."""
        load(self.model, self.initial)
        tokens, settings = self.source_stream.tokens, self.settings
        extra = np.intersect1d(self.extra, part.trained)
        stream = Stream(
            self.model, tokens, part.trained, self.labels, settings.batch_size, 2 * settings.seed, extra=extra,
            extra_share=settings.target_labeled_share or 0.0,
        )  # fmt: skip
        steps = round(settings.source_epochs * stream.per_epoch)
        torch.manual_seed(settings.seed * 10 + 4)
        Trainer(
            SourceOnly(self.model, SourceOnlySettings(), self.context(steps)), settings, name=f"without {part.name}", steps=steps,
            learning_rate=self.source_learning_rate, source=stream, target=None, progress=self.progress, optimizer="adamw", schedule="linear",
        ).run()  # fmt: skip
        scores, held = (inference.compute_logits(self.model, tokens, rows).logits for rows in (part.tested, part.held))
        target = scores
        if part.kind == FOLD:
            target = inference.compute_logits(self.model, self.target_stream.tokens, self.target_sample).logits
        return LeftOut(part.kind, part.name, scores, self.labels[part.tested], held, self.labels[part.held], target)

    # ------------------------------------------------------------------ the machinery

    def context(self, steps: int) -> Context:
        return Context(
            steps,
            len(self.target),
            len(self.classes),
            self.generator,
            lambda: 0.0,
            source_size=len(self.labeled),
            target_labeled_rows=torch.from_numpy(self.extra).to(self.model.device),
            target_labeled=self.target_labeled_stream,
            class_weights=self.class_weights(),
            align=self.align,
        )

    def class_weights(self) -> Tensor | None:
        if self.settings.class_weights == "none":
            return None
        weights = 1 / (len(self.classes) * np.maximum(self.shares, 1 / len(self.train)))
        return torch.tensor(weights, dtype=torch.float32, device=self.model.device)

    def trainer(
        self, method: Method, stage: str, steps: int, rate: float, target: Stream | None,
        optimizer: str | None = None, schedule: str | None = None,
    ) -> Trainer:  # fmt: skip
        begun = time.monotonic() - self.seconds[stage]

        def after(done: int) -> None:
            self.seconds[stage] = time.monotonic() - begun
            judged = stage == "adapt" and done in self.evaluate_at
            if judged:
                self.judge(method, done)
            if judged or time.monotonic() - self.saved >= self.settings.checkpoint_seconds:
                self.checkpoint(trainer, done)

        trainer = Trainer(
            method, self.settings, name=stage, steps=steps, learning_rate=rate, source=self.source_stream, target=target,
            progress=self.progress, optimizer=optimizer, schedule=schedule, record=self.record, after=after,
        )  # fmt: skip
        return trainer

    def begin(self, trainer: Trainer, tensors: dict[str, Tensor], stage: int) -> None:
        """A fresh stage draws from its own seed; a resumed one from where it stood."""
        if not tensors:
            torch.manual_seed(self.settings.seed * 10 + stage)
            return
        checkpoints.restore(tensors, trainer, self.align, self.generator)

    def checkpoint(self, trainer: Trainer, done: int) -> None:
        if self.directory is None:
            return
        size = history(self.directory).stat().st_size if history(self.directory).exists() else 0
        record = {
            "stage": trainer.name,
            "done": done,
            "candidates": self.candidates,
            "seconds": self.seconds,
            "history": size,
        }
        offset = self.source_steps + 1 if trainer.name == "adapt" else 0
        self.checkpoints.write(f"step-{offset + done}", checkpoints.take(trainer, self.align, self.generator), record)
        # Weights that the newest checkpoint no longer calls the best are only now superfluous.
        best = self.candidates[criteria.choose([entry["score"] for entry in self.candidates])]["step"] if self.candidates else 0
        for place in self.workspace.glob("best-*.safetensors"):
            if place.name != f"best-{best}.safetensors":
                place.unlink()
        self.saved = time.monotonic()

    def record(self, line: dict[str, Any]) -> None:
        if self.observe is not None:
            state = random_state(self.generator)  # whatever the observer draws, the run goes on as it would have
            self.observe(line, self.model)
            restore_random_state(state, self.generator)
        if self.directory is not None:
            path = history(self.directory)
            with disk_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seconds": round(time.monotonic() - self.started, 2), **line}) + "\n")

    def read_weights(self, name: str) -> dict[str, Tensor]:
        return read_tensors(self.workspace / f"{name}.safetensors")

    def tidy(self) -> None:
        """After a finished run only the source model's weights stay, for comparison, and what models without a domain said."""
        self.checkpoints.clear()
        for pattern in ("best-*.safetensors", "frozen-*.npy", "left-out-*.safetensors"):
            for place in self.workspace.glob(pattern):
                place.unlink()

    def about(self) -> dict[str, Any]:
        return {
            **self.request,
            "seed": self.settings.seed,
            "resolved": {
                "device": str(self.model.device),
                "precision": str(self.model.precision or torch.float32).removeprefix("torch."),
                "frozen_layers": self.model.frozen_layers,
                "max_length": self.model.max_length,
                "source_learning_rate": self.source_learning_rate,
                "learning_rate": self.rate,
                "threads": torch.get_num_threads(),
            },
            "versions": versions(),
            "texts": {
                "source_trained_on": len(self.train),
                "source_held_out": len(self.held),
                "target": len(self.target),
                "target_labeled": len(self.extra),
            },
        }


# ---------------------------------------------------------------------- small helpers


def history(directory: Path) -> Path:
    return directory / "history.jsonl"


def truncate(path: Path, size: int) -> None:
    """Lines written after the checkpoint will be written again."""
    if path.exists():
        os.truncate(path, size)
