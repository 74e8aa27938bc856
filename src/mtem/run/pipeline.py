"""The stages of a run: pretrain the encoder, train the source model, adapt, choose and estimate without target labels, write."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtem import inference, parallel
from mtem.data.corpus import Corpus
from mtem.errors import RequestError
from mtem.methods.base import Context, Method
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models import integrity
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.candidates import Candidates, OnCandidate, chosen_step
from mtem.run.directory import PRETRAINED, SOURCE, RunDirectory
from mtem.run.forecast import Forecast
from mtem.run.inputs import RunInputs
from mtem.run.overview import count_words, draw_map
from mtem.run.probe import make_forecast
from mtem.run.record import by_class, now, peak_memory, predicted_shares, versions
from mtem.run.result import Adapted, index_table
from mtem.selection import accuracy_estimate, diagnostics, priors
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.calibration import calibrate
from mtem.selection.criteria import CandidateOutputs
from mtem.selection.left_out import FOLD, LeftOut, Part, find_parts
from mtem.selection.rehearsed import Advice, correct_estimate, outside_warnings
from mtem.training import checkpoints, pretraining
from mtem.training.settings import TrainingSettings, find_learning_rates
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem.training.weights import add_bias, clone, current, head_buffers, load, scale_head, strip_prefix

STEPS = "pretraining-steps"  # beside the weights of an encoder of posts

Observer = Callable[[dict[str, Any], Model], None]

logger = logging.getLogger(__name__)


class Run:
    """One adaptation, from the loaded corpora on.

    Parameters
    ----------
    model
        With a "source_model" in the request it has that model's weights already.
    method_cls, method_settings
        The method of the adaptation and its settings.
    training
        The settings that all methods share, after `mtem.run.defaults.resolve`.
    source, target, target_labeled
        Labeled source texts, unlabeled target texts, labeled target texts if there are any.
    directory
        Where the run is written.
    request
        What was asked for: the first part of run.json.
    observe
        Called with every line of the history and the model.
    on_candidate
        Called with the step, the evaluated target rows and the outputs of every candidate, the source model among them.
    left_out
        Logits of left-out models that came with the source model or with a rehearsal.
    advice
        What a rehearsal advises for the method.
    """

    def __init__(
        self,
        model: Model,
        method_cls: type[Method],
        training: TrainingSettings,
        method_settings: Any,
        source: Corpus,
        target: Corpus,
        target_labeled: Corpus | None,
        directory: RunDirectory,
        progress: Progress,
        request: dict[str, Any],
        *,
        observe: Observer | None = None,
        on_candidate: OnCandidate | None = None,
        left_out: list[LeftOut] | None = None,
        advice: Advice | None = None,
    ) -> None:
        if training.target_class_prior == "labeled" and target_labeled is None:
            raise RequestError(
                "target_class_prior=labeled: there are no labeled target texts; give --target-labeled, or another prior"
            )
        self.pretrains = bool(training.pretrain_epochs and not request["source_model"] and not request["pretrained"])
        if self.pretrains:
            pretraining.check_pretraining(model, training)
        self.model, self.method_cls, self.settings, self.method_settings = model, method_cls, training, method_settings
        self.directory, self.progress, self.request, self.observe = directory, progress, request, observe
        self.on_candidate, self.advice = on_candidate, advice
        self.source_learning_rate, self.learning_rate = find_learning_rates(training, model.default_learning_rates())
        self.generator = torch.Generator().manual_seed(training.seed)
        self.started = self.saved = time.monotonic()
        self.seconds = {pretraining.STAGE: 0.0, "source": 0.0, "adapt": 0.0}
        self.source_weights: dict[str, Tensor] = {}
        self.resumed: checkpoints.Checkpoint | None = None
        self.kept_best = 0  # the best step of the checkpoint before
        self.initial = {} if request["source_model"] else clone({**current(model), **head_buffers(model)})
        self.left_out = left_out or []
        self.forecast: Forecast | None = None
        self.inputs = RunInputs(model, training, source, target, target_labeled)

    # ------------------------------------------------------------------ the stages

    def run(self, resume: bool) -> Adapted:
        """Run all stages, from the newest checkpoint on if `resume`. Several processes run them together."""
        with parallel.together():
            return self.run_stages(resume)

    def run_stages(self, resume: bool) -> Adapted:
        """Run all stages, from the newest checkpoint on if `resume`."""
        self.directory.start({"status": "running", **self.description()})
        self.pretrain_posts()
        self.prepare()
        stage, done = pretraining.STAGE, 0
        tensors: dict[str, Tensor] = {}
        self.resumed = self.directory.newest_checkpoint(self.check_checkpoint) if resume else None
        if self.resumed is not None:
            tensors, record = self.resumed.tensors, self.resumed.record
            stage, done = record["stage"], record["done"]
            self.candidates.entries, self.seconds = record["candidates"], self.seconds | record["seconds"]
            logger.info("resuming: stage %s, %d steps done", stage, done)
        self.kept_best = self.candidates.chosen_step
        self.directory.truncate_history(0 if self.resumed is None else self.resumed.record["history"])
        if not self.progress.quiet and not parallel.is_together():  # the timings are of one process
            self.progress.outlook = self.forecast = make_forecast(self, stage, done)
        self.inputs.keep_lower(self.directory, self.progress)
        if self.pretrain_steps:
            if stage == pretraining.STAGE:
                self.pretrain(done, tensors)
                tensors, done = {}, 0
            else:
                self.initial = self.directory.read_weights(PRETRAINED, self.initial)
        if stage != "adapt":
            if not self.request["source_model"]:
                self.train_source(done, tensors)
            self.source_weights = clone({**current(self.model), **head_buffers(self.model)})
            self.directory.write_weights(SOURCE, self.source_weights)
            tensors, done = {}, 0
        else:
            self.source_weights = self.directory.read_weights(SOURCE, {**current(self.model), **head_buffers(self.model)})
        method = self.adapt(done, tensors)
        return self.finish(method)

    def check_checkpoint(self, found: checkpoints.Checkpoint) -> None:
        """Refuse a checkpoint that is not of this run, or without the weights that a run needs to go on from it."""
        record, model = found.record, current(self.model)
        steps = {pretraining.STAGE: self.pretrain_steps, "source": self.source_steps, "adapt": self.last_step}
        if not 0 <= record["done"] <= steps.get(record["stage"], -1):
            raise RequestError(f"{found.path}: its record.json names a step that this run does not have")
        integrity.check_tensors(strip_prefix(found.tensors, "model."), model, str(found.path), advice="")
        if record["stage"] != pretraining.STAGE and self.pretrain_steps:
            self.directory.read_weights(PRETRAINED, self.initial)
        if record["stage"] == "adapt":
            self.directory.read_weights(SOURCE, {**model, **head_buffers(self.model)})
            if best := chosen_step(record["candidates"]):
                self.directory.read_weights(f"best-{best}", model)

    def pretrain_posts(self) -> None:
        """Before anything is encoded: pretrain the encoder of the posts, if there is one; a resumed run reads what it wrote."""
        self.posts_steps = 0
        if not self.pretrains or not self.model.threads:
            return
        steps = torch.tensor(0)
        if self.directory.persistent and self.directory.weights_path(PRETRAINED).exists():
            try:
                weights = self.directory.read_weights(PRETRAINED, {**self.model.pretrained_weights(), STEPS: steps})
            except RequestError as error:
                logger.warning("%s; the encoder is pretrained again", error)
            else:
                self.posts_steps = int(weights.pop(STEPS))
                self.model.load_pretrained(weights)
                return
        started, corpora = time.monotonic(), [self.inputs.labeled, self.inputs.target]
        self.posts_steps = pretraining.pretrain_model(self.model, corpora, self.settings, self.progress)
        self.seconds[pretraining.STAGE] = time.monotonic() - started
        self.directory.write_weights(PRETRAINED, {**self.model.pretrained_weights(), STEPS: torch.tensor(self.posts_steps)})

    def prepare(self) -> None:
        """Encode the texts, and find the number of steps and when candidates are evaluated."""
        self.inputs.encode(self.progress)
        steps = self.settings.steps
        assert self.settings.epochs is not None
        self.steps = round(self.settings.epochs * self.inputs.target_stream.per_epoch) if steps is None else steps
        if self.method_cls is SourceOnly:
            self.steps = 0
        stop = self.settings.stop_epochs
        self.last_step = self.steps if stop is None else min(self.steps, round(stop * self.inputs.target_stream.per_epoch))
        has_source_model = bool(self.request["source_model"])
        self.pretrain_steps = 0
        if self.pretrains and not self.model.threads:
            self.all_texts = pretraining.all_texts(
                self.model, [self.inputs.source_stream.tokens, self.inputs.target_stream.tokens], self.settings
            )
            self.pretrain_steps = round((self.settings.pretrain_epochs or 0.0) * self.all_texts.per_epoch)
        self.source_steps = 0 if has_source_model else round(self.settings.source_epochs * self.inputs.source_stream.per_epoch)
        self.candidates = Candidates(
            self.model, self.inputs, self.settings, self.steps, self.last_step, self.directory, self.on_candidate
        )  # fmt: skip

    def pretrain(self, done: int, tensors: dict[str, Tensor]) -> None:
        """Before stage 1: train the encoder to restore masked words of all texts. Left-out models begin from it too."""
        method = pretraining.new_method(self.model, self.settings, self.context(self.pretrain_steps))
        rate = pretraining.find_learning_rate(self.model, self.settings)
        trainer = self.trainer(
            method, pretraining.STAGE, self.pretrain_steps, rate, None, "adamw", "linear", source=self.all_texts
        )
        self.begin_stage(trainer, tensors, number=pretraining.SEED)
        trainer.run(done)
        self.generator.manual_seed(self.settings.seed)  # as in a run that begins from this run's source model
        self.initial = clone({**current(self.model), **head_buffers(self.model)})
        self.directory.write_weights(PRETRAINED, self.initial)

    def train_source(self, done: int, tensors: dict[str, Tensor]) -> None:
        """Stage 1: train the source model, theta_1."""
        method = SourceOnly(self.model, SourceOnlySettings(), self.context(self.source_steps))
        trainer = self.trainer(method, "source", self.source_steps, self.source_learning_rate, None, "adamw", "linear")
        self.begin_stage(trainer, tensors, number=1)
        if self.pretrain_steps and not tensors:
            self.checkpoint(trainer, 0)
        trainer.run(done)

    def adapt(self, done: int, tensors: dict[str, Tensor]) -> Method:
        """Stage 2: run the method from theta_1 on. Candidate 0 is theta_1."""
        load(self.model, self.source_weights)
        self.candidates.prior = self.find_prior()
        context = self.context(self.steps, adapts=True)
        torch.manual_seed(self.settings.seed * 10 + 3)  # for modules that the method creates
        method = self.method_cls(self.model, self.method_settings, context)
        target = self.balanced_target() if self.settings.balance_target else self.inputs.target_stream
        trainer = self.trainer(method, "adapt", self.steps, self.learning_rate, target)
        context.learning_rate = trainer.learning_rate
        self.begin_stage(trainer, tensors, number=2)
        if not self.candidates.entries:
            self.candidates.evaluate_candidate(method, 0, self.record_line)
            self.checkpoint(trainer, 0)
        trainer.run(done)
        return method

    def finish(self, method: Method) -> Adapted:
        """Stage 3: choose the weights, estimate the accuracy, calibrate the confidence, predict the target, write."""
        inputs, prior, step = self.inputs, self.candidates.prior, self.candidates.chosen_step
        self.train_left_out_models()
        load(self.model, self.source_weights)
        before = self.candidates.final_outputs(0)
        source_logits = self.predict_target(" before the adaptation") if self.directory.persistent else None
        if step:
            load(self.model, self.candidates.best_weights())
        after = self.candidates.final_outputs(step) if step else before
        if self.directory.persistent and parallel.is_main():
            self.directory.write_overview(
                draw_map(inputs, self.candidates.target_sample, before, after), count_words(inputs.labeled, inputs.target)
            )
        before_corrected = prior.corrected(before)  # the source model, corrected as this one is
        prior_record, after = self.correct_prior(after)
        estimates = self.estimates(before, before_corrected, after, adapted=step > 0)
        warnings = diagnostics.result_warnings(
            inputs.class_shares, before.target_logits, after.target_logits, len(inputs.target), inputs.classes,
            held_out=len(inputs.held_out_rows), unit=inputs.unit,
        )  # fmt: skip
        if self.advice is not None:
            shares = predicted_shares(before_corrected.target_logits)
            confidence = float(inference.probabilities(before_corrected.target_logits).max(axis=1).mean())
            warnings += outside_warnings(self.advice, inputs.classes, shares, confidence, inputs.unit)
        if self.last_step and step == 0:
            score = self.candidates.entries[0]["score"]
            warnings.insert(0, diagnostics.source_model_kept(self.settings.criterion, score))
        temperature, origin = self.choose_temperature(after)
        scale_head(self.model, 1 / temperature)
        logits = self.predict_target()
        record = {
            "status": "done",
            **self.description(),
            "teacher_and_view": self.teacher_and_view(),
            "finished": now(),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "memory": peak_memory(str(self.model.device)),
            "forecast": None if self.forecast is None else self.forecast.record(),
            "steps": {
                pretraining.STAGE: self.pretrain_steps + self.posts_steps,
                "source": self.source_steps,
                "adapt": self.last_step,
            },
            "selection": {
                "criterion": self.settings.criterion,
                "chosen_step": step,
                "kept_source_model": step == 0,
                "candidates": self.candidates.entries,
            },
            "estimate": {name: estimate and dataclasses.asdict(estimate) for name, estimate in estimates.items()},
            "left_out": [result.description() for result in self.left_out],
            "class_shares": {
                "source_labels": by_class(inputs.classes, inputs.class_shares),
                "target_before": by_class(inputs.classes, predicted_shares(before.target_logits)),
                "target_after": by_class(inputs.classes, predicted_shares(logits)),
            },
            "target_class_prior": prior_record,
            "temperature": {"value": temperature, "from": origin},
            "warnings": warnings,
        }
        table = index_table(inputs.target, inputs.classes, logits, method.indexes(), source_logits)
        adapted = Adapted(self.model, record, table, self.source_weights, self.directory.path, self.left_out)
        if self.directory.persistent and parallel.is_main():
            adapted.save(self.directory.root)
            self.directory.remove_intermediate()
        parallel.agreed(None)  # the other processes wait until all is written
        for line in warnings:
            logger.warning(line)
        return adapted

    def balanced_target(self) -> Stream:
        """Return batches of the target in which the classes come equally often, by the predictions of the source model."""
        classes = self.predict_target(" to balance the batches").argmax(axis=1)
        stream, settings = self.inputs.target_stream, self.settings
        return Stream(
            self.model, stream.tokens, np.arange(len(classes)), None, settings.batch_size, 2 * settings.seed + 1, groups=classes
        )

    def predict_target(self, when: str = "") -> np.ndarray:
        """Return the logits of all target texts by the model as it is now."""
        inputs = self.inputs
        with self.progress.stage(f"predicting the target {inputs.unit}{when}", len(inputs.target)):
            return inference.compute_logits(self.model, inputs.target_stream.tokens, progress=self.progress).logits

    # ------------------------------------------------------------------ class shares of the target

    def find_prior(self) -> priors.TargetPrior:
        """Return the class shares assumed by the setting `target_class_prior`, estimated with the source model if needed."""
        setting = self.settings.target_class_prior
        if setting == "auto" and not len(self.inputs.target_labeled_labels):
            setting = self.model.prior_without_labels
        if setting == "none":
            return priors.TargetPrior()
        outputs = self.candidates.outputs(self.inputs.held_out_rows)
        shares = priors.assumed_shares(
            setting, self.inputs.class_shares, outputs.source_logits, outputs.source_labels, outputs.target_logits,
            self.inputs.target_labeled_labels,
        )  # fmt: skip
        return priors.TargetPrior.from_shares(shares, self.model.device)

    def correct_prior(self, outputs: CandidateOutputs) -> tuple[dict[str, Any] | None, CandidateOutputs]:
        """Add the biases with which the mean prediction on the target has the assumed shares; return record and new outputs."""
        prior, classes = self.candidates.prior, self.inputs.classes
        if prior.shares is None:
            return None, outputs
        bias = prior.bias(outputs.target_logits)
        add_bias(self.model, bias)
        record = {"kind": self.settings.target_class_prior}
        return record | {"shares": by_class(classes, prior.shares), "bias": by_class(classes, bias)}, prior.corrected(outputs)

    # ------------------------------------------------------------------ confidence

    def choose_temperature(self, outputs: CandidateOutputs) -> tuple[float, str]:
        """Choose the temperature that the logits of the final model are divided by.

        Parameters
        ----------
        outputs
            Of the final model before the division, on all held-out source texts.

        Returns
        -------
        tuple[float, str]
            The temperature and what it was fitted on; or 1 and the reason why none was fitted.
        """
        held_out, unit = len(outputs.source_labels), self.inputs.unit
        if not self.settings.calibrate:
            return 1.0, "calibrate=false"
        if self.advice is not None and outputs.finite:
            adapted = self.candidates.chosen_step > 0
            return (self.advice.temperature_after if adapted else self.advice.temperature_before), "rehearsal"
        if held_out < accuracy_estimate.FEWEST_HELD_OUT_TEXTS:
            return 1.0, f"only {held_out} source {unit} were held out"
        if not outputs.finite:
            return 1.0, "the model's outputs are not finite"
        return calibrate(outputs.source_logits, outputs.source_labels, outputs.source_weights), f"held-out source {unit}"

    # ------------------------------------------------------------------ estimates

    def estimates(
        self, before: CandidateOutputs, before_corrected: CandidateOutputs, after: CandidateOutputs, *, adapted: bool
    ) -> dict[str, Estimate | None]:
        """Return the accuracy estimates of the source model ("before") and of the chosen one ("after")."""
        uncorrected = self.estimate(before)
        shares = self.candidates.prior.shares
        if after is before:
            estimated = uncorrected
        else:
            anchor = self.estimate(before_corrected, shares) if adapted else None
            reference = None if anchor is None else (anchor, before_corrected.target_logits)
            estimated = self.estimate(after, shares, reference)
        if self.advice is None or self.inputs.target_labeled_stream is not None:  # labeled target texts are better evidence
            return {"before": uncorrected, "after": estimated}
        advice, plain = self.advice, shares is None  # rehearsed source models have the assumed shares too
        known = (advice.accuracy_after, advice.errors_after) if adapted else (advice.accuracy_before, advice.errors_before)
        return {
            "before": correct_estimate(uncorrected, advice.accuracy_before, advice.errors_before)
            if uncorrected is not None and plain
            else uncorrected,
            "after": estimated and correct_estimate(estimated, *known),
        }

    def estimate(
        self,
        outputs: CandidateOutputs,
        shares: np.ndarray | None = None,
        anchor: tuple[Estimate, np.ndarray] | None = None,
    ) -> Estimate | None:
        """Estimate the accuracy of a model that is corrected for `shares`; None where there is too little data."""
        too_few = len(self.inputs.held_out_rows) < accuracy_estimate.FEWEST_HELD_OUT_TEXTS
        if not outputs.finite or (too_few and not self.left_out):
            return None
        return accuracy_estimate.estimate_accuracy(
            outputs.source_logits, outputs.source_labels, outputs.target_logits, left_out=self.left_out, target_shares=shares,
            anchor=anchor, seed=self.settings.seed,
        )  # fmt: skip

    def train_left_out_models(self) -> None:
        """Train source models without one domain each, unless their logits came with the source model.

        Afterwards the model has other weights.
        """
        state = checkpoints.random_state(self.generator)
        for number, part in enumerate(self.left_out_parts()):
            result = self.directory.read_left_out_part(number, part.kind, part.name)
            if parallel.agreed(result is None):
                self.directory.write_left_out_part(number, self.left_out_model(part))
                parallel.agreed(None)  # it is written before others read it
                result = self.directory.read_left_out_part(number, part.kind, part.name)
            assert result is not None
            self.left_out.append(result)
        checkpoints.restore_random_state(state, self.generator)

    def left_out_parts(self) -> list[Part]:
        """Return what is left out of the additional source models; nothing if there are none to be trained."""
        if self.left_out or self.request["source_model"] or not self.source_steps:
            return []
        inputs = self.inputs
        return find_parts(
            inputs.domains, inputs.domain_numbers, inputs.labels, inputs.train_rows, inputs.held_out_rows,
            inputs.target_labeled_rows, most=self.settings.left_out_models, texts=self.settings.evaluation_texts,
            seed=self.settings.seed,
        )  # fmt: skip

    def left_out_stream(self, part: Part) -> Stream:
        """Return the labeled batches without `part`."""
        inputs, settings = self.inputs, self.settings
        return Stream(
            self.model, inputs.source_stream.tokens, part.train_rows, inputs.labels, settings.batch_size, 2 * settings.seed,
            extra=part.among(inputs.target_labeled_rows), extra_share=settings.target_labeled_share or 0.0,
        )  # fmt: skip

    def left_out_model(self, part: Part) -> LeftOut:
        """Train a source model from the initial weights without `part`, and return its logits."""
        load(self.model, self.initial)
        inputs, settings = self.inputs, self.settings
        tokens, stream = inputs.source_stream.tokens, self.left_out_stream(part)
        steps = round(settings.source_epochs * stream.per_epoch)
        torch.manual_seed(settings.seed * 10 + 4)
        method = SourceOnly(self.model, SourceOnlySettings(), self.context(steps))
        Trainer(
            method, settings, name=f"without {part.name}", steps=steps, learning_rate=self.source_learning_rate, source=stream,
            target=None, progress=self.progress, optimizer="adamw", schedule="linear",
        ).run()  # fmt: skip
        logits, held_out = (
            inference.compute_logits(self.model, tokens, rows).logits for rows in (part.test_rows, part.held_out_rows)
        )
        target = logits
        if part.kind == FOLD:
            target = inference.compute_logits(self.model, inputs.target_stream.tokens, self.candidates.target_sample).logits
        labels, held_out_labels = inputs.labels[part.test_rows], inputs.labels[part.held_out_rows]
        return LeftOut(part.kind, part.name, logits, labels, held_out, held_out_labels, target)

    # ------------------------------------------------------------------ training, checkpoints, history

    def context(self, steps: int, *, adapts: bool = False) -> Context:
        """Return what a method may know of the run; the teacher and the view are of the adaptation."""
        inputs = self.inputs
        return Context(
            steps,
            len(inputs.target),
            len(inputs.classes),
            self.generator,
            lambda: 0.0,
            source_size=len(inputs.labeled),
            target_labeled_rows=torch.from_numpy(inputs.target_labeled_rows).to(self.model.device),
            target_labeled=inputs.target_labeled_stream,
            outer=inputs.outer_stream if adapts else None,
            class_weights=inputs.class_weights(),
            align=self.candidates.prior.alignment,
            **(self.teacher_and_view() if adapts else {}),
        )

    def teacher_and_view(self) -> dict[str, Any]:
        """Return the recipe of the adaptation."""
        return self.settings.teacher_and_view(self.steps, frozen=self.model.frozen_layers > 0)

    def trainer(
        self, method: Method, stage: str, steps: int, learning_rate: float, target: Stream | None,
        optimizer: str | None = None, schedule: str | None = None, source: Stream | None = None,
    ) -> Trainer:  # fmt: skip
        """Return the trainer of a stage, with evaluations and checkpoints after its steps."""
        start = time.monotonic() - self.seconds[stage]

        def after_step(done: int) -> None:
            self.seconds[stage] = time.monotonic() - start
            evaluated = stage == "adapt" and done in self.candidates.evaluation_steps
            if evaluated:
                self.candidates.evaluate_candidate(method, done, self.record_line)
            if evaluated or parallel.agreed(time.monotonic() - self.saved >= self.settings.checkpoint_seconds):
                self.checkpoint(trainer, done)

        trainer = Trainer(
            method, self.settings, name=stage, steps=steps, learning_rate=learning_rate,
            source=source or self.inputs.source_stream, target=target, progress=self.progress, optimizer=optimizer,
            schedule=schedule, record=self.record_line, after_step=after_step,
            last_step=self.last_step if stage == "adapt" else None,
            before_stop=lambda done: self.checkpoint(trainer, done),
            describe=None if stage == pretraining.STAGE else self.name_texts,
        )  # fmt: skip
        return trainer

    def name_texts(self, kind: str, rows: list[int]) -> list[str]:
        """Return file and row of some texts of the labeled or the target batches, for messages."""
        corpus = self.inputs.target if kind == "target" else self.inputs.labeled
        return [corpus.where(row) for row in rows]

    def begin_stage(self, trainer: Trainer, tensors: dict[str, Tensor], number: int) -> None:
        """Seed a fresh stage, or restore a resumed one."""
        if tensors:
            try:
                checkpoints.restore(tensors, trainer, self.candidates.prior.alignment, self.generator)
            except (RequestError, RuntimeError, TypeError) as error:  # a random state of another length
                path = None if self.resumed is None else self.resumed.path
                raise RequestError(f"{path}: {error}; remove this folder, and --resume goes on from an older one") from error
        else:
            torch.manual_seed(self.settings.seed * 10 + number)
        parallel.copy_from_main(trainer.parameters)

    def checkpoint(self, trainer: Trainer, done: int) -> None:
        """Write everything that a resumed run needs."""
        if not self.directory.persistent:
            return
        record = {
            "stage": trainer.name,
            "done": done,
            "candidates": self.candidates.entries,
            "seconds": self.seconds,
            "history": self.directory.history_size(),
        }
        before_source = self.pretrain_steps + 1 if self.pretrain_steps else 0
        offsets = {pretraining.STAGE: 0, "source": before_source, "adapt": before_source + self.source_steps + 1}
        tensors = checkpoints.collect(trainer, self.candidates.prior.alignment, self.generator)
        self.directory.checkpoints.write(f"step-{offsets[trainer.name] + done}", tensors, record)
        # Only now the older best weights are no longer needed by any checkpoint: the one before is kept too.
        best = self.candidates.chosen_step
        self.directory.keep_best({self.kept_best, best})
        self.kept_best = best
        self.saved = time.monotonic()

    def record_line(self, line: dict[str, Any]) -> None:
        """Write a line of the history, and hand it to the observer, whose random draws do not change the run."""
        if self.observe is not None and parallel.is_main():
            state = checkpoints.random_state(self.generator)
            with parallel.alone():
                self.observe(line, self.model)
            checkpoints.restore_random_state(state, self.generator)
        self.directory.append_history({"seconds": round(time.monotonic() - self.started, 2), **line})

    def resolved(self) -> dict[str, Any]:
        """Return what was found for this device and this model, for run.json."""
        return {
            "device": str(self.model.device),
            "precision": str(self.model.precision or torch.float32).removeprefix("torch."),
            "frozen_layers": self.model.frozen_layers,
            "max_length": self.model.max_length,
            "pretrain_epochs": self.settings.pretrain_epochs,
            "pretrain_learning_rate": pretraining.find_learning_rate(self.model, self.settings) if self.pretrains else None,
            "source_learning_rate": self.source_learning_rate,
            "epochs": self.settings.epochs,
            "learning_rate": self.learning_rate,
            "view_radius": self.settings.view_radius,
            "threads": torch.get_num_threads(),
            "processes": parallel.size(),
        }

    def description(self) -> dict[str, Any]:
        """Return the part of run.json that is known before the first step."""
        return {
            **self.request,
            "seed": self.settings.seed,
            "resolved": self.resolved(),
            "versions": versions(),
            "texts": {
                "source_trained_on": len(self.inputs.train_rows),
                "source_held_out": len(self.inputs.held_out_rows),
                "source_outer": len(self.inputs.outer_rows),
                "target": len(self.inputs.target),
                "target_labeled": len(self.inputs.target_labeled_rows),
            },
        }
