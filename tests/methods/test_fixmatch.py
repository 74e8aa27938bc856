"""FixMatch against a literal reading of it, what it ignores, which pass sees what, and whole runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import mtem
from mtem.methods.base import functional
from mtem.methods.fixmatch import FixMatch, confident_labels, masked_cross_entropy
from tests.bench import Bench, stopped_after
from tests.conftest import make_texts, write_jsonl
from tests.reference import fixmatch as reference
from tests.tolerance import assert_near, assert_weights_near

STILL = {"view": "dropout", "dropout": False}  # both views are the text itself


def prepared(encoder, threshold=0.75, classes=2, **changes):
    """A bench whose model likes different classes on different texts, some above the threshold and some below."""
    bench = Bench(FixMatch, encoder, 2e-3, threshold=threshold, **{"dropout": False, **changes})
    if classes > 2:
        torch.manual_seed(3)
        bench.model.head = torch.nn.Linear(32, classes)
        bench.labels = np.random.default_rng(3).integers(classes, size=len(bench.labels))
    with torch.no_grad():
        inputs = bench.target_batch(np.arange(30)).inputs
        bench.model.head.weight /= bench.model(inputs).std(dim=0).mean()
        bench.model.head.bias -= bench.model(inputs).mean(dim=0)
    return bench


def sorted_rows(bench, threshold):
    """The target rows whose likeliest class has at least that probability, and the others."""
    with torch.no_grad():
        scores = bench.model.eval()(bench.target_batch(np.arange(30)).inputs)
    sure = (torch.softmax(scores, dim=1).amax(dim=1) >= threshold).numpy()
    return np.flatnonzero(sure), np.flatnonzero(~sure)


def spied(monkeypatch, bench):
    """What every forward pass of the model met: training mode, gradients, token numbers."""
    seen, forward = [], type(bench.model).forward

    def watching(self, inputs):
        seen.append((self.training, torch.is_grad_enabled(), inputs["input_ids"].clone()))
        return forward(self, inputs)

    monkeypatch.setattr(type(bench.model), "forward", watching)
    return seen


def moved(ours, view, target, radius):
    """The view with its embeddings moved against its labels, one text at a time; directions by plain autograd."""
    model = ours.model.eval()
    view = model.prepare(view)
    start = model.input_embeddings(view)
    labels, rows = model(target.inputs).argmax(dim=1), []
    for text, label in enumerate(labels.tolist()):
        noise = torch.zeros_like(start, requires_grad=True)
        loss = -torch.log(reference.probabilities(model(model.with_noise(view, noise))[text])[label])
        direction = torch.autograd.grad(loss, noise)[0][text] * view["attention_mask"][text].unsqueeze(-1)
        size = (start[text] * view["attention_mask"][text].unsqueeze(-1)).norm()
        rows.append(radius * size * direction / direction.norm())
    return model.with_noise(view, torch.stack(rows).detach())


@pytest.mark.parametrize(
    ("classes", "frozen", "strong", "weak", "radius"),
    [
        (2, 0, "mixed", "plain", 0.0), (3, 0, "mask", "dropout", 0.0), (2, 1, "mixed", "plain", 0.0),
        (2, 1, "mask", "plain", 0.0), (3, 0, "mixed", "plain", 0.2), (2, 1, "mask", "plain", 0.2),
    ],
)  # fmt: skip
def test_trajectory_is_the_formula(encoder, classes, frozen, strong, weak, radius):
    ours = prepared(encoder, 0.75, classes, frozen=frozen, view=strong, weak=weak, weight=0.7, view_radius=radius)
    theta, shares = ours.weights(), []
    for number in range(5):
        source, target = ours.batches()
        drawn = torch.Generator()
        drawn.set_state(ours.context.generator.get_state())
        view = ours.model.augment(ours.model.prepare(target.inputs), strong, 0.3, drawn)
        view = moved(ours, view, target, radius) if radius else view
        theta = reference.step(
            lambda params, inputs: functional(ours.model.eval(), params, inputs),
            theta, source.inputs, source.labels, target.inputs, view, ours.method.settings.threshold, 0.7, ours.rate,
        )  # fmt: skip
        shares.append(float(ours.method.step(number, source, target, ours.update)["confident_share"]))
        assert_weights_near(ours.weights(), theta)
    assert 0 < np.mean(shares) < 1, "the threshold must divide the texts"


def test_texts_below_the_threshold_are_not_looked_at(encoder):
    """Others in their place change nothing; others in the place of a sure text do."""
    sure, unsure = sorted_rows(prepared(encoder), 0.75)
    assert len(sure) > 5 and len(unsure) > 5
    ends = {}
    for name, rows in {
        "first": [*sure[:3], *unsure[:3]],
        "other unsure": [*sure[:3], *unsure[-3:]],
        "other sure": [*sure[-3:], *unsure[:3]],
    }.items():
        bench = prepared(encoder, **STILL)
        log = bench.step(0, bench.source_batch(np.arange(6)), bench.target_batch(rows))
        assert float(log["confident_share"]) == 0.5
        ends[name] = bench.weights()
    assert_weights_near(ends["other unsure"], ends["first"], 10)
    assert any((ends["other sure"][name] - value).abs().max() > 1e-5 for name, value in ends["first"].items())


def test_with_no_text_above_the_threshold_it_is_a_source_step(encoder):
    ours, plain = (prepared(encoder, threshold=1.1) for _ in range(2))
    source, target = ours.batches()
    log = ours.step(0, source, target)
    plain.update(plain.method.cross_entropy(plain.model(source.inputs), source.labels))
    assert float(log["consistency_loss"]) == 0 == float(log["confident_share"])
    for name, value in plain.weights().items():
        assert torch.equal(ours.weights()[name], value)


def test_the_mean_is_over_the_whole_batch(encoder):
    bench = prepared(encoder, **STILL)
    sure, unsure = sorted_rows(bench, 0.75)
    target = bench.target_batch([sure[0], *unsure[:4]])
    with torch.no_grad():
        alone = -torch.log_softmax(bench.model(target.inputs)[0], dim=0).max()
    log = bench.step(0, bench.source_batch([0, 1]), target)
    torch.testing.assert_close(log["consistency_loss"], alone / 5)


def test_weight_multiplies_the_target_loss(encoder):
    changes, size = {}, 0.0
    for weight in (0.0, 1.0, 3.0):
        bench = prepared(encoder, **STILL, threshold=0.5, weight=weight)
        before = bench.weights()
        bench.step(0, bench.source_batch([0, 1, 2]), bench.target_batch([0, 1, 2]))
        changes[weight] = {name: value - before[name] for name, value in bench.weights().items()}
        size = max(float(value.abs().max()) for value in before.values())
    for name, zero in changes[0.0].items():
        # differences of weights have the weights' roundings, however small they are
        assert_near(changes[3.0][name] - zero, 3 * (changes[1.0][name] - zero), 20, size=size, msg=name)
    assert any((changes[1.0][name] - zero).abs().max() > 1e-4 for name, zero in changes[0.0].items())


@pytest.mark.parametrize("weak", ["plain", "dropout"])
def test_which_pass_sees_what(encoder, monkeypatch, weak):
    bench = Bench(FixMatch, encoder, weak=weak, view="swap", view_strength=1.0)
    seen = spied(monkeypatch, bench)
    source, target = bench.batches()
    for _ in range(2):  # the second step begins in the mode the first one ended in
        seen.clear()
        bench.step(0, source, target)
        modes = [(training, gradients) for training, gradients, _ in seen]
        assert modes == [(weak == "dropout", False), (True, True), (True, True)]
        assert torch.equal(seen[0][2], target.inputs["input_ids"])
        assert torch.equal(seen[1][2], source.inputs["input_ids"])
        assert not torch.equal(seen[2][2], target.inputs["input_ids"])
        assert torch.equal(seen[2][2].sort(dim=1).values, target.inputs["input_ids"].sort(dim=1).values)


def test_labels_are_constants_and_learned_by_the_strong_view_alone():
    weak = torch.tensor([[3.0, 0.0, 0.0], [0.1, 0.0, 0.2], [0.0, 0.0, 5.0]], requires_grad=True)
    strong = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels, sure = confident_labels(weak, 0.9)
    assert labels.tolist() == [0, 2, 2] and sure.tolist() == [True, False, True]
    loss = masked_cross_entropy(strong, labels, sure)
    by_weak, by_strong = torch.autograd.grad(loss, (weak, strong), allow_unused=True)
    wanted = (torch.softmax(strong, dim=1) - F.one_hot(labels, 3)) * sure.unsqueeze(1) / 3
    assert by_weak is None
    torch.testing.assert_close(by_strong, wanted.detach())


def test_a_probability_equal_to_the_threshold_counts():
    assert confident_labels(torch.zeros(2, 2), 0.5)[1].all() and not confident_labels(torch.zeros(2, 2), 0.5001)[1].any()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize(("source_rows", "target_rows"), [([3], [4]), ([0, 2, 4], [1, 3, 5]), ([0, 1, 2], [7])])
def test_single_texts_and_single_classes(encoder, source_rows, target_rows, precision):
    bench = prepared(encoder, threshold=0.0)
    bench.model.precision = precision
    before = bench.weights()
    log = bench.step(0, bench.source_batch(source_rows), bench.target_batch(target_rows))
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in log.values()) and log["consistency_loss"] > 0
    assert all(torch.isfinite(value).all() for value in bench.weights().values())
    assert any(not torch.equal(before[name], value) for name, value in bench.weights().items())


# ---------------------------------------------------------------------- whole runs

SHORT = {"source_epochs": 1, "steps": 5, "evaluations": 2}


@pytest.mark.parametrize("changes", [{}, {"frozen_layers": 1}, {"frozen_layers": 1, "view": "mask"}])
def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, changes):
    asked = {**tiny, "method": "fixmatch", "threshold": 0.6, "log_every": 1, "checkpoint_seconds": 0.0, **SHORT, **changes}
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
    shares = [line["confident_share"] for line in lines[0] if line["stage"] == "adapt"]
    assert len(shares) == 5 and max(shares) > 0


def test_a_run_with_labeled_target_texts_and_the_papers_preset(tiny, tmp_path):
    target_labeled = write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))
    record = mtem.adapt(**tiny, method="fixmatch", preset="paper", target_labeled=str(target_labeled)).record
    assert record["texts"]["target_labeled"] == 6
    assert {"threshold": 0.95, "weight": 1.0, "weak": "dropout"}.items() <= record["settings"].items()


def test_a_perturbed_view_is_harder_than_the_view(encoder):
    bench = prepared(encoder, view_radius=0.1)
    view = bench.model.prepare(bench.target_batch(np.arange(30)).inputs)
    with torch.no_grad():
        labels = bench.model.eval()(view).argmax(dim=1)
    views = view, bench.method.perturbed_view(view, labels)
    plain, harder = (F.cross_entropy(bench.model(inputs), labels, reduction="none") for inputs in views)
    assert (harder > plain).all()
    bench.context.view_radius = 0.0
    assert bench.method.perturbed_view(view, labels) is view
