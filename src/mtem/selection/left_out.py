"""Logits of source models for labeled texts of a domain that they were not trained on.

A model is more confident and more often right in a domain that it was trained on than in a new one. To see how far an accuracy
estimate may be off in a new domain, one source domain is left out of the training and stands for the target: its labels are
known. With labeled target texts, models are trained without a part of them and tested on that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtem.selection import priors

FEWEST = 30  # texts of a domain, or labeled target texts, from which an accuracy can be measured
DOMAIN, FOLD = "domain", "fold"
_ARRAYS = ("logits", "labels", "held_out_logits", "held_out_labels", "target_logits")


@dataclass(frozen=True)
class Part:
    """Labeled rows that one source model is trained without, and is tested on.

    Attributes
    ----------
    kind
        ``DOMAIN``: a source domain. ``FOLD``: a part of the labeled target texts.
    name
        The domain's name, or the fold's.
    test_rows, train_rows
        What the model is tested on, and what it is trained on.
    held_out_rows
        Held-out rows of the domains that it is trained on.
    """

    kind: str
    name: str
    test_rows: np.ndarray
    train_rows: np.ndarray
    held_out_rows: np.ndarray

    def among(self, rows: np.ndarray) -> np.ndarray:
        """Return those of `rows` that the model is trained on."""
        return np.intersect1d(rows, self.train_rows)


@dataclass(frozen=True)
class LeftOut:
    """Logits and labels of that model.

    Attributes
    ----------
    kind, name
        As in `Part`.
    logits, labels
        [N, K] and [N], of the texts that were left out.
    held_out_logits, held_out_labels
        [S, K] and [S], of held-out texts of the domains that the model was trained on.
    target_logits
        [T, K] of unlabeled target texts. For a domain, which stands for the target, the same as `logits`.
    """

    kind: str
    name: str
    logits: np.ndarray
    labels: np.ndarray
    held_out_logits: np.ndarray
    held_out_labels: np.ndarray
    target_logits: np.ndarray

    def with_shares(self, shares: np.ndarray | None) -> LeftOut:
        """Return the logits of the model corrected for these class shares of the target."""
        if shares is None:
            return self
        bias = priors.correction(self.target_logits, shares)
        return LeftOut(
            self.kind, self.name, self.logits + bias, self.labels, self.held_out_logits + bias, self.held_out_labels,
            self.target_logits + bias,
        )  # fmt: skip

    @property
    def correct(self) -> np.ndarray:
        """Whether each text that was left out is classified correctly, [N]."""
        return np.asarray(self.logits.argmax(axis=1) == self.labels)

    def description(self) -> dict[str, Any]:
        """Return the entry for run.json."""
        accuracy = round(float(self.correct.mean()), 4)
        return {"kind": self.kind, "name": self.name, "texts": len(self.labels), "accuracy": accuracy}


def find_parts(
    domains: Sequence[str],
    domain_numbers: np.ndarray,
    labels: np.ndarray,
    train_rows: np.ndarray,
    held_out_rows: np.ndarray,
    target_labeled_rows: np.ndarray,
    *,
    most: int,
    texts: int,
    seed: int,
) -> list[Part]:
    """Choose what to leave out: parts of the labeled target texts if there are enough, else the largest source domains.

    Parameters
    ----------
    domains, domain_numbers
        Names of the source domains, and the number of each source row's domain.
    labels
        Class numbers of all labeled rows; those of the target come after those of the source.
    train_rows, held_out_rows
        Rows that the source model is trained on (those of the target among them), and held-out rows of the source.
    target_labeled_rows
        Rows of the labeled target texts.
    most
        Largest number of parts.
    texts
        Largest number of texts of a domain that are tested.
    seed
        Of the folds and of the tested texts.
    """
    draw = np.random.default_rng([seed, 0x1EF7])
    parts = []
    if len(target_labeled_rows) >= FEWEST and most > 1:
        for number, fold in enumerate(_folds(target_labeled_rows, labels, most, draw)):
            parts.append(Part(FOLD, f"labeled target {number + 1}", fold, np.setdiff1d(train_rows, fold), held_out_rows))
    elif most:
        domain_of = np.full(len(labels), -1)
        domain_of[: len(domain_numbers)] = domain_numbers
        sizes = np.bincount(domain_numbers, minlength=len(domains))
        for number in np.argsort(-sizes, kind="stable")[:most]:
            rows = np.flatnonzero(domain_of == number)
            tested = np.sort(draw.permutation(rows)[:texts])
            training = train_rows[domain_of[train_rows] != number]
            parts.append(Part(DOMAIN, domains[number], tested, training, held_out_rows[domain_of[held_out_rows] != number]))
    classes = len(np.unique(labels[train_rows]))
    return [
        part for part in parts
        if min(len(part.held_out_rows), len(part.test_rows) if part.kind == DOMAIN else FEWEST) >= FEWEST
        and len(np.unique(labels[part.train_rows])) == classes
    ]  # fmt: skip


def _folds(rows: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Return parts of about equal size, each with its share of every class."""
    mixed = draw.permutation(rows)
    ordered = mixed[np.argsort(labels[mixed], kind="stable")]
    return [np.sort(ordered[first::count]) for first in range(count)]


def to_tensors(results: Sequence[LeftOut]) -> dict[str, Tensor]:
    """Return all arrays as named tensors, to be written."""
    return {
        f"{number}.{name}": torch.from_numpy(np.ascontiguousarray(getattr(result, name)))
        for number, result in enumerate(results)
        for name in _ARRAYS
    }


def from_tensors(tensors: Mapping[str, Tensor], descriptions: Sequence[Mapping[str, Any]]) -> list[LeftOut]:
    """Return what `to_tensors` wrote; `descriptions` has the kind and the name of each.

    Raises
    ------
    ValueError
        If an array is missing, or is not of the shape and kind that it was written with.
    """
    results = []
    for number, about in enumerate(descriptions):
        for name in _ARRAYS:
            value = tensors.get(f"{number}.{name}")
            if value is None:
                raise ValueError(f"{number}.{name} is missing")
            of_labels = name.endswith("labels")
            if value.dim() != (1 if of_labels else 2) or value.is_floating_point() == of_labels:
                raise ValueError(f"{number}.{name} has another shape or type")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{number}.{name} is not finite")
        arrays = {name: tensors[f"{number}.{name}"].numpy() for name in _ARRAYS}
        classes = {arrays[name].shape[1] for name in _ARRAYS if name.endswith("logits")}
        pairs = (("logits", "labels"), ("held_out_logits", "held_out_labels"))
        if len(classes) > 1 or any(len(arrays[one]) != len(arrays[other]) for one, other in pairs):
            raise ValueError(f"the sizes of {number}.logits and the arrays beside it differ")
        if any(len(arrays[name]) and not 0 <= arrays[name].min() <= arrays[name].max() < min(classes) for _, name in pairs):
            raise ValueError(f"{number}.labels has classes that the logits lack")
        results.append(LeftOut(about["kind"], about["name"], **arrays))
    return results
