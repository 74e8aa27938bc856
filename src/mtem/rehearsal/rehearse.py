"""`mtem.rehearse`: check the request, run the trials, choose, write."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from mtem import inference, locks, models
from mtem.atomic import clear_parts, is_part, read_json, write_json
from mtem.data.corpus import Corpus, check_source
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.methods.source_only import SourceOnly
from mtem.models import encoders
from mtem.models.base import Model
from mtem.processes import PROCESSES
from mtem.progress import Progress
from mtem.rehearsal.advice import analyse
from mtem.rehearsal.domains import Domains, find_domains
from mtem.rehearsal.figures import ACCURACY, check_metric
from mtem.rehearsal.plan import Plan, make_plan
from mtem.rehearsal.schedule import run_trials
from mtem.rehearsal.trials import Work, check_trial, quiet_logging, source_methods
from mtem.run import defaults
from mtem.run.adapt import Corpora, create_model, find_settings
from mtem.run.inputs import FROZEN_LIMIT
from mtem.run.pretrained import begin_pretrained, file_name, write_pretrained
from mtem.run.record import by_class, now, versions
from mtem.run.result import Adapted
from mtem.run.source_model import data_identity
from mtem.selection.left_out import LeftOut, to_tensors
from mtem.selection.rehearsed import LEFT_OUT, RECORD, UNFINISHED, Rehearsal
from mtem.tensors import write_tensors
from mtem.training.devices import find_device
from mtem.training.pretraining import check_pretraining, pretrain_model

HARDLY_BETTER = 0.05  # in accuracy

logger = logging.getLogger(__name__)


Options = ParamSpec("Options")


def claims_output(function: Callable[Options, Rehearsal]) -> Callable[Options, Rehearsal]:
    """Hold the lock of the folder `output` while the function runs."""

    @functools.wraps(function)
    def claiming(*args: Options.args, **options: Options.kwargs) -> Rehearsal:
        output: Any = options.get("output")
        if output is None:
            return function(*args, **options)
        path = Path(output)
        if path.exists() and not path.is_dir():
            raise RequestError(f"{path}: is a file; --output expects a folder")
        with locks.FolderLock(path):
            return function(*args, **options)

    return claiming


@claims_output
def rehearse(
    source: Any,
    *,
    method: str | Sequence[str] = "mtem",
    model: str | os.PathLike[str] = encoders.DEFAULT,
    preset: str = "recommended",
    metric: str = ACCURACY,
    learning_rates: Sequence[float] | None = None,
    class_priors: Sequence[str] | None = None,
    rarer_classes: bool | None = None,
    budget: float | None = None,
    jobs: int = 1,
    pool: str = PROCESSES,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    pretrain_on: Sequence[Any] = (),
    text_column: str | None = None,
    label_column: str | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> Rehearsal:
    """Adapt to each source domain as if it had no labels, and see with its labels what that was worth.

    Parameters
    ----------
    source
        Labeled texts of at least two domains, as for `mtem.adapt`. With one domain, clusters of its texts stand for domains.
    method
        One or several methods to compare.
    model, preset
        As for `mtem.adapt`.
    metric
        What is compared: "accuracy", "macro-f1", or the F1 of a class, as "f1:rumour".
    learning_rates
        Of the adaptation; by default once and 2.5 times the method's own.
    class_priors
        Values of the setting `target_class_prior` to compare; by default the one of the model and preset.
    rarer_classes
        Also try each domain with two thirds of one class taken out, so that choices hold for other class shares. By default only
        if several `class_priors` are compared: which one is best depends on the shares.
    budget
        Minutes. Passes, learning rates and methods are cut, in this order, until the forecast fits.
    jobs
        Number of processes. A script that asks for several must guard its main part with ``if __name__ == "__main__"``.
    pool
        Where trials run: "processes" of this machine, or a "ray" cluster whose machines all see `output`.
    output
        The folder to write. Without it nothing is written and nothing can be resumed.
    resume
        Continue the unfinished rehearsal in `output`.
    pretrain_on
        With `pretrain_epochs`: texts beyond the source, such as the target's, that the encoder is pretrained on too. Their
        labels are not read. A run with these texts, in the order labeled target, target, does not pretrain again.
    text_column, label_column
        Names of the columns, if they are not the usual ones.
    progress
        Where progress is shown; nowhere by default.
    **given
        Settings, as for `mtem.adapt`. A learning rate, a prior or a number of epochs given here is not varied.

    Returns
    -------
    Rehearsal
        To be given to ``mtem.adapt(..., rehearsal=...)``.

    Raises
    ------
    RequestError
        If the request is wrong, or the texts are too few.
    RunError
        If a source model could not be trained, or no trial succeeded.
    """
    started = time.monotonic()
    progress = progress or Progress(quiet=True)
    if budget is not None and not budget > 0:
        raise RequestError(f"--budget {budget:g}: expected a positive number of minutes")
    if jobs < 1:
        raise RequestError(f"--jobs {jobs}: expected at least one process")
    names = tuple(dict.fromkeys([method] if isinstance(method, str) else method))
    plan = make_plan(names, model, preset, learning_rates, class_priors, rarer_classes, given)
    columns = {"text_column": text_column, "label_column": label_column}
    models.find(model, find_settings(model, names[0], plan.preset_of(names[0]), {}).model)
    logger.info("reading the data")
    corpus = load_corpus(source, labeled=True, name="source", **columns)
    check_source(corpus)
    check_metric(metric, corpus.classes)
    plan, resolved = resolve_plan(plan, corpus, any_passes=given.get("epochs") is None)
    request = describe_request(plan, corpus, str(model), metric, resolved)
    more: list[Corpus] = []
    if pretrained := [name for name in source_methods(plan) if plan.training_of(name).pretrain_epochs]:
        for name in pretrained:
            check_pretraining(untrained(corpus, plan, name), plan.training_of(name))
        more = [load_corpus(data, labeled=False, name="pretraining", **columns) for data in pretrain_on]
        request["pretrained_on"] = [data_identity(texts.files) for texts in more]
    path = Path(output) if output is not None else None
    if path is not None and is_finished(path, resume, request):
        logger.info("%s: this rehearsal is finished already", path)
        return Rehearsal.load(path)
    if path is not None:
        clear_interrupted(path)
    domains = find_domains(corpus, lambda: text_features(corpus, plan, progress), plan.seed)
    for note in domains.notes:
        logger.warning(note)
    with contextlib.ExitStack() as stack:
        folder = path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtem-rehearsal-")))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, {"status": "running", **request})
        work = Work(corpus, domains, plan, folder)
        store_frozen(corpus, plan, work.frozen_store, progress)
        before = time.monotonic()
        pretrain_once(work, pretrained, more, progress)
        left = None if budget is None else budget - (time.monotonic() - before) / 60
        outputs, resolved, notes = run_trials(work, plan, jobs, left, progress, pool)
        results, left_out = analyse(outputs, corpus.classes, metric, resolved)
        notes += hardly_trained(left_out)
        record = {
            "status": "done", **request, **describe_domains(domains, corpus), **results, "notes": [*domains.notes, *notes],
            "seconds": round(time.monotonic() - started, 1), "finished": now(), "versions": versions(),
            "machine": outputs[0].machine, "jobs": jobs,
        }  # fmt: skip
        record = json.loads(json.dumps(record, default=str))
        if path is not None:
            write_tensors(path / LEFT_OUT, to_tensors(left_out))
            write_json(path / RECORD, record)
            work.remove_intermediate()
            if not more:  # no run has these texts alone
                for file in work.pretrained.values():
                    file.unlink(missing_ok=True)
        for note in notes:
            logger.warning(note)
        return Rehearsal(record, left_out, path)


def clear_interrupted(path: Path) -> None:
    """Remove what an interrupted rehearsal has left in its folder: parts of files, and source models that were being trained."""
    source_models = path / "source-models"
    for folder in (path, source_models, *(path / "trials").glob("*")):
        clear_parts(folder)
    for unfinished in source_models.glob(".*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for source_model in source_models.glob("*"):
        try:
            Adapted.load(source_model).source_weights()
        except RequestError as error:
            logger.warning("%s; this source model is trained again", error)
            shutil.rmtree(source_model, ignore_errors=True)
    for record in (path / "trials").glob("*/*.json"):
        try:
            check_trial(record)
        except RequestError as error:
            logger.warning("%s; this trial is run again", error)
            record.unlink()


def resolve_plan(plan: Plan, corpus: Corpus, *, any_passes: bool) -> tuple[Plan, dict[str, dict[str, Any]]]:
    """Fill in the defaults of this device, so that runs on other devices can be what was rehearsed.

    Parameters
    ----------
    plan, corpus
        What was asked for.
    any_passes
        Whether the number of passes was not given.

    Returns
    -------
    plan
        With the settings of each method, and as many passes as a run makes by default, but not less than `EPOCHS`.
    resolved
        What was found, by method, for rehearsal.json.
    """
    networks: dict[int | None, Model] = {}
    settings: dict[str, dict[str, Any]] = {}
    resolved: dict[str, dict[str, Any]] = {}
    passes = [plan.epochs]
    for name in dict.fromkeys([*plan.methods, *source_methods(plan)]):
        training = plan.training_of(name)
        with quiet_logging():  # runs say what they are made of themselves
            if training.frozen_layers not in networks:
                networks[training.frozen_layers] = untrained(corpus, plan, name)
        network = networks[training.frozen_layers]
        found = defaults.resolve(training, network, plan.preset_of(name))
        if any_passes and training.epochs is None and found.epochs is not None:
            passes.append(round(found.epochs))
        settings[name] = {key: getattr(found, key) for key in ("max_length", "pretrain_epochs", "view_radius")}
        resolved[name] = {**settings[name], "learning_rate": found.learning_rate, "frozen_layers": network.frozen_layers}
    return dataclasses.replace(plan, epochs=max(passes), resolved=settings), resolved


def describe_request(
    plan: Plan, corpus: Corpus, model: str, metric: str, resolved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the first part of rehearsal.json: what was asked for, and what was found for the device."""
    return {
        "model": model,
        "preset": plan.preset,
        "methods": list(plan.methods),
        "metric": metric,
        "learning_rates": plan.learning_rates,
        "class_priors": plan.class_priors,
        "rarer_classes": plan.rarer_classes,
        "epochs": plan.epochs,
        "resolved": resolved,
        "settings": {**plan.given, **plan.resolved[plan.methods[0]]},
        "classes": list(corpus.classes),
        "unit": corpus.unit,
        "data": list(corpus.files),
    }


