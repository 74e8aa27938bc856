"""Run one cell: the search over learning rates, the choice without target labels, and the scores on the test set.

Labels of the test set are used only here, to score: `adapt` gets the source, the unlabeled target and, in the semi-supervised
setting, the labeled target texts. The exception is the oracle, whose cells are marked as such.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mtem import inference, methods, metrics, settings
from mtem.data.corpus import Corpus
from mtem.data.loading import load_corpus
from mtem.errors import RunError
from mtem.methods.base import Method
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.adapt import adapt, find_settings
from mtem.run.record import machine, now
from mtem.run.result import Adapted
from mtem.training.weights import add_bias, clone, everything, load
from mtem_paper import pretrained, splits
from mtem_paper.cells import SEMI_SUPERVISED, Cell
from mtem_paper.protocol import DATASETS

OF_THETA = ("pretrain_epochs", "target_labeled_share", "left_out_models")  # settings of a cell that theta_1 has too
POINTS = 40  # lines of a history that are kept
HISTORY = ("step", "temperature", "index_quantiles", "meta_loss", "target_loss", "source_loss")


class Group:
    """The data, the splits and theta_1, which the cells of one group share.

    Parameters
    ----------
    cell
        Any cell of the group.
    data
        The folder of ``mtem data prepare``.
    model, device
        As for ``mtem adapt``.
    source_models
        The folder where theta_1 is kept.
    """

    def __init__(self, cell: Cell, data: Path, model: str, device: str, source_models: Path) -> None:
        self.cell, self.model, self.device, self.source_models = cell, model, device, source_models
        self.encoders = pretrained.Store(source_models / pretrained.FOLDER, model, device)
        target = splits.read(cell.dataset, data, cell.target, cell.pool)
        division = splits.divide(target, cell.seed)
        self.source = load_corpus(target.sources, labeled=True)
        self.target = load_corpus(division.unlabeled, labeled=False, name="target", domain=cell.target)
        self.division, self.examples = division, len(target.examples)
        self.target_labeled: Corpus | None = None
        self.all_labels: Corpus | None = None  # for the oracle
        examples, labels = ([], []) if cell.setting != SEMI_SUPERVISED else (
            division.target_labeled, division.target_labeled_labels
        )  # fmt: skip
        if examples:
            self.target_labeled = load_corpus((examples, labels), labeled=True, name="target_labeled", domain=cell.target)
        if division.unlabeled_labels is not None:
            labeled = division.unlabeled + examples, division.unlabeled_labels + labels
            self.all_labels = load_corpus(labeled, labeled=True, name="oracle", domain=cell.target)
        self.test = load_corpus(division.test, labeled=False, name="test", domain=cell.target)
        self.classes = self.source.classes
        self.truth = np.array([self.classes.index(label) for label in division.truth])
        if len(self.test) != len(self.truth):
            raise RunError(f"{cell.target}: {len(self.truth) - len(self.test)} test texts are empty; remove them from the data")
        self._trained: dict[tuple[Any, ...], Adapted | Exception] = {}

    def begin(self, cell: Cell) -> Adapted:
        """Return theta_1, trained once: the same for all methods except those with their own head, and the oracle.

        A variant may have its own with other settings of `OF_THETA`.
        """
        own = methods.get(cell.method).prepare_model.__func__ is not Method.prepare_model.__func__  # type: ignore[attr-defined]
        of_theta = {name: cell.given[name] for name in OF_THETA if name in cell.given}
        key = cell.variant if own or cell.oracle else "", *of_theta.values()
        if key not in self._trained:
            method = cell.method if own else "source-only"
            accepted = settings.names(*map(type, find_settings(self.model, method, "recommended", {})))
            given = {**DATASETS[cell.dataset].settings_of(cell.model), **of_theta, **cell.overrides}
            given |= {"steps": 0, **oracle_settings(cell)}
            given = {name: given[name] for name in given if name in accepted}
            try:
                self._trained[key] = self.adapt(cell, method, given) if key[0] else self.shared(cell, given)
            except Exception as error:  # every cell that needs it fails without another try
                self._trained[key] = error
        trained = self._trained[key]
        if isinstance(trained, Exception):
            raise trained
        return trained

    def shared(self, cell: Cell, given: Mapping[str, Any]) -> Adapted:
        """Return theta_1 from its folder, trained first if needed: trained again on a GPU, it would differ slightly."""
        parts = find_settings(self.model, "source-only", "recommended", given)
        # Independent of the rules of the adaptation, and of the temperature that only a finished model gets.
        defining = [cell.group, {name: value for name, value in parts.record().items() if name != "calibrate"}]
        digest = hashlib.sha256(json.dumps(defining, sort_keys=True, default=str).encode()).hexdigest()[:8]
        path = self.source_models.joinpath(*cell.group[:-2], f"{cell.target}-{cell.seed}-{digest}")
        if not path.is_dir():
            trained = self.adapt(cell, "source-only", given)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary:
                trained.save(Path(temporary, "run"))
                with contextlib.suppress(OSError):  # another process was first: all use its model
                    Path(temporary, "run").rename(path)
        return Adapted.load(path)

    def adapt(self, cell: Cell, method: str, given: Mapping[str, Any], labeled: Corpus | None = None, **options: Any) -> Adapted:
        """Call `mtem.adapt` on the group's data; `labeled` replaces the labeled target texts.

        Confidences are not calibrated: cells score labels, and in half precision a scaled head may round a few differently.
        """
        default = self.all_labels if cell.oracle else self.target_labeled
        if "source_model" not in options:
            place = cell.dataset, cell.model, cell.pool, cell.target, str(cell.seed)
            options["pretrained"] = self.encoders.find(place, self.source, self.target, {**given, "seed": cell.seed})
        return adapt(
            self.source, self.target, target_labeled=default if labeled is None else labeled, model=self.model,
            method=method, progress=Progress(Console(file=io.StringIO()), quiet=True),
            **options, **{"calibrate": False, **given, "seed": cell.seed, "device": self.device},
        )  # fmt: skip


def oracle_settings(cell: Cell) -> dict[str, Any]:
    """Return settings of oracles: their accuracy is not estimated, so no left-out models are needed."""
    return {"left_out_models": 0} if cell.oracle else {}


class Watch:
    """An observer that scores every candidate on the test set, as it would be saved, and keeps the history."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.candidates: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.tokens: Any = None

    def __call__(self, line: dict[str, Any], model: Model) -> None:
        """Record one line of the run's history."""
        if line["stage"] == "adapt":
            self.history.append({name: line[name] for name in HISTORY if name in line})
        if line["stage"] != "evaluation":
            return
        head_weights = clone({name: value for name, value in everything(model).items() if name.startswith(model.head_path + ".")})
        if "bias" in line:
            add_bias(model, line["bias"])
        value = headline(self.group, self.evaluate(model)[0])
        load(model, head_weights)
        self.candidates.append({"step": line["step"], "criterion_score": line["score"], "score": value})

    def evaluate(self, model: Model) -> tuple[metrics.Metrics, np.ndarray]:
        """Return metrics and predictions of a model on the test set."""
        if self.tokens is None:
            self.tokens = model.encode(self.group.test)
        return evaluate_logits(self.group, inference.compute_logits(model, self.tokens).logits)


