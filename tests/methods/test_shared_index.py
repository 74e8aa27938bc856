"""The index that all texts share: its chain rule against autograd, what its features see and do not see, and its memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.func import functional_call

import mtem
from mtem import tsallis
from mtem.methods.base import cross_entropy
from mtem.methods.mtem import Mtem
from mtem.methods.shared_index import FEATURES, START, SharedIndex
from tests.bench import Bench, stopped_after

W = [0.2, 0.3, -0.2, 0.1, 0.4]
LITERAL = {"view": "dropout", "view_strength": 0.0, "sampling": False, "source_weight": 0.0, "dropout": False}


def bench(encoder, **changes):
    made = Bench(Mtem, encoder, index_mode="shared", **{**LITERAL, **changes})
    made.model.eval()
    return made


@pytest.mark.parametrize(("threshold", "kept"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("engine", "tolerance"), [("layerwise", 1e-3), ("forward", 1e-3), ("second-order", 1e-3), ("taylor", 0.05)]
)
def test_the_chain_rule_is_autograds(encoder, engine, tolerance, threshold, kept):
    """Of the loss on the labeled batch, or on a batch that is `kept` for the outer loop."""
    ours = bench(encoder, engine=engine)
    ours.train_source(20)
    shared = ours.method.shared
    shared.w.copy_(torch.tensor(W))
    seen = {}
    shared.learn = lambda gradient, phi: seen.update(found=shared.gradient(gradient, phi), phi=phi.clone())
    source, target = ours.batches()
    outer = source
    if kept:
        outer, _ = ours.batches()
        ours.context.outer = lambda number: outer
    with torch.no_grad():
        middle = float(torch.softmax(ours.model.eval()(target.inputs), dim=1).amax(dim=1).median()) if threshold else 0.0
    ours.method.settings = dataclasses.replace(ours.method.settings, threshold=middle)
    theta = {name: value.detach().clone().requires_grad_() for name, value in ours.model.trainable().items()}
    ours.method.step(0, source, target, ours.update)

    w = torch.tensor(W, requires_grad=True)
    scores = functional_call(ours.model, theta, (target.inputs,))
    sure, labels = torch.softmax(scores.detach(), dim=1).max(dim=1)
    index = 1 + torch.nn.functional.softplus(seen["phi"] @ w)
    losses = tsallis.loss(torch.log_softmax(scores, dim=1), labels, index) * (sure >= middle)
    moved = torch.autograd.grad(losses.mean(), list(theta.values()), create_graph=True)
    after = {name: value - ours.rate * change for (name, value), change in zip(theta.items(), moved, strict=True)}
    loss = cross_entropy(functional_call(ours.model, after, (outer.inputs,)), outer.labels)
    (expected,) = torch.autograd.grad(loss, w)
    assert expected.abs().max() > 0
    torch.testing.assert_close(seen["found"], expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


def test_features_do_not_tell_the_class(encoder):
    """With the two classes of the head exchanged, labels are the other ones and features are the same."""
    one, other = bench(encoder), bench(encoder)
    with torch.no_grad():
        other.model.head.weight.copy_(one.model.head.weight.flip(0))
        other.model.head.bias.copy_(one.model.head.bias.flip(0))
    source, target = one.batches()
    turned = source._replace(labels=1 - source.labels)
    for made, batch in ((one, source), (other, turned)):
        with torch.no_grad():
            pseudo = made.method.pseudo_labels(target, 1.0)
            made.method._describe(made.method.shared, target.inputs, pseudo, target.rows, batch)
    assert torch.equal(one.method.shared.labels[target.rows], 1 - other.method.shared.labels[target.rows])
    torch.testing.assert_close(one.method._phi, other.method._phi)
    assert one.method._phi.shape == (len(target.rows), len(FEATURES)) and one.method._phi[:, 4].std() > 0


def test_every_index_is_near_one_at_first(encoder):
    method = bench(encoder).method
    assert torch.allclose(method.index, torch.full_like(method.index, 1 + float(np.log1p(np.exp(START)))))


def test_the_rule_goes_against_the_gradient():
    rule = SharedIndex(4, 2, 3, 0.1, torch.device("cpu"))
    phi = torch.tensor([[1.0, 2.0, 0.0, 0.0, -1.0]])
    before = rule.index(phi)
    for _ in range(5):
        rule.learn(torch.tensor([1e-7]), phi)
    assert rule.index(phi) < before
    torch.testing.assert_close(rule.w, torch.tensor([START - 0.5, -0.5, 0.0, 0.0, 0.5]), atol=0.05, rtol=0)  # 5 steps of Adam


def test_stability_is_the_share_of_visits_without_a_change():
    rule = SharedIndex(3, 2, 3, 0.1, torch.device("cpu"))
    rows = torch.tensor([0, 2])
    for labels in ([0, 1], [0, 0], [0, 0]):
        rule.visit(rows, torch.tensor(labels))
    torch.testing.assert_close(rule.stability, torch.tensor([1.0, 1.0, 0.7 * 0.7 + 0.3]))
    assert rule.labels.tolist() == [0, -1, 0]


def test_centres_are_of_the_classes_that_were_seen():
    rule = SharedIndex(3, 3, 2, 0.1, torch.device("cpu"))
    features = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    rule.see_labeled(features, torch.tensor([0, 0, 2]))
    torch.testing.assert_close(rule.centres, torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    rule.see_labeled(features[2:], torch.tensor([0]))
    torch.testing.assert_close(rule.centres[0], torch.tensor([0.95, 0.05]))
    rows, half = torch.arange(3), torch.full((3,), 0.5)
    phi = rule.describe(rows, half, half, torch.tensor([[3.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]))
    torch.testing.assert_close(phi[:, 4], torch.tensor([2 * (0.95 / np.hypot(0.95, 0.05) - 0.5), -1.0, -1.0]).float())


def test_certain_predictions_have_finite_features():
    rule = SharedIndex(2, 2, 2, 0.1, torch.device("cpu"))
    phi = rule.describe(torch.arange(2), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 1.0]), torch.zeros(2, 2))
    assert phi.isfinite().all() and rule.index(phi).isfinite().all()


def test_a_stopped_run_resumes_to_the_same_rule(tiny, tmp_path):
    asked = {**tiny, "index_mode": "shared", "threshold": 0.0, "steps": 14, "evaluations": 2, "checkpoint_seconds": 0.0}
    whole = mtem.adapt(**asked, output=tmp_path / "whole")
    with stopped_after(5):
        mtem.adapt(**asked, output=tmp_path / "cut")
    cut = mtem.adapt(**asked, output=tmp_path / "cut", resume=True)
    assert whole.indexes.equals(cut.indexes)
    assert whole.indexes["index"].nunique() > 10 and whole.indexes["index"].between(1, 5).all()
