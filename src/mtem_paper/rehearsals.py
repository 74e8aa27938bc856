"""Rehearsals on the paper's data sets: what they recommend for a target, and how that does on its test set.

For each target there are trials on each of its source domains, as `mtem.rehearsal` runs them, and finals: the same adaptation, to
the target itself, with every candidate scored on the test set. Of a trial and of a final, the outputs of all candidates are kept,
so that any rule of choice and any estimate can be compared afterwards. Labels of the test set only score.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mtem import inference, processes
from mtem.atomic import read_json, replaced, write_json
from mtem.data.corpus import Corpus
from mtem.data.loading import load_corpus
from mtem.errors import RequestError, RunError
from mtem.models.base import Model
from mtem.processes import Report
from mtem.progress import Progress
from mtem.rehearsal.choice import Configuration, Curve
from mtem.rehearsal.domains import find_domains
from mtem.rehearsal.figures import ACCURACY, F1, Figures, candidate_figures, raw_estimate
from mtem.rehearsal.plan import Plan, has_own_head
from mtem.rehearsal.trials import SHARED_SOURCE, SourceTask, Trial, TrialOutputs, Work, quiet_logging
from mtem.run.adapt import find_settings
from mtem.run.record import now, versions
from mtem.selection.accuracy_estimate import Estimate
from mtem.tensors import read_tensors, write_tensors
from mtem_paper import pretrained, splits
from mtem_paper.cells import PROTOCOL
from mtem_paper.protocol import DATASETS
from mtem_paper.runner import SOURCE_MODELS

RECORDS, OUTPUTS, FAILURES = "rehearsals", "rehearsal-outputs", "failures"  # folders below the results' folder
PASSES = {"amazon": 12, "pheme": 24}  # of a trial; an event has few threads
PRESET = "recommended"
RATES = {"amazon": 2e-5, "pheme": 5e-4}  # which the factors of learning rates multiply
LONGEST_WAIT = 1800.0  # seconds for a source model that another process trains
_HALVED = ("logits", "held_out_logits", "test_logits")  # stored with 16 bits
_ARRAYS = ("epochs", "infomax", "logits", "labels", "held_out_logits", "held_out_labels")

# ---------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True)
class Wave:
    """Trials of the same kind.

    Parameters
    ----------
    final
        Whether the target itself is adapted to, instead of each of its sources.
    methods
        In the order in which they are run.
    factors
        Learning rates, relative to the data set's.
    priors
        Values of `target_class_prior`.
    rare
        The class that is made rarer; "" for none.
    seeds
        Of splits and runs.
    """

    final: bool
    methods: tuple[str, ...]
    factors: tuple[float, ...] = (2.5,)
    priors: tuple[str, ...] = ("none",)
    rare: str = ""
    seeds: tuple[int, ...] = (0,)


_COMMON, _OTHERS = ("mtem", "fixmatch", "biat"), ("dann", "cst", "mme")
_TWO = ("mtem", "fixmatch")

# The most important ones first: what cells need, then what tells how well rehearsals choose.
WAVES: dict[str, tuple[Wave, ...]] = {
    "amazon": (
        Wave(False, _COMMON),
        Wave(False, _OTHERS),
        Wave(False, _TWO, factors=(1.0,)),
        Wave(True, _COMMON),
        Wave(True, _OTHERS),
        Wave(True, _TWO, factors=(1.0,)),
        Wave(True, _COMMON, seeds=(1, 2)),
    ),
    "pheme": (
        Wave(False, _TWO, (1.0,), ("uniform",)),
        Wave(False, _TWO, (1.0,)),
        Wave(False, ("biat", "cst", "dann", "mme"), (1.0,), ("uniform",)),
        Wave(False, _TWO, (1.0,), ("uniform", "none"), rare="rumour"),
        Wave(False, _TWO, priors=("uniform",)),
        Wave(True, (*_TWO, "biat", "cst", "dann", "mme"), (1.0,), ("uniform",)),
        Wave(True, _TWO, (1.0,)),
        Wave(True, _TWO, (1.0,), ("uniform",), seeds=(1, 2, 3, 4)),
    ),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """What the trials of one target and seed share."""

    dataset: str
    model: str  # what the results call it
    target: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A trial, or a final, whose domain is the target; or the training of the source model that they begin from.

    Attributes
    ----------
    place
        Data set, model, target, seed.
    work
        What to run.
    factor
        The learning rate relative to the data set's; 0 of a source model.
    overrides
        Settings of a run that is no result, as JSON.
    """

    place: Place
    work: Trial | SourceTask
    factor: float = 0.0
    overrides: str = "{}"

    @property
    def final(self) -> bool:
        """Whether the target itself is adapted to."""
        return self.work.domain == self.place.target

    @property
    def address(self) -> Path:
        """The path of its files below the folders of the results, without a suffix."""
        place, work = self.place, self.work
        words = ["final" if self.final else work.domain, work.method]
        if isinstance(work, Trial):
            words += [f"{self.factor:g}", work.prior, *([work.rare] if work.rare else [])]
        else:
            words += ["source"]
        return Path(place.dataset, place.model, place.target, "-".join([*words, str(place.seed), f"p{PROTOCOL}"]) + self.mark)

    @property
    def mark(self) -> str:
        """What the names of files of a run that is no result end with."""
        return "" if self.overrides == "{}" else f"-{hashlib.sha256(self.overrides.encode()).hexdigest()[:8]}"


