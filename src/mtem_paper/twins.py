"""Runs that stand for two rows of a table.

On single texts, MTEM with the recommended preset has the index 1 and takes the likeliest labels. Its steps are then those of
FixMatch with the same threshold, average and view (`tests/methods/test_mtem.py` compares the weights), so one of the two is run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mtem.methods.fixmatch import FixMatchSettings
from mtem_paper.cells import PERTURBED, PROTOCOL
from mtem_paper.protocol import DATASETS

TWINS = {"mtem": "fixmatch", "fixmatch": "mtem"}
RUN_OF = "run_of"  # in a cell: the variant that was run


def fill(cells: Sequence[dict[str, Any]], to: Collection[str] = ("mtem",)) -> list[dict[str, Any]]:
    """Return the cells and, for each run that stands for the other method too and has no cell there, a copy under its name.

    Parameters
    ----------
    cells
        Results.
    to
        Which of the two methods get copies. Tables give them to MTEM alone, which they are about: every copy is one more
        comparison among those that are corrected together.
    """
    existing = {_run(cell, cell["variant"]) for cell in cells}
    copies = [
        {**cell, "variant": twin, "method": twin, RUN_OF: cell["variant"]}
        for cell in cells
        if (twin := TWINS.get(cell["variant"])) in to and _run(cell, twin) not in existing and is_both(cell)
    ]
    return [*cells, *copies]


def is_both(cell: dict[str, Any]) -> bool:
    """Return whether a run of one of the two methods is the other as well."""
    settings, usual = cell["settings"], FixMatchSettings()
    if (
        DATASETS[cell["dataset"]].threads
        or cell["protocol"] not in (PROTOCOL, PERTURBED)
        or settings.get("threshold") != usual.threshold
    ):
        return False
    if cell["variant"] == "fixmatch":
        return (settings["weak"], settings["weight"]) == (usual.weak, usual.weight)
    return (settings["index_mode"], settings["index_initial"], settings["sampling"]) == ("fixed", 1.0, False)


def lent(cells: Sequence[dict[str, Any]]) -> int:
    """Return how many cells are runs of the other method."""
    return sum(RUN_OF in cell for cell in cells)


def _run(cell: dict[str, Any], variant: str | None) -> tuple[Any, ...]:
    return *(cell[name] for name in ("dataset", "model", "setting", "pool", "target", "seed")), variant
