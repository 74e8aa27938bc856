"""Where the time of a run goes beside the MTEM step itself. On the CPU; every command prints a table and writes JSON rows.

    python benchmarks/run_time.py tokens --data DIR       tokenization with one and with two cores, in a forked process, cached
    python benchmarks/run_time.py padding --data DIR      share of padding in the training batches
    python benchmarks/run_time.py optimizer               the fused AdamW beside the others
    python benchmarks/run_time.py frozen                  the upper two layers trained, beside all of them
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
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mtem import inference, methods, models
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
from mtem.run import adapt, pipeline, result
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem_paper import cost

DOMAINS = ("books", "dvd", "electronics", "kitchen")


def row(engine: str, seconds: float | None, given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """A line of results/cost; `seconds` are of the wall clock."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow")}
    about = {"engine": engine, "device": "cpu", "model": str(given.model), "batch": given.batch, "length": given.length}
    about |= {"precision": "fp32", "attention": "sdpa", "seed": given.seed, "seconds": seconds}
    return {**about, "time_ratio": None, "memory_ratio": None, **more, **cost.machine(), "versions": versions}


def show(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """The rows as a table; `columns` gives each field its format."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("engine", *columns):
        table.add_column(name.replace("_", " "), justify="left" if name == "engine" else "right")
    for one in rows:
        cells = ("" if one.get(name) is None else format(one[name], form) for name, form in columns.items())
        table.add_row(one["engine"], *cells)
    Console(width=140).print(table)


# ---------------------------------------------------------------------- tokens


def tokens(given: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.repeats):
            for cores in (1, 2):
                with mock.patch.dict(os.environ, RAYON_NUM_THREADS=str(cores), MTEM_CACHE=folder):
                    for name, figures in apart(_tokenized, given).items():
                        label = f"tokens, {cores} core{'s'[: cores - 1]}{name}"
                        found["tokens, cached" if "cached" in name else label].append(figures)
    rows = []
    for name, lines in found.items():
        middle = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
        base = statistics.median(line["seconds"] for line in found["tokens, 1 core"])
        rows.append(row(name, middle.pop("seconds"), given, repeats=len(lines), **middle))
        rows[-1]["time_ratio"] = rows[-1]["seconds"] / base
    show(rows, {"texts_per_second": ".0f", "seconds": ".2f", "time_ratio": ".3f", "processor_seconds": ".2f", "threads": ".0f"})
    return rows


def _tokenized(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """In a process of its own, since the number of threads is fixed with the first call: fresh, cached, and forked."""
    corpus = load_corpus([str(given.data / f"{name}.unlabeled.jsonl.gz") for name in DOMAINS], labeled=False)
    tokenizer = TextModel.create(given.model, ("a", "b")).tokenizer

    def measured(cache: str) -> dict[str, float]:
        before, begun, spent = _threads(), time.perf_counter(), time.process_time()
        tokenize(corpus, tokenizer, given.length, cache=cache)
        seconds, processor = time.perf_counter() - begun, time.process_time() - spent
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
    """Processor seconds of every thread of this process; empty where the system does not say."""
    found = {}
    for place in Path("/proc/self/task").glob("*/stat"):
        fields = place.read_text().rpartition(")")[2].split()
        found[place.parent.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found or {"": time.process_time()}


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# ---------------------------------------------------------------------- padding


def padding(given: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer = TextModel.create(given.model, ("a", "b")).tokenizer
    rows = []
    for target in DOMAINS:
        source = load_corpus([str(given.data / f"{name}.labeled.jsonl.gz") for name in DOMAINS if name != target], labeled=True)
        train, _ = hold_out(source, source.classes, TrainingSettings().validation_share, given.seed)
        pool = load_corpus(str(given.data / f"{target}.unlabeled.jsonl.gz"), labeled=False)
        for name, corpus, chosen in ((f"source without {target}", source, train), (f"unlabeled {target}", pool, slice(None))):
            lengths = np.asarray(tokenize(corpus, tokenizer, given.length).lengths)[chosen]
            shares = {}
            for kind, options in (("padding", {}), ("padding_unsorted", {"bucket": 1})):
                batches = Batches(lengths, given.batch, given.seed, **options)
                shares[kind] = padding_share(lengths, map(batches, range(3 * batches.batches_per_epoch)))
            rows.append(row(name, None, given, texts=len(lengths), tokens_per_text=float(lengths.mean()), **shares))
    show(rows, {"texts": "d", "tokens_per_text": ".1f", "padding": ".4f", "padding_unsorted": ".4f"})
    return rows


# ---------------------------------------------------------------------- optimizer


def optimizer(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, frozen in (("all layers", 0), ("upper two layers", -2)):
        model = TextModel.create(given.model, ("a", "b"))
        model.freeze(frozen)
        start = list(model.trainable().values())
        made = {}
        for kind in ("loop", "foreach", "fused"):
            parameters = [torch.nn.Parameter(value.detach().clone()) for value in start]
            options = {} if kind == "loop" else {kind: True}
            made[kind] = parameters, torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, **options)
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        draw = torch.Generator().manual_seed(given.seed)
        for _ in range(given.repeats + 1):
            gradients = [torch.randn(value.shape, generator=draw) for value in start]
            for kind, (parameters, each) in made.items():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                begun, spent = time.perf_counter(), time.process_time()
                each.step()
                times[kind].append((time.perf_counter() - begun, time.process_time() - spent))
        middle = {kind: [statistics.median(column) for column in zip(*lines[1:], strict=True)] for kind, lines in times.items()}
        for kind, (parameters, _) in made.items():
            pairs = zip(parameters, made["loop"][0], strict=True)
            away = max(float((one - other).detach().abs().max()) for one, other in pairs)
            seconds, processor = middle[kind]
            more = {"processor_seconds": processor, "time_ratio": seconds / middle["loop"][0], "largest_difference": away}
            rows.append(row(f"AdamW {kind}, {name}", seconds, given, repeats=given.repeats, **more))
    show(rows, {"seconds": ".4f", "processor_seconds": ".4f", "time_ratio": ".3f", "largest_difference": ".1e"})
    return rows


# ---------------------------------------------------------------------- frozen layers


def frozen(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in ("source-only", "mtem"):
        with tempfile.TemporaryDirectory() as folder:
            both = {layers: _Training(given, name, layers, Path(folder)) for layers in (0, -2)}
            for step in range(both[0].trainer.steps):  # in turns, so that both see the same machine
                for each in both.values():
                    each.step(step)
        for clock, of in (("seconds", 0), ("processor_seconds", 1)):
            per_step = {layers: statistics.median(line[of] for line in each.times) for layers, each in both.items()}
            whole = {layers: each.once[of] + sum(line[of] for line in each.times) for layers, each in both.items()}
            parts = (("step", per_step), (f"{given.passes} passes over {given.texts} texts", whole))
            for what, values in parts:
                for layers, label in ((0, "all layers"), (-2, "upper two layers")):
                    more = {"clock": clock, "time_ratio": values[layers] / values[0], "speedup": values[0] / values[layers]}
                    more["lower_layers_once"] = both[layers].once[of] if layers and what != "step" else None
                    rows.append(row(f"{name}, {what}, {label}", values[layers], given, **more))
    show(rows, {"clock": "", "seconds": ".2f", "time_ratio": ".3f", "speedup": ".2f", "lower_layers_once": ".2f"})
    return rows


class _Training:
    """Some passes of a method over a part of the sample, step by step, with the time of each and of the lower layers before."""

    def __init__(self, given: argparse.Namespace, name: str, layers: int, folder: Path) -> None:
        torch.manual_seed(given.seed)
        source, target = (
            load_corpus(str(sample_path(f"{domain}.jsonl.gz")), labeled=labeled).select(range(given.texts))
            for domain, labeled in (("books", True), ("kitchen", False))
        )
        model = TextModel.create(given.model, source.classes, max_length=given.length)
        model.freeze(layers)
        quiet = Progress(quiet=True)
        encoded = [model.encode(corpus) for corpus in (source, target)]
        begun, spent = time.perf_counter(), time.process_time()
        for number in range(2 if name == "mtem" else 1):
            place = folder / f"{name}{layers}-{number}.npy"
            encoded[number] = model.keep_lower(encoded[number], place, quiet, "lower layers", float("inf"))
        self.once = time.perf_counter() - begun, time.process_time() - spent
        labels = source.label_numbers(source.classes)
        self.source = Stream(model, encoded[0], np.arange(given.texts), labels, given.batch, given.seed)
        self.target = Stream(model, encoded[1], np.arange(given.texts), None, given.batch, given.seed + 1)
        steps = given.passes * self.source.per_epoch
        kind = methods.get(name)
        context = Context(steps, given.texts, 2, torch.Generator().manual_seed(given.seed), lambda: 1e-4, source_size=given.texts)
        method = kind(model, kind.Settings(), context)
        self.trainer = Trainer(
            method, TrainingSettings(), name=name, steps=steps, learning_rate=1e-4, source=self.source,
            target=self.target if name == "mtem" else None, progress=quiet,
        )  # fmt: skip
        self.times: list[tuple[float, float]] = []

    def step(self, number: int) -> None:
        begun, spent = time.perf_counter(), time.process_time()
        trainer = self.trainer
        target = trainer.target(number) if trainer.target else None
        trainer.method.step(number, trainer.source(number), target, trainer.update)
        self.times.append((time.perf_counter() - begun, time.process_time() - spent))


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
        """The time since the last call belongs to the innermost open stage."""
        now = time.perf_counter(), time.process_time()
        self.seconds[self._open[-1]] += now[0] - self._since[0]
        self.processor[self._open[-1]] += now[1] - self._since[1]
        self._since = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The parts of an adaptation, each a stage."""
        whole = lambda *arguments, **named: len(arguments) < 3 and named.get("rows") is None  # noqa: E731
        parts: tuple[tuple[Any, str, str, Callable[..., bool] | None], ...] = (
            (adapt, "load_corpus", "reading", None),
            (models, "create", "loading the encoder", None),
            (TextModel, "encode", "tokens", None),
            (TextModel, "keep_lower", "lower layers, once", None),
            (pipeline.Run, "__init__", "splitting", None),
            (pipeline.Run, "train_source", "source training", None),
            (pipeline.Run, "adapt", "adaptation steps", None),
            (Stream, "rows", "choosing batches", None),
            (pipeline.Run, "judge", "judging", None),
            (pipeline.Run, "checkpoint", "checkpoints", None),
            (pipeline.Run, "finish", "estimating", None),
            (inference, "score", "final prediction", whole),
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


def stages(given: argparse.Namespace) -> list[dict[str, Any]]:
    sources = {name: str(sample_path(f"{name}.jsonl.gz")) for name in demo.SOURCES}
    settings = {**demo.SETTINGS, "seed": given.seed, "batch_size": given.batch, "max_length": given.length}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MTEM_CACHE=f"{folder}/cache"), clock.watching():
        target = str(sample_path("kitchen.jsonl.gz"))
        adapt.adapt(sources, target, model=given.model, output=f"{folder}/run", **settings)
    total, processor = sum(clock.seconds.values()), sum(clock.processor.values())
    rows = []
    for name, seconds in [*clock.seconds.items(), ("all", total)]:
        spent = clock.processor.get(name, processor)
        shares = {"share": seconds / total, "processor_seconds": spent, "processor_share": spent / processor}
        rows.append(row(name, seconds, given, **shares))
    show(rows, {"seconds": ".2f", "share": ".1%", "processor_seconds": ".2f", "processor_share": ".1%"})
    return rows


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], list[dict[str, Any]]], int, int]] = {
    # name: function, batch, length
    "tokens": (tokens, 1024, 256),
    "padding": (padding, 50, 256),
    "optimizer": (optimizer, 0, 0),
    "frozen": (frozen, 32, 96),
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
    parser.add_argument("--texts", type=int, default=300, help="frozen: texts of the source and of the target")
    parser.add_argument("--passes", type=int, default=2, help="frozen: how often they are seen")
    parser.add_argument("--json", type=Path, help="without it results/cost/run-time-COMMAND.json")
    given = parser.parse_args()
    function, batch, length = COMMANDS[given.command]
    given.batch = batch if given.batch is None else given.batch
    given.length = length if given.length is None else given.length
    if given.data is None and given.command in ("tokens", "padding"):
        parser.error("--data is needed")
    if given.threads:
        torch.set_num_threads(given.threads)
    write_json(given.json or Path(f"results/cost/run-time-{given.command}.json"), function(given))


if __name__ == "__main__":
    main()
