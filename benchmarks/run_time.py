"""Time of the parts of a run other than the MTEM step. On the CPU; every command prints a table and writes JSON rows.

    python benchmarks/run_time.py tokens --data DIR       tokenization with one and with two cores, in a forked process, cached
    python benchmarks/run_time.py padding --data DIR      share of padding in the training batches
    python benchmarks/run_time.py optimizer               the fused AdamW compared with the others
    python benchmarks/run_time.py frozen                  the upper two layers trained, compared with all of them
    python benchmarks/run_time.py positions               the last layer at the first position, compared with all positions
    python benchmarks/run_time.py bf16                    steps in bf16, with what makes them quicker added one by one
    python benchmarks/run_time.py stages                  one adaptation of the bundled sample, stage by stage

DIR holds <domain>.labeled.jsonl.gz and <domain>.unlabeled.jsonl.gz of the Amazon reviews.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mtem import dropout, inference, methods, models
from mtem.atomic import write_json
from mtem.cli import demo
from mtem.data.batching import Batches, padding_share
from mtem.data.loading import load_corpus
from mtem.data.splits import hold_out
from mtem.data.tokens import tokenize
from mtem.datasets.sample import sample_path
from mtem.methods.base import Context
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run import adapt, candidates, pipeline, result
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem_paper import cost

DOMAINS = ("books", "dvd", "electronics", "kitchen")


def row(engine: str, seconds: float | None, args: argparse.Namespace, **fields: Any) -> dict[str, Any]:
    """Return a row of results/cost; `seconds` is wall-clock time."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow")}
    about = {"engine": engine, "device": "cpu", "model": str(args.model), "batch": args.batch, "length": args.length}
    about |= {"precision": "fp32", "attention": "sdpa", "seed": args.seed, "seconds": seconds}
    return {**about, "time_ratio": None, "memory_ratio": None, **fields, **cost.machine(), "versions": versions}