def is_finished(path: Path, resume: bool, request: Mapping[str, Any]) -> bool:
    """Return whether the rehearsal in `path` is finished. Refuse a folder with something else in it."""
    record_path = path / RECORD
    if not record_path.is_file():
        entries = path.iterdir() if path.is_dir() else ()
        if any(not (is_part(entry.name) or entry.name.startswith(locks.NAME)) for entry in entries):
            raise RequestError(f"{path}: is not empty and holds no rehearsal; give another --output")
        if resume:
            logger.warning("%s: nothing to resume, so the rehearsal starts from the beginning", path)
        return False
    if not resume:
        raise RequestError(f"{path}: holds another rehearsal; give another --output, or --resume to continue it")
    old, new = (
        read_json(record_path, UNFINISHED, "rehearse again into another --output"),
        json.loads(json.dumps(request, default=str)),
    )
    for method, values in old.get("resolved", {}).items():
        for name, was in values.items():
            if (is_now := new["resolved"].get(method, {}).get(name, was)) != was:
                raise RequestError(
                    f"{path}: cannot resume, setting {name} of {method} was {was} and would now be {is_now}; it began with other "
                    "settings or on another kind of device"
                )
    for key in new:
        if key == "resolved":
            continue
        was, is_now = (data_identity(entry[key]) if key == "data" else entry.get(key) for entry in (old, new))
        if was != is_now:
            what = "the source data have changed since" if key == "data" else f"{key} was {was} and is now {is_now}"
            raise RequestError(f"{path}: cannot resume, {what}")
    return bool(old["status"] == "done")


