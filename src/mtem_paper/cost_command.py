"""`mtem cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtem.cli.console import out
from mtem.errors import RequestError
from mtem.progress import Progress


def cost(
    model: Annotated[str, typer.Option(help="An encoder, or the shape 'bert-base' or 'minilm' with random weights.")] = "minilm",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "50",
    length: Annotated[int, typer.Option(help="Tokens of every text.")] = 128,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Some of the rows, with semicolons; all without it: plain; layerwise (the engine that 'mtem adapt' takes unless "
            "told otherwise); layerwise, pieces 2; layerwise, v at theta; forward; taylor; second-order."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or auto.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    repeats: Annotated[int, typer.Option(help="Steps timed; the median counts.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows there.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw time and memory against the batch size there (.svg).")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, texts and labels.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure time, memory and error of a step with each gradient engine.

    A plain fine-tuning step of the same batch is measured beside them.

    **Examples**

    mtem cost --model bert-base --length 256 --device cuda --json cost.json

    mtem cost --batch 10,20,30,40,50,60 --engines 'plain;layerwise;taylor;second-order' --figure cost.svg
    """
    from mtem.atomic import atomic_write, write_json
    from mtem.training.devices import find_device, find_precision
    from mtem_paper import cost as costs
    from mtem_paper.figures import cost_figure

    place = find_device(device)
    exact = find_precision(precision, place)
    named = {None: "fp32"}.get(exact) or {"bfloat16": "bf16", "float16": "fp16"}[str(exact).removeprefix("torch.")]
    wanted = tuple(part.strip() for part in engines.split(";")) if engines else costs.ENGINES
    unknown = [name for name in wanted if name not in costs.ENGINES]
    if unknown:
        raise RequestError(f"--engines {unknown[0]}: there are {'; '.join(costs.ENGINES)}")
    wanted = ("plain", *(name for name in wanted if name != "plain"))  # what all others are measured against
    try:
        sizes = [int(size) for size in batch.split(",")]
    except ValueError:
        raise RequestError(f"--batch {batch}: whole numbers with commas are wanted, as in 10,20,30") from None
    if min(sizes) < 2 or length < 4 or repeats < 1:
        raise RequestError("--batch must be at least 2, --length 4 and --repeats 1")
    shared = {"model": model, "device": str(place), "precision": named, "attention": attention, "repeats": repeats, "seed": seed}
    keep = (lambda rows: write_json(json_file, rows)) if json_file is not None else (lambda rows: None)
    rows = costs.measure(list(costs.cases(wanted, sizes, [length], **shared)), Progress(quiet=quiet), keep)
    if figure is not None:
        with atomic_write(figure) as stream:
            stream.write(cost_figure(rows).encode())
    costs.render(rows, out)
