"""`mtem cost`: what a whole MTEM step costs with each engine, in time and memory, beside a plain fine-tuning step; and its error.

All steps see the same texts, the same labels, the same precision and attention kernel, no dropout, and end in the same AdamW
update. Each engine takes turns with the plain step it is compared with, so that both see the same state of the machine. The error
is that of the index gradient against second order in float32.
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
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from mtem.errors import RequestError
from mtem.methods.base import Batch, Context
from mtem.methods.mtem import PAPER, Mtem, MtemSettings
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run import record
from mtem.training.devices import find_device, find_precision
from mtem.training.settings import TrainingSettings
from mtem.training.trainer import Trainer

# "pieces 2": the source batch in two pieces; "v at theta": without the virtual step's own gradient (virtual_step=false)
ENGINES = ("plain", "layerwise", "layerwise, pieces 2", "layerwise, v at theta", "forward", "taylor", "second-order")
# Shapes that need no weights: the cost does not depend on them.
SHAPES = {
    "bert-base": {},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
RATE = 2e-5
IN_A_ROW = {"cuda": 4}  # steps between two looks at the clock: a GPU is told what to do ahead of time, as in a run


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


class Probe(Mtem):
    """MTEM with labels that are given, and the index gradient kept for comparison."""

    labels: Tensor
    gradient: Tensor

    def sample_labels(self, logits: Tensor, temperature: float) -> Tensor:
        return self.labels

    def updated_index(self, index: Tensor, gradient: Tensor, number: int) -> Tensor:
        self.gradient = gradient.clone()
        return super().updated_index(index, gradient, number)


def measure(
    cases: Sequence[Case], progress: Progress | None = None, each: Callable[[list[dict[str, Any]]], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """One row for each case, with ratios against the plain step of the same batch, which comes before the others.

    `each` gets the rows so far, after every one of them.
    """
    progress = progress or Progress(quiet=True)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[int, int], float] = {}
    about = machine()
    with progress.stage("measuring", len(cases)):
        for number, case in enumerate(cases):
            row = apart(case) if find_device(case.device).type == "cpu" else row_of(case)
            if case.engine == "plain" and "memory" in row:
                plain[case.batch, case.length] = row["memory"]
            rows.append({**row, **ratios(row, plain.get((case.batch, case.length))), **about})
            each(rows)
            progress.advance(number + 1, {"engine": case.engine, "batch": case.batch})
    return rows


def ratios(row: dict[str, Any], plain_memory: float | None) -> dict[str, float | None]:
    known = "memory" in row and plain_memory is not None
    return {
        "time_ratio": row["seconds"] / row["plain_seconds"] if "seconds" in row else None,
        "memory_ratio": max(1.0, row["memory"]) / max(1.0, plain_memory) if known else None,
    }


def apart(case: Case, one: Callable[[Case], dict[str, Any]] | None = None) -> dict[str, Any]:
    """In a process of its own: the peak of a process's memory never comes down again."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(one or row_of, case).result()
        except concurrent.futures.process.BrokenProcessPool:
            return {**dataclasses.asdict(case), "failed": "killed"}


