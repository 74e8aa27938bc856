"""CST: its terms against loops, an inverse and finite differences; SAM; trajectories; whole runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mtem
from mtem.methods.cst import Cst, climb, reverse_loss, tsallis_term
from tests.bench import Bench, stopped_after
from tests.conftest import write_jsonl
from tests.reference import cst as reference
from tests.tolerance import assert_weights_near

ALL = np.arange(30)


def prepared(encoder, classes=2, **changes):
    """A bench without dropout whose model likes different classes on different texts, some surely and some not."""
    bench = Bench(Cst, encoder, 2e-3, **{"dropout": False, **changes})
    if classes > 2:
        torch.manual_seed(3)
        bench.model.head = nn.Linear(32, classes)
        bench.labels = np.random.default_rng(3).integers(classes, size=len(bench.labels))
    with torch.no_grad():
        inputs = bench.target_batch(ALL).inputs
        bench.model.head.weight /= bench.model(inputs).std(dim=0).mean()
        bench.model.head.bias -= bench.model(inputs).mean(dim=0)
    return bench


class Both(nn.Module):
    """Scores and features as a function of the weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model.eval()

    def forward(self, inputs):
        return self.model.logits_and_features(inputs)

    def at(self, params, inputs):
        return torch.func.functional_call(self, {f"model.{name}": value for name, value in params.items()}, (inputs,))


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slopes(function, point, step=1e-6):
    """Central differences, one coordinate at a time."""
    found = torch.zeros_like(point)
    for place in range(point.numel()):
        shift = torch.zeros_like(point)
        shift.view(-1)[place] = step
        found.view(-1)[place] = (function(point + shift) - function(point - shift)) / (2 * step)
    return found


# ---------------------------------------------------------------------- the Tsallis term


@pytest.mark.parametrize(("texts", "classes"), [(7, 3), (1, 3), (5, 2), (1, 2)])
@pytest.mark.parametrize(("alpha", "temperature"), [(1.9, 2.0), (1.9, 2.5), (1.5, 1.0), (2.0, 3.0)])
def test_tsallis_term_is_the_double_sum(texts, classes, alpha, temperature):
    """The value, and the gradient: through m, not through w."""
    scores = draw(texts, classes, seed=texts, scale=3.0)
    weights = reference.tsallis_weights(scores, temperature)
    expected = reference.tsallis(scores, temperature, alpha, weights)
    leaf = scores.clone().requires_grad_()
    found = tsallis_term(leaf, temperature, alpha)
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
    (gradient,) = torch.autograd.grad(found, leaf)
    with_constant_w = slopes(lambda point: reference.tsallis(point, temperature, alpha, weights), scores)
    torch.testing.assert_close(gradient, with_constant_w, atol=1e-8, rtol=1e-6)
    if texts > 1:
        moving = slopes(
            lambda point: reference.tsallis(point, temperature, alpha, reference.tsallis_weights(point, temperature)), scores
        )
        assert (gradient - moving).abs().max() > 1e-4, "the weights w would matter if they were differentiated"


def test_tsallis_term_is_continuous_at_1():
    scores = draw(6, 4, scale=2.0)
    at_1 = tsallis_term(scores, 2.0, 1.0).item()
    assert tsallis_term(scores, 2.0, 1 + 1e-9).item() == pytest.approx(at_1, rel=1e-7)
    assert reference.tsallis(scores, 2.0, 1 + 1e-6, reference.tsallis_weights(scores, 2.0)).item() == pytest.approx(
        at_1, rel=1e-4
    )


@pytest.mark.parametrize("alpha", [1.0, 1.9, 2.0])
def test_tsallis_term_of_extreme_scores_is_finite(alpha):
    """A class that no text has any probability of: m_k is 0 in float32."""
    scores = torch.tensor([[0.0, 0.0, -1e4], [900.0, 0.0, -1e4]], requires_grad=True)
    value = tsallis_term(scores, 1.0, alpha)
    (gradient,) = torch.autograd.grad(value, scores)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()


def test_tsallis_term_does_not_grow_with_the_batch():
    scores = draw(5, 3, scale=2.0)
    assert tsallis_term(scores.repeat(4, 1), 2.0, 1.9).item() == pytest.approx(tsallis_term(scores, 2.0, 1.9).item())
    assert 0 < tsallis_term(torch.zeros(50, 3), 2.0, 1.9) < 3
    sure = 50.0 * torch.eye(3).repeat(5, 1)
    assert tsallis_term(sure, 2.0, 1.9).abs() < 1e-6


# ---------------------------------------------------------------------- the reverse step


