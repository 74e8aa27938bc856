"""The history of a run for TensorBoard, written while the run goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mtem.errors import RequestError
from mtem.models.base import Model
from mtem.report.files import finite

FOLDER = "tensorboard"  # in the run directory
QUANTILES = ("10 %", "median", "90 %")


def require_tensorboard() -> None:
    """Refuse to go on without TensorBoard.

    Raises
    ------
    RequestError
        If it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise RequestError("--tensorboard: TensorBoard is not installed; pip install 'mtem[tensorboard]'")


class TensorBoard:
    """An observer of a run: every number of a line of the history becomes a scalar, named by stage and field.

    Parameters
    ----------
    folder
        Where the event files are written.
    """

    def __init__(self, folder: Path) -> None:
        require_tensorboard()
        self.folder = folder
        self._writer: Any = None

    @property
    def writer(self) -> Any:
        """The writer, made with the first line: before, the run checks whether its folder is empty."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        return self._writer

    def __call__(self, line: dict[str, Any], model: Model) -> None:
        """Write one line of the history."""
        step = finite(line.get("step"))
        if step is None:
            return
        for name, value in scalars(line).items():
            self.writer.add_scalar(f"{line['stage']}/{name}", value, int(step))
        self.writer.flush()


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the history by name; shares of classes and quantiles have names of two parts."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if key in ("step", "stage", "seconds"):
            continue
        parts = {key: value}
        if isinstance(value, dict):
            parts = {f"{key}/{name}": part for name, part in value.items()}
        elif isinstance(value, list):
            names = QUANTILES if key == "index_quantiles" else range(len(value))
            parts = {f"{key}/{name}": part for name, part in zip(names, value, strict=False)}
        found |= {name: number for name, part in parts.items() if (number := finite(part)) is not None}
    return found
