"""A pretrained encoder that a rehearsal and the runs after it share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtem.data.cache import file_fingerprint, fingerprint_of
from mtem.errors import RequestError
from mtem.models import integrity
from mtem.models.base import Model
from mtem.run.source_model import data_identity
from mtem.selection.rehearsed import Rehearsal
from mtem.tensors import read_tensors, write_tensors
from mtem.training.settings import TrainingSettings

# The settings that a pretraining depends on.
SETTINGS = (
    "pretrain_epochs", "pretrain_learning_rate", "pretrain_batch_size", "seed", "max_length", "warmup_ratio", "weight_decay",
    "layer_decay", "max_grad_norm", "precision", "attention",
)  # fmt: skip


def file_name(model: str, training: TrainingSettings, corpora: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return the name of the file for a pretraining of an encoder on some corpora, each given by its `Corpus.files`."""
    settings = [getattr(training, name) for name in SETTINGS]
    identity = [data_identity(files) for files in corpora if files]
    return f"pretrained-{fingerprint_of(json.dumps([model, settings, identity], default=str))[:16]}.safetensors"


def write_pretrained(path: Path, model: Model) -> None:
    """Write the weights of a model that pretraining has changed."""
    write_tensors(path, model.pretrained_weights())


def begin_pretrained(model: Model, path: Path) -> None:
    """Give the model the weights that `write_pretrained` wrote."""
    weights = read_tensors(path)
    try:
        integrity.check_tensors(weights, model.pretrained_weights(), str(path), advice="")
    except RequestError as error:
        raise RequestError(f"{error}: does not fit this model; rehearse again") from error
    model.load_pretrained(weights)


def describe_pretrained(path: Path | None) -> dict[str, Any] | None:
    """Return what run.json says of the file."""
    return None if path is None else {"path": str(path), "sha256": file_fingerprint(path)}


def find_pretrained(rehearsal: Rehearsal | None, request: Mapping[str, Any], training: TrainingSettings) -> Path | None:
    """Return the file of a rehearsal that was pretrained as this run would be, on the same texts; None if there is none."""
    if rehearsal is None or rehearsal.path is None or not training.pretrain_epochs:
        return None
    data = [request["data"][part] for part in ("source", "target_labeled", "target")]
    path = rehearsal.path / file_name(request["model"], training, data)
    return path if path.is_file() else None
