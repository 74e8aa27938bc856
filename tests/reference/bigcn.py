"""BiGCN tree by tree and node by node, with adjacency matrices in full. In evaluation mode, but for edges left out."""

from __future__ import annotations

import numpy as np


def normalized(edges: list[tuple[int, int]], count: int) -> np.ndarray:
    """The matrix that gathers, at each receiver, what its senders have: self loops, then both ends' degrees by what arrives."""
    adjacency = np.zeros((count, count))
    for sender, receiver in edges:
        adjacency[receiver, sender] += 1
    for node in range(count):
        adjacency[node, node] += 1
    degree = [sum(adjacency[node]) for node in range(count)]
    for receiver in range(count):
        for sender in range(count):
            adjacency[receiver, sender] /= np.sqrt(degree[receiver] * degree[sender])
    return adjacency


def direction(weights: dict[str, np.ndarray], features: np.ndarray, edges: list[tuple[int, int]]) -> np.ndarray:
    """What one direction says of one tree: the mean over its nodes of [H2, H1 of the root]."""
    matrix = normalized(edges, len(features))
    first = matrix @ features @ weights["weight1"] + weights["bias1"]
    enhanced = np.stack([np.concatenate([row, features[0]]) for row in first])
    second = np.maximum(matrix @ np.maximum(enhanced, 0) @ weights["weight2"] + weights["bias2"], 0)
    return np.mean([np.concatenate([row, first[0]]) for row in second], axis=0)


def logits(
    weights: dict[str, np.ndarray],
    features: list[np.ndarray],
    parents: list[list[int]],
    up: list[list[bool]] | None = None,
    down: list[list[bool]] | None = None,
    neighbours: np.ndarray | None = None,
) -> np.ndarray:
    """[trees, K]; `up` and `down`: of each tree, whether the edge between a node and its parent is there in that direction.

    `neighbours`: of each tree, the mean of other roots; without it, its own root.
    """
    rows = []
    for number, (values, above) in enumerate(zip(features, parents, strict=True)):
        pairs = [(node, parent) for node, parent in enumerate(above) if parent >= 0]
        rising = [(node, parent) for node, parent in pairs if up is None or up[number][node]]
        falling = [(parent, node) for node, parent in pairs if down is None or down[number][node]]
        parts = []
        for side, edges in (("up.", rising), ("down.", falling)):
            own = {name.removeprefix(side): value for name, value in weights.items() if name.startswith(side)}
            parts.append(direction(own, values, edges))
        if "root.weight" in weights:
            parts.append(np.maximum(weights["root.weight"] @ values[0] + weights["root.bias"], 0))
        if "neighbours.weight" in weights:
            around = values[0] if neighbours is None else neighbours[number]
            parts.append(np.maximum(weights["neighbours.weight"] @ around + weights["neighbours.bias"], 0))
        rows.append(weights["head.weight"] @ np.concatenate(parts) + weights["head.bias"])
    return np.stack(rows)
