"""A trial: one method adapted to the texts of one source domain, whose labels it does not see.

Labels of the domain are used here to score the candidates and, with `Trial.rare`, to make one class rarer. They never reach the
training: `adapt` gets texts without a label column. The exception is `Work.labeled`: as many texts of the domain are labeled
target texts, and neither adapted to nor scored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from mtem.atomic import read_json, write_json
from mtem.data.corpus import Corpus
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem.rehearsal.domains import Domains, keep_rows
from mtem.rehearsal.plan import Plan
from mtem.run.adapt import adapt
from mtem.run.pipeline import Observer
from mtem.run.record import machine
from mtem.run.result import Adapted
from mtem.schema import NUMBER
from mtem.selection.criteria import CandidateOutputs
from mtem.tensors import read_tensors, write_tensors

MOST_TEXTS = 5000  # of a domain that are adapted to
SCORED_TEXTS = 2000  # of these, at most so many are scored
FEWEST_RARE = 30  # texts of a class that is made rarer
SHARED_SOURCE = "source-only"  # the method whose source model all methods with a plain head share

Report = Callable[[float], None]


@dataclasses.dataclass(frozen=True)
class SourceTask:
    """Train the source model without one domain."""

    domain: str
    method: str = SHARED_SOURCE


@dataclasses.dataclass(frozen=True)
class Trial:
    """Adapt one method to one domain.

    Attributes
    ----------
    domain
        Which part of the labeled texts stands for the target.
    method
        Name of the method, or the file of one.
    learning_rate
        Of the adaptation.
    prior
        The setting `target_class_prior`.
    rare
        A class of which only a third of the texts is kept; "" for all texts.
    """

    domain: str
    method: str
    learning_rate: float
    prior: str = "none"
    rare: str = ""

    @property
    def name(self) -> str:
        """A file name."""
        return f"{Path(self.method).stem}-{digest_of(dataclasses.astuple(self))}"


@dataclasses.dataclass(frozen=True)
class TrialOutputs:
    """What the candidates of a trial compute, and the labels to score them with.

    Attributes
    ----------
    trial
        What was run.
    epochs
        Passes over the unlabeled texts at which candidates were taken, [C]; the first is 0, the source model.
    infomax
        Of each candidate, [C].
    logits
        [C, T, K] of texts of the domain, corrected for the assumed class shares if there are any.
    labels
        [T].
    held_out_logits, held_out_labels
        [C, S, K] and [S] of held-out texts of the other domains.
    assumed_shares
        [K], or None.
    seconds
        Time of the adaptation.
    machine
        Processor or GPU.
    """

    trial: Trial
    epochs: np.ndarray
    infomax: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    held_out_logits: np.ndarray
    held_out_labels: np.ndarray
    assumed_shares: np.ndarray | None
    seconds: float
    machine: str

    def write(self, folder: Path) -> None:
        """Write both files of the trial; the record last."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        write_tensors(folder / f"{self.trial.name}.safetensors", {k: torch.from_numpy(np.asarray(v)) for k, v in arrays.items()})
        shares = None if self.assumed_shares is None else self.assumed_shares.tolist()
        record = {"trial": dataclasses.asdict(self.trial), "assumed_shares": shares}
        write_json(folder / f"{self.trial.name}.json", record | {"seconds": self.seconds, "machine": self.machine})

    @classmethod
    def read(cls, folder: Path, trial: Trial) -> TrialOutputs:
        """Return a trial that was written."""
        record, arrays = check_trial(folder / f"{trial.name}.json")
        shares = record["assumed_shares"]
        return cls(
            trial, **arrays, assumed_shares=None if shares is None else np.array(shares), seconds=record["seconds"],
            machine=record["machine"],
        )  # fmt: skip


_ARRAYS = ("epochs", "infomax", "logits", "labels", "held_out_logits", "held_out_labels")
_RECORD: dict[Any, Any] = {"trial": dict, "assumed_shares": ([NUMBER], None), "seconds": NUMBER, "machine": str}


