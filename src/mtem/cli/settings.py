"""`mtem settings`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from mtem.cli.console import out


def settings(method: Annotated[str, typer.Argument(help="Method whose settings are listed.")] = "mtem") -> None:
    """List what can be given to --set, with defaults and meanings.

    The values of the preset 'paper' are shown where they differ.

    **Example**

    mtem settings mtem
    """
    from mtem import methods, models
    from mtem.run import defaults
    from mtem.training.settings import TrainingSettings

    method_cls = methods.get(method)
    model_classes = {name: models.get_class(name) for name in models.names()}
    presets = method_cls.presets
    paper = {**defaults.ON_CPU, **presets[defaults.PAPER]} if defaults.PAPER in presets else {}
    for title, fields in (
        (f"settings of {method}", method_cls.Settings),
        ("settings of every method", TrainingSettings),
        *((f"settings of --model {name}", model_cls.Settings) for name, model_cls in model_classes.items()),
    ):
        print_settings(title, fields, presets["recommended"], paper)
    for name, model_cls in model_classes.items():
        own = ", ".join(f"{key} = {value}" for key, value in model_cls.defaults.items())
        out.print(f"with --model {name} the default is {own}", markup=False)


def print_settings(title: str, fields: type, recommended: dict[str, Any], paper: dict[str, Any]) -> None:
    """Print one table of settings, unless it is empty."""
    from mtem.settings import describe

    rows = describe(fields)
    if not rows:
        return
    table = Table("setting", "default", "paper", "meaning", title=title, title_justify="left", box=None, header_style="bold")
    for name, default, meaning in rows:
        shown = str(recommended.get(name, default))
        table.add_row(name, shown, str(paper[name]) if name in paper and str(paper[name]) != shown else "", Text(meaning))
    out.print(table)
