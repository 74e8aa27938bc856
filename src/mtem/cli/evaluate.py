"""`mtem evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mtem.cli.console import Column, Device, load_run, logged_progress, out
from mtem.errors import RequestError


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

    Prints figures per class and a confusion matrix too.

    **Example**

    mtem evaluate run/ labeled.csv --compare
    """
    from mtem import inference, metrics
    from mtem.cli.tables import print_metrics
    from mtem.data.loading import load_corpus

    adapted = load_run(run, device)
    corpus = load_corpus(str(file), labeled=True, text_column=text_column, label_column=label_column)
    labels = corpus.label_numbers(adapted.classes)
    models = {"after": adapted.model}
    if compare:
        before = adapted.source_model()
        if before is None:
            raise RequestError(f"{run}: the model before the adaptation was not kept, so --compare is not possible")
        before.precision = adapted.model.precision
        models = {"before": before.to(adapted.model.device), **models}
    results = {}
    with logged_progress() as progress:
        for line in corpus.notices:
            progress.notice(line)
        for name, model in models.items():
            tokens = model.encode(corpus)
            with progress.stage(f"evaluating ({name} adaptation)" if compare else "evaluating", len(tokens)):
                logits = inference.compute_logits(model, tokens, progress=progress).logits
            probabilities = inference.probabilities(logits)
            results[name] = metrics.evaluate(labels, logits.argmax(axis=1), adapted.classes, probabilities)
    if as_json:
        values = {name: result.to_dict() for name, result in results.items()}
        out.print_json(json.dumps(values if compare else values["after"]))
        return
    for name, result in results.items():
        if compare:
            out.print(Text(f"{name} the adaptation", style="bold"))
        print_metrics(result, out, corpus.unit)
