"""The text, or thread, and the label of a record: which columns hold them, and how their cells are read.

Training and prediction read records by these functions, so that both accept and refuse the same files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtem.data import readers, threads
from mtem.data.corpus import label_name, listed, shortened
from mtem.data.threads import NODES, Repairs, Thread
from mtem.data.values import is_missing, text_of
from mtem.errors import RequestError

TEXT_COLUMNS = (
    "text", "review", "sentence", "content", "body", "document", "tweet", "comment", "message", "review_body",
    "review_text", "reviewtext", "reviews", "texts", "sentences", "post", "utterance", "abstract", "headline", "title",
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "class", "category", "sentiment", "target", "y", "label_text", "class_label", "polarity",
    "rating", "stars", "intent", "topic",
)  # fmt: skip

_CELL_BYTES = 64  # of any value, however small
LONGEST_LABEL = 1000  # characters: a longer one is a text

_JSON_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_NO_REPAIRS = Repairs()


class Columns(NamedTuple):
    """The columns to read.

    Attributes
    ----------
    example : str
        The column of the texts, or of the posts of threads.
    label : str or None
        The column of the labels, None if there is none.
    threaded : bool
        Whether the examples are threads.
    named : bool
        Whether the user named the text column.
    """

    example: str
    label: str | None = None
    threaded: bool = False
    named: bool = False

    def used(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are read, each once: the example, the label and, for threads, the id."""
        names = set(names)
        used = (self.example, self.label, "id" if self.threaded else None)
        return [name for name in dict.fromkeys(used) if name is not None and name in names]


def find_columns(
    columns: Iterable[str],
    nodes: Callable[[], Iterable[Any]],
    name: str,
    *,
    labeled: bool = False,
    text_column: str | None = None,
    label_column: str | None = None,
) -> Columns:
    """Find the columns to read in a table.

    The examples are threads if no text column is named and the column "nodes" begins with a list, or with JSON of a list of
    objects.

    Parameters
    ----------
    columns : iterable of str
        The columns of the table.
    nodes : callable
        Returns the cells of the column "nodes"; called only if there is one.
    name : str
        Of the table, for messages.
    labeled : bool
        Whether a label column is required.
    text_column, label_column : str, optional
        Names chosen by the user.

    Raises
    ------
    RequestError
        If a required column is missing.
    """
    columns = list(columns)
    if text_column in (None, NODES) and NODES in columns:
        for value in itertools.islice(nodes(), 1):
            if _JSON_LIST_OF_OBJECTS.match(value) if isinstance(value, str) else isinstance(value, (list, tuple, np.ndarray)):
                label = find_column(columns, "label", label_column, name, required=labeled, exclude=NODES)
                return Columns(NODES, label, threaded=True, named=text_column is not None)
    text = find_column(columns, "text", text_column, name, exclude=label_column)
    assert text is not None
    label = find_column(columns, "label", label_column, name, required=labeled, exclude=text)
    return Columns(text, label, named=text_column is not None)


def find_file_columns(
    path: str | Path, *, labeled: bool = False, text_column: str | None = None, label_column: str | None = None
) -> Columns:
    """Find the columns to read in a file; parameters and errors as in `find_columns`."""
    return find_columns(
        readers.columns(path),
        lambda: (record.get(NODES) for _, record in readers.read_rows(path)),
        str(path),
        labeled=labeled,
        text_column=text_column,
        label_column=label_column,
    )


