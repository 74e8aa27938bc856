"""Logits and predictions of many examples: of encoded corpora, of lists, and of files of any size."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mtem import parallel
from mtem.data import readers, records, threads
from mtem.data.batching import sequential
from mtem.data.threads import NODES, Thread
from mtem.data.writers import Writer
from mtem.errors import RequestError, RunError
from mtem.models.base import Model
from mtem.models.scoring import scorers
from mtem.progress import Progress

if TYPE_CHECKING:
    from mtem.models.base import EncodedCorpus

TOKENS_PER_BATCH = 8192
TOKENS_PER_BATCH_CPU = 1024  # large enough for the matrix products, small enough for the processor's caches
MIN_BATCHES_PER_THREAD = 4  # with fewer batches, a copy of the model for each thread is not worth its cost
ROWS_AT_ONCE = 4096  # rows of a file in memory at a time
BYTES_AT_ONCE = 1 << 27  # of these rows, about


class Outputs(NamedTuple):
    """The outputs of a model.

    Attributes
    ----------
    logits : array of float32, shape (N, K)
        One row per example.
    features : array of float32, shape (N, D), or None
        The inputs of the head; None if they were not requested.
    """

    logits: np.ndarray
    features: np.ndarray | None


def compute_logits(
    model: Model,
    encoded: EncodedCorpus,
    rows: np.ndarray | None = None,
    *,
    features: bool = False,
    progress: Progress | None = None,
) -> Outputs:
    """Compute logits, and optionally features, in evaluation mode.

    Parameters
    ----------
    model : Model
        Its mode (training or evaluation) is restored afterwards.
    encoded : EncodedCorpus
        The examples, as one of the model's `encode` methods returns them.
    rows : array of int, optional
        The examples to compute, in this order; by default all.
    features : bool
        Whether to return the features too.
    progress : Progress, optional
        Shows the number of examples done.

    Notes
    -----
    Batches hold examples of similar length. On the CPU, many batches are computed in parallel, one per thread; the result does
    not depend on the number of threads. Where several processes train together, each computes a part of the examples.
    """
    rows = np.arange(len(encoded)) if rows is None else np.asarray(rows)
    if parallel.is_together():
        return _divided(model, encoded, rows, features, progress)
    on_cpu = model.device.type == "cpu"
    budget = TOKENS_PER_BATCH_CPU if on_cpu else TOKENS_PER_BATCH
    batches = sequential(np.asarray(encoded.lengths)[rows], tokens_per_batch=budget)

    @torch.no_grad()  # here, because gradients are switched off per thread
    def compute(scorer: Model, batch: np.ndarray) -> list[np.ndarray]:
        inputs = scorer.collate(encoded, rows[batch])
        outputs = scorer.logits_and_features(inputs) if features else (scorer(inputs),)
        return [values.cpu().numpy() for values in outputs]

    in_threads = on_cpu and len(batches) >= MIN_BATCHES_PER_THREAD * torch.get_num_threads()
    logits = np.zeros((len(rows), len(model.classes)), dtype=np.float32)
    all_features: np.ndarray | None = None
    done = 0
    with contextlib.closing((_in_parallel if in_threads else _one_by_one)(model, compute, batches)) as results:
        for batch, (batch_logits, *batch_features) in zip(batches, results, strict=True):
            logits[batch] = batch_logits
            if batch_features:
                if all_features is None:
                    all_features = np.zeros((len(rows), batch_features[0].shape[1]), dtype=np.float32)
                all_features[batch] = batch_features[0]
            done += len(batch)
            if progress:
                progress.advance(done)
    return Outputs(logits, all_features)


def _divided(
    model: Model, encoded: EncodedCorpus, rows: np.ndarray, features: bool, progress: Progress | None
) -> Outputs:  # fmt: skip
    """Compute the logits, and the features, of some rows in several processes."""
    part = parallel.part_of(len(rows))
    with parallel.alone():
        own = compute_logits(model, encoded, rows[part.rows], features=features, progress=progress)
    logits, *more = (
        parallel.gather(torch.from_numpy(values[: part.kept]).to(model.device), len(rows)).cpu().numpy()
        for values in (own.logits, own.features)
        if values is not None
    )
    return Outputs(logits, more[0] if more else None)


_Compute = Callable[[Model, np.ndarray], list[np.ndarray]]
_Results = Generator[list[np.ndarray], None, None]


def _one_by_one(model: Model, compute: _Compute, batches: Sequence[np.ndarray]) -> _Results:
    training, microbatches = model.training, model.microbatches
    model.eval()
    model.microbatches = 1  # these batches are small
    try:
        for batch in batches:
            yield compute(model, batch)
    finally:
        model.train(training)
        model.microbatches = microbatches


def _in_parallel(model: Model, compute: _Compute, batches: Sequence[np.ndarray]) -> _Results:
    """Compute one batch per core: if all cores shared a batch, they would wait for each other after every operation."""
    count = torch.get_num_threads()
    idle: queue.SimpleQueue[Model] = queue.SimpleQueue()

    def work(batch: np.ndarray) -> list[np.ndarray]:
        scorer = idle.get()
        try:
            return compute(scorer, batch)
        finally:
            idle.put(scorer)

    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for scorer in pool.submit(scorers, model, count).result():
                idle.put(scorer)
            yield from pool.map(work, batches)
    finally:
        torch.set_num_threads(count)  # a thread's setting also becomes that of threads created later


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of logits, in float64."""
    return torch.softmax(torch.from_numpy(np.asarray(logits, dtype=np.float64)), dim=-1).numpy()


