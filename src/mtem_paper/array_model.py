"""A model whose examples are rows of numbers in memory, for experiments with small networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from mtem.data.corpus import Corpus
from mtem.models.base import EncodedCorpus, Inputs, Model

if TYPE_CHECKING:
    from typing_extensions import Self


class ArrayModel(Model):
    """A model whose examples are rows of numbers in memory ("values"). It reads no texts and cannot be saved.

    For experiments with small networks; subclasses define `forward`, `collate` and `head_path`.
    """

    classes: tuple[str, ...] = ()

    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """Return the rows."""
        return inputs["values"]

    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Return the norm of each row, [N, 1]."""
        return values.square().sum(dim=1, keepdim=True).sqrt()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__}: its examples are arrays in memory")

    @classmethod
    def create(cls, name: str | os.PathLike[str], classes: Sequence[str], **_: Any) -> Self:
        """Refuse."""
        cls._refuse()

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Refuse."""
        cls._refuse()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Refuse."""
        self._refuse()

    def encode(
        self, corpus: Corpus, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None
    ) -> EncodedCorpus:
        """Refuse."""
        self._refuse()

    def encode_texts(self, texts: Sequence[str]) -> EncodedCorpus:
        """Refuse."""
        self._refuse()

    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """Refuse."""
        self._refuse()

    def default_learning_rates(self) -> tuple[float, float]:
        """Refuse."""
        self._refuse()
