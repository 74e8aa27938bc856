"""Progress of long computations: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text


class _Bar(Bar):
    """A bar with the figures on a separate line: 80 columns are too few for both."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["figures"]:
                yield Text(task.fields["figures"], style="dim")


class Progress:
    """Report the progress of a computation on a console.

    On a terminal each stage is a bar; elsewhere it is a line every ten seconds at most.

    Parameters
    ----------
    console : rich.console.Console, optional
        Standard error by default.
    quiet : bool
        Whether to print nothing but notices.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
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
        self.console.print(Text(text, style=style), soft_wrap=True, highlight=False)

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
        if self.console.is_terminal and not self.quiet:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            with _Bar(*columns, console=self.console) as self._bar:
                self._task = self._bar.add_task(name, total=total, figures="")
                try:
                    yield self
                finally:
                    self._bar = None
        else:
            yield self

    def advance(self, done: int, figures: Mapping[str, float] | None = None) -> None:
        """Report that `done` units of the stage are done, and optionally some figures."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in (figures or {}).items())
        if self._bar is not None and self._task is not None:
            if text:
                self._bar.update(self._task, completed=done, figures=text)
            else:
                self._bar.update(self._task, completed=done)
        elif not self.quiet and self._due(done):
            elapsed = time.monotonic() - self._started
            if self._total is None:
                self._line(f"{self._stage} {done}  {elapsed:.0f} s")
                return
            left = elapsed / max(done, 1) * (self._total - done)
            self._line(f"{self._stage} {done}/{self._total}  {elapsed:.0f} s, {left:.0f} s left  {text}".rstrip())

    def _due(self, done: int) -> bool:
        """Return whether a line is due: every tenth of a stage, at most every ten seconds."""
        tenth, now = done * 10 // self._total if self._total else self._tenth + 1, time.monotonic()
        if tenth <= self._tenth or now - max(self._started, self._printed) < 10:
            return False
        self._tenth, self._printed = tenth, now
        return True


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
