"""Rehearsals against the truth: what they chose, promised and estimated for a target, and what its test set says.

A target's rehearsals are those on its sources. What they choose is looked up in the finals, where every candidate was scored on
the test set. If the chosen learning rate has no final, the best one that has is taken, and the table says so.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtem import metrics
from mtem.atomic import read_json, write_json
from mtem.rehearsal.choice import Choice, choose
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.calibration import calibrate, log_softmax
from mtem.selection.priors import class_weights
from mtem.selection.rehearsed import correct_estimate
from mtem_paper import rehearsals, rehearsed_settings
from mtem_paper.formatting import NOT_RUN, blank_repeats, digits, percent, table
from mtem_paper.protocol import DATASETS, VARIANTS
from mtem_paper.rehearsals import Rehearsed

CALIBRATION = "calibration.json"  # below the folder of the records
MAIN_PRIOR = {"amazon": "none", "pheme": "uniform"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, a method and a seed: what its rehearsals chose, and the final that was run with it.

    Attributes
    ----------
    choice
        By the rehearsals with seed 0.
    wanted
        Whether the final has the learning rate that the rehearsals prefer.
    trials
        The rehearsals with the chosen learning rate, one for each source domain.
    final
        The run on the target.
    """

    dataset: str
    target: str
    method: str
    seed: int
    choice: Choice
    wanted: bool
    trials: tuple[Rehearsed, ...]
    final: Rehearsed

    @property
    def number(self) -> int:
        """The number of the chosen candidate of the final, before the guard."""
        return int(np.argmin(np.abs(self.final.curve().epochs - self.choice.epoch)))

    @property
    def scores(self) -> dict[str, float]:
        """Scores on the test set: before, chosen (guarded), last, by infomax, best."""
        curve = self.final.curve()
        return {
            "before": float(curve.scores[0]),
            "chosen": float(curve.guarded()[self.number]),
            "last": float(curve.scores[-1]),
            "infomax": float(curve.scores[int(np.argmax(curve.infomax))]),
            "best": float(curve.scores.max()),
        }

    def candidate(self, trial: Rehearsed, epoch: float) -> dict[str, Any]:
        """Return the figures of a trial after so many passes."""
        return min(trial.record["candidates"], key=lambda entry: abs(entry["epoch"] - epoch))

    def estimate(self, epoch: float) -> tuple[float, Estimate, float] | None:
        """Return the label-free estimate, the rehearsed one, and the true accuracy after so many passes."""
        entry = self.candidate(self.final, epoch)
        found = {trial.trial.domain: self.candidate(trial, epoch) for trial in self.trials}
        if entry["estimate"] is None or any(other["estimate"] is None for other in found.values()):
            return None
        accuracies = {name: other["accuracy"] for name, other in found.items()}
        errors = {name: other["estimate"] - other["accuracy"] for name, other in found.items()}
        plain = Estimate(entry["estimate"], 0.0, 1.0, "", 0.0, 0.0, 0.0, None)
        return entry["estimate"], correct_estimate(plain, accuracies, errors), entry["accuracy"]


def cases(records: Sequence[Rehearsed], dataset: str, prior: str | None = None) -> list[Case]:
    """Return all cases of a data set under one assumed prior."""
    prior = MAIN_PRIOR[dataset] if prior is None else prior
    own = [
        entry for entry in records if entry.record["dataset"] == dataset and entry.trial.prior == prior and not entry.trial.rare
    ]
    trials = [entry for entry in own if not entry.record["final"] and entry.record["seed"] == 0]
    finals = [entry for entry in own if entry.record["final"]]
    domains = len(DATASETS[dataset].domains) - 1
    found = []
    for target in DATASETS[dataset].targets:
        for method in dict.fromkeys(entry.trial.method for entry in trials):
            here = [entry for entry in trials if entry.record["target"] == target and entry.trial.method == method]
            curves = rehearsed_settings.complete([entry.curve() for entry in here], domains)
            runs = [entry for entry in finals if entry.record["target"] == target and entry.trial.method == method]
            rates = {entry.trial.learning_rate for entry in runs}
            possible = [curve for curve in curves if curve.configuration.learning_rate in rates]
            if not possible:
                continue
            choice, preferred = choose(possible), choose(curves)
            rate = choice.configuration.learning_rate
            found += [
                Case(
                    dataset, target, method, run.record["seed"], choice,
                    rate == preferred.configuration.learning_rate or not preferred.epoch,
                    tuple(entry for entry in here if entry.trial.learning_rate == rate), run,
                )
                for run in runs if run.trial.learning_rate == rate
            ]  # fmt: skip
    return _whole(found, len(DATASETS[dataset].targets))


