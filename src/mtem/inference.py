"""Prediction: over encoded corpora, and over files of any size in a stream that keeps every column."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mtem.data import readers, writers
from mtem.data.batching import sequential
from mtem.data.loading import example_column, text_cell
from mtem.data.threads import NODES, Thread, thread_of_row
from mtem.errors import RequestError
from mtem.models.scoring import scorers
from mtem.progress import Progress

TOKENS_PER_BATCH = 8192
TOKENS_PER_BATCH_CPU = 1024  # matrices are long enough, and what a layer works on stays in the caches
MANY = 4  # batches per thread from which on a copy of the model for each thread pays
ROWS_AT_ONCE = 4096  # rows held in memory while a file streams through


class Outputs(NamedTuple):
    logits: np.ndarray  # [N, K] logits
    features: np.ndarray | None  # [N, D] what the head sees


def compute_logits(
    model: Any, tokens: Any, rows: np.ndarray | None = None, *, features: bool = False, progress: Progress | None = None
) -> Outputs:
    """Logits (and features) of the given rows, in their order, computed in batches of equal length."""
    rows = np.arange(len(tokens)) if rows is None else np.asarray(rows)
    on_cpu = model.device.type == "cpu"
    budget = TOKENS_PER_BATCH_CPU if on_cpu else TOKENS_PER_BATCH
    batches = sequential(np.asarray(tokens.lengths)[rows], tokens_per_batch=budget)

    @torch.no_grad()  # of the thread that computes
    def compute(scorer: Any, batch: np.ndarray) -> list[np.ndarray]:
        inputs = scorer.collate(tokens, rows[batch])
        found = scorer.logits_and_features(inputs) if features else [scorer(inputs)]
        return [values.cpu().numpy() for values in found]

    many = on_cpu and len(batches) >= MANY * torch.get_num_threads()
    logits: np.ndarray = np.zeros((len(rows), len(model.classes)), dtype=np.float32)
    seen: np.ndarray | None = None
    done = 0
    with contextlib.closing((_side_by_side if many else _one_by_one)(model, compute, batches)) as results:
        for batch, (found, *values) in zip(batches, results, strict=True):
            logits[batch] = found
            if values:
                if seen is None:
                    seen = np.zeros((len(rows), values[0].shape[1]), dtype=np.float32)
                seen[batch] = values[0]
            done += len(batch)
            if progress:
                progress.advance(done)
    return Outputs(logits, seen)


Compute = Callable[[Any, np.ndarray], list[np.ndarray]]


def _one_by_one(model: Any, compute: Compute, batches: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    training = model.training
    model.eval()
    try:
        for batch in batches:
            yield compute(model, batch)
    finally:
        model.train(training)


def _side_by_side(model: Any, compute: Compute, batches: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Every core on a batch of its own: all of them on one batch would wait for each other after every operation.

    What a batch gives does not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(batch: np.ndarray) -> list[np.ndarray]:
        scorer = idle.get()
        try:
            return compute(scorer, batch)
        finally:
            idle.put(scorer)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for scorer in pool.submit(scorers, model, threads).result():
                idle.put(scorer)
            yield from pool.map(work, batches)
    finally:
        torch.set_num_threads(threads)  # a thread's own number is also that of the threads that come after it


def probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(np.asarray(logits, dtype=np.float64)), dim=-1).numpy()


def predict_texts(model: Any, texts: Sequence[str | Mapping[str, Any] | Thread]) -> np.ndarray:
    """Class probabilities [N, K] of some texts or threads (dicts with "nodes").

    A text is a thread without replies to a model of threads, and a thread is its root's text to a model of texts.
    """
    if isinstance(texts, (str, Mapping, Thread)):
        one = "text" if isinstance(texts, str) else "thread"
        raise RequestError(f"predict wants a list of texts or threads, got one {one}: put it in a list")
    return probabilities(
        compute_logits(model, model.encode_threads([_tree(one, number) for number, one in enumerate(texts)])).logits
    )


def _tree(example: Any, number: int) -> Thread:
    if isinstance(example, str):
        return Thread([example], [-1])
    if isinstance(example, Thread):
        example = {NODES: example}
    if isinstance(example, Mapping) and NODES in example:
        return thread_of_row(example, f"position {number}")
    raise RequestError(f"predict wants texts or threads (dicts with 'nodes'), got {type(example).__name__} at position {number}")


class Predicted(NamedTuple):
    rows: int
    empty: int
    counts: dict[str, int]


def predict_file(
    model: Any,
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text_column: str | None = None,
    all_probabilities: bool = False,
    progress: Progress | None = None,
) -> Predicted:
    """Every row of `path` with `prediction` and `confidence` added, to `output`; memory does not grow with the file.

    Rows without a text are kept with empty predictions and counted. With `all_probabilities`, one column more per class.
    """
    path, output = Path(path), Path(output)
    columns = readers.columns(path)
    column, threaded = example_column(path, text_column)
    added = ["prediction", "confidence", *([f"probability {name}" for name in model.classes] if all_probabilities else [])]
    taken = [name for name in added if name in columns]
    if taken:
        raise _taken(path, taken[0])
    if output.resolve() == path.resolve():
        raise RequestError(f"{output}: the predictions would overwrite their input: give another --output")
    rows = empty = 0
    counts = dict.fromkeys(model.classes, 0)
    with writers.Writer(output, columns=[*columns, *added]) as writer:
        for block in _blocks(readers.read_rows(path), ROWS_AT_ONCE):
            records = [record for _, record in block]
            for row, record in block:  # a JSON line may have columns that the first has not
                if clash := next((name for name in added if name in record), None):
                    raise _taken(path, clash, f" row {row}:")
            if threaded:
                trees = [thread_of_row(record, f"{path}: row {row}") for row, record in block]
            else:
                named = text_column is not None
                trees = [Thread([text_cell(record, column, f"{path}: row {row}", named=named)], [-1]) for row, record in block]
            known = [number for number, tree in enumerate(trees) if not tree.blank]
            found = predict_texts(model, [trees[number] for number in known]) if known else np.zeros((0, len(model.classes)))
            given = dict(zip(known, found, strict=True))
            for number, record in enumerate(records):
                probs = given.get(number)
                values: list[Any] = [None] * len(added)
                if probs is not None:
                    best = int(probs.argmax())
                    counts[model.classes[best]] += 1
                    values = [model.classes[best], round(float(probs[best]), 6), *(round(float(p), 6) for p in probs)][
                        : len(added)
                    ]
                writer.write({**record, **dict(zip(added, values, strict=True))})
            rows += len(records)
            empty += len(records) - len(known)
            if progress:
                progress.advance(rows)
    return Predicted(rows, empty, counts)


def _taken(path: Path, column: str, row: str = "") -> RequestError:
    return RequestError(f"{path}:{row} it has a column '{column}' already, which the predictions would overwrite: rename it")


def _blocks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while block := list(itertools.islice(items, size)):
        yield block
