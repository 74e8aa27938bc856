"""What a forecast is made from: the plan of a run's stages, and short timings of their work before the run begins."""

from __future__ import annotations

import copy
import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from mtem import inference
from mtem.methods.alignment import Alignment
from mtem.methods.base import Batch, Context, Method
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.forecast import LONG, LOWER, METHOD, PRETRAIN, SCORE, TRAIN, Forecast, Sample, Stage, whole
from mtem.run.inputs import FROZEN_LIMIT
from mtem.selection.left_out import FOLD
from mtem.training import checkpoints, pretraining
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer

if TYPE_CHECKING:
    from mtem.run.pipeline import Run

Value = TypeVar("Value")

COUNTED_STEPS = 2000  # the tokens of later steps are taken to be the mean of these
SECONDS, SHARE = 12.0, 0.03  # that timings may take: at most so long, and at most this share of the run
FEW = 4  # texts of the first, rough timings
STEPS = 2  # that are timed, of the training and of the method
# Rough costs of a token, in forward passes: whether the run is long, and how many texts can be timed, depend on them.
PRETRAINING_PASSES, TRAINING_PASSES, METHOD_PASSES = 4, 3, 4

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- the plan


def plan(run: Run, stage: str, done: int, lower: dict[str, bool]) -> list[Stage]:
    """Return the stages of a run from a step on.

    Parameters
    ----------
    run
        After `Run.prepare`.
    stage, done
        The stage with which it begins, "pretrain", "source" or "adapt", and the steps of it that are done.
    lower
        For "labeled" and "target": whether the output of the frozen layers is to be computed.
    """
    inputs, candidates, directory = run.inputs, run.candidates, run.directory
    labeled, target = _lengths(inputs.source_stream), _lengths(inputs.target_stream)
    stages = [
        Stage(f"frozen layers, {name} {inputs.unit}", "frozen layers", LOWER, _one_by_one(lengths))
        for name, lengths in (("labeled", labeled), ("target", target))
        if lower[name] and not directory.frozen_path(name).exists()
    ]
    if stage == pretraining.STAGE and run.pretrain_steps:
        work = tokens_by_step(run.all_texts, run.pretrain_steps)
        stages.append(Stage(pretraining.STAGE, "pretraining", PRETRAIN, work, first=done))
    if stage != "adapt":
        work = tokens_by_step(inputs.source_stream, run.source_steps)
        stages.append(Stage("source", "source training", TRAIN, work, first=done if stage == "source" else 0))
    sample = target[candidates.target_sample].sum()
    evaluation, final = labeled[candidates.evaluated_rows].sum() + sample, labeled[inputs.held_out_rows].sum() + sample
    title = "adaptation" if run.last_step else "evaluation"
    fresh = stage != "adapt"
    estimated = run.settings.target_class_prior != "none"
    stages.append(whole("the source model", title, SCORE, fresh * evaluation + estimated * final))
    if run.last_step:
        work = tokens_by_step(inputs.source_stream, run.last_step) + tokens_by_step(inputs.target_stream, run.last_step)
        scored = np.zeros(len(work))
        # A step is reported before the evaluation after it; the last one comes when the progress bar is full.
        scored[[step + 1 for step in candidates.evaluation_steps if step < run.last_step]] = evaluation
        first = 0 if fresh else done
        stages.append(Stage("adapt", title, METHOD, work, np.cumsum(scored), first=first))
        stages.append(whole("the last candidate", title, SCORE, evaluation * (first < run.last_step)))
    for number, part in enumerate(run.left_out_parts()):
        if not directory.has_left_out_part(number):
            stream = run.left_out_stream(part)
            work = tokens_by_step(stream, round(run.settings.source_epochs * stream.per_epoch))
            stages.append(Stage(f"without {part.name}", "left-out models", TRAIN, work))
            scored_tokens = labeled[part.test_rows].sum() + labeled[part.held_out_rows].sum() + sample * (part.kind == FOLD)
            stages.append(whole(f"{part.name} scored", "left-out models", SCORE, scored_tokens))
    if not fresh or len(candidates.evaluated_rows) < len(inputs.held_out_rows):
        stages.append(whole("the chosen weights", "prediction", SCORE, 2 * final))
    for when in (" before the adaptation", "") if directory.persistent else ("",):
        stages.append(Stage(f"predicting the target {inputs.unit}{when}", "prediction", SCORE, _one_by_one(target)))
    return stages


def tokens_by_step(stream: Stream, steps: int) -> np.ndarray:
    """Return the tokens of the first batches of a stream, for every number of batches from 0 to `steps`."""
    lengths = _lengths(stream)
    counts = np.array([lengths[stream.rows(step)].sum() for step in range(min(steps, COUNTED_STEPS))], dtype=np.float64)
    later = np.full(steps - len(counts), counts.mean() if len(counts) else 0.0)
    return np.concatenate([[0.0], np.cumsum(np.concatenate([counts, later]))])


