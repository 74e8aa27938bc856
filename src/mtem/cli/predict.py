"""`mtem predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from mtem.cli.console import Column, Device, Engine, check_pool, load_run, logged_progress, out
from mtem.cli.tables import shorten

if TYPE_CHECKING:
    from mtem.inference import Predicted

SHOWN = 50  # classes whose number of predictions is printed


def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[
        Path, typer.Argument(help="Texts or threads: csv, tsv, jsonl or parquet, .gz too; or a folder of Parquet files.")
    ],
    output: Annotated[Path, typer.Option(help="Where to write; the ending gives the format. For a folder: a folder.")],
    text_column: Column = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add one column per class.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Write CSV and TSV as they are, without the apostrophe before texts that a spreadsheet would run."
        ),
    ] = False,
    device: Device = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Files side by side; by default one, with --engine ray what the cluster allows."),
    ] = None,
    engine: Engine = "processes",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Add a prediction and its confidence to every row of a file, of any size.

    All columns are kept. In CSV and TSV, texts that a spreadsheet would take for formulas get an apostrophe in front.

    Of a folder, every Parquet file below it is predicted; the same command again continues.

    **Examples**

    mtem predict run/ new.csv --output predictions.csv

    mtem predict run/ texts/ --output predictions/ --engine ray
    """
    from mtem import inference

    check_pool(engine)
    if file.is_dir() or engine != "processes":
        done = predict_tasks(run, file, output, text_column, probabilities, raw, device, jobs, engine, quiet)
    else:
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


def predict_tasks(
    run: Path, file: Path, output: Path, text_column: str | None, probabilities: bool, raw: bool, device: str,
    jobs: int | None, engine: str, quiet: bool,
) -> Predicted:  # fmt: skip
    """Predict a folder of files, or a file on a cluster."""
    from mtem.run.prediction import predict_folder

    if jobs is None and engine != "processes":
        from mtem.ray_pool import default_jobs

        jobs = default_jobs()
    with logged_progress(quiet) as progress:
        return predict_folder(
            run, file, output, text_column=text_column, all_probabilities=probabilities, raw=raw, device=device, jobs=jobs or 1,
            pool=engine, progress=progress,
        )  # fmt: skip
