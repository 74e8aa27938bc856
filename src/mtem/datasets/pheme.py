"""PHEME (Zubiaga et al. 2016; Kochkina, Liakata and Zubiaga 2018): threads of tweets about breaking news, rumours or not.

Two forms are read, in a folder or an archive: the original release, a folder per thread with one file per tweet,
`<event>-all-rnr-threads/{rumours,non-rumours}/<id>/{source-tweets,reactions}/*.json`, and JSON lines, `<event>.jsonl.gz`, a
thread per line, which is also the form that is written.
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

from mtem.data import threads
from mtem.data.readers import read_lines
from mtem.data.writers import Writer
from mtem.datasets.archives import Member, check_apart, make_folder, members
from mtem.errors import RequestError

LABELS = {"rumours": "rumour", "non-rumours": "non-rumour"}

_SUFFIX = "-all-rnr-threads"
_TWEET_FILE = re.compile(r"(.*/|)([^/]+)/(rumours|non-rumours)/([^/]+)/(source-tweets?|reactions)/[^/]+\.json")
_ABOUT_FILE = re.compile(r"(.*/|)([^/]+)/(rumours|non-rumours)/([^/]+)/(annotation|structure)\.json")
_LINES_FILE = re.compile(r"(.*/|)([^/]+)\.jsonl(\.gz)?")
_LOOKED_FOR = f"<event>{_SUFFIX}/rumours/<id>/source-tweets/*.json, or <event>.jsonl.gz"
_LARGEST = 1 << 24  # bytes; a tweet with everything about its author has a few thousand
_CREATED = re.compile(r"\w{3} (\w{3}) (\d\d) (\d\d):(\d\d):(\d\d) ([+-]\d{4}) (\d{4})")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# What is told of an event, besides its size, where it occurs.
_TOLD = {
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
    """Read the data set at `source` and write one file per event, `<event>.jsonl.gz`, into the folder `to`.

    A line is a thread, {"id", "label", "nodes"}; a node a tweet, {"id", "parent", "text", "time"}. EncodedThreads are in the order of
    their ids; in each the source tweet comes first, the others in the order of their ids, which is that of time. A tweet
    whose parent is not in the thread hangs from the source tweet and carries "orphan": true. Everything is read before
    anything is written.

    Returns
    -------
    Lines that describe what was written.
    """
    source, to = Path(source), Path(to)
    check_apart(source, to)
    events: dict[str, _Event] = {}
    with members(source) as found:
        for name, opener in found:
            _take(source, (name, opener), events)
    if not events:
        raise RequestError(f"{source}: no threads in it; looked for {_LOOKED_FOR}")
    ready = [(event, _finish(event)) for _, event in sorted(events.items())]
    make_folder(to)
    return [line for event, threads in ready for line in _write(event, threads, to)]


@dataclass
class _Thread:
    place: str
    label: str
    original: bool
    source: dict[str, Any] | None = None
    replies: list[dict[str, Any]] = field(default_factory=list)
    annotation: str | None = None
    structure: dict[str, set[str]] = field(default_factory=dict)  # the parents of each tweet


@dataclass
class _Event:
    name: str
    place: str
    threads: dict[str, _Thread] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, what: str, place: str) -> None:
        self.counts[what] += 1
        self.first.setdefault(what, place)


def _take(source: Path, member: Member, events: dict[str, _Event]) -> None:
    """Read a file, if it is one of the data set's."""
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
    above, folder, kind, identity, what = match.groups()
    event = _event(source, events, folder.removesuffix(_SUFFIX), f"{above}{folder}")
    place = f"{source}: {above}{folder}/{kind}/{identity}"
    thread = event.threads.setdefault(place, _Thread(place, LABELS[kind], True))
    content = _content(source, member)
    if tweet:
        _take_tweet(event, thread, what, content, f"{source}: {name}")
    elif what == "annotation":
        thread.annotation = _annotation(content)
    else:
        thread.structure = _structure(content)


def _event(source: Path, events: dict[str, _Event], name: str, place: str) -> _Event:
    event = events.setdefault(name, _Event(name, place))
    if event.place != place:
        raise RequestError(f"{source}: {event.place} and {place} are both {name}; give the folder of one of them")
    return event


def _content(source: Path, member: Member) -> bytes:
    name, opener = member
    with opener() as stream:
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise RequestError(f"{source}: {name}: more than {_LARGEST >> 20} MB, too large for a tweet; is this the data set?")
    return content


