"""What the commands share: the console, log messages on it, and options that several have."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtem import interrupts
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem.terminal import Terminal

if TYPE_CHECKING:
    from mtem.run.result import Adapted

out = Terminal()

Column = Annotated[str | None, typer.Option(help="Name of the column; the usual names are found without it.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")]
Encoder = Annotated[str, typer.Option(help="Encoder: 'minilm', a directory, or a Hugging Face name; or 'bigcn' for reply trees.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same machine: same result.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; see 'mtem settings'.")]
Engine = Annotated[
    str,
    typer.Option(help="Where tasks run: 'processes' of this machine, or a 'ray' cluster (extra mtem[ray]), local by default."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only warnings and the result.")]


class ToldExit(SystemExit):
    """The end of a command whose other processes have told why."""


class _ProgressHandler(logging.Handler):
    """Prints log messages above the progress bar: warnings always, other messages unless quiet."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        (self.progress.notice if record.levelno >= logging.WARNING else self.progress.say)(record.getMessage())


@contextlib.contextmanager
def logged_progress(quiet: bool = False) -> Iterator[Progress]:
    """Show progress and the library's log messages on standard error."""
    interrupts.unwind()
    progress = Progress(quiet=quiet)
    root, handler = logging.getLogger("mtem"), _ProgressHandler(progress)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield progress
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@contextlib.contextmanager
def no_progress() -> Iterator[Progress]:
    """Show nothing: another process of the run does."""
    from mtem.rehearsal.trials import quiet_logging

    with quiet_logging():
        yield Progress(quiet=True)


def parse_settings(options: list[str] | None) -> dict[str, Any]:
    """Return the settings of ``--set KEY=VALUE`` options."""
    values: dict[str, Any] = {}
    for item in options or []:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise RequestError(f"--set {item}: expected KEY=VALUE, as in --set epochs=3")
        values[name.strip().replace("-", "_")] = value.strip()
    return values


def load_run(run: Path, device: str) -> Adapted:
    """Read a run and put its model on a device."""
    from mtem.run import prediction

    return prediction.load_run(run, device)


def check_pool(engine: str) -> None:
    """Refuse a value of ``--engine`` that is no place to run tasks at, and Ray where it is not installed."""
    from mtem.processes import POOLS, RAY

    if engine not in POOLS:
        raise RequestError(
            f"--engine {engine}: expected {' or '.join(POOLS)} (the engine of the index gradient is a setting: --set engine=...)"
        )
    if engine == RAY:
        from mtem.ray_pool import require_ray

        require_ray()
