"""From the outputs of the trials to the advice: what to use, what it was worth, and how far estimates were off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtem.rehearsal.choice import Choice, Configuration, Curve, choose
from mtem.rehearsal.figures import Figures, candidate_figures
from mtem.rehearsal.plan import has_own_head
from mtem.rehearsal.trials import TrialOutputs
from mtem.selection.calibration import calibrate
from mtem.selection.criteria import LAST
from mtem.selection.left_out import DOMAIN, LeftOut
from mtem.selection.rehearsed import SOURCE_ONLY, Advice


@dataclasses.dataclass(frozen=True)
class Scored:
    """A trial with the figures of its candidates."""

    outputs: TrialOutputs
    figures: list[Figures]

    @property
    def configuration(self) -> Configuration:
        """What was tried."""
        trial = self.outputs.trial
        return Configuration(trial.method, trial.learning_rate, trial.prior)

    def curve(self, classes: int) -> Curve:
        """Return the scores along the trial."""
        trial = self.outputs.trial
        return Curve(
            self.configuration, trial.domain, trial.rare, self.outputs.epochs, np.array([entry.score for entry in self.figures]),
            self.outputs.infomax, classes,
        )  # fmt: skip

    def at(self, epoch: float) -> int:
        """Return the number of the candidate that a run of so many passes would keep."""
        kept = self.curve(self.outputs.logits.shape[2]).kept()
        return int(kept[np.argmin(np.abs(self.outputs.epochs - epoch))])


def analyse(
    outputs: Sequence[TrialOutputs], classes: Sequence[str], metric: str, resolved: Mapping[str, Any]
) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return the results for rehearsal.json, and the logits of the source models for the domains they have not seen.

    Parameters
    ----------
    outputs
        Of all trials.
    classes, metric
        Class names, and what is compared.
    resolved
        "epochs" of the trials, and by method the "settings" that were found for the device.
    """
    scored = [Scored(trial, candidate_figures(trial, metric, classes)) for trial in outputs]
    names = list(dict.fromkeys(trial.outputs.trial.method for trial in scored))
    choices = {name: choose([t.curve(len(classes)) for t in scored if t.outputs.trial.method == name]) for name in names}
    overall = choose([trial.curve(len(classes)) for trial in scored])
    best = overall.configuration.method
    choices[best] = overall
    advice = {name: advise(choices[name], scored, resolved) for name in names}
    recommended, why = recommend(best, choices)
    plain = [name for name in names if not has_own_head(name)]  # source-only ships the usual head
    like = best if best in plain or not plain else plain[0]
    advice[SOURCE_ONLY] = without_adapting(advice[like], resolved["settings"][like])
    left_out = left_out_logits(scored)
    return {
        "recommended": recommended,
        "why": why,
        "advice": {name: dataclasses.asdict(entry) for name, entry in advice.items()},
        "trials": [describe(trial, choices[trial.outputs.trial.method]) for trial in scored],
        "left_out": [entry.description() for entry in left_out],
    }, left_out


def recommend(best: str, choices: Mapping[str, Choice]) -> tuple[str, str]:
    """Return the recommended method and why."""
    choice = choices[best]
    where = f"the mean of {len(choice.gains)} rehearsed domain{'s' if len(choice.gains) > 1 else ''}"
    if not choice.epoch:
        return SOURCE_ONLY, f"no gain was larger than the noise from pass to pass in {where}"
    interval = "" if choice.low is None else f" ({choice.low:+.3f} to {choice.high:+.3f})"
    why = f"{best} gained {choice.mean:+.3f}{interval} in {where}"
    others = sorted((name for name in choices if name != best), key=lambda name: -choices[name].score)
    if others:
        why += f"; next is {others[0]} with {choices[others[0]].mean:+.3f}"
    return best, why


