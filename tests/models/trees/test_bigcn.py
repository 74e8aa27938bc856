"""The network against a slow implementation with full matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtem.models.trees.bigcn import BiGCN, Dense, Graph, Sparse, kept_edges
from tests.reference import bigcn as reference
from tests.threads import SHAPES, make_parents
from tests.tolerance import assert_near

WIDTH = 17


def graph_of(shapes: list[list[int]]) -> Graph:
    sizes = torch.tensor([len(shape) for shape in shapes])
    first = sizes.cumsum(0) - sizes
    parents = [max(parent, 0) + int(start) for shape, start in zip(shapes, first, strict=True) for parent in shape]
    return Graph(torch.tensor(parents), torch.repeat_interleave(torch.arange(len(shapes)), sizes), first)


def network(classes: int = 3, **changes) -> BiGCN:
    torch.manual_seed(0)
    made = BiGCN(WIDTH, classes, hidden=5, **changes).double()
    with torch.no_grad():  # biases begin at zero, where a forgotten one would not show
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made.eval()


def problem(kind: str, shapes: list[list[int]]):
    """(what the network gets, one matrix for each tree)."""
    draw = torch.Generator().manual_seed(1)
    graph = graph_of(shapes)
    values = torch.randn(len(graph.parents), WIDTH, generator=draw, dtype=torch.float64)
    if kind == "sparse":
        values = values.abs() * (torch.rand(values.shape, generator=draw) < 0.3)
        nodes, words = values.nonzero(as_tuple=True)
        features = Sparse(words, values[nodes, words], nodes, graph)
        torch.testing.assert_close(features.dense(WIDTH, values.device), values)
    else:
        features = Dense(values, graph)
    return features, graph, [part.numpy() for part in values.split([len(shape) for shape in shapes])]


def weights_of(module) -> dict[str, np.ndarray]:
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("root_hidden", [0, 4])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_the_network_is_the_slow_reading(kind, root_hidden):
    shapes = [*SHAPES.values(), make_parents(30, np.random.default_rng(0)), [-1]]
    features, graph, matrices = problem(kind, shapes)
    made = network(root_hidden=root_hidden)
    wanted = reference.logits(weights_of(made), matrices, shapes)
    assert wanted.std(axis=0).min() > 1e-2, "the trees must differ"
    assert_near(made(features, graph), wanted)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_second_layer_reads_other_roots(kind):
    shapes = [*SHAPES.values(), [-1]]
    features, graph, matrices = problem(kind, shapes)
    made = network(root_hidden=4, neighbours=True)
    others = torch.randn(len(shapes), WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = reference.logits(weights_of(made), matrices, shapes, neighbours=others.numpy())
    assert_near(made(features, graph, others), wanted)
    alone = reference.logits(weights_of(made), matrices, shapes)
    assert np.abs(alone - wanted).max() > 1e-2
    assert_near(made(features, graph), alone)
    plain = network(root_hidden=4)
    assert_near(plain(features, graph, others), plain(features, graph))
    assert network(neighbours=True).neighbours is None, "its width is that of the root's layer"


def test_what_the_head_reads_of_the_convolutions_is_dropped():
    features, graph, _ = problem("dense", [SHAPES["star"]] * 200)
    made = network(root_hidden=4, dropout=0.0, drop_edge=0.0, head_dropout=0.5)
    seen = []
    made.head.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    made(features, graph)
    made.train()(features, graph)
    whole, dropped = seen
    there = whole.abs() > 1e-9
    convolutions = torch.arange(whole.shape[1]) < 4 * 5
    assert 0.4 < (dropped == 0)[there & convolutions].double().mean() < 0.6
    assert_near(dropped[:, ~convolutions], whole[:, ~convolutions])


def test_what_the_root_says_is_dropped_before_and_after_its_layer():
    features, graph, _ = problem("dense", [SHAPES["star"]] * 400)
    made = network(root_hidden=4, dropout=0.5, drop_edge=0.0)
    with torch.no_grad():
        made.head.weight[:, : 4 * 5] = 0  # the convolutions say nothing
        made.root.bias.zero_()
    made.train()
    seen = []
    made.root.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    made.head.register_forward_hook(lambda _, given, out: seen.append(given[0][:, -4:]))
    made(features, graph)
    (values, before), after = seen
    assert 0.4 < (values == 0).double().mean() < 0.6
    positive = before > 0
    assert 0.4 < (after[positive] == 0).double().mean() < 0.6 and not after[~positive].any()


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_one_tree(kind, shape):
    features, graph, matrices = problem(kind, [SHAPES[shape]])
    wanted = reference.logits(weights_of(network()), matrices, [SHAPES[shape]])
    assert_near(network()(features, graph), wanted)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_edges_are_dropped_in_training_in_each_direction_on_its_own(kind):
    shapes = list(SHAPES.values())
    features, graph, matrices = problem(kind, shapes)
    made = network(dropout=0.0, drop_edge=0.4).train()
    sizes = [len(shape) for shape in shapes]
    torch.manual_seed(5)
    up, down = (kept_edges(graph, 0.4) for _ in range(2))
    assert not torch.equal(up, down)
    torch.manual_seed(5)
    found = made(features, graph)
    by_tree = lambda kept: [part.tolist() for part in kept.split(sizes)]  # noqa: E731
    wanted = reference.logits(weights_of(made), matrices, shapes, by_tree(up), by_tree(down))
    assert_near(found, wanted)
    assert not torch.allclose(made(features, graph), found), "drawn anew in every pass"
    made.eval()
    assert torch.equal(made(features, graph), made(features, graph)), "not in evaluation mode"


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0])
def test_how_many_edges_stay(rate):
    shapes = [make_parents(count, np.random.default_rng(count)) for count in (1, 2, 3, 5, 6, 11, 51)]
    graph = graph_of(shapes)
    torch.manual_seed(0)
    drawn = torch.stack([kept_edges(graph, rate) for _ in range(400)])
    assert not drawn[:, graph.roots].any()
    for number, shape in enumerate(shapes):
        edges = len(shape) - 1
        wanted = int(edges * (1 - rate))
        mine = drawn[:, graph.trees == number]
        assert (mine.sum(dim=1) == wanted).all()
        if edges > 2 and 0 < rate < 1:
            assert (mine[:, 1:].float().mean(dim=0) - wanted / edges).abs().max() < 0.12, "every edge is as likely to go"


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_each_node_drops_its_own_share_of_its_roots_features(kind):
    """A star of thousands: every node is one draw."""
    shapes = [[-1, *[0] * 5999], [-1, 0]]
    features, _, matrices = problem(kind, shapes)
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, 4, dtype=torch.float64)
    root = torch.from_numpy(matrices[0][0]).relu()
    rows = features.roots_times(weight, 0.3)[:6000]
    mean, variance = root @ weight, 0.3 / 0.7 * root.square() @ weight.square()
    error = (rows.mean(dim=0) - mean).abs() / (variance / 6000).sqrt()
    assert error.max() < 4
    torch.testing.assert_close(rows.var(dim=0), variance, rtol=0.1, atol=0)
    torch.testing.assert_close(features.roots_times(weight, 0.0)[:6000], mean.expand(6000, 4))
    torch.manual_seed(7)
    first = features.roots_times(weight, 0.3)
    torch.manual_seed(7)
    assert torch.equal(features.roots_times(weight, 0.3), first)


def test_what_the_first_layer_says_is_dropped_too():
    features, graph, _ = problem("dense", list(SHAPES.values()))
    made = network(dropout=0.5, drop_edge=0.0).train()
    with torch.no_grad():
        for direction in (made.up, made.down):
            direction.weight2[5:] = 0  # nothing of the roots
    assert not torch.allclose(made(features, graph), made(features, graph))
