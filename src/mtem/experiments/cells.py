"""A cell: one method on one target with one seed, and the file that says what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtem.storage import write_json

PROTOCOL = 1  # part of every address: raise it when the same names begin to mean another experiment


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is to be run. Two cells of the same names but other settings have other addresses."""

    dataset: str
    model: str
    variant: str
    setting: str
    pool: str
    target: str
    seed: int
    method: str  # a name, or the file of one
    preset: str
    given: Mapping[str, Any]  # settings beside those of the preset
    settings: Mapping[str, Any]  # all settings, as far as they may change the outcome
    factors: tuple[float, ...]  # the search: what the learning rate of the adaptation is multiplied by
    oracle: bool = False
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a rehearsal, which is no result

    @property
    def group(self) -> tuple[str, ...]:
        """Cells of one group share data, splits and theta_1."""
        return self.dataset, self.model, self.setting, self.pool, self.target, str(self.seed)

    @property
    def address(self) -> Path:
        """Where its file is, below the results' folder."""
        defining = {**dataclasses.asdict(self), "method": Path(self.method).name, "protocol": PROTOCOL}
        if not self.overrides:
            del defining["overrides"]
        digest = hashlib.sha256(json.dumps(defining, sort_keys=True, default=str).encode()).hexdigest()[:8]
        name = f"{self.variant}-{self.target}-{self.seed}-{digest}.json"
        return Path("cells", self.dataset, self.model, self.setting, self.pool, name)

    def __str__(self) -> str:
        return f"{self.variant} {self.target} {self.seed} ({self.model}, {self.setting}, {self.pool})"


def write(results: Path, cell: Cell, result: Mapping[str, Any]) -> Path:
    """The cell's file, whole or not at all; what was told of an earlier failure is removed."""
    path = results / cell.address
    write_json(path, result)
    failure_path(results, cell).unlink(missing_ok=True)
    return path


def failure_path(results: Path, cell: Cell) -> Path:
    return results / "failures" / cell.address.relative_to("cells").with_suffix(".txt")


def read_all(results: Path) -> list[dict[str, Any]]:
    """Every result under `results`, in the order of their names: no rehearsals, none of another protocol, and of two that
    differ in their settings alone the one that was finished last."""
    return read(results)[0]


def read(results: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What `read_all` gives, and a line for each file that could not be read."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    damaged = []
    for path in sorted((Path(results) / "cells").glob("*/*/*/*/*.json")):
        try:
            cell = json.loads(path.read_text(encoding="utf-8"))
            if cell["overrides"] or cell["protocol"] != PROTOCOL:
                continue
            key = tuple(cell[name] for name in ("dataset", "model", "setting", "pool", "variant", "target", "seed"))
            if key not in found or found[key]["finished"] < cell["finished"]:
                found[key] = cell
        except (OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{path}: not a readable cell ({type(error).__name__}: {error}); remove it and run it again")
    return list(found.values()), damaged
