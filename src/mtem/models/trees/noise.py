r"""Noise on the features of posts, without the dense matrix [posts, width] that it stands for.

The features of a reply enter the network only through the products :math:`X W_1` of both directions. So the gradient of a loss in
them is :math:`\sum_d G_d W_{1,d}^\top`, with the gradient :math:`G_d` in the product of direction d: a few numbers for each reply
("codes") and one basis for all. Of random noise only the projection on the columns of :math:`W_1` and the norm matter, and both
can be drawn as they are. The features of a root enter through a ReLU too; there are few roots, so their noise is a dense matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.dropout import LEVELS, LOWEST, random_numbers
from mtem.models.base import Inputs
from mtem.models.trees.bigcn import Features, Graph, Sparse


class Noise(NamedTuple):
    """Noise by its factors: a reply's is its code times the transposed basis, a root's is its row of `roots`."""

    codes: Tensor  # [nodes, rank]; zeros at roots
    basis: Tensor  # [width, rank]
    roots: Tensor  # [trees, width]
    gram: Tensor  # [rank, rank] the transposed basis times the basis
    unseen: Tensor  # [trees] squared norm of a further part that is orthogonal to the weights, and so changes no product

    @classmethod
    def of(cls, inputs: Inputs) -> Noise | None:
        """Return the noise in a batch, if there is any."""
        return cls(*(inputs[f"noise_{name}"] for name in cls._fields)) if "noise_codes" in inputs else None

    def entries(self) -> dict[str, Tensor]:
        """Return the entries of a batch that `of` reads."""
        return {f"noise_{name}": value for name, value in self._asdict().items()}

    def norms(self, graph: Graph) -> Tensor:
        """Return the norm over all nodes of each tree, [trees]."""
        rows = ((self.codes @ self.gram) * self.codes).sum(dim=1).clamp_min(0.0)
        squares = self.roots.square().sum(dim=1) + self.unseen
        return squares.index_add(0, graph.trees, rows).sqrt()

    def scaled(self, factors: Tensor, graph: Graph) -> Noise:
        """Return the noise with each tree multiplied by its factor, [trees]."""
        codes = self.codes * factors.index_select(0, graph.trees).unsqueeze(1)
        return self._replace(codes=codes, roots=self.roots * factors.unsqueeze(1), unseen=self.unseen * factors.square())

    def dense(self, graph: Graph) -> Tensor:
        """Return the noise as a matrix, [nodes, width], without its unseen part."""
        return (self.codes @ self.basis.T).index_add(0, graph.roots, self.roots)


def zeros(nodes: int, trees: int, width: int, device: torch.device) -> Noise:
    """Return no noise."""
    sizes = (nodes, 0), (width, 0), (trees, width), (0, 0), (trees,)
    return Noise(*(torch.zeros(size, device=device) for size in sizes))


def random(weights: Tensor, replies: Tensor, roots: Tensor, graph: Graph, generator: torch.Generator) -> Noise:
    """Draw noise whose values are all standard normal, from a CPU generator.

    Parameters
    ----------
    weights
        The weights that replies are multiplied by, [width, rank], with more rows than columns.
    replies, roots
        Which nodes and which trees get noise at all, as 0 and 1 on the CPU; the first is 0 at roots.
    graph
        The graph, on the CPU.
    generator
        Where the draws come from.
    """
    width, rank = weights.shape
    basis = torch.linalg.qr(weights).Q
    codes = torch.randn(len(replies), rank, generator=generator) * replies.unsqueeze(1)
    values = torch.randn(len(roots), width, generator=generator) * roots.unsqueeze(1)
    counts = torch.zeros(len(roots), dtype=torch.float64).index_add(0, graph.trees, replies.double())
    halves = (width - rank) * counts / 2  # a squared norm has a chi-squared distribution: twice a gamma one
    unseen = 2 * torch._standard_gamma(halves.clamp_min(1.0), generator) * (counts > 0)
    codes, values, unseen = (value.to(weights, non_blocking=True) for value in (codes, values, unseen))
    return Noise(codes, basis, values, torch.eye(rank).to(weights, non_blocking=True), unseen)


class Noisy:
    """X plus noise. On the CPU its products have first derivatives only, in the weights and in the noise.

    Parameters
    ----------
    features
        The matrix X.
    root_values
        The features of the roots, [trees, width].
    noise
        The noise.
    graph
        The graph, on the device of the noise.
    """

    def __init__(self, features: Features, root_values: Tensor, noise: Noise, graph: Graph) -> None:
        self.features, self.noise, self.graph = features, noise, graph
        self.roots = root_values + noise.roots
        self.values = F.relu(self.roots)

    def times(self, weight: Tensor) -> Tensor:
        """Return (X + noise) W, one row for each node."""
        codes, basis, roots, *_ = self.noise
        added = (codes @ (basis.T @ weight)).to(weight.dtype)
        return self._plain_times(weight) + added.index_add(0, self.graph.roots, (roots @ weight).to(weight.dtype))

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Return Dropout(ReLU(X_root + noise)) W, one row for each node; every node draws its own dropout."""
        if not dropout:
            return (self.values @ weight).to(weight.dtype).index_select(0, self.graph.trees)
        if self.values.device.type == "cpu":
            given = self.values, weight, self.columns, self.graph.sizes.tolist(), dropout
            return cast(Tensor, _DroppedProduct.apply(*given))  # type: ignore[no-untyped-call]
        return (F.dropout(self.values.index_select(0, self.graph.trees), dropout) @ weight).to(weight.dtype)

    def root_values(self, width: int, device: torch.device) -> Tensor:
        """Return X_root + noise, one row for each tree, [trees, width]."""
        return self.roots

    def _plain_times(self, weight: Tensor) -> Tensor:
        """Return X W by a sum over the words of each node, many times as fast as `Sparse.times` on a CPU."""
        if not isinstance(self.features, Sparse) or weight.device.type != "cpu":
            return self.features.times(weight)
        words, values, nodes, graph = self.features
        counts = torch.bincount(nodes, minlength=len(graph.parents))
        return F.embedding_bag(words, weight, counts.cumsum(0) - counts, mode="sum", per_sample_weights=values)

    @functools.cached_property
    def columns(self) -> tuple[Tensor, ...]:
        """The columns of the values above zero of each root."""
        positive = self.values > 0
        return torch.split(positive.nonzero()[:, 1].contiguous(), positive.sum(dim=1).tolist())


