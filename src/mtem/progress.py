"""What a person sees of long work: a bar with the figures that matter on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text


class _Bar(Bar):
    """A bar with the figures on a line of their own: beside it a terminal of 80 columns has no room for them."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["figures"]:
                yield Text(task.fields["figures"], style="dim")


class Progress:
    """Talks to a console (standard error by default). `quiet` silences all but notices.

    On a terminal each stage is a bar; elsewhere a line now and then, every ten seconds at most.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._bar: _Bar | None = None
        self._task: int | None = None
        self._stage, self._started, self._printed, self._tenth = "", 0.0, 0.0, 0
        self._total: int | None = None

    def say(self, text: str) -> None:
        """One line of information."""
        if not self.quiet:
            self._line(text)

    def notice(self, text: str) -> None:
        """One line the user should not miss."""
        self._line(text, style="yellow")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Progress]:
        """Everything inside is one piece of work; `total` is None where its size is not known."""
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
        """`done` of the stage's total; figures are shown when given."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in (figures or {}).items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, **({"figures": text} if text else {}))
        elif not self.quiet and self._due(done):
            passed = time.monotonic() - self._started
            if self._total is None:
                self._line(f"{self._stage} {done}  {passed:.0f} s")
                return
            left = passed / max(done, 1) * (self._total - done)
            self._line(f"{self._stage} {done}/{self._total}  {passed:.0f} s, {left:.0f} s left  {text}".rstrip())

    def _due(self, done: int) -> bool:
        """A line every tenth of a stage, but not more often than every ten seconds; the last one for long stages only."""
        tenth, now = done * 10 // self._total if self._total else self._tenth + 1, time.monotonic()
        if tenth <= self._tenth or now - max(self._started, self._printed) < 10:
            return False
        self._tenth, self._printed = tenth, now
        return True


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
