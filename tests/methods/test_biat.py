"""BiAT: its perturbations one by one, who learns from what, and whole trajectories against the literal reading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import mtem
from mtem.data.loading import load_corpus
from mtem.methods.base import Batch, Context, functional
from mtem.methods.biat import Biat, BiatSettings
from mtem.models.text import TextModel
from mtem.models.trees.bigcn import Graph
from mtem.models.trees.model import BigcnModel, BigcnSettings
from mtem.run.pipeline import Run
from mtem.tsallis import gibbs_entropy
from tests.bench import SOURCE, TARGET_LABELED, Bench, stopped_after
from tests.conftest import make_texts, write_jsonl
from tests.reference import biat as reference
from tests.threads import make_threads
from tests.tolerance import assert_near, assert_weights_near

TERMS = {"source_loss", "adversarial_loss", "adaptive_loss", "target_head_loss", "virtual_loss", "entropy"}
HEAD = ("network.classifier.weight", "network.classifier.bias")
WORDS = "network.bert.embeddings.word_embeddings.weight"


def bench(encoder, target_labeled=True, **changes) -> Bench:
    return Bench(Biat, encoder, target_labeled=target_labeled, **changes)


@pytest.fixture
def learned(trained) -> Bench:
    """With the same draws to come, whatever others have drawn."""
    trained.context.generator.manual_seed(0)
    trained.model.eval()
    return trained


@pytest.fixture(scope="module")
def trained(encoder) -> Bench:
    """A model that knows its labeled texts, and a target head that knows the target's."""
    ours = bench(encoder, radius=0.1)
    optimizer = torch.optim.Adam(list(ours.parameters().values()), lr=3e-3)
    for number in range(40):
        source, _ = ours.batches()
        optimizer.zero_grad()
        loss = F.cross_entropy(ours.model(source.inputs), source.labels)
        (loss + ours.method.target_head_loss(ours.context.target_labeled(number))).backward()
        optimizer.step()
    optimizer.zero_grad()
    return ours


def embeddings(ours: Bench, inputs) -> torch.Tensor:
    mask = inputs["attention_mask"].unsqueeze(-1)
    if "hidden" in inputs:
        return inputs["hidden"] * mask
    return ours.weights()[WORDS][inputs["input_ids"]] * mask


def perturbations(ours: Bench, inputs, labels) -> dict[str, torch.Tensor]:
    method = ours.method
    return {
        "adversarial": method.adversarial(inputs, labels),
        "adaptive": method.adaptive(inputs, labels),
        "virtual": method.virtual(inputs, method.clean_log_probs(inputs)),
    }


# ---------------------------------------------------------------------- the perturbations


@pytest.mark.parametrize("frozen", [0, 1])
def test_perturbations_have_their_size_and_spare_the_padding(encoder, frozen):
    ours = bench(encoder, frozen=frozen, radius=0.07)
    source, _ = ours.batches()
    inputs = ours.model.prepare(source.inputs)
    assert ("hidden" in inputs) == bool(frozen)
    padding = inputs["attention_mask"] == 0
    assert padding.any() and not padding.all(dim=1).any()
    found = perturbations(ours, inputs, source.labels)
    drawn = torch.randn(found["virtual"].shape, generator=torch.Generator().manual_seed(0))
    found["start"] = ours.method.rescaled(inputs, drawn, 0.07)
    lengths = embeddings(ours, inputs).square().sum(dim=(1, 2)).sqrt()
    assert lengths.std() > 0, "texts of unlike length, or the norm of one would do for all"
    for name, noise in found.items():
        torch.testing.assert_close(noise.square().sum(dim=(1, 2)).sqrt(), 0.07 * lengths, msg=name)
        assert torch.equal(noise[padding], torch.zeros_like(noise[padding])), name
    assert all(parameter.grad is None for parameter in ours.parameters().values())


def test_xi_is_the_length_of_the_start(encoder, monkeypatch):
    ours = bench(encoder, xi=0.003)
    _, target = ours.batches()
    starts, gradient = [], Biat.noise_gradient

    def watching(self, *given):
        starts.append(given[2].detach())
        return gradient(self, *given)

    monkeypatch.setattr(Biat, "noise_gradient", watching)
    ours.method.virtual(target.inputs, ours.method.clean_log_probs(target.inputs))
    lengths = embeddings(ours, target.inputs).square().sum(dim=(1, 2)).sqrt()
    torch.testing.assert_close(starts[0].square().sum(dim=(1, 2)).sqrt(), 0.003 * lengths)


