"""Tiny rehearsals: labeled domains, methods whose worth is known, and what differs from run to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.conftest import make_texts, write_jsonl

# A source model that has hardly begun to learn, so that a method can gain something.
SMALL = {
    "max_length": 16, "batch_size": 10, "source_epochs": 2, "source_learning_rate": 3e-3, "frozen_layers": 0,
    "validation_share": 0.2, "epochs": 2,
}  # fmt: skip
GOOD_RATE, RUINOUS_RATE = 3e-3, 3.0
VARYING = ("seconds", "finished", "versions", "machine", "jobs")

METHOD = """
import dataclasses
import torch
from mtem.methods import Method


@dataclasses.dataclass(frozen=True)
class NoSettings:
    pass


class Made(Method):
    name = "{name}"
    summary = paper = "made for a test"
    Settings = NoSettings

    def step(self, number, source, target, update):
        self.model.train()
        loss = self.cross_entropy(self.model(source.inputs), source.labels)
        {what}
        return {{"source_loss": loss.detach()}}
"""
STEPS = {
    "further": "update(loss)",  # goes on learning from the labeled texts
    "worse": "update(-loss)",  # forgets what it has learned
    "raises": "raise ValueError('broken')",
    # does nothing at first, and says the same of every text from the middle on
    "collapsing": "if 2 * number >= self.context.steps: update(self.model(target.inputs)[:, 1].mean())",
}


def write_method(folder: Path, name: str) -> str:
    """The path of a method of `STEPS`, for ``--method``."""
    path = folder / f"{name}.py"
    path.write_text(METHOD.format(name=name, what=STEPS[name]))
    return str(path)


def write_domains(folder: Path, **counts: int) -> list[str]:
    """Files of labeled texts, each with words of its own: domain name -> number of texts."""
    shifts = {"books": 0.0, "dvd": 0.3, "toys": 0.5}
    return [
        str(write_jsonl(folder / f"{name}.jsonl", make_texts(count, number + 1, shifts.get(name, 0.2))))
        for number, (name, count) in enumerate(counts.items())
    ]


def stripped(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a rehearsal without what differs from run to run."""
    kept = {name: value for name, value in record.items() if name not in VARYING}
    return {**kept, "trials": [{**trial, "seconds": 0} for trial in record.get("trials", [])]}


def read(folder: Path) -> dict[str, Any]:
    """The contents of rehearsal.json."""
    return json.loads((folder / "rehearsal.json").read_text())


def trial_arrays(folder: Path) -> dict[str, dict[str, Any]]:
    """The arrays of every trial that was written, by its path."""
    found = sorted((folder / "trials").rglob("*.safetensors"))
    return {str(path.relative_to(folder)): load_file(path) for path in found}
