"""Finding a model: by the name given to `--model`, or by what was saved in a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtem.errors import RequestError
from mtem.models import encoders

if TYPE_CHECKING:
    from mtem.data.corpus import Corpus
    from mtem.models.base import Model
    from mtem.training.settings import TrainingSettings

BIGCN = "bigcn"  # any other name is an encoder's
MODEL_TYPE = "mtem-bigcn"  # in the configuration of a saved one


def get_class(name: str | os.PathLike[str]) -> type[Model]:
    """The class of the models of that name, with its `Settings`, `defaults` and `presets`."""
    if os.fspath(name) == BIGCN:
        from mtem.models.trees.model import TreeModel

        return TreeModel
    from mtem.models.text import TextModel

    return TextModel


def find(name: str | os.PathLike[str], settings: Any) -> str:
    """What `create` wants to know the model by. Refuses what cannot be loaded before anything else is done."""
    if os.fspath(name) == BIGCN:
        settings.check()
        return BIGCN
    if _says_threads(Path(name)):
        raise RequestError(
            f"{os.fspath(name)}: holds a model of threads; give --model bigcn, and the run that it is of as --source-model "
            "to begin from it"
        )
    return encoders.find(name)


def create(
    name: str | os.PathLike[str],
    classes: Sequence[str],
    corpora: Sequence[Corpus],
    settings: Any,
    training: TrainingSettings,
    like: Model | None = None,
) -> Model:
    """A model for `classes` before any training; what is new in it is drawn from torch's global generator.

    `corpora` are all texts of the adaptation, labeled or not, for models that learn their vocabulary from them;
    with `like` they take that of this model instead.
    """
    if os.fspath(name) == BIGCN:
        from mtem.models.trees.model import TreeModel

        return TreeModel.create(classes, corpora, settings, training.max_length, like)
    from mtem.models.text import TextModel

    return TextModel.create(name, classes, max_length=training.max_length, attention=training.attention)


def load(directory: str | os.PathLike[str]) -> Model:
    """A saved model of either kind. Refuses one that is not whole."""
    from mtem.models.text import TextModel
    from mtem.models.trees.model import TreeModel

    return TreeModel.load(directory) if _says_threads(Path(directory)) else TextModel.load(directory)


def _says_threads(directory: Path) -> bool:
    """Whether a directory's configuration is that of a model of threads."""
    try:
        told = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there or damaged: the reader of encoders knows what to say
        return False
    return isinstance(told, dict) and told.get("model_type") == MODEL_TYPE