def losses(ours: Bench, inputs, labels, noise=None) -> torch.Tensor:
    with torch.no_grad():
        return F.cross_entropy(ours.model({**inputs, "noise": noise} if noise is not None else inputs), labels, reduction="none")


def test_adversarial_perturbations_raise_the_loss(learned):
    learned.model.eval()
    source = learned.source_batch(np.arange(SOURCE))
    before = losses(learned, source.inputs, source.labels)
    noise = learned.method.adversarial(source.inputs, source.labels)
    after = losses(learned, source.inputs, source.labels, noise)
    drawn = learned.method.rescaled(source.inputs, torch.randn(noise.shape, generator=torch.Generator().manual_seed(0)), 0.1)
    assert (after > before).float().mean() > 0.9
    assert after.mean() > 1.5 * before.mean()
    assert after.mean() > losses(learned, source.inputs, source.labels, drawn).mean()


def test_adaptive_perturbations_lower_the_loss_of_the_targets_head(learned):
    learned.model.eval()
    source = learned.source_batch(np.arange(SOURCE))

    def loss(noise):
        with torch.no_grad():
            _, features = learned.model.logits_and_features({**source.inputs, "noise": noise})
            return F.cross_entropy(learned.method.target_head(features), source.labels, reduction="none")

    noise = learned.method.adaptive(source.inputs, source.labels)
    before, after = loss(torch.zeros_like(noise)), loss(noise)
    assert (after < before).float().mean() > 0.9 and after.mean() < 0.9 * before.mean()


def test_virtual_perturbations_raise_divergence_and_entropy(learned):
    learned.model.eval()
    target = learned.target_batch(np.arange(30))
    clean = learned.method.clean_log_probs(target.inputs)

    def objective(noise):
        with torch.no_grad():
            scores = learned.model({**target.inputs, "noise": noise})
        divergence = F.kl_div(torch.log_softmax(scores, dim=1), clean, log_target=True, reduction="none").sum(dim=1)
        return divergence + gibbs_entropy(torch.log_softmax(scores, dim=1))

    noise = learned.method.virtual(target.inputs, clean)
    drawn = learned.method.rescaled(target.inputs, torch.randn(noise.shape, generator=torch.Generator().manual_seed(0)), 0.1)
    before, after = objective(torch.zeros_like(noise)), objective(noise)
    assert (after > before).float().mean() > 0.8 and after.mean() > 1.3 * before.mean()
    assert after.mean() > objective(drawn).mean()


def test_virtual_direction_with_several_classes(encoder):
    """With two classes divergence and entropy have one line in common, and only its sign is left to them."""
    torch.manual_seed(1)
    model = TextModel.create(encoder, ["a", "b", "c", "d"], max_length=16, attention="eager").eval()
    inputs = model.collate(model.encode_texts([text for text, _ in make_texts(6, 3)]), np.arange(6))
    context = Context(1, 6, 4, torch.Generator().manual_seed(5), lambda: 0.1)
    with torch.no_grad():
        model.head.weight.mul_(5)  # as drawn, the head hardly tells its texts apart
    noise = Biat(model, BiatSettings(radius=0.1, xi=0.4), context).virtual(inputs, torch.log_softmax(model(inputs), 1).detach())
    words = model.input_embeddings(inputs)
    drawn = torch.randn(words.shape, generator=torch.Generator().manual_seed(5)) * (words != 0)
    alike = []
    for row in range(6):
        text = {name: value[row : row + 1] for name, value in inputs.items()}
        length = words[row].norm()
        start = reference.of_length(drawn[row : row + 1], 0.4 * length).requires_grad_()
        before, after = (torch.softmax(model(each)[0], dim=0) for each in (text, {**text, "noise": start}))
        divergence, entropy = reference.divergence(before.detach(), after), reference.entropy(after)
        both = torch.autograd.grad(divergence + entropy, start, retain_graph=True)[0]
        assert_near(noise[row : row + 1], reference.of_length(both, 0.1 * length))
        alone = torch.autograd.grad(entropy, start)[0]
        alike.append(float(F.cosine_similarity(both.flatten(), alone.flatten(), dim=0)))
    assert min(alike) < 0.9, "the divergence must matter for this to test it"


def test_virtual_loss_is_of_the_clean_label_and_the_entropy(learned, monkeypatch):
    learned.model.eval()
    target = learned.target_batch(np.arange(8))
    noise = learned.method.virtual(target.inputs, learned.method.clean_log_probs(target.inputs))
    monkeypatch.setattr(Biat, "virtual", lambda *_: noise)
    with torch.no_grad():
        probabilities = torch.softmax(learned.model({**target.inputs, "noise": noise}), dim=1)
        labels = learned.model(target.inputs).argmax(dim=1)
    wanted = -sum(float(p[y].log() + (p * p.log()).sum()) for p, y in zip(probabilities, labels, strict=True)) / 8
    assert float(learned.method.virtual_loss(target.inputs).detach()) == pytest.approx(wanted, rel=1e-5)


