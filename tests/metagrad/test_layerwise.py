"""Per-example products and weighted gradients against autograd, on five architectures; the meta-gradient against second order."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtem import metagrad, tsallis
from mtem.metagrad import layer_hooks, layerwise
from mtem.methods.base import cross_entropy, functional
from mtem.models.text import TextModel
from tests.conftest import SHAPES, make_encoder
from tests.memory import Peak
from tests.tolerance import assert_near, assert_weights_near

TEXTS = ["good1 bad2 word3", "word1 word2 word3 word4 good1", "bad3", "", "good4 good5 word7 bad1 word2 word9"]
LABELS = torch.tensor([0, 2, 1, 1, 0])


@pytest.fixture(scope="module", params=[(shape, frozen) for shape in SHAPES for frozen in (0, 1)], ids=str)
def model(request, tmp_path_factory):
    shape, frozen = request.param
    directory = make_encoder(tmp_path_factory.mktemp(f"{shape}{frozen}"), shape)
    torch.manual_seed(1)
    model = TextModel.create(directory, ["a", "b", "c"], max_length=16).eval()
    model.freeze(frozen)
    return model


def batch(model, rows=(0, 1, 2, 3, 4)):
    return model.prepare(model.collate(model.encode_texts(TEXTS), np.asarray(rows)))


def recorder(model):
    return layerwise.Recorder(model, model.trainable(), lambda: model(model.probe()))


def recorded(model, inputs, labels=LABELS):
    watch = recorder(model)
    recording = watch.record(lambda: model(inputs), len(labels))
    recording.backward(F.cross_entropy(recording.logits, labels, reduction="none"))
    return watch, recording


def one_by_one(model, inputs, labels=LABELS):
    """The gradient of every example's loss, by autograd."""
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    parameters = model.trainable()
    found = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
        found.append(dict(zip(parameters, gradients, strict=True)))
    return found


def test_products_and_weighted_sums_are_autograds(model):
    inputs = batch(model)
    watch, recording = recorded(model, inputs)
    each = one_by_one(model, inputs)
    draw = torch.Generator().manual_seed(2)
    direction = {name: torch.randn(value.shape, generator=draw) for name, value in watch.params.items()}
    expected = torch.stack([sum((one[name] * direction[name]).sum() for name in direction) for one in each])
    assert_near(recording.product(direction), expected)
    weights = torch.tensor([0.3, 2.0, -1.0, 0.0, 1e-6])
    found = recording.gradient(weights)
    wanted = {name: sum(weight * one[name] for weight, one in zip(weights, each, strict=True)) for name in found}
    assert_weights_near(found, wanted)


def test_a_recording_that_saves_memory_gives_the_same(model, monkeypatch):
    monkeypatch.setattr(layer_hooks, "RECOMPUTE_EVERY", 1)
    inputs, watch = batch(model), recorder(model)
    saving, storing = (watch.record(lambda: model(inputs), 5, save_memory=save_memory) for save_memory in (True, False))
    for recording in (saving, storing):
        recording.backward(F.cross_entropy(recording.logits, LABELS, reduction="none"))
    kept = [sum(call.layer_input is not None for _, call in recording._matrices) for recording in (saving, storing)]
    gated = model.network.config.model_type == "modernbert"  # there a product stands between activation and layer
    assert (kept[0] == kept[1]) if gated else (kept[0] < kept[1]), "some inputs are not kept"
    weights = torch.tensor([0.3, 2.0, -1.0, 0.0, 1.0])
    expected = storing.gradient(weights)
    assert_weights_near(saving.gradient(weights), expected)
    assert_near(saving.product(expected), storing.product(expected))


def replayed(model, inputs, microbatches, labels=LABELS):
    watch, parts = recorder(model), [part for part, _ in model.split(inputs, microbatches)]
    torch.manual_seed(5)
    replay = watch.replay([functools.partial(model.one_pass, part) for part in parts])
    replay.backward(F.cross_entropy(replay.logits, labels, reduction="none"))
    return replay