def check_trial(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return record and arrays of a trial, from the path of its record. Refuse damaged files."""
    again = "remove it, and --resume runs this trial again"
    record = read_json(path, _RECORD, again)
    tensors = read_tensors(file := path.with_suffix(".safetensors"))
    if problem := _problem({name: tensors[name].numpy() for name in tensors}):
        raise RequestError(f"{file}: {problem}; {again}")
    return record, {name: tensors[name].numpy() for name in _ARRAYS}


def _problem(arrays: dict[str, np.ndarray]) -> str | None:
    """Return what is wrong with the arrays of a trial."""
    if missing := [name for name in _ARRAYS if name not in arrays]:
        return f"{missing[0]} is missing"
    sizes = {name: arrays[name].ndim for name in _ARRAYS}
    if sizes != {"epochs": 1, "infomax": 1, "logits": 3, "labels": 1, "held_out_logits": 3, "held_out_labels": 1}:
        return "an array has another shape"
    logits, held_out = arrays["logits"], arrays["held_out_logits"]
    counts = {len(arrays[name]) for name in ("epochs", "infomax", "logits", "held_out_logits")}
    texts = (logits.shape[1], held_out.shape[1]) == (len(arrays["labels"]), len(arrays["held_out_labels"]))
    if len(counts) > 1 or not texts or logits.shape[2] != held_out.shape[2]:
        return "the sizes of its arrays differ"
    if not all(np.isfinite(arrays[name]).all() for name in ("epochs", "logits", "held_out_logits")):
        return "an array is not finite"
    return None


@dataclasses.dataclass
class Work:
    """Trains source models and runs trials, in this process or in another.

    Parameters
    ----------
    corpus
        The labeled texts.
    domains
        What stands for the target.
    plan
        What is compared; a trial has a candidate after each of its passes.
    folder
        Where source models and trials are written.
    pretrained
        The file of the encoder that was pretrained for the source models of a method, by its name; empty without pretraining.
    labeled
        How many texts of the domain that stands for the target are labeled target texts. Source models learn from them too, so
        works with another number need another folder.
    """

    corpus: Corpus
    domains: Domains
    plan: Plan
    folder: Path
    pretrained: dict[str, Path] = dataclasses.field(default_factory=dict)
    labeled: int = 0

    def __call__(self, task: SourceTask | Trial, report: Report = lambda fraction: None) -> None:
        """Run one task and write its result."""
        with quiet_logging():
            if isinstance(task, SourceTask):
                self.train_source(task, report)
            else:
                self.run_trial(task, report).write(self.trial_folder(task.domain))

    def is_done(self, task: SourceTask | Trial) -> bool:
        """Return whether the result of a task was written."""
        if isinstance(task, SourceTask):
            return (self.source_model_path(task) / "run.json").is_file()
        return (self.trial_folder(task.domain) / f"{task.name}.json").is_file()

    def read(self, trial: Trial) -> TrialOutputs:
        """Return the outputs of a trial that is done."""
        return TrialOutputs.read(self.trial_folder(trial.domain), trial)

    def size(self, task: SourceTask | Trial) -> int:
        """Return the number of texts that a task passes through, for the progress."""
        number = self.domains.names.index(task.domain)
        if isinstance(task, SourceTask):
            return len(self.domains.others(number))
        return len(self.pool(task.domain, task.rare)[0]) * self.plan.epochs

    def trial_folder(self, domain: str) -> Path:
        """Return the folder of the trials with this domain."""
        return self.folder / "trials" / f"{self.domains.names.index(domain)}-{self.plan.epochs}-passes"

    def source_model_path(self, task: SourceTask) -> Path:
        """Return the run directory of a source model."""
        name = f"{self.domains.names.index(task.domain)}-{Path(task.method).stem}"
        if task.method.endswith(".py"):  # two files may have the same name
            name += f"-{digest_of(task.method)}"
        return self.folder / "source-models" / name

    def source_task(self, trial: Trial) -> SourceTask:
        """Return the training of the source model that a trial begins from."""
        return SourceTask(trial.domain, trial.method if self.plan.own_source_model(trial.method) else SHARED_SOURCE)

    @property
    def frozen_store(self) -> Path:
        """Output of the frozen layers for all labeled texts, if there are such layers."""
        return self.folder / "frozen.npy"

    def remove_intermediate(self) -> None:
        """After a finished rehearsal, remove the source models and the frozen layers' output; the trials' outputs stay."""
        shutil.rmtree(self.folder / "source-models", ignore_errors=True)
        for path in self.folder.glob(f"{self.frozen_store.stem}-*"):
            path.unlink()

    def can_be_rarer(self, domain: str, rare: str) -> bool:
        """Return whether the domain has enough texts of a class to take two thirds of them out."""
        labels = self.pool(domain)[1]
        return bool((labels == self.corpus.classes.index(rare)).sum() >= FEWEST_RARE)

    def pool(self, domain: str, rare: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return rows and class numbers of the texts of a domain that are adapted to."""
        corpus = self.corpus
        rows = self.domains.rows(self.domains.names.index(domain))
        rows = np.setdiff1d(rows, self.labeled_rows(domain))
        rows = np.sort(np.random.default_rng([self.plan.seed, 0xD0]).permutation(rows)[:MOST_TEXTS])
        labels = corpus.label_numbers(corpus.classes)[rows]
        if rare:
            kept = keep_rows(labels, corpus.classes.index(rare), self.plan.seed)
            rows, labels = rows[kept], labels[kept]
        return rows, labels

    def labeled_rows(self, domain: str) -> np.ndarray:
        """Return the rows of the labeled target texts."""
        rows = self.domains.rows(self.domains.names.index(domain))
        return np.sort(np.random.default_rng([self.plan.seed, 0x1A]).permutation(rows)[: self.labeled])

    def target_labeled(self, domain: str) -> Corpus | None:
        """Return the labeled target texts, if there are any."""
        return self.corpus.part(self.labeled_rows(domain), f"labeled {domain}") if self.labeled else None

    def target(self, domain: str, rare: str = "") -> tuple[Corpus, np.ndarray]:
        """Return the texts that are adapted to, without labels, and their class numbers, which only score."""
        rows, labels = self.pool(domain, rare)
        return self.corpus.part(rows, domain).unlabeled(), labels

    def others(self, domain: str) -> Corpus:
        """Return the labeled texts of the other domains."""
        return self.corpus.part(self.domains.others(self.domains.names.index(domain)), f"all but {domain}")

    def train_source(self, task: SourceTask, report: Report) -> None:
        """Train the source model without one domain, and write its run directory."""
        path = self.source_model_path(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        target, _ = self.target(task.domain)
        given = {**self.plan.settings_of(task.method), "steps": 0, "left_out_models": 0, "target_class_prior": "none"}
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary:
            adapt(
                self.others(task.domain), target, target_labeled=self.target_labeled(task.domain), model=self.plan.model,
                method=task.method,
                preset=self.plan.preset_of(task.method), output=Path(temporary, "run"), progress=_Reported(report, "source"),
                frozen_store=self.frozen_store, pretrained=self.pretrained.get(task.method), **given,
            )  # fmt: skip
            with contextlib.suppress(OSError):  # another process was first
                Path(temporary, "run").rename(path)

    def trial_settings(self, trial: Trial) -> dict[str, Any]:
        """Return the settings of a trial's adaptation that are given by name."""
        return {
            **self.plan.settings_of(trial.method), "learning_rate": trial.learning_rate, "target_class_prior": trial.prior,
            "epochs": float(self.plan.epochs), "evaluations": self.plan.epochs, "evaluation_texts": SCORED_TEXTS,
            "left_out_models": 0, "checkpoint_seconds": 1e9,
        }  # fmt: skip

    def run_trial(
        self, trial: Trial, report: Report = lambda fraction: None, observe: Observer | None = None
    ) -> TrialOutputs:  # fmt: skip
        """Adapt to the domain without its labels, and return what the candidates compute."""
        target, labels = self.target(trial.domain, trial.rare)
        recorder = Recorder()
        started = time.monotonic()
        adapted = adapt(
            self.others(trial.domain), target, target_labeled=self.target_labeled(trial.domain), model=self.plan.model,
            method=trial.method,
            preset=self.plan.preset_of(trial.method), observe=observe, on_candidate=recorder,
            source_model=Adapted.load(self.source_model_path(self.source_task(trial))),
            progress=_Reported(report, "adapt"), frozen_store=self.frozen_store, **self.trial_settings(trial),
        )  # fmt: skip
        return recorder.outputs(trial, labels, adapted.record, time.monotonic() - started, self.plan.epochs)


class Recorder:
    """Keeps the outputs of all candidates of a run."""

    def __init__(self) -> None:
        self.rows = np.zeros(0, dtype=np.int64)
        self.steps: list[int] = []
        self.candidates: list[CandidateOutputs] = []

    def __call__(self, step: int, rows: np.ndarray, outputs: CandidateOutputs) -> None:
        """Keep the outputs of one candidate."""
        self.rows = rows
        self.steps.append(step)
        self.candidates.append(outputs)

    def outputs(self, trial: Trial, labels: np.ndarray, record: Mapping[str, Any], seconds: float, epochs: int) -> TrialOutputs:
        """Return all of them with the labels, [N] by row of the target."""
        prior = record["target_class_prior"]
        return TrialOutputs(
            trial,
            epochs=np.array(self.steps) * epochs / max(1, self.steps[-1]),
            infomax=np.array([entry["infomax"] for entry in record["selection"]["candidates"]]),
            logits=np.stack([candidate.target_logits for candidate in self.candidates]).astype(np.float32),
            labels=labels[self.rows],
            held_out_logits=np.stack([candidate.source_logits for candidate in self.candidates]).astype(np.float32),
            held_out_labels=self.candidates[0].source_labels,
            assumed_shares=None if prior is None else np.array(list(prior["shares"].values())),
            seconds=round(seconds, 2),
            machine=machine(record["resolved"]["device"]),
        )


def source_methods(plan: Plan) -> list[str]:
    """Return the methods whose source models are trained: one for all that can share it, and those that need their own."""
    return list(dict.fromkeys(method if plan.own_source_model(method) else SHARED_SOURCE for method in plan.methods))


def digest_of(value: Any) -> str:
    """Return a few letters that differ for different values, for file names."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


class _Reported(Progress):
    """A progress that shows nothing and reports the done share of one stage."""

    def __init__(self, report: Report, stage: str) -> None:
        super().__init__(Console(file=io.StringIO()), quiet=True)
        self._report, self._reported_stage = report, stage

    def advance(self, done: int, figures: Mapping[str, float] | None = None) -> None:
        """Report the share that is done."""
        if self._stage == self._reported_stage and self._total:
            self._report(done / self._total)


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Drop the log messages of the runs inside: a rehearsal tells its own."""
    logger = logging.getLogger("mtem")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
