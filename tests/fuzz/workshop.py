"""Small whole runs, made once, that the cases damage copies of."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mtem
from mtem.data.loading import load_corpus
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run import evaluation
from tests.conftest import make_encoder, make_texts, write_jsonl

SMALL = {"max_length": 16, "batch_size": 10, "source_epochs": 1, "epochs": 1, "evaluations": 2, "frozen_layers": 0}


class StopHereError(Exception):
    """Ends a run where a kill would."""


class Workshop:
    """The folder of these runs: ``run`` (finished), ``half`` (not finished), ``bigcn`` (over threads).

    Parameters
    ----------
    folder
        Where they are, or are to be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def model(self) -> Model:
        """A classifier of texts."""
        return mtem.load(self.folder / "run").model

    def adapt(self, output: Path, **more: Any) -> mtem.Adapted:
        sources = [str(self.folder / name) for name in ("books.jsonl", "dvd.jsonl")]
        target = str(self.folder / "kitchen.jsonl")
        return mtem.adapt(sources, target, model=self.folder / "encoder", output=output, **{**SMALL, **more})

    def make(self) -> None:
        """Train all of them; a few seconds."""
        write_jsonl(self.folder / "books.jsonl", make_texts(40, 1))
        write_jsonl(self.folder / "dvd.jsonl", make_texts(40, 2, 0.3))
        write_jsonl(self.folder / "kitchen.jsonl", make_texts(30, 3, 0.7), labeled=False)
        write_jsonl(self.folder / "test.jsonl", make_texts(20, 4, 0.7))
        make_encoder(self.folder / "encoder")
        adapted = self.adapt(self.folder / "run")
        corpus = load_corpus(str(self.folder / "test.jsonl"), labeled=True)
        evaluation.evaluate(adapted, corpus, compare=False, progress=Progress(quiet=True))
        self._make_half()
        self._make_bigcn()

    def _make_half(self) -> None:
        lines: list[dict[str, Any]] = []

        def observe(line: dict[str, Any], model: Model) -> None:
            lines.append(line)
            if sum(line["stage"] == "adapt" for line in lines) > 1:
                raise StopHereError

        try:
            self.adapt(self.folder / "half", observe=observe, checkpoint_seconds=0.0, log_every=1)
        except StopHereError:
            return
        raise AssertionError("the run was not stopped")

    def _make_bigcn(self) -> None:
        for name, seed in (("threads", 5), ("threads-target", 6)):
            with (self.folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(thread) + "\n" for thread in _threads(make_texts(24, seed)))
        mtem.adapt(
            str(self.folder / "threads.jsonl"), str(self.folder / "threads-target.jsonl"), model="bigcn", method="source-only",
            features="tfidf", vocabulary=50, output=self.folder / "bigcn", source_epochs=1, epochs=1, batch_size=10,
            evaluations=1,
        )  # fmt: skip


def _threads(rows: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for number, (text, label) in enumerate(rows):
        reply = {"id": f"{number}-1", "parent": str(number), "text": f"word{number % 7}"}
        yield {"id": str(number), "label": label, "nodes": [{"id": str(number), "parent": None, "text": text}, reply]}
