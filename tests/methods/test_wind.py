"""WIND: its closed forms, the three engines and whole trajectories against the literal reading, and what its weights do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import mtem
from mtem.errors import RequestError
from mtem.methods.base import cross_entropy, functional
from mtem.methods.wind import IN_DOMAIN, Wind, WindSettings, weighted_mean
from mtem.run.pipeline import Run
from tests.bench import SOURCE, TARGET_LABELED, Bench, stopped_after
from tests.conftest import examples, make_texts, write_jsonl
from tests.reference import wind as reference
from tests.tolerance import assert_weights_near

ENGINES = [("forward", 1e-4), ("second-order", 1e-4), ("taylor", 2e-2)]
RAW = {"weight_step": "raw", "weight_learning_rate": 5.0}


def bench(encoder, **changes) -> Bench:
    return Bench(Wind, encoder, target_labeled=True, **changes)


def functions(ours: Bench, source, target_labeled):
    """The batch's scores and the loss on the labeled target texts, as functions of the parameters."""
    return (
        lambda parameters: functional(ours.model, parameters, source.inputs),
        lambda parameters: cross_entropy(functional(ours.model, parameters, target_labeled.inputs), target_labeled.labels),
    )


def relative(got, wanted) -> float:
    return float((got - wanted).norm() / wanted.norm())


# ---------------------------------------------------------------------- the inner loss


@examples(25)
@given(
    rows=st.integers(1, 6), classes=st.integers(2, 5), seed=st.integers(0, 10**6), spread=st.sampled_from([0.5, 3.0, 30.0]),
    weighted=st.booleans(), in_domain=st.booleans(),
)  # fmt: skip
def test_closed_forms_are_the_derivatives(rows, classes, seed, spread, weighted, in_domain):
    draw = torch.Generator().manual_seed(seed)
    scores, tangents = (torch.randn(rows, classes, generator=draw, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(classes, (rows,), generator=draw)
    speeds = tangents[torch.arange(rows), labels]
    w = spread * torch.randn(rows, generator=draw, dtype=torch.float64)
    if in_domain:
        w[0] = IN_DOMAIN
    class_weights = 0.1 + torch.rand(classes, generator=draw, dtype=torch.float64) if weighted else None
    inner, log_probs = weighted_mean(class_weights), torch.log_softmax(scores, dim=1)

    def literal(log_probs, w):
        u = torch.sigmoid(w) * (1 if class_weights is None else class_weights[labels])
        losses = -log_probs[torch.arange(rows), labels]
        return (u * losses).sum() / u.sum()

    def literal_slope(log_probs):
        return torch.func.grad(literal, argnums=1)(log_probs, w)

    _, moving = torch.func.jvp(literal_slope, (log_probs,), (tangents,))
    torch.testing.assert_close(inner.value(log_probs, labels, w), literal(log_probs, w))
    torch.testing.assert_close(inner.derivative(log_probs, labels, w), literal_slope(log_probs), atol=1e-12, rtol=1e-6)
    torch.testing.assert_close(inner.mixed_derivative(log_probs, speeds, labels, w), moving, atol=1e-12, rtol=1e-6)
    weights = -torch.func.grad(literal)(log_probs, w)[torch.arange(rows), labels]
    torch.testing.assert_close(inner.weights(log_probs, labels, w), weights)


def test_equal_weights_are_the_ordinary_mean():
    scores, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 1, 1])
    for class_weights in (None, torch.tensor([1.0, 0.2, 3.0])):
        value = weighted_mean(class_weights).value(torch.log_softmax(scores, dim=1), labels, torch.full((6,), -0.7))
        torch.testing.assert_close(value, cross_entropy(scores, labels, class_weights))


