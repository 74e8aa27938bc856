"""`mtem rehearse`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtem.cli.console import Column, Encoder, Engine, Quiet, Seed, Settings, check_pool, logged_progress, out, parse_settings
from mtem.errors import RequestError

if TYPE_CHECKING:
    from mtem.selection.rehearsed import Rehearsal

BUDGET_HELP = "Minutes that the rehearsal may take: passes, learning rates and methods are cut until it fits."
JOBS_HELP = "Processes side by side; by default as many as the cores allow."


def rehearse(
    source: Annotated[list[Path], typer.Option(help="Labeled texts or threads, one file for each domain. May be given again.")],
    output: Annotated[Path, typer.Option(help="Folder for the rehearsal; it must not hold another one.")],
    method: Annotated[str, typer.Option(help="Methods to compare, separated by commas; see 'mtem methods'.")] = "mtem",
    model: Encoder = "minilm",
    preset: Annotated[str, typer.Option(help="'recommended' or 'paper'.")] = "recommended",
    metric: Annotated[
        str, typer.Option(help="What is compared: accuracy, macro-f1, or the F1 of a class, as f1:NAME.")
    ] = "accuracy",
    learning_rates: Annotated[
        str | None, typer.Option(help="Learning rates to compare, separated by commas; by default 1 and 2.5 times the default.")
    ] = None,
    class_priors: Annotated[
        str | None, typer.Option(help="Assumed class shares to compare (values of target_class_prior), separated by commas.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help=BUDGET_HELP)] = None,
    jobs: Annotated[int | None, typer.Option(help=JOBS_HELP)] = None,
    engine: Engine = "processes",
    set_: Settings = None,
    seed: Seed = None,
    text_column: Column = None,
    label_column: Column = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished rehearsal in --output.")] = False,
    quiet: Quiet = False,
) -> None:
    """See on your own source domains what adaptation is worth, and how.

    Each source domain stands for the target once: its labels are hidden, a model of the other domains is adapted to it, and then
    its labels tell what that was worth.

    **Examples**

    mtem rehearse --source books.csv --source dvd.csv --source kitchen.csv --method mtem,biat --output rehearsal/

    mtem adapt --source books.csv --source dvd.csv --source kitchen.csv --target toys.csv --method auto --rehearsal rehearsal/
    --output run/
    """
    given = parse_settings(set_)
    if seed is not None:
        given["seed"] = seed
    from mtem.rehearsal.rehearse import rehearse as run_rehearse

    refuse_options(given, run_rehearse, "rehearse")
    check_pool(engine)
    with logged_progress(quiet) as progress:
        rehearsal = run_rehearse(
            source, method=listed(method), model=model, preset=preset, metric=metric, learning_rates=numbers(learning_rates),
            class_priors=None if class_priors is None else listed(class_priors), budget=budget,
            jobs=default_jobs(given) if jobs is None else jobs, pool=engine, output=output, resume=resume,
            text_column=text_column, label_column=label_column, progress=progress, **given,
        )  # fmt: skip
    print_rehearsal(rehearsal, out)
    out.print(Text(f"record: {output / 'rehearsal.json'}   use it: mtem adapt ... --rehearsal {output}"))


def refuse_options(given: dict[str, Any], function: Any, command: str) -> None:
    """Refuse settings that are options of the command."""
    for name in given:
        if name in inspect.signature(function).parameters:
            option = f"'{name}' is an option, not a setting; see 'mtem {command} --help'"
            raise RequestError(f"--set {name}={given[name]}: {option}")


def listed(text: str) -> list[str]:
    """Return the parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str | None) -> list[float] | None:
    """Return the numbers of a comma-separated option."""
    if text is None:
        return None
    try:
        return [float(part) for part in listed(text)]
    except ValueError:
        raise RequestError(f"--learning-rates {text}: expected numbers separated by commas, as in 2e-5,5e-5") from None


def default_jobs(given: dict[str, Any]) -> int:
    """Return the number of processes: one for each two cores, at most four of them on one GPU."""
    from mtem.processes import cores
    from mtem.training.devices import find_device

    on_gpu = find_device(str(given.get("device", "auto"))).type != "cpu"
    return max(1, min(cores() // 2, 4 if on_gpu else cores()))


def print_rehearsal(rehearsal: Rehearsal, console: Console) -> None:
    """Print gains by domain and method, the recommendation and why."""
    record = rehearsal.record
    console.print(Text(f"gain in {record['metric']} by adaptation, in source domains that stood for the target", style="bold"))
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in record["rehearsed"]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for name in ("mean", "95 % interval", "rate", "passes", "prior"):
        table.add_column(name, justify="right", no_wrap=True)
    for method in rehearsal.methods:
        advice = rehearsal.advice(method)
        assert advice is not None
        settings = advice.settings
        if not advice.adapt:  # what adapting would have given
            own = [
                trial
                for trial in record["trials"]
                if trial["method"] == method and trial["after"] is not None and not trial["rare"]
            ]
            gains = {trial["domain"]: trial["last"] - trial["before"] for trial in own}
            cells = [f"{gains[name]:+.3f}" for name in record["rehearsed"]]
            mean = sum(gains.values()) / len(gains)
            rate = f"{settings['learning_rate']:g}"
            table.add_row(Text(method), *cells, f"{mean:+.3f}", "", rate, "none*", settings["target_class_prior"], style="dim")
            continue
        interval = "" if advice.low is None else f"{advice.low:+.3f} to {advice.high:+.3f}"
        passes = f"{settings['stop_epochs']:g} of {settings['epochs']:g}"
        table.add_row(
            Text(method), *(f"{advice.gains[name]:+.3f}" for name in record["rehearsed"]), f"{advice.mean:+.3f}", interval,
            f"{settings['learning_rate']:g}", passes, settings["target_class_prior"],
        )  # fmt: skip
    _print_whole(table, console)
    if not all((advice := rehearsal.advice(method)) is not None and advice.adapt for method in rehearsal.methods):
        console.print(Text("* adapting is not advised; the gains are those of the last pass", style="dim"))
    console.print()
    console.print(Text(f"mean {record['metric']} over these domains, of different weights", style="bold"))
    table = Table(box=None, pad_edge=False)
    for name in ("method", "before", "as advised", "last", "by infomax", "best by labels"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for method in rehearsal.methods:
        own = [trial for trial in record["trials"] if trial["method"] == method and trial["after"] is not None]
        means = (sum(trial[name] for trial in own) / len(own) for name in ("before", "after", "last", "by_infomax", "best"))
        table.add_row(Text(method), *(f"{value:.3f}" for value in means))
    _print_whole(table, console)
    console.print()
    best = rehearsal.advice(rehearsal.method)
    assert best is not None
    pairs = [
        f"{name} {best.accuracy_after[name] + error:.3f} ({best.accuracy_after[name]:.3f})"
        for name, error in best.errors_after.items()
    ]
    if pairs:
        estimated = f"accuracy of {rehearsal.method}, estimated without labels (true): {', '.join(pairs)}"
        console.print(Text(estimated, style="dim"))
    for note in record["notes"]:
        console.print(Text(note, style="yellow"))
    console.print(Text(f"recommended: {rehearsal.method}. {rehearsal.why}.", style="bold"))


def _print_whole(table: Table, console: Console) -> None:
    """Print a table; in a narrow console its lines are wrapped, and nothing is cut off."""
    table.width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.print(table, crop=False)