@contextlib.contextmanager
def checkpointing(model, wanted=True):
    model.save_memory(activation_checkpointing=wanted)
    try:
        yield
    finally:
        model.save_memory()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_pass_that_is_run_again_gives_the_same(model, microbatches, recompute):
    inputs, weights = batch(model), torch.tensor([0.3, 2.0, -1.0, 0.0, 1.0])
    _, recording = recorded(model, inputs)
    expected = recording.gradient(weights)
    with checkpointing(model, recompute):
        replay = replayed(model, inputs, microbatches)
        assert_near(replay.logits, recording.logits)
        assert_weights_near(replay.gradient(weights), expected)
        assert_near(replay.product(expected), recording.product(expected))
        assert_near(replay.product({}), torch.zeros(5))
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("recompute", [False, True])
def test_every_run_of_a_pass_draws_the_same_masks(model, recompute):
    inputs, weights, parameters = batch(model), torch.tensor([0.3, 2.0, -1.0, 0.5, 1.0]), model.trainable()
    model.train()
    try:
        with checkpointing(model, recompute):
            replay = replayed(model, inputs, 2)
            gradient = replay.gradient(weights)
            product, drawn = replay.product(gradient), torch.rand(3)
        torch.manual_seed(5)  # a plain pass in the same parts, of the same masks
        logits = torch.cat([model.one_pass(part) for part, _ in model.split(inputs, 2)])
        assert torch.equal(torch.rand(3), drawn), "only the first run moves the generator"
    finally:
        model.eval()
    loss = (weights * F.cross_entropy(logits, LABELS, reduction="none")).sum()
    wanted = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    wanted = {name: value for name, value in zip(parameters, wanted, strict=True) if name in gradient}
    assert_weights_near(gradient, wanted)
    assert_near((weights * product).sum(), sum(value.square().sum() for value in wanted.values()))


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_run_again_is_freed(model, recompute):
    """A cycle through the graph would never be: Python's collector does not see it."""
    with checkpointing(model, recompute):
        replay = replayed(model, batch(model), 2)
        with Peak() as peak:
            replay.product(replay.gradient(torch.ones(5)))
    assert peak.now == 0 < peak.bytes


def test_a_recording_of_recomputed_layers_is_refused(model):
    with checkpointing(model), pytest.raises(RuntimeError, match="without gradients"):
        recorded(model, batch(model))


def test_hardly_anything_is_skipped(model):
    watch = recorder(model)
    assert watch.skipped_share < 0.01
    assert all("relative_attention_bias" in name for name in watch.skipped)


def test_the_parameters_and_their_gradients_are_as_they_were(model):
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    hooks = [(dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in model.modules()]
    wanted = set(model.trainable())
    watch, _ = recorded(model, batch(model))
    watch.gradient(lambda: [model(batch(model)).sum()], watch.cast({n: v.detach() for n, v in watch.params.items()}), 1.0)
    for name, value in model.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])
        assert value.grad is None and value.requires_grad == (name in wanted)
    assert [(module._forward_pre_hooks, module._forward_hooks) for module in model.modules()] == hooks


def test_an_error_in_the_pass_puts_everything_back(model):
    watch = recorder(model)
    parameters = dict(model.named_parameters())

    def fails():
        model(batch(model))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        watch.record(fails, 5)
    assert dict(model.named_parameters()) == parameters and all(v.requires_grad for v in model.trainable().values())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_the_meta_gradient_is_second_orders(model, pieces):
    target, source = batch(model), batch(model, [4, 0, 2])
    truth, index = torch.tensor([1, 0, 2]), torch.tensor([1.05, 1.5, 2.0, 3.0, 5.0])
    watch, recording = recorded(model, target)
    log_probs = torch.log_softmax(recording.logits, dim=1)
    parts = model.split(source, pieces)
    assert len(parts) == pieces
    found = layerwise.meta_gradient(
        recording, log_probs, LABELS, index,
        lambda: (len(truth[rows]) / 3 * cross_entropy(model(part), truth[rows]) for part, rows in parts), 0.05,
    )  # fmt: skip
    exact = metagrad.meta_gradient(
        lambda params, inputs: functional(model, params, inputs), watch.params, target, LABELS, index,
        lambda params: cross_entropy(functional(model, params, source), truth), 0.05, "second-order",
        differentiable_attention=model.differentiable_attention,
    )  # fmt: skip
    assert_near(found.source_loss, exact.source_loss)
    error = (found.gradient - exact.gradient).norm() / exact.gradient.norm()
    assert error < 1e-4
    at_theta = layerwise.source_gradient(
        watch, lambda: (len(truth[rows]) / 3 * cross_entropy(model(part), truth[rows]) for part, rows in parts)
    )
    at_theta = layerwise.meta_gradient(recording, log_probs, LABELS, index, at_theta, 0.05)
    difference = (at_theta.gradient - exact.gradient).norm() / exact.gradient.norm()
    assert 1e-4 < difference < 0.7, "v at theta is another number, though near"


