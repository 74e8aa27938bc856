"""A cell: one variant on one target with one seed, and the file of its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtem import methods
from mtem.atomic import write_json
from mtem.methods.source_only import SourceOnly

# A cell's protocol is part of its address: the last of these numbers that changed what such a cell computes. To change the rules,
# or the default of a setting, add a number and say which cells it concerns.
#   1  all cells
#   2  candidates are evaluated with the bias of the assumed class shares, as the model is saved; every method sees the same
#      number of labeled target texts in a step (target_labeled_share=0.5)
#   3  learning rate, passes and assumed class shares come from rehearsals among the sources, not from a search in the cell: all
#      cells that adapt
#   4  the average of the weights and the view of the texts are settings of the run, the same for all methods; Amazon texts have
#      512 tokens and small encoders are pretrained: all cells
#   5  the view is perturbed (view_radius): cells of the methods that learn labels in a view, where `view_radius` has a number
PROTOCOL = 4  # of the cells that are run today, with number 5 where it concerns them, and of rehearsals
PERTURBED = 5
WITHOUT_PERTURBATION = "mtem-without-perturbation"
AS_IS = "-as-is"  # how the names of variants end that assume no class shares
SEMI_SUPERVISED = "semi-supervised"
MAIN = ("out", "mtem")  # the rows that a table is about
PLACE = ("dataset", "model", "setting", "pool")


def _earlier_protocol(result: Mapping[str, Any]) -> int:
    """Return the number of the rules that a result would have been run under before number 4."""
    return 3 if result["method"] != SourceOnly.name else _searched_protocol(result)


def _searched_protocol(result: Mapping[str, Any]) -> int:
    """Return the last rules before rehearsals; estimates and scores of candidates have not changed since."""
    corrected = result["settings"].get("target_class_prior", "none") != "none"
    return 2 if result["setting"] == SEMI_SUPERVISED or corrected or result["oracle"] else 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run to make. Cells with the same names but other settings have other addresses.

    An address depends only on settings that are not at their defaults, so a new setting moves no cell.
    """

    dataset: str
    model: str
    variant: str
    setting: str
    pool: str
    target: str
    seed: int
    method: str  # a name, or the file of a method
    preset: str
    given: Mapping[str, Any]  # settings in addition to those of the preset
    changed: Mapping[str, Any]  # settings that are not at their defaults and may change the score
    factors: tuple[float, ...]  # the search: factors of the adaptation's learning rate
    oracle: bool = False
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a trial, which is not a result
    rehearsed: bool = False  # whether learning rate and passes come from rehearsals

    @property
    def group(self) -> tuple[str, ...]:
        """The names that cells with the same data, splits and theta_1 share."""
        return self.dataset, self.model, self.setting, self.pool, self.target, str(self.seed)

    @property
    def protocol(self) -> int:
        """The number of the rules that the cell is run under."""
        return PERTURBED if self.changed.get("view_radius") else PROTOCOL

    @property
    def address(self) -> Path:
        """The path of its file, relative to the results' folder."""
        defining = {**dataclasses.asdict(self), "method": Path(self.method).name, "protocol": self.protocol}
        # In `changed`, as far as they matter; the protocol says what was rehearsed.
        for name in ("preset", "given", "rehearsed", *(() if self.overrides else ("overrides",))):
            del defining[name]
        digest = hashlib.sha256(json.dumps(defining, sort_keys=True, default=str).encode()).hexdigest()[:8]
        name = f"{self.variant}-{self.target}-{self.seed}-{digest}.json"
        return Path("cells", self.dataset, self.model, self.setting, self.pool, name)

    def __str__(self) -> str:
        """Return how messages name the cell."""
        return f"{self.variant} {self.target} {self.seed} ({self.model}, {self.setting}, {self.pool})"


def write(results: Path, cell: Cell, result: Mapping[str, Any]) -> Path:
    """Write the cell's file atomically, remove the report of an earlier failure, and return the path."""
    path = results / cell.address
    write_json(path, result)
    failure_path(results, cell).unlink(missing_ok=True)
    return path


def failure_path(results: Path, cell: Cell) -> Path:
    """Return the path of the report of a failure."""
    return results / "failures" / cell.address.relative_to("cells").with_suffix(".txt")


