"""What a rehearsal compares: methods, learning rates, assumed class shares, and how long."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtem import methods, settings
from mtem.errors import RequestError
from mtem.methods.base import Method
from mtem.rehearsal.domains import Domains
from mtem.run.adapt import find_settings
from mtem.selection import priors
from mtem.training.settings import TrainingSettings

EPOCHS = 6  # passes of a trial, if a run does not make more by default
FACTORS = (1.0, 2.5)  # learning rates to try, relative to the default
# Settings that a rehearsal sets itself.
OWN = ("steps", "stop_epochs", "evaluations", "evaluation_texts", "left_out_models", "criterion", "calibrate")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes
    ----------
    methods
        Names or files.
    model, preset, given
        As for `adapt`; `given` has neither learning rate nor prior nor passes.
    learning_rates
        None: `FACTORS` times the default.
    class_priors
        None: each method's own.
    rarer_classes
        Whether classes are made rarer.
    epochs
        Passes of a trial.
    factors
        Learning rates relative to the default, if none are given.
    resolved
        By method: settings that were found for the device, which all of its runs have.
    """

    methods: tuple[str, ...]
    model: str | os.PathLike[str]
    preset: str
    given: dict[str, Any]
    learning_rates: tuple[float, ...] | None
    class_priors: tuple[str, ...] | None
    rarer_classes: bool
    epochs: int
    factors: tuple[float, ...] = FACTORS
    resolved: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The seed of every random choice."""
        return int(self.given.get("seed", 0))

    def preset_of(self, method: str) -> str:
        """Return the preset, or "recommended" for a method that does not have it."""
        return self.preset if self.preset in methods.get(method).presets else "recommended"

    def own_source_model(self, method: str) -> bool:
        """Return whether a method needs a source model of its own: for its head, or for a preset that changes the training."""
        preset = methods.get(method).presets[self.preset_of(method)]
        return has_own_head(method) or bool(set(preset) & set(settings.names(TrainingSettings)))

    def settings_of(self, method: str) -> dict[str, Any]:
        """Return the given settings that the method, the model or the run has, and those that were found for the device."""
        accepted = settings.names(*map(type, find_settings(self.model, method, self.preset_of(method), {})))
        return {**{name: value for name, value in self.given.items() if name in accepted}, **self.resolved.get(method, {})}

    def training_of(self, method: str) -> TrainingSettings:
        """Return the training settings of a method."""
        return find_settings(self.model, method, self.preset_of(method), self.settings_of(method)).training

    def priors_of(self, method: str) -> tuple[str, ...]:
        """Return the priors to compare for a method."""
        own = self.training_of(method).target_class_prior
        return self.class_priors or (own,)

    def rates_of(self, method: str, default: float) -> tuple[float, ...]:
        """Return the learning rates to compare for a method, whose default is `default` unless its preset has one."""
        if self.learning_rates is not None:
            return self.learning_rates
        own = self.training_of(method).learning_rate
        return tuple(float(f"{factor * (default if own is None else own):.6g}") for factor in self.factors)

    def rare_of(self, classes: Sequence[str], domains: Domains, labels: np.ndarray) -> tuple[str, ...]:
        """Return "", for all texts, and the classes that are made rarer: both of two, of more the largest and the smallest."""
        if not self.rarer_classes:
            return ("",)
        order = np.argsort(np.bincount(labels, minlength=len(classes)), kind="stable")
        return ("", *dict.fromkeys(classes[int(number)] for number in (order[0], order[-1])))


def has_own_head(method: str) -> bool:
    """Return whether a method changes the classifier before any training."""
    return methods.get(method).prepare_model.__func__ is not Method.prepare_model.__func__  # type: ignore[attr-defined]


def make_plan(
    names: Sequence[str],
    model: str | os.PathLike[str],
    preset: str,
    learning_rates: Sequence[float] | None,
    class_priors: Sequence[str] | None,
    rarer_classes: bool | None,
    given: Mapping[str, Any],
) -> Plan:
    """Check the request and return the plan; see `mtem.rehearse`.

    Raises
    ------
    RequestError
        If a method, a setting or a value is unknown, or cannot be rehearsed.
    """
    if not names:
        raise RequestError("--method: expected at least one method")
    given = dict(given)
    for name in OWN:
        if name in given:
            raise RequestError(f"--set {name}: a rehearsal sets this itself; leave it out")
    accepted: set[str] = set()
    for name in names:
        if methods.get(name).needs_target_labels:
            raise RequestError(f"--method {name}: needs labeled target texts, which a rehearsal does not have")
        if methods.get(name).name == "source-only":
            raise RequestError(f"--method {name}: every rehearsal compares with the source model; name methods that adapt")
        own_preset = preset if preset in methods.get(name).presets else "recommended"
        if own_preset != preset and len(names) == 1:
            raise RequestError(f"unknown preset '{preset}': {name} has {', '.join(methods.get(name).presets)}")
        parts = find_settings(model, name, own_preset, {})
        own = {key: value for key, value in given.items() if key in settings.names(*map(type, parts))}
        checked = find_settings(model, name, own_preset, own).record()  # refuses bad values
        given |= {key: checked[key] for key in own}
        accepted |= set(own)
    if unknown := [key for key in given if key not in accepted]:
        find_settings(model, names[0], "recommended", {unknown[0]: given[unknown[0]]})  # raises the error, with advice
    rate, prior, epochs = (given.pop(key, None) for key in ("learning_rate", "target_class_prior", "epochs"))
    for value, several, name, option in (
        (rate, learning_rates, "learning_rate", "--learning-rates"),
        (prior, class_priors, "target_class_prior", "--class-priors"),
    ):
        if value is not None and several is not None:
            raise RequestError(f"--set {name}={value}: {option} is given too; give one of them")
    if rate is not None:
        learning_rates = [rate]
    if prior is not None:
        class_priors = [prior]
    for value in class_priors or ():
        if value not in priors.KINDS or value == "labeled":
            kinds = ", ".join(kind for kind in priors.KINDS if kind != "labeled")
            raise RequestError(f"--class-priors {value}: expected some of {kinds}")
    if learning_rates is not None and not (learning_rates := list(dict.fromkeys(learning_rates))):
        raise RequestError("--learning-rates: expected at least one number")
    class_priors = None if class_priors is None else list(dict.fromkeys(class_priors))
    for number in learning_rates or ():
        if not 0 < number < 10:
            raise RequestError(f"--learning-rates {number}: expected a positive number")
    if epochs is not None and (epochs < 1 or epochs != round(epochs)):
        raise RequestError(f"--set epochs={epochs}: a rehearsal needs a whole number of passes, at least 1")
    compared = class_priors is not None and len(class_priors) > 1
    return Plan(
        tuple(names), model, preset, given, None if learning_rates is None else tuple(map(float, learning_rates)),
        None if class_priors is None else tuple(class_priors), compared if rarer_classes is None else rarer_classes,
        EPOCHS if epochs is None else int(epochs),
    )  # fmt: skip