def show(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print the rows as a table; `columns` maps each field to its format."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("engine", *columns):
        table.add_column(name.replace("_", " "), justify="left" if name == "engine" else "right")
    for line in rows:
        cells = ("" if line.get(name) is None else format(line[name], form) for name, form in columns.items())
        table.add_row(line["engine"], *cells)
    Console(width=140).print(table)


# ---------------------------------------------------------------------- tokens


def tokens(args: argparse.Namespace) -> list[dict[str, Any]]:
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for cores in (1, 2):
                with mock.patch.dict(os.environ, RAYON_NUM_THREADS=str(cores), MTEM_CACHE=folder):
                    for name, figures in apart(_tokenized, args).items():
                        label = f"tokens, {cores} core{'s'[: cores - 1]}{name}"
                        results["tokens, cached" if "cached" in name else label].append(figures)
    rows = []
    for name, lines in results.items():
        middle = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
        base = statistics.median(line["seconds"] for line in results["tokens, 1 core"])
        rows.append(row(name, middle.pop("seconds"), args, repeats=len(lines), **middle))
        rows[-1]["time_ratio"] = rows[-1]["seconds"] / base
    show(rows, {"texts_per_second": ".0f", "seconds": ".2f", "time_ratio": ".3f", "processor_seconds": ".2f", "threads": ".0f"})
    return rows


def _tokenized(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure fresh, cached and forked tokenization; in a new process, since the first call fixes the number of threads."""
    corpus = load_corpus([str(args.data / f"{name}.unlabeled.jsonl.gz") for name in DOMAINS], labeled=False)
    tokenizer = TextModel.create(args.model, ("a", "b")).tokenizer

    def measured(cache: str) -> dict[str, float]:
        before, start, spent = _threads(), time.perf_counter(), time.process_time()
        tokenize(corpus, tokenizer, args.length, cache=cache)
        seconds, processor = time.perf_counter() - start, time.process_time() - spent
        busy = [spent - before.get(number, 0) for number, spent in _threads().items()]
        threads = sum(spent > 0.1 * max(busy) for spent in busy) if max(busy) else 1
        return {
            "seconds": seconds, "processor_seconds": processor, "texts": len(corpus),
            "texts_per_second": len(corpus) / seconds, "threads": threads,
        }  # fmt: skip

    def forked(pipe: Any, cache: str) -> None:
        pipe.send(measured(cache))

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        figures = {"": measured(first), ", cached": measured(first)}
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=forked, args=(theirs, second))
        child.start()
        figures[", in a process forked afterwards"] = ours.recv()
        child.join()
    return figures


def _threads() -> dict[str, float]:
    """Return the processor seconds of every thread of this process; of the whole process where the system has no /proc."""
    seconds = {}
    for path in Path("/proc/self/task").glob("*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        seconds[path.parent.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds or {"": time.process_time()}


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# ---------------------------------------------------------------------- padding


def padding(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer = TextModel.create(args.model, ("a", "b")).tokenizer
    rows = []
    for target in DOMAINS:
        source = load_corpus([str(args.data / f"{name}.labeled.jsonl.gz") for name in DOMAINS if name != target], labeled=True)
        train, _ = hold_out(source, source.classes, TrainingSettings().validation_share, args.seed)
        pool = load_corpus(str(args.data / f"{target}.unlabeled.jsonl.gz"), labeled=False)
        for name, corpus, chosen in ((f"source without {target}", source, train), (f"unlabeled {target}", pool, slice(None))):
            lengths = np.asarray(tokenize(corpus, tokenizer, args.length).lengths)[chosen]
            shares = {}
            for order, options in (("padding", {}), ("padding_unsorted", {"bucket": 1})):
                batches = Batches(lengths, args.batch, args.seed, **options)
                shares[order] = padding_share(lengths, map(batches, range(3 * batches.batches_per_epoch)))
            rows.append(row(name, None, args, texts=len(lengths), tokens_per_text=float(lengths.mean()), **shares))
    show(rows, {"texts": "d", "tokens_per_text": ".1f", "padding": ".4f", "padding_unsorted": ".4f"})
    return rows


# ---------------------------------------------------------------------- optimizer


def optimizer(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, frozen in (("all layers", 0), ("upper two layers", -2)):
        model = TextModel.create(args.model, ("a", "b"))
        model.freeze(frozen)
        initial = list(model.trainable().values())
        optimizers = {}
        for implementation in ("loop", "foreach", "fused"):
            parameters = [torch.nn.Parameter(value.detach().clone()) for value in initial]
            options = {} if implementation == "loop" else {implementation: True}
            optimizers[implementation] = parameters, torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, **options)
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        draw = torch.Generator().manual_seed(args.seed)
        for _ in range(args.repeats + 1):
            gradients = [torch.randn(value.shape, generator=draw) for value in initial]
            for implementation, (parameters, adamw) in optimizers.items():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                start, spent = time.perf_counter(), time.process_time()
                adamw.step()
                times[implementation].append((time.perf_counter() - start, time.process_time() - spent))
        middle = {
            implementation: [statistics.median(column) for column in zip(*lines[1:], strict=True)]
            for implementation, lines in times.items()
        }
        for implementation, (parameters, _) in optimizers.items():
            pairs = zip(parameters, optimizers["loop"][0], strict=True)
            away = max(float((one - other).detach().abs().max()) for one, other in pairs)
            seconds, processor = middle[implementation]
            fields = {"processor_seconds": processor, "time_ratio": seconds / middle["loop"][0], "largest_difference": away}
            rows.append(row(f"AdamW {implementation}, {name}", seconds, args, repeats=args.repeats, **fields))
    show(rows, {"seconds": ".4f", "processor_seconds": ".4f", "time_ratio": ".3f", "largest_difference": ".1e"})
    return rows


# ---------------------------------------------------------------------- frozen layers

SOURCE_ONLY = "source-only"


def frozen(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in (SOURCE_ONLY, "mtem"):
        with tempfile.TemporaryDirectory() as folder:
            both = {layers: _Training(args, name, layers, Path(folder)) for layers in (0, -2)}
            for step in range(both[0].trainer.steps):  # in turns, so that both see the same machine
                for training in both.values():
                    training.step(step)
        for clock, of in (("seconds", 0), ("processor_seconds", 1)):
            per_step = {layers: statistics.median(line[of] for line in training.times) for layers, training in both.items()}
            total = {layers: training.once[of] + sum(line[of] for line in training.times) for layers, training in both.items()}
            parts = (("step", per_step), (f"{args.passes} passes over {args.texts} texts", total))
            for part, values in parts:
                for layers, label in ((0, "all layers"), (-2, "upper two layers")):
                    fields = {"clock": clock, "time_ratio": values[layers] / values[0], "speedup": values[0] / values[layers]}
                    fields["lower_layers_once"] = both[layers].once[of] if layers and part != "step" else None
                    rows.append(row(f"{name}, {part}, {label}", values[layers], args, **fields))
    show(rows, {"clock": "", "seconds": ".2f", "time_ratio": ".3f", "speedup": ".2f", "lower_layers_once": ".2f"})
    return rows


class _Training:
    """Some passes of a method over a part of the sample, step by step, with the time of each and of the lower layers before."""

    def __init__(self, args: argparse.Namespace, name: str, layers: int, folder: Path) -> None:
        torch.manual_seed(args.seed)
        source, target = (
            load_corpus(str(sample_path(f"{domain}.jsonl.gz")), labeled=labeled).select(range(args.texts))
            for domain, labeled in (("books", True), ("kitchen", False))
        )
        self.model = model = TextModel.create(args.model, source.classes, max_length=args.length)
        model.freeze(layers)
        quiet = Progress(quiet=True)
        encoded = [model.encode(corpus) for corpus in (source, target)]
        start, spent = time.perf_counter(), time.process_time()
        for number in range(1 if name == SOURCE_ONLY else 2):
            path = folder / f"{name}{layers}-{number}.npy"
            encoded[number] = model.keep_lower(encoded[number], path, quiet, "lower layers", float("inf"))
        self.once = time.perf_counter() - start, time.process_time() - spent
        labels = source.label_numbers(source.classes)
        self.source = Stream(model, encoded[0], np.arange(args.texts), labels, args.batch, args.seed)
        self.target = Stream(model, encoded[1], np.arange(args.texts), None, args.batch, args.seed + 1)
        steps = args.passes * self.source.per_epoch
        method_cls = methods.get(name)
        context = Context(
            steps,
            args.texts,
            2,
            torch.Generator().manual_seed(args.seed),
            lambda: 1e-4,
            source_size=args.texts,
            **TrainingSettings().teacher_and_view(1000, frozen=model.frozen_layers > 0),
        )
        method = method_cls(model, method_cls.Settings(), context)
        self.trainer = Trainer(
            method, TrainingSettings(), name=name, steps=steps, learning_rate=1e-4, source=self.source,
            target=None if name == SOURCE_ONLY else self.target, progress=quiet,
        )  # fmt: skip
        self.times: list[tuple[float, float]] = []

    def step(self, number: int) -> None:
        start, spent = time.perf_counter(), time.process_time()
        trainer = self.trainer
        target = trainer.target(number) if trainer.target else None
        trainer.method.step(number, trainer.source(number), target, trainer.update)
        self.times.append((time.perf_counter() - start, time.process_time() - spent))


# ---------------------------------------------------------------------- the last layer at the first position


def positions(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in (SOURCE_ONLY, "mtem"):
        with tempfile.TemporaryDirectory() as folder:
            training = _Training(args, name, -2, Path(folder))
            for step in range(args.repeats + 1):  # in turns, so that both see the same machine and the same texts
                with training.model.all_positions():
                    training.step(step)
                training.step(step)
        both = {"all positions": training.times[2::2], "first position": training.times[3::2]}  # without the first step
        for clock, of in (("seconds", 0), ("processor_seconds", 1)):
            pairs = [(whole[of], cut[of]) for whole, cut in zip(*both.values(), strict=True)]
            speedup = statistics.median(whole / cut for whole, cut in pairs)
            for label, values, factor in zip(both, zip(*pairs, strict=True), (1.0, speedup), strict=True):
                fields = {"clock": clock, "repeats": args.repeats, "time_ratio": 1 / factor, "speedup": factor}
                rows.append(row(f"{name}, step, upper two layers, {label}", statistics.median(values), args, **fields))
    show(rows, {"clock": "", "seconds": ".2f", "time_ratio": ".3f", "speedup": ".2f"})
    return rows


# ---------------------------------------------------------------------- steps in bf16

QUICKER = ("masks of 16 bits", "pseudo labels in bf16", "huge pages")  # no run has the last one, which makes steps slower
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # of torch


def bf16(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each state in a process of its own: torch looks once whether it is to ask for huge pages."""
    rows = []
    before: dict[str, float] = {}
    for count in range(len(QUICKER) + 1):
        with mock.patch.dict(os.environ, {HUGE_PAGES: str(int(count == len(QUICKER)))}):
            found = apart(_bf16_steps, args, QUICKER[:count])
        before = before or found
        label = f"with {QUICKER[count - 1]}" if count else "without all three"
        for name, seconds in found.items():
            fields = {"time_ratio": seconds / before[name], "speedup": before[name] / seconds}
            rows.append(row(f"{name}, step, {label}", seconds, args, **fields, precision="bf16"))
    show(rows, {"seconds": ".2f", "time_ratio": ".3f", "speedup": ".2f"})
    return rows


def _bf16_steps(args: argparse.Namespace, quicker: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if "masks of 16 bits" not in quicker:
            stack.enter_context(mock.patch.object(dropout, "ONE_OF_16_BITS", {}))
        if "pseudo labels in bf16" not in quicker:
            stack.enter_context(mock.patch.object(TextModel, "labeling", lambda model: nullcontext()))
        found = {}
        for name in (SOURCE_ONLY, "fixmatch"):  # on reviews the steps of MTEM's recommended preset
            training = _Training(args, name, 0, Path(folder))
            training.model.precision = torch.bfloat16
            for step in range(training.trainer.steps):
                training.step(step)
            found[name] = statistics.median(seconds for seconds, _ in training.times[1:])
        return found


# ---------------------------------------------------------------------- stages of a run


class Clock:
    """Time by stage. A stage inside another one stops the outer one's time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._open = ["other"]
        self._since = time.perf_counter(), time.process_time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.charge()
        self._open.append(name)
        try:
            yield
        finally:
            self.charge()
            self._open.pop()

    @property
    def now(self) -> str:
        """The innermost open stage."""
        return self._open[-1]

    def charge(self) -> None:
        """Add the time since the last call to the innermost open stage."""
        now = time.perf_counter(), time.process_time()
        self.seconds[self._open[-1]] += now[0] - self._since[0]
        self.processor[self._open[-1]] += now[1] - self._since[1]
        self._since = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of an adaptation, each as a stage."""
        all_rows = lambda *arguments, **named: len(arguments) < 3 and named.get("rows") is None  # noqa: E731
        parts: tuple[tuple[Any, str, str, Callable[..., bool] | None], ...] = (
            (adapt, "load_corpus", "reading", None),
            (models, "create", "loading the encoder", None),
            (TextModel, "encode", "tokens", None),
            (TextModel, "keep_lower", "lower layers, once", None),
            (pipeline.Run, "__init__", "splitting", None),
            (pipeline.Run, "train_source", "source training", None),
            (pipeline.Run, "adapt", "adaptation steps", None),
            (Stream, "rows", "choosing batches", None),
            (candidates.Candidates, "evaluate_candidate", "judging", None),
            (pipeline.Run, "checkpoint", "checkpoints", None),
            (pipeline.Run, "finish", "estimating", None),
            (inference, "compute_logits", "final prediction", all_rows),
            (pipeline, "index_table", "table", None),
            (result.Adapted, "save", "saving", None),
        )
        with ExitStack() as stack:
            for owner, name, stage, applies in parts:
                stack.enter_context(mock.patch.object(owner, name, self._watched(getattr(owner, name), stage, applies)))
            self._since = time.perf_counter(), time.process_time()
            yield
            self.charge()

    def _watched(self, function: Callable[..., Any], stage: str, applies: Callable[..., bool] | None) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            if applies is not None and not applies(*arguments, **named):
                return function(*arguments, **named)
            with self.stage(stage):
                return function(*arguments, **named)

        return watched


def stages(args: argparse.Namespace) -> list[dict[str, Any]]:
    sources = {name: str(sample_path(f"{name}.jsonl.gz")) for name in demo.SOURCES}
    settings = {**demo.SETTINGS, "seed": args.seed, "batch_size": args.batch, "max_length": args.length}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MTEM_CACHE=f"{folder}/cache"), clock.watching():
        target = str(sample_path("kitchen.jsonl.gz"))
        adapt.adapt(sources, target, model=args.model, output=f"{folder}/run", **settings)
    total, processor = sum(clock.seconds.values()), sum(clock.processor.values())
    rows = []
    for name, seconds in [*clock.seconds.items(), ("all", total)]:
        spent = clock.processor.get(name, processor)
        shares = {"share": seconds / total, "processor_seconds": spent, "processor_share": spent / processor}
        rows.append(row(name, seconds, args, **shares))
    show(rows, {"seconds": ".2f", "share": ".1%", "processor_seconds": ".2f", "processor_share": ".1%"})
    return rows


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], list[dict[str, Any]]], int, int]] = {
    # name: function, batch, length
    "tokens": (tokens, 1024, 256),
    "padding": (padding, 50, 256),
    "optimizer": (optimizer, 0, 0),
    "frozen": (frozen, 32, 96),
    "positions": (positions, 50, 150),
    "bf16": (bf16, 50, 128),
    "stages": (stages, demo.SETTINGS["batch_size"], demo.SETTINGS["max_length"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--data", type=Path, help="the Amazon reviews, for tokens and padding")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; without it torch's own choice")
    parser.add_argument("--texts", type=int, default=300, help="frozen, positions, bf16: texts of the source and of the target")
    parser.add_argument("--passes", type=int, default=2, help="frozen, bf16: how often they are seen")
    parser.add_argument("--json", type=Path, help="without it results/cost/run-time-COMMAND.json")
    args = parser.parse_args()
    function, batch, length = COMMANDS[args.command]
    args.batch = batch if args.batch is None else args.batch
    args.length = length if args.length is None else args.length
    if args.data is None and args.command in ("tokens", "padding"):
        parser.error("--data is needed")
    if args.threads:
        torch.set_num_threads(args.threads)
    write_json(args.json or Path(f"results/cost/run-time-{args.command}.json"), function(args))


if __name__ == "__main__":
    main()
