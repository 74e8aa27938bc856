"""Holding texts back from training, so that what is measured on them means something."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mtem.data.corpus import Corpus, text_key


def hold_out(
    corpus: Corpus, classes: Sequence[str], share: float = 0.1, seed: int = 0, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split a labeled corpus: (rows to train on, rows held back), both sorted.

    Every class, and every domain inside it, gives about the same share. Texts that are the same (letters and digits,
    whatever the case) stay on one side. A class with at least two different texts is on both sides, a class with one only
    in training. A text that occurs under several labels counts for the first of them.

    Parameters
    ----------
    share
        Of the different texts that is held back.
    most
        Hold back about this many rows at most (but one text of every class).
    """
    if not 0 < share < 1:
        raise ValueError(f"share {share}: must lie between 0 and 1")
    labels, domains = corpus.label_numbers(classes), corpus.domain_numbers()
    if most is not None:
        share = min(share, most / max(1, len(corpus)))
    group, first = _groups(corpus)
    random = np.random.default_rng([seed, 0x5917])
    held_groups = np.zeros(len(first), bool)
    for number in range(len(classes)):
        members = random.permutation(np.flatnonzero(labels[first] == number))
        if len(members) < 2:
            continue
        count = min(max(1, round(share * len(members))), len(members) - 1)
        # Ordered by domain and then taken at even distances: every domain gives its share, to the nearest text.
        members = members[np.argsort(domains[first[members]], kind="stable")]
        places = np.floor((random.random() + np.arange(count)) * len(members) / count).astype(int)
        held_groups[members[np.minimum(places, len(members) - 1)]] = True
    held = held_groups[group]
    return np.flatnonzero(~held), np.flatnonzero(held)


def _groups(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """For every row the number of its text, and for every different text the row where it comes first."""
    digests = np.empty(len(corpus), np.uint64)
    i = 0
    for chunk in corpus.table.column("text").chunks:
        for scalar in chunk:
            key = text_key(scalar.as_py()).encode()
            digests[i] = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            i += 1
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    # Numbered by where they come first, not by their digest.
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[group.reshape(-1)], first[order]