def headline(group: Group, result: metrics.Metrics) -> float:
    """Return the score that is reported."""
    positive = DATASETS[group.cell.dataset].positive
    return result.accuracy if positive is None else next(metric.f1 for metric in result.per_class if metric.name == positive)


def solve(cell: Cell, group: Group) -> dict[str, Any]:
    """Run the cell: one adaptation for each learning rate of the search; the best criterion score wins."""
    if cell.oracle and group.all_labels is None:
        return cross_fitted(cell, group)
    theta = group.begin(cell)
    cell_started = time.monotonic()
    own = find_settings(group.model, cell.method, cell.preset, cell.given).training.learning_rate
    rate = theta.record["resolved"]["learning_rate"] if own is None else own
    search: list[dict[str, Any]] = []
    best: tuple[Adapted, Watch] | None = None
    for factor in cell.factors:
        run_started, watch = time.monotonic(), Watch(group)
        adapted = group.adapt(
            cell,
            cell.method,
            {**cell.given, "learning_rate": rate * factor},
            preset=cell.preset,
            source_model=theta,
            observe=watch,
        )
        step = adapted.record["selection"]["chosen_step"]
        chosen = next(entry for entry in watch.candidates if entry["step"] == step)
        entry = {
            "settings": {"learning_rate": rate * factor}, "chosen_step": step, "criterion_score": chosen["criterion_score"],
            "score": chosen["score"], "candidates": watch.candidates, "seconds": round(time.monotonic() - run_started, 2),
        }  # fmt: skip
        if best is None or entry["criterion_score"] > max(other["criterion_score"] for other in search):
            best = adapted, watch
        search.append(entry)
    assert best is not None
    adapted, watch = best
    return result_of(
        cell, group, theta, adapted.record, *watch.evaluate(adapted.model), watch, search, time.monotonic() - cell_started
    )  # fmt: skip


def cross_fitted(cell: Cell, group: Group) -> dict[str, Any]:
    """Run the oracle where the labels of the unlabeled texts are unknown.

    Each half of the test set is predicted by a model that was trained on the sources and the labels of the other half.
    """
    started = time.monotonic()
    division, count = group.division, len(group.truth)
    random = np.random.default_rng([cell.seed, 0x0AC1E])
    half = splits.held_out(division.test_keys, division.truth, 0.5, random)
    halves = half, np.setdiff1d(np.arange(count), half)
    given = {**cell.given, "steps": 0, **oracle_settings(cell)}
    logits = np.zeros((count, len(group.classes)), dtype=np.float32)
    semi = group.target_labeled is not None
    examples, labels = (division.target_labeled, division.target_labeled_labels) if semi else ([], [])
    for rows, others in (halves, halves[::-1]):
        training_data = [division.test[i] for i in others] + examples, [division.truth[i] for i in others] + labels
        labeled = load_corpus(training_data, labeled=True, name="oracle", domain=cell.target)
        adapted = group.adapt(cell, cell.method, given, labeled, preset=cell.preset)
        logits[rows] = inference.compute_logits(adapted.model, adapted.model.encode(group.test), rows).logits
    watch = Watch(group)
    result, predicted = evaluate_logits(group, logits)
    watch.candidates.append({"step": 0, "criterion_score": 0.0, "score": headline(group, result)})
    search = [
        {
            "settings": {}, "chosen_step": 0, "criterion_score": 0.0, "score": headline(group, result),
            "candidates": watch.candidates, "seconds": round(time.monotonic() - started, 2),
        }
    ]  # fmt: skip
    return result_of(cell, group, adapted, adapted.record, result, predicted, watch, search, time.monotonic() - started)


