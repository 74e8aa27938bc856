"""`mtem demo`: adapt on the bundled sample, from labeled books, dvd and electronics reviews to unlabeled kitchen reviews."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mtem.cli.console import Quiet, logged_progress, out
from mtem.progress import Progress

if TYPE_CHECKING:
    from mtem.run.result import Adapted

SOURCES = ("books", "dvd", "electronics")
MOVED = 8  # reviews that are shown
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
}


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the run.")] = Path("demo-run"),
    quiet: Quiet = False,
) -> None:
    """Adapt on the bundled Amazon sample (CPU, a few minutes) and show the result.

    **Example**

    mtem demo --output demo-run/
    """
    from mtem.datasets.sample import sample_path
    from mtem.report.page import write_report
    from mtem.run.adapt import adapt

    sources = {name: str(sample_path(f"{name}.jsonl.gz")) for name in SOURCES}
    target = str(sample_path("kitchen.jsonl.gz"))
    resume = (output / "run.json").exists()
    with logged_progress(quiet) as progress:
        adapted = adapt(sources, target, output=output, resume=resume, progress=progress, **SETTINGS)
        show(adapted, out, progress)
    out.print(Text(f"a page that shows all this: {write_report(output)}"))


def show(adapted: Adapted, console: Console, progress: Progress) -> None:
    """Print the accuracy before and after on labeled reviews, and some of the texts that got another label."""
    from mtem.data.loading import load_corpus
    from mtem.datasets.sample import sample_path
    from mtem.run.evaluation import evaluate

    test = load_corpus(str(sample_path("kitchen-test.jsonl.gz")), labeled=True)
    figures = evaluate(adapted, test, compare=adapted.path is not None, progress=progress)
    estimates = adapted.record.get("estimate") or {}
    console.print(Text(f"kitchen reviews: accuracy on {len(test)} labeled reviews that were not used", style="bold"))
    for name, result in figures.items():
        estimate = estimates.get(name)
        text = "no estimate without labels"
        if estimate is not None:
            interval = f"95 % interval {estimate['low']:.3f} to {estimate['high']:.3f}"
            text = f"estimated without labels {estimate['accuracy']:.3f} ({interval})"
        console.print(f"  {name:<7}{result.accuracy:.3f}   {text}")
    chosen = adapted.record["selection"]
    if chosen["kept_source_model"]:
        console.print("  the source model was kept: nothing better was found without labels")
    moved = adapted.indexes[adapted.indexes["prediction"] != adapted.indexes["source_prediction"]]
    console.print(Text(f"{len(moved)} of {len(adapted.indexes)} reviews got another label, the surest first", style="bold"))
    for row in moved.sort_values("confidence", ascending=False, kind="stable").head(MOVED).to_dict("records"):
        line = f"  {row['source_prediction']} -> {row['prediction']} ({row['confidence']:.2f})  {' '.join(row['text'].split())}"
        console.print(Text(line[:110] + ("…" if len(line) > 110 else "")))
    console.print(Text(f"output in {adapted.path}/ : model/, run.json, history.jsonl, indexes.parquet"))
