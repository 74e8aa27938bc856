"""`mtem report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtem.cli.console import out


def report(
    run: Annotated[list[Path], typer.Argument(help="A run's folder, finished or not; that of a rehearsal; or several runs.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The file; without it report.html in the folder, of several runs comparison.html here."),
    ] = None,
) -> None:
    """Write the page that shows what happened in a run.

    One HTML file that opens without a network. Of several runs it is a comparison.

    **Examples**

    mtem report run/

    mtem report run-1/ run-2/ --output comparison.html
    """
    from mtem.report.page import write_report

    out.print(str(write_report(run, output)), markup=False, highlight=False, soft_wrap=True)
