"""Time, memory and error of a whole MTEM step with each engine, compared with a plain fine-tuning step.

All steps have the same texts, labels, precision and attention kernel, no dropout, and end with the same AdamW update. Each engine
takes turns with the plain step it is compared with, so that both see the same state of the machine. The error is that of the
index gradient against second order in float32.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import multiprocessing
import platform
import resource
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from mtem.errors import RequestError
from mtem.methods.base import Batch, Context
from mtem.methods.mtem import PAPER, Mtem, MtemSettings, PseudoLabels
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run import record
from mtem.training.devices import find_device, find_precision
from mtem.training.settings import TrainingSettings
from mtem.training.trainer import Trainer

# "2 microbatches": source_microbatches=2. "v at theta": virtual_step=false.
ENGINES = ("plain", "layerwise", "layerwise, 2 microbatches", "layerwise, v at theta", "forward", "taylor", "second-order")
# Shapes with random weights: the cost does not depend on them.
SHAPES: dict[str, dict[str, int]] = {
    "bert-base": {},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
RATE = 2e-5
IN_A_ROW = {"cuda": 4}  # steps between two readings of the clock: a GPU's kernels are queued ahead, as in a run


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure."""

    engine: str
    batch: int
    length: int
    model: str
    device: str
    precision: str
    attention: str
    seed: int = 0
    repeats: int = 10
    frozen_layers: int = 0
    graphs: bool = True  # whether steps on a GPU are captured and replayed
    microbatches: int = 1
    activation_checkpointing: bool = False

    @property
    def step(self) -> str:
        """The name of the row: the engine, and the settings that save memory."""
        parts = [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        return ", ".join([self.engine, *parts, *(["activation_checkpointing"] if self.activation_checkpointing else [])])

    def row(self) -> dict[str, Any]:
        """Return the row before anything is measured."""
        return {**dataclasses.asdict(self), "engine": self.step}


class Probe(Mtem):
    """MTEM with labels that are given, and the index gradient kept for comparison."""

    labels: Tensor
    gradient: Tensor

    def sample_labels(self, logits: Tensor, temperature: float | Tensor) -> PseudoLabels:
        """Return the given labels."""
        return PseudoLabels(self.labels, torch.softmax(logits, dim=-1).amax(dim=-1))

    def updated_index(self, index: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Keep the gradient, then move the indexes."""
        self.gradient = gradient.clone()
        return super().updated_index(index, gradient, number)


def measure(
    cases: Sequence[Case], progress: Progress | None = None, each: Callable[[list[dict[str, Any]]], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """Measure each case; return a row for each.

    Parameters
    ----------
    cases
        What to measure. Ratios are against the plain step of the same batch, which has to come before the others.
    progress
        Where to report.
    each
        Called with the rows so far, after every one of them.
    """
    progress = progress or Progress(quiet=True)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[int, int], float] = {}
    about = machine()
    with progress.stage("measuring", len(cases)):
        for number, case in enumerate(cases):
            row = apart(case) if find_device(case.device).type == "cpu" else row_of(case)
            if case.step == "plain" and "memory" in row:
                plain[case.batch, case.length] = row["memory"]
            rows.append({**row, **ratios(row, plain.get((case.batch, case.length))), **about})
            each(rows)
            progress.advance(number + 1, cast("dict[str, float]", {"engine": case.step, "batch": case.batch}))
    return rows


def ratios(row: dict[str, Any], plain_memory: float | None) -> dict[str, float | None]:
    """Return time and memory as multiples of the plain step's; None where a figure is missing."""
    measured_both = "memory" in row and plain_memory is not None
    return {
        "time_ratio": row["seconds"] / row["plain_seconds"] if "seconds" in row else None,
        "memory_ratio": max(1.0, row["memory"]) / max(1.0, plain_memory or 0.0) if measured_both else None,
    }


def apart(case: Case, measure_case: Callable[[Case], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Measure a case in a process of its own: the peak memory of a process never decreases."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure_case or row_of, case).result()
        except concurrent.futures.process.BrokenProcessPool:
            return {**case.row(), "failed": "killed"}


def row_of(case: Case) -> dict[str, Any]:
    """Measure a case in this process; a lack of memory is part of the row."""
    row = case.row()
    try:
        row |= measured(case)
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    gc.collect()
    return row


def measured(case: Case, make: Callable[[Case, torch.device], Bench] | None = None) -> dict[str, Any]:
    """Measure memory over two steps, the time in turn with plain steps, and the error of the first step's index gradient."""
    make = make or Bench
    device = find_device(case.device)
    empty = resident()
    bench = make(case, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bench.step()
    gradient = None if case.engine == "plain" else bench.method.gradient
    bench.step()  # with the optimizer's state from the start
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident() - empty
    compared = dataclasses.replace(case, engine="plain", microbatches=1, activation_checkpointing=False)
    plain = [] if case == compared else [make(compared, device)]
    seconds = in_turn([bench, *plain], case.repeats)
    result: dict[str, Any] = {
        "seconds": seconds[0], "plain_seconds": seconds[-1], "memory": memory, "parameters": bench.parameters,
        "cosine": None, "relative_error": None,
    }  # fmt: skip
    del bench, plain
    gc.collect()
    if gradient is not None:
        reference = dataclasses.replace(case, engine="second-order", precision="fp32", repeats=0, activation_checkpointing=False)
        exact = _exact(reference).to(device)
        result |= {
            "cosine": float(torch.nn.functional.cosine_similarity(gradient, exact, dim=0)),
            "relative_error": float((gradient - exact).norm() / exact.norm()),
        }
    return result


@functools.lru_cache(maxsize=1)
def _exact(case: Case) -> Tensor:
    return Bench(case, find_device(case.device)).gradient().cpu()


class Bench:
    """A model, a source and a target batch, and the step of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        self.device = device
        model = make_model(case).to(device)
        model.precision = find_precision(case.precision, device)
        model.freeze(case.frozen_layers)
        model.save_memory(case.microbatches, case.activation_checkpointing)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        draw = torch.Generator().manual_seed(case.seed)
        source, target = (self.batch(case, model, draw) for _ in range(2))
        context = Context(1, case.batch, 2, draw, lambda: RATE)
        if case.engine == "plain":
            self.method: Any = SourceOnly(model, SourceOnlySettings(), context)
        else:
            own = {field.name for field in dataclasses.fields(MtemSettings)}
            chosen = {name: value for name, value in PAPER.items() if name in own}
            chosen |= {"engine": case.engine.split(",")[0], "virtual_step": "at theta" not in case.engine}
            chosen["source_microbatches"] = 2 if "2 microbatches" in case.engine else 1
            self.method = Probe(model, MtemSettings(**chosen), context)
            self.method.labels = target.labels
        model.eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]  # no dropout, whatever the method sets
        settings = TrainingSettings(max_grad_norm=0.0, schedule="constant", warmup_ratio=0.0, cuda_graphs=case.graphs)
        self.trainer = Trainer(
            self.method,
            settings,
            name="cost",
            steps=1,
            learning_rate=RATE,
            source=cast(Any, None),
            target=None,
            progress=Progress(quiet=True),
        )
        self.source, self.target = source, Batch(target.inputs, None, target.rows)

    def batch(self, case: Case, model: TextModel, draw: torch.Generator) -> Batch:
        """Return a batch of random texts and labels."""
        size, words = (case.batch, case.length), int(cast(Any, model.network).config.vocab_size)
        ids = torch.randint(min(1000, words // 2), words, size, generator=draw)
        labels = torch.randint(2, (case.batch,), generator=draw)
        mask = torch.ones((1, 1), dtype=torch.long, device=self.device).expand(size)  # as `collate` makes it
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask}
        return Batch(dict(model.prepare(inputs)), labels.to(self.device), torch.arange(case.batch, device=self.device))

    def step(self) -> None:
        """Take one step; on a GPU the second one is captured, and later ones are replayed."""
        if self.trainer.graphs is None:
            self.method.step(0, self.source, self.target, self.trainer.update)
        else:
            self.trainer.graphs.step(0, self.source, self.target)

    def gradient(self) -> Tensor:
        """Return the index gradient at the initial weights."""
        self.method.step(0, self.source, self.target, lambda loss, before_step=None, gradients=None: None)
        gradient: Tensor = self.method.gradient
        return gradient

    def timed(self) -> float:
        """Return the seconds of one step, measured over several in a row."""
        count = IN_A_ROW.get(self.device.type, 1)
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return (time.perf_counter() - start) / count

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def in_turn(benches: Sequence[Any], repeats: int) -> list[float]:
    """Return the median seconds of a step of each, after one round that does not count."""
    rounds = [[bench.timed() for bench in benches] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def make_model(case: Case) -> TextModel:
    """Return the named encoder, or a shape with random weights.

    Raises
    ------
    RequestError
        If the shape takes fewer tokens.
    """
    if case.model not in SHAPES or Path(case.model).is_dir():
        return TextModel.create(case.model, ["0", "1"], max_length=case.length, attention=case.attention)
    config = AutoConfig.for_model("bert", num_labels=2, attn_implementation=case.attention, **SHAPES[case.model])
    if case.length > config.max_position_embeddings:
        raise RequestError(f"--length {case.length}: {case.model} takes at most {config.max_position_embeddings} tokens")
    with torch.device(find_device(case.device)):  # made on the device: a large model takes seconds on a CPU
        network = AutoModelForSequenceClassification.from_config(config, attn_implementation=case.attention)  # type: ignore[no-untyped-call]
    tokenizer = types.SimpleNamespace(pad_token_id=0, mask_token_id=103, all_special_ids=[0, 100, 101, 102, 103])
    return TextModel(network, cast(PreTrainedTokenizerBase, tokenizer), case.length)


def resident() -> int:
    """Return the peak resident memory of this process, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {
        "machine": record.machine("cuda" if torch.cuda.is_available() else "cpu"),
        "cores": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": record.versions(),
    }


def render(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the rows as a table."""
    about = rows[0]
    console.print(
        f"{about['model']}, length {about['length']}, {about['precision']}, {about['attention']} attention, "
        f"{about['machine']}, torch {about['torch']}"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("step", "batch", "ms", "x plain", "MiB", "x plain", "cosine", "relative error"):
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=column != "step")
    for row in rows:
        if "failed" in row:
            table.add_row(row["engine"], str(row["batch"]), Text(row["failed"]))
            continue
        time_ratio, memory_ratio = ("" if row[k] is None else f"{row[k]:.2f}" for k in ("time_ratio", "memory_ratio"))
        error = (f"{row['cosine']:.6f}", f"{row['relative_error']:.1e}") if row.get("cosine") is not None else ("", "")
        table.add_row(
            row["engine"], str(row["batch"]), f"{1e3 * row['seconds']:.1f}", time_ratio, f"{row['memory'] / 2**20:.0f}",
            memory_ratio, *error,
        )  # fmt: skip
    console.print(table)
    console.print("cosine, relative error: of the index gradient, against second order in fp32", style="dim")


def cases(
    engines: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    microbatches: int = 1,
    activation_checkpointing: bool = False,
    **shared: Any,
) -> Iterator[Case]:
    """Yield a case for each length, batch size and engine; `shared` are the other fields.

    Where settings save memory, a plain step without them comes first: ratios are against it.
    """
    saving: dict[str, Any] = {"microbatches": microbatches, "activation_checkpointing": activation_checkpointing}
    for length in lengths:
        for batch in batches:
            if microbatches > 1 or activation_checkpointing:
                yield Case(engine="plain", batch=batch, length=length, **shared)
            for engine in engines:
                yield Case(engine=engine, batch=batch, length=length, **saving, **shared)
