"""One cell: the small search over learning rates, the choice without target labels, and what target labels say of it.

Labels of the test set are looked at here and nowhere below: `adapt` gets the source, the unlabeled target and, in the
semi-supervised setting, the few labeled texts. The oracle is the exception, and says so.
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
from mtem.data.loading import load_corpus
from mtem.errors import RunError
from mtem.methods.base import Method
from mtem.progress import Progress
from mtem.run.adapt import adapt, find_settings
from mtem.run.record import machine, now
from mtem.run.result import Adapted
from mtem.training.weights import add_bias, clone, everything, load
from mtem_paper import splits
from mtem_paper.cells import Cell
from mtem_paper.protocol import DATASETS, SEMI_SUPERVISED

POINTS = 40  # of a history that are kept
HISTORY = ("step", "temperature", "index_quantiles", "meta_loss", "target_loss", "source_loss")


class Group:
    """What the cells of one group share: corpora, the division, theta_1, which is also kept in the folder `source_models`."""

    def __init__(self, cell: Cell, data: Path, model: str, device: str, source_models: Path) -> None:
        self.cell, self.model, self.device, self.source_models = cell, model, device, source_models
        there = splits.read(cell.dataset, data, cell.target, cell.pool)
        division = splits.divide(there, cell.seed)
        self.source = load_corpus(there.sources, labeled=True)
        self.target = load_corpus(division.unlabeled, labeled=False, name="target", domain=cell.target)
        self.division, self.examples = division, len(there.examples)
        self.few = self.all_labels = None
        semi = cell.setting == SEMI_SUPERVISED
        if semi:
            self.few = load_corpus((division.few, division.target_labeled_labels), labeled=True, name="few", domain=cell.target)
        if division.unlabeled_labels is not None:
            known = division.unlabeled + (division.few if semi else [])
            labels = division.unlabeled_labels + (division.target_labeled_labels if semi else [])
            self.all_labels = load_corpus((known, labels), labeled=True, name="oracle", domain=cell.target)
        self.test = load_corpus(division.test, labeled=False, name="test", domain=cell.target)
        self.classes = self.source.classes
        self.truth = np.array([self.classes.index(label) for label in division.truth])
        if len(self.test) != len(self.truth):
            raise RunError(f"{cell.target}: {len(self.truth) - len(self.test)} test texts are empty; remove them from the data")
        self._begun: dict[str, Adapted | Exception] = {}

    def begin(self, cell: Cell) -> Adapted:
        """theta_1, trained once: the same for all methods but those with a head of their own, and the oracle."""
        kind = methods.get(cell.method)
        own = kind.prepare_model.__func__ is not Method.prepare_model.__func__
        key = cell.variant if own or cell.oracle else ""
        if key not in self._begun:
            method = cell.method if own else "source-only"
            known = settings.names(*map(type, find_settings(self.model, method, "recommended", {})))
            given = {**DATASETS[cell.dataset].given, **cell.overrides, "steps": 0, **alone(cell)}
            given = {name: given[name] for name in given if name in known}
            try:
                self._begun[key] = self.adapt(cell, method, given) if key else self.shared(cell, given)
            except Exception as error:  # every cell that would begin there fails, and need not try again
                self._begun[key] = error
        found = self._begun[key]
        if isinstance(found, Exception):
            raise found
        return found

    def shared(self, cell: Cell, given: Mapping[str, Any]) -> Adapted:
        """theta_1 from its folder; trained first, if it is not there. Trained again on a GPU it would not be quite the same."""
        parts = find_settings(self.model, "source-only", "recommended", given)
        defining = [cell.group, parts.record()]  # whatever the rules of the adaptation are
        digest = hashlib.sha256(json.dumps(defining, sort_keys=True, default=str).encode()).hexdigest()[:8]
        place = self.source_models.joinpath(*cell.group[:-2], f"{cell.target}-{cell.seed}-{digest}")
        if not place.is_dir():
            trained = self.adapt(cell, "source-only", given)
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as temporary:
                trained.save(Path(temporary, "run"))
                with contextlib.suppress(OSError):  # another process was first: all go on with what it found
                    Path(temporary, "run").rename(place)
        return Adapted.load(place)

    def adapt(self, cell: Cell, method: str, given: Mapping[str, Any], labeled: Any = None, **options: Any) -> Adapted:
        known = self.all_labels if cell.oracle else self.few
        return adapt(
            self.source, self.target, target_labeled=known if labeled is None else labeled, model=self.model,
            method=method, progress=Progress(Console(file=io.StringIO()), quiet=True),
            **options, **{**given, "seed": cell.seed, "device": self.device},
        )  # fmt: skip


def alone(cell: Cell) -> dict[str, Any]:
    """Nobody asks what an oracle, which knows the labels, estimates: it needs no models beside it."""
    return {"left_out_models": 0} if cell.oracle else {}


class Watch:
    """An observer that scores every candidate on the test set, as the finished model would be, and keeps the history."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.candidates: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.tokens: Any = None

    def __call__(self, line: dict[str, Any], model: Any) -> None:
        if line["stage"] == "adapt":
            self.history.append({name: line[name] for name in HISTORY if name in line})
        if line["stage"] != "evaluation":
            return
        kept = clone({name: value for name, value in everything(model).items() if name.startswith(model.head_path + ".")})
        if "bias" in line:
            add_bias(model, line["bias"])
        value = headline(self.group, self.evaluate(model)[0])
        load(model, kept)
        self.candidates.append({"step": line["step"], "criterion_score": line["score"], "score": value})

    def evaluate(self, model: Any) -> tuple[metrics.Metrics, np.ndarray]:
        """Figures and predictions on the test set."""
        if self.tokens is None:
            self.tokens = model.encode(self.group.test)
        return judged(self.group, inference.compute_logits(model, self.tokens).logits)


