"""A summary of the files of a corpus, and warnings about labels or columns that differ between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mtem.data.corpus import Corpus, sort_classes, spelling

SHOWN = 6  # largest number of classes, or files, in a line


def describe_files(corpus: Corpus) -> list[str]:
    """Return one line per file: number of texts or threads, columns, number of examples per class, number of empty rows."""
    lines = []
    rows = np.bincount(corpus.table.column("file").to_numpy(), minlength=len(corpus.files))
    for name, entry, count, labels in zip(_names(corpus.files), corpus.files, rows.tolist(), _counts(corpus), strict=True):
        if not count:  # a selection without examples of this file
            continue
        unit = "thread" if entry.get("threads") else "text"
        line = f"{name}: {count:,} {unit if count == 1 else unit + 's'} (column {entry['text_column']!r})"
        if corpus.labeled:
            line += f", labels (column {entry['label_column']!r}): {_largest(labels)}"
        if entry.get("empty"):
            line += f"; {entry['empty']:,} empty left out"
        lines.append(line)
    return lines


def warnings(corpus: Corpus) -> list[str]:
    """Return warnings, one line each, about files that may not fit together: other columns, spellings or sets of labels."""
    return [*_columns(corpus, "text"), *_columns(corpus, "label"), *_spellings(corpus), *_label_sets(corpus)]


def _names(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the files; of files with the same name, the paths or the names with their domains."""
    names = []
    for entry in files:
        same = [other for other in files if other["name"] == entry["name"]]
        if len(same) == 1:
            names.append(entry["name"])
        elif len({other["path"] for other in same}) == len(same):
            names.append(entry["path"])
        else:
            names.append(f"{entry['name']} ({entry['domain']})")
    return names


def _counts(corpus: Corpus) -> list[dict[str, int]]:
    """Return for each file the number of examples of each of its classes."""
    if not corpus.labeled:
        return [{} for _ in corpus.files]
    classes = corpus.classes
    pairs = corpus.table.column("file").to_numpy().astype(np.int64) * len(classes) + corpus.label_numbers(classes)
    table = np.bincount(pairs, minlength=len(corpus.files) * len(classes)).reshape(len(corpus.files), len(classes))
    return [{name: int(count) for name, count in zip(classes, row, strict=True) if count} for row in table]


def _largest(counts: Mapping[str, int]) -> str:
    """Return the classes in their order; of many, the largest."""
    if len(counts) <= SHOWN:
        return ", ".join(f"{_quoted(name)} {count:,}" for name, count in counts.items())
    largest = sorted(counts, key=lambda name: -counts[name])[: SHOWN - 1]
    return f"{len(counts)} classes, " + ", ".join(f"{_quoted(name)} {counts[name]:,}" for name in largest) + ", …"


def _quoted(name: str) -> str:
    """Return the name, in quotes if it ends in a digit: a count follows it."""
    return repr(name) if name[-1:].isdigit() else name


def _columns(corpus: Corpus, role: str) -> list[str]:
    users: dict[str, list[str]] = defaultdict(list)
    shown: dict[str, str] = {}
    for name, entry in zip(_names(corpus.files), corpus.files, strict=True):
        if column := entry[f"{role}_column"]:
            users[spelling(column)].append(name)
            shown.setdefault(spelling(column), column)
    if len(users) < 2:
        return []
    uses = ", ".join(f"{_some(files)} {'uses' if len(files) == 1 else 'use'} {shown[key]!r}" for key, files in users.items())
    return [
        f"the {role} column differs between the files: {uses}; "
        f"if this is not intended, rename the columns or give --{role}-column"
    ]


def _spellings(corpus: Corpus) -> list[str]:
    """Return warnings about labels that differ only in case, spaces, '-' and '_'."""
    alike: dict[str, list[str]] = defaultdict(list)
    for label in corpus.classes:
        alike[spelling(label)].append(label)
    lines = []
    for labels in alike.values():
        if len(labels) > 1:
            shown = [f"{label!r} ({_some(_files_with(corpus, label))})" for label in labels]
            lines.append(
                f"labels that differ only in spelling are different classes: {' and '.join(shown)}; "
                "spell them the same if they are one class"
            )
    return lines


def _files_with(corpus: Corpus, label: str) -> list[str]:
    return [name for name, counts in zip(_names(corpus.files), _counts(corpus), strict=True) if label in counts]


def _label_sets(corpus: Corpus) -> list[str]:
    sets: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, counts in zip(_names(corpus.files), _counts(corpus), strict=True):
        if counts:
            sets[sort_classes(counts)].append(name)
    if not corpus.labeled or len({frozenset(map(spelling, labels)) for labels in sets}) < 2:  # see _spellings
        return []
    shown = "; ".join(f"{_some(files)}: {_some(map(repr, labels))}" for labels, files in list(sets.items())[:SHOWN])
    more = "; …" if len(sets) > SHOWN else ""
    common = set.intersection(*map(set, sets))
    advice = "spell labels with the same meaning the same" if not common else "check that this is intended"
    return [f"the files have different labels ({shown}{more}), {len(corpus.classes)} classes in all; {advice}"]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