def test_in_bfloat16_the_direction_stays(model):
    target, source = batch(model), batch(model, [4, 0, 2])
    truth, index = torch.tensor([1, 0, 2]), torch.full((5,), 2.0)

    def gradient():
        _, recording = recorded(model, target)
        log_probs = torch.log_softmax(recording.logits, dim=1)
        source_loss = lambda: [cross_entropy(model(source), truth)]  # noqa: E731
        return layerwise.meta_gradient(recording, log_probs, LABELS, index, source_loss, 0.01).gradient

    exact = gradient()
    model.precision = torch.bfloat16
    try:
        rounded = gradient()
    finally:
        model.precision = None
    assert F.cosine_similarity(rounded, exact, dim=0) > 0.99


def test_words_that_repeat_and_padding_share_a_row_of_the_table(model):
    """The gradient of a repeated word is the sum over its places."""
    inputs = model.collate(model.encode_texts(["good1 good1 good1", "good1"]), np.arange(2))
    _, recording = recorded(model, inputs, torch.tensor([0, 1]))
    each = one_by_one(model, inputs, torch.tensor([0, 1]))
    table = model.network.get_input_embeddings().weight
    name = next(name for name, value in model.named_parameters() if value is table)
    if model.frozen_layers:
        assert name not in recording.gradient(torch.ones(2)), "a frozen table has no gradient"
        return
    assert_near(recording.gradient(torch.ones(2))[name], each[0][name] + each[1][name])


def test_a_layer_that_is_called_twice_counts_twice():
    torch.manual_seed(0)
    layer, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    network = torch.nn.Sequential(layer, torch.nn.Tanh(), layer, torch.nn.GELU(), head)
    values, labels = torch.randn(3, 4), torch.tensor([0, 1, 1])
    parameters = dict(network.named_parameters())
    watch = layerwise.Recorder(network, parameters, lambda: network(values[:2]))
    recording = watch.record(lambda: network(values), 3)
    recording.backward(F.cross_entropy(recording.logits, labels, reduction="none"))
    weights = torch.tensor([1.0, -2.0, 0.5])
    loss = (weights * F.cross_entropy(network(values), labels, reduction="none")).sum()
    for (name, value), wanted in zip(
        recording.gradient(weights).items(), torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        torch.testing.assert_close(value, wanted, msg=name)


def test_other_kinds_of_layers_are_skipped():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    watch = layerwise.Recorder(network, dict(network.named_parameters()), lambda: network(torch.randn(2, 4)))
    assert watch.skipped == ["1.bias", "1.weight"] and watch.skipped_share == pytest.approx(8 / 38)


def test_uncertain_and_impossible_labels_stay_finite(model):
    inputs = batch(model)
    watch = recorder(model)
    recording = watch.record(lambda: 1e4 * model(inputs), 5)
    log_probs = torch.log_softmax(recording.logits, dim=1)
    recording.backward(tsallis.surprisal(log_probs, LABELS))
    found = layerwise.meta_gradient(
        recording, log_probs.detach(), LABELS, torch.full((5,), 2.0), lambda: [cross_entropy(model(inputs), LABELS)], 1e-9
    )
    assert torch.isfinite(found.gradient).all()
