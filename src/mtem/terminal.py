"""The console that all commands print on: what it prints is shown, never obeyed, and lines break between words."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

# Control characters but for tab and line feed, marks that reverse the direction of a text, and lone surrogates (bytes of a path
# that are not UTF-8, which cannot be printed at all).
_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return a text in which characters that a terminal would obey are written out, as \\x1b.

    Class names, file names and messages of libraries come from files that others have made.
    """
    return _NOT_SHOWN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"  # the second form is valid in JSON, too


class Terminal(Console):
    """A rich console for texts of any origin.

    Control characters are written out. On a terminal lines break between words; elsewhere a message is one line.

    Parameters
    ----------
    **options
        Of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        self.soft_wrap = not self.is_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """Print. On a terminal a word that is longer than a line, such as a path, stays whole, so that it can be copied."""
        text = objects[0] if len(objects) == 1 else None
        if isinstance(text, Text) and self.is_terminal and any(cell_len(word) > self.width for word in text.plain.split()):
            lines = textwrap.wrap(text.plain, self.width, break_long_words=False, break_on_hyphens=False)
            objects = (Text("\n".join(lines), style=text.style),)
            options |= {"overflow": "ignore", "crop": False}
        super().print(*objects, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render with control characters written out; those of rich itself are marked as such, and stay."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or not _NOT_SHOWN.search(text) else Segment(visible(text), style)