def predict_texts(model: Model, texts: Sequence[str | Mapping[str, Any] | Thread]) -> np.ndarray:
    """Return class probabilities of some texts or threads.

    Parameters
    ----------
    model : Model
        A model of texts reads the root of a thread; a model of threads reads a text as a thread without replies.
    texts : sequence of str, dict or Thread
        A dict is a thread and has the key "nodes".

    Returns
    -------
    array of float64, shape (N, K)
        Columns in the order of `model.classes`.

    Raises
    ------
    RequestError
        If an item is neither a text nor a thread.
    """
    if isinstance(texts, (str, Mapping, Thread)):
        got = "text" if isinstance(texts, str) else "thread"
        raise RequestError(f"predict: expected a list of texts or threads, got one {got}: put it in a list")
    return _predict(model, [_example(item, position) for position, item in enumerate(texts)])


def _example(item: str | Mapping[str, Any] | Thread, position: int) -> str | Thread:
    if isinstance(item, str):
        return item
    if isinstance(item, Thread):
        item = {NODES: item}
    if isinstance(item, Mapping) and NODES in item:
        return threads.read(item, f"position {position}")[0]
    raise RequestError(
        f"predict: expected texts or threads (dicts with {NODES!r}), got {type(item).__name__} at position {position}"
    )


def _predict(model: Model, examples: Sequence[str | Thread]) -> np.ndarray:
    texts = [example for example in examples if isinstance(example, str)]
    if len(texts) == len(examples):
        encoded = model.encode_texts(texts)
    else:  # all in one encoding, so that texts and threads share batches
        encoded = model.encode_threads([Thread([example], [-1]) if isinstance(example, str) else example for example in examples])
    logits = compute_logits(model, encoded).logits
    if not np.isfinite(logits).all():
        raise RunError("the model gives numbers that are not finite; its weights are damaged: copy or train it again")
    return probabilities(logits)


class Predicted(NamedTuple):
    """A summary of a file of predictions.

    Attributes
    ----------
    rows : int
        Number of rows.
    empty : int
        Number of rows without a text, and therefore without a prediction.
    counts : dict of str to int
        Number of predictions of each class.
    """

    rows: int
    empty: int
    counts: dict[str, int]


def predict_file(
    model: Model,
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text_column: str | None = None,
    all_probabilities: bool = False,
    raw: bool = False,
    progress: Progress | None = None,
) -> Predicted:
    """Predict every row of a file; memory does not grow with the file.

    Parameters
    ----------
    model : Model
        As in `predict_texts`.
    path : path
        A table of texts or threads.
    output : path
        The same table with the columns "prediction" and "confidence" added. Rows without a text are kept, without prediction.
    text_column : str, optional
        Column of the texts; by default the usual names are searched for.
    all_probabilities : bool
        Whether to add a column "probability CLASS" for every class.
    raw : bool
        Whether texts that a spreadsheet would take for formulas are written to CSV and TSV as they are, instead of with an
        apostrophe in front.
    progress : Progress, optional
        Shows the number of rows done.

    Raises
    ------
    RequestError
        If a row cannot be read, or a column to add exists already.
    """
    path, output = Path(path), Path(output)
    existing = readers.columns(path)
    columns = records.find_file_columns(path, text_column=text_column)
    added = ["prediction", "confidence", *([f"probability {name}" for name in model.classes] if all_probabilities else [])]
    taken = set(existing)
    if clash := next((name for name in added if name in taken), None):
        raise _column_exists(str(path), clash)
    if os.path.realpath(output) == os.path.realpath(path):
        raise RequestError(f"{output}: the predictions would overwrite their input; give another --output")
    rows = empty = 0
    counts = dict.fromkeys(model.classes, 0)
    with Writer(output, columns=[*existing, *added], spreadsheet=not raw) as writer:
        for block in _blocks(readers.read_rows(path)):
            for row, record in block:  # a JSON line may have keys that the first line has not
                if clash := next((name for name in added if name in record), None):
                    raise _column_exists(f"{path}: row {row}", clash)
            examples = [records.read_example(record, columns, f"{path}: row {row}")[0] for row, record in block]
            filled = [number for number, example in enumerate(examples) if not records.is_blank(example)]
            predicted = _predict(model, [examples[number] for number in filled]) if filled else np.zeros((0, len(model.classes)))
            probabilities_of = dict(zip(filled, predicted, strict=True))
            for number, (_, record) in enumerate(block):
                values: list[Any] = [None] * len(added)
                if (row_probabilities := probabilities_of.get(number)) is not None:
                    best = int(row_probabilities.argmax())
                    counts[model.classes[best]] += 1
                    rounded = [round(float(value), 6) for value in row_probabilities]
                    values = [model.classes[best], rounded[best], *rounded][: len(added)]
                writer.write({**record, **dict(zip(added, values, strict=True))})
            rows += len(block)
            empty += len(block) - len(filled)
            if progress:
                progress.advance(rows)
    return Predicted(rows, empty, counts)


def _column_exists(where: str, column: str) -> RequestError:
    return RequestError(f"{where}, column {column!r}: the predictions would overwrite this column; rename it")


def _blocks(items: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield records in lists of `ROWS_AT_ONCE`, or fewer if they are large."""
    block: list[tuple[int, dict[str, Any]]] = []
    size = 0
    for row, record in items:
        block.append((row, record))
        size += records.size_of(record)
        if len(block) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield block
            block, size = [], 0
    if block:
        yield block
