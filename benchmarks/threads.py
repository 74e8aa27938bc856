"""Time and memory of a step over threads with each method, compared with MTEM. On the CPU, over PHEME.

    python benchmarks/threads.py --data DIR [--target ferguson] [--name "what the rows call this state of the code"]

DIR holds the files that `mtem data prepare pheme` has written. Sources, unlabeled and labeled target threads are those of
`mtem reproduce`. Every method has a model of its own with the same weights at first, and sees the same batches. The methods take
turns, so that all see the same state of the machine, and a ratio is the median over the steps. Memory is what the largest
resident size of a process of its own grows by in a few steps. The rows are appended to the file.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from run_time import apart, row, show

from mtem import methods
from mtem.atomic import write_json
from mtem.data.corpus import Corpus
from mtem.data.loading import load_corpus
from mtem.methods.base import Context
from mtem.models.trees.model import BigcnModel
from mtem.progress import Progress
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream, texts_per_batch
from mtem.training.trainer import Trainer
from mtem_paper import splits

METHODS = ("source-only", "mtem", "fixmatch", "biat")
SETTINGS = ("unsupervised", "semi-supervised")
RATE = 5e-4
MEMORY_STEPS = 4


class Data:
    """The threads of one target and setting as numbers, and the model that all methods start from."""

    def __init__(self, args: argparse.Namespace, setting: str) -> None:
        read = splits.read("pheme", args.data, args.target, "event")
        division = splits.divide(read, args.seed)
        source = load_corpus({name: str(path) for name, path in read.sources.items()}, labeled=True)
        target = load_corpus(division.unlabeled, labeled=False)
        self.few = np.arange(0)
        if setting == "semi-supervised":
            pairs = zip(division.target_labeled, division.target_labeled_labels, strict=True)
            labeled = load_corpus([{**thread, "label": label} for thread, label in pairs], labeled=True)
            self.few = len(source) + np.arange(len(labeled))
            source = Corpus.concatenate([source, labeled])
        torch.manual_seed(args.seed)
        self.model = BigcnModel.create("bigcn", source.classes, corpora=[source, target])
        self.labels = source.label_numbers(source.classes)
        self.source, self.target = (self.model.encode_threads(corpus.threads()) for corpus in (source, target))

    def trainer(self, args: argparse.Namespace, name: str) -> Trainer:
        """Return a trainer of the method with a copy of the model."""
        model, few = copy.deepcopy(self.model), self.few
        source = Stream(
            model, self.source, np.arange(len(self.labels)), self.labels, args.batch, args.seed, extra=few, extra_share=0.5
        )
        target = Stream(model, self.target, np.arange(len(self.target)), None, args.batch, args.seed + 1)
        generator = torch.Generator().manual_seed(args.seed)
        context = Context(
            args.steps,
            len(self.target),
            len(model.classes),
            generator,
            lambda: RATE,
            source_size=len(self.labels),
            **TrainingSettings().teacher_and_view(1000),
        )
        if len(few):
            context.target_labeled_rows = torch.from_numpy(few)
            context.target_labeled = Stream(model, self.source, few, self.labels, texts_per_batch(args.batch, 0.5), args.seed + 1)
        kind = methods.get(name)
        return Trainer(
            kind(model, kind.Settings(), context), TrainingSettings(), name=name, steps=args.steps, learning_rate=RATE,
            source=source, target=target, progress=Progress(quiet=True),
        )  # fmt: skip


def step(trainer: Trainer, number: int) -> tuple[float, float]:
    """Take a step; return its seconds and processor seconds."""
    source, target = trainer.source(number), trainer.target(number) if trainer.target else None
    start, spent = time.perf_counter(), time.process_time()
    trainer.method.step(number, source, target, trainer.update)  # type: ignore[arg-type]
    return time.perf_counter() - start, time.process_time() - spent


def timed(args: argparse.Namespace, data: Data) -> dict[str, dict[str, float]]:
    """Return the median step of each method, after two rounds that do not count."""
    trainers = {name: data.trainer(args, name) for name in METHODS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for number in range(args.steps):
        for name, trainer in trainers.items():
            times[name].append(step(trainer, number))
    posts = statistics.median(len(trainers["mtem"].source(number).inputs["parents"]) for number in range(args.steps))
    found = {}
    for name, lines in times.items():
        figures = [statistics.median(column) for column in zip(*lines[2:], strict=True)]
        pairs = list(zip(lines[2:], times["mtem"][2:], strict=True))
        ratios = [statistics.median(own[clock] / mtem[clock] for own, mtem in pairs) for clock in (0, 1)]
        names = ("seconds", "processor_seconds", "time_ratio", "processor_ratio", "posts")
        found[name] = dict(zip(names, (*figures, *ratios, posts), strict=True))
    return found


def memory(args: argparse.Namespace, data: Data, name: str) -> int | None:
    """Return what the first steps of a method add to the largest resident size of this process, in bytes."""
    if args.threads:
        torch.set_num_threads(args.threads)
    trainer = data.trainer(args, name)
    before = _largest()
    for number in range(MEMORY_STEPS):
        step(trainer, number)
    after = _largest()
    return None if before is None or after is None else after - before


def _largest() -> int | None:
    """Return the largest resident size of this process; None where the system has no /proc. `getrusage` counts its parent in."""
    status = Path("/proc/self/status")
    sizes = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")] if status.exists() else []
    return int(sizes[0].split()[1]) * 1024 if sizes else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the PHEME threads, or its parent")
    parser.add_argument("--target", default="ferguson")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=12, help="of each method; the first two do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch; without it torch's own choice")
    parser.add_argument("--name", help="what the rows call this state of the code")
    parser.add_argument("--json", type=Path, default=Path("results/cost/threads.json"))
    args = parser.parse_args()
    args.model, args.length = "bigcn, tfidf", None
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: expected at least 3, since the first two do not count")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    for setting in SETTINGS:
        data = Data(args, setting)
        for name, figures in timed(args, data).items():
            fields = {**figures, "memory": apart(memory, args, data, name)}
            about = {"setting": setting, "target": args.target, "state": args.name, "attention": None, "steps": args.steps - 2}
            rows.append(row(f"{name}, {setting}", fields.pop("seconds"), args, **fields, **about))
    for line in rows:
        mtem = next(other for other in rows if other["engine"] == f"mtem, {line['setting']}")
        line["memory_ratio"] = line["memory"] / mtem["memory"] if mtem["memory"] else None
    mib = [{**line, "MiB": line["memory"] and line["memory"] / 2**20} for line in rows]
    columns = {"seconds": ".3f", "processor_seconds": ".3f", "time_ratio": ".2f", "processor_ratio": ".2f"}
    show(mib, {**columns, "MiB": ".0f", "memory_ratio": ".2f"})
    known = json.loads(args.json.read_text()) if args.json.exists() else []
    write_json(args.json, known + rows)


if __name__ == "__main__":
    main()
