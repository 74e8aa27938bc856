"""The Multi-Domain Sentiment Dataset of Blitzer, Dredze and Pereira (ACL 2007): Amazon reviews of several domains.

Two formats are read, from a folder or an archive: the original pseudo-XML, `<domain>/{positive,negative,unlabeled}.review`,
and JSON lines, `<domain>.{labeled,unlabeled}.jsonl.gz`, which is also the format that is written.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mtem.data.corpus import text_key
from mtem.data.formats import LARGEST_RECORD
from mtem.data.readers import read_lines
from mtem.data.writers import Writer
from mtem.datasets.archives import Member, check_apart, make_folder, members
from mtem.errors import RequestError

SHORT_NAMES = {"kitchen_and_housewares": "kitchen", "kitchen_&_housewares": "kitchen"}
LABELS = ("positive", "negative")
_REVIEW_FILE = re.compile(r"(?:^|/)([^/]+)/(positive|negative|unlabeled)\.review$")
_JSON_FILE = re.compile(r"(?:^|/)([^/]+)\.(labeled|unlabeled)\.jsonl(\.gz)?$")
_EXPECTED = "<domain>/positive.review, negative.review and unlabeled.review, or <domain>.labeled.jsonl.gz"
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def prepare(source: str | Path, to: str | Path) -> list[str]:
    """Convert the data set to two files per domain.

    Parameters
    ----------
    source : path
        The folder or archive to read.
    to : path
        The folder to write to. Nothing is written before everything has been read.

    Returns
    -------
    list of str
        One line per file, with its size.

    Raises
    ------
    RequestError
        If files are missing or damaged.

    Notes
    -----
    `<domain>.labeled.jsonl.gz` has id, label, text, title and rating of all labeled reviews, including repeats, positive ones
    first. `<domain>.unlabeled.jsonl.gz` has id, text, source and title in a pseudo-random order, without repeats and without
    reviews that are also in the labeled set of the domain: the original files overlap, which would leak test reviews into
    training.

    References
    ----------
    J. Blitzer, M. Dredze and F. Pereira. Biographies, Bollywood, Boom-boxes and Blenders: Domain Adaptation for Sentiment
    Classification. ACL 2007.
    """
    source, to = Path(source), Path(to)
    check_apart(source, to)
    with members(source) as files:
        domains = [_read_domain(source, name, parts) for name, parts in _find(source, list(files)).items()]
    make_folder(to)
    return [line for domain in domains for line in _write_domain(domain, to)]


@dataclass
class _Domain:
    name: str
    labeled: list[dict[str, Any]] = field(default_factory=list)
    unlabeled: list[dict[str, Any]] | None = None
    also_labeled: int = 0
    repeats: int = 0
    empty: int = 0


def _find(source: Path, files: list[Member]) -> dict[str, dict[str, Member]]:
    """Return the files of each domain: {domain: {"positive": ..., "negative": ..., "labeled": ..., "unlabeled": ...}}."""
    domains: dict[str, dict[str, Member]] = {}
    for name, opener in files:
        match = _REVIEW_FILE.search(name) or _JSON_FILE.search(name)
        if match is None:
            continue
        domain = SHORT_NAMES.get(match[1], match[1])
        parts = domains.setdefault(domain, {})
        if match[2] in parts:
            raise RequestError(
                f"{source}: {parts[match[2]][0]} and {name} are both {domain} {match[2]}; give the folder of one of them"
            )
        parts[match[2]] = (name, opener)
    if not domains:
        raise RequestError(f"{source}: no reviews found; expected {_EXPECTED}")
    for domain, parts in domains.items():
        if "labeled" in parts and parts.keys() & set(LABELS):
            raise RequestError(f"{source}: {domain} exists in both formats, .review and .jsonl; give the folder of one")
        if "labeled" not in parts and (missing := [label for label in LABELS if label not in parts]):
            present = ", ".join(name for name, _ in parts.values())
            absent = " and ".join(f"{label}.review" for label in missing)
            raise RequestError(f"{source}: {domain} has {present} but no {absent}; expected {_EXPECTED}")
    return domains


def _read_domain(source: Path, name: str, parts: dict[str, Member]) -> _Domain:
    domain = _Domain(name)
    for label in LABELS:
        if label in parts:
            for number, review in enumerate(_reviews(source, parts[label])):
                record = {"id": f"{name}-{label}-{number:04d}", "label": label, **_fields(review)}
                if record["text"]:
                    domain.labeled.append({**record, "rating": _rating(review.get("rating"))})
                else:
                    domain.empty += 1
    if "labeled" in parts:
        for row, record in _records(source, parts["labeled"]):
            if record.get("label") not in LABELS:
                raise RequestError(
                    f"{parts['labeled'][0]}: row {row}, column 'label': expected {LABELS[0]!r} or {LABELS[1]!r}, "
                    f"got {record.get('label')!r}"
                )
            if text := _clean(record.get("text")):
                title = _clean(record.get("title"))
                rest = {"title": title, "rating": record.get("rating")}
                domain.labeled.append({"id": _id(record, name, text), "label": record["label"], "text": text, **rest})
            else:
                domain.empty += 1
        # Positive reviews first; the order within a class stays.
        domain.labeled.sort(key=lambda record: LABELS.index(record["label"]))
    if "unlabeled" in parts:
        _read_unlabeled(source, domain, parts["unlabeled"])
    return domain


def _read_unlabeled(source: Path, domain: _Domain, member: Member) -> None:
    labeled = {text_key(record["text"]) for record in domain.labeled}
    seen: set[str] = set()
    domain.unlabeled = []
    original = member[0].endswith(".review")
    records = (_fields(review) for review in _reviews(source, member)) if original else _unlabeled_records(source, member)
    for record in records:
        if not record["text"]:
            domain.empty += 1
            continue
        key = text_key(record["text"])
        if key in labeled:
            domain.also_labeled += 1
        elif key in seen:
            domain.repeats += 1
        else:
            seen.add(key)
            kept = {"id": _id(record, domain.name, record["text"]), "text": record["text"]}
            kept["source"] = record.get("source") or "blitzer"
            if record.get("title"):
                kept["title"] = record["title"]
            domain.unlabeled.append(kept)
    if original:
        # The original file is in the order of the crawl. Sorted by digest, every prefix is an unbiased sample.
        domain.unlabeled.sort(key=lambda record: hashlib.sha256(record["text"].encode()).digest())


def _unlabeled_records(source: Path, member: Member) -> Iterator[dict[str, Any]]:
    for _, record in _records(source, member):
        kept = {name: record[name] for name in ("id", "source") if record.get(name)}
        yield {**kept, "text": _clean(record.get("text")), "title": _clean(record.get("title"))}


def _id(record: dict[str, Any], domain: str, text: str) -> str:
    return str(record.get("id") or f"{domain}-u-{hashlib.sha256(text.encode()).hexdigest()[:12]}")


def _records(source: Path, member: Member) -> Iterator[tuple[int, dict[str, Any]]]:
    name, opener = member
    with opener() as stream:
        yield from read_lines(f"{source}: {name}", stream)


def _reviews(source: Path, member: Member) -> Iterator[dict[str, str]]:
    """Yield the reviews of a pseudo-XML file as {tag: raw text}; of a repeated tag, the first.

    The format is not XML: it has no root element, no reliable escaping, and several encodings in one file. A review extends
    from <review> to </review>, or to the next <review> if the end is missing.
    """
    name, opener = member
    empty = True
    with opener() as stream:
        for part in _split(f"{source}: {name}", stream, b"<review>"):
            empty = False
            text = _decode(part.split(b"</review>")[0])
            review: dict[str, str] = {}
            for match in re.finditer(r"<(\w+)>(.*?)(?:</\1>|\Z)", text, re.DOTALL):
                review.setdefault(match[1], match[2])
            yield review
    if empty:
        hint = "if this is the processed release (word counts), give the folder sorted_data_acl instead"
        raise RequestError(f"{source}: {name}: no <review> found; {hint}")


def _split(where: str, stream: IO[bytes], mark: bytes) -> Iterator[bytes]:
    """Yield the bytes after each `mark` in a stream, up to the next; `where` is for messages."""
    buffer = b""
    inside = False
    while True:
        block = stream.read(1 << 18)
        # Searching the whole buffer again would take quadratic time; the mark may straddle the border of two blocks.
        start = max(0, len(buffer) - len(mark))
        buffer += block
        while (position := buffer.find(mark, start)) >= 0:
            if inside:
                yield buffer[:position]
            buffer, inside, start = buffer[position + len(mark) :], True, 0
        if not inside:
            buffer = buffer[-len(mark) :]
        elif len(buffer) > LARGEST_RECORD:
            raise RequestError(f"{where}: a review of more than {LARGEST_RECORD} bytes; the file is damaged: download it again")
        if not block:
            if inside:
                yield buffer
            return


def _fields(review: dict[str, str]) -> dict[str, str]:
    return {"text": _clean(review.get("review_text")), "title": _clean(review.get("title"))}


def _rating(raw: str | None) -> int | float | None:
    try:
        stars = float(raw or "")
    except ValueError:
        return None
    if not math.isfinite(stars):
        return None
    return int(stars) if stars.is_integer() else stars


def _single_byte(error: UnicodeError) -> tuple[str, int]:
    """Decode bytes that are not UTF-8 as Windows-1252."""
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("mtem-single-byte", _single_byte)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "mtem-single-byte")


def _clean(raw: Any) -> str:
    """Resolve entities, replace control characters (lost letters) by U+FFFD, and collapse white space."""
    if not isinstance(raw, str):
        return ""
    text = _CONTROL.sub("\ufffd", html.unescape(raw))
    return " ".join(text.split())


def _write_domain(domain: _Domain, to: Path) -> list[str]:
    path = to / f"{domain.name}.labeled.jsonl.gz"
    _write(path, domain.labeled)
    counts = {label: sum(record["label"] == label for record in domain.labeled) for label in LABELS}
    lines = [f"{path}: {len(domain.labeled)} reviews ({', '.join(f'{n} {label}' for label, n in counts.items())})"]
    if domain.unlabeled is None:
        lines.append(f"{domain.name}: no unlabeled reviews found (unlabeled.review or {domain.name}.unlabeled.jsonl.gz)")
    else:
        path = to / f"{domain.name}.unlabeled.jsonl.gz"
        _write(path, domain.unlabeled)
        lines.append(
            f"{path}: {len(domain.unlabeled)} reviews (left out: {domain.also_labeled} that are in the labeled set, "
            f"{domain.repeats} repeated)"
        )
    if domain.empty:
        lines.append(f"{domain.name}: {domain.empty} reviews without text left out")
    return lines


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    with Writer(path) as out:
        for record in records:
            out.write(record)
