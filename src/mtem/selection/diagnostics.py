"""Every warning about a run that a user can get."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FEW_TARGET_TEXTS = 200
FEW_HELD_OUT_TEXTS = 50


def warnings(
    source_share: np.ndarray,
    before_logits: np.ndarray | None,
    after_logits: np.ndarray,
    texts: int,
    classes: Sequence[str],
    *,
    held_out: int | None = None,
    unit: str = "texts",
) -> list[str]:
    """One line per thing to worry about.

    Parameters
    ----------
    source_share : [K] the classes' shares among the source labels.
    before_logits, after_logits : [T, K] on the same target texts, by the source model (None if there is no other) and
        by the model kept.
    texts : number of unlabeled target texts there are.
    classes : the K names.
    held_out : number of held-out source texts, if known.
    unit : what they are called, in the plural.
    """
    count = len(classes)
    source_share = np.asarray(source_share, dtype=float)
    predicted = np.asarray(after_logits).argmax(axis=1)
    share = np.bincount(predicted, minlength=count) / max(1, len(predicted))
    found = []

    all_in_one = count > 1 and len(predicted) > 1 and share.max() == 1
    if all_in_one:
        found.append(
            f"collapse: all {len(predicted)} target {unit} are predicted {classes[int(share.argmax())]!r};"
            " do not use these predictions"
        )
    else:
        for k in np.flatnonzero((source_share >= min(0.05, 0.5 / count)) & (share < source_share / 10)):
            found.append(
                f"collapse: {classes[k]!r} is {source_share[k]:.1%} of the source labels but {share[k]:.1%} of the"
                f" target predictions{_before(before_logits, k)}; the class may have been driven out"
            )
    distance = float(np.abs(share - source_share).sum()) / 2
    by_chance = float(np.sqrt(source_share * (1 - source_share) / (2 * math.pi * max(1, len(predicted)))).sum())
    if not all_in_one and distance > max(0.15, 2 * by_chance):
        largest = np.argsort(-np.abs(share - source_share), kind="stable")[:5]
        found.append(
            f"class shares differ by {distance:.1%} between source labels and target predictions ("
            + ", ".join(f"{classes[k]!r} {source_share[k]:.1%} -> {share[k]:.1%}" for k in largest)
            + (", ..." if count > 5 else "")
            + "): either the target is like that or the model leans to a class; the estimate cannot tell which"
        )
    if before_logits is not None and len(predicted):
        changed = float((np.asarray(before_logits).argmax(axis=1) != predicted).mean())
        if changed > 0.3:
            found.append(
                f"drift: adaptation changed {changed:.1%} of the target predictions (more than 30.0%); look at some of"
                " them before relying on it"
            )
    if texts < FEW_TARGET_TEXTS:
        found.append(f"few {unit}: {texts} target {unit}, fewer than {FEW_TARGET_TEXTS}; adaptation may do harm")
    if held_out is not None and held_out < FEW_HELD_OUT_TEXTS:
        found.append(
            f"few {unit}: {held_out} held-out source {unit}, fewer than {FEW_HELD_OUT_TEXTS}; the choice of weights and the"
            " accuracy estimate are unreliable"
        )
    return found


def _before(scores: np.ndarray | None, k: int) -> str:
    return "" if scores is None else f" ({(np.asarray(scores).argmax(axis=1) == k).mean():.1%} before adaptation)"
