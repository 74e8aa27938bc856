"""The data of the table of target texts, small enough for a page, and the words that are typical of the target."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

import numpy as np
import pandas as pd

from mtem.report.files import LONGEST_TEXT, RunFiles
from mtem.run.overview import spread

MOST_ROWS = 20_000  # of the table
SHORTEST = 80  # to which texts are cut at most
SAMPLED_ROWS = 500  # from which the cut is guessed
TYPICAL_WORDS = 3000
CLEAR = 2.0  # standard errors from which on a word is typical


def typical_words(words: pd.DataFrame, source_texts: int, target_texts: int) -> dict[str, float]:
    r"""Return the words that are typical of the target, with how clearly they are.

    .. math::
        z = \frac{\log\frac{t + a}{T - t + a} - \log\frac{s + a}{S - s + a}}
                 {\sqrt{\frac1{t + a} + \frac1{s + a}}}, \qquad a = \tfrac12,

    with s of S source texts and t of T target texts that contain the word: a log odds ratio over its standard error.
    """
    if not source_texts or not target_texts or not len(words):
        return {}
    t, s = (
        np.clip(words[name].to_numpy(dtype=float), 0, size) for name, size in (("target", target_texts), ("source", source_texts))
    )
    odds = np.log((t + 0.5) / (target_texts - t + 0.5)) - np.log((s + 0.5) / (source_texts - s + 0.5))
    z = odds / np.sqrt(1 / (t + 0.5) + 1 / (s + 0.5))
    order = np.argsort(-z, kind="stable")[:TYPICAL_WORDS]
    return {str(words["word"].iloc[n]): round(float(z[n]), 1) for n in order if z[n] >= CLEAR}


def explorer(run: RunFiles, budget: int) -> dict[str, Any] | None:
    """Return the table of texts, packed for the page, or None without texts.

    Parameters
    ----------
    run
        The files of the run.
    budget
        The bytes that the packed texts may take. Texts are cut, the same length for all, until they fit.

    Returns
    -------
    dict
        ``packed``: base64 of gzipped JSON with the columns; ``rows``, ``total`` and ``cut`` (the length, or None).
    """
    if run.texts is None or not len(run.texts):
        return None
    frame = run.texts.iloc[spread(len(run.texts), MOST_ROWS)]
    longest = max(int(frame[name].map(len).max()) for name in ("text", "tree") if name in frame)
    cut = min(longest, LONGEST_TEXT)
    sample = frame.iloc[spread(len(frame), SAMPLED_ROWS)]
    while cut > SHORTEST and (ratio := len(pack(columns(run, sample, cut))) * len(frame) / len(sample) / budget) > 1.02:
        cut = max(SHORTEST, int(cut * min(0.9, max(0.3, 1 / ratio))))
    packed = pack(columns(run, frame, cut))
    while len(packed) > budget and cut > SHORTEST:
        cut = max(SHORTEST, int(cut * 0.97 * budget / len(packed)))
        packed = pack(columns(run, frame, cut))
    return {"packed": packed, "rows": len(frame), "total": len(run.texts), "cut": cut if cut < longest else None}


def columns(run: RunFiles, frame: pd.DataFrame, cut: int) -> dict[str, Any]:
    """Return the columns of the table; classes are numbers, and texts have at most `cut` characters."""
    names = list(dict.fromkeys([*run.classes, *_names(frame)]))
    numbers = {name: number for number, name in enumerate(names)}
    found: dict[str, Any] = {
        "classes": names,
        "text": [text[:cut] for text in frame["text"]],
        "prediction": [numbers[name] for name in frame["prediction"]],
        "confidence": _numbers(frame["confidence"]),
    }
    if "row" in frame:
        found["row"] = [None if pd.isna(value) else int(value) for value in frame["row"]]
    if "index" in frame and frame["index"].nunique() > 1:  # else it is the same for all
        found["index"] = _numbers(frame["index"])
    if "source_prediction" in frame:
        found["source_prediction"] = [numbers[name] for name in frame["source_prediction"]]
    if "source_confidence" in frame:
        found["source_confidence"] = _numbers(frame["source_confidence"])
    if "label" in frame:
        found["label"] = [numbers[name] if name else -1 for name in frame["label"]]
    if "tree" in frame:
        found["tree"] = [_tree(value, cut) for value in frame["tree"]]
    return found


def _names(frame: pd.DataFrame) -> list[str]:
    present = [frame[name] for name in ("prediction", "source_prediction", "label") if name in frame]
    return [name for column in present for name in pd.unique(column) if name]


def _tree(text: str, cut: int) -> list[list[Any]]:
    """Return the posts of a thread as pairs of the position of the post it answers and its text, within `cut` characters."""
    from mtem.data.threads import parse

    try:
        thread = parse(text)
    except (ValueError, KeyError, TypeError, IndexError):
        return []
    posts, left = [], max(cut, SHORTEST) * 4
    for parent, post in zip(thread.parents, thread.texts, strict=False):
        if left <= 0:
            break
        posts.append([parent, post[: min(cut, left)]])
        left -= len(post)
    return posts


def pack(value: Any) -> str:
    """Return base64 of the gzipped JSON of a value, the same for the same value."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def _numbers(values: pd.Series) -> list[float | None]:
    return [None if not math.isfinite(value) else round(float(value), 4) for value in values.astype(float)]
