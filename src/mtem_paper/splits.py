"""Who sees what: the sources, the unlabeled texts of the target, its few labeled ones, its test set.

`read` fetches the data of one target; `divide` is a pure function of that and the seed. The test set is the same whether or not
the few labeled texts are given to a method.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtem.data.corpus import text_key
from mtem.data.readers import read_rows
from mtem.errors import RequestError

FEW = 100  # labeled target texts of the semi-supervised setting
POOL = 5000  # unlabeled reviews at most
TEST_SHARE = 0.3  # of an event's threads

AMAZON = ("books", "dvd", "electronics", "kitchen")
EVENTS = ("charliehebdo", "ferguson", "germanwings-crash", "ottawashooting", "sydneysiege")
# pool -> which texts of the unlabeled files; "blitzer" is what `mtem data prepare` calls those of the original
SOURCES = {"mixed": ("fdu", "hatn"), "natural": ("fdu", "blitzer")}

_LINK = re.compile(r"https?://\S*")


@dataclasses.dataclass(frozen=True)
class Target:
    """The data of one target: labeled examples (texts or threads) and, where it is apart from them, the unlabeled pool."""

    sources: dict[str, Path]
    examples: list[Any]
    labels: list[str]
    keys: list[str]  # equal for examples that are the same text
    pool: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Division:
    few: list[Any]
    target_labeled_labels: list[str]
    unlabeled: list[Any]
    unlabeled_labels: list[str] | None  # for the oracle alone; None: nobody knows them
    test: list[Any]
    truth: list[str]
    test_rows: list[int]  # which of the target's labeled examples they are
    test_keys: list[str]


def read(dataset: str, data: Path, target: str, pool: str) -> Target:
    """The files of `mtem data prepare` in the folder `data` (or in its subfolder of the data set's name)."""
    ending = ".labeled.jsonl.gz" if dataset == "amazon" else ".jsonl.gz"
    domains = AMAZON if dataset == "amazon" else EVENTS
    folder = data / dataset if (data / dataset).is_dir() else data
    wanted = [f"{domain}{ending}" for domain in domains] + ([f"{target}.unlabeled.jsonl.gz"] if dataset == "amazon" else [])
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise RequestError(
            f"{folder}: no {missing[0]} there; --data wants the folder that "
            f"'mtem data prepare {dataset} --from PATH --to FOLDER' has written"
        )
    sources = {domain: folder / f"{domain}{ending}" for domain in domains if domain != target}
    rows = [record for _, record in read_rows(folder / f"{target}{ending}") if str(record.get("text", "thread")).strip()]
    labels = [str(record["label"]) for record in rows]
    if dataset == "pheme":
        threads = [{"id": record["id"], "nodes": record["nodes"]} for record in rows]
        return Target(sources, threads, labels, [text_key(_LINK.sub("", thread["nodes"][0]["text"])) for thread in threads])
    texts = [record["text"] for record in rows]
    keys = [text_key(text) for text in texts]
    unlabeled = [record for _, record in read_rows(folder / f"{target}.unlabeled.jsonl.gz")]
    known = set(keys)  # of the test set, too
    chosen = [
        record["text"]
        for record in unlabeled
        if record.get("source") in SOURCES[pool] and record["text"].strip() and text_key(record["text"]) not in known
    ]
    found = Counter(str(record.get("source")) for record in unlabeled)
    if not chosen or (pool == "mixed" and not found["hatn"]):
        there = ", ".join(f"{name} {count}" for name, count in found.items())
        raise RequestError(
            f"{folder / target}.unlabeled.jsonl.gz: the pool '{pool}' wants texts of the sources {' and '.join(SOURCES[pool])}; "
            f"there are {there}: leave it out with --pools"
        )
    return Target(sources, texts, labels, keys, chosen)


def divide(target: Target, seed: int) -> Division:
    """FEW labeled examples drawn among those that are there once; of the rest a stratified TEST_SHARE is the test set, or all
    of it where the unlabeled texts are apart. The same text is never on two sides."""
    draw = np.random.default_rng([seed, 0x7E57])
    times = Counter(target.keys)
    once = np.array([number for number, key in enumerate(target.keys) if times[key] == 1])
    if len(once) < 2 * FEW:
        raise RequestError(f"{len(once)} labeled target examples are too few: {FEW} of them are to be set apart")
    few = np.sort(draw.permutation(once)[:FEW])
    rest = np.setdiff1d(np.arange(len(target.keys)), few)
    if target.pool is not None:
        kept = np.sort(draw.permutation(len(target.pool))[:POOL])
        unlabeled, unlabeled_labels, test = [target.pool[i] for i in kept], None, rest
    else:
        test = held_out([target.keys[i] for i in rest], [target.labels[i] for i in rest], TEST_SHARE, draw)
        test, others = rest[test], np.setdiff1d(rest, rest[test])
        unlabeled, unlabeled_labels = [target.examples[i] for i in others], [target.labels[i] for i in others]
    pick = lambda rows: ([target.examples[i] for i in rows], [target.labels[i] for i in rows])  # noqa: E731
    return Division(*pick(few), unlabeled, unlabeled_labels, *pick(test), test.tolist(), [target.keys[i] for i in test])


def held_out(keys: Sequence[str], labels: Sequence[str], share: float, draw: np.random.Generator) -> np.ndarray:
    """Rows of about that share of every class, sorted; equal keys stay together and count for the class of the first."""
    members: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    found: list[int] = []
    for label in sorted(set(labels)):
        groups = [rows for rows in members.values() if labels[rows[0]] == label]
        wanted = round(share * sum(map(len, groups)))
        taken = 0
        for number in draw.permutation(len(groups)):
            if taken + len(groups[number]) <= wanted:
                found += groups[number]
                taken += len(groups[number])
    return np.array(sorted(found))