def describe_domains(domains: Domains, corpus: Corpus) -> dict[str, Any]:
    """Return what rehearsal.json says of the domains."""
    labels = corpus.label_numbers(corpus.classes)
    shares = {}
    for number, name in enumerate(domains.names):
        counts = np.bincount(labels[domains.rows(number)], minlength=len(corpus.classes))
        shares[name] = {"texts": int(counts.sum()), "class_shares": by_class(corpus.classes, counts / max(1, counts.sum()))}
    return {
        "kind": domains.kind,
        "domains": shares,
        "rehearsed": [domains.names[number] for number in domains.rehearsed],
    }


def pretrain_once(work: Work, methods: Sequence[str], more: Sequence[Corpus], progress: Progress) -> None:
    """Pretrain the encoder that source models begin from, on the texts of all domains and on `more`; no label is used.

    Methods with the same settings share it.
    """
    plan, corpora = work.plan, [work.corpus, *more]
    for method in methods:
        training = plan.training_of(method)
        path = work.folder / file_name(str(plan.model), training, [corpus.files for corpus in corpora])
        if not (path.exists() and is_pretrained(path, untrained(work.corpus, plan, method))):
            network = untrained(work.corpus, plan, method)
            pretrain_model(network, corpora, training, progress)
            write_pretrained(path, network)
        work.pretrained[method] = path


