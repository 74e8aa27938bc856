"""The table of the kinds of models: by the name given to ``--model``, or by the configuration of a saved model.

To add a kind of model:

1. Write a class in `mtem.models` (or a folder of it) that derives from `mtem.models.base.Model` and defines its abstract
   methods. Its settings are a dataclass that derives from `ModelSettings`, in the class attribute `Settings`. `warnings_for`,
   `usage` and the attributes `library_name` and `card_title` provide what the run and the model card print.
2. Choose a `model_type`, write it into the config.json of `save`, and check it in `load`.
3. Add a row to `KINDS` below. The class is imported only when it is used.

A Hugging Face encoder needs no row: every name that is not in the table is an encoder's (`mtem.models.encoders`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtem.errors import RequestError
from mtem.files import open_regular

if TYPE_CHECKING:
    from mtem.data.corpus import Corpus
    from mtem.models.base import Model, ModelSettings


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the table: where the class is, and how to recognize its models.

    Attributes
    ----------
    module, class_name
        Where the class is defined.
    name
        The name given to ``--model``; None: all other names.
    model_type
        The "model_type" in the config.json of a saved model; None: all other types.
    """

    module: str
    class_name: str
    name: str | None = None
    model_type: str | None = None

    def import_class(self) -> type[Model]:
        """Return the class."""
        model_cls: type[Model] = getattr(importlib.import_module(self.module), self.class_name)
        return model_cls


ENCODER = Kind("mtem.models.text", "TextModel")
KINDS = (Kind("mtem.models.trees.model", "BigcnModel", name="bigcn", model_type="mtem-bigcn"),)


def names(setting: str | None = None) -> list[str]:
    """Return the names in the table; with `setting`, only those of models with a setting of this name."""
    listed = [kind.name for kind in KINDS if kind.name is not None]
    if setting is None:
        return listed
    return [name for name in listed if setting in {field.name for field in dataclasses.fields(get_class(name).Settings)}]


def get_class(name: str | os.PathLike[str]) -> type[Model]:
    """Return the class of the model of this name, with its `Settings`, `defaults` and `presets`."""
    return next((kind for kind in KINDS if kind.name == os.fspath(name)), ENCODER).import_class()


def find(name: str | os.PathLike[str], settings: ModelSettings) -> str:
    """Return the name that `create` takes for the name given to ``--model``.

    Raises
    ------
    RequestError
        If the model cannot be loaded, or a file that the settings name is missing.
    """
    settings.check()
    if os.fspath(name) not in names() and (saved := _saved_kind(Path(name))) is not ENCODER:
        raise RequestError(
            f"{os.fspath(name)}: contains a saved {saved.name} model, expected an encoder; give --model {saved.name}, and "
            "the directory of its run as --source-model to start from its weights"
        )
    return get_class(name).find(name)


def create(
    name: str | os.PathLike[str],
    classes: Sequence[str],
    *,
    corpora: Sequence[Corpus] = (),
    settings: ModelSettings | None = None,
    max_length: int = 256,
    attention: str | None = None,
    like: Model | None = None,
) -> Model:
    """Return a new model for `classes`. See `mtem.models.base.Model.create` for the parameters."""
    return get_class(name).create(
        name, classes, corpora=corpora, settings=settings, max_length=max_length, attention=attention, like=like
    )


def load(directory: str | os.PathLike[str]) -> Model:
    """Return a saved model of any kind.

    Raises
    ------
    RequestError
        If the directory is missing, incomplete or damaged.
    """
    return _saved_kind(Path(directory)).import_class().load(directory)


def _saved_kind(directory: Path) -> Kind:
    try:
        with open_regular(directory / "config.json") as file:
            config = json.load(file)
    except (
        RequestError,
        OSError,
        ValueError,
        RecursionError,
    ):  # missing or damaged: the loader of encoders has the right message
        return ENCODER
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return next((kind for kind in KINDS if kind.model_type == model_type), ENCODER)