def test_in_domain_texts_have_no_slope_and_hopeless_batches_a_loss():
    log_probs, labels = torch.log_softmax(torch.tensor([[2.0, -1.0], [0.3, 0.1]]), dim=1), torch.tensor([0, 0])
    inner, w = weighted_mean(), torch.tensor([IN_DOMAIN, 0.0])
    assert inner.derivative(log_probs, labels, w)[0] == 0 and inner.mixed_derivative(log_probs, torch.ones(2), labels, w)[0] == 0
    assert inner.derivative(log_probs, labels, w)[1] != 0
    given_up = torch.full((2,), -300.0)  # sigmoid is 0 there
    torch.testing.assert_close(inner.value(log_probs, labels, given_up), -log_probs[:, 0].mean())
    assert torch.isfinite(inner.derivative(log_probs, labels, given_up)).all()


# ---------------------------------------------------------------------- the weights' gradient


@pytest.mark.parametrize(("engine", "tolerance"), ENGINES)
@pytest.mark.parametrize("weighted", [False, True])
def test_engines_agree_with_autograd_through_the_virtual_step(encoder, engine, tolerance, weighted):
    ours = bench(encoder, engine=engine)
    ours.train_source(10)
    class_weights = [0.4, 2.5] if weighted else None
    if weighted:
        ours.context.class_weights = torch.tensor(class_weights)
        ours.method = Wind(ours.model, ours.method.settings, ours.context)
    source, target_labeled = ours.source_batch([0, 3, 7, 12, 21, 33, SOURCE, SOURCE + 3]), ours.context.target_labeled(0)
    ours.method.w[source.rows[:6]] = torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0, 0.5])
    before = ours.weights()
    gradient, meta_loss = ours.method.weight_gradient(source, target_labeled)
    scores_of, _ = functions(ours, source, target_labeled)

    def target_loss_of(parameters):
        return ours.method.cross_entropy(functional(ours.model, parameters, target_labeled.inputs), target_labeled.labels)

    wanted, loss = reference.meta_gradient(
        scores_of, target_loss_of, before, ours.method.w[source.rows], source.labels.tolist(), ours.rate, class_weights
    )
    assert relative(gradient, -wanted / ours.rate) < tolerance
    torch.testing.assert_close(meta_loss, loss)
    assert gradient[:6].abs().min() > 0 and torch.equal(gradient[6:], torch.zeros(2))
    assert all(torch.equal(value, before[name]) for name, value in ours.weights().items()), "theta must not move"
    assert all(parameter.grad is None for parameter in ours.model.parameters())


@pytest.mark.parametrize(("engine", "tolerance"), ENGINES)
def test_trajectory_is_the_literal_reading(encoder, engine, tolerance):
    ours = bench(encoder, dropout=False, engine=engine, **RAW)
    theta, w = ours.weights(), torch.zeros(SOURCE + TARGET_LABELED)
    w[SOURCE:] = 1e8
    for number in range(6):
        source, target = ours.batches()
        rows, target_labeled = source.rows, ours.context.target_labeled(number)
        theta, w[rows] = reference.step(
            *functions(ours, source, target_labeled),
            theta,
            w[rows],
            (rows >= SOURCE).tolist(),
            source.labels.tolist(),
            ours.rate,
            5.0,
        )
        ours.step(number, source, target)
        torch.testing.assert_close(ours.method.w, w, atol=tolerance, rtol=tolerance)
        for name, value in ours.weights().items():
            torch.testing.assert_close(value, theta[name], atol=max(1e-5, tolerance * 0.05), rtol=1e-3)
    assert w[:SOURCE].abs().max() > 0.3, "the reference itself must have moved the weights"


def test_inner_steps_repeat_the_move(encoder):
    twice, once = bench(encoder, inner_steps=2, dropout=False, **RAW), bench(encoder, dropout=False, **RAW)
    source, target = twice.batches()
    target_labeled = once.context.target_labeled(0)
    for _ in range(2):
        gradient, _ = once.method.weight_gradient(source, target_labeled)
        once.method.w[source.rows] += 5.0 * gradient
    twice.step(0, source, target)
    torch.testing.assert_close(twice.method.w, once.method.w)
    assert once.method.w[:SOURCE].abs().max() > 0.01


