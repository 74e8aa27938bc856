"""PHEME (Zubiaga et al. 2016; Kochkina, Liakata and Zubiaga 2018): threads of tweets about breaking news, rumours or not.

Two formats are read, from a folder or an archive: the original release, a folder per thread with one file per tweet,
`<event>-all-rnr-threads/{rumours,non-rumours}/<id>/{source-tweets,reactions}/*.json`, and JSON lines, `<event>.jsonl.gz`, a
thread per line, which is also the format that is written.
"""

from __future__ import annotations

import datetime
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtem.data.readers import read_lines
from mtem.data.threads import NODES, build, ordered, read_id
from mtem.data.writers import Writer
from mtem.datasets.archives import Member, check_apart, make_folder, members
from mtem.errors import RequestError

LABELS = {"rumours": "rumour", "non-rumours": "non-rumour"}

_SUFFIX = "-all-rnr-threads"
_TWEET_FILE = re.compile(r"(.*/|)([^/]+)/(rumours|non-rumours)/([^/]+)/(source-tweets?|reactions)/[^/]+\.json")
_ABOUT_FILE = re.compile(r"(.*/|)([^/]+)/(rumours|non-rumours)/([^/]+)/(annotation|structure)\.json")
_LINES_FILE = re.compile(r"(.*/|)([^/]+)\.jsonl(\.gz)?")
_EXPECTED = f"<event>{_SUFFIX}/rumours/<id>/source-tweets/*.json, or <event>.jsonl.gz"
_LARGEST = 1 << 24  # bytes; a tweet with all data about its author has a few thousand
_CREATED = re.compile(r"\w{3} (\w{3}) (\d\d) (\d\d):(\d\d):(\d\d) ([+-]\d{4}) (\d{4})")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# Irregularities that are counted in each event and reported if they occur.
_IRREGULARITIES = {
    "unreadable": "reactions that cannot be read, left out",
    "source_copies": "copies of the source tweet among the reactions, dropped",
    "copies": "repeated tweets, dropped",
    "no_text": "tweets without text",
    "no_time": "tweets without a readable time",
    "annotation": "threads with another label in annotation.json, the folder's was taken",
    "no_annotation": "threads without a readable annotation.json, the folder's label was taken",
    "structure": "tweets with another parent in structure.json, the one they name themselves was taken",
}


def prepare(source: str | Path, to: str | Path) -> list[str]:
    """Convert the data set to one file per event, `<event>.jsonl.gz`.

    Parameters
    ----------
    source : path
        The folder or archive to read.
    to : path
        The folder to write to. Nothing is written before everything has been read.

    Returns
    -------
    list of str
        One line per file, with its size, and one per kind of irregularity.

    Raises
    ------
    RequestError
        If files are missing or damaged, or the tweets of a thread contradict each other.

    Notes
    -----
    A line is a thread, {"id", "label", "nodes"}, and its nodes are tweets, {"id", "parent", "text", "time"}. Threads are in the
    order of their ids. In each thread the source tweet comes first and the others follow in the order of their ids, which is
    that of time. A tweet whose parent is not in the thread is attached to the source tweet and has "orphan": true.

    References
    ----------
    A. Zubiaga, M. Liakata, R. Procter, G. Wong Sak Hoi and P. Tolmie. Analysing How People Orient to and Spread Rumours in
    Social Media by Looking at Conversational Threads. PLoS ONE 11(3), 2016.

    E. Kochkina, M. Liakata and A. Zubiaga. All-in-one: Multi-task Learning for Rumour Verification. COLING 2018.
    """
    source, to = Path(source), Path(to)
    check_apart(source, to)
    events: dict[str, _Event] = {}
    with members(source) as files:
        for member in files:
            _read_member(source, member, events)
    if not events:
        raise RequestError(f"{source}: no threads found; expected {_EXPECTED}")
    finished = [(event, _finish(event)) for _, event in sorted(events.items())]
    make_folder(to)
    return [line for event, threads in finished for line in _write(event, threads, to)]


@dataclass
class _Thread:
    where: str
    label: str
    original: bool
    source: dict[str, Any] | None = None
    replies: list[dict[str, Any]] = field(default_factory=list)
    annotation: str | None = None
    structure: dict[str, set[str]] = field(default_factory=dict)  # the parents of each tweet


@dataclass
class _Event:
    name: str
    folder: str
    threads: dict[str, _Thread] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, irregularity: str, where: str) -> None:
        self.counts[irregularity] += 1
        self.first.setdefault(irregularity, where)