def test_perturbations_are_found_without_dropout_and_drawn_from_the_runs_generator(encoder):
    ours = bench(encoder)
    source, _ = ours.batches()
    ours.model.train()
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ours.context.generator.manual_seed(7)
        found.append(perturbations(ours, source.inputs, source.labels))
        assert ours.model.training
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    ours.context.generator.manual_seed(8)
    other = perturbations(ours, source.inputs, source.labels)["virtual"]
    assert not torch.equal(other, found[0]["virtual"])


# ---------------------------------------------------------------------- who learns from what


def loss_of_step(ours: Bench, source, target) -> tuple[torch.Tensor, dict]:
    kept = []
    log = ours.method.step(0, source, target, lambda loss: kept.append(loss))
    return kept[0], log


def test_the_targets_head_learns_from_labeled_target_texts_alone(encoder):
    ours = bench(encoder, dropout=False)
    source, target = ours.batches()
    weights = list(ours.method.target_head.parameters())
    loss, log = loss_of_step(ours, source, target)
    assert log.keys() == TERMS
    target_labeled = ours.context.target_labeled(0)
    alone = torch.autograd.grad(ours.method.target_head_loss(target_labeled), weights)
    for got, wanted in zip(torch.autograd.grad(loss, weights), alone, strict=True):
        torch.testing.assert_close(got, wanted)
    assert any(gradient.abs().max() > 0 for gradient in alone)
    with torch.no_grad():
        _, features = ours.model.logits_and_features(target_labeled.inputs)
        scores = features @ ours.method.target_head.weight.T + ours.method.target_head.bias
    torch.testing.assert_close(log["target_head_loss"], F.cross_entropy(scores, target_labeled.labels))


def test_adaptive_loss_is_the_sources_alone(encoder):
    ours = bench(encoder, dropout=False)
    mixed, target = ours.source_batch([0, 1, 5, SOURCE, SOURCE + 1]), ours.batches()[1]
    _, log = loss_of_step(ours, mixed, target)
    _, alone = loss_of_step(ours, ours.source_batch([0, 1, 5]), target)
    assert_near(log["adaptive_loss"], alone["adaptive_loss"])
    assert abs(log["adversarial_loss"] - alone["adversarial_loss"]) > 1e-3, "the other terms see all labeled texts"


def test_without_labeled_target_texts_there_is_no_second_head(encoder):
    ours = bench(encoder, target_labeled=False)
    before = ours.weights()
    log = ours.step()
    assert ours.method.modules() == {} and log.keys() == TERMS - {"adaptive_loss", "target_head_loss"}
    assert any(not torch.equal(before[name], value) for name, value in ours.weights().items())


@pytest.mark.parametrize(
    ("weight", "gone"),
    [
        ("adversarial_weight", {"adversarial_loss"}),
        ("adaptive_weight", {"adaptive_loss", "target_head_loss"}),
        ("virtual_weight", {"virtual_loss"}),
        ("entropy_weight", {"entropy"}),
    ],
)
def test_a_term_without_weight_is_left_out(encoder, weight, gone):
    log = bench(encoder, **{weight: 0.0}).step()
    assert log.keys() == TERMS - gone


def test_dropout_is_in_the_update(encoder):
    ours = bench(encoder, target_labeled=False, adversarial_weight=0.0, virtual_weight=0.0, entropy_weight=0.0)
    source, target = ours.batches()
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ours.model.eval()
        seen.append(float(loss_of_step(ours, source, target)[0].detach()))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("rows", [[4], [2, 4, 6], [SOURCE], [SOURCE, SOURCE + 2]])
def test_odd_batches(encoder, rows):
    """One text, one class, the target's texts alone."""
    ours = bench(encoder)
    log = ours.step(0, ours.source_batch(rows), ours.target_batch([3]))
    assert (float(log["adaptive_loss"]) > 0) == (rows[0] < SOURCE)
    assert all(np.isfinite(float(value)) for value in log.values())
    assert all(torch.isfinite(value).all() for value in ours.weights().values())