@pytest.mark.parametrize("kind", ["raw", "norm", "rms", "sign"])
def test_step_normalisations(encoder, kind):
    method = bench(encoder, weight_step=kind).method
    gradient, w = torch.tensor([3e-7, -4e-7, 0.0]), torch.tensor([0.0, 1.0, IN_DOMAIN])
    wanted = {
        "raw": gradient,
        "norm": torch.tensor([0.6, -0.8, 0.0]),
        "rms": torch.tensor([0.6, -0.8, 0.0]) * 2**0.5,  # of the two that are learned
        "sign": torch.tensor([1.0, -1.0, 0.0]),
    }[kind]
    torch.testing.assert_close(method.scaled(gradient, w), wanted)
    assert torch.equal(method.scaled(torch.zeros(3), w), torch.zeros(3))
    assert torch.equal(method.scaled(torch.zeros(2), torch.full((2,), IN_DOMAIN)), torch.zeros(2))


@pytest.mark.parametrize("engine", [name for name, _ in ENGINES])
def test_a_rate_of_nothing_gives_the_limit(encoder, engine):
    ours = bench(encoder, engine=engine, **RAW)
    source, target_labeled = ours.batches()[0], ours.context.target_labeled(0)
    ours.context.learning_rate = lambda: 0.0
    still, _ = ours.method.weight_gradient(source, target_labeled)
    ours.context.learning_rate = lambda: 1e-6
    moving, _ = ours.method.weight_gradient(source, target_labeled)
    assert torch.isfinite(still).all() and still.norm() > 0
    assert relative(still, moving) < 1e-3


def test_virtual_rate_takes_the_place_of_the_current_one(encoder):
    ours, other = bench(encoder, learning_rate=0.05), bench(encoder, learning_rate=0.5, virtual_learning_rate=0.05)
    source, target_labeled = ours.batches()[0], ours.context.target_labeled(0)
    assert torch.equal(
        ours.method.weight_gradient(source, target_labeled)[1], other.method.weight_gradient(source, target_labeled)[1]
    )
    plain = bench(encoder, learning_rate=0.5)
    assert not torch.equal(
        plain.method.weight_gradient(source, target_labeled)[1], other.method.weight_gradient(source, target_labeled)[1]
    )


# ---------------------------------------------------------------------- what the weights do


def learn(ours: Bench, steps: int) -> None:
    """A model that knows its labeled texts, quicker than by the bench's plain steps."""
    optimizer = torch.optim.Adam(ours.model.parameters(), lr=3e-3)
    for _ in range(steps):
        source, _ = ours.batches()
        optimizer.zero_grad()
        cross_entropy(ours.model(source.inputs), source.labels).backward()
        optimizer.step()
    optimizer.zero_grad()


def test_weights_fall_on_corrupted_labels(encoder):
    gaps = []
    for seed in range(3):
        ours = bench(encoder, seed=seed, learning_rate=0.01)
        assert ours.method.settings == WindSettings(), "as recommended"
        learn(ours, 30)
        corrupted = np.random.default_rng(seed).permutation(SOURCE)[:10]
        ours.labels[corrupted] = 1 - ours.labels[corrupted]
        for number in range(20):
            ours.step(number)
        u = ours.method.sample_weights()
        gaps.append(float(u[np.setdiff1d(np.arange(SOURCE), corrupted)].mean() - u[corrupted].mean()))
        assert torch.equal(u[SOURCE:], torch.ones(TARGET_LABELED)), "the target's own texts keep their weight"
    assert np.mean(gaps) > 0.25 and min(gaps) > 0.1, gaps


def test_default_step_moves_the_weights_and_the_published_one_hardly(encoder):
    moved = {}
    for preset in ("recommended", "paper"):
        ours = bench(encoder, **Wind.presets[preset])
        for number in range(8):
            ours.step(number)
        moved[preset] = float((ours.method.sample_weights()[:SOURCE] - 0.5).abs().mean())
    assert moved["recommended"] > 0.1 > 0.02 > moved["paper"] > 0


