"""MME against its literal reading: two updates, each player's direction, labeled target texts, whole runs."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

import mtem
from mtem import inference
from mtem.methods.mme import Mme
from mtem.models.heads import CosineHead
from mtem.selection import criteria
from mtem.training.optimizer import make_optimizer
from mtem.training.settings import TrainingSettings
from tests.bench import SOURCE, Bench, stopped_after
from tests.conftest import make_texts, write_jsonl
from tests.reference import mme as reference
from tests.tolerance import assert_near, assert_weights_near

TEXTS = [text for text, _ in make_texts(30, 9, 0.7)]


def bench(encoder, **changes):
    return Bench(Mme, encoder, **{"dropout": False, "learning_rate": 0.01, **changes})


def singles(inputs):
    return [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(len(inputs["input_ids"]))]


def entropy(model, inputs):
    with torch.no_grad():
        probabilities = torch.softmax(model(inputs).double(), dim=1)
    return float(-(probabilities * probabilities.log()).sum(dim=1).mean())


@pytest.mark.parametrize(("target_labeled", "frozen"), [(False, 0), (True, 0), (True, 1)])
def test_trajectory_is_the_literal_one(encoder, target_labeled, frozen):
    ours = bench(
        encoder,
        target_labeled=target_labeled,
        frozen=frozen,
        learning_rate=0.05,
        temperature=0.2,
        entropy_weight=0.7,
        head_learning_rate_ratio=4.0,
    )
    twin = copy.deepcopy(ours.model).train()
    start = ours.weights()
    for number in range(5):
        source, target = ours.batches()
        if target_labeled:
            source = ours.source_batch([*source.rows[:4].tolist(), SOURCE + number, SOURCE])
        labeled = list(zip(singles(source.inputs), source.labels.tolist(), strict=True))
        loss, uncertainty = reference.step(twin, labeled, singles(target.inputs), ours.rate, 4.0, 0.7, 0.2)
        log = ours.step(number, source, target)
        assert float(log["source_loss"]) == pytest.approx(loss, rel=1e-4)
        assert float(log["entropy"]) == pytest.approx(uncertainty, rel=1e-4)
        assert_weights_near(ours.weights(), dict(twin.named_parameters()))
    moved = {name for name, value in ours.weights().items() if (value - start[name]).abs().max() > 1e-3}
    assert len(moved) > 10 and ours.model.head_names() <= moved


def second_update(ours, source, target):
    """What the step's second update descends along, by name; the first is left out."""
    parameters, losses = ours.parameters(), []
    ours.method.step(0, source, target, losses.append)
    assert len(losses) == 2
    found = torch.autograd.grad(losses[1], list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize(("part", "sign"), [("head", 1), ("encoder", -1)])
def test_the_head_raises_the_entropy_and_the_encoder_lowers_it(encoder, part, sign):
    ours = bench(encoder)
    source, target = ours.batches()
    before = entropy(ours.model, target.inputs)
    gradients = second_update(ours, source, target)
    moving = {name for name in gradients if (name in ours.model.head_names()) == (part == "head")}
    assert len(moving) == 1 if part == "head" else len(moving) > 20
    with torch.no_grad():
        for name in moving:
            ours.parameters()[name].sub_(1e-3 * gradients[name])
    slope = sum(float(gradients[name].square().sum()) for name in moving)
    change = entropy(ours.model, target.inputs) - before
    assert sign * change == pytest.approx(1e-3 * slope / 0.1, rel=0.2) and slope > 1e-4  # to first order; lambda is 0.1


def test_labeled_target_texts_are_seen_as_often_as_by_other_methods(encoder):
    """Those of the labeled batch and no more: a stream of its own would give this method more labels than the others."""
    ours = bench(encoder, target_labeled=True)
    source, target = ours.source_batch([0, 3, 7, SOURCE, SOURCE + 2]), ours.batches()[1]
    ours.context.target_labeled = lambda number: pytest.fail("asked for labeled target texts beside the batch's")
    with torch.no_grad():
        log_probs = torch.log_softmax(ours.model(source.inputs), dim=1)
    ours.context.class_weights = torch.tensor([1.0, 3.0])
    weights = ours.context.class_weights[source.labels]
    wanted = -(weights * log_probs[torch.arange(len(weights)), source.labels]).sum() / weights.sum()
    assert float(ours.step(0, source, target)["source_loss"]) == pytest.approx(float(wanted), rel=1e-5)


def test_without_weight_the_unlabeled_texts_change_nothing(encoder):
    one, other = bench(encoder, entropy_weight=0.0), bench(encoder, entropy_weight=0.0)
    source, target = one.batches()
    one.step(0, source, target)
    other.step(0, source, other.target_batch([3, 4]))
    assert all(torch.equal(value, other.weights()[name]) for name, value in one.weights().items())


def test_the_head_is_replaced_before_any_training(encoder):
    ours = bench(encoder, temperature=0.07)
    assert isinstance(ours.model.head, CosineHead) and ours.model.head.temperature == 0.07
    default = bench(encoder)
    assert default.model.head.temperature == 0.05


def test_the_head_learns_faster_by_its_factor(encoder):
    ours = bench(encoder, head_learning_rate_ratio=7.0, frozen=1)
    groups = make_optimizer(ours.method, TrainingSettings(), "adamw", 1e-3).param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in ours.parameters().items():
        assert rates[id(parameter)] == pytest.approx(7e-3 if parameter is ours.model.head.weight else 1e-3), name


def test_sure_predictions_have_no_entropy_and_finite_gradients(encoder):
    ours = bench(encoder, temperature=0.001)
    with torch.no_grad():
        ours.model.head.weight.mul_(100)
    source, target = ours.batches()
    log = ours.step(0, ours.source_batch([0]), ours.target_batch([1]))
    assert float(log["entropy"]) == pytest.approx(0.0, abs=1e-6)
    assert all(torch.isfinite(value).all() for value in second_update(ours, source, target).values())


def test_training_mode_is_set_in_every_step(encoder):
    ours = bench(encoder)
    ours.model.eval()
    ours.step()
    assert ours.model.training


def test_half_precision(encoder):
    ours, half = bench(encoder), bench(encoder)
    half.model.precision = torch.bfloat16
    full, rough = ours.step(5), half.step(5)
    assert 0 < abs(float(full["entropy"]) - float(rough["entropy"])) < 0.02
    assert all(value.dtype is torch.float32 for value in half.weights().values())


# ---------------------------------------------------------------------- whole runs


@pytest.fixture
def last(monkeypatch):
    """The last weights are chosen, whatever they are worth."""
    monkeypatch.setattr(criteria, "choose", lambda scores: len(scores) - 1)


@pytest.mark.parametrize("target_labeled", [False, True])
def test_a_whole_run(tiny, tmp_path, last, target_labeled):
    if target_labeled:
        tiny |= {"target_labeled": str(write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))), "frozen_layers": 1}
    adapted = mtem.adapt(**tiny, method="mme", output=tmp_path / "run", log_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["stage"] == "adapt"]
    assert len(lines) == 8 and all(0 <= line["entropy"] <= math.log(2) + 1e-6 for line in lines)
    loaded = mtem.load(tmp_path / "run")
    assert loaded.classes == ("bad", "good") and isinstance(loaded.model.head, CosineHead)
    assert_near(loaded.predict_proba(TEXTS), adapted.predict_proba(TEXTS), dtype=torch.float32, size=20.0)  # as the scores
    found = pipeline("text-classification", str(tmp_path / "run" / "model"))(TEXTS)
    assert [one["label"] for one in found] == adapted.predict(TEXTS) == loaded.predict(TEXTS)


def test_the_source_model_is_the_one_before_the_adaptation(tiny, tmp_path, last):
    adapted = mtem.adapt(**tiny, method="mme", output=tmp_path / "run")
    before = mtem.adapt(**{**tiny, "epochs": 0}, method="mme")  # the same first stage, and no second
    wanted = before.predict_proba(TEXTS)
    for each in (adapted, mtem.load(tmp_path / "run")):
        assert_near(inference.predict_texts(each.source_model(), TEXTS), wanted, dtype=torch.float32, size=20.0)
    assert np.abs(adapted.predict_proba(TEXTS) - wanted).max() > 1e-3


def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, last):
    """Stopped between the two updates of the third step."""
    target_labeled = write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))
    request = {**tiny, "method": "mme", "target_labeled": str(target_labeled), "source_epochs": 0.5, "checkpoint_seconds": 0.0}
    mtem.adapt(**request, output=tmp_path / "whole")
    with stopped_after(5):
        mtem.adapt(**request, output=tmp_path / "cut")
    mtem.adapt(**request, output=tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    source = load_file(tmp_path / "whole" / "checkpoints" / "source.safetensors")
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    assert any(not torch.equal(value, whole[name.removeprefix("network.")]) for name, value in source.items())
