"""`mtem.adapt`: check the request, load the data and the model, run the pipeline."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import torch

from mtem import liveness, methods, models, parallel, settings
from mtem.data import summary
from mtem.data.cache import file_fingerprint
from mtem.data.corpus import Corpus, check_source, check_target
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.methods.base import Method
from mtem.models import encoders
from mtem.models.base import Model, ModelSettings
from mtem.progress import Progress
from mtem.run import defaults
from mtem.run.candidates import OnCandidate
from mtem.run.directory import REHEARSAL, RunDirectory
from mtem.run.follower import FollowerDirectory
from mtem.run.pipeline import Observer, Run
from mtem.run.pretrained import begin_pretrained, describe_pretrained, find_pretrained
from mtem.run.repeat import model_fingerprint
from mtem.run.result import Adapted
from mtem.run.source_model import begin_from, data_identity, fingerprint, matching_left_out, warn_of_other_division
from mtem.selection import diagnostics
from mtem.selection.diagnostics import advised_against, not_rehearsed, other_texts, settings_differ
from mtem.selection.left_out import LeftOut
from mtem.selection.rehearsed import RECORD, SOURCE_ONLY, Advice, Rehearsal
from mtem.training.devices import find_device, find_precision
from mtem.training.settings import TrainingSettings

AUTO = "auto"
# What a rehearsal can choose; run.json says for each where its value comes from.
CHOICES = ("learning_rate", "epochs", "stop_epochs", "target_class_prior", "criterion", "frozen_layers")
OF_THE_MACHINE = ("seed", "device", "precision", "log_every", "checkpoint_seconds")  # not taken from a rehearsal
FREE_ON_RESUME = {"checkpoint_seconds", "log_every", "max_skipped_steps"}  # settings that may differ when a run is resumed
# What a run has found for its device, and a resumed one must have too.
SAME_ON_RESUME = ("max_length", "epochs", "pretrain_epochs", "learning_rate", "frozen_layers", "view_radius")

logger = logging.getLogger(__name__)


class AdaptSettings(NamedTuple):
    """All settings of an adaptation: the defaults, the preset's on top, those given by name on top."""

    training: TrainingSettings
    method: Any
    model: ModelSettings

    def record(self) -> dict[str, Any]:
        """Return all settings as one flat dict, for run.json."""
        return settings.record(*self)


class Corpora(NamedTuple):
    """The texts of an adaptation."""

    source: Corpus
    target: Corpus
    target_labeled: Corpus | None


Options = ParamSpec("Options")


def claims_output(function: Callable[Options, Adapted]) -> Callable[Options, Adapted]:
    """Hold the lock of the folder `output` while the function runs."""

    @functools.wraps(function)
    def claiming(*args: Options.args, **options: Options.kwargs) -> Adapted:
        output: Any = options.get("output")
        if output is None or not liveness.is_first():  # the first one holds the lock
            return function(*args, **options)
        with RunDirectory(Path(output)).claimed(bool(options.get("resume"))):
            return function(*args, **options)

    return claiming


