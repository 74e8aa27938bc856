"""A source model that another run has trained: whether it fits, and what came with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtem.data.cache import fingerprint_of
from mtem.errors import RequestError
from mtem.models.base import Model
from mtem.models.heads import CosineHead
from mtem.selection.left_out import LeftOut
from mtem.training.weights import everything, load

if TYPE_CHECKING:
    from mtem.run.result import Adapted

logger = logging.getLogger(__name__)


def begin_from(model: Model, source: Adapted) -> None:
    """Give the model the source weights of another run. Refuse one with other classes, another head or other shapes."""
    name = source.path or "the source model"
    if source.classes != model.classes:
        raise RequestError(
            f"{name}: its classes are {', '.join(source.classes)}, those of the labeled texts {', '.join(model.classes)}; "
            "a source model must have the same"
        )
    if _head_kind(source.model) != _head_kind(model):
        raise RequestError(
            f"{name}: its head is of another kind; a method with a head of its own (mme) needs the source model of such a run"
        )
    weights, own_weights = source.source_weights(), everything(model)
    for key in sorted({*own_weights, *weights}):
        shapes = [tuple(tensors[key].shape) if key in tensors else None for tensors in (weights, own_weights)]
        if shapes[0] != shapes[1]:
            got, expected = ("absent" if shape is None else f"of shape {list(shape)}" for shape in shapes)
            raise RequestError(f"{name}: does not fit this model: {key} is {got} there and {expected} here")
    load(model, weights)


def fingerprint(source: Adapted) -> str:
    """Return the sha256 over names and values of the source weights."""
    weights = source.source_weights()
    return fingerprint_of(*(part for name in sorted(weights) for part in (name, _bytes(weights[name]))))


def matching_left_out(source_model: Adapted | None, request: Mapping[str, Any]) -> list[LeftOut] | None:
    """Return the logits of left-out models that came with the source model, if it was trained on the same labeled texts."""
    if source_model is None or "data" not in source_model.record:
        return None
    for part in ("source", "target_labeled"):
        if data_identity(request["data"][part]) != data_identity(source_model.record["data"][part]):
            return None
    return source_model.left_out()


def warn_of_other_division(source_model: Adapted, request: Mapping[str, Any]) -> None:
    """Log a warning if the source model may have been trained on texts that this run keeps for the outer loop."""
    now, before = request["settings"], source_model.record.get("settings", {})
    other = [name for name in ("outer_share", "validation_share", "seed") if before.get(name) != now[name]]
    if now["outer_share"] and other:
        was, wanted = (", ".join(f"{name}={values.get(name)}" for name in other) for values in (before, now))
        logger.warning(
            "%s: was trained with %s, so it may have seen labels that outer_share keeps from the weights; train one with %s",
            source_model.path or "the source model", was, wanted,
        )  # fmt: skip


def data_identity(entries: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what is equal for the same data. Data from memory has no sha256 of its bytes, but one of its texts."""
    return [(entry["sha256"], entry.get("texts"), entry.get("domain")) for entry in entries]


def _head_kind(model: Model) -> tuple[str, float | None]:
    head = model.head
    return ("cosine", head.temperature) if isinstance(head, CosineHead) else ("linear", None)


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
