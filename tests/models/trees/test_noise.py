"""Noise by its factors against the dense matrix that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtem.models.base import Model
from mtem.models.trees.bigcn import Graph
from mtem.models.trees.model import BigcnModel
from mtem.models.trees.noise import Noise, Noisy, zeros
from tests.models.trees.test_bigcn import graph_of
from tests.models.trees.test_model import CLASSES, batch, make_model, trees_of, vectors, weights_of  # noqa: F401
from tests.reference import bigcn as reference
from tests.threads import SHAPES, make_threads
from tests.tolerance import assert_near

RATE = 0.3
EMPTY = {"id": "empty", "label": "good", "nodes": [{"id": "e", "parent": None, "text": ":", "time": 0}]}


@pytest.fixture(scope="module")
def rows():
    """Threads, one of them with a root and a reply without words, and one without any."""
    made = make_threads(12, 3, largest=8)
    speechless = next(row for row in made if len(row["nodes"]) > 3)
    for number in (0, 2):
        speechless["nodes"][number]["text"] = "..."
    return [*made, EMPTY]


@pytest.fixture(params=["tfidf", "vectors", "encoder"])
def model(request, rows, vectors, encoder) -> BigcnModel:  # noqa: F811
    return make_model(rows, features=request.param, vectors=str(vectors), encoder=str(encoder), hidden=4)


def graph(inputs) -> Graph:
    return Graph(inputs["parents"], inputs["threads"], inputs["roots"])


def objective(logits: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return (logits.log_softmax(1)[:, 0] + 0.1 * features.square().sum(1)).sum()


def test_the_gradient_is_that_of_the_dense_noise(model, rows):
    inputs = batch(model, rows)
    found = model.noise_gradient(inputs, objective)
    assert isinstance(found, Noise) and not found.codes[inputs["roots"]].any()
    assert_near(found.dense(graph(inputs)), Model.noise_gradient(model, inputs, objective))
    start = model.rescaled_noise(inputs, found, 0.3)
    again = model.noise_gradient(inputs, objective, start)
    wanted = Model.noise_gradient(model, inputs, objective, start.dense(graph(inputs)))
    assert_near(again.dense(graph(inputs)), wanted)
    assert not torch.allclose(wanted, found.dense(graph(inputs)), rtol=1e-2), "the start must matter"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_gradient_in_training_mode_is_one_of_the_roots_dropout_too(rows):
    model, draws = make_model(rows, hidden=4).train(), 400
    model.network.drop_edge = 0.0
    inputs, found = batch(model, rows, [0, 1, 2, 3]), []
    torch.manual_seed(0)
    for kind in (Model.noise_gradient, BigcnModel.noise_gradient):
        start = zeros(len(inputs["parents"]), 4, model.features.width, model.device)
        given = start.dense(graph(inputs)) if kind is Model.noise_gradient else start
        drawn = [kind(model, inputs, objective, given) for _ in range(draws)]
        found.append(torch.stack([one.dense(graph(inputs)) if isinstance(one, Noise) else one for one in drawn]))
    wanted, ours = found
    deviations = ((wanted.var(dim=0) + ours.var(dim=0)) / draws).sqrt().clamp_min(1e-9)
    error = (wanted.mean(dim=0) - ours.mean(dim=0)).abs() / deviations
    assert error.max() < 5.5 and error.mean() < 1


@pytest.mark.parametrize("radius", [0.2, -0.2])
def test_rescaled_noise_is_the_dense_one(model, rows, radius):
    inputs = batch(model, rows)
    gradient = model.noise_gradient(inputs, objective)
    found = model.rescaled_noise(inputs, gradient, radius).dense(graph(inputs))
    assert_near(found, Model.rescaled_noise(model, inputs, gradient.dense(graph(inputs)), radius))
    silent = (model.input_embeddings(inputs) == 0).all(dim=1)
    assert not found[silent].any() and (silent.sum() >= 3 or model.features.name == "encoder")
    norms = model.embedding_norms(model.input_embeddings(inputs), inputs)
    torch.testing.assert_close(model.embedding_norms(found, inputs), 0.2 * norms)


def test_the_model_with_noise_is_the_slow_reading(model, rows):
    trees, inputs = trees_of(rows), batch(model, rows)
    noise = model.rescaled_noise(inputs, model.noise_gradient(inputs, objective), 0.5)
    values = (model.input_embeddings(inputs) + noise.dense(graph(inputs))).double().numpy()
    matrices = np.split(values, np.cumsum([len(tree.parents) for tree in trees])[:-1])
    wanted = reference.logits(weights_of(model.network), matrices, [tree.parents for tree in trees])
    found = model(model.with_noise(inputs, noise))
    assert_near(found, wanted)
    assert not torch.allclose(found, model(inputs), atol=1e-2)


def test_derivatives_in_the_weights_are_those_of_the_dense_noise(model, rows):
    model.network.dropout = 0.0
    model.train()
    inputs = batch(model, rows)
    noise = model.rescaled_noise(inputs, model.noise_gradient(inputs, objective), 0.5)
    found = []
    for given in (noise, noise.dense(graph(inputs))):
        torch.manual_seed(3)  # the same edges are dropped
        loss = model(model.with_noise(inputs, given)).logsumexp(1).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*found, strict=True):
        assert_near(one, other)


def test_without_fewer_factors_than_features_the_noise_is_dense(rows, vectors):  # noqa: F811
    model = make_model(rows, features="vectors", vectors=str(vectors), hidden=6)
    inputs = batch(model, rows)
    gradient = model.noise_gradient(inputs, objective)
    start = model.random_noise(inputs, torch.Generator().manual_seed(0))
    for noise in (gradient, model.rescaled_noise(inputs, start, 0.1)):
        assert noise.shape == model.input_embeddings(inputs).shape
        assert torch.isfinite(model(model.with_noise(inputs, noise))).all()


def test_half_precision_takes_noise(rows):
    model = make_model(rows, hidden=4)
    inputs = batch(model, rows)
    noise = model.rescaled_noise(inputs, model.noise_gradient(inputs, objective), 0.1)
    full = model(model.with_noise(inputs, noise))
    model.precision = torch.bfloat16
    torch.testing.assert_close(model(model.with_noise(inputs, noise)), full, atol=0.05, rtol=0.05)
    model.train()(model.with_noise(inputs, noise)).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


# ---------------------------------------------------------------------- random noise


def test_random_noise_has_the_distribution_of_dense_draws(rows):
    """Of what the network sees (the products with its weights, the roots), and of the norm."""
    model = make_model(rows, hidden=3)
    inputs, width = batch(model, rows), model.features.width
    weights = torch.cat([model.network.up.weight1, model.network.down.weight1], dim=1).detach()
    silent = (model.input_embeddings(inputs) == 0).all(dim=1)
    draw, draws = torch.Generator().manual_seed(0), 3000
    noises = [model.random_noise(inputs, draw) for _ in range(draws)]
    dense = torch.stack([noise.dense(graph(inputs)) for noise in noises])
    assert not dense[:, silent].any() and silent.sum() == 3

    products = (dense @ weights)[:, ~silent].flatten(0, 1)
    gram = weights.T @ weights
    torch.testing.assert_close(products.T @ products / len(products), gram, rtol=0, atol=0.03 * float(gram.diag().max()))
    replies = ~silent & (inputs["parents"] != torch.arange(len(silent)))
    first, second = (dense[:, number] @ weights for number in replies.nonzero()[:2])
    torch.testing.assert_close(
        first.squeeze().T @ second.squeeze() / draws, 0 * gram, rtol=0, atol=0.1 * float(gram.diag().max())
    )
    roots = dense[:, inputs["roots"][(~silent)[inputs["roots"]]]].flatten(0, 1)
    assert roots.mean().abs() < 0.01 and abs(float(roots.var()) - 1) < 0.01

    squares = torch.stack([noise.norms(graph(inputs)) for noise in noises]).square()
    degrees = width * torch.zeros(len(rows)).index_add(0, inputs["threads"], (~silent).float())
    assert degrees[-1] == 0 and not squares[:, -1].any()
    squares, degrees = squares[:, degrees > 0], degrees[degrees > 0]
    assert ((squares.mean(dim=0) - degrees).abs() / (2 * degrees / draws).sqrt()).max() < 4.5
    torch.testing.assert_close(squares.var(dim=0), 2 * degrees, rtol=0.15, atol=0)


def test_random_noise_is_repeated_by_its_generator(rows):
    model = make_model(rows, hidden=3)
    inputs = batch(model, rows)
    one, same, other = (model.random_noise(inputs, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.codes, other.codes) and not torch.equal(one.unseen, other.unseen)


# ---------------------------------------------------------------------- dropout


WIDTH = 11


def noisy(shapes: list[list[int]], seed: int = 1) -> Noisy:
    made, draw = graph_of(shapes), torch.Generator().manual_seed(seed)
    noise = zeros(len(made.parents), len(shapes), WIDTH, torch.device("cpu"))
    noise = noise._replace(roots=torch.randn(len(shapes), WIDTH, generator=draw))
    features = torch.rand(len(shapes), WIDTH, generator=draw) * (torch.rand(len(shapes), WIDTH, generator=draw) < 0.4)
    return Noisy(None, features, noise, made)


@pytest.mark.parametrize("rate", [RATE, 0.5])
def test_each_node_drops_its_own_share_of_its_roots_values(rate):
    """With the identity as weights the result shows every draw."""
    features = noisy([[-1, *[0] * 7999], [-1], [-1, *[0] * 3999]])
    torch.manual_seed(0)
    found = features.roots_times(torch.eye(WIDTH), rate)
    values = features.values.index_select(0, features.graph.trees)
    kept = found > 0
    assert 0 < (values == 0).float().mean() < 1 and not kept[values == 0].any()
    torch.testing.assert_close(found, values * kept / (1 - rate), rtol=1e-4, atol=0)
    for tree, first in ((0, 0), (2, 8001)):
        mine = kept[first : first + 4000][:, features.values[tree] > 0].double()
        deviation = (rate * (1 - rate) / 4000) ** 0.5
        assert (mine.mean(dim=0) - (1 - rate)).abs().max() < 4.5 * deviation
        between = torch.corrcoef(mine.T) - torch.eye(mine.shape[1])
        assert between.abs().max() < 4.5 / 4000**0.5, "no two values share their draws"
        after = torch.corrcoef(torch.stack([mine[:-1].flatten(), mine[1:].flatten()]))[0, 1]
        assert after.abs() < 4.5 / mine.numel() ** 0.5, "nor do two nodes"
    torch.manual_seed(0)
    assert torch.equal(features.roots_times(torch.eye(WIDTH), rate), found)
    assert not torch.equal(features.roots_times(torch.eye(WIDTH), rate), found)


def test_products_and_gradients_are_those_of_the_dropped_matrix():
    features = noisy([*SHAPES.values()])
    features.values = features.values.detach().requires_grad_()
    weight = torch.randn(WIDTH, 5, requires_grad=True)
    torch.manual_seed(4)
    kept = features.roots_times(torch.eye(WIDTH), RATE).detach() > 0
    torch.manual_seed(4)
    found = features.roots_times(weight, RATE)
    literal = (features.values.index_select(0, features.graph.trees) * kept / (1 - RATE)) @ weight
    torch.testing.assert_close(found, literal, rtol=1e-4, atol=1e-5)
    towards = torch.randn(found.shape)
    ours, wanted = (torch.autograd.grad(value, [weight, features.values], towards) for value in (found, literal))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features.roots_times(weight, 0.0), (features.values @ weight)[features.graph.trees])


def test_roots_of_zeros():
    features = noisy([[-1, 0], [-1]])
    features.values = torch.zeros(2, WIDTH)
    weight = torch.randn(WIDTH, 3, requires_grad=True)
    found = features.roots_times(weight, RATE)
    assert torch.equal(found, torch.zeros(3, 3))
    found.sum().backward()
    assert not weight.grad.any()


def test_a_batch_without_any_word(rows):
    model = make_model(rows, hidden=3)
    inputs = batch(model, [EMPTY])
    for noise in (model.noise_gradient(inputs, objective), model.random_noise(inputs, torch.Generator().manual_seed(0))):
        moved = model.rescaled_noise(inputs, noise, 0.1)
        assert not moved.dense(graph(inputs)).any()
        torch.testing.assert_close(model(model.with_noise(inputs, moved)), model(inputs))
