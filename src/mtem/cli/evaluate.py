"""`mtem evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mtem.cli.console import Column, Device, load_run, logged_progress, out


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[Path, typer.Argument(help="Labeled texts or threads.")],
    compare: Annotated[bool, typer.Option("--compare", help="Also the model before the adaptation, as trained.")] = False,
    text_column: Column = None,
    label_column: Column = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Measure accuracy, macro-F1 and more on labeled texts.

    Prints figures per class and a confusion matrix too. 'mtem report' shows what was measured last.

    **Example**

    mtem evaluate run/ labeled.csv --compare
    """
    from mtem.cli.tables import print_metrics
    from mtem.data.loading import load_corpus
    from mtem.run import evaluation

    adapted = load_run(run, device)
    corpus = load_corpus(str(file), labeled=True, text_column=text_column, label_column=label_column)
    with logged_progress() as progress:
        for line in corpus.notices:
            progress.notice(line)
        results = evaluation.evaluate(adapted, corpus, compare=compare, progress=progress)
    if as_json:
        values = {name: result.to_dict() for name, result in results.items()}
        out.print_json(json.dumps(values if compare else values["after"]))
        return
    for name, result in results.items():
        if compare:
            out.print(Text(f"{name} the adaptation", style="bold"))
        print_metrics(result, out, corpus.unit)