def _whole(found: Sequence[Case], targets: int) -> list[Case]:
    """Return the cases of methods and seeds that all targets have: means over different targets are not comparable."""
    counts: dict[tuple[str, int], int] = {}
    for case in found:
        counts[case.method, case.seed] = counts.get((case.method, case.seed), 0) + 1
    return [case for case in found if counts[case.method, case.seed] == targets]


def title(method: str) -> str:
    """Return what tables call a method."""
    return next((variant.name for variant in VARIANTS.values() if variant.method == method), method)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _places(records: Sequence[Rehearsed]) -> list[tuple[str, list[Case]]]:
    return [(key, found) for key in DATASETS if (found := cases(records, key))]


def stopping(records: Sequence[Rehearsed]) -> str:
    """Return a table of the scores of the chosen candidates beside others, by method."""
    rows = []
    for key, found in _places(records):
        for method in dict.fromkeys(case.method for case in found):
            own = [case for case in found if case.method == method]
            scores = {name: _mean(case.scores[name] for case in own) for name in own[0].scores}
            gains = [case.scores["chosen"] - case.scores["before"] for case in own]
            other = sum(not case.wanted for case in own)
            rows.append(
                [
                    DATASETS[key].title, title(method), f"{len(own)}{f' ({other} at another rate)' if other else ''}",
                    *(digits(scores[name], 4) for name in ("before", "chosen", "last", "infomax", "best")),
                    digits(_mean(case.choice.mean for case in own), 3, sign=True), digits(_mean(gains), 3, sign=True),
                    digits(min(gains), 3, sign=True),
                ]
            )  # fmt: skip
    header = [
        "data", "method", "runs", "before", "by rehearsal", "last", "by infomax", "best (oracle)", "promised gain", "gain",
        "smallest gain",
    ]  # fmt: skip
    return table(header, blank_repeats(rows)) if rows else NOT_RUN


def automatic(records: Sequence[Rehearsed]) -> str:
    """Return a table of the method that rehearsals choose for each target, beside the best single method."""
    rows = []
    for key, found in _places(records):
        seed0 = [case for case in found if case.seed == 0]
        targets = DATASETS[key].targets
        means = {}
        for method in dict.fromkeys(case.method for case in seed0):
            own = [case for case in seed0 if case.method == method]
            if len(own) == len(targets):
                means[method] = _mean(case.scores["chosen"] for case in own)
        chosen = [
            most_promising([case for case in seed0 if case.target == target and case.method in means]) for target in targets
        ]
        best = max(means, key=lambda method: means[method])
        names = ", ".join(f"{case.target} {title(case.method)}" for case in chosen)
        score = _mean(case.scores["chosen"] for case in chosen)
        rows.append([DATASETS[key].title, names, digits(score, 4), f"{title(best)} {digits(means[best], 4)}"])
    return table(["data", "chosen", "its mean score", "best single method (oracle)"], rows) if rows else NOT_RUN


def most_promising(here: Sequence[Case]) -> Case:
    """Return the case of the method that the rehearsals of a target choose."""
    chosen = choose([trial.curve() for case in here for trial in case.trials])
    return next(case for case in here if case.method == chosen.configuration.method)


def estimates(records: Sequence[Rehearsed]) -> str:
    """Return a table of the errors of estimated accuracies, without and with a rehearsal."""
    rows = []
    for key, found in _places(records):
        for name, epochs in (("source model", [0.0] * len(found)), ("adapted", [case.choice.epoch for case in found])):
            pairs = [case.estimate(epoch) for case, epoch in zip(found, epochs, strict=True)]
            known = [pair for pair in pairs if pair is not None]
            plain = [free - truth for free, _, truth in known]
            errors = [better.accuracy - truth for _, better, truth in known]
            inside = _mean(better.low <= truth <= better.high for _, better, truth in known)
            width = _mean(better.high - better.low for _, better, _ in known)
            rows.append(
                [
                    DATASETS[key].title, name, str(len(known)), digits(_mean(map(abs, plain))), digits(_mean(map(abs, errors))),
                    digits(_mean(errors), sign=True), percent(inside), digits(width, 2),
                ]
            )  # fmt: skip
    header = [
        "data", "model", "runs", "error without", "error with rehearsal", "mean error", "truth inside",
        "width of the interval",
    ]  # fmt: skip
    return table(header, blank_repeats(rows)) if rows else NOT_RUN