def evaluate_logits(group: Group, logits: np.ndarray) -> tuple[metrics.Metrics, np.ndarray]:
    """Return metrics and predictions on the test set."""
    predicted = logits.argmax(axis=1)
    return metrics.evaluate(group.truth, predicted, group.classes, inference.probabilities(np.nan_to_num(logits))), predicted


def result_of(
    cell: Cell, group: Group, theta: Adapted, record: dict[str, Any], evaluated: metrics.Metrics, predicted: np.ndarray,
    watch: Watch, search: list[dict[str, Any]], seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of the cell's file.

    Parameters
    ----------
    cell, group
        The cell that was run, and its group.
    theta, record
        The source model, and the record of the chosen run.
    evaluated, predicted
        Metrics and predictions on the test set.
    watch, search
        The observer of the chosen run, and an entry for each run of the search.
    seconds
        Time of the cell.
    """
    value = headline(group, evaluated)
    chosen = next(number for number, entry in enumerate(search) if entry["candidates"] is watch.candidates)
    candidates = [(entry["score"], number, entry["step"]) for number, run in enumerate(search) for entry in run["candidates"]]
    candidates.append((value, chosen, record["selection"]["chosen_step"]))  # on a GPU the same weights need not score the same
    best = max(candidates, key=lambda candidate: candidate[0])
    positive = DATASETS[cell.dataset].positive
    figures: dict[str, Any] = {
        "accuracy": evaluated.accuracy,
        "macro_f1": evaluated.macro_f1,
        "f1": {metric.name: metric.f1 for metric in evaluated.per_class},
        "average_precision": {metric.name: metric.average_precision for metric in evaluated.per_class},
    }
    if positive is not None:
        figures["trivial_f1"] = next(metric.trivial_f1 for metric in evaluated.per_class if metric.name == positive)
    result: dict[str, Any] = {
        "dataset": cell.dataset, "model": cell.model, "variant": cell.variant, "method": methods.get(cell.method).name,
        "setting": cell.setting, "pool": cell.pool, "target": cell.target, "seed": cell.seed, "preset": cell.preset,
        "score": value,
        "metrics": figures,
        "selected_by": record["selection"]["criterion"],
        "oracle": cell.oracle,
        "source_score": watch.candidates[0]["score"],
        "target_selected": {"score": best[0], "search": best[1], "step": best[2]},
        "search": search,
        "chosen": chosen,
        "estimate": record["estimate"]["after"] and {
            name: record["estimate"]["after"][name] for name in ("accuracy", "low", "high", "source_model", "method", "left_out")
        },
        "test": {
            "size": len(group.test), "fingerprint": fingerprint(group),
            "rows": bits(group.division.test_rows, group.examples),  # among the target's labeled examples
        },
        "truth": "".join(map(str, group.truth)),
        "predictions": "".join(map(str, predicted)),
        "classes": list(group.classes),
        "texts": {
            "source": len(group.source), "target": len(group.target),
            "target_labeled": record["texts"]["target_labeled"], "test": len(group.test),
        },
        "seconds": round(seconds, 2),
        "source_seconds": theta.record["seconds"]["source"],  # of theta_1, which the cells of a group share
        "settings": record["settings"],
        "resolved": record["resolved"],
        "versions": record["versions"],
        "machine": machine(record["resolved"]["device"]),
        "overrides": dict(cell.overrides),
        "protocol": cell.protocol,
        "finished": now(),
    }  # fmt: skip
    if result["method"] == "mtem":
        points = np.unique(np.linspace(0, len(watch.history) - 1, POINTS).round().astype(int)) if watch.history else np.arange(0)
        result["history"] = [watch.history[number] for number in points]
    plain: dict[str, Any] = json.loads(json.dumps(result, default=str))
    return plain


def fingerprint(group: Group) -> str:
    """Return the sha256 of the test texts in order."""
    digest = hashlib.sha256()
    for text in group.test.texts():
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def bits(rows: list[int], count: int) -> str:
    """Return which of `count` rows are in `rows`, one bit each, as hexadecimal digits; the first row is the highest bit."""
    chosen = np.zeros(count, dtype=bool)
    chosen[rows] = True
    return np.packbits(chosen).tobytes().hex()