def _read_member(source: Path, member: Member, events: dict[str, _Event]) -> None:
    """Read a file, if it belongs to the data set."""
    name, _ = member
    if match := _LINES_FILE.fullmatch(name):
        event = _event(source, events, match[2], name)
        for row, record in _lines(source, member):
            where = f"{source}: {name}: row {row}"
            event.threads[where] = _prepared(record, where)
        return
    tweet = _TWEET_FILE.fullmatch(name)
    match = tweet or _ABOUT_FILE.fullmatch(name)
    if match is None:
        return
    above, folder, label, identity, content_type = match.groups()
    event = _event(source, events, folder.removesuffix(_SUFFIX), f"{above}{folder}")
    where = f"{source}: {above}{folder}/{label}/{identity}"
    thread = event.threads.setdefault(where, _Thread(where, LABELS[label], True))
    content = _content(source, member)
    if tweet:
        _read_tweet(event, thread, content_type, content, f"{source}: {name}")
    elif content_type == "annotation":
        thread.annotation = _annotation(content)
    else:
        thread.structure = _structure(content)


def _event(source: Path, events: dict[str, _Event], name: str, folder: str) -> _Event:
    event = events.setdefault(name, _Event(name, folder))
    if event.folder != folder:
        raise RequestError(f"{source}: {event.folder} and {folder} are both {name}; give the folder of one of them")
    return event


def _content(source: Path, member: Member) -> bytes:
    name, opener = member
    with opener() as stream:
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise RequestError(f"{source}: {name}: more than {_LARGEST >> 20} MB, too large for a tweet; is this PHEME?")
    return content


