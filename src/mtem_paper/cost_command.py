"""The command `mtem cost`: parse, measure, print. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
            help="Some of the rows, with semicolons; all without it: plain; layerwise (the default engine of 'mtem adapt'); "
            "layerwise, 2 microbatches; layerwise, v at theta; forward; taylor; second-order."
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="The setting microbatches of every step but the first plain one.")] = 1,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="The setting activation_checkpointing of these steps.")
    ] = False,
    graphs: Annotated[bool, typer.Option(help="On a GPU, replay steps as CUDA graphs, as runs do.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or auto.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    repeats: Annotated[int, typer.Option(help="Number of timed steps; the median counts.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw time and memory against the batch size (.svg).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, texts and labels.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure time, memory and error of a step with each gradient engine.

    A plain fine-tuning step of the same batch is measured beside them.

    **Examples**

    mtem cost --model bert-base --length 256 --device cuda --json cost.json

    mtem cost --model bert-base --length 512 --engines 'plain;layerwise' --microbatches 5 --activation-checkpointing

    mtem cost --batch 10,20,30,40,50,60 --engines 'plain;layerwise;taylor;second-order' --figure cost.svg
    """
    from mtem.atomic import atomic_write, write_json
    from mtem.training.devices import find_device, find_precision
    from mtem_paper import cost as measurements
    from mtem_paper import figures

    if figure is not None:
        figures.require_matplotlib()
    chosen = find_device(device)
    dtype = find_precision(precision, chosen)
    name = {"None": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(dtype)]
    requested = tuple(part.strip() for part in engines.split(";")) if engines else measurements.ENGINES
    unknown = [engine for engine in requested if engine not in measurements.ENGINES]
    if unknown:
        raise RequestError(f"--engines {unknown[0]}: expected some of {'; '.join(measurements.ENGINES)}")
    requested = ("plain", *(engine for engine in requested if engine != "plain"))  # the others are measured against it
    try:
        sizes = [int(size) for size in batch.split(",")]
    except ValueError:
        raise RequestError(f"--batch {batch}: expected whole numbers with commas, as in 10,20,30") from None
    if min(sizes) < 2 or length < 4 or repeats < 1 or microbatches < 1:
        raise RequestError("--batch must be at least 2, --length 4, --repeats 1 and --microbatches 1")
    shared: dict[str, Any] = {
        "model": model, "device": str(chosen), "precision": name, "attention": attention, "repeats": repeats, "seed": seed,
        "microbatches": microbatches, "activation_checkpointing": activation_checkpointing,
        "graphs": graphs and chosen.type == "cuda",
    }  # fmt: skip
    save = (lambda rows: write_json(json_file, rows)) if json_file is not None else (lambda rows: None)
    rows = measurements.measure(list(measurements.cases(requested, sizes, [length], **shared)), Progress(quiet=quiet), save)
    if figure is not None:
        with atomic_write(figure) as stream:
            stream.write(figures.cost_figure(rows).encode())
    measurements.render(rows, out)
