"""Every warning that a run can give: about its data, and about its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtem.data import summary
from mtem.data.corpus import Corpus
from mtem.models.base import Model
from mtem.selection.accuracy_estimate import FEWEST_HELD_OUT_TEXTS

FEW_TARGET_TEXTS = 200
FEW_HELD_OUT_TEXTS = 50
LARGE_SHARE_DISTANCE = 0.15  # between source labels and target predictions
LARGE_CHANGE = 0.3  # share of the target predictions that the adaptation changed


def data_warnings(corpus: Corpus, model_cls: type[Model]) -> list[str]:
    """Return one line per thing to check in the data: repairs, differences between files, what the model cannot read."""
    return [*corpus.notices, *summary.warnings(corpus), *model_cls.warnings_for(corpus)]


def result_warnings(
    source_share: np.ndarray,
    before_logits: np.ndarray | None,
    after_logits: np.ndarray,
    texts: int,
    classes: Sequence[str],
    *,
    held_out: int | None = None,
    unit: str = "texts",
) -> list[str]:
    """Return one line per thing to worry about in the result of a run.

    Parameters
    ----------
    source_share
        The classes' shares among the source labels, [K].
    before_logits, after_logits
        [T, K] on the same target texts, by the source model (None if there is no other) and by the chosen model.
    texts
        Number of unlabeled target texts.
    classes
        The K names.
    held_out
        Number of held-out source texts, if known.
    unit
        What the examples are called, in the plural.
    """
    predicted = np.asarray(after_logits).argmax(axis=1)
    source_share = np.asarray(source_share, dtype=float)
    share = np.bincount(predicted, minlength=len(classes)) / max(1, len(predicted))
    return [
        *_collapse(source_share, share, before_logits, len(predicted), classes, unit),
        *_drift(before_logits, predicted),
        *_few_texts(texts, held_out, unit),
    ]


def _collapse(
    source_share: np.ndarray, share: np.ndarray, before: np.ndarray | None, count: int, classes: Sequence[str], unit: str
) -> list[str]:
    """Warn of classes that are no longer predicted, and of class shares that differ much from the source's."""
    if len(classes) > 1 and count > 1 and share.max() == 1:
        name = classes[int(share.argmax())]
        return [f"collapse: all {count} target {unit} are predicted {name!r}; do not use these predictions"]
    lines = []
    for k in map(int, np.flatnonzero((source_share >= min(0.05, 0.5 / len(classes))) & (share < source_share / 10))):
        earlier = "" if before is None else f" ({(np.asarray(before).argmax(axis=1) == k).mean():.1%} before adaptation)"
        lines.append(
            f"collapse: {classes[k]!r} is {source_share[k]:.1%} of the source labels but {share[k]:.1%} of the target"
            f" predictions{earlier}; the adaptation may have removed the class"
        )
    distance = float(np.abs(share - source_share).sum()) / 2
    by_chance = float(np.sqrt(source_share * (1 - source_share) / (2 * math.pi * max(1, count))).sum())
    if distance > max(LARGE_SHARE_DISTANCE, 2 * by_chance):
        largest = np.argsort(-np.abs(share - source_share), kind="stable")[:5].tolist()
        changes = ", ".join(f"{classes[k]!r} {source_share[k]:.1%} -> {share[k]:.1%}" for k in largest)
        lines.append(
            f"class shares differ by {distance:.1%} between source labels and target predictions ({changes}"
            f"{', ...' if len(classes) > 5 else ''}): either the target has these shares or the model prefers a class; "
            "the estimate cannot tell which"
        )
    return lines


def _drift(before: np.ndarray | None, predicted: np.ndarray) -> list[str]:
    if before is None or not len(predicted):
        return []
    changed = float((np.asarray(before).argmax(axis=1) != predicted).mean())
    if changed <= LARGE_CHANGE:
        return []
    return [
        f"drift: adaptation changed {changed:.1%} of the target predictions (more than {LARGE_CHANGE:.1%}); check some of them "
        "before you rely on it"
    ]


def _few_texts(texts: int, held_out: int | None, unit: str) -> list[str]:
    lines = []
    if texts < FEW_TARGET_TEXTS:
        lines.append(f"few {unit}: {texts} target {unit}, fewer than {FEW_TARGET_TEXTS}; adaptation may do harm")
    if held_out is not None and held_out < FEW_HELD_OUT_TEXTS:
        lines.append(
            f"few {unit}: {held_out} held-out source {unit}, fewer than {FEW_HELD_OUT_TEXTS}; the choice of weights and the"
            " accuracy estimate are unreliable"
        )
    return lines


def source_model_kept(criterion: str, score: float) -> str:
    """Return the warning that no weights of the adaptation were better than the source model."""
    return (
        f"the source model is kept: by {criterion} no weights of the adaptation were better ({score:.4f}); "
        "the adapted ones were not used"
    )


def no_estimate(record: dict[str, Any]) -> str:
    """Return why a run has no accuracy estimate."""
    count, unit = record["texts"]["source_held_out"], record.get("unit", "texts")
    counted = f"{count} source {unit[:-1] if count == 1 else unit} {'was' if count == 1 else 'were'}"
    return (
        f"no accuracy estimate: only {counted} held out, and at least {FEWEST_HELD_OUT_TEXTS} are needed; "
        f"give more labeled {unit}, or measure on labeled ones of the target"
    )


def text_cut(max_length: int, longest: int) -> str:
    """Return the warning that the encoder takes fewer tokens than the setting `max_length`."""
    return f"max_length={max_length}: the encoder takes {longest} tokens; longer texts are truncated"


def not_rehearsed(method: str, tried: Sequence[str]) -> str:
    """Return the warning that a rehearsal has not tried the method."""
    return f"the rehearsal did not try {method} (it tried {', '.join(tried)}); its defaults are used"


def advised_against(method: str, epochs: float) -> str:
    """Return the warning that a rehearsal advises against adapting."""
    return (
        f"the rehearsal advises against adapting with {method}: its mean gain over the source model was no larger than what "
        f"scores change by from pass to pass, so the source model is kept. To adapt nevertheless: --set stop_epochs={epochs:g}"
    )


def other_texts(rehearsal: str) -> str:
    """Return the warning that a rehearsal had other source texts."""
    return f"{rehearsal}: was rehearsed with other source texts; its choices are used, but they were made for those"


def settings_differ(names: Sequence[str]) -> str:
    """Return the warning that settings other than the rehearsed ones were given."""
    return f"not as rehearsed: {', '.join(names)}; the estimate and the temperature are therefore not taken from the rehearsal"
