"""`mtem predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mtem.cli.console import Column, Device, load_run, logged_progress, out
from mtem.cli.tables import shorten

SHOWN = 50  # classes whose number of predictions is printed


def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[Path, typer.Argument(help="Texts or threads: csv, tsv, jsonl or parquet, .gz too.")],
    output: Annotated[Path, typer.Option(help="Where to write; the ending gives the format.")],
    text_column: Column = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add one column per class.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Write CSV and TSV as they are, without the apostrophe before texts that a spreadsheet would run."
        ),
    ] = False,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Add a prediction and its confidence to every row of a file, of any size.

    All columns are kept. In CSV and TSV, texts that a spreadsheet would take for formulas get an apostrophe in front.

    **Example**

    mtem predict run/ new.csv --output predictions.csv
    """
    from mtem import inference

    adapted = load_run(run, device)
    with logged_progress(quiet) as progress, progress.stage("predicting", None):
        done = inference.predict_file(
            adapted.model, file, output, text_column=text_column, all_probabilities=probabilities, raw=raw, progress=progress
        )
    counts = ", ".join(f"{shorten(name)} {count}" for name, count in list(done.counts.items())[:SHOWN])
    more = f", and {len(done.counts) - SHOWN} more classes" if len(done.counts) > SHOWN else ""
    out.print(Text(f"{output}: {done.rows} rows ({counts}{more})"))
    if done.empty:
        rows = "1 row has" if done.empty == 1 else f"{done.empty} rows have"
        out.print(Text(f"{rows} no text and no prediction", style="yellow"))
