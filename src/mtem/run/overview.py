"""What the report shows of a run and no other file has: a map of the texts, and how often words occur in source and target."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from mtem.data.corpus import Corpus
from mtem.run.inputs import RunInputs
from mtem.selection.criteria import CandidateOutputs

MOST_POINTS = 1000  # of the map, for source and target each
MOST_TEXTS = 20_000  # of a corpus, whose words are counted
MOST_CHARACTERS = 5000  # of a text
MOST_WORDS = 20_000  # that are kept
FEWEST_TEXTS = 5  # with a word that is kept
_WORD = re.compile(r"[^\W\d_][\w'\u2019-]+")


def spread(count: int, most: int) -> np.ndarray:
    """Return at most so many of `count` positions, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def words_of(text: str) -> set[str]:
    """Return the words of a text in lower case, as they are counted."""
    return {word.casefold() for word in _WORD.findall(text[:MOST_CHARACTERS])}


def count_words(source: Corpus, target: Corpus) -> pa.Table:
    """Return in how many texts of source and target each word occurs; the most frequent words of both together."""
    counts = [_counted(source), _counted(target)]
    total = counts[0][0] + counts[1][0]
    words = [word for word, number in total.most_common(MOST_WORDS) if number >= FEWEST_TEXTS]
    columns = {name: [counter[word] for word in words] for name, (counter, _) in zip(("source", "target"), counts, strict=True)}
    table = pa.table({"word": pa.array(words, pa.string()), **{name: pa.array(v, pa.int32()) for name, v in columns.items()}})
    sizes = {f"{name}_texts": str(size) for name, (_, size) in zip(("source", "target"), counts, strict=True)}
    return table.replace_schema_metadata(sizes)


def _counted(corpus: Corpus) -> tuple[Counter[str], int]:
    """Return the counts of the words of a corpus, or of texts spread over it, and the number of texts."""
    rows = spread(len(corpus), MOST_TEXTS)
    counter: Counter[str] = Counter()
    for text in corpus.texts(rows):
        counter.update(words_of(text))
    return counter, len(rows)


def draw_map(inputs: RunInputs, target_rows: np.ndarray, before: CandidateOutputs, after: CandidateOutputs) -> pa.Table:
    """Return texts as points: the two main directions of what the head reads, before and after the adaptation.

    Parameters
    ----------
    inputs
        The texts of the run.
    target_rows
        The target texts whose outputs are given.
    before, after
        Outputs of the source model and of the final one on all held-out source texts and on these target texts.

    Returns
    -------
    pa.Table
        `domain` and `label` of a source text, "" of a target text; `position` of a target text in the corpus, else -1; the
        predicted class and the coordinates ``x`` and ``y``, each with the ending ``_before`` and ``_after``.
    """
    source = spread(len(before.source_logits), MOST_POINTS)
    target = spread(len(before.target_logits), MOST_POINTS)
    held_out = inputs.held_out_rows[source]
    names = np.array([*inputs.classes], dtype=object)
    blank = [""] * len(target)
    columns: dict[str, Any] = {
        "domain": [inputs.domains[number] for number in inputs.domain_numbers[held_out]] + blank,
        "label": list(names[inputs.labels[held_out]]) + blank,
        "position": np.concatenate([np.full(len(source), -1), target_rows[target]]),
    }
    earlier: np.ndarray | None = None
    for ending, outputs in (("before", before), ("after", after)):
        logits = np.concatenate([outputs.source_logits[source], outputs.target_logits[target]])
        features = np.concatenate([outputs.source_features[source], outputs.target_features[target]])
        points = _main_directions(features)
        if earlier is not None:  # a main direction has no sign: take the one that moves the texts less
            points *= np.where((points * earlier).sum(axis=0) < 0, -1, 1)
        earlier = points
        columns[f"prediction_{ending}"] = list(names[logits.argmax(axis=1)])
        columns[f"x_{ending}"], columns[f"y_{ending}"] = points.T.astype(np.float32)
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def _main_directions(features: np.ndarray) -> np.ndarray:
    """Return the two first principal components of some vectors, [N, 2]; zeros where there are none."""
    values = np.nan_to_num(np.asarray(features, dtype=np.float64))
    values -= values.mean(axis=0)
    largest = np.abs(values).max(initial=0.0)
    if largest:
        values /= largest  # squares of large values must not overflow
    _, directions = np.linalg.eigh(values.T @ values)
    points = np.zeros((len(values), 2))
    found = values @ directions[:, ::-1][:, :2]
    points[:, : found.shape[1]] = found
    return points
