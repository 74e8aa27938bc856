r"""BiGCN (Bian et al., "Rumor Detection on Social Media with Bi-Directional Graph Convolutional Networks", AAAI 2020).

A thread is a tree: its posts are the nodes, with features :math:`X`. One network reads it from the root down (edges from a post
to its replies), another from the leaves up, each

.. math::
    H_1 &= \hat A X W_1 + b_1, \qquad
    H_2 = \mathrm{ReLU}\bigl(\hat A\, \mathrm{Dropout}(\mathrm{ReLU}([H_1 \,\|\, X^{root}]))\, W_2 + b_2\bigr), \\
    \hat A &= D^{-1/2} (A + I) D^{-1/2}, \qquad S = \mathrm{mean}_{nodes} [H_2 \,\|\, H_1^{root}],

where :math:`A_{ij} = 1` for an edge from j to i, :math:`D` counts the edges that arrive at a node (with one from itself) and
`root` is the row of a node's root. A linear head classifies both :math:`S` together. In training every tree loses a share of its
edges, with new draws for each direction and pass (DropEdge). Beside the two networks the head may read the root alone, through
:math:`\mathrm{Dropout}(\mathrm{ReLU}(\mathrm{Dropout}(X^{root}) W_3 + b_3))`, and in the same way, by a layer of its own,
the mean of the roots of other trees that are like it. Neither is in the paper.

All trees of a batch are one graph. Nodes are rows, and index operations replace sparse matrices, which have no forward-mode and
second derivatives. The graph may stay on the CPU while the weights are on a GPU: everything that depends on its values (counts,
selections, random draws) is computed there and sent as numbers, so the CPU never waits for the GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.capture import send
from mtem.errors import RequestError
from mtem.models.base import Head


class Graph(NamedTuple):
    """The trees of a batch. Every node but a root has one edge to its parent, so an edge is identified by its lower node."""

    parents: Tensor  # [nodes] the parent of each node; a root is its own
    trees: Tensor  # [nodes] the tree of each node, in ascending order
    roots: Tensor  # [trees] the root of each tree

    @property
    def replies(self) -> Tensor:
        """Whether a node is a reply and so has an edge, [nodes]."""
        return self.parents != torch.arange(len(self.parents), device=self.parents.device)

    @property
    def sizes(self) -> Tensor:
        """The number of nodes of each tree, [trees]."""
        return torch.bincount(self.trees, minlength=len(self.roots))

    def on(self, device: torch.device) -> Graph:
        """Return the graph on a device."""
        return Graph(*(send(tensor, device) for tensor in self))


class Features(Protocol):
    """The matrix X of a batch, dense or sparse."""

    def times(self, weight: Tensor) -> Tensor:
        """Return X W, one row for each node."""
        ...

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Return Dropout(ReLU(X_root)) W, one row for each node; every node draws its own dropout."""
        ...

    def root_values(self, width: int, device: torch.device) -> Tensor:
        """Return X_root, one row for each tree, [trees, width]."""
        ...


