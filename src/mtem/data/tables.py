"""From records to a table of texts or threads: cleaned, checked and counted."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from mtem.data import records
from mtem.data.cache import fingerprint_of
from mtem.data.records import Columns
from mtem.data.threads import Repairs, dump
from mtem.data.values import is_missing
from mtem.errors import RequestError

_BATCH_ROWS = 8192
_BATCH_CHARACTERS = 1 << 25


class TableBuilder:
    """Turn records into a table of texts or threads: clean, check and count them.

    Parameters
    ----------
    name : str
        Of the data, for messages.
    columns : Columns
        The columns to read.
    labeled : bool
        Whether to read labels.

    Attributes
    ----------
    schema : pyarrow.Schema
        Columns `text`, `tree` (only of threads), `label` (only if labeled) and `row`.
    metadata : dict of str to str
        Filled when the last record has been read: notices (lines), empty (number of dropped rows), texts (sha256 of the texts),
        fingerprint (sha256 of texts and labels).
    """

    def __init__(self, name: str, columns: Columns, labeled: bool) -> None:
        self.name = name
        self.columns = columns
        self.labeled = labeled
        self._repairs = Repairs()
        self._thread_rows: dict[int, int] = {}  # digest of a thread's id -> row
        strings = ["text", "tree"] if columns.threaded else ["text"]
        label = [("label", pa.string())] if self.labeled else []
        self.schema = pa.schema([*((column, pa.large_string()) for column in strings), *label, ("row", pa.int64())])
        self.metadata: dict[str, str] = {}

    def in_memory(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> pa.Table:
        """Return the table of some rows, with the metadata in its schema."""
        table = pa.Table.from_batches(list(self.batches(rows)), schema=self.schema)
        return table.replace_schema_metadata(self.metadata)

    def batches(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
        """Yield the table of some rows in batches.

        Parameters
        ----------
        rows : iterable of (int, dict)
            Row numbers and records, as `readers.read_rows` yields them.

        Raises
        ------
        RequestError
            If a record cannot be read, or there is no text at all.
        """
        cells: dict[str, list[Any]] = {column: [] for column in self.schema.names}
        characters = total = empty = first_empty = 0
        # Eight bytes of digest per text, and a number per label: the repeats among a million texts take a few megabytes.
        digests, kept_rows, codes = array("Q"), array("q"), array("i")
        label_codes: dict[str, int] = {}
        texts_sha, labels_sha = hashlib.sha256(), hashlib.sha256()

        def batch() -> pa.RecordBatch:
            return pa.record_batch([pa.array(cells[column.name], column.type) for column in self.schema], schema=self.schema)

        for row, record in rows:
            total += 1
            text, thread = self._read(row, record)
            if not text and not thread:
                empty += 1
                first_empty = row if empty == 1 else first_empty
                continue
            label = self._label(row, record)
            # Threads are repeats if their roots are; without a text in the root, if the whole threads are.
            digests.append(_digest(text.strip() or thread))
            kept_rows.append(row)
            encoded = (thread or text).encode()
            texts_sha.update(len(encoded).to_bytes(8, "little") + encoded)
            if self.labeled:
                codes.append(label_codes.setdefault(label, len(label_codes)))
                labels_sha.update(label.encode() + b"\0")
            values = {"text": text, "tree": thread, "label": label, "row": row}
            for column, column_cells in cells.items():
                column_cells.append(values[column])
            characters += len(text) + len(thread)
            if len(cells["row"]) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                yield batch()
                cells, characters = {column: [] for column in cells}, 0
        if cells["row"]:
            yield batch()
        unit, column = ("thread", "") if self.columns.threaded else ("text", f", column {self.columns.example!r}")
        if not total:
            raise RequestError(f"{self.name}: has no rows; give at least one {unit}")
        if total == empty:
            advice = "the posts need a 'text'" if self.columns.threaded else "name another column with --text-column"
            raise RequestError(f"{self.name}: row {first_empty}{column}: all {total} {unit}s are empty; {advice}")
        notices = []
        if empty:
            notices.append(f"{_count(empty, f'empty {unit}')} dropped (first: row {first_empty}{column})")
        notices += self._repairs.notices(file=self.name)
        repeated = "repeated root text" if self.columns.threaded else "repeated text"
        notices += _repeats(np.frombuffer(digests, np.uint64), np.frombuffer(kept_rows, np.int64), codes, repeated)
        if self.columns.label is not None and not self.labeled:
            notices.append(f"column {self.columns.label!r} is ignored: this data is used without labels")
        self.metadata.update(
            notices="\n".join(notices),
            empty=str(empty),
            texts=texts_sha.hexdigest(),
            fingerprint=fingerprint_of(texts_sha.hexdigest(), labels_sha.hexdigest() if self.labeled else ""),
        )

    def _read(self, row: int, record: dict[str, Any]) -> tuple[str, str]:
        """Return the text (of a thread: its root's) and the thread as `dump` writes it; both "" if there is no text."""
        example, repairs = records.read_example(record, self.columns, f"{self.name}: row {row}")
        if isinstance(example, str):
            return example, ""
        self._check_id(row, record.get("id"))
        if example.blank:
            return "", ""
        self._repairs += repairs
        return example.texts[0], dump(example)

    def _check_id(self, row: int, identity: Any) -> None:
        if is_missing(identity):
            return
        earlier = self._thread_rows.setdefault(_digest(str(identity)), row)
        if earlier != row:
            raise RequestError(
                f"{self.name}: row {row}, thread {str(identity)!r}: row {earlier} has a thread with the same id; "
                "remove one of them"
            )

    def _label(self, row: int, record: dict[str, Any]) -> str:
        if not self.labeled:
            return ""
        assert self.columns.label is not None
        return records.read_label(record, self.columns.label, f"{self.name}: row {row}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _repeats(digests: np.ndarray, rows: np.ndarray, codes: array[int], unit: str) -> list[str]:
    """Return notices about texts that occur more than once, and about those of them with different labels."""
    order = np.argsort(digests, kind="stable")
    same = digests[order[1:]] == digests[order[:-1]]
    notices = []
    if same.any():
        later = order[1:][same]
        first = later.min()
        earlier = order[:-1][same][later.argmin()]
        notices.append(f"{_count(len(later), unit)} kept (first: rows {rows[earlier]} and {rows[first]})")
    if len(codes) and same.any():
        label = np.frombuffer(codes, np.int32)
        differ = same & (label[order[1:]] != label[order[:-1]])
        if differ.any():
            later = order[1:][differ]
            earlier = order[:-1][differ][later.argmin()]
            notices.append(
                f"{_count(len(later), unit)} with different labels (first: rows {rows[earlier]} and {rows[later.min()]})"
            )
    return notices


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