@claims_output
def adapt(
    source: Any,
    target: Any,
    *,
    target_labeled: Any = None,
    model: str | os.PathLike[str] = encoders.DEFAULT,
    method: str = "mtem",
    preset: str = "recommended",
    source_model: Adapted | str | os.PathLike[str] | None = None,
    rehearsal: Rehearsal | str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    observe: Observer | None = None,
    on_candidate: OnCandidate | None = None,
    frozen_store: Path | None = None,
    pretrained: Path | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> Adapted:
    """Train on labeled source texts, adapt to unlabeled target texts, choose the weights without target labels.

    Parameters
    ----------
    source, target, target_labeled
        Paths, lists of them, data frames, Hugging Face datasets, lists of texts, (texts, labels) pairs, or a dict that
        gives each a domain name. Labels of `target`, if any, are never read. Class names are text: labels 0 and 1 become
        "0" and "1", and that is what `predict` returns.
    model
        An encoder (a packaged name, a directory, or a Hugging Face name), or "bigcn" for threads.
    method, preset
        See `mtem methods`. A preset sets many settings at once; settings given by name come on top. With a rehearsal the method
        may be "auto": the one that it recommends.
    source_model
        The result of an earlier adaptation, or its run directory: its source model is used instead of training one.
    rehearsal
        The result of `mtem.rehearse`, or its folder: learning rate, passes, assumed class shares, the end of the run, the
        estimate's correction and the temperature come from it, unless given by name.
    output
        The run directory. Without it nothing is written and nothing can be resumed.
    resume
        Continue the unfinished run in `output`.
    observe
        Called with every line of the history and the model. At lines of stage "evaluation" the model has the evaluated
        weights, and "bias" is the prior correction that they would get at the end (see `mtem.training.weights.add_bias`).
    on_candidate
        Called with the step, the evaluated rows of the target and the `CandidateOutputs` of every candidate.
    frozen_store
        A file of `Model.store_lower`: what it has of these texts is not computed again.
    pretrained
        A file of `write_pretrained`: the encoder in it is used instead of pretraining one.
    text_column, label_column
        Names of the columns, if they are not the usual ones.
    progress
        Where progress is shown; nowhere by default.
    **given
        Any field of `TrainingSettings` or of the settings of the method or the model.

    Returns
    -------
    Adapted
        The model with the chosen weights, its record and the table of target texts.

    Raises
    ------
    RequestError
        If the request is wrong: nothing has been written.
    RunError
        If the run failed; it can be resumed if it has an `output`.
    """
    progress = progress or Progress(quiet=True)
    if rehearsal is not None and not isinstance(rehearsal, Rehearsal):
        rehearsal = Rehearsal.load(rehearsal)
    if rehearsal is not None:
        rehearsal.check(model=str(model), preset=preset)
    auto = method == AUTO
    method, advice = find_method(method, rehearsal)
    if rehearsal is not None and auto:
        given = without_settings_of_others(given, model, method, rehearsal.methods)
    rehearsed = {} if advice is None or rehearsal is None else rehearsed_settings(rehearsal, advice, model, method, preset)
    choices = {"method": "rehearsal" if auto else "given", **find_origins(model, method, preset, rehearsed, given)}
    method_cls, model_cls = methods.get(method), models.get_class(model)
    chosen = find_settings(model, method, preset, {**rehearsed, **given})
    if advice is not None and (other := changed_settings(rehearsed, chosen)):
        logger.warning(settings_differ(other))
        advice = None
    warn_of_unused(method_cls, chosen, find_settings(model, method, preset, {}), given)
    device = parallel.start(find_device(chosen.training.device))
    find_precision(chosen.training.precision, device)  # refuses one that the device does not have
    path = Path(output) if output is not None else None
    directory_cls = RunDirectory if parallel.is_main() else FollowerDirectory
    name = models.find(model, chosen.model)
    if source_model is not None and not isinstance(source_model, Adapted):
        source_model = Adapted.load(source_model)

    columns: dict[str, str | None] = {"text_column": text_column, "label_column": label_column}
    corpora = load_corpora(source, target, target_labeled, method_cls, model_cls, columns)
    request = describe_request(corpora, chosen, method=method, preset=preset, model=str(model), source_model=source_model)
    request |= {"columns": columns, "model_sha256": model_fingerprint(model)}
    request |= {"choices": choices, "rehearsal": None if rehearsal is None else describe_rehearsal(rehearsal, request)}
    if source_model is not None:
        warn_of_other_division(source_model, request)
    else:
        pretrained = pretrained or find_pretrained(rehearsal, request, chosen.training)
    request |= {"pretrained": describe_pretrained(pretrained)}
    if resume and path is not None and is_finished(RunDirectory(path), request):
        logger.info("%s: this run is finished already", path)
        return Adapted.load(path)
    chosen = chosen._replace(training=defaults.resolve_length(chosen.training, model_cls, device, preset))
    network = create_model(name, corpora, chosen, method_cls, source_model, device)
    training = defaults.resolve(
        chosen.training,
        network,
        preset,
        from_source_model=source_model is not None,
        target_labeled=corpora.target_labeled is not None,
    )
    if defaults.has_gpu_defaults(device, preset) and (found := defaults.describe(request["settings"], training)):
        logger.info("defaults on %s: %s", device.type, found)
    if pretrained is not None:
        begin_pretrained(network, pretrained)
    with contextlib.ExitStack() as stack:
        workspace = None if path is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtem-")))
        stack.callback(setattr, progress, "outlook", None)
        directory = directory_cls(path, workspace, frozen_store)
        run = Run(
            network, method_cls, training, chosen.method, *corpora, directory, progress, request,
            observe=observe, on_candidate=on_candidate, advice=advice,
            left_out=rehearsed_left_out(rehearsal, request) or matching_left_out(source_model, request),
        )  # fmt: skip
        if resume:
            check_resolved(directory, run.resolved())
        return run.run(resume)


def find_settings(model: str | os.PathLike[str], method: str, preset: str, given: Mapping[str, Any]) -> AdaptSettings:
    """Return all settings of an adaptation. Refuse unknown names and bad values.

    They do not depend on the device: settings whose defaults do are None.
    """
    method_cls, model_cls = methods.get(method), models.get_class(model)
    if preset not in method_cls.presets:
        raise RequestError(f"unknown preset '{preset}': {method} has {', '.join(method_cls.presets)}")
    values = {**(defaults.ON_CPU if preset == defaults.PAPER else {}), **model_cls.defaults, **method_cls.presets[preset]}
    values |= {name: value for name, value in model_cls.preset(preset, {**values, **given}).items() if name in values}
    classes = {"training": TrainingSettings, "method": method_cls.Settings, "model": model_cls.Settings}
    return AdaptSettings(**settings.build(classes, {**values, **given}))


def warn_of_unused(method_cls: type[Method], chosen: AdaptSettings, usual: AdaptSettings, given: Iterable[str]) -> None:
    """Warn of given settings that change nothing, because of others."""
    values, before = chosen.record(), usual.record()
    for name, reason in method_cls.unused(chosen.method).items():
        if name in given and values[name] != before[name]:
            logger.warning("setting %s=%s: of no use with %s", name, values[name], reason)


def find_method(method: str, rehearsal: Rehearsal | None) -> tuple[str, Advice | None]:
    """Return the method, and what a rehearsal advises for it.

    Raises
    ------
    RequestError
        If the method is "auto" and there is no rehearsal.
    """
    if method == AUTO:
        if rehearsal is None:
            raise RequestError(f"--method {AUTO}: needs a rehearsal that recommends a method; give --rehearsal or --rehearse")
        method = rehearsal.method
        logger.info("method %s: %s", method, rehearsal.why)
    methods.get(method)  # refuses an unknown one
    advice = None if rehearsal is None else rehearsal.advice(method)
    if rehearsal is not None and advice is None and method != SOURCE_ONLY:
        logger.warning(not_rehearsed(method, rehearsal.methods))
    elif advice is not None and not advice.adapt and method != SOURCE_ONLY:
        logger.warning(advised_against(method, float(advice.settings["epochs"])))
    return method, advice


def rehearsed_settings(
    rehearsal: Rehearsal, advice: Advice, model: str | os.PathLike[str], method: str, preset: str
) -> dict[str, Any]:
    """Return the settings that trials were run with, as far as this method has them, and on top those that were chosen."""
    accepted = settings.names(*map(type, find_settings(model, method, preset, {})))
    common = {
        name: value for name, value in rehearsal.record["settings"].items() if name in accepted and name not in OF_THE_MACHINE
    }
    return {**common, **advice.settings}


def find_origins(
    model: str | os.PathLike[str], method: str, preset: str, rehearsed: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, str]:
    """Return where the value of each setting comes from, for run.json: those that a rehearsal can choose, and all given ones."""
    preset_values = {**models.get_class(model).defaults, **methods.get(method).presets.get(preset, {})}
    origins = {}
    for name in (*CHOICES, *(name for name in {**rehearsed, **given} if name not in CHOICES)):
        if name in given:
            origins[name] = "given"
        elif name in rehearsed:
            origins[name] = "rehearsal"
        else:
            origins[name] = f"preset {preset}" if name in preset_values else "default"
    return origins


def changed_settings(rehearsed: Mapping[str, Any], chosen: AdaptSettings) -> list[str]:
    """Return the settings that differ from the rehearsed ones: estimates and temperatures were seen with those."""
    values = chosen.record()
    return [name for name, value in rehearsed.items() if name not in ("evaluations", "criterion") and values[name] != value]


def without_settings_of_others(
    given: Mapping[str, Any], model: str | os.PathLike[str], method: str, tried: Iterable[str]
) -> dict[str, Any]:
    """Return the given settings without those that the chosen method lacks and another one that was tried has."""
    own = settings.names(*map(type, find_settings(model, method, "recommended", {})))
    of_others = {name for other in tried for name in settings.names(methods.get(other).Settings)}
    return {name: value for name, value in given.items() if name in own or name not in of_others}


def describe_rehearsal(rehearsal: Rehearsal, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json says of the rehearsal. Refuse one with other classes; warn if it had other source texts."""
    rehearsal.check(classes=list(request["classes"]))
    same = data_identity(rehearsal.record["data"]) == data_identity(request["data"]["source"])
    if not same:
        logger.warning(other_texts(str(rehearsal.path or "the rehearsal")))
    return {
        "path": None if rehearsal.path is None else str(rehearsal.path), "same_texts": same,
        "sha256": None if rehearsal.path is None else file_fingerprint(rehearsal.path / RECORD),
        "domains": rehearsal.record["rehearsed"], "recommended": rehearsal.method, "why": rehearsal.why,
    }  # fmt: skip


def rehearsed_left_out(rehearsal: Rehearsal | None, request: Mapping[str, Any]) -> list[LeftOut] | None:
    """Return the logits of the rehearsal's source models, if it had the same source texts and the target has no labeled ones."""
    if rehearsal is None or not request["rehearsal"]["same_texts"] or request["data"]["target_labeled"]:
        return None
    return rehearsal.left_out()


def load_corpora(
    source: Any,
    target: Any,
    target_labeled: Any,
    method_cls: type[Method],
    model_cls: type[Model],
    columns: Mapping[str, str | None],
) -> Corpora:
    """Read the texts and refuse what no classifier can be trained on."""
    logger.info("reading the data")

    def read(data: Any, name: str, labeled: bool) -> Corpus:
        corpus = load_corpus(data, labeled=labeled, name=name, **columns)
        for line in summary.describe_files(corpus):
            logger.info(line)
        for line in diagnostics.data_warnings(corpus, model_cls):
            logger.warning(line)
        return corpus

    labeled = read(source, "source", labeled=True)
    check_source(labeled)
    unlabeled = read(target, "target", labeled=False)
    check_target(unlabeled, labeled)
    labeled_target = None
    if target_labeled is not None:
        labeled_target = read(target_labeled, "labeled target", labeled=True)
        labeled_target.label_numbers(labeled.classes)  # refuses a class that the source does not have
    elif method_cls.needs_target_labels:
        raise RequestError(f"method '{method_cls.name}' needs labeled target {unlabeled.unit}: give --target-labeled")
    return Corpora(labeled, unlabeled, labeled_target)


def describe_request(
    corpora: Corpora, chosen: AdaptSettings, *, method: str, preset: str, model: str, source_model: Adapted | None
) -> dict[str, Any]:
    """Return the first part of run.json: what was asked for."""
    labeled = corpora.target_labeled
    return {
        "method": method,
        "preset": preset,
        "model": model,
        "classes": list(corpora.source.classes),
        "unit": corpora.target.unit,
        "settings": chosen.record(),
        "data": {
            "source": list(corpora.source.files),
            "target": list(corpora.target.files),
            "target_labeled": list(labeled.files) if labeled is not None else [],
        },
        "source_model": None if source_model is None else {"path": source_model.path, "sha256": fingerprint(source_model)},
    }


def is_finished(directory: RunDirectory, request: Mapping[str, Any]) -> bool:
    """Return whether the run in `directory` is finished. Refuse to resume a run with another request."""
    if not directory.has_record():
        if not (directory.root / REHEARSAL).is_dir():
            logger.warning("%s: nothing to resume, so the run starts from the beginning", directory.path)
        return False
    old, path = directory.read_record(resume=True), directory.path
    new = json.loads(json.dumps(request, default=str))
    for key in ("method", "preset", "model", "classes"):
        if old.get(key) != new[key]:
            raise RequestError(f"{path}: cannot resume, {key} was {old.get(key)!r} and is now {new[key]!r}")
    for key in sorted({*old["settings"], *new["settings"]} - FREE_ON_RESUME):
        was, is_now = old["settings"].get(key), new["settings"].get(key)
        if was != is_now:
            raise RequestError(f"{path}: cannot resume, setting {key} was {was} and is now {is_now}")
    if (old.get("source_model") or {}).get("sha256") != (new["source_model"] or {}).get("sha256"):
        raise RequestError(f"{path}: cannot resume, it began from another source model; give the --source-model it began with")
    if (old.get("pretrained") or {}).get("sha256") != (new["pretrained"] or {}).get("sha256"):
        raise RequestError(f"{path}: cannot resume, the rehearsal whose pretrained encoder it began with is not there any more")
    for part, entries in new["data"].items():
        if data_identity(old["data"][part]) != data_identity(entries):
            raise RequestError(f"{path}: cannot resume, the {part.replace('_', '-')} data have changed since")
    return bool(old["status"] == "done")


def check_resolved(directory: RunDirectory, resolved: Mapping[str, Any]) -> None:
    """Refuse to resume a run that has found other values for its device."""
    if not directory.has_record():
        return
    old = directory.read_record().get("resolved") or {}
    for name in SAME_ON_RESUME:
        if name in old and old[name] != resolved[name]:
            raise RequestError(
                f"{directory.path}: cannot resume, setting {name} was {old[name]} (device {old.get('device')}) and would now be "
                f"{resolved[name]} (device {resolved['device']}); resume it on a device of the same kind, or begin a new run"
            )


def create_model(
    name: str,
    corpora: Corpora,
    chosen: AdaptSettings,
    method_cls: type[Method],
    source_model: Adapted | None,
    device: torch.device,
) -> Model:
    """Return the model before any training, or with the weights of `source_model`; `max_length` must be known."""
    training = chosen.training
    assert training.max_length is not None
    torch.manual_seed(training.seed)
    texts = [corpus for corpus in corpora if corpus is not None]
    like = None if source_model is None else source_model.model
    model = models.create(
        name, corpora.source.classes, corpora=texts, settings=chosen.model, max_length=training.max_length,
        attention=training.attention, like=like,
    ).to(device)  # fmt: skip
    method_cls.prepare_model(model, chosen.method)
    if source_model is not None:
        begin_from(model, source_model)
    if model.max_length is not None and model.max_length < training.max_length:
        logger.warning(diagnostics.text_cut(training.max_length, model.max_length))
    model.precision = find_precision(training.precision, device, model)
    model.save_memory(training.microbatches, training.activation_checkpointing)
    model.freeze(layers_to_freeze(training, model))
    return model


def layers_to_freeze(training: TrainingSettings, model: Model) -> int:
    """Return the setting `frozen_layers`; by default all layers are trained on a GPU, and the upper two on a CPU."""
    if training.frozen_layers is not None:
        return training.frozen_layers
    return -2 if model.device.type == "cpu" and model.has_layers else 0