def _one_by_one(lengths: np.ndarray) -> np.ndarray:
    """Return the tokens of the first texts, for every number of them: the longest come first."""
    return np.concatenate([[0.0], np.cumsum(np.sort(lengths)[::-1])])


def _lengths(stream: Stream) -> np.ndarray:
    return np.asarray(stream.tokens.lengths, dtype=np.float64)


# ---------------------------------------------------------------------- the timings


def make_forecast(run: Run, stage: str, done: int) -> Forecast | None:
    """Return the forecast of a run; None if it is short.

    On the CPU a little of every kind of work is timed first, with a copy of the model: the run itself is not changed. Elsewhere
    the speed is that of the run's own stages, and the forecast is known later.
    """
    lower = {"labeled": False, "target": False}
    samples: dict[str, Sample] = {}
    if run.model.device.type == "cpu":
        state = checkpoints.random_state(run.generator)
        try:
            with run.progress.stage("timing a few steps", None), tempfile.TemporaryDirectory(prefix="mtem-") as folder:
                timed = Probe(run, stage, done, Path(folder)).measure()
        except Exception:  # the run itself will say what is wrong, or that nothing is
            logger.debug("no forecast", exc_info=True)
            return None
        finally:
            checkpoints.restore_random_state(state, run.generator)
        if timed is None:
            return None
        samples, lower = timed
    resumed = stage == "adapt" or done > 0
    return Forecast(plan(run, stage, done, lower), samples, started=run.started, say=logger.info, resumed=resumed)