class Results(NamedTuple):
    """The cells of a folder of results, in the order of their file names, without rehearsals."""

    cells: list[dict[str, Any]]
    """The cells that tables show. Of two that differ only in their settings, the one that finished last. Where the rules have
    changed, the old ones of a place are shown until its `MAIN` rows have been run under the new ones, or as many cells."""
    damaged: list[str]
    """A message for each file that could not be read."""
    current: list[dict[str, Any]]
    """All cells whose estimates were made as today; of several protocols the newest."""


def read(results: Path, fill: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list) -> Results:
    """Read all cells of a folder of results.

    Parameters
    ----------
    results
        The folder.
    fill
        Returns cells with those that others stand for (`mtem_paper.twins.fill`): they count as run, and are shown.
    """
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    damaged = []
    for path in sorted((Path(results) / "cells").glob("*/*/*/*/*.json")):
        try:
            cell = json.loads(path.read_text(encoding="utf-8"))
            key = *(cell[name] for name in (*PLACE, "variant", "target", "seed")), cell["protocol"]
            if cell["protocol"] > PERTURBED or cell["overrides"]:
                continue
            if key not in latest or latest[key]["finished"] < cell["finished"]:
                latest[key] = cell
        except (OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{path}: not a readable cell ({type(error).__name__}: {error}); remove it and run it again")
    cells = list(latest.values())
    newest = {key[:-1]: cell for key, cell in sorted(latest.items(), key=lambda item: item[0][-1])}
    current = [cell for cell in newest.values() if cell["protocol"] >= _searched_protocol(cell)]
    return Results(_shown(cells, fill), damaged, current)


def _shown(
    cells: Sequence[dict[str, Any]], fill: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the cells to show: earlier and later rules are never mixed in one place."""
    by_place: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        by_place.setdefault(tuple(cell[name] for name in PLACE), []).append(cell)
    shown: list[dict[str, Any]] = []
    for here in by_place.values():
        generations = (
            _shown_before([cell for cell in here if cell["protocol"] < PROTOCOL]),
            [cell for cell in here if cell["protocol"] == PROTOCOL],
            [cell for cell in here if is_current(cell)],
        )
        chosen: Sequence[dict[str, Any]] = ()
        for later in map(fill, generations):
            if len(later) >= len(chosen) or _main_runs(chosen) <= _main_runs(later) != set():
                chosen = later
        shown += chosen
    return shown


def is_current(result: Mapping[str, Any]) -> bool:
    """Return whether a result was run under the rules of today; of the method of a file nothing more is known later."""
    if result["method"] not in methods.METHODS:
        return bool(result["protocol"] >= PROTOCOL)
    return bool(result["protocol"] == (PERTURBED if view_radius(result) else PROTOCOL))


def view_radius(result: Mapping[str, Any]) -> float:
    """Return how far the view of a cell is perturbed under the rules of today, by rehearsals (docs/recipe.md); 0 for not at all.

    Parameters
    ----------
    result
        The names of a cell: data set, model, setting, variant, method (or its file) and preset.
    """
    if result["preset"] == "paper" or not methods.get(result["method"]).learns_in_view:
        return 0.0
    if result["dataset"] == "amazon":
        return 0.0 if result["variant"] == WITHOUT_PERTURBATION else 0.005
    as_is = result["setting"] != SEMI_SUPERVISED and result["variant"].endswith(AS_IS)
    return 0.2 if as_is and result["model"] == "bigcn-minilm-neighbours" else 0.0


def _main_runs(cells: Sequence[dict[str, Any]]) -> set[tuple[str, str, int]]:
    """Return which runs of the `MAIN` rows there are."""
    return {(cell["variant"], cell["target"], cell["seed"]) for cell in cells if cell["variant"] in MAIN}


def _shown_before(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells of a place to show without those of today's rules; not all rules concerned all cells then."""
    counts: dict[int, dict[int, int]] = {}
    for cell in cells:
        if (last := _earlier_protocol(cell)) > 1:
            by_protocol = counts.setdefault(last, {})
            by_protocol[cell["protocol"]] = by_protocol.get(cell["protocol"], 0) + 1
    chosen = {last: max(sorted(by, reverse=True), key=lambda number: by[number]) for last, by in counts.items()}
    return [cell for cell in cells if cell["protocol"] == chosen.get(_earlier_protocol(cell), _earlier_protocol(cell))]
