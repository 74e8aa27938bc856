"""The run directory as the other processes of a run see it: they read what the main process writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from torch import Tensor

from mtem.models.base import Model
from mtem.run.directory import RunDirectory
from mtem.selection.left_out import LeftOut
from mtem.training.checkpoints import Checkpoints


class FollowerDirectory(RunDirectory):
    """A run directory that is read, and written by another process; a run in memory has its own workspace in each process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.checkpoints = FollowerCheckpoints(self.workspace)

    def check_available(self, resume: bool) -> None:
        """Do nothing: the main process has checked it, and may have begun to write."""

    def start(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Do nothing."""

    def truncate_history(self, size: int) -> None:
        """Do nothing."""

    def write_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def keep_best(self, steps: set[int]) -> None:
        """Do nothing."""

    def write_left_out_part(self, number: int, result: LeftOut) -> None:
        """Write the logits of a left-out model only to a workspace of this process."""
        if not self.persistent:
            super().write_left_out_part(number, result)

    def remove_intermediate(self) -> None:
        """Do nothing."""

    def write_model(self, model: Model, card: str) -> None:
        """Do nothing."""

    def write_indexes(self, table: pa.Table) -> None:
        """Do nothing."""

    def write_overview(self, points: pa.Table, words: pa.Table) -> None:
        """Do nothing."""


class FollowerCheckpoints(Checkpoints):
    """Checkpoints that are read, and written by another process."""

    def write(self, name: str, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""
