"""The settings whose defaults depend on the device and on the model: none in the settings, found here when both are known.

A GPU has time for longer texts, more passes and a pretraining (docs/recipe.md, "Pilot: longer texts").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from mtem.models.base import Model
from mtem.models.text import SMALL_WIDTH
from mtem.training.settings import TrainingSettings

ON_CPU: dict[str, Any] = {"max_length": 256, "epochs": 2.0, "pretrain_epochs": 0.0, "view_radius": 0.0}
ON_GPU: dict[str, Any] = {"max_length": 512, "epochs": 12.0, "pretrain_epochs": 24.0, "view_radius": 0.005}
GPU_LEARNING_RATE = 5e-5  # of an encoder of which all layers are trained; else it is the model's default
RECOMMENDED = "recommended"
PAPER = "paper"  # the preset that has the defaults of a CPU on every device


def has_gpu_defaults(device: torch.device, preset: str) -> bool:
    """Return whether a run has the defaults of a GPU."""
    return device.type != "cpu" and preset != PAPER


def resolve_length(
    training: TrainingSettings, model_cls: type[Model], device: torch.device, preset: str = RECOMMENDED
) -> TrainingSettings:
    """Return the settings with a `max_length`, which has to be known before the model is created."""
    return _filled(training, max_length=_usual(model_cls, device, preset)["max_length"])


def resolve(
    training: TrainingSettings,
    model: Model,
    preset: str = RECOMMENDED,
    *,
    from_source_model: bool = False,
    target_labeled: bool = False,
) -> TrainingSettings:
    """Return the settings with all of these defaults filled in.

    Parameters
    ----------
    training
        The settings of the run; what is given there stays.
    model
        On its device, with its layers frozen.
    preset
        Of the method.
    from_source_model
        Whether the run begins from the source model of another, which is not pretrained again.
    target_labeled
        Whether examples of the target are labeled.
    """
    on_gpu = has_gpu_defaults(model.device, preset)
    usual = _usual(type(model), model.device, preset)
    whole = not model.threads and not model.frozen_layers
    small = whole and model.pretraining_obstacle() is None and model.hidden_width < SMALL_WIDTH
    if not small or from_source_model:
        usual["pretrain_epochs"] = 0.0
    if not whole:
        assumed = model.prior_without_labels if training.target_class_prior == "auto" else training.target_class_prior
        rehearsed = preset == RECOMMENDED and assumed == "none" and not target_labeled
        usual["view_radius"] = model.default_view_radius if rehearsed else 0.0
    rate = GPU_LEARNING_RATE if on_gpu and whole else model.default_learning_rates()[1]
    return _filled(training, **usual, learning_rate=rate)


def describe(given: Mapping[str, Any], resolved: TrainingSettings) -> str:
    """Return the values that were filled in, as ``name=value`` with commas."""
    values = {name: getattr(resolved, name) for name in (*ON_GPU, "learning_rate") if given[name] is None}
    return ", ".join(f"{name}={value:g}" for name, value in values.items())


def _usual(model_cls: type[Model], device: torch.device, preset: str) -> dict[str, Any]:
    """Return the defaults of a device; those of the model, if it has its own, are the same on all."""
    usual = ON_GPU if has_gpu_defaults(device, preset) else ON_CPU
    return {name: model_cls.defaults.get(name, value) for name, value in usual.items()}


def _filled(training: TrainingSettings, **defaults: Any) -> TrainingSettings:
    """Return the settings with these values where they have none."""
    return dataclasses.replace(training, **{name: value for name, value in defaults.items() if getattr(training, name) is None})
