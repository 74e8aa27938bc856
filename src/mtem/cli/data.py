"""`mtem data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtem.cli.console import out

app = typer.Typer(help="Prepare data sets.", no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def options() -> None:
    """Prepare data sets."""


@app.command()
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
    from mtem.datasets import registry

    for line in registry.get(dataset).prepare(from_, to):
        out.print(line, markup=False)
