"""Tiny plans of cells, their results, and methods that fail."""

from __future__ import annotations

import json

from mtem_paper import protocol

TINY = {"max_length": 12, "batch_size": 20, "source_epochs": 0.5, "source_learning_rate": 3e-3, "steps": 2, "evaluations": 2}
RUMOUR = {"good": "rumour", "bad": "non-rumour"}
RAISES = """
from mtem.methods.source_only import SourceOnly

class Broken(SourceOnly):
    name = "broken"

    def step(self, *arguments):
        {what}
"""


def planned(encoder, variants, **changes):
    given = {"seeds": [0], "targets": ["kitchen"], "settings_": ["unsupervised"], "pools": ["natural"], "overrides": TINY}
    return protocol.plan(["general"], "amazon", str(encoder), "tiny", variants=variants, **{**given, **changes})


def results_of(folder, found):
    return {cell.address: json.loads((folder / cell.address).read_text()) for cell in found}


def stripped(result):
    """Without what differs from run to run."""
    kept = {name: value for name, value in result.items() if name not in ("seconds", "source_seconds", "finished", "resolved")}
    return {**kept, "search": [{**entry, "seconds": 0} for entry in result["search"]]}


def write_method(folder, name, what):
    (folder / f"{name}.py").write_text(RAISES.format(what=what))
    return str(folder / f"{name}.py")
