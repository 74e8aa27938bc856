"""A source model that another run has trained: whether it fits, and what came with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtem.data.cache import fingerprint_of
from mtem.errors import RequestError
from mtem.models.base import CosineHead, Model
from mtem.selection.left_out import LeftOut
from mtem.training.weights import everything, load

if TYPE_CHECKING:
    from mtem.run.result import Adapted


def begin_from(model: Model, source: Adapted) -> None:
    """Give the model the theta_1 of `source`. Refuses one of another shape."""
    name = source.path or "the source model"
    if source.classes != model.classes:
        raise RequestError(
            f"{name}: its classes are {', '.join(source.classes)}, those of the labeled texts {', '.join(model.classes)}; "
            "a source model must have the same"
        )
    if _head(source.model) != _head(model):
        raise RequestError(
            f"{name}: its head is of another kind; a method with a head of its own (mme) needs the source model of such a run"
        )
    given, own = source.source_weights(), everything(model)
    for key in sorted({*own, *given}):
        shapes = [tuple(weights[key].shape) if key in weights else None for weights in (given, own)]
        if shapes[0] != shapes[1]:
            there, wanted = ("absent" if shape is None else f"of shape {list(shape)}" for shape in shapes)
            raise RequestError(f"{name}: does not fit this model: {key} is {there} there and {wanted} here")
    load(model, given)


def fingerprint(source: Adapted) -> str:
    """sha256 over theta_1, its names and values."""
    weights = source.source_weights()
    return fingerprint_of(*(part for name in sorted(weights) for part in (name, _bytes(weights[name]))))


def _head(model: Model) -> tuple[str, float | None]:
    head = model.head
    return ("cosine", head.temperature) if isinstance(head, CosineHead) else ("linear", None)


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_data(source_model: Adapted | None, request: dict[str, Any]) -> list[LeftOut] | None:
    """What came with the source model about domains it was trained without, if it was trained on the same labeled texts."""
    if source_model is None or "data" not in source_model.record:
        return None
    for part in ("source", "target_labeled"):
        if same_files(request["data"][part]) != same_files(source_model.record["data"][part]):
            return None
    return source_model.left_out()


def same_files(entries: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """What is equal for the same data; what came from memory has no sha256 of its bytes, but of its texts."""
    return [(entry["sha256"], entry.get("texts"), entry.get("domain")) for entry in entries]
