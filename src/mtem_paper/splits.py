"""The split of a target: the sources, its unlabeled examples, its labeled ones, its test set.

`read` loads the data of one target; `divide` is a pure function of these and the seed. The test set is the same whether or not
the labeled examples of the target are given to a method.
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
from mtem_paper.protocol import DATASETS

TARGET_LABELED = 100  # labeled target examples of the semi-supervised setting
POOL = 5000  # unlabeled reviews at most
TEST_SHARE = 0.3  # of an event's threads

_LINK = re.compile(r"https?://\S*")


@dataclasses.dataclass(frozen=True)
class Target:
    """The data of one target: labeled examples (texts or threads) and, where it is in a file of its own, the unlabeled pool."""

    sources: dict[str, Path]
    examples: list[Any]
    labels: list[str]
    keys: list[str]  # equal for examples with the same text
    pool: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Division:
    """The parts of a target's data for one seed."""

    target_labeled: list[Any]
    target_labeled_labels: list[str]
    unlabeled: list[Any]
    unlabeled_labels: list[str] | None  # for the oracle only; None: unknown
    test: list[Any]
    truth: list[str]
    test_rows: list[int]  # row numbers of the test set among the target's labeled examples
    test_keys: list[str]


def read(dataset: str, data: Path, target: str, pool: str) -> Target:
    """Read the files of one target.

    Parameters
    ----------
    dataset, target, pool
        Names in ``protocol.DATASETS``.
    data
        The folder that ``mtem data prepare`` has written, or its parent.

    Raises
    ------
    RequestError
        If a file is missing, or has no texts of the pool.
    """
    about = DATASETS[dataset]
    folder = data / dataset if (data / dataset).is_dir() else data
    labeled = {domain: folder / about.labeled_file.format(domain=domain) for domain in about.domains}
    unlabeled = folder / about.unlabeled_file.format(domain=target) if about.unlabeled_file else None
    missing = [path.name for path in (*labeled.values(), *([unlabeled] if unlabeled else [])) if not path.is_file()]
    if missing:
        raise RequestError(
            f"{folder}: file {missing[0]} is missing; --data expects the folder written by "
            f"'mtem data prepare {dataset} --from PATH --to FOLDER'"
        )
    sources = {domain: path for domain, path in labeled.items() if domain != target}
    rows = [record for _, record in read_rows(labeled[target]) if str(record.get("text", "thread")).strip()]
    labels = [str(record["label"]) for record in rows]
    if about.threads:
        threads = [{"id": record["id"], "nodes": record["nodes"]} for record in rows]
        return Target(sources, threads, labels, [text_key(_LINK.sub("", thread["nodes"][0]["text"])) for thread in threads])
    texts = [record["text"] for record in rows]
    keys = [text_key(text) for text in texts]
    return Target(sources, texts, labels, keys, _read_pool(unlabeled, about.pools[pool], pool, set(keys)) if unlabeled else None)


def _read_pool(path: Path, sources: Sequence[str], pool: str, known: set[str]) -> list[str]:
    """Return the unlabeled texts of a pool, without those whose key is known (labeled ones, the test set among them)."""
    rows = [record for _, record in read_rows(path)]
    texts = [
        record["text"]
        for record in rows
        if record.get("source") in sources and record["text"].strip() and text_key(record["text"]) not in known
    ]
    counts = Counter(str(record.get("source")) for record in rows)
    if not texts or (pool == "mixed" and not counts["hatn"]):
        raise RequestError(
            f"{path}: the pool '{pool}' expects texts of the sources {' and '.join(sources)}, "
            f"got {', '.join(f'{name} {count}' for name, count in counts.items())}; leave the pool out with --pools"
        )
    return texts


def divide(target: Target, seed: int) -> Division:
    """Split a target's data; the same text is never in two parts.

    ``TARGET_LABELED`` labeled examples are drawn among those that occur once. Of the rest, a stratified ``TEST_SHARE`` is the
    test set, or all of it where the unlabeled texts have files of their own.
    """
    random = np.random.default_rng([seed, 0x7E57])
    times = Counter(target.keys)
    once = np.array([number for number, key in enumerate(target.keys) if times[key] == 1])
    if len(once) < 2 * TARGET_LABELED:
        raise RequestError(f"{len(once)} labeled target examples are not enough: expected at least {2 * TARGET_LABELED}")
    labeled = np.sort(random.permutation(once)[:TARGET_LABELED])
    remaining = np.setdiff1d(np.arange(len(target.keys)), labeled)
    unlabeled_labels: list[str] | None
    if target.pool is not None:
        sampled = np.sort(random.permutation(len(target.pool))[:POOL])
        unlabeled, unlabeled_labels, test = [target.pool[i] for i in sampled], None, remaining
    else:
        chosen = held_out([target.keys[i] for i in remaining], [target.labels[i] for i in remaining], TEST_SHARE, random)
        test, others = remaining[chosen], np.setdiff1d(remaining, remaining[chosen])
        unlabeled, unlabeled_labels = [target.examples[i] for i in others], [target.labels[i] for i in others]
    return Division(
        [target.examples[i] for i in labeled], [target.labels[i] for i in labeled],
        unlabeled, unlabeled_labels,
        [target.examples[i] for i in test], [target.labels[i] for i in test],
        test.tolist(), [target.keys[i] for i in test],
    )  # fmt: skip


def held_out(keys: Sequence[str], labels: Sequence[str], share: float, random: np.random.Generator) -> np.ndarray:
    """Return sorted rows of about that share of every class; equal keys stay together and count for the class of the first."""
    members: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    chosen: list[int] = []
    for label in sorted(set(labels)):
        groups = [rows for rows in members.values() if labels[rows[0]] == label]
        size = round(share * sum(map(len, groups)))
        count = 0
        for number in random.permutation(len(groups)):
            if count + len(groups[number]) <= size:
                chosen += groups[number]
                count += len(groups[number])
    return np.array(sorted(chosen))