def plan(
    dataset: str,
    model: str,
    *,
    targets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Return the trials and finals of a data set, the most important ones first, each after its source model.

    Parameters
    ----------
    dataset
        A name in ``DATASETS``.
    model
        What the results call the model.
    targets, methods, seeds
        Restrictions; None stands for all.
    overrides
        Settings of runs that never count as results; "epochs" is the number of passes.

    Raises
    ------
    RequestError
        If a target or a method is not in the plan.
    """
    about, waves = DATASETS[dataset], WAVES[dataset]
    known = tuple(dict.fromkeys(method for wave in waves for method in wave.methods))
    for option, names, allowed in (("--targets", targets, about.targets), ("--variants", methods, known)):
        if unknown := [name for name in names or () if name not in allowed]:
            raise RequestError(f"{option} {unknown[0]}: for rehearsals on {dataset}, expected some of {', '.join(allowed)}")
    text = json.dumps(dict(overrides or {}), sort_keys=True)
    tasks: dict[Task, None] = {}
    for wave in waves:
        trials = [
            Task(place, Trial(domain, method, RATES[dataset] * factor, prior, wave.rare), factor, text)
            for seed, factor, method in itertools.product(wave.seeds, wave.factors, wave.methods)
            if (methods is None or method in methods) and (seeds is None or seed in seeds)
            for prior in wave.priors
            for number in range(1 if wave.final else len(about.domains) - 1)
            for place in (Place(dataset, model, target, seed) for target in about.targets if target in (targets or about.targets))
            for domain in [place.target if wave.final else [name for name in about.domains if name != place.target][number]]
        ]
        tasks |= dict.fromkeys(source_of(task) for task in trials)
        tasks |= dict.fromkeys(trials)
    return list(tasks)


def source_of(task: Task) -> Task:
    """Return the training of the source model that a trial begins from."""
    assert isinstance(task.work, Trial)
    method = task.work.method if has_own_head(task.work.method) else SHARED_SOURCE
    return Task(task.place, SourceTask(task.work.domain, method), overrides=task.overrides)


# ---------------------------------------------------------------------- running


@dataclasses.dataclass
class Final(Work):
    """The work of a target itself: all sources are labeled, the target's unlabeled examples are adapted to.

    `domains` is of no use here.
    """

    division: splits.Division | None = None
    target_name: str = ""

    def target(self, domain: str, rare: str = "") -> tuple[Corpus, np.ndarray]:
        """Return the unlabeled examples of the target, and their class numbers, or -1 where they are unknown."""
        assert self.division is not None
        division, classes = self.division, self.corpus.classes
        labels = division.unlabeled_labels
        numbers = [-1] * len(division.unlabeled) if labels is None else [classes.index(label) for label in labels]
        return load_corpus(division.unlabeled, labeled=False, name="target", domain=self.target_name), np.array(numbers)

    def others(self, domain: str) -> Corpus:
        """Return all labeled texts."""
        return self.corpus

    def source_model_path(self, task: SourceTask) -> Path:
        """Return the run directory of a source model."""
        return self.folder / "source-models" / f"final-{task.method}"

    def test(self) -> tuple[Corpus, np.ndarray]:
        """Return the test set and its class numbers."""
        assert self.division is not None
        test = load_corpus(self.division.test, labeled=False, name="test", domain=self.target_name)
        if len(test) != len(self.division.truth):
            raise RunError(f"{self.target_name}: some test texts are empty; remove them from the data")
        return test, np.array([self.corpus.classes.index(label) for label in self.division.truth])


class Watch:
    """An observer that keeps the logits of the test set of every candidate, as it would be saved."""

    def __init__(self, test: Corpus) -> None:
        self.test = test
        self.logits: list[np.ndarray] = []
        self._encoded: Any = None

    def __call__(self, line: dict[str, Any], model: Model) -> None:
        """Compute the logits at an evaluation."""
        if line["stage"] != "evaluation":
            return
        if self._encoded is None:
            self._encoded = model.encode(self.test)
        self.logits.append(inference.compute_logits(model, self._encoded).logits + np.float32(line.get("bias", 0.0)))


@dataclasses.dataclass
class Rehearser:
    """Runs tasks and writes their files, in this process or in another.

    Parameters
    ----------
    data, model, device
        As for `search.Group`.
    results
        The folder of the results.
    labeled
        As of `Work`; only of pilots, whose folder is their own.
    """

    data: Path
    model: str
    device: str
    results: Path
    labeled: int = 0
    _works: dict[tuple[Place, bool, str], Work] = dataclasses.field(default_factory=dict)

    def __call__(self, task: Task, report: Report = lambda fraction: None) -> float | None:
        """Run one task; return the score of the last candidate, or None of a source model."""
        work = self.work_of(task)
        with quiet_logging():
            if isinstance(task.work, SourceTask):
                if not work.is_done(task.work):
                    self.find_encoder(task, work)
                    work.train_source(task.work, report)
                return None
            self.wait_for_source(task, work)
            watch = Watch(work.test()[0]) if isinstance(work, Final) else None
            outputs = work.run_trial(task.work, report, watch)
        tested = None
        if isinstance(work, Final) and watch is not None:
            tested = dataclasses.replace(outputs, logits=np.stack(watch.logits), labels=work.test()[1])
        return self.write(task, work, outputs, tested)

    def work_of(self, task: Task) -> Work:
        """Return the work that the tasks of a place share."""
        key = task.place, task.final, task.overrides
        if key not in self._works:
            place, about = task.place, DATASETS[task.place.dataset]
            overrides = json.loads(task.overrides)
            passes = int(overrides.pop("epochs", PASSES[place.dataset]))
            given = {**about.settings_of(place.model), **overrides, "seed": place.seed, "device": self.device}
            target = splits.read(place.dataset, self.data, place.target, next(iter(about.pools)))
            corpus = load_corpus(target.sources, labeled=True)
            domains = find_domains(corpus, lambda: np.zeros((0, 0)), place.seed)
            folder = self.results / SOURCE_MODELS / RECORDS / place.dataset / place.model
            folder /= f"{place.target}-{place.seed}{task.mark}"
            plan_ = Plan((SHARED_SOURCE,), self.model, PRESET, given, None, None, False, passes)
            work = Work(corpus, domains, plan_, folder, labeled=self.labeled)
            if task.final:
                work = Final(**vars(work), division=splits.divide(target, place.seed), target_name=place.target)
            self._works[key] = work
        return self._works[key]

    def find_encoder(self, task: Task, work: Work) -> None:
        """Give a source model the pretrained encoder that all of a target have, if it is to have one."""
        place, pool = task.place, next(iter(DATASETS[task.place.dataset].pools))
        division = splits.divide(splits.read(place.dataset, self.data, place.target, pool), place.seed)
        target = load_corpus(division.unlabeled, labeled=False, name="target", domain=place.target)
        names = place.dataset, place.model, pool, place.target, str(place.seed)
        encoders = pretrained.Store(self.results / SOURCE_MODELS / pretrained.FOLDER, self.model, self.device)
        path = encoders.find(names, work.corpus, target, work.plan.settings_of(task.work.method))
        if path is not None:
            work.pretrained[task.work.method] = path

    def wait_for_source(self, task: Task, work: Work) -> None:
        """Wait until the source model of a trial is there: it was begun before, maybe by another process."""
        source = source_of(task)
        assert isinstance(source.work, SourceTask)
        limit = time.monotonic() + LONGEST_WAIT
        while not work.is_done(source.work):
            if failure_path(self.results, source).exists() or time.monotonic() > limit:
                raise RunError(f"{task.address}: its source model was not trained; see {failure_path(self.results, source)}")
            time.sleep(0.2)

    def write(self, task: Task, work: Work, outputs: TrialOutputs, tested: TrialOutputs | None) -> float:
        """Write both files, the record last; return the score of the last candidate."""
        assert isinstance(task.work, Trial)
        trial, classes = task.work, work.corpus.classes
        arrays = {name: getattr(outputs, name) for name in _ARRAYS}
        if tested is not None:
            arrays |= {"test_logits": tested.logits, "test_labels": tested.labels}
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
        write_tensors(outputs_path(self.results, task), {n: t.half() if n in _HALVED else t for n, t in tensors.items()})
        figures = figures_of(outputs, tested, metric_of(task.place.dataset), classes)
        settings = find_settings(work.plan.model, trial.method, work.plan.preset_of(trial.method), work.trial_settings(trial))
        shares = outputs.assumed_shares
        record = {
            "protocol": PROTOCOL, **dataclasses.asdict(task.place), "final": task.final, "trial": dataclasses.asdict(trial),
            "factor": task.factor,
            "metric": metric_of(task.place.dataset), "classes": list(classes),
            "texts": {"adapted_to": len(work.target(trial.domain, trial.rare)[1]), "scored": len((tested or outputs).labels)},
            "assumed_shares": None if shares is None else shares.tolist(),
            "candidates": [entry.to_dict() for entry in figures],
            "seconds": outputs.seconds, "machine": outputs.machine, "settings": settings.record(), "versions": versions(),
            "overrides": json.loads(task.overrides), "finished": now(),
        }  # fmt: skip
        write_json(record_path(self.results, task), json.loads(json.dumps(record, default=str)))
        return figures[-1].score


def figures_of(outputs: TrialOutputs, tested: TrialOutputs | None, metric: str, classes: Sequence[str]) -> list[Figures]:
    """Return the figures of every candidate; of a final by the test set, but with the estimate that its unlabeled texts give."""
    if tested is None:
        return candidate_figures(outputs, metric, classes)
    anchor: tuple[Estimate, np.ndarray] | None = None
    figures = []
    for number, entry in enumerate(candidate_figures(tested, metric, classes)):
        estimate = raw_estimate(outputs, number, anchor)
        if number == 0 and estimate is not None:
            anchor = estimate, outputs.logits[0]
        figures.append(dataclasses.replace(entry, estimate=None if estimate is None else estimate.accuracy))
    return figures


def metric_of(dataset: str) -> str:
    """Return the score that a data set's tables report."""
    positive = DATASETS[dataset].positive
    return ACCURACY if positive is None else f"{F1}{positive}"


def record_path(results: Path, task: Task) -> Path:
    """Return the path of a trial's record."""
    return _with_suffix(results / RECORDS / task.address, ".json")


def outputs_path(results: Path, task: Task) -> Path:
    """Return the path of a trial's outputs."""
    return _with_suffix(results / OUTPUTS / task.address, ".safetensors")


def failure_path(results: Path, task: Task) -> Path:
    """Return the path of the report of a failure."""
    return _with_suffix(results / FAILURES / RECORDS / task.address, ".txt")


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)  # names have dots: 2.5


