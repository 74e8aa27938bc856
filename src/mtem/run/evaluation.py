"""Measuring a finished run on labeled texts, before and after the adaptation."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from mtem import inference, metrics
from mtem.data.corpus import Corpus
from mtem.errors import RequestError, RunError
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.directory import RunDirectory
from mtem.run.overview import spread
from mtem.run.record import now
from mtem.run.result import Adapted

BEFORE, AFTER = "before", "after"
MOST_KEPT = 50_000  # texts whose predictions are kept

logger = logging.getLogger(__name__)


def text_digest(text: str) -> str:
    """Return by what evaluation.json names a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def evaluate(adapted: Adapted, corpus: Corpus, *, compare: bool, progress: Progress) -> dict[str, metrics.Metrics]:
    """Return the figures of the final model and, with `compare`, of the source model as it was trained.

    In the directory of a run, ``evaluation.json`` keeps them for the report, with the predictions of up to `MOST_KEPT` texts.

    Raises
    ------
    RequestError
        If the source model is asked for and was not kept.
    """
    models: dict[str, Model] = {}
    if compare:
        before = adapted.source_model()
        if before is None:
            raise RequestError(f"{adapted.path}: the model before the adaptation was not kept, so --compare is not possible")
        before.precision = adapted.model.precision
        models[BEFORE] = before.to(adapted.model.device)
    models[AFTER] = adapted.model
    classes, labels = adapted.classes, corpus.label_numbers(adapted.classes)
    results: dict[str, metrics.Metrics] = {}
    kept = spread(len(corpus), MOST_KEPT)
    record: dict[str, Any] = {
        "file": corpus.name, "measured": now(), "texts": [text_digest(text) for text in corpus.texts(kept)],
        "labels": [classes[number] for number in labels[kept]],
    }  # fmt: skip
    for name, model in models.items():
        tokens = model.encode(corpus)
        with progress.stage(f"evaluating ({name} the adaptation)" if compare else "evaluating", len(tokens)):
            logits = inference.compute_logits(model, tokens, progress=progress).logits
        probabilities = inference.probabilities(logits)
        best = logits.argmax(axis=1)
        results[name] = metrics.evaluate(labels, best, classes, probabilities)
        record[name] = {
            "figures": results[name].to_dict(), "predictions": [classes[number] for number in best[kept]],
            "confidence": [round(float(value), 4) for value in probabilities[kept].max(axis=1)],
        }  # fmt: skip
    if adapted.record and adapted.path is not None:
        try:
            RunDirectory(adapted.path).write_evaluation(record)
        except (OSError, RunError) as error:  # a run that may only be read can be measured all the same
            logger.warning("the report will not have these figures: %s", error)
    return results
