"""The command line: parse, call, print. What a command does is in the library."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtem.errors import DiskFullError, RequestError, RunError
from mtem.progress import Progress
from mtem_paper.command import reproduce
from mtem_paper.cost_command import cost

app = typer.Typer(
    name="mtem",
    help="Adapt a text classifier to a domain where nobody has labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Prepare data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.command()(reproduce)
app.command("cost")(cost)

out = Console(soft_wrap=True, highlight=False)
INTERRUPTED = 130  # what typer makes of Ctrl-C
GOING_ON = {
    "adapt": "; the same command with --resume goes on",
    "demo": "; the same command goes on from here",
    "reproduce": "; the same command goes on from here",
}

Column = Annotated[str | None, typer.Option(help="Name of the column; the usual names are found without it.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        out.print(f"mtem {version('mtem')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Adapt a text classifier to a domain where nobody has labels."""


@app.command()
def adapt(
    source: Annotated[
        list[Path], typer.Option(help="Labeled texts or threads (csv, tsv, jsonl, parquet; .gz too). May be given again.")
    ],
    target: Annotated[list[Path], typer.Option(help="Unlabeled texts or threads of the new domain. May be given again.")],
    output: Annotated[Path, typer.Option(help="Folder for the run; it must not hold another one.")],
    target_labeled: Annotated[list[Path] | None, typer.Option(help="A few labeled ones of the new domain.")] = None,
    model: Annotated[
        str, typer.Option(help="Encoder: 'minilm', a directory, or a Hugging Face name; or 'bigcn' for reply trees.")
    ] = "minilm",
    features: Annotated[
        str | None, typer.Option(help="With --model bigcn, what a post is to it: tfidf, vectors, encoder.")
    ] = None,
    method: Annotated[str, typer.Option(help="One of those that 'mtem methods' lists.")] = "mtem",
    source_model: Annotated[
        Path | None, typer.Option(help="The folder of another run, whose model before its adaptation is taken as it is.")
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only warnings and the result.")] = False,
) -> None:
    """Train on labeled texts of old domains, adapt to unlabeled texts of a new one.

    **Examples**

    mtem adapt --source books.csv --source dvd.csv --target kitchen.csv --output run/

    mtem adapt --source books.csv --target kitchen.csv --target-labeled few.csv --set epochs=3 --output run/

    mtem adapt --source books.csv --target kitchen.csv --output run/ --resume

    mtem adapt --source charliehebdo.jsonl --source ottawashooting.jsonl --target ferguson.jsonl --model bigcn --output run/
    """
    given = _settings(set_)
    for name, value in (("engine", engine), ("features", features)):
        if value is not None:
            given[name] = value
    if features is not None and model != "bigcn":
        raise RequestError(f"--features {features}: only --model bigcn has features of posts")
    if seed is not None:
        given["seed"] = seed
    from mtem.run.adapt import adapt as run

    for name in given:
        if name in inspect.signature(run).parameters:
            raise RequestError(f"--set {name}={given[name]}: '{name}' is no setting; see 'mtem adapt --help' for the options")
    adapted = run(
        source, target, target_labeled=target_labeled or None,
        model=model, method=method, preset=preset, source_model=source_model, output=output, resume=resume,
        text_column=text_column, label_column=label_column, progress=Progress(quiet=quiet), **given,
    )  # fmt: skip
    _summary(adapted.record, output)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[Path, typer.Argument(help="Texts or threads: csv, tsv, jsonl or parquet, .gz too.")],
    output: Annotated[Path, typer.Option(help="Where to write; the ending gives the format.")],
    text_column: Column = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add one column per class.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Add a prediction and its confidence to every row of a file, of any size; all columns are kept.

    **Example**

    mtem predict run/ new.csv --output predictions.csv
    """
    from mtem import inference

    adapted = _load(run, device)
    progress = Progress(quiet=quiet)
    with progress.stage("predicting", None):
        done = inference.predict_file(
            adapted.model, file, output, text_column=text_column, all_probabilities=probabilities, progress=progress
        )
    counts = ", ".join(f"{name} {count}" for name, count in done.counts.items())
    out.print(f"{output}: {done.rows} rows ({counts})", markup=False)
    if done.empty:
        rows = "1 row has" if done.empty == 1 else f"{done.empty} rows have"
        out.print(f"{rows} no text and no prediction", style="yellow", markup=False)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[Path, typer.Argument(help="Labeled texts or threads.")],
    compare: Annotated[bool, typer.Option("--compare", help="Also the model before the adaptation.")] = False,
    text_column: Column = None,
    label_column: Column = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "auto",
) -> None:
    """Accuracy, macro-F1, figures per class and a confusion matrix on labeled texts.

    **Example**

    mtem evaluate run/ labeled.csv --compare
    """
    from mtem import inference, metrics
    from mtem.data.loading import load_corpus

    adapted = _load(run, device)
    corpus = load_corpus(str(file), labeled=True, text_column=text_column, label_column=label_column)
    labels = corpus.label_numbers(adapted.classes)
    progress = Progress()
    for line in corpus.notices:
        progress.notice(line)
    models = {"after": adapted.model}
    if compare:
        before = adapted.source_model()
        if before is None:
            raise RequestError(f"{run}: the model before the adaptation was not kept, so there is nothing to --compare with")
        before.precision = adapted.model.precision
        models = {"before": before.to(adapted.model.device), **models}
    found = {}
    for name, model in models.items():
        tokens = model.encode(corpus)
        with progress.stage(f"evaluating ({name} adaptation)" if compare else "evaluating", len(tokens)):
            scores = inference.compute_logits(model, tokens, progress=progress).logits
        found[name] = metrics.evaluate(labels, scores.argmax(axis=1), adapted.classes, inference.probabilities(scores))
    if as_json:
        result = {name: value.to_dict() for name, value in found.items()}
        out.print_json(json.dumps(result if compare else result["after"]))
        return
    for name, value in found.items():
        if compare:
            out.print(Text(f"{name} the adaptation", style="bold"))
        metrics.render(value, out, corpus.unit)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the run.")] = Path("demo-run"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Adapt on the bundled Amazon sample (CPU, a few minutes) and show what came of it.

    **Example**

    mtem demo --output demo-run/
    """
    from mtem.cli import demo as shown

    shown.run(output, out, Progress(quiet=quiet))


@app.command("methods")
def list_methods() -> None:
    """What can be given to --method, with the paper it is from and whether it needs labeled target texts.

    **Example**

    mtem methods
    """
    from mtem import methods

    table = Table("method", "what it does", "paper", "target labels", box=None, header_style="bold")
    for name in methods.METHODS:
        kind = methods.get(name)
        table.add_row(name, kind.summary, kind.paper, "needed" if kind.needs_target_labels else "optional")
    out.print(table)


@app.command("settings")
def list_settings(method: Annotated[str, typer.Argument(help="Whose settings.")] = "mtem") -> None:
    """What can be given to --set, with defaults and meanings; the paper preset's values beside them.

    **Example**

    mtem settings mtem
    """
    from mtem import methods, models, settings
    from mtem.training.settings import TrainingSettings

    kind = methods.get(method)
    trees = models.get_class(models.BIGCN)
    for title, fields in (
        (f"settings of {method}", kind.Settings),
        ("settings of every method", TrainingSettings),
        ("settings of --model bigcn", trees.Settings),
    ):
        rows = settings.describe(fields)
        if not rows:
            continue
        table = Table("setting", "default", "paper", "meaning", title=title, title_justify="left", box=None, header_style="bold")
        for name, default, meaning in rows:
            recommended, paper = kind.presets["recommended"], kind.presets.get("paper", {})
            shown = str(recommended.get(name, default))
            table.add_row(name, shown, str(paper[name]) if name in paper and str(paper[name]) != shown else "", Text(meaning))
        out.print(table)
    others = ", ".join(f"{name} = {value}" for name, value in trees.defaults.items())
    out.print(f"with --model bigcn the default is {others}", markup=False)


@data_app.command()
def prepare(
    dataset: Annotated[str, typer.Argument(help="amazon (reviews) or pheme (threads of tweets)")],
    from_: Annotated[Path, typer.Option("--from", help="The original archive or folder, or the JSON-lines form.")],
    to: Annotated[Path, typer.Option(help="Folder to write to.")],
) -> None:
    """Turn a published data set into files that the other commands read.

    **Examples**

    mtem data prepare amazon --from domain_sentiment_data.tar.gz --to amazon/

    mtem data prepare pheme --from PHEME_veracity.tar.bz2 --to pheme/
    """
    from mtem.datasets import amazon, pheme

    datasets = {"amazon": amazon.prepare, "pheme": pheme.prepare}
    if dataset not in datasets:
        raise RequestError(f"unknown data set '{dataset}': there are {' and '.join(datasets)}")
    for line in datasets[dataset](from_, to):
        out.print(line, markup=False)


# ---------------------------------------------------------------------- printing


def _summary(record: dict[str, Any], output: Path) -> None:
    from mtem.run.model_card import withheld

    choice = record["selection"]
    if choice["kept_source_model"]:
        kept = "the source model was kept" if record["steps"]["adapt"] else "source training only"
    else:
        kept = f"weights of step {choice['chosen_step']} of {record['steps']['adapt']}, chosen by {choice['criterion']}"
    out.print(Text(kept))
    estimates = record.get("estimate") or {}
    if not any(estimates.get(name) for name in ("before", "after")):
        out.print(Text(withheld(record), style="yellow"))
    else:
        after = estimates.get("after") or {}
        whence = "from its labeled texts" if str(after.get("method")).startswith("labeled") else "without labels"
        out.print(f"estimated accuracy on the target, {whence} (95 % interval):")
        for name in ("before", "after"):
            value = estimates.get(name)
            told = "withheld" if value is None else f"{value['accuracy']:.3f}  ({value['low']:.3f} to {value['high']:.3f})"
            out.print(f"  {name:<7}{told}")
        for note in after.get("notes", ()):
            out.print(Text(f"  {note}"))
    what = f"{record.get('unit', 'texts')} and indexes"
    out.print(Text(f"model: {output / 'model'}   record: {output / 'run.json'}   {what}: {output / 'indexes.parquet'}"))


def _settings(given: list[str] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in given or []:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise RequestError(f"--set {item}: KEY=VALUE is wanted, as in --set epochs=3")
        values[name.strip().replace("-", "_")] = value.strip()
    return values


def _load(run: Path, device: str) -> Any:
    from mtem.run.result import Adapted
    from mtem.training.devices import find_device, find_precision

    adapted = Adapted.load(run)
    place = find_device(device)
    adapted.model.to(place)
    adapted.model.precision = find_precision("auto", place)
    return adapted


def main() -> None:
    """Errors in one line: exit code 2 for a wrong request, 1 for a run that failed, 130 for one that was interrupted."""
    try:
        app()
    except RequestError as error:
        _fail(str(error), 2)
    except RunError as error:
        resume = (
            isinstance(error, DiskFullError) and _command() == "adapt"
        )  # the others have no such option: running again is enough
        _fail(str(error) + (" with --resume" if resume else ""), 1)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _fail("interrupted" + GOING_ON.get(_command(), ""), INTERRUPTED)
        raise


def _command() -> str:
    return next(iter(sys.argv[1:]), "")


def _fail(message: str, code: int) -> NoReturn:
    line = Text(f"mtem: {' '.join(message.splitlines())}", style="red")
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    sys.exit(code)


if __name__ == "__main__":
    main()
