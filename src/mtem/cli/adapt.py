"""`mtem adapt`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from mtem import liveness
from mtem.cli.console import Column, Encoder, Quiet, Seed, Settings, ToldExit, logged_progress, no_progress, out, parse_settings
from mtem.cli.launch import check_processes, launch
from mtem.cli.rehearse import BUDGET_HELP, default_jobs, listed, print_rehearsal, refuse_options
from mtem.errors import RequestError
from mtem.progress import Progress

if TYPE_CHECKING:
    from mtem.run.result import Adapted

AUTO_METHODS = ("mtem", "biat")  # what --method auto --rehearse compares


def adapt(
    output: Annotated[Path, typer.Option(help="Folder for the run; it must not hold another one.")],
    source: Annotated[
        list[Path] | None,
        typer.Option(help="Labeled texts or threads (csv, tsv, jsonl, parquet; .gz too). May be given again."),
    ] = None,
    target: Annotated[
        list[Path] | None, typer.Option(help="Unlabeled texts or threads of the new domain. May be given again.")
    ] = None,
    target_labeled: Annotated[list[Path] | None, typer.Option(help="A few labeled texts or threads of the new domain.")] = None,
    model: Encoder = "minilm",
    features: Annotated[
        str | None, typer.Option(help="With --model bigcn, the features of a post: tfidf, vectors or encoder.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="One of those that 'mtem methods' lists. 'auto': the one a rehearsal recommends; with --rehearse several may be "
            "named, separated by commas."
        ),
    ] = "mtem",
    source_model: Annotated[
        Path | None, typer.Option(help="The folder of another run: its source model is used, and none is trained.")
    ] = None,
    rehearsal: Annotated[
        Path | None, typer.Option(help="The folder of 'mtem rehearse': settings, stopping and the estimate come from it.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Rehearse on the source domains first, into OUTPUT/rehearsal, and use the result.")
    ] = False,
    budget: Annotated[float | None, typer.Option(help=f"With --rehearse. {BUDGET_HELP}")] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="'recommended'; of mtem 'learned': an entropy index for each text is learned; 'paper': the algorithm and "
            "constants as printed."
        ),
    ] = "recommended",
    engine: Annotated[
        str | None,
        typer.Option(
            help="Index gradient, where indexes are learned: layerwise (exact; the default), forward (exact), taylor, "
            "second-order (exact)."
        ),
    ] = None,
    set_: Settings = None,
    seed: Seed = None,
    text_column: Column = None,
    label_column: Column = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="A run.json, or its folder: repeat that run, with the same files, settings and seed."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --output.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write OUTPUT/tensorboard/ during the run.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train in so many processes, one per GPU; they share each batch. Several machines: docs/scale.md."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train on labeled texts of source domains, adapt to unlabeled texts of a new one.

    **Examples**

    mtem adapt --source books.csv --source dvd.csv --target kitchen.csv --output run/

    mtem adapt --source books.csv --target kitchen.csv --target-labeled few.csv --set epochs=3 --output run/

    mtem adapt --source books.csv --source dvd.csv --target kitchen.csv --rehearse --method mtem,biat --output run/

    mtem adapt --source books.csv --target kitchen.csv --output run/ --resume

    mtem adapt --from run/run.json --output again/

    mtem adapt --source charliehebdo.jsonl --source ottawashooting.jsonl --target ferguson.jsonl --model bigcn --output run/
    """
    if rehearse and max(processes or 1, liveness.launched()) > 1:
        raise RequestError("--rehearse in several processes: use 'mtem rehearse' first, and its folder with --rehearsal")
    if check_processes(processes):
        assert processes is not None
        raise ToldExit(launch(processes, sys.argv[1:]))
    liveness.end_with_parent()
    if from_ is not None:
        others = {
            "source": source, "target": target, "target-labeled": target_labeled, "features": features, "engine": engine,
            "source-model": source_model, "rehearsal": rehearsal, "rehearse": rehearse, "budget": budget, "set": set_,
            "seed": seed, "text-column": text_column, "label-column": label_column, "model": model != "minilm",
            "method": method != "mtem", "preset": preset != "recommended",
        }  # fmt: skip
        repeat(from_, output, others, resume=resume, tensorboard=tensorboard, quiet=quiet)
        return
    if not source or not target:
        raise RequestError(f"--{'target' if source else 'source'}: is missing; see 'mtem adapt --help'")
    given = parse_settings(set_)
    for name, value in (("engine", engine), ("features", features)):
        if value is not None:
            given[name] = value
    if seed is not None:
        given["seed"] = seed
    from mtem import models
    from mtem.report.tensorboard import FOLDER, TensorBoard, require_tensorboard
    from mtem.run.adapt import adapt as run_adapt

    if features is not None and model not in models.names("features"):
        suitable = " or ".join(models.names("features"))
        raise RequestError(f"--features {features}: --model {model} has no features of posts; use --model {suitable}")
    refuse_options(given, run_adapt, "adapt")
    if rehearse and rehearsal is not None:
        raise RequestError("--rehearse and --rehearsal: give one of them; --rehearsal takes a rehearsal that was made before")
    if budget is not None and not rehearse:
        raise RequestError("--budget: only with --rehearse")
    if tensorboard:
        require_tensorboard()
    with shown_progress(quiet) as progress:
        columns: dict[str, Any] = {"text_column": text_column, "label_column": label_column}
        if rehearse:
            check_before_rehearsing(source, target, target_labeled or None, source_model, output, resume, given, model, columns)
            rehearsal, method = rehearse_first(
                source, method, output, resume, budget, progress,
                {"model": model, "preset": preset, "pretrain_on": [data for data in (target_labeled, target) if data],
                 **columns, **given},
            )  # fmt: skip
        adapted = run_adapt(
            source, target, target_labeled=target_labeled or None, model=model, method=method, preset=preset,
            source_model=source_model, rehearsal=rehearsal, output=output, resume=resume, progress=progress,
            observe=TensorBoard(output / FOLDER) if tensorboard and liveness.is_first() else None, **columns, **given,
        )  # fmt: skip
    conclude(adapted, output)