def test_class_weights_are_in_the_supervised_terms(encoder):
    ours = bench(encoder, dropout=False)
    source, target = ours.source_batch([0, 1, 3, 5]), ours.batches()[1]
    plain = loss_of_step(ours, source, target)[1]
    ours.context.class_weights = torch.tensor([0.1, 3.0])
    weighted = loss_of_step(ours, source, target)[1]
    for name in TERMS - {"entropy", "virtual_loss"}:
        assert abs(float(plain[name]) - float(weighted[name])) > 1e-4, name


# ---------------------------------------------------------------------- the literal reading


def texts(theta, batch: Batch, drawn=None) -> list[reference.Text]:
    found = []
    for row in range(len(batch.rows)):
        inputs = {name: value[row : row + 1] for name, value in batch.inputs.items()}
        mask = inputs["attention_mask"].unsqueeze(-1)
        label = None if batch.labels is None else int(batch.labels[row])
        noise = None if drawn is None else drawn[row : row + 1] * mask
        found.append(
            reference.Text(inputs, theta[WORDS][inputs["input_ids"]] * mask, label, int(batch.rows[row]) < SOURCE, noise)
        )
    return found


@pytest.mark.parametrize("target_labeled", [True, False])
def test_trajectory_is_the_literal_reading(encoder, target_labeled):
    lambdas = {"adversarial_weight": 0.7, "adaptive_weight": 1.3, "virtual_weight": 0.9, "entropy_weight": 0.6}
    ours = bench(
        encoder, target_labeled=target_labeled, dropout=False, radius=0.2, xi=0.05, target_head_learning_rate_ratio=3.0, **lambdas
    )
    constants = reference.Constants(tuple(lambdas.values()), 0.2, 0.05, ours.rate, 3.0)
    theta = {name: value for name, value in ours.weights().items() if not name.startswith("target_head")}
    head = ours.method.target_head
    own = (head.weight.detach().clone(), head.bias.detach().clone()) if target_labeled else (torch.zeros(2, 32), torch.zeros(2))

    def features_of(params, inputs, noise):
        seen = []
        handle = ours.model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        functional(ours.model, params, {**inputs, "noise": noise})
        handle.remove()
        return seen[0][0]

    for number in range(4):
        rows = [number, number + 7, number + 20] + [SOURCE + number] * target_labeled
        source, target = ours.source_batch(rows), ours.target_batch([number, number + 9, number + 21])
        generator = torch.Generator()
        generator.set_state(ours.context.generator.get_state())
        drawn = torch.randn((*target.inputs["input_ids"].shape, 32), generator=generator)
        labeled = ours.context.target_labeled(number) if target_labeled else None
        theta, own = reference.step(
            features_of, theta, HEAD, own, texts(theta, source), texts(theta, labeled) if target_labeled else [],
            texts(theta, target, drawn), constants,
        )  # fmt: skip
        before = ours.weights()
        ours.step(number, source, target)
        assert any(not torch.equal(before[name], value) for name, value in ours.weights().items())
        assert_weights_near({name: value for name, value in ours.weights().items() if not name.startswith("target_head")}, theta)
        if target_labeled:
            assert_weights_near({"weight": head.weight, "bias": head.bias}, {"weight": own[0], "bias": own[1]})


# ---------------------------------------------------------------------- over threads


class Threads:
    """Threads with their model and method: 12 of the source, then 6 labeled ones of the target; the same serve as unlabeled."""

    def __init__(self, **changes):
        torch.manual_seed(0)
        corpus = load_corpus(make_threads(18, 4, largest=7), labeled=True)
        settings = BigcnSettings(hidden=4, graph_dropout=0.0, drop_edge=0.0)
        self.model = BigcnModel.create("bigcn", corpus.classes, corpora=[corpus], settings=settings)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        self.encoded = self.model.encode_threads(corpus.threads())
        self.labels = torch.from_numpy(corpus.label_numbers(corpus.classes))
        self.context = Context(9, 18, 2, torch.Generator().manual_seed(1), lambda: 0.05, source_size=18)
        self.context.target_labeled_rows = torch.arange(12, 18)
        self.context.target_labeled = lambda step: self.batch([12, 13 + step % 5])
        self.method = Biat(self.model, BiatSettings(**changes), self.context)

    def batch(self, rows, labeled=True) -> Batch:
        rows = np.asarray(rows)
        return Batch(self.model.collate(self.encoded, rows), self.labels[rows] if labeled else None, torch.from_numpy(rows))

    def texts(self, batch: Batch, drawn=None) -> list[reference.Text]:
        """One text for each thread; `drawn`: of all posts of the batch."""
        found, first = [], 0
        for row in batch.rows.tolist():
            inputs = self.model.collate(self.encoded, np.array([row]))
            values = self.model.input_embeddings(inputs)
            noise = None if drawn is None else drawn[first : first + len(values)]
            first += len(values)
            label = None if batch.labels is None else int(self.labels[row])
            found.append(reference.Text(inputs, values, label, row < 12, noise))
        return found