@pytest.mark.parametrize(
    ("source", "target", "width", "classes"), [(6, 5, 4, 3), (4, 9, 3, 2), (1, 1, 4, 3), (3, 1, 2, 2), (5, 5, 8, 5)]
)
@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_reverse_loss_is_the_dense_solve_and_its_gradient_that_of_finite_differences(source, target, width, classes, ridge):
    source_features, target_features = draw(source, width, seed=1), draw(target, width, seed=2, scale=4.0)
    labels = [number % classes for number in range(source)]
    pseudo = [(2 * number + 1) % classes for number in range(target)]

    def value(f_s, f_t):
        return reference.reverse_value(f_s.numpy(), labels, f_t.numpy(), pseudo, classes, ridge)

    leaves = [source_features.clone().requires_grad_(), target_features.clone().requires_grad_()]
    found = reverse_loss(leaves[0], torch.tensor(labels), leaves[1], torch.tensor(pseudo), classes, ridge)
    assert found.item() == pytest.approx(value(source_features, target_features), rel=1e-9)
    by_source, by_target = torch.autograd.grad(found, leaves)
    torch.testing.assert_close(by_source, slopes(lambda f: value(f, target_features), source_features), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(by_target, slopes(lambda f: value(source_features, f), target_features), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [2, 2, 2, 2]])
def test_reverse_loss_of_one_class(labels):
    """A head that knows one class still is a regression: finite, and right where the source has that class alone."""
    features = draw(4, 6, seed=4).float().abs() + 1
    labels = torch.tensor(labels)
    same = reverse_loss(features, labels, features, labels, 3, 1e-3)
    other = reverse_loss(features, (labels + 1) % 3, features, labels, 3, 1e-3)
    assert torch.isfinite(other) and same < 1e-2 < other


def test_reverse_loss_falls_when_the_pseudo_labels_are_right():
    torch.manual_seed(0)
    means = 3 * torch.eye(3, 8)
    source_labels, labels = torch.arange(3).repeat(10), torch.arange(3).repeat(12)
    source_features = means[source_labels] + 0.3 * torch.randn(30, 8)
    target_features = means[labels] + 0.3 * torch.randn(36, 8)
    right = reverse_loss(source_features, source_labels, target_features, labels, 3, 1e-3)
    wrong = reverse_loss(source_features, source_labels, target_features, (labels + 1) % 3, 3, 1e-3)
    assert right < 0.1 < wrong


def test_reverse_loss_of_zero_and_of_equal_features_is_finite():
    """Rows without a direction, and a kernel of rank one that only the ridge makes invertible."""
    for target in (torch.zeros(4, 3), torch.ones(40, 3)):
        source, target = torch.eye(3).requires_grad_(), target.requires_grad_()
        loss = reverse_loss(source, torch.tensor([0, 1, 0]), target, torch.arange(len(target)) % 2, 2, 1e-3)
        gradients = torch.autograd.grad(loss, (source, target))
        assert torch.isfinite(loss) and all(torch.isfinite(gradient).all() for gradient in gradients)


# ---------------------------------------------------------------------- the whole loss


CONSTANTS = reference.Constants(
    a=0.3, b=0.8, c=0.6, alpha=1.7, temperature=2.5, ridge=0.01, threshold=0.75, rho=0.0, adaptive=False
)


def settings_of(constants):
    return {
        "tsallis_weight": constants.a, "reverse_weight": constants.b, "consistency_weight": constants.c,
        **{name: getattr(constants, name) for name in ("alpha", "temperature", "ridge", "threshold", "rho", "adaptive")},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "frozen", "strong", "rho", "adaptive"),
    [
        (2, 0, "mixed", 0.0, False),
        (2, 0, "mixed", 0.3, False),
        (3, 0, "mask", 0.3, False),
        (2, 1, "mixed", 0.3, False),
        (2, 1, "mask", 0.02, True),
        (3, 0, "swap", 0.02, True),
    ],
)
def test_trajectory_is_the_formula(encoder, classes, frozen, strong, rho, adaptive):
    constants = CONSTANTS._replace(rho=rho, adaptive=adaptive)
    ours = prepared(encoder, classes, frozen=frozen, view=strong, **settings_of(constants))
    both, theta, changed, shares = Both(ours.model), ours.weights(), 0, []
    for number in range(5):
        source, target = ours.batches()
        drawn = torch.Generator()
        drawn.set_state(ours.context.generator.get_state())
        view = ours.model.augment(ours.model.prepare(target.inputs), strong, 0.3, drawn)
        ours.model.eval()
        inputs = (source.inputs, source.labels, target.inputs, view)
        theta, different = reference.step(both.at, theta, *inputs, constants, ours.rate)
        changed += different
        shares.append(float(ours.method.step(number, source, target, ours.update)["confident_share"]))
        assert_weights_near(ours.weights(), theta)
    assert 0 < np.mean(shares) < 1, "the threshold must divide the texts"
    assert changed > 0 or not rho, "some pseudo labels must differ between the two passes"


