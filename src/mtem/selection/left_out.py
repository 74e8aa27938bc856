"""What source models say about labeled texts that they have not seen, not even others of their domain.

A model is surer and righter in a domain that it was trained on than in a new one. How far an estimate of its accuracy may be off
in a new domain shows when one source domain is left out of the training and stands for the target: its labels are known. With
some labeled target texts the target itself can be asked: models trained without a part of them are tested on that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtem.selection import priors

FEWEST = 30  # texts of a domain, or labeled target texts, that can say anything about an accuracy
DOMAIN, FOLD = "domain", "fold"


@dataclass(frozen=True)
class Part:
    """Labeled rows that one source model is trained without, and is tested on."""

    kind: str
    """``DOMAIN``: a source domain. ``FOLD``: a part of the labeled target texts."""
    name: str
    tested: np.ndarray
    trained: np.ndarray
    held: np.ndarray
    """Held-out rows of the domains that it was trained on."""


@dataclass(frozen=True)
class LeftOut:
    """What that model said: logits and labels."""

    kind: str
    name: str
    logits: np.ndarray
    """[N, K] of the texts that were left out."""
    labels: np.ndarray
    held_logits: np.ndarray
    """[S, K] of held-out texts of the domains that it was trained on."""
    held_labels: np.ndarray
    target_logits: np.ndarray
    """[T, K] of unlabeled target texts; for a domain, which stands for the target itself, the same as ``logits``."""

    def with_shares(self, shares: np.ndarray | None) -> LeftOut:
        """As the model would be shipped if these class shares were assumed of the target."""
        if shares is None:
            return self
        bias = priors.correction(self.target_logits, shares)
        return LeftOut(
            self.kind, self.name, self.logits + bias, self.labels, self.held_logits + bias, self.held_labels,
            self.target_logits + bias,
        )  # fmt: skip

    @property
    def right(self) -> np.ndarray:
        """[N] whether each text that was left out is classified correctly."""
        return self.logits.argmax(axis=1) == self.labels


def find_parts(
    domains: Sequence[str],
    domain_numbers: np.ndarray,
    labels: np.ndarray,
    train: np.ndarray,
    held: np.ndarray,
    target_labeled: np.ndarray,
    *,
    most: int,
    texts: int,
    seed: int,
) -> list[Part]:
    """What to leave out: parts of the labeled target texts if there are enough of them, else source domains, the largest first.

    Parameters
    ----------
    domains, domain_numbers
        The names of the source domains, and the number of each source row's.
    labels
        Class numbers of all labeled rows, those of the target behind those of the source.
    train, held
        Rows that the source model is trained on (those of the target among them), and held-out rows of the source.
    target_labeled
        Rows of the labeled target texts.
    most
        So many parts at most.
    texts
        So many texts of a domain are tested at most.
    """
    draw = np.random.default_rng([seed, 0x1EF7])
    parts = []
    if len(target_labeled) >= FEWEST and most > 1:
        for number, fold in enumerate(_folds(target_labeled, labels, most, draw)):
            parts.append(Part(FOLD, f"labeled target {number + 1}", fold, np.setdiff1d(train, fold), held))
    elif most:
        of = np.full(len(labels), -1)
        of[: len(domain_numbers)] = domain_numbers
        sizes = np.bincount(domain_numbers, minlength=len(domains))
        for number in np.argsort(-sizes, kind="stable")[:most]:
            rows = np.flatnonzero(of == number)
            tested = np.sort(draw.permutation(rows)[:texts])
            parts.append(Part(DOMAIN, domains[number], tested, train[of[train] != number], held[of[held] != number]))
    known = len(np.unique(labels[train]))
    return [
        part for part in parts
        if min(len(part.held), len(part.tested) if part.kind == DOMAIN else FEWEST) >= FEWEST
        and len(np.unique(labels[part.trained])) == known
    ]  # fmt: skip


def _folds(rows: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Parts of about equal size, each with its share of every class."""
    mixed = draw.permutation(rows)
    ordered = mixed[np.argsort(labels[mixed], kind="stable")]
    return [np.sort(ordered[first::count]) for first in range(count)]


# ---------------------------------------------------------------------- on disk


def to_tensors(left_out: Sequence[LeftOut]) -> dict[str, Tensor]:
    names = ("logits", "labels", "held_logits", "held_labels", "target_logits")
    return {
        f"{number}.{name}": torch.from_numpy(np.ascontiguousarray(getattr(one, name)))
        for number, one in enumerate(left_out)
        for name in names
    }


def from_tensors(tensors: Mapping[str, Tensor], about: Sequence[Mapping[str, Any]]) -> list[LeftOut]:
    """`about` has the kind and the name of each."""
    return [
        LeftOut(one["kind"], one["name"], *(
            tensors[f"{number}.{name}"].numpy() for name in ("logits", "labels", "held_logits", "held_labels", "target_logits")
        ))
        for number, one in enumerate(about)
    ]  # fmt: skip