def test_trajectory_over_threads_is_the_literal_reading(monkeypatch):
    """Whose noise is a dense matrix. Without dropout, and with a random start that has nothing the network does not see."""
    lambdas = {"adversarial_weight": 0.7, "adaptive_weight": 1.3, "virtual_weight": 0.9, "entropy_weight": 0.6}
    ours = Threads(radius=0.3, xi=0.2, target_head_learning_rate_ratio=3.0, **lambdas)
    model, head, drawn = ours.model, ours.method.target_head, []
    random_noise = BigcnModel.random_noise

    def seen(self, inputs, generator):
        noise = random_noise(self, inputs, generator)
        noise = noise._replace(unseen=torch.zeros_like(noise.unseen))
        drawn.append(noise.dense(Graph(inputs["parents"], inputs["threads"], inputs["roots"])))
        return noise

    monkeypatch.setattr(BigcnModel, "random_noise", seen)
    constants = reference.Constants(tuple(lambdas.values()), 0.3, 0.2, 0.05, 3.0)
    theta = {name: value.detach().clone() for name, value in model.trainable().items()}
    own = head.weight.detach().clone(), head.bias.detach().clone()

    def features_of(params, inputs, noise):
        kept = []
        handle = model.head.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        functional(model, params, {**inputs, "noise": noise})
        handle.remove()
        return kept[0][0]

    def update(loss):
        parameters = [*model.trainable().values(), *head.parameters()]
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                parameter -= 0.05 * (3.0 if number >= len(theta) else 1.0) * gradient

    names = ("network.head.weight", "network.head.bias")
    for number in range(3):
        source = ours.batch([number, number + 3, number + 7, number + 12, number + 14])
        target = ours.batch([number + 2, number + 9, number + 15], labeled=False)
        ours.method.step(number, source, target, update)
        labeled = ours.context.target_labeled(number)
        groups = ours.texts(source), ours.texts(labeled), ours.texts(target, drawn[-1])
        theta, own = reference.step(features_of, theta, names, own, *groups, constants)
        assert_weights_near({name: value.detach() for name, value in model.trainable().items()}, theta)
        assert_weights_near({"weight": head.weight, "bias": head.bias}, {"weight": own[0], "bias": own[1]})
    assert len(drawn) == 3


def test_labeled_target_threads_are_not_moved_towards_the_target():
    ours = Threads(radius=0.3)
    source = ours.batch([0, 13, 5])
    is_source = ~ours.context.is_target_labeled(source.rows)
    noise = ours.method.adaptive(source.inputs, source.labels, is_source)
    everywhere = ours.method.adaptive(source.inputs, source.labels)
    graph = Graph(source.inputs["parents"], source.inputs["threads"], source.inputs["roots"])
    assert ((noise.norms(graph) > 0) == is_source).all() and (everywhere.norms(graph) > 0).all()
    kept = is_source[graph.trees]
    torch.testing.assert_close(noise.dense(graph)[kept], everywhere.dense(graph)[kept])


# ---------------------------------------------------------------------- whole runs


def everything(method) -> dict[str, torch.Tensor]:
    parts = {f"{part}.{name}": p for part, module in method.modules().items() for name, p in module.named_parameters()}
    return {name: value.detach().clone() for name, value in {**method.model.trainable(), **parts}.items()}


@pytest.mark.parametrize(("frozen", "target_labeled"), [(0, True), (1, True), (1, False)])
def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, frozen, target_labeled):
    request = {**tiny, "method": "biat", "frozen_layers": frozen, "checkpoint_seconds": 0.0}
    request |= {"source_epochs": 1, "criterion": "source-validation"}
    if target_labeled:
        request["target_labeled"] = str(write_jsonl(tmp_path / "few.jsonl", make_texts(TARGET_LABELED, 30, 0.7)))
    ends = []
    finish = Run.finish
    monkeypatch.setattr(Run, "finish", lambda self, method: (ends.append(everything(method)), finish(self, method))[1])
    mtem.adapt(**request, output=tmp_path / "whole")
    with stopped_after(4):
        mtem.adapt(**request, output=tmp_path / "cut")
    mtem.adapt(**request, output=tmp_path / "cut", resume=True)
    whole, cut = ends
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert ("target_head.weight" in whole) == target_labeled
    start = load_file(tmp_path / "whole" / "checkpoints" / "source.safetensors")
    assert any(not torch.equal(value, whole[name]) for name, value in start.items())