def advise(choice: Choice, scored: Sequence[Scored], resolved: Mapping[str, Any]) -> Advice:
    """Return the advice for one method."""
    configuration = choice.configuration
    own = [trial for trial in scored if trial.configuration == configuration]
    whole = [trial for trial in own if not trial.outputs.trial.rare]
    settings = {
        "learning_rate": configuration.learning_rate, "target_class_prior": configuration.prior,
        "epochs": float(resolved["epochs"]), "stop_epochs": choice.epoch, "evaluations": int(resolved["epochs"]),
        "criterion": LAST, **resolved["settings"][configuration.method],
    }  # fmt: skip
    sources = [trial.figures[0] for trial in own]
    shares = np.array([entry.shares for entry in sources]).round(4)
    confidences = [round(entry.confidence, 4) for entry in sources]
    return Advice(
        method=configuration.method, settings=settings, adapt=choice.epoch > 0, gains=choice.gains, mean=choice.mean,
        low=choice.low, high=choice.high, score=choice.score,
        accuracy_before=accuracies(whole, 0.0), accuracy_after=accuracies(whole, choice.epoch),
        errors_before=estimate_errors(whole, 0.0), errors_after=estimate_errors(whole, choice.epoch),
        temperature_before=temperature(whole, 0.0), temperature_after=temperature(whole, choice.epoch),
        shares=[shares.min(axis=0).tolist(), shares.max(axis=0).tolist()], confidence=[min(confidences), max(confidences)],
    )  # fmt: skip


def without_adapting(advice: Advice, found: Mapping[str, Any]) -> Advice:
    """Return the advice for the source model as it is, from that for a method and its settings that were found for the device."""
    settings = {"target_class_prior": advice.settings["target_class_prior"], **found}
    return dataclasses.replace(
        advice, method=SOURCE_ONLY, settings=settings, adapt=False, gains=dict.fromkeys(advice.gains, 0.0), mean=0.0, low=0.0,
        high=0.0, score=advice.score - advice.mean, accuracy_after=advice.accuracy_before, errors_after=advice.errors_before,
        temperature_after=advice.temperature_before,
    )  # fmt: skip


def accuracies(trials: Sequence[Scored], epoch: float) -> dict[str, float]:
    """Return the true accuracy after so many passes, by domain."""
    return {trial.outputs.trial.domain: round(trial.figures[trial.at(epoch)].accuracy, 5) for trial in trials}


def estimate_errors(trials: Sequence[Scored], epoch: float) -> dict[str, float]:
    """Return estimated less true accuracy after so many passes, by domain."""
    found = ((trial.outputs.trial.domain, trial.figures[trial.at(epoch)]) for trial in trials)
    return {domain: round(entry.estimate - entry.accuracy, 5) for domain, entry in found if entry.estimate is not None}


def temperature(trials: Sequence[Scored], epoch: float) -> float:
    """Return the temperature with which the logits after so many passes fit the labels; every domain counts the same."""
    logits = [trial.outputs.logits[trial.at(epoch)] for trial in trials]
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in logits])
    labels = np.concatenate([trial.outputs.labels for trial in trials])
    return round(calibrate(np.nan_to_num(np.concatenate(logits)), labels, weights), 5)


def left_out_logits(scored: Sequence[Scored]) -> list[LeftOut]:
    """Return logits of the source models for the domains they have not seen, uncorrected if there are such."""
    best: dict[str, TrialOutputs] = {}
    for trial in scored:
        outputs = trial.outputs
        if not outputs.trial.rare and (outputs.trial.domain not in best or outputs.trial.prior == "none"):
            best.setdefault(outputs.trial.domain, outputs)
            if outputs.trial.prior == "none" and best[outputs.trial.domain].trial.prior != "none":
                best[outputs.trial.domain] = outputs
    return [
        LeftOut(
            DOMAIN, domain, outputs.logits[0], outputs.labels, outputs.held_out_logits[0], outputs.held_out_labels,
            outputs.logits[0],
        )
        for domain, outputs in best.items()
    ]  # fmt: skip


def describe(trial: Scored, choice: Choice) -> dict[str, Any]:
    """Return the entry of a trial in rehearsal.json."""
    outputs, figures = trial.outputs, trial.figures
    scores = [entry.score for entry in figures]
    chosen = trial.configuration == choice.configuration
    infomax = int(np.argmax(outputs.infomax))
    return {
        **dataclasses.asdict(outputs.trial),
        "texts": len(outputs.labels),
        "before": round(scores[0], 5),
        "after": round(scores[trial.at(choice.epoch)], 5) if chosen else None,  # at the advised number of passes
        "last": round(scores[-1], 5),
        "best": round(max(scores), 5),
        "by_infomax": round(scores[infomax], 5),
        "seconds": outputs.seconds,
        "candidates": [entry.to_dict() for entry in figures],
    }
