"""Hold-out splits: texts kept out of training, on which a model can be evaluated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mtem.data.corpus import Corpus, text_key


def hold_out(
    corpus: Corpus,
    classes: Sequence[str],
    share: float = 0.1,
    seed: int = 0,
    most: int | None = None,
    among: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Split a labeled corpus into rows to train on and rows to hold out.

    Parameters
    ----------
    corpus : Corpus
        With labels.
    classes : sequence of str
        Names of the classes.
    share : float
        Share of the distinct texts to hold out.
    seed : int
        Seed of the choice.
    most : int, optional
        Largest number of rows to hold out, approximately; at least one text of every class is held out.
    among : array of int, optional
        The rows that are split, all with the same text or none of them; by default all rows of the corpus.

    Returns
    -------
    train, held : array of int
        Sorted row numbers.

    Notes
    -----
    Every class, and every domain in it, gives about the same share. Texts with the same letters and digits, whatever their
    case, stay on one side. A class with at least two distinct texts is on both sides, a class with one only in training. A
    text that occurs with several labels counts for the first of them.
    """
    if not 0 < share < 1:
        raise ValueError(f"share: expected a number between 0 and 1, got {share}")
    labels, domains = corpus.label_numbers(classes), corpus.domain_numbers()
    if most is not None:
        share = min(share, most / max(1, len(corpus)))
    group, first = _groups(corpus)
    chosen = np.ones(len(corpus), bool) if among is None else np.isin(np.arange(len(corpus)), among)
    random = np.random.default_rng([seed, 0x5917])
    held_groups = np.zeros(len(first), bool)
    for number in range(len(classes)):
        members = random.permutation(np.flatnonzero(chosen[first] & (labels[first] == number)))
        if len(members) < 2:
            continue
        count = min(max(1, round(share * len(members))), len(members) - 1)
        # Sorted by domain and then taken at even distances: every domain gives its share, to the nearest text.
        members = members[np.argsort(domains[first[members]], kind="stable")]
        positions = np.floor((random.random() + np.arange(count)) * len(members) / count).astype(int)
        held_groups[members[np.minimum(positions, len(members) - 1)]] = True
    held_out = held_groups[group]
    return np.flatnonzero(chosen & ~held_out), np.flatnonzero(held_out)


def _groups(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the distinct text of every row, and the first row of every distinct text."""
    digests = np.empty(len(corpus), np.uint64)
    i = 0
    for chunk in corpus.table.column("text").chunks:
        for scalar in chunk:
            key = text_key(scalar.as_py()).encode()
            digests[i] = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            i += 1
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    # Numbered by first row, not by digest.
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[group.reshape(-1)], first[order]
