"""A finished adaptation: the model, what is known about it, and its run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from mtem import inference, models
from mtem.atomic import read_json, replaced, write_json
from mtem.data.corpus import Corpus
from mtem.errors import RequestError
from mtem.models import integrity
from mtem.models.base import Model
from mtem.run.model_card import card
from mtem.selection.left_out import LeftOut, from_tensors, to_tensors
from mtem.tensors import read_tensors, write_tensors
from mtem.training import weights

BLOCK = 50_000
LEFT_OUT = "left-out.safetensors"


class Adapted:
    """What `mtem.adapt` returns and `mtem.load` reads.

    `record` is the contents of run.json: settings, versions, data, the choice of weights, the estimates, the warnings.
    """

    def __init__(
        self,
        model: Any,
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
        """A run directory, or a bare model directory."""
        path = Path(path)
        if not path.is_dir():
            raise RequestError(f"{path}: no such folder; give the --output folder of 'mtem adapt'")
        if not (path / "run.json").is_file():
            if (path / "config.json").is_file():
                return cls(models.load(path), {}, path=path)
            raise RequestError(
                f"{path}: neither a run (run.json) nor a model (config.json) is there; give the --output folder of 'mtem adapt'"
            )
        record = read_json(path / "run.json")
        if not isinstance(record, dict):
            raise RequestError(f"{path / 'run.json'}: is no record of a run; give the --output folder of 'mtem adapt'")
        if record.get("status") != "done":
            raise RequestError(f"{path}: this run is not finished; finish it with 'mtem adapt ... --resume'")
        model = models.load(path / "model")
        if list(model.classes) != record.get("classes", list(model.classes)):
            raise RequestError(
                f"{path}: its model has the classes {', '.join(model.classes)} and its run.json says "
                f"{', '.join(map(str, record['classes']))}; {integrity.AGAIN}"
            )
        return cls(model, record, path=path)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.model.classes

    def predict_proba(self, texts: Sequence[Any]) -> np.ndarray:
        """[N, K] probabilities of texts, or of threads (dicts with "nodes"); columns in the order of `classes`."""
        return inference.predict_texts(self.model, texts)

    def predict(self, texts: Sequence[Any]) -> list[str]:
        """The class name of each text or thread, as text: a classifier trained on labels 0 and 1 answers "0" and "1"."""
        return [self.classes[number] for number in self.predict_proba(texts).argmax(axis=1)]

    @property
    def indexes(self) -> pd.DataFrame:
        """Every target text with its row, entropy index (where the method has one), prediction and confidence."""
        if self._table is None:
            if self.path is None or not (self.path / "indexes.parquet").is_file():
                raise RequestError("this model carries no table of target texts")
            self._table = pq.read_table(self.path / "indexes.parquet")
        return self._table.to_pandas()

    def source_model(self) -> Model | None:
        """The model before the adaptation, if it was kept. It shares nothing with this one."""
        kept = self._kept_source()
        if kept is None or self.path is None:
            return None
        before = models.load(self.path / "model")
        weights.load(before, kept)
        return before

    def source_weights(self) -> dict[str, Tensor]:
        """theta_1, all of it: the weights that the adaptation began from. A bare model directory is its own."""
        kept = self._kept_source()
        if kept is None and self.record:
            raise RequestError(
                f"{self.path}: the model before the adaptation was not kept there (checkpoints/source.safetensors)"
            )
        return {**weights.everything(self.model), **(kept or {})}

    def left_out(self) -> list[LeftOut]:
        """What source models said about a domain that they were trained without; empty where none were trained."""
        if self._left_out is None:
            path = self.path / "checkpoints" / LEFT_OUT if self.path is not None else None
            about = self.record.get("left_out", [])
            self._left_out = from_tensors(read_tensors(path), about) if about and path is not None and path.is_file() else []
        return self._left_out

    def _kept_source(self) -> dict[str, Tensor] | None:
        if self._source_weights is None and self.path is not None:
            place = self.path / "checkpoints" / "source.safetensors"
            self._source_weights = self._read_source(place) if place.is_file() else None
        return self._source_weights

    def _read_source(self, place: Path) -> dict[str, Tensor]:
        """The weights that were trained, of the model before the adaptation. Refuses what is not all of them, or no numbers."""
        try:
            kept = read_tensors(place)
        except Exception as error:  # safetensors has a type of its own
            raise RequestError(f"{place}: cannot be read ({error}); {integrity.AGAIN}") from error
        frozen = self.record.get("resolved", {}).get("frozen_layers", 0)
        depths = self.model.depths() if frozen else {}
        buffers = weights.head_buffers(self.model)
        trained = {name for name, _ in self.model.named_parameters() if not frozen or depths[name] > frozen} | set(buffers)
        wanted = {name: value for name, value in weights.everything(self.model).items() if name in trained}
        integrity.check_tensors(kept, wanted, str(place))
        return kept

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run directory; each piece whole or not at all, run.json last."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        with replaced(path / "model") as temporary:
            temporary.mkdir()
            self.model.save(temporary)
            (temporary / "README.md").write_text(card(self.record), encoding="utf-8")
        if self._table is not None:
            with replaced(path / "indexes.parquet") as temporary:
                pq.write_table(self._table, temporary, row_group_size=BLOCK)
        if (kept := self._kept_source()) is not None:
            write_tensors(path / "checkpoints" / "source.safetensors", kept)
        if left_out := self.left_out():
            write_tensors(path / "checkpoints" / LEFT_OUT, to_tensors(left_out))
        write_json(path / "run.json", self.record)
        self.path = path


def load(path: str | os.PathLike[str]) -> Adapted:
    """What `mtem adapt` wrote (or any Hugging Face text classifier in safetensors), ready to predict."""
    return Adapted.load(path)


def index_table(target: Corpus, classes: Sequence[str], scores: np.ndarray, index: Tensor | None) -> pa.Table:
    """The columns of indexes.parquet; the texts stay where the corpus has them."""
    probabilities = inference.probabilities(scores)
    best = probabilities.argmax(axis=1)
    columns = {"row": target.table.column("row"), "text": target.table.column("text")}
    if index is not None:
        columns["index"] = pa.array(index.float().cpu().numpy())
    columns["prediction"] = pa.DictionaryArray.from_arrays(pa.array(best.astype(np.int32)), pa.array(list(classes)))
    columns["confidence"] = pa.array(probabilities[np.arange(len(best)), best].astype(np.float32))
    return pa.table(columns)