def headline(group: Group, found: metrics.Metrics) -> float:
    """The figure that is reported."""
    wanted = DATASETS[group.cell.dataset].score
    return found.accuracy if wanted == "accuracy" else next(each.f1 for each in found.per_class if each.name == wanted)


def solve(cell: Cell, group: Group) -> dict[str, Any]:
    """Run the cell: one adaptation for each learning rate of the search, the one with the better criterion score wins."""
    if cell.oracle and group.all_labels is None:
        return cross_fitted(cell, group)
    theta = group.begin(cell)
    begun = time.monotonic()
    own = find_settings(group.model, cell.method, cell.preset, cell.given).training.learning_rate
    rate = theta.record["resolved"]["learning_rate"] if own is None else own
    search: list[dict[str, Any]] = []
    best: tuple[Adapted, Watch] | None = None
    for factor in cell.factors:
        started, watch = time.monotonic(), Watch(group)
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
            "score": chosen["score"], "candidates": watch.candidates, "seconds": round(time.monotonic() - started, 2),
        }  # fmt: skip
        if best is None or entry["criterion_score"] > max(other["criterion_score"] for other in search):
            best = adapted, watch
        search.append(entry)
    assert best is not None
    adapted, watch = best
    return told(
        cell, group, theta, adapted.record, *watch.evaluate(adapted.model), watch, search, time.monotonic() - begun
    )  # fmt: skip