def row_of(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = dataclasses.asdict(case)
    try:
        row |= measured(case)
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    gc.collect()
    return row


def measured(case: Case, make: Callable[[Case, torch.device], Bench] | None = None) -> dict[str, Any]:
    """Memory over two steps, then the time, in turn with plain steps, then the error of the first step's index gradient."""
    make = make or Bench
    device = find_device(case.device)
    empty = resident()
    bench = make(case, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bench.step()
    gradient = None if case.engine == "plain" else bench.method.gradient
    bench.step()  # has the optimizer's state from the start
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident() - empty
    plain = [] if case.engine == "plain" else [make(dataclasses.replace(case, engine="plain"), device)]
    seconds = in_turn([bench, *plain], case.repeats)
    found: dict[str, Any] = {
        "seconds": seconds[0], "plain_seconds": seconds[-1], "memory": memory, "parameters": bench.parameters,
        "cosine": None, "relative_error": None,
    }  # fmt: skip
    del bench, plain
    gc.collect()
    if gradient is not None:
        exact = _exact(dataclasses.replace(case, engine="second-order", precision="fp32", repeats=0)).to(device)
        found |= {
            "cosine": float(torch.nn.functional.cosine_similarity(gradient, exact, dim=0)),
            "relative_error": float((gradient - exact).norm() / exact.norm()),
        }
    return found


@functools.lru_cache(maxsize=1)
def _exact(case: Case) -> Tensor:
    return Bench(case, find_device(case.device)).gradient().cpu()


class Bench:
    """A model, a source and a target batch, and the step that a case asks for."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        self.device = device
        model = make_model(case).to(device)
        model.precision = find_precision(case.precision, device)
        model.freeze(case.frozen_layers)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        draw = torch.Generator().manual_seed(case.seed)
        source, target = (self.batch(case, model, draw) for _ in range(2))
        context = Context(1, case.batch, 2, draw, lambda: RATE)
        if case.engine == "plain":
            self.method: Any = SourceOnly(model, SourceOnlySettings(), context)
        else:
            own = {field.name for field in dataclasses.fields(MtemSettings)}
            settings = {name: value for name, value in PAPER.items() if name in own}
            settings |= {"engine": case.engine.split(",")[0], "virtual_step": "at theta" not in case.engine}
            settings["source_microbatches"] = 2 if "pieces 2" in case.engine else 1
            self.method = Probe(model, MtemSettings(**settings), context)
            self.method.labels = target.labels
        model.eval()
        model.train = lambda mode=True: model  # no dropout, whatever the method asks for
        settings = TrainingSettings(max_grad_norm=0.0, schedule="constant", warmup_ratio=0.0)
        self.trainer = Trainer(
            self.method,
            settings,
            name="cost",
            steps=1,
            learning_rate=RATE,
            source=None,
            target=None,
            progress=Progress(quiet=True),
        )
        self.source, self.target = source, Batch(target.inputs, None, target.rows)

    def batch(self, case: Case, model: TextModel, draw: torch.Generator) -> Batch:
        size, words = (case.batch, case.length), model.network.config.vocab_size
        ids = torch.randint(min(1000, words // 2), words, size, generator=draw)
        labels = torch.randint(2, (case.batch,), generator=draw)
        mask = torch.ones((1, 1), dtype=torch.long, device=self.device).expand(size)  # as `collate` makes it
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask}
        return Batch(model.prepare(inputs), labels.to(self.device), torch.arange(case.batch, device=self.device))

    def step(self) -> None:
        self.method.step(0, self.source, self.target, self.trainer.update)

    def gradient(self) -> Tensor:
        """The index gradient at the weights the model was made with."""
        self.method.step(0, self.source, self.target, lambda loss, before_step=None, gradients=None: None)
        return self.method.gradient

    def timed(self) -> float:
        """Seconds of one step, over a few in a row."""
        count = IN_A_ROW.get(self.device.type, 1)
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return (time.perf_counter() - begun) / count

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def in_turn(benches: Sequence[Any], repeats: int) -> list[float]:
    """Median seconds of a step of each, after one round that does not count."""
    rounds = [[bench.timed() for bench in benches] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def make_model(case: Case) -> TextModel:
    """The named encoder, or a shape drawn at random."""
    if case.model not in SHAPES or Path(case.model).is_dir():
        return TextModel.create(case.model, ["0", "1"], max_length=case.length, attention=case.attention)
    config = AutoConfig.for_model("bert", num_labels=2, attn_implementation=case.attention, **SHAPES[case.model])
    if case.length > config.max_position_embeddings:
        raise RequestError(f"length {case.length}: {case.model} takes {config.max_position_embeddings} tokens")
    with torch.device(find_device(case.device)):  # drawn where it will be: a large model takes seconds on a CPU
        network = AutoModelForSequenceClassification.from_config(config, attn_implementation=case.attention)
    tokenizer = types.SimpleNamespace(pad_token_id=0, mask_token_id=103, all_special_ids=[0, 100, 101, 102, 103])
    return TextModel(network, tokenizer, case.length)


def resident() -> int:
    """The largest resident memory of this process so far, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "machine": record.machine("cuda" if torch.cuda.is_available() else "cpu"),
        "cores": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": record.versions(),
    }


def render(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table for people."""
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


def cases(engines: Sequence[str], batches: Sequence[int], lengths: Sequence[int], **shared: Any) -> Iterator[Case]:
    for length in lengths:
        for batch in batches:
            for engine in engines:
                yield Case(engine=engine, batch=batch, length=length, **shared)
