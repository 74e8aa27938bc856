"""The command `mtem reproduce`: the paper's experiments. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtem.cli.console import Engine, check_pool, out, parse_settings
from mtem.errors import RequestError
from mtem.progress import Progress

if TYPE_CHECKING:
    from mtem_paper.cells import Cell

RUNS = ("general", "ablation", "batch-size")
SHOWN = ("cost", "entropy", "trajectories", "page")
REHEARSAL = "rehearsal"
WHAT = (*RUNS, *SHOWN, REHEARSAL, "theory", "cases", "all")


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(WHAT)}.", show_default=False)],
    dataset: Annotated[str, typer.Option(help="amazon or pheme.")] = "amazon",
    model: Annotated[
        str | None, typer.Option(help="As for 'mtem adapt'; without it minilm for amazon, bigcn for pheme.", show_default=False)
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="What the results call the model, if --model is a directory.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder that 'mtem data prepare' has written.")] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results, one file for each cell.")] = Path("results"),
    docs: Annotated[Path, typer.Option(help="Where the page of results is written.")] = Path("docs"),
    seeds: Annotated[
        str | None, typer.Option(help="With commas; without it the plan's: three for amazon, five for pheme.", show_default=False)
    ] = None,
    targets: Annotated[str | None, typer.Option(help="Some of the target domains, with commas; all without it.")] = None,
    settings: Annotated[str | None, typer.Option(help="unsupervised, semi-supervised or both, with a comma.")] = None,
    pools: Annotated[str | None, typer.Option(help="amazon: which unlabeled reviews: mixed, natural, or both.")] = None,
    variants: Annotated[str | None, typer.Option(help="Rows of the table, with commas; a method of your own as NAME.py.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    engine: Engine = "processes",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    limit_seconds: Annotated[float | None, typer.Option(help="Start no cell after this many seconds.", min=0)] = None,
    list_: Annotated[bool, typer.Option("--list", help="List which cells exist and which are missing; run nothing.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For a rehearsal, which never counts as a result.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the summary.")] = False,
) -> None:
    """Repeat the paper's experiments, run by run.

    Runs that have a result already are not run again.

    **Examples**

    mtem reproduce general --dataset pheme --data pheme/ --jobs 4

    mtem reproduce general --dataset amazon --data amazon/ --targets kitchen --seeds 0 --list

    mtem reproduce page
    """
    if what not in WHAT:
        raise RequestError(f"unknown experiment '{what}': expected one of {', '.join(WHAT)}")
    if set_ and what not in (*RUNS, REHEARSAL):
        raise RequestError(f"--set: {what} cannot be tried with other settings, only {', '.join((*RUNS, REHEARSAL))}")
    check_pool(engine)
    from mtem_paper import protocol

    if dataset not in protocol.DATASETS:
        raise RequestError(f"--dataset: unknown data set '{dataset}', expected {' or '.join(protocol.DATASETS)}")
    if what in (*SHOWN, "all"):
        from mtem_paper.figures import require_matplotlib

        require_matplotlib()
    progress = Progress(quiet=quiet)
    failed = False
    model = model or protocol.DATASETS[dataset].default_model
    if what in (*RUNS, "all"):
        from mtem_paper import rehearsed_settings

        name, overrides = protocol.model_name(model, model_name), parse_settings(set_)

        def plan(rehearsed: rehearsed_settings.Choices | None) -> list[Cell]:
            return protocol.plan(
                [name for name in RUNS if what in (name, "all")], dataset, model, name,
                seeds=None if seeds is None else numbers(seeds), targets=listed(targets), settings_=listed(settings),
                pools=listed(pools), variants=listed(variants), overrides=overrides, rehearsed=rehearsed,
            )  # fmt: skip

        cells = plan(None)
        if not cells:
            raise RequestError(f"{what}: nothing to run for {dataset} with these options")
        if not list_:
            needed(data, dataset)
            check_model(model, device)
        rehearsed = rehearsed_settings.choices(results, dataset, name)
        if not overrides and (rehearsed or not list_):
            cells = plan(rehearsed)
        if list_:
            show(results, cells)
            return
        failed = run(cells, results, needed(data, dataset), model, device, jobs, limit_seconds, progress, engine)
    if what == REHEARSAL:
        failed = rehearse(
            dataset, model, protocol.model_name(model, model_name), results, data, listed(targets), listed(variants),
            None if seeds is None else numbers(seeds), parse_settings(set_), device, jobs, limit_seconds, list_, progress, engine,
        )  # fmt: skip
    reviews = what == "all" and dataset == "amazon"  # theory and cases are made from them
    if what == "theory" or (reviews and not (results / "theory" / "convergence.json").exists()):
        from mtem_paper import theory

        theory.reproduce(needed(data, "amazon"), results, seeds=numbers(seeds or "0,1,2"), progress=progress)
    if what == "cases" or reviews:
        from mtem_paper import cases

        name = protocol.model_name(model, model_name)
        cases.reproduce(needed(data, "amazon"), results, model=model, name=name, device=device, progress=progress)
    if what in (*SHOWN, "all"):
        from mtem_paper import page

        page.write(results, docs, progress)
    if failed:
        raise typer.Exit(1)


def check_model(model: str, device: str) -> None:
    """Refuse a model or a device that there is not."""
    from mtem import models
    from mtem.run.adapt import find_settings
    from mtem.training.devices import find_device

    find_device(device)
    models.find(model, find_settings(model, "source-only", "recommended", {}).model)


def run(
    cells: list[Cell],
    results: Path,
    data: Path,
    model: str,
    device: str,
    jobs: int,
    limit: float | None,
    progress: Progress,
    engine: str = "processes",
) -> bool:
    """Run the missing cells, print a summary, and return whether any failed."""
    from mtem_paper import runner, splits

    for target, pool in dict.fromkeys((cell.target, cell.pool) for cell in cells):
        splits.read(cells[0].dataset, data, target, pool)
    try:
        summary = runner.run(
            cells, results, data=data, model=model, device=device, jobs=jobs, pool=engine, limit=limit,
            progress=progress,
        )  # fmt: skip
    except KeyboardInterrupt:
        out.print(
            f"stopped; {len(cells) - len(runner.missing(results, cells))} of {len(cells)} cells are in {results}", markup=False
        )
        raise
    line = f"{summary.done} cells run, {summary.existed} existed, {len(summary.failed)} failed, {summary.left} not started"
    out.print(f"{results}: {line}", markup=False)
    for cell, reason in summary.failed:
        out.print(f"failed: {cell}: {reason}", style="red", markup=False)
    return bool(summary.failed)


def rehearse(
    dataset: str, model: str, name: str, results: Path, data: Path | None, targets: list[str] | None,
    methods: list[str] | None, seeds: list[int] | None, overrides: dict[str, str], device: str, jobs: int,
    limit: float | None, list_: bool, progress: Progress, engine: str = "processes",
) -> bool:  # fmt: skip
    """Run the missing trials of rehearsals, print a summary, and return whether any failed."""
    from mtem.rehearsal.trials import Trial
    from mtem_paper import rehearsal_tables, rehearsals

    tasks = rehearsals.plan(dataset, name, targets=targets, methods=methods, seeds=seeds, overrides=overrides)
    trials = [task for task in tasks if isinstance(task.work, Trial)]
    if not trials:
        raise RequestError(f"{REHEARSAL}: nothing to run for {dataset} with these options")
    if list_:
        missing = set(rehearsals.missing(trials, results))
        for task in trials:
            out.print(f"{'missing' if task in missing else 'exists '} {task.address}", markup=False)
        out.print(f"{len(trials) - len(missing)} of {len(trials)} trials exist", markup=False)
        return False
    check_model(model, device)
    rehearser = rehearsals.Rehearser(needed(data, dataset), model, device, results)
    summary = rehearsals.run(tasks, rehearser, jobs=jobs, pool=engine, limit=limit, progress=progress)
    if not overrides and (results / rehearsals.OUTPUTS).is_dir():
        rehearsal_tables.measure_calibration(results, results / rehearsals.OUTPUTS)
    line = f"{summary.done} trials run, {summary.existed} existed, {len(summary.failed)} failed, {summary.left} not started"
    out.print(f"{results}: {line}", markup=False)
    for task, reason in summary.failed:
        out.print(f"failed: {task.address}: {reason}", style="red", markup=False)
    return bool(summary.failed)


def show(results: Path, cells: list[Cell]) -> None:
    """List which cells exist and which are missing."""
    existing = 0
    for cell in cells:
        exists = (results / cell.address).is_file()
        existing += exists
        out.print(f"{'exists ' if exists else 'missing'} {cell.address}", markup=False)
    out.print(f"{existing} of {len(cells)} cells exist", markup=False)


def needed(data: Path | None, dataset: str) -> Path:
    """Return the folder of the data.

    Raises
    ------
    RequestError
        If it was not given.
    """
    if data is None:
        raise RequestError(
            f"--data is missing: get the {dataset} data, turn it into files with 'mtem data prepare {dataset} --from PATH --to "
            "FOLDER', and give that FOLDER"
        )
    return data


def listed(text: str | None) -> list[str] | None:
    """Return the parts between commas, or None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """Return the whole numbers between commas.

    Raises
    ------
    RequestError
        If a part is not a whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--seeds {text}: expected whole numbers with commas, as in 0,1,2") from None