def _read_tweet(event: _Event, thread: _Thread, folder: str, content: bytes, where: str) -> None:
    try:
        node = _node(_json(content))
    except ValueError as error:
        if folder != "reactions":
            raise RequestError(f"{where}: not a readable source tweet ({error}); download or write the file again") from None
        event.count("unreadable", f"{where}: {error}")
        return
    if folder == "reactions":
        thread.replies.append(node)
    elif thread.source is None:
        thread.source = node
    else:
        raise RequestError(f"{where}: a second source tweet; a thread has one")


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _node(tweet: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a tweet that are kept; `parent` is the tweet it replies to, in the thread or not."""
    identity = _tweet_id(tweet, "id")
    if identity is None:
        raise ValueError("a tweet without id")
    text = tweet.get("text", tweet.get("full_text"))
    return {
        "id": identity,
        "parent": _tweet_id(tweet, "in_reply_to_status_id"),
        "text": html.unescape(text) if isinstance(text, str) else "",
        "time": _time(tweet.get("created_at")),
    }


def _tweet_id(tweet: dict[str, Any], name: str) -> str | None:
    value = tweet.get(f"{name}_str") or tweet.get(name)
    return str(value) if isinstance(value, (str, int)) and str(value).isdecimal() else None


def _time(created: Any) -> str | None:
    """Convert "Wed Jan 07 11:06:08 +0000 2015" to ISO format; not by strptime, whose month names depend on the locale."""
    match = _CREATED.fullmatch(created) if isinstance(created, str) else None
    if match is None or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(match[group]) for group in (2, 3, 4, 5, 7))
    ahead = datetime.timedelta(hours=int(match[6][:3]), minutes=int(match[6][0] + match[6][3:]))
    try:
        time = datetime.datetime(year, _MONTHS.index(match[1]) + 1, day, hour, minute, second) - ahead
    except (ValueError, OverflowError):
        return None
    return f"{time.isoformat()}Z"


def _annotation(content: bytes) -> str | None:
    """Return the label in annotation.json, None if there is none."""
    try:
        value = _json(content).get("is_rumour")
    except ValueError:
        return None
    return value.replace("-", "").casefold() if isinstance(value, str) else None


def _structure(content: bytes) -> dict[str, set[str]]:
    """Return the parents of each tweet in structure.json, nested objects: {source: {reply: {reply to it: []}}}."""
    try:
        remaining = list(_json(content).items())
    except ValueError:
        return {}
    parents: dict[str, set[str]] = {}
    while remaining:
        parent, replies = remaining.pop()
        if isinstance(replies, dict):
            for reply, further in replies.items():
                parents.setdefault(reply, set()).add(parent)
                remaining.append((reply, further))
    return parents


def _lines(source: Path, member: Member) -> Iterator[tuple[int, dict[str, Any]]]:
    name, opener = member
    with opener() as stream:
        yield from read_lines(f"{source}: {name}", stream)


def _prepared(record: dict[str, Any], where: str) -> _Thread:
    """Return a thread in the prepared format."""
    label, where = record.get("label"), f"{where}, thread {str(record.get('id'))!r}"
    if not isinstance(label, str) or label not in LABELS.values():
        raise RequestError(f"{where}, column 'label': expected {' or '.join(map(repr, LABELS.values()))}, got {label!r}")
    build(record.get(NODES), where)
    nodes = [_plain(node, where) for node in record[NODES]]
    source = next((node for node in nodes if node["parent"] is None and "orphan" not in node), None)
    if source is None:
        raise RequestError(f"{where}: no source tweet; expected a post with parent null")
    return _Thread(where, label, False, source, [node for node in nodes if node is not source])


def _plain(node: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a node of the prepared format with exactly the fields that are written."""
    identity, parent = (read_id(node.get(name), name, where) for name in ("id", "parent"))
    text, time = (node.get(name) if isinstance(node.get(name), str) else None for name in ("text", "time"))
    if not identity:
        raise RequestError(f"{where}: a tweet has no id; every tweet needs one")
    plain: dict[str, Any] = {"id": identity, "parent": parent or None, "text": text or "", "time": time}
    return {**plain, "orphan": True} if node.get("orphan") is True else plain


def _finish(event: _Event) -> list[dict[str, Any]]:
    """Return the threads of an event as they are written, and count irregularities."""
    threads: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for where, thread in event.threads.items():
        if thread.source is None:
            raise RequestError(f"{where}: no source tweet; expected source-tweet/*.json or source-tweets/*.json")
        identity = thread.source["id"]
        if identity in threads:
            raise RequestError(f"{where}: has the same source tweet {identity!r} as {origins[identity]}; remove one")
        origins[identity] = where
        threads[identity] = {"id": identity, "label": thread.label, "nodes": _nodes(event, thread, thread.source)}
        _compare(event, thread, threads[identity]["nodes"])
    return [threads[identity] for identity in sorted(threads, key=_number)]


def _nodes(event: _Event, thread: _Thread, source: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tweets of a thread: the source first, the others by id, each after the one it replies to."""
    nodes = {source["id"]: {**source, "parent": None}}
    for reply in sorted(thread.replies, key=lambda node: _number(node["id"])):
        where = f"{thread.where}, tweet {reply['id']!r}"
        if reply["id"] == source["id"]:
            event.count("source_copies", where)
        elif reply["id"] in nodes:
            if reply != nodes[reply["id"]]:
                raise RequestError(f"{where}: occurs twice with different contents; remove one")
            event.count("copies", where)
        else:
            nodes[reply["id"]] = reply
    for node in list(nodes.values())[1:]:
        if node["parent"] not in nodes:
            node |= {"parent": source["id"], "orphan": True}
        event.counts["orphans"] += "orphan" in node
    unordered = list(nodes.values())
    build(unordered, thread.where)  # refuses circles of replies
    positions = {identity: position for position, identity in enumerate(nodes)}
    order = ordered([positions.get(node["parent"], -1) for node in unordered])
    listed = [unordered[position] for position in order]
    for node in listed:
        if not node["text"].strip():
            event.count("no_text", f"{thread.where}, tweet {node['id']!r}")
        if node["time"] is None:
            event.count("no_time", f"{thread.where}, tweet {node['id']!r}")
            del node["time"]
    return listed


def _number(identity: str) -> tuple[int, str]:
    """Return a key that sorts ids of digits as numbers, and other ids too."""
    return len(identity), identity


def _compare(event: _Event, thread: _Thread, nodes: Iterable[dict[str, Any]]) -> None:
    """Count the differences between annotation.json and structure.json and the folder and tweets of a thread."""
    if not thread.original:
        return
    if thread.annotation is None:
        event.count("no_annotation", thread.where)
    elif thread.annotation != thread.label.replace("-", ""):
        event.count("annotation", thread.where)
    for node in nodes:
        parents = thread.structure.get(node["id"])
        if parents and node["parent"] not in parents and "orphan" not in node and node["parent"] is not None:
            event.count("structure", f"{thread.where}, tweet {node['id']!r}")


def _write(event: _Event, threads: list[dict[str, Any]], to: Path) -> list[str]:
    path = to / f"{event.name}.jsonl.gz"
    with Writer(path) as out:
        for thread in threads:
            out.write(thread)
    labels = Counter(thread["label"] for thread in threads)
    tweets = sum(len(thread["nodes"]) for thread in threads)
    size = f"{len(threads)} threads ({labels['rumour']} rumours, {labels['non-rumour']} non-rumours), {tweets} tweets"
    orphans = f"{event.counts['orphans']} orphans (their parent is missing: they are attached to the source tweet)"
    irregularities = (
        f"{event.name}: {description}: {event.counts[name]} (first: {event.first[name]})"
        for name, description in _IRREGULARITIES.items()
        if event.counts[name]
    )
    return [f"{path}: {size}, {orphans}", *irregularities]
