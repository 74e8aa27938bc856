"""Checkpoints: everything that a stage of a run needs to continue, as named tensors, and the files they are in."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mtem.atomic import read_json, replaced
from mtem.errors import RequestError
from mtem.methods.alignment import Alignment
from mtem.models import integrity
from mtem.schema import NUMBER
from mtem.tensors import read_tensors, save_tensors
from mtem.training.weights import current, load, strip_prefix

if TYPE_CHECKING:
    from mtem.training.trainer import Trainer

KEPT = 2  # the newest, and one to fall back on if it is damaged
RECORD: dict[Any, Any] = {
    "stage": str, "done": int, "history": int, "seconds": {str: NUMBER},
    "candidates": [{"step": int, "score": NUMBER, "infomax": NUMBER}],
}  # fmt: skip
_NAME = re.compile(r"^step-([0-9]{1,18})$")

logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint that was read: its folder, its tensors and its record."""

    path: Path
    tensors: dict[str, Tensor]
    record: dict[str, Any]


def collect(trainer: Trainer, alignment: Alignment, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the state of model, method, optimizer, alignment and random generators."""
    method = trainer.method
    tensors = {f"model.{name}": value for name, value in current(method.model).items()}
    for part, module in method.modules().items():
        tensors |= {f"module.{part}.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"method.{name}": value for name, value in method.state().items()}
    tensors |= {f"align.{name}": value for name, value in alignment.state().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.state().items()}
    return tensors | random_state(generator)


def restore(tensors: dict[str, Tensor], trainer: Trainer, alignment: Alignment, generator: torch.Generator) -> None:
    """Load what `collect` returned.

    Raises
    ------
    RequestError
        If the tensors are not those of this model, method and optimizer.
    """
    method = trainer.method
    device = method.model.device
    _check_fits(tensors, trainer, alignment, generator)
    load(method.model, strip_prefix(tensors, "model."))
    for name, module in method.modules().items():
        load(module, strip_prefix(tensors, f"module.{name}."))
    method.load_state({name: value.to(device) for name, value in strip_prefix(tensors, "method.").items()})
    alignment.load_state({name: value.to(device) for name, value in strip_prefix(tensors, "align.").items()})
    trainer.load_state(strip_prefix(tensors, "optimizer."))
    restore_random_state(tensors, generator)


def _check_fits(tensors: dict[str, Tensor], trainer: Trainer, alignment: Alignment, generator: torch.Generator) -> None:
    """Refuse tensors of other names or shapes than `collect` returns now. The optimizer of a new trainer has no state yet."""
    expected = collect(trainer, alignment, generator)
    found = {name: value for name, value in tensors.items() if not name.startswith(("optimizer.", "random.cuda"))}
    expected = {name: value for name, value in expected.items() if not name.startswith(("optimizer.", "random.cuda"))}
    integrity.check_tensors(found, expected, "the checkpoint", advice="")
    shapes = [list(parameter.shape) for parameter in trainer.parameters]
    for name, value in strip_prefix(tensors, "optimizer.").items():
        number, _, key = name.partition(".")
        known = number.isdecimal() and int(number) < len(shapes) and key
        if name != "scale" and not (known and list(value.shape) in ([], shapes[int(number)])):
            raise RequestError(f"the checkpoint: optimizer.{name} is unknown to the optimizer or of another shape")


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Return the state of torch's global generators and of the run's own."""
    state = {"random.torch": torch.get_rng_state(), "random.run": generator.get_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor], generator: torch.Generator) -> None:
    """Load what `random_state` returned."""
    torch.set_rng_state(state["random.torch"])
    generator.set_state(state["random.run"])
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])


class Checkpoints:
    """Folders ``step-N`` with tensors and a JSON record, the newest two. A resumed run continues from the newest good one.

    Attributes
    ----------
    before_write
        Called before a checkpoint is written; it may refuse by raising an error.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.before_write: Callable[[], None] = lambda: None
        self._rejected: list[Path] = []

    def write(self, name: str, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write a checkpoint, then remove the older ones but for one."""
        self.before_write()
        path = self.directory / name
        with replaced(path) as temporary:
            temporary.mkdir()
            save_tensors(temporary / "tensors.safetensors", tensors)
            (temporary / "record.json").write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        others = [other for other in self._folders() if other != path]
        good = [other for other in others if other not in self._rejected]
        for other in {*others} - {*good[1 - KEPT :]}:
            shutil.rmtree(other, ignore_errors=True)
        self._rejected = []

    def newest(self, check: Callable[[Checkpoint], None] = lambda found: None) -> Checkpoint | None:
        """Return the newest checkpoint that can be continued from; None if there is none.

        Parameters
        ----------
        check
            Called with a checkpoint; raises a `RequestError` if it, or what belongs to it, does not fit the run. Each checkpoint
            that is passed over is told in a warning, with what happens instead.
        """
        folders = self._folders()[::-1]
        for path, older in itertools.zip_longest(folders, folders[1:]):
            try:
                found = Checkpoint(path, read_tensors(path / "tensors.safetensors"), read_json(path / "record.json", RECORD))
                integrity.check_finite(found.tensors, str(path / "tensors.safetensors"), advice="")
                check(found)
            except RequestError as error:
                instead = "the run starts from the beginning" if older is None else f"the run goes on from {older.name}"
                logger.warning("%s; %s", error, instead)
                self._rejected.append(path)
            else:
                return found
        return None

    def clear(self) -> None:
        """Remove all checkpoints."""
        for path in self._folders():
            shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[Path]:
        """Return the folders of checkpoints, the oldest first; whatever else is in the directory is left alone."""
        numbered = [(int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.match(path.name))]
        return [path for _, path in sorted(numbered) if path.is_dir()]
