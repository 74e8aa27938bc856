"""Progress of long computations: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from mtem.terminal import Terminal, visible


class _Bar(Bar):
    """A bar with the figures, and the time left of the whole run, on separate lines: 80 columns are too few for all."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            for name in ("figures", "run"):
                if task.fields[name]:
                    yield Text(task.fields[name], style="dim")


class Outlook(Protocol):
    """What knows the stages of a whole run: it is told of their progress, and says how much time is left."""

    def begin(self, name: str) -> None:
        """Begin a stage."""

    def advance(self, done: int) -> None:
        """Take note that so many units of the stage are done."""

    def end(self) -> None:
        """End the stage."""

    def left(self) -> float | None:
        """Return the seconds that are left of the run; None if they are not known."""


class Progress:
    """Report the progress of a computation on a console.

    On a terminal each stage is a bar; elsewhere it is a line every ten seconds at most.

    Parameters
    ----------
    console : rich.console.Console, optional
        Standard error by default.
    quiet : bool
        Whether to print nothing but notices.

    Attributes
    ----------
    outlook : Outlook or None
        Of the run that the stages belong to, if it has one: then the time left of the whole run is shown too.
    """

    outlook: Outlook | None = None

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Terminal(stderr=True)
        self.quiet = quiet
        self._bar: _Bar | None = None
        self._task: TaskID | None = None
        self._stage, self._started, self._printed, self._tenth = "", 0.0, 0.0, 0
        self._total: int | None = None

    def say(self, text: str) -> None:
        """Print one line of information."""
        if not self.quiet:
            self._line(text)

    def notice(self, text: str) -> None:
        """Print one line that the user should not miss."""
        self._line(text, style="yellow")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(Text(visible(text), style=style), soft_wrap=not self.console.is_terminal, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Progress]:
        """Report the block as one stage.

        Parameters
        ----------
        name : str
            Shown beside the bar.
        total : int or None
            Number of units of work, None if unknown.
        """
        self._stage, self._total, self._started, self._tenth = name, total, time.monotonic(), 0
        if self.outlook is not None:
            self.outlook.begin(name)
        with self._shown(name, total):
            yield self
        if self.outlook is not None:
            self.outlook.end()

    @contextmanager
    def _shown(self, name: str, total: int | None) -> Iterator[None]:
        if self.console.is_terminal and not self.quiet:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            with _Bar(*columns, console=self.console) as self._bar:
                self._task = self._bar.add_task(name, total=total, figures="", run="")
                try:
                    yield
                finally:
                    self._bar = None
        else:
            yield

    def advance(self, done: int, figures: Mapping[str, float] | None = None) -> None:
        """Report that `done` units of the stage are done, and optionally some figures."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in (figures or {}).items())
        if self.outlook is not None:
            self.outlook.advance(done)
        if self._bar is not None and self._task is not None:
            fields: dict[str, Any] = {"figures": text} if text else {}
            self._bar.update(self._task, completed=done, run=self._run_left(), **fields)
        elif not self.quiet and self._due(done):
            elapsed = time.monotonic() - self._started
            if self._total is None:
                self._line(f"{self._stage} {done}  {elapsed:.0f} s")
                return
            left = elapsed / max(done, 1) * (self._total - done)
            times = ", ".join(filter(None, (f"{elapsed:.0f} s, {left:.0f} s left", self._run_left())))
            self._line(f"{self._stage} {done}/{self._total}  {times}  {text}".rstrip())

    def _run_left(self) -> str:
        left = None if self.outlook is None else self.outlook.left()
        return "" if left is None else f"whole run: {duration(left)} left"

    def _due(self, done: int) -> bool:
        """Return whether a line is due: every tenth of a stage, at most every ten seconds."""
        tenth, now = done * 10 // self._total if self._total else self._tenth + 1, time.monotonic()
        if tenth <= self._tenth or now - max(self._started, self._printed) < 10:
            return False
        self._tenth, self._printed = tenth, now
        return True


def duration(seconds: float) -> str:
    """Return a time for people: seconds, minutes or hours.

    Examples
    --------
    >>> [duration(seconds) for seconds in (8.2, 95, 1100, 9000)]
    ['8 s', '2 min', '18 min', '2.5 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
