"""The console: control characters are shown, and lines break between words."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from mtem.progress import Progress
from mtem.terminal import Terminal, visible

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "to", "/a/path/of/some/length"]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain é 中 \t\n", "plain é 中 \t\n"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J\x7f", "\\u009b2J\\x7f"),
        ("a\u202eb", "a\\u202eb"),
        ("bytes of a path \udcff", "bytes of a path \\udcff"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown
    visible(text).encode()


def test_a_table_obeys_no_class_name():
    stream = io.StringIO()
    table = Table(box=None)
    table.add_column("class")
    table.add_row(Text("\x1b]0;title\x07"))
    table.add_row("\x1b[31m\ud800")
    Terminal(file=stream).print(table)
    assert "\\x1b[31m" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_its_own_colors_stay():
    stream = io.StringIO()
    Terminal(file=stream, force_terminal=True, color_system="standard").print(Text("a\x1b[1m", style="red"))
    assert stream.getvalue() == "\x1b[31ma\\x1b[1m\x1b[0m\n"


@pytest.mark.parametrize("width", [40, 80])
def test_lines_break_between_words(width):
    stream = io.StringIO()
    console = Terminal(file=stream, force_terminal=True, color_system=None, width=width)
    console.print(Text(" ".join(WORDS * 5)))
    Progress(console).notice(" ".join(WORDS * 5))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width and " ".join(lines).split() == WORDS * 10


def test_a_long_path_stays_whole():
    stream = io.StringIO()
    console = Terminal(file=stream, force_terminal=True, color_system=None, width=40)
    console.print(Text(f"model: {'/long' * 20} written"))
    Progress(console).notice(f"model: {'/long' * 20} written")
    assert [line.strip() for line in stream.getvalue().splitlines()] == ["model:", "/long" * 20, "written"] * 2


def test_elsewhere_a_message_is_one_line():
    stream = io.StringIO()
    Terminal(file=stream, width=80).print(Text(" ".join(WORDS * 5)))
    assert len(stream.getvalue().splitlines()) == 1
