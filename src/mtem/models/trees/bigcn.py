r"""BiGCN (Bian et al., "Rumor Detection on Social Media with Bi-Directional Graph Convolutional Networks", AAAI 2020).

A thread is a tree of posts with features :math:`X`. One network reads it from the root down (edges from a post to its
replies), another from the leaves up, each

.. math::
    H_1 &= \hat A X W_1 + b_1, \qquad
    H_2 = \mathrm{ReLU}\bigl(\hat A\, \mathrm{Dropout}(\mathrm{ReLU}([H_1 \,\|\, X^{root}]))\, W_2 + b_2\bigr), \\
    \hat A &= D^{-1/2} (A + I) D^{-1/2}, \qquad S = \mathrm{mean}_{nodes} [H_2 \,\|\, H_1^{root}],

where :math:`A_{ij} = 1` for an edge from j to i, :math:`D` counts what arrives at a post (itself included) and `root` is the row
of a post's root. A linear head classifies both :math:`S` together. In training every tree loses a share of its edges, drawn anew
for each direction and pass (DropEdge).

All trees of a batch are one graph. Posts are rows, and index operations do what sparse matrices would: they have forward-mode
and second derivatives, which sparse matrices have not. The graph may stay on the CPU while the weights are on a GPU: what depends
on its values (how many, which, drawn how) is found there, and the GPU is sent numbers, so nobody waits for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.data.batching import send


class Graph(NamedTuple):
    """The trees of a batch. A node has one edge at most, the one to its parent, so an edge is named by its lower end."""

    parents: Tensor  # [nodes] the node that each one replies to; a root is its own parent
    trees: Tensor  # [nodes] the tree that each one belongs to, in ascending order
    roots: Tensor  # [trees] the root of each

    @property
    def replies(self) -> Tensor:
        """Whether a node is one, [nodes]: these are the edges."""
        return self.parents != torch.arange(len(self.parents), device=self.parents.device)

    @property
    def sizes(self) -> Tensor:
        """The nodes of each tree, [trees]."""
        return torch.bincount(self.trees, minlength=len(self.roots))

    def on(self, device: torch.device) -> Graph:
        return Graph(*(send(each, device) for each in self))


class Features(Protocol):
    """The matrix X of a batch in one form or another."""

    def times(self, weight: Tensor) -> Tensor:
        """X W, one row for each node."""
        ...

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Dropout(ReLU(X_root)) W, one row for each node; what is dropped differs between the nodes of a tree."""
        ...


class Dense(NamedTuple):
    """X as it stands."""

    values: Tensor  # [nodes, width]
    graph: Graph

    def times(self, weight: Tensor) -> Tensor:
        return (self.values @ weight).to(weight.dtype)

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        _, trees, roots = self.graph.on(self.values.device)
        values = F.relu(self.values.index_select(0, roots))
        if not dropout:
            return (values @ weight).to(weight.dtype).index_select(0, trees)
        return (F.dropout(values.index_select(0, trees), dropout) @ weight).to(weight.dtype)


class Sparse(NamedTuple):
    """X by its entries above zero; those of a tree's root in one piece."""

    words: Tensor  # [entries] the column
    weights: Tensor  # [entries] the value
    nodes: Tensor  # [entries] the row
    graph: Graph

    def times(self, weight: Tensor) -> Tensor:
        return _product(self.words, self.weights, self.nodes, weight, len(self.graph.parents))

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        _, trees, roots = self.graph
        own = (roots[trees[self.nodes]] == self.nodes).nonzero().squeeze(1)
        words, weights, places = self.words[own], self.weights[own], trees[self.nodes[own]]
        if not dropout:
            return _product(words, weights, places, weight, len(roots)).index_select(0, send(trees, weight.device))
        # Every node has its own copy of the root's entries, and drops its own share of them.
        counts = torch.bincount(places, minlength=len(roots))
        copies, starts = counts[trees], (counts.cumsum(0) - counts)[trees]
        nodes = torch.repeat_interleave(torch.arange(len(trees), device=trees.device), copies)
        entries = torch.arange(len(nodes), device=trees.device) + (starts - (copies.cumsum(0) - copies))[nodes]
        kept = (torch.rand(len(nodes), device=trees.device) >= dropout).nonzero().squeeze(1)
        entries, nodes = entries[kept], nodes[kept]
        return _product(words[entries], weights[entries] / (1 - dropout), nodes, weight, len(trees))

    def dense(self, width: int, device: torch.device) -> Tensor:
        """The matrix, [nodes, width]."""
        places, weights = send(self.nodes * width + self.words, device), send(self.weights, device)
        return weights.new_zeros(len(self.graph.parents) * width).index_add(0, places, weights).view(-1, width)