def find_column(
    columns: Iterable[str], role: str, chosen: str | None, name: str, *, required: bool = True, exclude: str | None = None
) -> str | None:
    """Find the column of the texts or of the labels, whatever its case.

    Parameters
    ----------
    columns : iterable of str
        The columns of the table.
    role : {"text", "label"}
        What the column holds.
    chosen : str or None
        The user's choice; without it the first of the usual names is taken.
    name : str
        Of the table, for messages.
    required : bool
        Whether a missing column is an error; otherwise None is returned.
    exclude : str, optional
        A column that is not considered.

    Raises
    ------
    RequestError
        If the column is required and missing; the message lists the columns.
    """
    columns = list(columns)
    by_folded_name = {column.strip().casefold(): column for column in reversed(columns) if column != exclude}
    if chosen is not None:
        if chosen in columns:
            return chosen
        if chosen.strip().casefold() in by_folded_name:
            return by_folded_name[chosen.strip().casefold()]
        problem = f"no column {chosen!r}"
    else:
        for usual in {"text": TEXT_COLUMNS, "label": LABEL_COLUMNS}[role]:
            if usual in by_folded_name:
                return by_folded_name[usual]
        problem = f"no {role} column found"
    if not required:
        return None
    if len(columns) == 1 and (mark := next((mark for mark in ";\t|" if mark in columns[0]), None)):
        raise RequestError(f"{name}: {problem}; the header is one column {columns[0]!r}: is {mark!r} the separator? Use commas")
    raise RequestError(f"{name}: {problem}; the columns are {listed(columns)}: name one with --{role}-column")


def read_example(record: Mapping[str, Any], columns: Columns, where: str) -> tuple[str | Thread, Repairs]:
    """Read the text, or the thread, of a record.

    Parameters
    ----------
    record : mapping
        A row of a table.
    columns : Columns
        As `find_columns` returns them.
    where : str
        File and row, for messages.

    Returns
    -------
    example : str or Thread
        A thread if `columns.threaded`, else a text. Use `is_blank` to see whether it has any text.
    repairs : Repairs
        Of the thread; none for a text.

    Raises
    ------
    RequestError
        If the cell holds no text, or no thread.
    """
    if columns.threaded:
        return threads.read(record, where)
    if not columns.named and isinstance(record.get(NODES), list):
        raise RequestError(
            f"{where}: is a thread (it has {NODES!r}) and the first row is a text; "
            "put threads and texts into separate files, or name the column to read with --text-column"
        )
    value = record.get(columns.example)
    try:
        return text_of(value), _NO_REPAIRS
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(f"{where}, column {columns.example!r}: byte 0x{byte:02X} is not UTF-8; save it as UTF-8") from None
    except TypeError as error:
        raise RequestError(f"{where}, column {columns.example!r}: {error}; name another column with --text-column") from None


def is_blank(example: str | Thread) -> bool:
    """Return whether a text is empty, or whether no post of a thread has a text."""
    return example.blank if isinstance(example, Thread) else not example


def read_label(record: Mapping[str, Any], column: str, where: str) -> str:
    """Read the label of a record as a class name.

    Raises
    ------
    RequestError
        If the label is missing, or not a single value.
    """
    value = record.get(column)
    if isinstance(value, (list, dict)):
        raise RequestError(
            f"{where}, column {column!r}: expected a label, got a {type(value).__name__}; name another column with --label-column"
        )
    try:
        label = "" if is_missing(value) else label_name(value)
    except TypeError as error:
        raise RequestError(f"{where}, column {column!r}: {error}; name another column with --label-column") from None
    if len(label) > LONGEST_LABEL:
        raise RequestError(
            f"{where}, column {column!r}: a label of {len(label)} characters ({shortened(label, 40)}), expected at most "
            f"{LONGEST_LABEL}; name another column with --label-column"
        )
    if not label or label.casefold() in ("nan", "<na>"):
        raise RequestError(
            f"{where}, column {column!r}: the label is missing; "
            "fill it in, remove the row, or name another column with --label-column"
        )
    return label


def size_of(record: Mapping[str, Any]) -> int:
    """Return about how many bytes of memory a record takes."""
    size = 0
    waiting: list[Any] = [record]
    while waiting:
        value = waiting.pop()
        size += _CELL_BYTES
        if isinstance(value, (str, bytes)):
            size += len(value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return size
