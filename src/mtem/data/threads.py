"""EncodedThreads: a post and the replies to it, as a tree.

In files a thread is an object with a list of posts, each naming the one it replies to, in any order:

    {"id": "7", "label": "rumour", "nodes": [{"id": "7", "parent": null, "text": "..."},
                                             {"id": "9", "parent": "7", "text": "..."}]}

What can be repaired without guessing is repaired and counted; what cannot is refused, by thread and post.
"""

from __future__ import annotations

import heapq
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mtem.data.values import is_missing, text_of
from mtem.errors import RequestError

NODES = "nodes"


class Thread(NamedTuple):
    """A post and its replies; every post stands after the one it replies to.

    Attributes
    ----------
    texts
        Of every post, the root first; "" where a post has none.
    parents
        For every post the position of the one it replies to; -1 for the root.
    """

    texts: list[str]
    parents: list[int]

    @property
    def blank(self) -> bool:
        """Whether no post has a text."""
        return not any(self.texts)


@dataclass(frozen=True)
class Repairs:
    """How often what was mended, and where each kind came first. They add up."""

    unknown_parent: int = 0
    no_text: int = 0
    extra_root: int = 0
    no_root: int = 0
    duplicate: int = 0
    first: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Repairs) -> Repairs:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _TOLD}
        return Repairs(**sums, first={**other.first, **self.first})

    def notices(self, inside: str = "") -> list[str]:
        """One line for each kind that occurred; places are told without the name of the file `inside` which they are."""
        lines = []
        for name, (one, several) in _TOLD.items():
            if count := getattr(self, name):
                place = self.first[name].removeprefix(f"{inside}: ")
                lines.append(f"{count} {one if count == 1 else several} (first: {place})")
        return lines


_TOLD = {
    "unknown_parent": (
        "reply has an unknown parent and hangs from the root",
        "replies have an unknown parent and hang from the root",
    ),
    "no_text": ("post has no text", "posts have no text"),
    "extra_root": (
        "further post without parent hangs from the first of its thread",
        "further posts without parent hang from the first of their thread",
    ),
    "no_root": (
        "thread has no post without parent: the first with an unknown one is the root",
        "threads have no post without parent: the first with an unknown one is the root",
    ),
    "duplicate": ("repeated post dropped", "repeated posts dropped"),
}


def dump(tree: Thread) -> str:
    """The tree as compact JSON: [[parent, text], ...]."""
    pairs = list(zip(tree.parents, tree.texts, strict=True))
    return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"))


def parse(string: str) -> Thread:
    """The tree that `dump` wrote."""
    pairs = json.loads(string)
    return Thread([text for _, text in pairs], [parent for parent, _ in pairs])


def thread_of_row(row: Mapping[str, Any], where: str) -> Thread:
    """The tree of a row with `nodes`, for a reader of rows to whom repairs do not matter; `where` names the row."""
    return read(row, where)[0]


def read(row: Mapping[str, Any], where: str) -> tuple[Thread, Repairs]:
    """The tree of a row with `nodes` (a list, JSON that spells one, or a Thread), and what was mended in it."""
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
            raise RequestError(f"{where}: column {NODES!r} is neither a list of posts nor JSON that spells one") from None
    return build(nodes, where)


def _checked(tree: Thread, where: str) -> Thread:
    if not tree.texts:
        raise RequestError(f"{where}: the thread is empty; give at least one post")
    if len(tree.texts) != len(tree.parents):
        raise RequestError(f"{where}: {len(tree.texts)} texts but {len(tree.parents)} parents")
    for position, parent in enumerate(tree.parents):
        if not (parent == -1 if position == 0 else 0 <= parent < position):
            raise RequestError(f"{where}, node {position}: parent {parent} is not the position of an earlier post (root: -1)")
    return Thread([_text(text, f"{where}, node {position}") for position, text in enumerate(tree.texts)], list(tree.parents))


class _Post(NamedTuple):
    id: str
    parent: str  # "" for none
    text: str
    orphan: bool


