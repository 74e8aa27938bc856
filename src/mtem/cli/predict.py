"""`mtem predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtem.cli.console import Column, Device, load_run, logged_progress, out


def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[Path, typer.Argument(help="Texts or threads: csv, tsv, jsonl or parquet, .gz too.")],
    output: Annotated[Path, typer.Option(help="Where to write; the ending gives the format.")],
    text_column: Column = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add one column per class.")] = False,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Add a prediction and its confidence to every row of a file, of any size.

    All columns are kept.

    **Example**

    mtem predict run/ new.csv --output predictions.csv
    """
    from mtem import inference

    adapted = load_run(run, device)
    with logged_progress(quiet) as progress, progress.stage("predicting", None):
        done = inference.predict_file(
            adapted.model, file, output, text_column=text_column, all_probabilities=probabilities, progress=progress
        )
    counts = ", ".join(f"{name} {count}" for name, count in done.counts.items())
    out.print(f"{output}: {done.rows} rows ({counts})", markup=False)
    if done.empty:
        rows = "1 row has" if done.empty == 1 else f"{done.empty} rows have"
        out.print(f"{rows} no text and no prediction", style="yellow", markup=False)
