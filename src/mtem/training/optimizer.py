"""The optimizer of a method and its model, with parameter groups by layer."""

from __future__ import annotations

import torch
from torch import nn

from mtem.errors import RequestError
from mtem.methods.base import Method
from mtem.training.settings import TrainingSettings

FUSED = ("cpu", "cuda")  # where the optimizers have a kernel that updates all parameters at once


def make_optimizer(method: Method, settings: TrainingSettings, kind: str, learning_rate: float) -> torch.optim.Optimizer:
    """Groups by layer (rates fall by `layer_decay` from the top) and by whether weight decay applies."""
    model = method.model
    named = list(model.trainable().items())
    depths = model.depths() if settings.layer_decay < 1 else {}
    top = max(depths.values(), default=0)
    named += [(f"{part}.{name}", p) for part, module in method.modules().items() for name, p in module.named_parameters()]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = method.learning_rate_factor(name) * settings.layer_decay ** (top - depths.get(name, top))
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    if not groups:
        raise RequestError("nothing to train: all layers are frozen")
    parts = [
        {"params": parameters, "lr": learning_rate * factor, "weight_decay": decay, "factor": factor}
        for (factor, decay), parameters in groups.items()
    ]
    optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    return optimizer(parts, lr=learning_rate, fused=model.device.type in FUSED)
