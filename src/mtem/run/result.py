"""A finished adaptation: the model, its record, and its run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from torch import Tensor

from mtem import inference, models
from mtem.data.corpus import Corpus
from mtem.errors import RequestError
from mtem.files import check_folder
from mtem.models import integrity
from mtem.models.base import Model
from mtem.run.directory import SOURCE, RunDirectory
from mtem.run.model_card import model_card
from mtem.selection.left_out import LeftOut
from mtem.training import weights


class Adapted:
    """What `mtem.adapt` returns and `mtem.load` reads.

    Attributes
    ----------
    model
        The classifier with the chosen weights.
    record
        The contents of run.json: settings, versions, data, the choice of weights, estimates, warnings.
        Empty for a bare model directory.
    path
        The run directory, if there is one.
    """

    def __init__(
        self,
        model: Model,
        record: dict[str, Any],
        table: pa.Table | None = None,
        source_weights: dict[str, Tensor] | None = None,
        path: Path | None = None,
        left_out: list[LeftOut] | None = None,
    ) -> None:
        self.model, self.record, self.path = model, record, path
        self._table, self._source_weights, self._left_out = table, source_weights, left_out

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Adapted:
        """Read a run directory, or a bare model directory.

        Raises
        ------
        RequestError
            If there is neither, the run is not finished, or a file is damaged.
        """
        path = Path(path)
        if not path.is_dir():
            raise RequestError(f"{path}: no such folder; give the --output folder of 'mtem adapt'")
        check_folder(path)
        directory = RunDirectory(path)
        if not directory.has_record():
            if (path / "config.json").is_file():
                return cls(models.load(path), {}, path=path)
            raise RequestError(
                f"{path}: holds neither a run (run.json) nor a model (config.json); give the --output folder of 'mtem adapt'"
            )
        record = directory.read_record()
        if record.get("status") != "done":
            raise RequestError(f"{path}: this run is not finished; finish it with 'mtem adapt ... --resume'")
        model = models.load(directory.model_path)
        if list(model.classes) != record.get("classes", list(model.classes)):
            raise RequestError(
                f"{path}: its model has the classes {', '.join(model.classes)} and its run.json has "
                f"{', '.join(map(str, record['classes']))}; {integrity.AGAIN}"
            )
        return cls(model, record, path=path)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the columns of `predict_proba`."""
        return self.model.classes

    def predict_proba(self, texts: Sequence[Any]) -> np.ndarray:
        """Return class probabilities.

        Parameters
        ----------
        texts
            Texts, or threads (dicts with "nodes").

        Returns
        -------
        np.ndarray
            [N, K], columns in the order of `classes`.
        """
        return inference.predict_texts(self.model, texts)

    def predict(self, texts: Sequence[Any]) -> list[str]:
        """Return the class name of each text or thread. Names are text: labels 0 and 1 are "0" and "1"."""
        return [self.classes[number] for number in self.predict_proba(texts).argmax(axis=1)]

    @property
    def indexes(self) -> pd.DataFrame:
        """Every target text with its row, entropy index (if the method has one), prediction and confidence."""
        if self._table is None:
            directory = None if self.path is None else RunDirectory(self.path)
            if directory is None or not directory.indexes_path.is_file():
                raise RequestError("this model has no table of target texts")
            self._table = directory.read_indexes()
        return self._table.to_pandas()

    def source_model(self) -> Model | None:
        """Return the model before the adaptation, if it was kept. It shares no weights with this one."""
        source_weights = self._kept_source_weights()
        if source_weights is None or self.path is None:
            return None
        model = models.load(RunDirectory(self.path).model_path)
        weights.load(model, source_weights)
        return model

    def source_weights(self) -> dict[str, Tensor]:
        """Return all weights of the model before the adaptation. A bare model directory is its own source model."""
        trained = self._kept_source_weights()
        if trained is None and self.record:
            raise RequestError(
                f"{self.path}: the model before the adaptation was not kept (checkpoints/source.safetensors is missing)"
            )
        return {**weights.everything(self.model), **(trained or {})}

    def left_out(self) -> list[LeftOut]:
        """Return the logits of source models for a domain they were trained without; empty if none were trained."""
        if self._left_out is None:
            descriptions = self.record.get("left_out", [])
            self._left_out = [] if self.path is None else RunDirectory(self.path).read_left_out(descriptions)
        return self._left_out

    def _kept_source_weights(self) -> dict[str, Tensor] | None:
        if self._source_weights is None and self.path is not None:
            directory = RunDirectory(self.path)
            if directory.weights_path(SOURCE).is_file():
                self._source_weights = self._read_source_weights(directory)
        return self._source_weights

    def _read_source_weights(self, directory: RunDirectory) -> dict[str, Tensor]:
        """Return the trained weights of the model before the adaptation. Refuse an incomplete or damaged file."""
        frozen = self.record.get("resolved", {}).get("frozen_layers", 0)
        depths = self.model.depths() if frozen else {}
        buffers = weights.head_buffers(self.model)
        trained = {name for name, _ in self.model.named_parameters() if not frozen or depths[name] > frozen} | set(buffers)
        expected = {name: value for name, value in weights.everything(self.model).items() if name in trained}
        try:
            return directory.read_weights(SOURCE, expected)
        except RequestError as error:
            raise RequestError(f"{error}; {integrity.AGAIN}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run directory. Each file is written whole or not at all, run.json last."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        directory = RunDirectory(path)
        if self.path is not None:
            directory.copy_overview(RunDirectory(self.path))
        directory.write_model(self.model, model_card(self.record, type(self.model)))
        if self._table is not None:
            directory.write_indexes(self._table)
        if (source_weights := self._kept_source_weights()) is not None:
            directory.write_weights(SOURCE, source_weights)
        if left_out := self.left_out():
            directory.write_left_out(left_out)
        directory.write_record(self.record)
        self.path = path


def load(path: str | os.PathLike[str]) -> Adapted:
    """Read the output of `mtem adapt`, or any Hugging Face text classifier in safetensors, ready to predict."""
    return Adapted.load(path)


def index_table(
    target: Corpus, classes: Sequence[str], logits: np.ndarray, index: Tensor | None, source_logits: np.ndarray | None = None
) -> pa.Table:
    """Return the table of indexes.parquet.

    Parameters
    ----------
    target, classes
        The target texts, and the names of the classes.
    logits, source_logits
        Of the target texts by the final model and, if known, by the source model as it was trained.
    index
        Their entropy indexes, if the method has any.
    """
    columns = {"row": target.table.column("row"), "text": target.table.column("text")}
    if target.threaded:
        columns["tree"] = target.table.column("tree")
    if index is not None:
        columns["index"] = pa.array(index.float().cpu().numpy())
    for prefix, values in (("", logits), ("source_", source_logits)):
        if values is not None:
            probabilities = inference.probabilities(values)
            best = probabilities.argmax(axis=1)
            names = pa.array(list(classes))
            columns[f"{prefix}prediction"] = pa.DictionaryArray.from_arrays(pa.array(best.astype(np.int32)), names)
            columns[f"{prefix}confidence"] = pa.array(probabilities[np.arange(len(best)), best].astype(np.float32))
    return pa.table(columns)