def test_terms_are_logged_at_theta_and_add_up(encoder):
    bench = prepared(encoder, **settings_of(CONSTANTS._replace(rho=0.5)))
    source, target = bench.batches()
    with torch.no_grad():
        bench.model.train()
        strong = bench.model.augment(target.inputs, "mixed", 0.3, torch.Generator().manual_seed(0))
        loss, at_theta = bench.method.loss(source, target.inputs, strong)
    log = bench.step(0, source, target)
    assert log.keys() == {"source_loss", "tsallis_loss", "reverse_loss", "consistency_loss", "confident_share"}
    for name, value in at_theta.items():
        torch.testing.assert_close(log[name], value)
    terms = log["source_loss"] + 0.3 * log["tsallis_loss"] + 0.8 * log["reverse_loss"] + 0.6 * log["consistency_loss"]
    torch.testing.assert_close(terms, loss)


def test_pseudo_labels_of_the_reverse_step_are_constants(encoder):
    """The reverse term alone moves the encoder and leaves the head, which decides the labels, where it is."""
    constants = CONSTANTS._replace(a=0.0, c=0.0)
    with_term, without = (prepared(encoder, **settings_of(constants._replace(b=b))) for b in (0.8, 0.0))
    source, target = with_term.batches()
    for bench in (with_term, without):
        bench.step(0, source, target)
    same = {name: torch.equal(value, without.weights()[name]) for name, value in with_term.weights().items()}
    assert {name for name, equal in same.items() if equal} == with_term.model.head_names()


def test_class_weights_reach_the_source_loss(encoder):
    losses = []
    for weights in (None, torch.tensor([1.0, 5.0])):
        bench = prepared(encoder)
        bench.context.class_weights = weights
        losses.append(bench.step(0, bench.source_batch(np.arange(5)), bench.target_batch(np.arange(5)))["source_loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("source_rows", "target_rows"), [([3], [4]), ([0, 2, 4], [1, 3, 5]), ([0, 1, 2], [7])])
def test_single_texts_and_single_classes(encoder, source_rows, target_rows, precision):
    bench = prepared(encoder, dropout=True, threshold=0.0)
    bench.model.precision = precision
    before = bench.weights()
    log = bench.step(0, bench.source_batch(source_rows), bench.target_batch(target_rows))
    assert all(torch.isfinite(value).all() for value in [*log.values(), *bench.weights().values()])
    assert any(not torch.equal(before[name], value) for name, value in bench.weights().items())


# ---------------------------------------------------------------------- SAM


class Watch:
    """The weights at the moment of the update, and after `before_step`."""

    def __init__(self, bench):
        self.bench, self.start = bench, bench.weights()

    def __call__(self, loss, before_step=None):
        self.before_step = before_step
        self.moved = self.bench.weights()
        gradients = torch.autograd.grad(loss, list(self.bench.parameters().values()))
        self.gradients = dict(zip(self.bench.parameters(), gradients, strict=True))
        if before_step is not None:
            before_step()
        self.end = self.bench.weights()


def watched(encoder, rows=8, **changes):
    bench = prepared(encoder, **changes)
    watch = Watch(bench)
    bench.method.step(0, bench.source_batch(np.arange(rows)), bench.target_batch(np.arange(rows)), watch)
    return watch


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize(("rho", "adaptive"), [(0.05, False), (0.7, False), (0.5, True)])
def test_sam_moves_along_the_gradient_and_comes_back_exactly(encoder, frozen, rho, adaptive):
    plain = watched(encoder, rho=0.0, frozen=frozen)
    sam = watched(encoder, rho=rho, adaptive=adaptive, frozen=frozen)
    assert all(torch.equal(sam.start[name], value) for name, value in plain.start.items())
    expected = reference.perturbation(sam.start, plain.gradients, rho, adaptive)
    # compared where they were added up: a difference of two weights has the weights' roundings, however small it is
    assert_weights_near(sam.moved, {name: sam.start[name] + value for name, value in expected.items()}, 20)
    if not adaptive:
        size = math.sqrt(sum(float(((sam.moved[name] - sam.start[name]).double() ** 2).sum()) for name in sam.start))
        assert size == pytest.approx(rho, rel=1e-4)
    assert all(torch.equal(sam.end[name], value) for name, value in sam.start.items())
    assert any((sam.gradients[name] - value).abs().max() > 1e-3 for name, value in plain.gradients.items())


def test_without_sam_there_is_one_pass_at_theta(encoder):
    plain = watched(encoder, rho=0.0)
    assert plain.before_step is None and all(torch.equal(plain.moved[name], value) for name, value in plain.start.items())


def test_both_passes_see_the_same_texts_with_other_dropout(encoder, monkeypatch):
    bench = Bench(Cst, encoder, rho=1e-12, view="mixed", threshold=0.0)
    seen, forward = [], type(bench.model).forward

    def watching(self, inputs):
        scores = forward(self, inputs)
        seen.append((self.training, inputs["input_ids"].clone(), scores.detach()))
        return scores

    monkeypatch.setattr(type(bench.model), "forward", watching)
    source, target = bench.batches()
    bench.step(0, source, target)
    assert len(seen) == 6 and all(training for training, _, _ in seen)
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first[1], second[1]) and not torch.allclose(first[2], second[2])
    assert torch.equal(seen[0][1], source.inputs["input_ids"]) and torch.equal(seen[1][1], target.inputs["input_ids"])
    assert not torch.equal(seen[2][1], target.inputs["input_ids"])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan])