def _take_tweet(event: _Event, thread: _Thread, folder: str, content: bytes, place: str) -> None:
    try:
        node = _node(_json(content))
    except ValueError as error:
        if folder != "reactions":
            raise RequestError(f"{place}: not a readable source tweet ({error}); fetch or make the file again") from None
        event.count("unreadable", f"{place}: {error}")
        return
    if folder == "reactions":
        thread.replies.append(node)
    elif thread.source is None:
        thread.source = node
    else:
        raise RequestError(f"{place}: a second source tweet; a thread has one")


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _node(tweet: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a tweet; `parent` is the tweet it replies to, wherever that is."""
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
    """Twitter's "Wed Jan 07 11:06:08 +0000 2015" in ISO form. By hand: strptime wants the months in the user's language."""
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
    """The label in annotation.json, None where there is none."""
    try:
        value = _json(content).get("is_rumour")
    except ValueError:
        return None
    return value.replace("-", "").casefold() if isinstance(value, str) else None


def _structure(content: bytes) -> dict[str, set[str]]:
    """The parents of each tweet in structure.json, objects in objects: {source: {reply: {reply to it: []}}}."""
    try:
        open_ = list(_json(content).items())
    except ValueError:
        return {}
    parents: dict[str, set[str]] = {}
    while open_:
        parent, replies = open_.pop()
        if isinstance(replies, dict):
            for reply, further in replies.items():
                parents.setdefault(reply, set()).add(parent)
                open_.append((reply, further))
    return parents


def _lines(source: Path, member: Member) -> Iterator[tuple[int, dict[str, Any]]]:
    name, opener = member
    with opener() as stream:
        yield from read_lines(f"{source}: {name}", stream)


def _prepared(record: dict[str, Any], where: str) -> _Thread:
    """A thread that was prepared before, or made by somebody else in that form."""
    label, where = record.get("label"), f"{where}, thread {str(record.get('id'))!r}"
    if label not in LABELS.values():
        raise RequestError(f"{where}, column 'label': {label!r} is not one of {', '.join(map(repr, LABELS.values()))}")
    threads.build(record.get(threads.NODES), where)
    nodes = [_plain(node, where) for node in record[threads.NODES]]
    source = next((node for node in nodes if node["parent"] is None and "orphan" not in node), None)
    if source is None:
        raise RequestError(f"{where}: no source tweet; looked for a node with parent null")
    return _Thread(where, label, False, source, [node for node in nodes if node is not source])


def _plain(node: dict[str, Any], where: str) -> dict[str, Any]:
    """A node of the prepared form, in it exactly."""
    identity, parent = (threads.identity_of(node.get(name), name, where) for name in ("id", "parent"))
    text, time = (node.get(name) if isinstance(node.get(name), str) else None for name in ("text", "time"))
    if not identity:
        raise RequestError(f"{where}: a tweet has no id")
    plain: dict[str, Any] = {"id": identity, "parent": parent or None, "text": text or "", "time": time}
    return {**plain, "orphan": True} if node.get("orphan") is True else plain


def _finish(event: _Event) -> list[dict[str, Any]]:
    """The threads of an event as they are written; what there is to tell of them is counted."""
    threads: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    for place, thread in event.threads.items():
        if thread.source is None:
            raise RequestError(f"{place}: no source tweet; looked for source-tweet/*.json and source-tweets/*.json")
        identity = thread.source["id"]
        if identity in threads:
            raise RequestError(f"{place}: has the same source tweet {identity!r} as {places[identity]}; remove one")
        places[identity] = place
        threads[identity] = {"id": identity, "label": thread.label, "nodes": _nodes(event, thread, thread.source)}
        _compare(event, thread, threads[identity]["nodes"])
    return [threads[identity] for identity in sorted(threads, key=_number)]


def _nodes(event: _Event, thread: _Thread, source: dict[str, Any]) -> list[dict[str, Any]]:
    """The tweets of a thread: the source first, the others by number, each after the one it replies to."""
    nodes = {source["id"]: {**source, "parent": None}}
    for reply in sorted(thread.replies, key=lambda node: _number(node["id"])):
        place = f"{thread.place}, tweet {reply['id']!r}"
        if reply["id"] == source["id"]:
            event.count("source_copies", place)
        elif reply["id"] in nodes:
            if reply != nodes[reply["id"]]:
                raise RequestError(f"{place}: is there twice with different contents; remove one")
            event.count("copies", place)
        else:
            nodes[reply["id"]] = reply
    for node in list(nodes.values())[1:]:
        if node["parent"] not in nodes:
            node |= {"parent": source["id"], "orphan": True}
        event.counts["orphans"] += "orphan" in node
    found = list(nodes.values())
    threads.build(found, thread.place)  # refuses what is no tree
    positions = {identity: position for position, identity in enumerate(nodes)}
    order = threads.ordered([positions.get(node["parent"], -1) for node in found])
    listed = [found[position] for position in order]
    for node in listed:
        if not node["text"].strip():
            event.count("no_text", f"{thread.place}, tweet {node['id']!r}")
        if node["time"] is None:
            event.count("no_time", f"{thread.place}, tweet {node['id']!r}")
            del node["time"]
    return listed


def _number(identity: str) -> tuple[int, str]:
    """Sorts numbers as numbers; ids that are none sort too."""
    return len(identity), identity


def _compare(event: _Event, thread: _Thread, nodes: Iterable[dict[str, Any]]) -> None:
    """Count where what the release says about a thread differs from what its folder and its tweets say."""
    if not thread.original:
        return
    if thread.annotation is None:
        event.count("no_annotation", thread.place)
    elif thread.annotation != thread.label.replace("-", ""):
        event.count("annotation", thread.place)
    for node in nodes:
        told = thread.structure.get(node["id"])
        if told and node["parent"] not in told and "orphan" not in node and node["parent"] is not None:
            event.count("structure", f"{thread.place}, tweet {node['id']!r}")


def _write(event: _Event, threads: list[dict[str, Any]], to: Path) -> list[str]:
    path = to / f"{event.name}.jsonl.gz"
    with Writer(path) as out:
        for thread in threads:
            out.write(thread)
    labels = Counter(thread["label"] for thread in threads)
    tweets = sum(len(thread["nodes"]) for thread in threads)
    size = f"{len(threads)} threads ({labels['rumour']} rumours, {labels['non-rumour']} non-rumours), {tweets} tweets"
    orphans = f"{event.counts['orphans']} orphans (what they reply to is not there: they hang from the source tweet)"
    told = (
        f"{event.name}: {words}: {event.counts[what]} (first: {event.first[what]})"
        for what, words in _TOLD.items()
        if event.counts[what]
    )
    return [f"{path}: {size}, {orphans}", *told]
