"""Adapt a text classifier to a domain without labels.

import mtem
adapted = mtem.adapt(["books.csv", "dvd.csv"], "kitchen.csv", output="run")
adapted.predict(["the lid does not fit"])
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mtem.errors import RequestError, RunError

if TYPE_CHECKING:
    from mtem.rehearsal.rehearse import rehearse
    from mtem.run.adapt import adapt
    from mtem.run.result import Adapted, load
    from mtem.selection.rehearsed import Rehearsal

__all__ = ["Adapted", "Rehearsal", "RequestError", "RunError", "adapt", "load", "rehearse"]

# A library prints nothing: its messages go to the logger "mtem", which the command line shows.
logging.getLogger("mtem").addHandler(logging.NullHandler())

_MODULES = ("tsallis", "annealing", "schedules", "metagrad", "selection", "datasets", "metrics", "data", "methods", "models")
_MODULE_OF = {
    "adapt": "mtem.run.adapt",
    "Adapted": "mtem.run.result",
    "load": "mtem.run.result",
    "rehearse": "mtem.rehearsal.rehearse",
    "Rehearsal": "mtem.selection.rehearsed",
}


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


def __getattr__(name: str) -> Any:
    """Import a module when it is first used, so that `mtem --help` does not wait for torch."""
    import importlib

    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"mtem.{name}")
    raise AttributeError(f"module 'mtem' has no attribute {name!r}")
