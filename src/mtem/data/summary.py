"""What was read, in a line for each file, and what looks as if it was not meant: labels or columns that differ between files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mtem.data.corpus import Corpus, sort_classes, spelling

SHOWN = 6  # classes, or files, named in a line


def describe_files(corpus: Corpus) -> list[str]:
    """A line for each file: how many texts or threads, from which columns, how many of each class, how many left out."""
    told = []
    rows = np.bincount(corpus.table.column("file").to_numpy(), minlength=len(corpus.files))
    for name, entry, count, labels in zip(_names(corpus.files), corpus.files, rows.tolist(), _counts(corpus), strict=True):
        if not count:  # of some selected examples none is from here
            continue
        what = "thread" if entry.get("threads") else "text"
        line = f"{name}: {count:,} {what if count == 1 else what + 's'} (column {entry['text_column']!r})"
        if corpus.labeled:
            line += f", labels (column {entry['label_column']!r}): {_largest(labels)}"
        if entry.get("empty"):
            line += f"; {entry['empty']:,} empty left out"
        told.append(line)
    return told


def warnings(corpus: Corpus) -> list[str]:
    """What a person should look at before the files are used together."""
    return [*_columns(corpus, "text"), *_columns(corpus, "label"), *_spellings(corpus), *_label_sets(corpus)]


def _names(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """The files by name; where two have the same, with the domain or by the whole path."""
    told = []
    for entry in files:
        same = [other for other in files if other["name"] == entry["name"]]
        if len(same) == 1:
            told.append(entry["name"])
        elif len({other["path"] for other in same}) == len(same):
            told.append(entry["path"])
        else:
            told.append(f"{entry['name']} ({entry['domain']})")
    return told


def _counts(corpus: Corpus) -> list[dict[str, int]]:
    """For each file the number of texts of each of its classes."""
    if not corpus.labeled:
        return [{} for _ in corpus.files]
    classes = corpus.classes
    pairs = corpus.table.column("file").to_numpy().astype(np.int64) * len(classes) + corpus.label_numbers(classes)
    table = np.bincount(pairs, minlength=len(corpus.files) * len(classes)).reshape(len(corpus.files), len(classes))
    return [{name: int(count) for name, count in zip(classes, row, strict=True) if count} for row in table]


def _largest(counts: Mapping[str, int]) -> str:
    """The classes in their order, or of many the largest."""
    if len(counts) <= SHOWN:
        return ", ".join(f"{_quoted(name)} {count:,}" for name, count in counts.items())
    largest = sorted(counts, key=lambda name: -counts[name])[: SHOWN - 1]
    return f"{len(counts)} classes, " + ", ".join(f"{_quoted(name)} {counts[name]:,}" for name in largest) + ", …"


def _quoted(name: str) -> str:
    """In quotes if a number behind it could be taken for a part of it."""
    return repr(name) if name[-1:].isdigit() else name


def _columns(corpus: Corpus, kind: str) -> list[str]:
    found: dict[str, list[str]] = defaultdict(list)
    shown: dict[str, str] = {}
    for name, entry in zip(_names(corpus.files), corpus.files, strict=True):
        if column := entry[f"{kind}_column"]:
            found[spelling(column)].append(name)
            shown.setdefault(spelling(column), column)
    if len(found) < 2:
        return []
    told = ", ".join(f"{_some(files)} {'uses' if len(files) == 1 else 'use'} {shown[key]!r}" for key, files in found.items())
    return [
        f"the {kind} column differs between the files: {told}; rename the columns, or give --{kind}-column, if that is not meant"
    ]


def _spellings(corpus: Corpus) -> list[str]:
    """Labels that differ in nothing but upper and lower case, spaces, '-' and '_'."""
    alike: dict[str, list[str]] = defaultdict(list)
    for label in corpus.classes:
        alike[spelling(label)].append(label)
    told = []
    for labels in alike.values():
        if len(labels) > 1:
            places = [f"{label!r} ({_some(_files_with(corpus, label))})" for label in labels]
            told.append(
                f"labels that differ only in how they are written are different classes here: {' and '.join(places)}; "
                "write them alike if they are one"
            )
    return told


def _files_with(corpus: Corpus, label: str) -> list[str]:
    return [name for name, counts in zip(_names(corpus.files), _counts(corpus), strict=True) if label in counts]


def _label_sets(corpus: Corpus) -> list[str]:
    sets: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, counts in zip(_names(corpus.files), _counts(corpus), strict=True):
        if counts:
            sets[sort_classes(counts)].append(name)
    if not corpus.labeled or len({frozenset(map(spelling, labels)) for labels in sets}) < 2:  # by spelling: told already
        return []
    told = "; ".join(f"{_some(files)}: {_some(map(repr, labels))}" for labels, files in list(sets.items())[:SHOWN])
    more = "; …" if len(sets) > SHOWN else ""
    common = set.intersection(*map(set, sets))
    advice = "write labels that mean the same alike" if not common else "is that meant?"
    return [f"the files have different labels ({told}{more}), {len(corpus.classes)} classes together; {advice}"]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
