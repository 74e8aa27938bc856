"""MTEM against the literal Algorithm 1, its settings one by one, and what its indexes do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtem import annealing
from mtem.errors import RequestError
from mtem.methods.base import Batch, cross_entropy, functional
from mtem.methods.fixmatch import FixMatch
from mtem.methods.mtem import PAPER, Mtem, MtemSettings, PseudoLabels
from mtem.run.adapt import find_settings, warn_of_unused
from tests.bench import RECIPE, Bench
from tests.reference import algorithm1
from tests.tolerance import assert_weights_near

OWN = {field.name for field in dataclasses.fields(MtemSettings)}
LITERAL = {name: value for name, value in PAPER.items() if name in OWN or name in RECIPE}


class Setting(Bench):
    """The bench with Algorithm 1 as it is printed."""

    def __init__(self, encoder, learning_rate=0.05, steps=12, seed=0, **changes):
        super().__init__(Mtem, encoder, learning_rate, steps, seed, **{**LITERAL, **changes})


EXACT = [("layerwise", 1e-4), ("forward", 1e-4), ("second-order", 1e-4)]


@pytest.mark.parametrize(("engine", "tolerance"), [*EXACT, ("taylor", 2e-2)])
def test_trajectory_is_algorithm_1(encoder, engine, tolerance):
    # beta is large enough for the raw gradient to move the indexes visibly, and some of them to the bounds
    ours = Setting(encoder, engine=engine, index_learning_rate=2000.0, index_low=1.01, index_high=5.0)
    theta, psi = ours.weights(), torch.full((30,), 2.0)
    ours.model.eval()
    for number in range(ours.steps):
        source, target = ours.batches()
        kappa = annealing.temperature(number, ours.steps - 1, LITERAL["temperature_start"], LITERAL["temperature_end"], 5.0)
        state = ours.context.generator.get_state()
        with torch.no_grad():
            scores = functional(ours.model, theta, target.inputs)
        drawn = torch.Generator()
        drawn.set_state(state)
        labels = annealing.sample_labels(scores, kappa, generator=drawn).tolist()
        theta, moved = algorithm1.step(
            lambda params, inputs=target.inputs: functional(ours.model, params, inputs),
            lambda params, batch=source: cross_entropy(functional(ours.model, params, batch.inputs), batch.labels),
            theta, psi[target.rows], labels, ours.rate, 2000.0, 1.01, 5.0,
        )  # fmt: skip
        psi[target.rows] = moved
        ours.method.step(number, source, target, ours.update)
        torch.testing.assert_close(ours.method.index, psi, atol=tolerance * 2, rtol=tolerance)
        for name, value in ours.weights().items():
            torch.testing.assert_close(value, theta[name], atol=max(1e-5, tolerance * 0.05), rtol=1e-3)
    assert psi.std() > 0.3 and (psi - 2).abs().max() > 1, "the reference itself must have moved the indexes"


@pytest.mark.parametrize("virtual_step", [True, False])
@pytest.mark.parametrize(("engine", "tolerance"), [*EXACT, ("taylor", 2e-2)])
def test_indexes_are_learned_against_the_outer_batch_and_weights_on_the_labeled_one(encoder, engine, tolerance, virtual_step):
    beta = 100.0
    changes = {"sampling": False, "source_weight": 1.0, "index_low": 1.0, "index_high": 9.0, "virtual_step": virtual_step}
    ours = Setting(encoder, engine=engine, index_learning_rate=beta, **changes)
    ours.train_source(20)
    source, target = ours.batches()
    outer, _ = ours.batches()
    asked = []
    ours.context.outer = lambda number: asked.append(number) or outer
    theta = ours.weights()

    def loss(params, batch):
        return cross_entropy(functional(ours.model.eval(), params, batch.inputs), batch.labels)

    def reference(outer):
        with torch.no_grad():
            labels = functional(ours.model, theta, target.inputs).argmax(dim=1).tolist()
        given = theta, torch.full((8,), 2.0), labels
        logits = lambda params: functional(ours.model, params, target.inputs)  # noqa: E731
        if virtual_step:
            return algorithm1.step(logits, lambda params: loss(params, outer), *given, ours.rate, beta, 1.0, 9.0)
        start = {name: value.clone().requires_grad_() for name, value in theta.items()}
        at_theta = torch.autograd.grad(loss(start, outer), list(start.values()))
        linear = lambda params: sum((params[name] * v).sum() for name, v in zip(theta, at_theta, strict=True))  # noqa: E731
        return algorithm1.step(logits, linear, *given, ours.rate, beta, 1.0, 9.0)

    stepped, index = reference(outer)
    _, other = reference(source)
    assert (index - other).abs().max() > 0.3, "the batches must not lead to the same indexes"
    log = ours.method.step(7, source, target, ours.update)
    assert asked == [7]
    torch.testing.assert_close(ours.method.index[target.rows], index, atol=tolerance, rtol=tolerance)
    start = {name: value.clone().requires_grad_() for name, value in theta.items()}
    on_source = torch.autograd.grad(loss(start, source), list(start.values()))
    for (name, value), gradient in zip(stepped.items(), on_source, strict=True):
        found = ours.model.trainable()[name].detach()
        torch.testing.assert_close(found, value - ours.rate * gradient, atol=max(1e-5, tolerance * 0.05), rtol=1e-3)
    if not virtual_step:
        assert float(log["meta_loss"]) == pytest.approx(float(loss(theta, outer)), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"index_mode": "shared"}, {"engine": "forward"}, {"virtual_step": False}])
def test_the_labeled_batch_as_outer_batch_changes_no_bit(encoder, changes):
    plain, other = (Bench(Mtem, encoder, ema_decay=0.9, **changes) for _ in range(2))
    for number in range(4):
        source, target = plain.batches()
        other.context.outer = lambda _, batch=source: batch
        torch.manual_seed(number)
        plain.step(number, source, target)
        torch.manual_seed(number)
        other.step(number, source, target)
    for name, value in {**plain.method.state(), **plain.weights()}.items():
        assert torch.equal(value, {**other.method.state(), **other.weights()}[name]), name


def test_without_meta_learning_no_outer_batch_is_made(encoder):
    ours = Setting(encoder, meta=False)
    ours.context.outer = lambda number: pytest.fail("not needed")
    ours.step()


def test_raw_step_with_the_papers_beta_never_moves_an_index(encoder):
    ours = Setting(encoder, learning_rate=5e-5)
    for number in range(ours.steps):
        ours.method.step(number, *ours.batches(), ours.update)
    assert (ours.method.index - 2).abs().max() < 1e-4


def test_without_meta_learning_every_index_stays(encoder):
    ours = Setting(encoder, meta=False, index_initial=1.5)
    before = ours.weights()
    log = ours.method.step(0, *ours.batches(), ours.update)
    assert torch.equal(ours.method.index, torch.full((30,), 1.5)) and "meta_loss" not in log
    assert any(not torch.equal(before[name], value) for name, value in ours.weights().items())


@pytest.mark.parametrize(("engine", "radius"), [("layerwise", 0.0), ("forward", 0.0), ("layerwise", 0.1)])
def test_with_an_index_of_1_and_the_likeliest_labels_it_is_fixmatch(encoder, engine, radius):
    common = {"threshold": 0.6, "dropout": False, "view": "mixed", "view_strength": 0.3, "view_radius": radius, "ema_decay": 0.9}
    fixed = {"meta": False, "sampling": False, "index_initial": 1.0, "index_low": 1.0, "engine": engine}
    ours, theirs = Bench(Mtem, encoder, 5e-3, **common, **fixed), Bench(FixMatch, encoder, 5e-3, **common)
    shares = []
    for number in range(6):
        for bench in (ours, theirs):
            shares.append(float(bench.method.step(number, *bench.batches(), bench.update)["confident_share"]))
            bench.method.update_average()
        assert_weights_near(ours.weights(), theirs.weights())
    assert 0 < min(shares) < 1, "the threshold must divide the texts"


def test_a_fixed_index_is_one_that_is_not_learned(encoder):
    without, fixed = (Setting(encoder, engine="layerwise", **changes) for changes in ({"meta": False}, {"index_mode": "fixed"}))
    for number in range(3):
        for bench in (without, fixed):
            assert "meta_loss" not in bench.method.step(number, *bench.batches(), bench.update)
    for name, value in without.weights().items():
        assert torch.equal(value, fixed.weights()[name])
    assert fixed.method.recorder is None and bool((fixed.method.index == 2.0).all())


@pytest.mark.parametrize("preset", ["recommended", "learned"])
def test_which_presets_learn_an_index(preset):
    texts, threads = (find_settings(model, "mtem", preset, {}).method for model in ("minilm", "bigcn"))
    assert (texts.learns_index, texts.sampling, texts.threshold) == ((preset == "learned"), (preset == "learned"), 0.95)
    assert (threads.learns_index, threads.sampling, threads.threshold) == ((preset == "learned"), True, 0.0)
    assert threads.index_mode == {"recommended": "fixed", "learned": "shared"}[preset]
    words = find_settings("bigcn", "mtem", preset, {"features": "tfidf"}).method
    assert words == dataclasses.replace(threads, threshold={"recommended": 0.95, "learned": 0.0}[preset])
    assert find_settings("bigcn", "mtem", preset, {"features": "tfidf", "threshold": 0.5}).method.threshold == 0.5
    given = {"features": "tfidf", "target_class_prior": "none"}
    assert find_settings("bigcn", "mtem", preset, given).method.threshold == 0.0, "the rarer class would be lost"
    assert texts.index_initial == texts.index_low == threads.index_initial == 1.0


@pytest.mark.parametrize(
    ("preset", "given", "warned"),
    [
        ("recommended", {"engine": "taylor"}, ["setting engine=taylor: of no use with index_mode=fixed"]),
        ("recommended", {"temperature_end": 0.5}, ["setting temperature_end=0.5: of no use with sampling=false"]),
        ("recommended", {"engine": "layerwise", "index_initial": 1.5, "threshold": 0.9}, []),
        ("recommended", {"engine": "taylor", "index_mode": "per-text"}, []),
        ("recommended", {"outer_share": 0.2}, ["setting outer_share=0.2: of no use with index_mode=fixed"]),
        ("learned", {"engine": "taylor", "temperature_end": 0.5, "outer_share": 0.2}, []),
        ("learned", {"meta": False, "index_step": "raw"}, ["setting index_step=raw: of no use with meta=false"]),
        (
            "learned",
            {"index_mode": "shared", "index_initial": 2.0},
            ["setting index_initial=2.0: of no use with index_mode=shared"],
        ),
    ],
)
def test_settings_without_effect_are_told(preset, given, warned, caplog):
    usual, chosen = (find_settings("minilm", "mtem", preset, values) for values in ({}, given))
    warn_of_unused(Mtem, chosen, usual, given)
    assert [record.getMessage() for record in caplog.records] == warned


def test_ablations_of_annealing_and_sampling(encoder):
    assert Setting(encoder, annealing=False).method.temperature(0) == 1.0
    annealed = Setting(encoder, temperature_start=3.0, temperature_end=0.5).method
    assert annealed.temperature(0) == pytest.approx(3.0) and annealed.temperature(11) == pytest.approx(0.5)
    greedy = Setting(encoder, sampling=False)
    _, target = greedy.batches()
    with torch.no_grad():
        wanted = greedy.model.eval()(target.inputs).argmax(dim=1)
    assert torch.equal(greedy.method.pseudo_labels(target, 5.0).labels, wanted)


@pytest.mark.parametrize("kind", ["sign", "soft", "rms", "norm", "raw"])
def test_index_step_normalisations(encoder, kind):
    method = Setting(encoder, index_step=kind, index_learning_rate=0.5, index_low=1.05, index_high=5.0).method
    gradient = torch.tensor([3e-7, -4e-7, 0.0, 1e-8])
    moved = method.updated_index(torch.tensor([2.0, 2.0, 2.0, 1.06]), gradient, 0)
    step = {
        "raw": gradient,
        "sign": torch.tensor([1.0, -1.0, 0.0, 1.0]),
        "soft": torch.tensor([3 / 3.1, -4 / 4.1, 0.0, 1 / 2]),  # the median of the absolute values is 1e-8
        "rms": gradient / 2.50049995e-7,
        "norm": gradient / 5.0009999e-7,
    }[kind]
    torch.testing.assert_close(moved, (torch.tensor([2.0, 2.0, 2.0, 1.06]) - 0.5 * step).clamp(1.05, 5.0))
    assert torch.isfinite(method.updated_index(torch.full((4,), 2.0), torch.zeros(4), 0)).all()


def test_index_falls_where_the_pseudo_label_helps_the_source(encoder):
    """Texts labeled as the source labels its own should get smaller indexes than texts labeled against it."""
    ours = Setting(encoder, learning_rate=0.05)
    for _ in range(60):  # a source model first
        source, _ = ours.batches()
        ours.update(cross_entropy(ours.model(source.inputs), source.labels))
    source, _ = ours.batches()
    right = Batch(source.inputs, None, torch.arange(8))
    gradient, wrong = (
        ours.method.index_gradient(right.inputs, PseudoLabels(labels, torch.ones(len(labels))), right.rows, source).gradient
        for labels in (source.labels, 1 - source.labels)
    )
    assert gradient.mean() > 0 > wrong.mean()


def test_teacher_is_the_running_average_and_is_what_is_kept(encoder):
    ours = Setting(encoder, ema_decay=0.9)
    expected = ours.weights()
    for number in range(3):
        ours.step(number)
        expected = {name: 0.9 * expected[name] + 0.1 * value for name, value in ours.weights().items()}
    for name, value in ours.method.weights().items():
        torch.testing.assert_close(value, expected[name])
    assert any(not torch.allclose(value, ours.method.weights()[name]) for name, value in ours.weights().items())


@pytest.mark.parametrize("engine", ["layerwise", "forward", "second-order", "taylor"])
def test_texts_below_the_threshold_are_as_if_they_were_not_there(encoder, engine):
    """Weights and indexes move as in a step on the trusted texts alone, whose mean is over fewer texts."""
    changes = {"engine": engine, "sampling": False, "index_learning_rate": 500.0, "source_weight": 1.0, "target_weight": 2.0}
    bench = Setting(encoder, **changes)
    bench.train_source()
    start = bench.weights()
    source, target = bench.batches()
    with torch.no_grad():
        sure = torch.softmax(bench.model.eval()(target.inputs), dim=1).amax(dim=1)
    threshold = float(sure.sort().values[3:5].mean())
    rows = target.rows[sure >= threshold]
    assert 0 < len(rows) < len(target.rows)

    def stepped(batch, rate, **more):
        ours = Setting(encoder, learning_rate=0.05, virtual_learning_rate=rate, **{**changes, **more})
        for name, value in ours.model.trainable().items():
            value.data.copy_(start[name])
        log = ours.method.step(0, source, batch, ours.update)
        return ours.weights(), ours.method.index, log

    share = len(rows) / len(target.rows)
    weights, index, log = stepped(target, 0.05, threshold=threshold)
    # The mean over the trusted texts alone is larger by 1 / share: so is the inner step, and so is each index's gradient.
    expected, expected_index, _ = stepped(
        bench.target_batch(rows.numpy()), 0.05 * share, target_weight=2.0 * share, index_learning_rate=500.0
    )
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)
    tolerance = 2e-2 if engine == "taylor" else 1e-3
    torch.testing.assert_close(index, expected_index, atol=tolerance, rtol=tolerance)
    assert float(log["confident_share"]) == pytest.approx(share)
    assert (index[rows] - 2).abs().min() > 0 and (index != 2).sum() == len(rows)


def test_source_weight_adds_the_source_loss(encoder):
    """With the target's weight at 0 and the source's at 1 the step is a plain source step."""
    ours, plain = (Setting(encoder, source_weight=1.0, target_weight=0.0) for _ in range(2))
    source, target = ours.batches()
    ours.method.step(0, source, target, ours.update)
    plain.update(cross_entropy(plain.model.eval()(source.inputs), source.labels))
    for name, value in ours.weights().items():
        torch.testing.assert_close(value, plain.weights()[name])


def test_state_round_trip(encoder):
    ours, other = (
        Setting(encoder, ema_decay=0.9, index_step="sign", index_learning_rate=0.5),
        Setting(encoder, seed=1, ema_decay=0.9),
    )
    ours.step()
    other.method.load_state({name: value.clone() for name, value in ours.method.state().items()})
    assert torch.equal(other.method.index, ours.method.index) and ours.method.index.std() > 0
    for name, value in ours.method.weights().items():
        assert torch.equal(value, other.method.weights()[name])


def test_meta_loss_does_not_change_what_is_drawn_next(encoder):
    ours = Setting(encoder)
    source, target = ours.batches()
    before = ours.context.generator.get_state()
    assert ours.method.meta_loss(source, target) > 0
    assert torch.equal(before, ours.context.generator.get_state())


def test_assumption_2_rate_falls(encoder):
    method = Setting(encoder, index_schedule="assumption-2", index_learning_rate=0.5, index_step="sign").method
    start, gradient = torch.tensor([2.0]), torch.tensor([1.0])
    assert float(start - method.updated_index(start, gradient, 0)) == pytest.approx(0.5)
    assert float(start - method.updated_index(start, gradient, 7)) == pytest.approx(0.5 / 8 ** (2 / 3), rel=1e-5)


@pytest.mark.parametrize("changes", [{"index_low": 3.0, "index_high": 2.0}, {"temperature_start": 0.1, "temperature_end": 0.5}])
def test_impossible_ranges_are_refused(encoder, changes):
    with pytest.raises(RequestError, match=r"expected"):
        Setting(encoder, **changes)