def _product(words: Tensor, weights: Tensor, rows: Tensor, weight: Tensor, count: int) -> Tensor:
    words, weights, rows = (send(each, weight.device) for each in (words, weights, rows))
    return weight.new_zeros(count, weight.shape[1]).index_add(0, rows, weight.index_select(0, words) * weights.unsqueeze(1))


def propagate(values: Tensor, start: Tensor, end: Tensor, kept: Tensor) -> Tensor:
    r""":math:`\hat A` times `values`, for edges from `start` to `end`, of which those with `kept` = 0 are not there."""
    degree = torch.ones_like(kept).index_add(0, end, kept)
    share = kept * (degree[start] * degree[end]).rsqrt()
    arriving = values.index_select(0, start) * share.unsqueeze(1)
    return (values / degree.unsqueeze(1)).index_add(0, end, arriving)


def kept_edges(graph: Graph, rate: float) -> Tensor:
    """Of each tree's E edges int(E (1 - rate)) at random, [nodes] bool; from torch's global generator."""
    replies = graph.replies
    if not rate:
        return replies
    edges = graph.sizes - 1
    limits = (edges.float() * (1 - rate)).floor()
    # Sorted by tree, then by draw, with the root behind its replies; a tree's first `limit` stay.
    draws = torch.rand(len(replies), device=replies.device)
    order = torch.argsort(torch.where(replies, draws, 2.0))
    order = order[torch.argsort(graph.trees[order], stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    firsts = (edges + 1).cumsum(0) - (edges + 1)
    return replies & (ranks - firsts[graph.trees] < limits[graph.trees])


class Direction(nn.Module):
    """Two convolutions with the root's features beside the posts' in the second and behind it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight1, self.bias1 = _glorot(width, hidden), nn.Parameter(torch.zeros(hidden))
        self.weight2, self.bias2 = _glorot(hidden + width, hidden), nn.Parameter(torch.zeros(hidden))

    def forward(
        self, features: Features, graph: Graph, sizes: Tensor, edges: tuple[Tensor, Tensor, Tensor], dropout: float
    ) -> Tensor:
        """S, [trees, 2 hidden]."""
        own, roots = self.weight2.split([self.hidden, len(self.weight2) - self.hidden])
        first = propagate(features.times(self.weight1), *edges) + self.bias1
        enhanced = (F.dropout(F.relu(first), dropout) @ own).to(first.dtype) + features.roots_times(roots, dropout)
        second = F.relu(propagate(enhanced, *edges) + self.bias2)
        sums = second.new_zeros(len(graph.roots), self.hidden).index_add(0, graph.trees, second)
        return torch.cat(
            [sums / sizes.to(second.dtype).unsqueeze(1), first.index_select(0, graph.roots)], dim=1
        )  # all nodes of a tree have the same root


class BiGCN(nn.Module):
    """Both directions and the head: features of posts in, one score per class and tree out."""

    def __init__(self, width: int, classes: int, hidden: int = 64, dropout: float = 0.5, drop_edge: float = 0.2) -> None:
        super().__init__()
        self.dropout, self.drop_edge = dropout, drop_edge
        self.down, self.up = Direction(width, hidden), Direction(width, hidden)
        self.head: nn.Module = nn.Linear(4 * hidden, classes)

    def forward(self, features: Features, graph: Graph) -> Tensor:
        device = self.up.bias1.device
        there, sizes = graph.on(device), send(graph.sizes, device)
        nodes = torch.arange(len(graph.parents), device=device)
        dropout, rate = (self.dropout, self.drop_edge) if self.training else (0.0, 0.0)

        def kept() -> Tensor:
            return send(kept_edges(graph, rate), device).to(self.up.bias1.dtype)

        up = self.up(features, there, sizes, (nodes, there.parents, kept()), dropout)
        down = self.down(features, there, sizes, (there.parents, nodes, kept()), dropout)
        return self.head(torch.cat([up, down], dim=1))


def _glorot(rows: int, columns: int) -> nn.Parameter:
    bound = math.sqrt(6 / (rows + columns))
    return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound))
