"""`mtem adapt`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from mtem.cli.console import Column, Quiet, logged_progress, out, parse_settings
from mtem.errors import RequestError


def adapt(
    source: Annotated[
        list[Path], typer.Option(help="Labeled texts or threads (csv, tsv, jsonl, parquet; .gz too). May be given again.")
    ],
    target: Annotated[list[Path], typer.Option(help="Unlabeled texts or threads of the new domain. May be given again.")],
    output: Annotated[Path, typer.Option(help="Folder for the run; it must not hold another one.")],
    target_labeled: Annotated[list[Path] | None, typer.Option(help="A few labeled texts or threads of the new domain.")] = None,
    model: Annotated[
        str, typer.Option(help="Encoder: 'minilm', a directory, or a Hugging Face name; or 'bigcn' for reply trees.")
    ] = "minilm",
    features: Annotated[
        str | None, typer.Option(help="With --model bigcn, the features of a post: tfidf, vectors or encoder.")
    ] = None,
    method: Annotated[str, typer.Option(help="One of those that 'mtem methods' lists.")] = "mtem",
    source_model: Annotated[
        Path | None, typer.Option(help="The folder of another run: its source model is used, and none is trained.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="'recommended', or 'paper': the algorithm and constants as printed.")
    ] = "recommended",
    engine: Annotated[
        str | None,
        typer.Option(help="Index gradient: layerwise (exact; the default), forward (exact), taylor, second-order (exact)."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; see 'mtem settings'.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same machine: same result.")] = None,
    text_column: Column = None,
    label_column: Column = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --output.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train on labeled texts of source domains, adapt to unlabeled texts of a new one.

    **Examples**

    mtem adapt --source books.csv --source dvd.csv --target kitchen.csv --output run/

    mtem adapt --source books.csv --target kitchen.csv --target-labeled few.csv --set epochs=3 --output run/

    mtem adapt --source books.csv --target kitchen.csv --output run/ --resume

    mtem adapt --source charliehebdo.jsonl --source ottawashooting.jsonl --target ferguson.jsonl --model bigcn --output run/
    """
    given = parse_settings(set_)
    for name, value in (("engine", engine), ("features", features)):
        if value is not None:
            given[name] = value
    if seed is not None:
        given["seed"] = seed
    from mtem import models
    from mtem.run.adapt import adapt as run_adapt

    if features is not None and model not in models.names("features"):
        suitable = " or ".join(models.names("features"))
        raise RequestError(f"--features {features}: --model {model} has no features of posts; use --model {suitable}")
    for name in given:
        if name in inspect.signature(run_adapt).parameters:
            raise RequestError(f"--set {name}={given[name]}: '{name}' is an option, not a setting; see 'mtem adapt --help'")
    with logged_progress(quiet) as progress:
        adapted = run_adapt(
            source, target, target_labeled=target_labeled or None,
            model=model, method=method, preset=preset, source_model=source_model, output=output, resume=resume,
            text_column=text_column, label_column=label_column, progress=progress, **given,
        )  # fmt: skip
    print_summary(adapted.record, output)


def print_summary(record: dict[str, Any], output: Path) -> None:
    """Print which weights were chosen, the accuracy estimate, and where the files are."""
    from mtem.selection.diagnostics import no_estimate

    choice = record["selection"]
    if choice["kept_source_model"]:
        summary = "the source model was kept" if record["steps"]["adapt"] else "source training only"
    else:
        summary = f"weights of step {choice['chosen_step']} of {record['steps']['adapt']}, chosen by {choice['criterion']}"
    out.print(Text(summary))
    estimates = record.get("estimate") or {}
    if not any(estimates.get(name) for name in ("before", "after")):
        out.print(Text(no_estimate(record), style="yellow"))
    else:
        after = estimates.get("after") or {}
        basis = "from its labeled texts" if str(after.get("method")).startswith("labeled") else "without labels"
        out.print(f"estimated accuracy on the target, {basis} (95 % interval):")
        for name in ("before", "after"):
            value = estimates.get(name)
            text = "withheld" if value is None else f"{value['accuracy']:.3f}  ({value['low']:.3f} to {value['high']:.3f})"
            out.print(f"  {name:<7}{text}")
        for note in after.get("notes", ()):
            out.print(Text(f"  {note}"))
    table = f"{record.get('unit', 'texts')} and indexes"
    out.print(Text(f"model: {output / 'model'}   record: {output / 'run.json'}   {table}: {output / 'indexes.parquet'}"))