def cross_fitted(cell: Cell, group: Group) -> dict[str, Any]:
    """The oracle where nobody knows the labels of the unlabeled texts: each half of the test set is predicted by a model that was
    trained on the sources and the labels of the other half."""
    begun = time.monotonic()
    division, count = group.division, len(group.truth)
    draw = np.random.default_rng([cell.seed, 0x0AC1E])
    half = splits.held_out(division.test_keys, division.truth, 0.5, draw)
    halves = half, np.setdiff1d(np.arange(count), half)
    given = {**cell.given, "steps": 0, **alone(cell)}
    scores = np.zeros((count, len(group.classes)), dtype=np.float32)
    few = (division.few, division.target_labeled_labels) if group.few is not None else ([], [])
    for rows, others in (halves, halves[::-1]):
        known = [division.test[i] for i in others] + few[0], [division.truth[i] for i in others] + few[1]
        labeled = load_corpus(known, labeled=True, name="oracle", domain=cell.target)
        adapted = group.adapt(cell, cell.method, given, labeled, preset=cell.preset)
        scores[rows] = inference.compute_logits(adapted.model, adapted.model.encode(group.test), rows).logits
    watch = Watch(group)
    found, predicted = judged(group, scores)
    watch.candidates.append({"step": 0, "criterion_score": 0.0, "score": headline(group, found)})
    search = [
        {
            "settings": {}, "chosen_step": 0, "criterion_score": 0.0, "score": headline(group, found),
            "candidates": watch.candidates, "seconds": round(time.monotonic() - begun, 2),
        }
    ]  # fmt: skip
    return told(cell, group, adapted, adapted.record, found, predicted, watch, search, time.monotonic() - begun)


def judged(group: Group, scores: np.ndarray) -> tuple[metrics.Metrics, np.ndarray]:
    """Figures and predictions on the test set."""
    predicted = scores.argmax(axis=1)
    return metrics.evaluate(group.truth, predicted, group.classes, inference.probabilities(np.nan_to_num(scores))), predicted


def told(
    cell: Cell, group: Group, theta: Adapted, record: dict[str, Any], found: metrics.Metrics, predicted: np.ndarray, watch: Watch,
    search: list[dict[str, Any]], seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The cell's file."""
    value = headline(group, found)
    chosen = next(number for number, entry in enumerate(search) if entry["candidates"] is watch.candidates)
    every = [(entry["score"], number, entry["step"]) for number, run in enumerate(search) for entry in run["candidates"]]
    every.append((value, chosen, record["selection"]["chosen_step"]))  # on a GPU the same weights need not score the same
    most = max(every, key=lambda each: each[0])
    wanted = DATASETS[cell.dataset].score
    figures = {
        "accuracy": found.accuracy,
        "macro_f1": found.macro_f1,
        "f1": {each.name: each.f1 for each in found.per_class},
        "average_precision": {each.name: each.average_precision for each in found.per_class},
    }
    if wanted != "accuracy":
        figures["trivial_f1"] = next(each.trivial_f1 for each in found.per_class if each.name == wanted)
    result = {
        "dataset": cell.dataset, "model": cell.model, "variant": cell.variant, "method": methods.get(cell.method).name,
        "setting": cell.setting, "pool": cell.pool, "target": cell.target, "seed": cell.seed, "preset": cell.preset,
        "score": value,
        "metrics": figures,
        "selected_by": record["selection"]["criterion"],
        "oracle": cell.oracle,
        "source_score": watch.candidates[0]["score"],
        "target_selected": {"score": most[0], "search": most[1], "step": most[2]},
        "search": search,
        "chosen": chosen,
        "estimate": record["estimate"]["after"] and {
            name: record["estimate"]["after"][name] for name in ("accuracy", "low", "high", "source_model", "method", "left_out")
        },
        "test": {
            "size": len(group.test), "fingerprint": fingerprint(group),
            "rows": bits(group.division.test_rows, group.examples),  # which of the target's labeled examples
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
        kept = np.unique(np.linspace(0, len(watch.history) - 1, POINTS).round().astype(int)) if watch.history else []
        result["history"] = [watch.history[number] for number in kept]
    return json.loads(json.dumps(result, default=str))


def fingerprint(group: Group) -> str:
    """sha256 of the test texts in order."""
    digest = hashlib.sha256()
    for text in group.test.texts():
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def bits(rows: list[int], count: int) -> str:
    """Which of `count` rows are meant, one bit each, the first row the highest of the first hexadecimal digit."""
    meant = np.zeros(count, dtype=bool)
    meant[rows] = True
    return np.packbits(meant).tobytes().hex()
