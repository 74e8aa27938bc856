"""The optimizer of a method and its model, with parameter groups by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mtem.errors import RequestError
from mtem.methods.base import Method
from mtem.training.settings import TrainingSettings

FUSED = ("cpu", "cuda")  # devices on which the optimizers have a kernel that updates all parameters at once


def make_optimizer(
    method: Method, settings: TrainingSettings, name: str, learning_rate: float, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer called `name`.

    Parameters are grouped by layer (learning rates fall by `layer_decay` from the top) and by whether weight decay applies.
    If its steps are to be captured, the learning rates are tensors on the device.
    """
    model = method.model
    parameters = list(model.trainable().items())
    depths = model.depths() if settings.layer_decay < 1 else {}
    top = max(depths.values(), default=0)
    parameters += [(f"{part}.{key}", p) for part, module in method.modules().items() for key, p in module.named_parameters()]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for key, parameter in parameters:
        factor = method.learning_rate_factor(key) * settings.layer_decay ** (top - depths.get(key, top))
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    if not groups:
        raise RequestError("nothing to train: all layers are frozen")
    options: list[dict[str, Any]] = [
        {"params": members, "lr": learning_rate * factor, "weight_decay": decay, "factor": factor}
        for (factor, decay), members in groups.items()
    ]
    classes: dict[str, type[torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD
    }  # fmt: skip
    settled: dict[str, Any] = {"fused": model.device.type in FUSED}
    if capturable:
        for option in options:
            option["lr"] = torch.tensor(option["lr"], dtype=torch.float32, device=model.device)
        if name != "sgd" and model.device.type == "cuda":
            settled["capturable"] = True
    optimizer: torch.optim.Optimizer = classes[name](options, lr=learning_rate, **settled)  # type: ignore[call-arg]
    return optimizer
