"""Threads: a post and the replies to it.

In files a thread is an object with a list of posts, each of which names the post it replies to, in any order:

    {"id": "7", "label": "rumour", "nodes": [{"id": "7", "parent": null, "text": "..."},
                                             {"id": "9", "parent": "7", "text": "..."}]}

Defects that can be repaired without guessing are repaired and counted; all others are refused, with the thread and the post.
"""

from __future__ import annotations

import heapq
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mtem.data.values import is_missing, number_text, text_of
from mtem.errors import RequestError

NODES = "nodes"  # the key, or column, of the list of posts


class Thread(NamedTuple):
    """A post and its replies; every post comes after the one it replies to.

    Attributes
    ----------
    texts : list of str
        The text of every post, the root first; "" for a post without text.
    parents : list of int
        For every post the position of the post it replies to; -1 for the root.
    """

    texts: list[str]
    parents: list[int]

    @property
    def blank(self) -> bool:
        """Whether no post has a text."""
        return not any(self.texts)


@dataclass(frozen=True)
class Repairs:
    """Number of repairs by type; the sum of two is a `Repairs` too.

    Attributes
    ----------
    unknown_parent, no_text, extra_root, no_root, duplicate : int
        Number of posts (`no_root`: threads) that were repaired.
    first : mapping of str to str
        For every type of repair the file, row, thread and post where it was first made.
    """

    unknown_parent: int = 0
    no_text: int = 0
    extra_root: int = 0
    no_root: int = 0
    duplicate: int = 0
    first: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Repairs) -> Repairs:
        """Add the counts; `first` of the left operand takes precedence."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _DESCRIPTIONS}
        return Repairs(**sums, first={**other.first, **self.first})

    def notices(self, file: str = "") -> list[str]:
        """Return one line for each type of repair; the name of `file` is left out of the positions."""
        lines = []
        for name, (singular, plural) in _DESCRIPTIONS.items():
            if count := getattr(self, name):
                position = self.first[name].removeprefix(f"{file}: ")
                lines.append(f"{count} {singular if count == 1 else plural} (first: {position})")
        return lines


_DESCRIPTIONS = {
    "unknown_parent": (
        "reply has an unknown parent and is attached to the root",
        "replies have an unknown parent and are attached to the root",
    ),
    "no_text": ("post has no text", "posts have no text"),
    "extra_root": (
        "further post without parent is attached to the first of its thread",
        "further posts without parent are attached to the first of their thread",
    ),
    "no_root": (
        "thread has no post without parent: the first with an unknown parent is the root",
        "threads have no post without parent: the first with an unknown parent is the root",
    ),
    "duplicate": ("repeated post dropped", "repeated posts dropped"),
}


def dump(thread: Thread) -> str:
    """Return the thread as compact JSON: [[parent, text], ...]."""
    pairs = list(zip(thread.parents, thread.texts, strict=True))
    return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"))


def parse(string: str) -> Thread:
    """Return the thread that `dump` wrote."""
    pairs = json.loads(string)
    return Thread([text for _, text in pairs], [parent for parent, _ in pairs])


def read(row: Mapping[str, Any], where: str) -> tuple[Thread, Repairs]:
    """Read the thread of a row.

    Parameters
    ----------
    row : mapping
        Has the key "nodes": a list of posts, JSON of one, or a `Thread`.
    where : str
        File and row, for messages.

    Returns
    -------
    tuple of Thread and Repairs
        As `build`.

    Raises
    ------
    RequestError
        If the row has no posts, or posts that are no thread.
    """
    nodes = row.get(NODES)
    if not is_missing(row.get("id")):
        where = f"{where}, thread {str(row['id'])!r}"
    if isinstance(nodes, Thread):
        return _checked(nodes, where), Repairs()
    if is_missing(nodes) or (isinstance(nodes, str) and not nodes.strip()):
        raise RequestError(f"{where}: has no {NODES!r}; every row must be a thread with the list of its posts")
    if isinstance(nodes, (str, bytes)):
        try:
            nodes = json.loads(nodes)
        except (ValueError, RecursionError):
            raise RequestError(f"{where}, column {NODES!r}: expected a list of posts, or JSON of one") from None
    return build(nodes, where)


def _checked(thread: Thread, where: str) -> Thread:
    if not thread.texts:
        raise RequestError(f"{where}: the thread is empty; give at least one post")
    if len(thread.texts) != len(thread.parents):
        raise RequestError(f"{where}: {len(thread.texts)} texts but {len(thread.parents)} parents; give one parent per text")
    for position, parent in enumerate(thread.parents):
        if not (parent == -1 if position == 0 else 0 <= parent < position):
            raise RequestError(
                f"{where}, post {position}: expected as parent the position of an earlier post (-1 for the root), got {parent}"
            )
    texts = [_text(text, f"{where}, post {position}") for position, text in enumerate(thread.texts)]
    return Thread(texts, list(thread.parents))


class _Post(NamedTuple):
    id: str
    parent: str  # "" for none
    text: str
    orphan: bool


def build(nodes: Any, where: str) -> tuple[Thread, Repairs]:
    """Build a thread from its posts.

    Parameters
    ----------
    nodes : list of dict
        Posts as {"id", "parent", "text"}, in any order; ids are strings or whole numbers. The root has no parent. A post with
        "orphan": true is one whose parent is known to be missing.
    where : str
        File, row and thread, for messages.

    Returns
    -------
    thread : Thread
        Every post after the one it replies to, otherwise in the given order.
    repairs : Repairs
        Number of repairs.

    Raises
    ------
    RequestError
        If there are no posts, if replies form a circle, or if different posts have the same id.

    Notes
    -----
    A reply whose parent is unknown, and a second post without parent, are attached to the root. A post without text is kept,
    because others may reply to it. A copy of a post is dropped.
    """
    posts, repairs = _posts(nodes, where)
    positions = {post.id: position for position, post in enumerate(posts)}
    root = next((i for i, post in enumerate(posts) if not post.parent and not post.orphan), None)
    if root is None:
        root = next((i for i, post in enumerate(posts) if not post.parent or post.parent not in positions), None)
        if root is None:
            raise _circle(posts, [positions[post.parent] for post in posts], range(len(posts)), where)
        repairs += Repairs(no_root=1, first={"no_root": f"{where}, post {posts[root].id!r}"})
    parents = []
    for position, post in enumerate(posts):
        if position == root:
            parents.append(-1)
            continue
        if post.orphan or (post.parent and post.parent not in positions):
            repairs += Repairs(unknown_parent=1, first={"unknown_parent": f"{where}, post {post.id!r}"})
        elif not post.parent:
            repairs += Repairs(extra_root=1, first={"extra_root": f"{where}, post {post.id!r}"})
        parents.append(positions.get(post.parent, root))
    order = ordered(parents)
    if len(order) < len(posts):
        raise _circle(posts, parents, sorted(set(range(len(posts))) - set(order)), where)
    rank = {position: number for number, position in enumerate(order)}
    return Thread([posts[i].text for i in order], [rank.get(parents[i], -1) for i in order]), repairs


def ordered(parents: Sequence[int]) -> list[int]:
    """Return the positions in an order in which each comes after its parent, and otherwise in the given order.

    Parameters
    ----------
    parents : sequence of int
        The parent of every position; negative for a root.

    Returns
    -------
    list of int
        Positions that cannot be reached from a root are missing.
    """
    if all(parent < position for position, parent in enumerate(parents)):
        return list(range(len(parents)))
    children: list[list[int]] = [[] for _ in parents]
    ready: list[int] = []
    for position, parent in enumerate(parents):
        (ready if parent < 0 else children[parent]).append(position)
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for child in children[position]:
            heapq.heappush(ready, child)
    return order


def _posts(nodes: Any, where: str) -> tuple[list[_Post], Repairs]:
    """Return the posts in their order, without copies."""
    if hasattr(nodes, "tolist"):
        nodes = nodes.tolist()
    if not isinstance(nodes, (list, tuple)):
        raise RequestError(f"{where}, column {NODES!r}: expected a list of posts, got a {type(nodes).__name__}")
    if not nodes:
        raise RequestError(f"{where}: the thread is empty; give at least one post")
    seen: dict[str, _Post] = {}
    repairs = Repairs()
    for number, node in enumerate(nodes, start=1):
        position = f"{where}, post {number} of {len(nodes)}"
        if not isinstance(node, Mapping):
            raise RequestError(f"{position}: expected an object, got a {type(node).__name__}")
        identity = read_id(node.get("id"), "id", position)
        if not identity and len(nodes) > 1:
            raise RequestError(f"{position}: has no id; every post of a thread with replies needs one")
        position = f"{where}, post {identity!r}"
        parent = read_id(node.get("parent"), "parent", position)
        post = _Post(identity, parent, _text(node.get("text"), position), node.get("orphan") is True)
        if identity not in seen:
            seen[identity] = post
            if not post.text:
                repairs += Repairs(no_text=1, first={"no_text": position})
        elif seen[identity][:3] == post[:3]:
            repairs += Repairs(duplicate=1, first={"duplicate": position})
        else:
            difference = "texts" if seen[identity].text != post.text else "parents"
            raise RequestError(f"{position}: occurs twice with different {difference}; ids must be unique in a thread")
    return list(seen.values()), repairs


def read_id(value: Any, name: str, where: str) -> str:
    """Return the id of a post as a string, "" if there is none; 7 and "7" are the same id.

    Parameters
    ----------
    value : str, int or None
        The id.
    name : str
        The name of the field ("id" or "parent"), for messages.
    where : str
        File, row, thread and post, for messages.

    Raises
    ------
    RequestError
        If the value is neither a string nor a whole number. Floating-point numbers are refused because the ids of posts are too
        long for them: two ids would become one.
    """
    if is_missing(value):
        return ""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        try:
            return number_text(int(value))
        except TypeError:
            raise RequestError(f"{where}: the {name} has too many digits; write ids as strings") from None
    if isinstance(value, str):
        return value.strip()
    raise RequestError(f"{where}: the {name} is a {type(value).__name__}; ids must be strings or whole numbers")


def _text(value: Any, where: str) -> str:
    try:
        return text_of(value)
    except TypeError as error:
        raise RequestError(f"{where}: {error}") from None
    except UnicodeError:
        raise RequestError(f"{where}: the text is not UTF-8; save it as UTF-8") from None


def _circle(posts: Sequence[_Post], parents: Sequence[int], unreached: Sequence[int], where: str) -> RequestError:
    """Return the error for posts that no root leads to: following their parents ends in a circle."""
    position = unreached[0]
    trail: dict[int, None] = {}
    while position not in trail:
        trail[position] = None
        position = parents[position]
    circle = [posts[p].id for p in list(trail)[list(trail).index(position) :]]
    if len(circle) == 1:
        return RequestError(f"{where}, post {circle[0]!r}: replies to itself; the parent of a root must be null")
    shown = " to ".join([*map(repr, circle[:5]), *(["..."] if len(circle) > 5 else []), repr(circle[0])])
    return RequestError(f"{where}, post {circle[0]!r}: the replies form a circle ({shown}); every reply must lead to a root")