def repeat(path: Path, output: Path, others: dict[str, Any], *, resume: bool, tensorboard: bool, quiet: bool) -> None:
    """Repeat a run. Refuse the options that the run has answers to."""
    if refused := [name for name, value in others.items() if value not in (None, [], False)]:
        raise RequestError(f"--{refused[0]}: --from repeats a run as it was; leave this option out, or give all but --from")
    from mtem.report.tensorboard import FOLDER, TensorBoard, require_tensorboard
    from mtem.run.adapt import adapt as run_adapt
    from mtem.run.repeat import read_request, use_threads

    if tensorboard:
        require_tensorboard()
    with shown_progress(quiet) as progress:
        request = read_request(path)
        use_threads(path)
        adapted = run_adapt(
            **request, output=output, resume=resume, progress=progress,
            observe=TensorBoard(output / FOLDER) if tensorboard and liveness.is_first() else None,
        )  # fmt: skip
    conclude(adapted, output)


def shown_progress(quiet: bool) -> contextlib.AbstractContextManager[Progress]:
    """Return a context that gives the progress of a run, shown in the main process alone."""
    return logged_progress(quiet) if liveness.is_first() else no_progress()


def conclude(adapted: Adapted, output: Path) -> None:
    """After a run: leave the other processes, print the summary and write the report."""
    from mtem import parallel

    parallel.stop()
    if liveness.is_first():
        print_summary(adapted.record, output)
        write_page(output)


def check_before_rehearsing(
    source: list[Path], target: list[Path], target_labeled: list[Path] | None, source_model: Path | None, output: Path,
    resume: bool, given: dict[str, Any], model: str, columns: dict[str, Any],
) -> None:  # fmt: skip
    """Refuse now what the run would refuse after the rehearsal."""
    from mtem import methods, models
    from mtem.rehearsal.trials import quiet_logging
    from mtem.run.adapt import load_corpora
    from mtem.run.directory import RunDirectory
    from mtem.run.result import Adapted

    for name in ("steps", "stop_epochs"):
        if name in given:
            raise RequestError(
                f"--set {name}={given[name]}: --rehearse chooses the number of passes; set epochs, their largest number"
            )
    RunDirectory(output).check_available(resume)
    if source_model is not None:
        Adapted.load(source_model)
    with quiet_logging():
        load_corpora(source, target, target_labeled, methods.get("source-only"), models.get_class(model), columns)


def rehearse_first(
    source: list[Path], method: str, output: Path, resume: bool, budget: float | None, progress: Progress, options: dict[str, Any]
) -> tuple[Path | None, str]:
    """Rehearse into the output folder; return the rehearsal's folder and the method, or none if the texts are too few."""
    from mtem.rehearsal.domains import NothingToRehearseError
    from mtem.rehearsal.plan import OWN
    from mtem.rehearsal.rehearse import rehearse
    from mtem.run.directory import REHEARSAL

    names = [*AUTO_METHODS] if method == "auto" else listed(method)
    folder = output / REHEARSAL
    options = {name: value for name, value in options.items() if name not in OWN}
    try:
        rehearsal = rehearse(
            source, method=names, output=folder, resume=resume, budget=budget, jobs=default_jobs(options),
            progress=progress, **options,
        )  # fmt: skip
    except NothingToRehearseError as error:
        progress.notice(f"no rehearsal, the documented defaults are used: {error}")
        return None, names[0]
    print_rehearsal(rehearsal, progress.console)
    return folder, "auto" if method == "auto" or len(names) > 1 else method


def write_page(output: Path) -> None:
    """Write the report. The run is complete without it."""
    from mtem.report.page import write_report

    try:
        out.print(Text(f"report: {write_report(output)}"))
    except OSError as error:
        out.print(Text(f"the report was not written ({error}); 'mtem report {output}' tries again", style="yellow"))


def print_summary(record: dict[str, Any], output: Path) -> None:
    """Print which weights were chosen, the accuracy estimate, and where the files are."""
    from mtem.selection.diagnostics import no_estimate

    choice = record["selection"]
    if choice["kept_source_model"]:
        summary = "the source model was kept" if record["steps"]["adapt"] else "source training only"
    else:
        by = "the last ones" if choice["criterion"] == "last" else f"chosen by {choice['criterion']}"
        summary = f"weights of step {choice['chosen_step']} of {record['steps']['adapt']}, {by}"
        if record.get("choices", {}).get("stop_epochs") == "rehearsal":
            settings = record["settings"]
            summary += f"; passes ({settings['stop_epochs']:g} of {settings['epochs']:g}) and learning rate as rehearsed"
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