class Dense(NamedTuple):
    """X as a matrix."""

    values: Tensor  # [nodes, width]
    graph: Graph

    def times(self, weight: Tensor) -> Tensor:
        """Return X W, one row for each node."""
        return (self.values @ weight).to(weight.dtype)

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Return Dropout(ReLU(X_root)) W, one row for each node; every node draws its own dropout."""
        _, trees, roots = self.graph.on(self.values.device)
        values = F.relu(self.values.index_select(0, roots))
        if not dropout:
            return (values @ weight).to(weight.dtype).index_select(0, trees)
        return (F.dropout(values.index_select(0, trees), dropout) @ weight).to(weight.dtype)

    def root_values(self, width: int, device: torch.device) -> Tensor:
        """Return X_root, one row for each tree, [trees, width]."""
        return self.values.index_select(0, self.graph.roots.to(self.values.device))


class Sparse(NamedTuple):
    """X by its entries above zero, sorted by node."""

    words: Tensor  # [entries] the column
    weights: Tensor  # [entries] the value
    nodes: Tensor  # [entries] the row
    graph: Graph

    def times(self, weight: Tensor) -> Tensor:
        """Return X W, one row for each node."""
        return _product(self.words, self.weights, self.nodes, weight, len(self.graph.parents))

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Return Dropout(ReLU(X_root)) W, one row for each node; every node draws its own dropout."""
        _, trees, roots = self.graph
        words, weights, owners = self.root_entries()
        if not dropout:
            return _product(words, weights, owners, weight, len(roots)).index_select(0, send(trees, weight.device))
        # Every node gets a copy of its root's entries and drops its own share of them.
        counts = torch.bincount(owners, minlength=len(roots))
        copies, starts = counts[trees], (counts.cumsum(0) - counts)[trees]
        nodes = torch.repeat_interleave(torch.arange(len(trees), device=trees.device), copies)
        entries = torch.arange(len(nodes), device=trees.device) + (starts - (copies.cumsum(0) - copies))[nodes]
        kept = (torch.rand(len(nodes), device=trees.device) >= dropout).nonzero().squeeze(1)
        entries, nodes = entries[kept], nodes[kept]
        return _product(words[entries], weights[entries] / (1 - dropout), nodes, weight, len(trees))

    def root_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return column, value and tree of the entries of the roots."""
        _, trees, roots = self.graph
        own = (roots[trees[self.nodes]] == self.nodes).nonzero().squeeze(1)
        return self.words[own], self.weights[own], trees[self.nodes[own]]

    def dense(self, width: int, device: torch.device) -> Tensor:
        """Return X as a matrix, [nodes, width]."""
        return _matrix(self.words, self.weights, self.nodes, (len(self.graph.parents), width), device)

    def root_values(self, width: int, device: torch.device) -> Tensor:
        """Return X_root, one row for each tree, [trees, width]."""
        return _matrix(*self.root_entries(), (len(self.graph.roots), width), device)


def _matrix(words: Tensor, weights: Tensor, rows: Tensor, shape: tuple[int, int], device: torch.device) -> Tensor:
    positions, weights = send(rows * shape[1] + words, device), send(weights, device)
    return weights.new_zeros(shape[0] * shape[1]).index_add(0, positions, weights).view(shape)


def _product(words: Tensor, weights: Tensor, rows: Tensor, weight: Tensor, count: int) -> Tensor:
    words, weights, rows = (send(tensor, weight.device) for tensor in (words, weights, rows))
    return weight.new_zeros(count, weight.shape[1]).index_add(0, rows, weight.index_select(0, words) * weights.unsqueeze(1))


def propagate(values: Tensor, start: Tensor, end: Tensor, kept: Tensor) -> Tensor:
    r"""Return :math:`\hat A` times `values`, for the edges from `start` to `end` with `kept` = 1; the others have 0."""
    degree = torch.ones_like(kept).index_add(0, end, kept)
    share = kept * (degree[start] * degree[end]).rsqrt()
    arriving = values.index_select(0, start) * share.unsqueeze(1)
    return (values / degree.unsqueeze(1)).index_add(0, end, arriving)


def kept_edges(graph: Graph, rate: float) -> Tensor:
    """Choose int(E (1 - rate)) of the E edges of each tree at random, [nodes] bool; from torch's global generator."""
    replies = graph.replies
    if not rate:
        return replies
    edges = graph.sizes - 1
    limits = (edges.float() * (1 - rate)).floor()
    # Sorted by tree, then by draw, the root last; the first `limit` nodes of a tree keep their edge.
    draws = torch.rand(len(replies), device=replies.device)
    order = torch.argsort(torch.where(replies, draws, 2.0))
    order = order[torch.argsort(graph.trees[order], stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    firsts = (edges + 1).cumsum(0) - (edges + 1)
    return replies & (ranks - firsts[graph.trees] < limits[graph.trees])


class Direction(nn.Module):
    """Two convolutions in one direction; the root's features enter the second and are appended to its output.

    Parameters
    ----------
    width
        The number of features of a node.
    hidden
        The width of each convolution.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight1, self.bias1 = _glorot(width, hidden), nn.Parameter(torch.zeros(hidden))
        self.weight2, self.bias2 = _glorot(hidden + width, hidden), nn.Parameter(torch.zeros(hidden))

    def forward(
        self, features: Features, graph: Graph, sizes: Tensor, edges: tuple[Tensor, Tensor, Tensor], dropout: float
    ) -> Tensor:
        """Return S, [trees, 2 hidden].

        Parameters
        ----------
        features
            The matrix X.
        graph
            The graph on the device of the weights.
        sizes
            The number of nodes of each tree.
        edges
            Start, end and kept, as in `propagate`.
        dropout
            The dropout rate.
        """
        own, roots = torch.split(self.weight2, [self.hidden, len(self.weight2) - self.hidden])
        first = propagate(features.times(self.weight1), *edges) + self.bias1
        enhanced = (F.dropout(F.relu(first), dropout) @ own).to(first.dtype) + features.roots_times(roots, dropout)
        second = F.relu(propagate(enhanced, *edges) + self.bias2)
        sums = second.new_zeros(len(graph.roots), self.hidden).index_add(0, graph.trees, second)
        means = sums / sizes.to(second.dtype).unsqueeze(1)
        return torch.cat([means, first.index_select(0, graph.roots)], dim=1)  # all nodes of a tree have the same root


class BiGCN(nn.Module):
    """Both directions and the head, from the features of the nodes to one logit per class and tree.

    Parameters
    ----------
    width
        The number of features of a node.
    classes
        The number of classes.
    hidden
        The width of each convolution.
    dropout
        The dropout rate between the convolutions, in training.
    drop_edge
        The share of edges dropped in each direction and pass, in training.
    root_hidden
        The width of the layer that reads the root alone; 0: there is none.
    head_dropout
        The dropout rate of what the head reads of both directions, in training.
    neighbours
        Whether a second layer of that width reads the mean of other roots.

    Raises
    ------
    RequestError
        If a rate is not one.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        hidden: int = 64,
        dropout: float = 0.5,
        drop_edge: float = 0.2,
        root_hidden: int = 0,
        head_dropout: float = 0.0,
        neighbours: bool = False,
    ) -> None:
        super().__init__()
        for name, rate in {"dropout": dropout, "drop_edge": drop_edge, "head_dropout": head_dropout}.items():
            if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:  # it may come from the config.json of a saved model
                raise RequestError(f"{name}: expected a number between 0 and 1, got {rate!r}")
        self.dropout, self.drop_edge, self.root_hidden, self.head_dropout = dropout, drop_edge, root_hidden, head_dropout
        self.down, self.up = Direction(width, hidden), Direction(width, hidden)
        self.root = nn.Linear(width, root_hidden) if root_hidden else None
        self.neighbours = nn.Linear(width, root_hidden) if root_hidden and neighbours else None
        self.head: Head = nn.Linear(4 * hidden + root_hidden * (2 if self.neighbours is not None else 1), classes)

    def forward(self, features: Features, graph: Graph, neighbours: Tensor | None = None) -> Tensor:
        """Return logits, [trees, classes].

        Parameters
        ----------
        features
            The matrix X.
        graph
            The trees.
        neighbours
            The mean of other roots for each tree, [trees, width]; None: the root itself. Read only by a network with that layer.
        """
        device = self.up.bias1.device
        moved, sizes = graph.on(device), send(graph.sizes, device)
        nodes = torch.arange(len(graph.parents), device=device)
        dropout, rate = (self.dropout, self.drop_edge) if self.training else (0.0, 0.0)

        def kept() -> Tensor:
            return send(kept_edges(graph, rate), device).to(self.up.bias1.dtype)

        up = self.up(features, moved, sizes, (nodes, moved.parents, kept()), dropout)
        down = self.down(features, moved, sizes, (moved.parents, nodes, kept()), dropout)
        parts = [F.dropout(part, self.head_dropout, self.training) for part in (up, down)]
        if self.root is not None:
            values = features.root_values(self.root.in_features, device)
            layers = [(self.root, values)]
            if self.neighbours is not None:
                layers.append((self.neighbours, values if neighbours is None else neighbours))
            parts += [F.dropout(F.relu(layer(F.dropout(given, dropout))), dropout).to(up.dtype) for layer, given in layers]
        logits: Tensor = self.head(torch.cat(parts, dim=1))
        return logits


def _glorot(rows: int, columns: int) -> nn.Parameter:
    bound = math.sqrt(6 / (rows + columns))
    return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound))
