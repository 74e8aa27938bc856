"""How many processes share a GPU well: steps of pretraining per second, of one process and of several side by side.

    nvidia-cuda-mps-control -d
    python benchmarks/side_by_side.py --processes 1,2,4,8 --steps 150 --json results/cost/side-by-side.json

Each process trains an encoder of MiniLM's shape with random weights on random texts of the lengths of reviews, so no files are
needed. A row has the steps per second of all processes together, while all of them run, and whether they share the GPU through
MPS: without it they only take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from mtem.atomic import read_json, write_json
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.run.record import machine, versions
from mtem.training.devices import find_device, find_precision
from mtem.training.pretraining import pretrain
from mtem.training.settings import TrainingSettings

WORDS, TEXTS, BATCH = 30_000, 2_000, 64


class Ticks(Progress):
    """Keeps when steps were taken."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.at: list[float] = []

    def advance(self, done: int, figures: Any = None) -> None:
        """Keep the time."""
        self.at.append(time.time())


def make_encoder(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(WORDS))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    config = BertConfig(
        vocab_size=WORDS + 5, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)


def make_texts(seed: int, longest: int) -> list[str]:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4.75, 0.75, TEXTS), 8, longest).astype(int)
    return [" ".join(f"w{n}" for n in random.integers(WORDS, size=length)) for length in lengths]


def work(encoder: str, seed: int, steps: int, longest: int, barrier: Any, times: Any) -> None:
    device = find_device("auto")
    torch.manual_seed(seed)
    model = TextModel.create(encoder, ("a", "b"), max_length=longest).to(device)
    model.precision = find_precision("auto", device, model)
    texts, ticks = model.encode_texts(make_texts(seed, longest)), Ticks()
    per_epoch = -(-TEXTS // BATCH)
    barrier.wait()
    settings = TrainingSettings(seed=seed, pretrain_epochs=steps / per_epoch, pretrain_batch_size=BATCH, log_every=10**6)
    pretrain(model, [texts], settings, ticks)
    times.put(ticks.at)


def measure(encoder: str, processes: int, steps: int, longest: int) -> float:
    """Return the steps per second of all processes while all run, without the first half of the first one to be there."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(processes), context.Queue()
    started = [context.Process(target=work, args=(encoder, seed, steps, longest, barrier, times)) for seed in range(processes)]
    for process in started:
        process.start()
    ticks = [times.get() for _ in started]
    for process in started:
        process.join()
    begin, end = max(at[len(at) // 2] for at in ticks), min(at[-1] for at in ticks)
    return sum(begin <= moment < end for at in ticks for moment in at) / (end - begin)


def has_mps() -> bool | None:
    """Return whether a server of MPS runs; None where that cannot be told."""
    try:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return "nvidia-cuda-mps-server" in listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=150, help="of each process; the first half is not counted")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_encoder(Path(folder))
        for count in map(int, args.processes.split(",")):
            rate = measure(folder, count, args.steps, args.length)
            line = {
                "processes": count, "steps_per_second": round(rate, 2), "mps": has_mps(), "steps": args.steps,
                "length": args.length, "batch": BATCH, "machine": machine(str(find_device("auto"))), "versions": versions(),
            }  # fmt: skip
            print(f"{count} processes: {rate:.2f} steps per second, MPS {line['mps']}", flush=True)
            if args.json:
                write_json(args.json, [*(read_json(args.json) if args.json.exists() else []), line])


if __name__ == "__main__":
    main()