class Probe:
    """Times a little of every kind of work that is left of a run.

    Parameters
    ----------
    run
        After `Run.prepare`. Its model is copied, its random generators are used.
    stage, done
        Where the run begins, as in `plan`.
    folder
        For files.
    """

    def __init__(self, run: Run, stage: str, done: int, folder: Path) -> None:
        self.run, self.stage, self.done, self.folder = run, stage, done, folder
        # Weights that are not trained do not change, and need no copy.
        constant = {id(value): value for value in run.model.parameters() if not value.requires_grad}
        self.model: Model = copy.deepcopy(run.model, cast("dict[int, Any]", constant))
        self.source_rows, self.target_rows = average_rows(run.inputs.source_stream), average_rows(run.inputs.target_stream)

    def measure(self) -> tuple[dict[str, Sample], dict[str, bool]] | None:
        """Return samples by kind of work, and which corpora pass the frozen layers once; None if the run is short."""
        inputs = self.run.inputs
        rough, frozen = self.rough()
        lower = {"labeled": frozen, "target": frozen}
        stages = plan(self.run, self.stage, self.done, lower)
        left = Forecast(stages, rough, started=self.run.started).left()
        assert left is not None
        if left < LONG:
            return None
        kinds = {kind for stage in stages for kind, tokens in stage.tokens(stage.first).items() if tokens}
        share = self.affordable(rough, kinds, min(SECONDS, SHARE * left))
        source_rows, target_rows = (rows[: max(FEW, int(share * len(rows)))] for rows in (self.source_rows, self.target_rows))
        samples, lower = self.scoring(np.concatenate([target_rows, self.next_rows(len(target_rows))]), frozen)
        source = self.batch(inputs.source_stream, source_rows, lower["labeled"])
        target = self.batch(inputs.target_stream, target_rows, lower["target"])
        if PRETRAIN in kinds:
            samples[PRETRAIN] = rough[PRETRAIN]  # it comes first, so that its speed is soon measured
        if TRAIN in kinds:
            samples[TRAIN] = self.steps(SourceOnly, SourceOnlySettings(), source, None, "adamw", lower["labeled"])
        if METHOD in kinds:
            method = self.run.method_cls, self.run.method_settings
            samples[METHOD] = self.steps(*method, source, target, self.run.settings.optimizer, lower["labeled"])
        return samples, lower

    def rough(self) -> tuple[dict[str, Sample], bool]:
        """Return rough samples from a forward pass of a few texts, and whether layers are frozen."""
        stream, rows = self.run.inputs.target_stream, self.target_rows[:FEW]
        plain, tokens = stream.of(rows).inputs, float(_lengths(stream)[rows].sum())
        for _ in range(2):  # the first pass is slower
            below, prepared = timed(lambda: self.model.prepare(plain))
            with torch.no_grad():
                above, _ = timed(lambda: self.model(prepared))  # noqa: B023
        samples = {LOWER: Sample(tokens, below), SCORE: Sample(tokens, above)}
        samples[TRAIN] = Sample(tokens, TRAINING_PASSES * above)
        samples[METHOD] = Sample(tokens, METHOD_PASSES * above)
        samples[PRETRAIN] = Sample(tokens, PRETRAINING_PASSES * above)
        return samples, prepared is not plain

    def affordable(self, rough: dict[str, Sample], kinds: set[str], seconds: float) -> float:
        """Return the share of a batch that can be timed in so many seconds."""
        source = _lengths(self.run.inputs.source_stream)[self.source_rows].sum()
        target = _lengths(self.run.inputs.target_stream)[self.target_rows].sum()
        tokens = {LOWER: source + 3 * target, SCORE: 2 * target, TRAIN: STEPS * source, METHOD: STEPS * (source + target)}
        return float(min(1.0, seconds / sum(tokens[kind] * rough[kind].rate for kind in kinds & tokens.keys())))

    def scoring(self, rows: np.ndarray, frozen: bool) -> tuple[dict[str, Sample], dict[str, bool]]:
        """Time the frozen layers and the scoring of some target texts, as the run does both."""
        inputs, quiet, path = self.run.inputs, Progress(quiet=True), self.folder / "lower.npy"
        lengths = {"labeled": _lengths(inputs.source_stream), "target": _lengths(inputs.target_stream)}
        tokens = float(lengths["target"][rows].sum())
        texts = self.model.encode(inputs.target.select(rows), cache=self.folder)
        samples, lower = {}, {"labeled": False, "target": False}
        if frozen:
            seconds, stored = timed(lambda: self.model.keep_lower(texts, path, quiet, "", float("inf")))
            if stored is not texts:
                samples[LOWER] = Sample(tokens, seconds)
                per_token = path.stat().st_size / tokens
                lower = {name: per_token * counts.sum() <= FROZEN_LIMIT for name, counts in lengths.items()}
                texts = stored if lower["target"] else texts
        samples[SCORE] = Sample(tokens, timed(lambda: inference.compute_logits(self.model, texts))[0])
        return samples, lower

    def batch(self, stream: Stream, rows: np.ndarray, lower: bool) -> Batch:
        """Return a batch as the run will have it: with the output of the frozen layers if that is stored."""
        batch = stream.of(rows)
        return batch._replace(inputs=self.model.prepare(batch.inputs)) if lower else batch

    def next_rows(self, count: int) -> np.ndarray:
        """Return further target rows."""
        return np.resize(average_rows(self.run.inputs.target_stream, place=1), count)

    def steps(
        self, method_cls: type[Method], settings: Any, source: Batch, target: Batch | None, optimizer: str, lower: bool
    ) -> Sample:
        """Time steps of a method."""
        run, inputs = self.run, self.run.inputs
        training = target is None
        count, rate = (run.source_steps, run.source_learning_rate) if training else (run.steps, run.learning_rate)
        method = method_cls(self.model, settings, context := self.context(count, lower, len(source.rows), adapts=not training))
        trainer = Trainer(
            method, run.settings, name="timing", steps=count, learning_rate=rate, source=inputs.source_stream,
            target=None if training else inputs.target_stream, progress=Progress(quiet=True), optimizer=optimizer,
        )  # fmt: skip
        context.learning_rate = trainer.learning_rate
        lengths = [_lengths(inputs.source_stream)[source.rows.numpy()]]
        if target is not None:
            lengths.append(_lengths(inputs.target_stream)[target.rows.numpy()])

        def step(number: int, labeled: Batch, unlabeled: Batch | None) -> float:
            # Only source training has no target batches, and its method ignores them.
            return timed(lambda: method.step(number, labeled, cast(Batch, unlabeled), trainer.update))[0]

        step(0, self.part(source), None if target is None else self.part(target))  # the first step is slower
        seconds = sum(step(min(number, count - 1), source, target) for number in range(1, 1 + STEPS))
        return Sample(STEPS * float(np.concatenate(lengths).sum()), seconds)

    def part(self, batch: Batch) -> Batch:
        """Return the first texts of a batch."""
        count = min(FEW, len(batch.rows))
        labels = None if batch.labels is None else batch.labels[:count]
        inputs, rows = self.model.split(batch.inputs, -(-len(batch.rows) // count))[0]
        return Batch(inputs, labels, batch.rows[:count]) if rows == slice(0, count) else batch

    def context(self, steps: int, lower: bool, texts: int, *, adapts: bool) -> Context:
        """Return what a method knows of the run, with an alignment of its own; `texts` are in a labeled batch."""
        context = dataclasses.replace(self.run.context(steps, adapts=adapts), align=Alignment())
        if (stream := self.run.inputs.target_labeled_stream) is not None:
            labeled = self.batch(stream, stream.rows(0), lower)
            context.target_labeled = lambda step: labeled
        if context.outer is not None and (stream := self.run.inputs.outer_stream) is not None:
            outer = self.batch(stream, average_rows(stream)[:texts], lower)
            context.outer = lambda step: outer
        return context


def average_rows(stream: Stream, place: int = 0) -> np.ndarray:
    """Return the rows of the batch whose tokens are nearest to the mean; or of the next nearest ones."""
    counts = np.diff(tokens_by_step(stream, min(stream.per_epoch, COUNTED_STEPS)))
    nearest = np.argsort(np.abs(counts - counts.mean()), kind="stable")
    return stream.rows(int(nearest[min(place, len(nearest) - 1)]))


def timed(work: Callable[[], Value]) -> tuple[float, Value]:
    """Return the seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value