def test_sam_stays_where_the_gradient_says_nothing(adaptive, factor):
    parameters = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor(3.0))]
    before = [parameter.detach().clone() for parameter in parameters]
    restore = climb(parameters, (factor * parameters[0]).sum(), 0.5, adaptive)
    assert all(torch.equal(parameter.detach(), value) for parameter, value in zip(parameters, before, strict=True))
    restore()
    assert all(torch.equal(parameter.detach(), value) for parameter, value in zip(parameters, before, strict=True))


def test_sam_leaves_parameters_that_the_loss_does_not_know():
    used, unused = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([1.0]))
    restore = climb([unused, used], (used**2).sum() / 2, 0.5, False)
    torch.testing.assert_close(used.detach(), torch.tensor([3.3, 4.4]))
    assert unused.item() == 1.0
    restore()
    assert used.tolist() == [3.0, 4.0]


def test_sam_finds_its_direction_in_half_precision():
    """Gradients that vanish in float16 as they are."""
    weight = nn.Parameter(torch.tensor([3e-2, 4e-2]))
    loss = 1e-6 * (weight.half() * torch.tensor([1e-2, 1e-2], dtype=torch.float16)).sum().float()
    (lost,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert not lost.any()
    before = weight.detach().clone()
    climb([weight], loss, 1.0, False)
    torch.testing.assert_close(weight.detach() - before, torch.full((2,), 0.5**0.5), atol=1e-2, rtol=0)


# ---------------------------------------------------------------------- whole runs

SHORT = {"source_epochs": 1, "steps": 5, "evaluations": 2}


@pytest.mark.parametrize("changes", [{}, {"frozen_layers": 1}, {"preset": "paper", "view": "mask", "frozen_layers": 1}])
def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, changes):
    asked = {**tiny, "method": "cst", "threshold": 0.6, "log_every": 1, "checkpoint_seconds": 0.0, **SHORT, **changes}
    mtem.adapt(**asked, output=tmp_path / "whole")
    with stopped_after(2):
        mtem.adapt(**asked, output=tmp_path / "cut")
    mtem.adapt(**asked, output=tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    lines = [
        [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in text.splitlines()]
        for text in ((tmp_path / name / "history.jsonl").read_text() for name in ("whole", "cut"))
    ]
    assert lines[0] == lines[1]
    adapting = [line for line in lines[0] if line["stage"] == "adapt"]
    assert len(adapting) == 5 and all(line["reverse_loss"] > 0 and line["tsallis_loss"] > 0 for line in adapting)


def test_three_classes_with_labeled_target_texts(encoder, tmp_path):
    names = ["one", "two", "three"]
    texts = [(f"word{3 * (i % 3)} word{20 + i % 17}", names[i % 3]) for i in range(60)]
    target_labeled = write_jsonl(tmp_path / "few.jsonl", texts[:5])
    adapted = mtem.adapt(
        tuple(map(list, zip(*texts, strict=True))), [f"word{i % 40} word{i % 7}" for i in range(45)], method="cst",
        model=encoder, target_labeled=str(target_labeled), source_epochs=1, steps=4, max_length=8, batch_size=7, frozen_layers=0,
    )  # fmt: skip
    assert set(adapted.classes) == set(names) and adapted.record["texts"]["target_labeled"] == 5
    assert np.isfinite(adapted.predict_proba(["word3 word6"])).all()


def test_the_real_optimizer_steps_from_theta(tiny):
    """With a learning rate of 0 nothing changes, wherever SAM has been in between."""
    asked = {**tiny, "source_epochs": 1, "steps": 4, "learning_rate": 0.0, "weight_decay": 0.0, "rho": 5.0}
    candidates = mtem.adapt(**asked, method="cst").record["selection"]["candidates"]
    assert len(candidates) == 4 and len({(entry["infomax"], entry["score"]) for entry in candidates}) == 1