class Summary(NamedTuple):
    """How many trials were run, existed before and were not started, and what failed."""

    done: int
    existed: int
    left: int
    failed: list[tuple[Task, str]]


def missing(tasks: Sequence[Task], results: Path) -> list[Task]:
    """Return the trials that have no record, and the source models they begin from."""
    trials = [task for task in tasks if isinstance(task.work, Trial) and not record_path(results, task).is_file()]
    needed = {source_of(task) for task in trials} | set(trials)
    return [task for task in tasks if task in needed]


def run(
    tasks: Sequence[Task],
    rehearser: Rehearser,
    *,
    jobs: int = 1,
    pool: str = processes.PROCESSES,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Run the trials that have no record yet, in several processes if asked.

    Parameters
    ----------
    tasks
        As `plan` returns them.
    rehearser
        What runs them.
    jobs
        Number of processes.
    pool
        Where they run, as in `mtem.processes.run`.
    limit
        Start no task after this many seconds.
    progress
        Where to report.
    """
    progress = progress or Progress(quiet=True)
    deadline = float("inf") if limit is None else time.time() + limit
    todo = missing(tasks, rehearser.results)
    trials = [task for task in todo if isinstance(task.work, Trial)]
    total = sum(isinstance(task.work, Trial) for task in tasks)
    for task in todo:
        failure_path(rehearser.results, task).unlink(missing_ok=True)
    done, failed = 0, list[tuple[Task, str]]()
    outcomes = processes.run([[task] for task in todo], rehearser, jobs=jobs, deadline=deadline, pool=pool)
    with progress.stage("trials", len(trials)), contextlib.closing(outcomes):
        progress.advance(0)
        for outcome in outcomes:
            if outcome.failure is not None:
                path = failure_path(rehearser.results, outcome.task)
                with replaced(path) as temporary:
                    temporary.write_text(outcome.failure, encoding="utf-8")
                failed.append((outcome.task, f"{outcome.message[:200]} ({path})"))
            done += outcome.failure is None and isinstance(outcome.task.work, Trial)
            progress.advance(done, {"failed": len(failed)})
    failed_trials = sum(isinstance(task.work, Trial) for task, _ in failed)
    return Summary(done, total - len(trials), len(trials) - done - failed_trials, failed)


# ---------------------------------------------------------------------- reading


class Rehearsed(NamedTuple):
    """A trial, or a final, that was run.

    Attributes
    ----------
    record
        Its JSON.
    trial
        What was run.
    path
        Its address below the folders of records and outputs.
    """

    record: dict[str, Any]
    trial: Trial
    path: Path

    def curve(self) -> Curve:
        """Return the scores along it."""
        trial, entries = self.trial, self.record["candidates"]
        epochs, scores, infomax = (np.array([entry[name] for entry in entries]) for name in ("epoch", "score", "infomax"))
        configuration = Configuration(trial.method, trial.learning_rate, trial.prior)
        return Curve(configuration, trial.domain, trial.rare, epochs, scores, infomax, len(self.record["classes"]))

    def has_outputs(self, folder: Path) -> bool:
        """Return whether the folder of outputs has those of this trial: records are committed, outputs are not."""
        return _with_suffix(folder / self.path, ".safetensors").is_file()

    def outputs(self, folder: Path) -> tuple[TrialOutputs, TrialOutputs | None]:
        """Return the outputs from the folder of outputs; of a final also those on the test set."""
        tensors = read_tensors(_with_suffix(folder / self.path, ".safetensors"))
        arrays = {name: (value.float() if name in _HALVED else value).numpy() for name, value in tensors.items()}
        record, shares = self.record, self.record["assumed_shares"]
        outputs = TrialOutputs(
            self.trial, **{name: arrays[name] for name in _ARRAYS}, assumed_shares=None if shares is None else np.array(shares),
            seconds=record["seconds"], machine=record["machine"],
        )  # fmt: skip
        if "test_logits" not in arrays:
            return outputs, None
        return outputs, dataclasses.replace(outputs, logits=arrays["test_logits"], labels=arrays["test_labels"])


def read(results: Path, keep: Callable[[dict[str, Any]], bool] = lambda record: not record["overrides"]) -> list[Rehearsed]:
    """Read the records of all trials, by default without those that are no results.

    Of a model and data set, trials under earlier rules are read only as long as there are more of them.
    """
    folder = results / RECORDS
    found: dict[tuple[str, str], dict[int, list[Rehearsed]]] = {}
    for path in sorted(folder.glob("*/*/*/*.json")):
        record = read_json(path)
        if keep(record):
            place = path.relative_to(folder).with_name(path.name.removesuffix(".json"))
            by_protocol = found.setdefault((record["dataset"], record["model"]), {})
            by_protocol.setdefault(record.get("protocol", 3), []).append(Rehearsed(record, Trial(**record["trial"]), place))
    chosen = [max(by.items(), key=lambda item: (len(item[1]), item[0]))[1] for by in found.values()]
    return [trial for trials in chosen for trial in trials]


def of_default_models(trials: Sequence[Rehearsed]) -> list[Rehearsed]:
    """Return the trials with the default model of their data set: tables that do not name the model show those."""
    return [trial for trial in trials if trial.record["model"] == DATASETS[trial.record["dataset"]].default_model]