class Watched:
    """Other features, with the gradient in each of their products.

    Attributes
    ----------
    weights, products
        The weights that `times` got, and for each of them zeros that were added to the product, with gradient.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.weights: list[Tensor] = []
        self.products: list[Tensor] = []

    def times(self, weight: Tensor) -> Tensor:
        """Return X W, one row for each node."""
        product = self.features.times(weight)
        self.weights.append(weight.detach())
        self.products.append(torch.zeros_like(product, requires_grad=True))
        return product + self.products[-1]

    def roots_times(self, weight: Tensor, dropout: float) -> Tensor:
        """Return Dropout(ReLU(X_root)) W, one row for each node; every node draws its own dropout."""
        return self.features.roots_times(weight, dropout)

    def root_values(self, width: int, device: torch.device) -> Tensor:
        """Return X_root, one row for each tree, [trees, width]."""
        return self.features.root_values(width, device)


class _DroppedProduct(torch.autograd.Function):
    """Dropout(values) W with a row for each node, on the CPU, tree by tree; first derivatives only.

    Every node draws its own dropout on its root's values, which have no entry below zero, and only for those above. The draws are
    those of `torch.nn.functional.dropout` with 16 random bits each, which are 15 times as fast.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, positive: Sequence[Tensor], sizes: list[int], rate: float) -> Tensor:
        limit = round(rate * LEVELS)  # the rate is rounded to a multiple of 1/65,536
        ctx.scale = LEVELS / (LEVELS - limit)
        ctx.sizes, products = sizes, []
        saved = [weight]
        for row, columns, size in zip(values * ctx.scale, positive, sizes, strict=True):
            count = size * len(columns)
            kept = torch.ge(random_numbers(count), LOWEST + limit, out=values.new_empty(count))  # 0 and 1
            matrix = kept.view(size, -1).mul_(row.index_select(0, columns))
            products.append((matrix @ weight.index_select(0, columns)).to(weight.dtype))
            saved += [columns, matrix]
        ctx.save_for_backward(*saved)
        return torch.cat(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        in_values, in_weight = ctx.needs_input_grad[:2]
        of_weight = torch.zeros_like(weight)
        of_values = weight.new_zeros(len(ctx.sizes) if in_values else 0, len(weight))
        parts = torch.split(gradients[0], ctx.sizes)
        for number, (columns, matrix, part) in enumerate(zip(saved[::2], saved[1::2], parts, strict=True)):
            if in_weight:
                of_weight.index_add_(0, columns, matrix.T @ part)
            if in_values:
                kept = (part @ weight.index_select(0, columns).T) * (matrix > 0)
                of_values[number].index_add_(0, columns, ctx.scale * kept.sum(dim=0))
        return of_values if in_values else None, of_weight if in_weight else None, None, None, None