def shares(records: Sequence[Rehearsed]) -> str:
    """Return a table of the rehearsed scores with and without assumed class shares, as the domains are and with a rarer class."""
    rows = []
    tried = [entry for entry in records if not entry.record["final"] and entry.record["seed"] == 0]
    for key in DATASETS:
        own = [entry for entry in tried if entry.record["dataset"] == key]
        rare = [name for name in dict.fromkeys(entry.trial.rare for entry in own) if name]
        if not rare:
            continue
        methods = [
            m for m in dict.fromkeys(e.trial.method for e in own) if any(e.trial.method == m and e.trial.rare for e in own)
        ]
        for method in methods:
            for prior in ("none", "uniform"):
                cells = []
                for made_rare in ("", *rare):
                    group = [
                        entry for entry in own
                        if entry.trial.method == method and entry.trial.prior == prior and entry.trial.rare == made_rare
                        and entry.record["factor"] == 2.5
                    ]  # fmt: skip
                    curves = [entry.curve().scores for entry in group]
                    cells += [digits(_mean(c[0] for c in curves)), digits(_mean(c[-1] for c in curves))] if curves else ["", ""]
                rows.append([f"{DATASETS[key].title}, {title(method)}", prior, *cells])
    header = ["method", "assumed shares", "before", "last", "before, rarer", "last, rarer"]
    return table(header, blank_repeats(rows)) if rows else NOT_RUN


# ---------------------------------------------------------------------- confidence

STATES = ("before", "before, source", "after", "after, source", "after, rehearsed")


def measure_calibration(results: Path, outputs: Path) -> int:
    """Measure log loss and calibration error on the test sets, and write them beside the records; return the number of cases.

    Cases whose outputs are not all there keep what was measured before.

    Parameters
    ----------
    results
        The folder of the results.
    outputs
        The folder with the outputs of trials.
    """
    records = rehearsals.of_default_models(rehearsals.read(results))
    path = results / rehearsals.RECORDS / CALIBRATION
    earlier = {_case_key(row): row for row in read_json(path)} if path.is_file() else {}
    measured = []
    for dataset in DATASETS:
        for case in cases(records, dataset):
            names = {"dataset": dataset, "target": case.target, "method": case.method, "seed": case.seed}
            if not all(trial.has_outputs(outputs) for trial in (case.final, *case.trials)):
                if (row := earlier.get(_case_key(names))) is not None:
                    measured.append(row)
                continue
            inside, test = case.final.outputs(outputs)
            assert test is not None
            own = [trial.outputs(outputs)[0] for trial in case.trials]
            number = case.number
            weights = np.concatenate([np.full(len(entry.labels), 1 / len(entry.labels)) for entry in own])
            labels = np.concatenate([entry.labels for entry in own])
            rehearsed = calibrate(np.concatenate([entry.logits[number] for entry in own]), labels, weights)
            held_out = class_weights(inside.held_out_labels, inside.assumed_shares)
            by_source = {k: calibrate(inside.held_out_logits[k], inside.held_out_labels, held_out) for k in (0, number)}
            temperatures = (1.0, by_source[0], 1.0, by_source[number], rehearsed)
            figures = {
                name: _confidence(test.logits[0 if name.startswith("before") else number], test.labels, temperature)
                for name, temperature in zip(STATES, temperatures, strict=True)
            }
            measured.append({**names, **figures})
    write_json(path, measured)
    return len(measured)


def _case_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("dataset", "target", "method", "seed"))


def _confidence(logits: np.ndarray, labels: np.ndarray, temperature: float) -> dict[str, float]:
    classes = [str(number) for number in range(logits.shape[1])]
    result = metrics.evaluate(labels, logits.argmax(axis=1), classes, np.exp(log_softmax(logits, temperature)))
    assert result.log_loss is not None and result.calibration_error is not None
    return {
        "temperature": round(temperature, 4), "log_loss": round(result.log_loss, 5),
        "calibration_error": round(result.calibration_error, 5),
    }  # fmt: skip


def calibration(results: Path) -> str:
    """Return a table of log loss and calibration error, from what `measure_calibration` wrote."""
    path = results / rehearsals.RECORDS / CALIBRATION
    if not path.is_file():
        return NOT_RUN
    measured = read_json(path)
    names = {
        "before": "source model, as trained", "before, source": "source model, temperature from held-out source texts",
        "after": "adapted, as trained", "after, source": "adapted, temperature from held-out source texts",
        "after, rehearsed": "adapted, temperature from the rehearsal",
    }  # fmt: skip
    rows = []
    for key in DATASETS:
        own = [entry for entry in measured if entry["dataset"] == key]
        for state in STATES if own else ():
            values = [_mean(entry[state][name] for entry in own) for name in ("temperature", "log_loss", "calibration_error")]
            rows.append([DATASETS[key].title, names[state], str(len(own)), digits(values[0], 2), *map(digits, values[1:])])
    return table(["data", "model", "runs", "mean temperature", "log loss", "calibration error"], blank_repeats(rows))
