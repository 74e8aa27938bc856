"""Draw the bundled sample of Amazon reviews from the prepared dataset.

    python tools/make_sample.py --data DIR [--to src/mtem/datasets/amazon_sample]

DIR holds `<domain>.labeled.jsonl.gz` and `<domain>.unlabeled.jsonl.gz` (`mtem data prepare amazon` writes them). The draw is
by a fixed seed: the same data give the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtem.data.corpus import text_key
from mtem.data.readers import read_rows
from mtem.data.writers import Writer

SEED = 2023
LABELS = ("negative", "positive")
SOURCES = ("books", "dvd", "electronics")
TARGET = "kitchen"
PER_SOURCE, UNLABELED, TEST = 420, 1200, 600
CLEAN = ("fdu", "hatn")  # the parts of the unlabeled pool with cased, punctuated text


def records(path: Path) -> Iterator[dict[str, Any]]:
    return (record for _, record in read_rows(path) if len(record["text"].split()) >= 3)


def balanced(path: Path, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """`count` reviews, as many of each class, in random order."""
    everything = list(records(path))
    chosen = []
    for label in LABELS:
        chosen += draw.sample([record for record in everything if record["label"] == label], count // len(LABELS))
    draw.shuffle(chosen)
    return chosen


def write(path: Path, chosen: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    with Writer(path) as out:
        for record in chosen:
            out.write({name: record[name] for name in fields})
    print(f"{path}: {len(chosen)} reviews, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the bundled sample of Amazon reviews.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prepared dataset")
    default = Path(__file__).resolve().parent.parent / "src" / "mtem" / "datasets" / "amazon_sample"
    parser.add_argument("--to", type=Path, default=default, help="folder to write to")
    options = parser.parse_args()

    # A generator of its own for every file: a change to one draw leaves the others as they are.
    for domain in SOURCES:
        chosen = balanced(options.data / f"{domain}.labeled.jsonl.gz", PER_SOURCE, random.Random(f"{SEED} {domain}"))
        write(options.to / f"{domain}.jsonl.gz", chosen, ("text", "label"))

    draw = random.Random(f"{SEED} {TARGET} test")
    test = balanced(options.data / f"{TARGET}.labeled.jsonl.gz", TEST, draw)
    write(options.to / f"{TARGET}-test.jsonl.gz", test, ("text", "label"))

    pool = [r for r in records(options.data / f"{TARGET}.unlabeled.jsonl.gz") if r.get("source", CLEAN[0]) in CLEAN]
    unlabeled = random.Random(f"{SEED} {TARGET} unlabeled").sample(pool, UNLABELED)
    overlap = {text_key(record["text"]) for record in test} & {text_key(record["text"]) for record in unlabeled}
    if overlap:
        raise SystemExit(f"{len(overlap)} unlabeled reviews are also in the test set: prepare the data again")
    write(options.to / f"{TARGET}.jsonl.gz", unlabeled, ("id", "text"))


if __name__ == "__main__":
    main()
