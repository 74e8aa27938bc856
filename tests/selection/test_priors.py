"""Class shares of the target: estimated, assumed, and brought about."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

import mtem
from mtem import inference, methods
from mtem.methods.alignment import Alignment
from mtem.methods.source_only import SourceOnly
from mtem.selection import priors
from tests.bench import stopped_after
from tests.conftest import examples, make_texts
from tests.tolerance import assert_near


def draw(shares, count, seed, spread=1.5, sharpness=1.0):
    """Labels with those shares and logits that are exactly right for even shares, times a sharpness."""
    random = np.random.default_rng(seed)
    labels = random.choice(len(shares), size=count, p=shares)
    means = spread * np.eye(len(shares))
    points = means[labels] + random.normal(size=(count, len(shares)))
    return labels, sharpness * points @ means.T  # log-likelihood ratios of unit Gaussians around the means


@pytest.mark.parametrize("shares", [(0.2, 0.8), (0.5, 0.5), (0.9, 0.1), (0.6, 0.3, 0.1)])
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_the_estimate_finds_the_shares_though_the_scores_are_too_sharp(shares, sharpness):
    even = np.full(len(shares), 1 / len(shares))
    labels, source = draw(even, 3000, 1, sharpness=sharpness)
    _, target = draw(shares, 3000, 2, sharpness=sharpness)
    np.testing.assert_allclose(priors.estimate_shares(source, labels, target), shares, atol=0.04)


def test_the_estimate_starts_from_the_sources_shares():
    """The scores carry the source's shares, 80 to 20, and the target's are even: the ratio counts, not the share."""
    labels, source = draw((0.8, 0.2), 4000, 3)
    _, target = draw((0.5, 0.5), 4000, 4)
    lean = np.log([0.8, 0.2])
    np.testing.assert_allclose(priors.estimate_shares(source + lean, labels, target + lean), (0.5, 0.5), atol=0.04)


def test_calibration_recovers_temperature_and_bias():
    labels, scores = draw((0.5, 0.5), 5000, 5)
    temperature, bias = priors.fit_temperature_and_bias(3.0 * (scores + np.array([0.7, -0.7])), labels)
    assert temperature == pytest.approx(3.0, rel=0.15)
    np.testing.assert_allclose(bias, (-0.7, 0.7), atol=0.15)


@examples(40)
@given(st.integers(2, 5), st.integers(1, 60), st.integers(0, 10_000))
def test_the_correction_brings_the_mean_prediction_to_the_shares(classes, count, seed):
    random = np.random.default_rng(seed)
    scores = 3 * random.normal(size=(count, classes))
    shares = priors.floored(random.dirichlet(np.ones(classes)))
    bias = priors.correction(scores, shares)
    np.testing.assert_allclose(softmax(scores + bias, axis=1).mean(axis=0), shares, atol=5e-3)
    assert abs(bias.mean()) < 1e-9


def test_the_correction_of_a_collapsed_model_is_bounded():
    bias = priors.correction(np.tile([200.0, -200.0], (10, 1)), np.array([0.5, 0.5]))
    assert np.isfinite(bias).all() and np.abs(bias).max() <= 30


def test_what_each_setting_assumes():
    share = np.array([0.7, 0.3])
    labels, source = draw(share, 2000, 6)
    _, target = draw((0.3, 0.7), 2000, 7)
    outputs = (source + np.log(share), labels, target + np.log(share))
    assert priors.assumed_shares("none", share, *outputs) is None
    np.testing.assert_allclose(priors.assumed_shares("uniform", share, *outputs), (0.5, 0.5))
    np.testing.assert_allclose(priors.assumed_shares("source", share, *outputs), share)
    np.testing.assert_allclose(priors.assumed_shares("estimated", share, *outputs), (0.3, 0.7), atol=0.06)
    assert priors.assumed_shares("source", np.array([1.0, 0.0]), *outputs).min() == pytest.approx(
        priors.SMALLEST_SHARE / (1 + priors.SMALLEST_SHARE)
    )


def test_shares_of_the_labeled_target_texts():
    """Half a label more for each class: none is impossible because a few texts lack it."""
    nothing = (np.zeros((1, 3)), np.zeros(1, int), np.zeros((1, 3)))
    labels = np.array([0] * 60 + [1] * 40)
    found = priors.assumed_shares("labeled", np.array([0.1, 0.1, 0.8]), *nothing, labels)
    np.testing.assert_allclose(found, priors.floored(np.array([60.5, 40.5, 0.5]) / 101.5))
    assert found[2] == pytest.approx(priors.SMALLEST_SHARE / (1 + priors.SMALLEST_SHARE - 0.5 / 101.5), rel=1e-6)


@pytest.mark.parametrize("labels", [[0], [0] * 15 + [1] * 5, [0] * 300])
def test_automatic_shares_go_from_even_ones_to_the_labeled_ones(labels):
    nothing = np.zeros((0, 2)), np.zeros(0, dtype=int), np.zeros((0, 2))
    for absent in (None, np.zeros(0, dtype=int)):
        assert priors.assumed_shares("auto", np.array([0.9, 0.1]), *nothing, absent) is None
    found = priors.assumed_shares("auto", np.array([0.9, 0.1]), *nothing, np.array(labels))
    literal = labels + [0, 1] * (priors.EVEN_LABELS // 2)
    assert found == pytest.approx([literal.count(0) / len(literal), literal.count(1) / len(literal)])


def test_a_run_with_the_shares_of_its_labeled_target_texts(task):
    few = lopsided(40, 31, 0.75)
    labeled = ([text for text, _ in few], [label for _, label in few])
    record = mtem.adapt(**task, target_labeled=labeled, target_class_prior="labeled", method="source-only").record
    goods = sum(label == "good" for label in labeled[1])
    assert record["target_class_prior"]["shares"]["good"] == pytest.approx((goods + 0.5) / 41, abs=1e-3)
    assert record["class_shares"]["target_after"]["good"] > 0.55
    with pytest.raises(
        mtem.RequestError, match=r"target_class_prior=labeled: there are no labeled target texts; give --target-labeled"
    ):
        mtem.adapt(**task, target_class_prior="labeled")


def test_alignment_gives_pseudo_labels_the_assumed_shares():
    align = Alignment(torch.tensor([0.4, 0.6]))
    random = torch.Generator().manual_seed(0)
    means = []
    for step in range(60):
        scores = torch.randn(40, 2, generator=random) + torch.tensor([2.0, 0.0])  # the first class is predicted far too often
        aligned = align(scores)
        if step > 20:
            means.append(torch.softmax(aligned, dim=1).mean(dim=0))
    unaligned = torch.softmax(scores, dim=1).mean(dim=0)[0]
    mean = torch.stack(means).mean(dim=0)
    assert unaligned > 0.75 and abs(float(mean[0]) - 0.4) < 0.02
    order = scores[:, 0] - scores[:, 1]
    assert torch.equal((aligned[:, 0] - aligned[:, 1]).argsort(), order.argsort()), "a bias moves all texts alike"


def test_alignment_of_the_first_batch_uses_that_batch():
    scores = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)) + torch.tensor([1.0, 0.0, -1.0])
    aligned = Alignment(torch.tensor([0.2, 0.3, 0.5]))(scores)
    torch.testing.assert_close(torch.softmax(aligned, dim=1).mean(dim=0), torch.tensor([0.2, 0.3, 0.5]), atol=1e-3, rtol=0)


def test_alignment_state_and_absence():
    assert Alignment()(torch.ones(2, 2)).equal(torch.ones(2, 2)) and Alignment().state() == {}
    one, other = Alignment(torch.tensor([0.5, 0.5])), Alignment(torch.tensor([0.5, 0.5]))
    scores = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    one(scores)
    other.load_state({name: value.clone() for name, value in one.state().items()})
    torch.testing.assert_close(one(scores), other(scores))


# ---------------------------------------------------------------------- in a run


def lopsided(count, seed, good):
    rows = make_texts(4 * count, seed, 0.5)
    return [row for row in rows if row[1] == "good"][: round(count * good)] + [row for row in rows if row[1] == "bad"][
        : round(count * (1 - good))
    ]


@pytest.fixture
def task(encoder):
    source = lopsided(120, 41, 0.2)
    return {
        "source": tuple(map(list, zip(*source, strict=True))),
        "target": [text for text, _ in lopsided(100, 42, 0.6)],
        "model": encoder,
        **{
            "max_length": 16,
            "batch_size": 20,
            "source_epochs": 4,
            "source_learning_rate": 2e-3,
            "learning_rate": 5e-4,
            "epochs": 1,
        },
        **{"evaluations": 2, "frozen_layers": 0},
    }


@pytest.mark.parametrize("method", ["mtem", "source-only", "dann", "mme"])
def test_a_run_ends_with_the_assumed_shares(task, method, tmp_path):
    task |= {"calibrate": False}  # a temperature keeps the labels, not the mean of the probabilities
    adapted = mtem.adapt(**task, method=method, target_class_prior="uniform", output=tmp_path / "run")
    for model in (adapted, mtem.load(tmp_path / "run")):
        np.testing.assert_allclose(model.predict_proba(task["target"]).mean(axis=0), (0.5, 0.5), atol=0.01)
    assert adapted.record["target_class_prior"]["kind"] == "uniform" and adapted.record["target_class_prior"]["bias"]["good"] != 0
    plain = mtem.adapt(**task, method=method, output=tmp_path / "plain")
    assert plain.record["target_class_prior"] is None
    before, after = plain.source_model(), adapted.source_model()
    texts = task["target"][:20]
    found, wanted = (inference.predict_texts(model, texts) for model in (after, before))
    assert_near(found, wanted, dtype=torch.float32, size=20.0, msg="the source model is the one before the correction")


def test_the_papers_preset_assumes_nothing():
    for name in methods.METHODS:
        for preset in methods.get(name).presets.values():
            assert preset.get("target_class_prior", "none") == "none" and preset.get("class_weights", "none") == "none"


def test_a_stopped_run_with_shares_resumes_to_the_same_weights(task, tmp_path, monkeypatch):
    given = {**task, "target_class_prior": "estimated", "class_weights": "balanced", "checkpoint_seconds": 0.0}
    whole = mtem.adapt(**given, output=tmp_path / "whole")
    with stopped_after(3):
        mtem.adapt(**given, output=tmp_path / "cut")
    resumed = mtem.adapt(**given, output=tmp_path / "cut", resume=True)
    assert resumed.record["target_class_prior"] == whole.record["target_class_prior"]
    np.testing.assert_array_equal(resumed.predict_proba(task["target"]), whole.predict_proba(task["target"]))


def test_class_weights_balance_the_loss(task, monkeypatch):
    seen = []

    def step(self, number, source, target, update):
        seen.append((self.context.class_weights, source.labels))
        return source_step(self, number, source, target, update)

    source_step = SourceOnly.step
    monkeypatch.setattr(SourceOnly, "step", step)
    mtem.adapt(**task, method="source-only", class_weights="balanced", validation_share=0.2)
    weights = seen[0][0]
    labels = torch.cat([labels for _, labels in seen])
    mass = torch.bincount(labels, minlength=2) * weights
    assert weights[1] / weights[0] == pytest.approx(4.0, rel=0.15)  # 'good' is a fifth of the labels
    assert float(mass[0] / mass.sum()) == pytest.approx(0.5, abs=0.05)
    logits, few = torch.randn(6, 2), torch.tensor([0, 0, 0, 0, 0, 1])
    losses = torch.nn.functional.cross_entropy(logits, few, reduction="none")
    expected = (weights[few] * losses).sum() / weights[few].sum()
    torch.testing.assert_close(methods.cross_entropy(logits, few, weights), expected)