def build(nodes: Any, where: str) -> tuple[Thread, Repairs]:
    """The tree of a thread's posts, and what was mended in it.

    Parameters
    ----------
    nodes
        A list of {"id", "parent", "text"}, in any order; ids are strings or whole numbers. The root has no parent. A post
        with "orphan" is one whose parent somebody found to be unknown before.
    where
        File, row and thread, for messages.

    Notes
    -----
    A reply whose parent is unknown, and a second post without parent, hang from the root. A post without text stays, so that
    its replies have where to hang. A copy of a post is dropped. Refused are a thread without posts, a circle of replies, and
    different posts of one id.
    """
    posts, repairs = _posts(nodes, where)
    place = {post.id: position for position, post in enumerate(posts)}
    root = next((i for i, post in enumerate(posts) if not post.parent and not post.orphan), None)
    if root is None:
        root = next((i for i, post in enumerate(posts) if not post.parent or post.parent not in place), None)
        if root is None:
            raise _circle(posts, [place[post.parent] for post in posts], range(len(posts)), where)
        repairs += Repairs(no_root=1, first={"no_root": f"{where}, node {posts[root].id!r}"})
    parents = []
    for position, post in enumerate(posts):
        if position == root:
            parents.append(-1)
            continue
        if post.orphan or (post.parent and post.parent not in place):
            repairs += Repairs(unknown_parent=1, first={"unknown_parent": f"{where}, node {post.id!r}"})
        elif not post.parent:
            repairs += Repairs(extra_root=1, first={"extra_root": f"{where}, node {post.id!r}"})
        parents.append(place.get(post.parent, root))
    order = ordered(parents)
    if len(order) < len(posts):
        raise _circle(posts, parents, sorted(set(range(len(posts))) - set(order)), where)
    rank = {position: number for number, position in enumerate(order)}
    return Thread([posts[i].text for i in order], [rank.get(parents[i], -1) for i in order]), repairs


def ordered(parents: Sequence[int]) -> list[int]:
    """The positions so that each comes after its parent, otherwise as they stood; those that no root leads to are left out."""
    if all(parent < position for position, parent in enumerate(parents)):
        return list(range(len(parents)))
    children: list[list[int]] = [[] for _ in parents]
    ready = []
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
    """The posts in their order, without copies."""
    if hasattr(nodes, "tolist"):
        nodes = nodes.tolist()
    if not isinstance(nodes, (list, tuple)):
        raise RequestError(f"{where}: column {NODES!r} is a {type(nodes).__name__}, not a list of posts")
    if not nodes:
        raise RequestError(f"{where}: the thread is empty; give at least one post")
    seen: dict[str, _Post] = {}
    repairs = Repairs()
    for number, node in enumerate(nodes, start=1):
        place = f"{where}, node {number} of {len(nodes)}"
        if not isinstance(node, Mapping):
            raise RequestError(f"{place}: is a {type(node).__name__}, not an object")
        identity = identity_of(node.get("id"), "id", place)
        if not identity and len(nodes) > 1:
            raise RequestError(f"{place}: has no id; every post of a thread with replies needs one")
        place = f"{where}, node {identity!r}"
        post = _Post(
            identity, identity_of(node.get("parent"), "parent", place), _text(node.get("text"), place), node.get("orphan") is True
        )
        if identity not in seen:
            seen[identity] = post
            if not post.text:
                repairs += Repairs(no_text=1, first={"no_text": place})
        elif seen[identity][:3] == post[:3]:
            repairs += Repairs(duplicate=1, first={"duplicate": place})
        else:
            differs = "texts" if seen[identity].text != post.text else "parents"
            raise RequestError(f"{place}: is there twice with different {differs}; ids must be unique in a thread")
    return list(seen.values()), repairs


def identity_of(value: Any, what: str, place: str) -> str:
    """An id as a string, "" for none: 7 and "7" are the same. `what` it is and its `place` are for the refusal."""
    if is_missing(value):
        return ""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str):
        return value.strip()
    # The ids of posts are too long for a floating-point number: two of them would become one.
    raise RequestError(f"{place}: the {what} is a {type(value).__name__}; ids must be strings or whole numbers")


def _text(value: Any, place: str) -> str:
    try:
        return text_of(value)
    except TypeError as error:
        raise RequestError(f"{place}: the text {error}") from None
    except UnicodeError:
        raise RequestError(f"{place}: the text is not UTF-8") from None


def _circle(posts: Sequence[_Post], parents: Sequence[int], unreached: Sequence[int], where: str) -> RequestError:
    """The error for posts that no root leads to: following parents from any of them ends in a circle."""
    position = unreached[0]
    trail: dict[int, None] = {}
    while position not in trail:
        trail[position] = None
        position = parents[position]
    circle = [posts[p].id for p in list(trail)[list(trail).index(position) :]]
    if len(circle) == 1:
        return RequestError(f"{where}, node {circle[0]!r}: replies to itself; the parent of a root must be null")
    shown = " to ".join([*map(repr, circle[:5]), *(["..."] if len(circle) > 5 else []), repr(circle[0])])
    return RequestError(f"{where}, node {circle[0]!r}: the replies go in a circle ({shown}); every reply must lead to a root")