def test_new_weights_enter_the_update(encoder):
    """A batch of two texts, one of them given up: the update is the other's alone."""
    ours = bench(encoder, weight_learning_rate=0.0, dropout=False)
    source = ours.source_batch([0, 1])
    ours.method.w[0] = -100.0
    before = ours.weights()
    log = ours.step(0, source, ours.batches()[1])
    moved = ours.weights()
    plain = bench(encoder, dropout=False)
    single = plain.source_batch([1])
    assert all(torch.equal(value, before[name]) for name, value in plain.weights().items())
    loss = cross_entropy(plain.model(single.inputs), single.labels)
    plain.update(loss)
    assert_weights_near(moved, plain.weights(), 20)
    torch.testing.assert_close(log["source_loss"], loss.detach())
    assert float(log["sample_weight"]) == pytest.approx(0.25)


def test_dropout_is_in_the_update_only(encoder):
    ours = bench(encoder)
    source, target = ours.batches()
    target_labeled = ours.context.target_labeled(0)
    ours.model.train()
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(ours.method.weight_gradient(source, target_labeled)[0])
    assert torch.equal(found[0], found[1]) and ours.model.training
    ours.model.eval()
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ours.method.w[:SOURCE] = 0.0
        ours.method.step(0, source, target, lambda loss: losses.append(float(loss.detach())))
    assert losses[0] != losses[1]


@pytest.mark.parametrize("rows", [[4], [2, 4, 6], [SOURCE, SOURCE + 1], [SOURCE]])
@pytest.mark.parametrize("kind", ["rms", "sign"])
def test_odd_batches(encoder, rows, kind):
    """One text, one class, the target's texts alone."""
    ours = bench(encoder, weight_step=kind)
    log = ours.method.step(0, ours.source_batch(rows), None, ours.update)
    assert all(np.isfinite(float(value)) for value in log.values())
    assert torch.isfinite(ours.method.w).all()
    if len(rows) == 1:
        assert torch.equal(ours.method.w[:SOURCE], torch.zeros(SOURCE)), "alone, a text has nothing to be weighed against"


def test_state_round_trip(encoder):
    ours, other = bench(encoder), bench(encoder, seed=1)
    ours.step(0)
    other.method.load_state({name: value.clone() for name, value in ours.method.state().items()})
    assert torch.equal(other.method.w, ours.method.w) and ours.method.w[:SOURCE].std() > 0


# ---------------------------------------------------------------------- whole runs


def test_it_refuses_to_run_without_labeled_target_texts(tiny):
    with pytest.raises(RequestError, match=r"wind.*--target-labeled"):
        mtem.adapt(**tiny, method="wind")


def everything(method) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in {**method.model.trainable(), "u": method.sample_weights()}.items()}


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, frozen):
    target_labeled = write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))
    request = {
        **tiny,
        "method": "wind",
        "target_labeled": str(target_labeled),
        "frozen_layers": frozen,
        "checkpoint_seconds": 0.0,
    }
    request |= {"source_epochs": 1, "criterion": "source-validation"}
    ends = []
    finish = Run.finish
    monkeypatch.setattr(Run, "finish", lambda self, method: (ends.append(everything(method)), finish(self, method))[1])
    mtem.adapt(**request, output=tmp_path / "whole")
    with stopped_after(4):
        mtem.adapt(**request, output=tmp_path / "cut")
    mtem.adapt(**request, output=tmp_path / "cut", resume=True)
    whole, cut = ends
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    start = load_file(tmp_path / "whole" / "checkpoints" / "source.safetensors")
    assert any(not torch.equal(value, whole[name]) for name, value in start.items())
    assert len(whole["u"]) == 126 and torch.equal(whole["u"][120:], torch.ones(6)) and whole["u"][:120].std() > 0.02