def is_pretrained(path: Path, network: Model) -> bool:
    """Return whether a file that an interrupted rehearsal has left holds the weights of such a network."""
    try:
        begin_pretrained(network, path)
    except RequestError as error:
        logger.warning("%s; the encoder is pretrained again", error)
        return False
    return True


def untrained(corpus: Corpus, plan: Plan, method: str | None = None) -> Model:
    """Return the model before any training, with the settings of a method, by default the first."""
    method = method or plan.methods[0]
    chosen = find_settings(plan.model, method, plan.preset_of(method), plan.settings_of(method))
    device = find_device(chosen.training.device)
    name = models.find(plan.model, chosen.model)
    training = defaults.resolve_length(chosen.training, models.get_class(plan.model), device, plan.preset_of(method))
    corpora = Corpora(corpus, corpus.unlabeled(), None)
    return create_model(name, corpora, chosen._replace(training=training), SourceOnly, None, device)


def text_features(corpus: Corpus, plan: Plan, progress: Progress) -> np.ndarray:
    """Return the untrained encoder's features of all texts, [N, D]."""
    network = untrained(corpus, plan)
    encoded = network.encode(corpus)
    with progress.stage(f"features of the {corpus.unit}", len(corpus)):
        features = inference.compute_logits(network, encoded, features=True, progress=progress).features
    assert features is not None
    return features


def store_frozen(corpus: Corpus, plan: Plan, path: Path, progress: Progress) -> None:
    """Run the frozen layers once for all texts; every trial finds its texts there."""
    network = untrained(corpus, plan)
    if network.frozen_layers:
        network.store_lower(network.encode(corpus), path, progress, f"frozen layers, {corpus.unit}", FROZEN_LIMIT)


def hardly_trained(left_out: Sequence[LeftOut]) -> list[str]:
    """Return a note on domains in which the source model is hardly better than always predicting the most frequent class."""
    weak = []
    for entry in left_out:
        most = float(np.bincount(entry.labels).max() / len(entry.labels))
        if float(entry.correct.mean()) < most + HARDLY_BETTER:
            weak.append(f"{entry.name} ({entry.correct.mean():.3f}, the most frequent class {most:.3f})")
    if not weak:
        return []
    return [
        f"source models that have hardly learned: {', '.join(weak)}; train longer (source_epochs) before you trust this rehearsal"
    ]
