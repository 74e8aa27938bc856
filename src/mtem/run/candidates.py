"""Candidate weights of an adaptation: evaluated without target labels, the best one kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mtem import inference
from mtem.methods.base import Method
from mtem.models.base import Model
from mtem.run.directory import RunDirectory
from mtem.run.inputs import RunInputs
from mtem.run.record import by_class, predicted_shares
from mtem.selection import criteria
from mtem.selection.criteria import CandidateOutputs
from mtem.selection.priors import TargetPrior
from mtem.training.settings import TrainingSettings
from mtem.training.weights import clone, current, load

OnCandidate = Callable[[int, np.ndarray, CandidateOutputs], None]  # step, rows of the target, outputs

DIVERGED = -1e9  # score of weights whose outputs are not finite; JSON has no infinity


def chosen_step(entries: Sequence[Mapping[str, Any]]) -> int:
    """Return the step of the best of some candidates; 0, the source model, if there are none."""
    return int(entries[criteria.choose([entry["score"] for entry in entries])]["step"]) if entries else 0


class Candidates:
    """Evaluates weights during the adaptation and keeps the best.

    Candidate 0 is the source model. About a tenth of the adaptation's cost is spent on evaluations.

    Attributes
    ----------
    entries
        One dict per candidate: step, score by the criterion, source-validation, infomax.
    evaluation_steps
        Steps after which a candidate is evaluated.
    prior
        Assumed class shares of the target.
    """

    def __init__(
        self,
        model: Model,
        inputs: RunInputs,
        settings: TrainingSettings,
        steps: int,
        last_step: int,
        directory: RunDirectory,
        on_candidate: OnCandidate | None = None,
    ) -> None:
        self.model, self.inputs, self.settings, self.directory = model, inputs, settings, directory
        self.on_candidate = on_candidate
        self.prior = TargetPrior()
        self.entries: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}
        self._outputs: dict[int, CandidateOutputs] = {}  # of the source model and of the best candidate, by step
        count = min(settings.evaluations, max(steps, 1))
        planned = (round(steps * (number + 1) / count) for number in range(count))
        self.evaluation_steps = {step for step in planned if step <= last_step} | {last_step} if last_step else set()
        affordable = max(200, int(1.4 * settings.batch_size * steps / count / 2))
        most = settings.evaluation_texts if on_candidate else min(settings.evaluation_texts, affordable)
        draw = np.random.default_rng([settings.seed, 3])
        # A prior correction is as good as its sample, which must not depend on how many steps a method takes.
        sampled = most if settings.target_class_prior == "none" else settings.evaluation_texts
        self.target_sample = np.sort(draw.permutation(len(inputs.target))[:sampled])
        held_out = inputs.held_out_rows
        self.evaluated_rows = held_out[np.sort(draw.permutation(len(held_out))[:most])]

    @property
    def chosen_step(self) -> int:
        """The step of the best candidate so far."""
        return chosen_step(self.entries)

    def evaluate_candidate(self, method: Method, step: int, record_line: Callable[[dict[str, Any]], None]) -> None:
        """Score the method's weights and keep them if they are the best so far.

        Parameters
        ----------
        method
            Whose weights are evaluated.
        step
            How many steps it has taken.
        record_line
            Called with the line for the history while the model has the evaluated weights.
        """
        weights, previous = clone(method.weights()), clone(current(self.model))
        load(self.model, weights)
        meta_loss = None
        if self.settings.criterion == "meta":
            rows = slice(self.settings.batch_size)
            meta_loss = method.meta_loss(
                self.inputs.source_stream.of(self.inputs.held_out_rows[rows]),
                self.inputs.target_stream.of(self.target_sample[rows]),
            )
        outputs = self.outputs(self.evaluated_rows, meta_loss)
        corrected = self.prior.corrected(outputs)
        entry = {"step": step, **{name: criteria.score(name, corrected) for name in ("source-validation", "infomax")}}
        entry = {"step": step, "score": self._score(entry, corrected), **entry}
        entry = {name: value if np.isfinite(value) else DIVERGED for name, value in entry.items()}
        self.entries.append(entry)
        if self.on_candidate is not None:
            self.on_candidate(step, self.target_sample, corrected)
        if step == 0:
            self._outputs = {0: outputs}
        elif self.chosen_step == step:
            self._best = weights
            source = {0: self._outputs[0]} if 0 in self._outputs else {}  # not there after a resume
            self._outputs = {**source, step: outputs}
            self.directory.write_weights(f"best-{step}", weights)
        shares = by_class(self.inputs.classes, predicted_shares(outputs.target_logits))
        line = {"stage": "evaluation", **entry, "target_shares": shares}
        if self.prior.shares is not None and outputs.finite:
            line["bias"] = self.prior.bias(outputs.target_logits).tolist()
        record_line(line)
        load(self.model, previous)

    def _score(self, entry: dict[str, Any], corrected: CandidateOutputs) -> float:
        """Return the score by the criterion; by "last" the number of steps, or "diverged" for weights that have collapsed."""
        if self.settings.criterion != criteria.LAST:
            return criteria.score(self.settings.criterion, corrected)
        before = self.entries[0]["infomax"] if self.entries else entry["infomax"]
        held = criteria.holds_up(before, entry["infomax"], len(self.inputs.classes))
        return float(entry["step"]) if held else DIVERGED

    def best_weights(self) -> dict[str, Tensor]:
        """Return the weights of the chosen step, from memory or from disk."""
        return self._best or self.directory.read_weights(f"best-{self.chosen_step}", current(self.model))

    def outputs(self, rows: np.ndarray, meta_loss: float | None = None) -> CandidateOutputs:
        """Return what the model, as it is now, computes for labeled `rows` and the sample of the target."""
        source = inference.compute_logits(self.model, self.inputs.source_stream.tokens, rows, features=True)
        target = inference.compute_logits(self.model, self.inputs.target_stream.tokens, self.target_sample, features=True)
        assert source.features is not None and target.features is not None
        labels = self.inputs.labels[rows]
        return CandidateOutputs(source.logits, labels, target.logits, source.features, target.features, meta_loss)

    def final_outputs(self, step: int) -> CandidateOutputs:
        """Return the outputs of the weights of `step`, which the model has now, on all held-out texts."""
        cached = self._outputs.get(step)  # missing after a resume
        held_out = self.inputs.held_out_rows
        return cached if cached is not None and len(self.evaluated_rows) == len(held_out) else self.outputs(held_out)
