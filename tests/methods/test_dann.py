"""DANN against its literal reading: who learns with which sign, lambda over time, which texts count as target, whole runs."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import mtem
from mtem.methods.dann import Dann, balanced_weights
from mtem.selection import criteria
from mtem.training.optimizer import make_optimizer
from mtem.training.settings import TrainingSettings
from tests.bench import SOURCE, Bench, stopped_after
from tests.conftest import make_texts, write_jsonl
from tests.reference import dann as reference
from tests.tolerance import assert_weights_near


def bench(encoder, **changes):
    return Bench(Dann, encoder, **{"dropout": False, "discriminator_dropout": 0.0, **changes})


def singles(inputs):
    return [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(len(inputs["input_ids"]))]


@pytest.mark.parametrize(("target_labeled", "frozen", "layers"), [(False, 0, 1), (True, 0, 2), (True, 1, 1)])
def test_trajectory_is_the_literal_one(encoder, target_labeled, frozen, layers):
    ours = bench(
        encoder, target_labeled=target_labeled, frozen=frozen, discriminator_layers=layers, discriminator_width=24, steps=6,
        steepness=3.0, domain_weight=0.8,
    )  # fmt: skip
    twin = copy.deepcopy(ours.model).train()
    own = {f"discriminator.{name}": p.detach().clone() for name, p in ours.method.discriminator.named_parameters()}
    own = {name: value.requires_grad_() for name, value in own.items()}
    start = ours.weights()
    for number in range(ours.steps):
        source, target = ours.batches()
        of_target = [target_labeled and row >= SOURCE for row in source.rows.tolist()]
        labeled = list(zip(singles(source.inputs), source.labels.tolist(), of_target, strict=True))
        scale = reference.weight(number, 5, 3.0, 0.8)
        reference.step(twin, own, labeled, singles(target.inputs), ours.rate, 10.0, scale, [3 * n for n in range(layers + 1)])
        ours.step(number, source, target)
        assert_weights_near(ours.weights(), {**dict(twin.named_parameters()), **own})
    assert all((value - start[name]).abs().max() > 1e-3 for name, value in own.items() if name.endswith("weight"))


def test_the_domain_gradient_is_reversed_in_the_encoder_and_not_in_the_discriminator(encoder):
    ours = bench(encoder, steps=9, steepness=2.0, domain_weight=0.6)
    source, target = ours.batches()
    parameters, seen = ours.parameters(), {}

    def gradients(loss):
        kept = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        found = torch.autograd.grad(loss, list(parameters.values()), **kept)
        return dict(zip(parameters, found, strict=True))

    ours.method.step(4, source, target, lambda loss: seen.update(gradients(loss)))
    scores, features = ours.model.logits_and_features(source.inputs)
    others = ours.model.logits_and_features(target.inputs)[1]
    guess = ours.method.discriminator
    plain = (F.softplus(-guess(features)).mean() + F.softplus(guess(others)).mean()) / 2
    of_class, of_domain = gradients(F.cross_entropy(scores, source.labels)), gradients(plain)
    scale = 0.6 * (2 / (1 + math.exp(-2.0 * 4 / 8)) - 1)
    wanted = {
        name: of_domain[name] if name.startswith("discriminator.") else of_class[name] - scale * of_domain[name] for name in seen
    }
    assert_weights_near(seen, wanted, 20)
    in_encoder = max(float(of_domain[name].abs().max()) for name in seen if not name.startswith("discriminator."))
    assert in_encoder > 1e-3, "the domain loss must reach the encoder for the signs to mean anything"


def test_lambda_rises_from_nothing_to_its_weight(encoder):
    method = bench(encoder, steps=11).method
    assert method.reversal_weight(0) == 0.0
    assert method.reversal_weight(5) == pytest.approx(math.tanh(2.5)) and method.reversal_weight(10) == pytest.approx(
        math.tanh(5)
    )
    small = bench(encoder, steps=11, domain_weight=0.1, steepness=1.0).method
    assert small.reversal_weight(10) == pytest.approx(0.1 * math.tanh(0.5))
    assert bench(encoder, steps=1).method.reversal_weight(0) == 0.0


def test_labeled_target_texts_count_as_target(encoder):
    ours = bench(encoder, target_labeled=True)
    source, target = ours.source_batch([1, SOURCE, 3, SOURCE + 5]), ours.target_batch([0, 1])
    assert ours.method.domains(source, target).tolist() == [1, 0, 1, 0, 0, 0]
    # a discriminator that is sure of "source" errs on all that is the target's: half of it, however many they are
    with torch.no_grad():
        ours.method.discriminator[-1].weight.zero_()
        ours.method.discriminator[-1].bias.fill_(3.0)
    log = ours.step(0, source, target)
    assert float(log["domain_accuracy"]) == pytest.approx(0.5)
    assert float(log["domain_loss"]) == pytest.approx((math.log1p(math.exp(-3)) + math.log1p(math.exp(3))) / 2, rel=1e-5)


def test_each_domain_is_half_of_the_mean():
    assert balanced_weights(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert balanced_weights(torch.zeros(4)).tolist() == [0.25] * 4


def test_a_labeled_batch_of_target_texts_alone(encoder):
    ours = bench(encoder, target_labeled=True)
    with torch.no_grad():
        ours.method.discriminator[-1].bias.fill_(-3.0)  # sure of "target", and right
    log = ours.step(3, ours.source_batch([SOURCE]), ours.target_batch([2]))
    assert float(log["domain_accuracy"]) == 1.0
    assert all(math.isfinite(float(value)) for value in log.values())
    assert all(torch.isfinite(value).all() for value in ours.weights().values())


def test_the_discriminator_learns_faster_by_its_factor(encoder):
    ours = bench(encoder, discriminator_learning_rate_ratio=7.0)
    groups = make_optimizer(ours.method, TrainingSettings(), "adamw", 1e-3).param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in ours.parameters().items():
        assert rates[id(parameter)] == pytest.approx(7e-3 if name.startswith("discriminator.") else 1e-3), name


def test_shape_of_the_discriminator(encoder):
    def widths(**changes):
        return [(part.in_features, part.out_features) for part in Bench(Dann, encoder, **changes).method.discriminator[::3]]

    assert widths() == [(32, 32), (32, 1)]
    assert widths(**Dann.presets["paper"]) == [(32, 1024), (1024, 1024), (1024, 1)]
    assert [part.p for part in Bench(Dann, encoder).method.discriminator if isinstance(part, nn.Dropout)] == [0.5]


def test_training_mode_is_set_in_every_step(encoder):
    ours = Bench(Dann, encoder)
    ours.model.eval()
    ours.method.discriminator.eval()
    ours.step()
    assert ours.model.training and ours.method.discriminator.training


def test_half_precision(encoder):
    ours, half = bench(encoder), bench(encoder)
    half.model.precision = torch.bfloat16
    full, rough = ours.step(5), half.step(5)
    assert 0 < abs(float(full["domain_loss"]) - float(rough["domain_loss"])) < 0.02
    assert all(value.dtype is torch.float32 for value in half.weights().values())


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("target_labeled", [False, True])
def test_a_whole_run(tiny, tmp_path, target_labeled):
    if target_labeled:
        labeled = write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))
        tiny |= {"target_labeled": str(labeled), "frozen_layers": 1, "device": "cpu", "precision": "bf16"}
    adapted = mtem.adapt(**tiny, method="dann", output=tmp_path / "run", log_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["stage"] == "adapt"]
    assert len(lines) == 8 and {"source_loss", "domain_loss", "domain_accuracy"} <= lines[0].keys()
    assert lines[0]["reversal"] == 0 and lines[-1]["reversal"] == pytest.approx(math.tanh(5))
    assert all(0 <= line["domain_accuracy"] <= 1 for line in lines)
    texts = [text for text, _ in make_texts(20, 9, 0.7)]
    np.testing.assert_allclose(mtem.load(tmp_path / "run").predict_proba(texts), adapted.predict_proba(texts), atol=1e-2)
    assert not any("discriminator" in name for name in load_file(tmp_path / "run" / "model" / "model.safetensors"))


def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(criteria, "choose", lambda scores: len(scores) - 1)  # the last weights, whatever they are worth
    request = {**tiny, "method": "dann", "source_epochs": 0.5, "checkpoint_seconds": 0.0}
    mtem.adapt(**request, output=tmp_path / "whole")
    with stopped_after(5):
        mtem.adapt(**request, output=tmp_path / "cut")
    mtem.adapt(**request, output=tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    source = load_file(tmp_path / "whole" / "checkpoints" / "source.safetensors")
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    assert any(not torch.equal(value, whole[name.removeprefix("network.")]) for name, value in source.items())
