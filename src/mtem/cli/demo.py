"""The main job on the bundled sample: books, dvd and electronics reviews with labels, kitchen reviews without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mtem import inference, metrics
from mtem.data.loading import load_corpus
from mtem.datasets.sample import sample_path
from mtem.progress import Progress
from mtem.run.adapt import adapt
from mtem.run.result import Adapted

SOURCES = ("books", "dvd", "electronics")
# Sized for two CPU cores and a few minutes: short texts, the upper two layers of MiniLM.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_length": 96,
    "batch_size": 32,
    "frozen_layers": -2,
    "source_epochs": 2,
    "source_learning_rate": 1e-3,
    "steps": 28,
    "learning_rate": 3e-4,
    "evaluations": 3,
    # With less than one visit per text the sign alone would leave three values of the index; the soft sign grades them.
    "index_step": "soft",
    "index_learning_rate": 1.0,
}


def run(output: Path, console: Console, progress: Progress) -> Adapted:
    """Adapt (or go on where an earlier call stopped), then show what came of it."""
    sources = {name: str(sample_path(f"{name}.jsonl.gz")) for name in SOURCES}
    target = str(sample_path("kitchen.jsonl.gz"))
    begun = (output / "run.json").exists()
    adapted = adapt(sources, target, output=output, resume=begun, progress=progress, **SETTINGS)
    show(adapted, console, progress)
    return adapted


def show(adapted: Adapted, console: Console, progress: Progress) -> None:
    test = load_corpus(str(sample_path("kitchen-test.jsonl.gz")), labeled=True)
    before = adapted.source_model()
    estimates = adapted.record.get("estimate") or {}
    console.print(Text(f"kitchen reviews: accuracy on {len(test)} labeled ones that no step has seen", style="bold"))
    for name, model in (("before", before), ("after", adapted.model)):
        if model is None:
            continue
        tokens = model.encode(test)
        with progress.stage(f"testing the model {name} the adaptation", len(tokens)):
            scores = inference.compute_logits(model, tokens, progress=progress).logits
        figures = metrics.evaluate(test.label_numbers(adapted.classes), scores.argmax(axis=1), adapted.classes)
        guess = estimates.get(name)
        told = "no estimate without labels"
        if guess is not None:
            told = f"estimated without labels {guess['accuracy']:.3f} (95 % interval {guess['low']:.3f} to {guess['high']:.3f})"
        console.print(f"  {name:<7}{figures.accuracy:.3f}   {told}")
    chosen = adapted.record["selection"]
    if chosen["kept_source_model"]:
        console.print("  the source model was kept: without labels nothing looked better")
    table = adapted.indexes.sort_values("confidence", ascending=False, kind="stable")
    for title, falling in (
        ("texts with the smallest entropy index (their pseudo labels weigh most)", False),
        ("texts with the largest entropy index (their pseudo labels weigh least where the model is unsure)", True),
    ):
        console.print(Text(title, style="bold"))
        for row in table.sort_values("index", ascending=not falling, kind="stable").head(5).to_dict("records"):
            line = f"  {row['index']:.2f}  {row['prediction']} ({row['confidence']:.2f})  {' '.join(row['text'].split())}"
            console.print(Text(line[:110] + ("…" if len(line) > 110 else "")))
    console.print(Text(f"look into {adapted.path}/ : model/, run.json, history.jsonl, indexes.parquet"))
