"""Captured steps: replayed, they do what the steps themselves do, for every method and engine."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from mtem import methods
from mtem.capture import HostValues, by_step, draws, from_host, is_recording, recorded
from mtem.data.loading import load_corpus
from mtem.errors import RunError
from mtem.methods.alignment import Alignment
from mtem.methods.base import Batch, Context
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training import graphs, pretraining
from mtem.training.graphs import StepGraphs, find_capture, length_multiple
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from tests.conftest import make_texts
from tests.reference import tape

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = [("mtem", {"engine": engine}) for engine in ("layerwise", "forward", "taylor", "second-order")]
CASES += [("mtem", {"virtual_step": False, "index_schedule": "assumption-2"}), ("mtem", {"ema_decay": 0.0, "view": "dropout"})]
CASES += [("mtem", {"optimizer": "sgd", "annealing": False, "index_step": "rms"})]
CASES += [("mtem", {"index_mode": "shared", "threshold": 0.5})]
CASES += [("mtem", {"outer": True, "index_mode": mode}) for mode in ("per-text", "shared")]
CASES += [(name, {"view_radius": 0.1}) for name in ("mtem", "fixmatch", "cst")]
CASES += [(name, {}) for name in methods.METHODS if name != "mtem"]
STEPS = 9


def make_trainer(encoder, name, device="cpu", precision=None, capture=None, labeled=True, double=False, outer=False, **changes):
    kind = methods.get(name)
    own = {field.name for field in dataclasses.fields(kind.Settings)}
    settings = kind.Settings(**{key: value for key, value in changes.items() if key in own})
    training = TrainingSettings(log_every=1, **{key: value for key, value in changes.items() if key not in own})
    torch.manual_seed(0)
    model = TextModel.create(encoder, ("bad", "good"), max_length=16).to(device)
    model.precision = precision
    if double:
        model.double()
    kind.prepare_model(model, settings)
    rows = make_texts(40, 1)
    labels = np.array([label == "good" for _, label in rows], dtype=np.int64)
    encoded = model.encode_texts([text + " more" * (number % 3) for number, (text, _) in enumerate(rows)])
    few = np.arange(30, 40)
    source, target, extra = [Stream(model, encoded, *arguments) for arguments in (
        (np.arange(40), labels, 10, 1), (np.arange(40), None, 10, 2), (few, labels, 6, 3),
    )]  # fmt: skip
    given = {"target_labeled_rows": torch.from_numpy(few).to(device), "target_labeled": extra} if labeled else {}
    if outer:  # with texts of one length, so that shapes recur
        alike = np.flatnonzero(encoded.lengths == np.bincount(encoded.lengths).argmax())[:9]
        source, target, extra = [
            Stream(model, encoded, alike, given, 3, seed) for given, seed in ((labels, 1), (None, 2), (labels, 4))
        ]
        given = {"outer": extra}
    align = Alignment(torch.tensor([0.4, 0.6], device=device))
    context = Context(STEPS, 40, 2, torch.Generator().manual_seed(5), lambda: 0.0, source_size=40, align=align, **given)
    context = dataclasses.replace(context, **training.teacher_and_view(1000))
    method = kind(model, settings, context)
    trainer = Trainer(
        method, training, name=name, steps=STEPS, learning_rate=1e-2 if training.optimizer == "sgd" else 1e-3, source=source,
        target=target, progress=Progress(quiet=True), capture=capture,
    )  # fmt: skip
    context.learning_rate = trainer.learning_rate
    return trainer


def run(trainer):
    lines = []
    trainer.record = lines.append
    torch.manual_seed(7)
    trainer.run()
    weights = {name: value.detach().cpu().clone() for name, value in trainer.method.weights().items()}
    weights |= {f"state {name}": value.cpu().clone() for name, value in trainer.method.state().items()}
    for name, module in trainer.method.modules().items():
        weights |= {f"{name}.{key}": value.cpu().clone() for key, value in module.state_dict().items()}
    return weights, lines


def assert_same_run(one, other, tolerance):
    weights, lines = one
    others, other_lines = other
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
    assert [line.keys() for line in lines] == [line.keys() for line in other_lines]
    for line, expected in zip(lines, other_lines, strict=True):
        for name, value in expected.items():
            if isinstance(value, float):
                assert line[name] == pytest.approx(value, rel=max(tolerance, 1e-6), abs=tolerance), name


# ---------------------------------------------------------------------- the same results


# Labeled target texts make a difference to biat, dann and wind.
@pytest.mark.parametrize("name, changes, labeled", [*((*case, True) for case in CASES), ("biat", {}, False), ("dann", {}, False)])
def test_a_replayed_step_is_the_step(encoder, name, changes, labeled):
    if changes.get("engine") == "forward":
        pytest.skip("the tape cannot read the tensors of forward-mode differentiation: the test on a GPU must do")
    changes = {
        "optimizer": "sgd",
        "max_grad_norm": 0.0,
        **changes,
    }  # Adam divides by the size of gradients that are mere rounding
    expected = run(make_trainer(encoder, name, labeled=labeled, **changes))
    replayed = make_trainer(encoder, name, labeled=labeled, capture=tape.capture, **changes)
    found = run(replayed)
    assert_same_run(found, expected, 1e-5)
    assert replayed.graphs.active and 0 < replayed.graphs.count < STEPS - 1
    assert len({line["learning_rate"] for line in found[1]}) > STEPS / 2  # the rate of a replay is not that of its capture


def pretrainer(encoder, device="cpu", capture=None, **changes):
    torch.manual_seed(0)
    model = TextModel.create(encoder, ("bad", "good"), max_length=16).to(device)
    texts = [text + " more" * (number % 3) for number, (text, _) in enumerate(make_texts(40, 1))]
    settings = TrainingSettings(log_every=1, pretrain_batch_size=10, **changes)
    context = Context(STEPS, 0, 2, torch.Generator().manual_seed(5), lambda: 0.0)
    return Trainer(
        pretraining.new_method(model, settings, context), settings, name="pretrain", steps=STEPS, learning_rate=1e-2,
        source=pretraining.all_texts(model, [model.encode_texts(texts)], settings), target=None, progress=Progress(quiet=True),
        capture=capture,
    )  # fmt: skip


def test_so_is_one_of_the_pretraining(encoder):
    expected, replayed = pretrainer(encoder, optimizer="sgd"), pretrainer(encoder, capture=tape.capture, optimizer="sgd")
    assert_same_run(run(replayed), run(expected), 1e-5)
    assert replayed.graphs.count


@GPU
def test_on_a_gpu_too(encoder):
    expected = pretrainer(encoder, "cuda", optimizer="sgd", cuda_graphs=False)
    replayed = pretrainer(encoder, "cuda", optimizer="sgd")
    assert_same_run(run(replayed), run(expected), 1e-4)
    assert replayed.graphs.count


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("name", ["mtem", "fixmatch", "source-only"])
def test_so_is_one_with_adam(encoder, name, optimizer):
    """In double precision, where the keys' biases, whose gradient is nothing but rounding, do not move."""
    expected = run(make_trainer(encoder, name, optimizer=optimizer, double=True))
    replayed = make_trainer(encoder, name, optimizer=optimizer, capture=tape.capture, double=True)
    assert_same_run(run(replayed), expected, 1e-5)
    assert replayed.graphs.count


@GPU
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, changes", CASES)
def test_a_cuda_graph_is_the_step(encoder, name, changes, precision):
    changes = {"optimizer": "sgd", **changes}
    plain = run(make_trainer(encoder, name, "cuda", precision, cuda_graphs=False, **changes))
    captured = make_trainer(encoder, name, "cuda", precision, **changes)
    found = run(captured)
    assert captured.graphs.active and captured.graphs.count
    assert_same_run(found, plain, 1e-4 if precision is None else 2e-2)


@GPU
def test_a_step_that_reads_a_number_falls_back(encoder, caplog):
    class Reads(SourceOnly):
        def step(self, number, source, target, update):
            log = super().step(number, source, target, update)
            float(log["source_loss"])
            return log

    trainer = make_trainer(encoder, "source-only", "cuda", optimizer="sgd")
    expected = run(make_trainer(encoder, "source-only", "cuda", optimizer="sgd", cuda_graphs=False))
    trainer.method.__class__ = Reads
    with caplog.at_level(logging.WARNING):
        found = run(trainer)
    assert "without CUDA graphs" in caplog.text and not trainer.graphs.active
    assert_same_run(found, expected, 1e-4)


def runs_with_an_infinite_word(trainers):
    """The number of skipped steps and the weights of runs in which texts with one word have no finite logits."""
    found = []
    for made in trainers:
        embeddings = made.method.model.network.bert.embeddings.word_embeddings.weight
        seen = [{int(word) for row in made.source.rows(step) for word in made.source.tokens.ids(row)} for step in range(STEPS)]
        word = next(word for word in sorted(seen[-1]) if 1 < sum(word in words for words in seen) < STEPS / 2)
        with torch.no_grad():
            embeddings[word] = float("inf")
        weights, _ = run(made)
        found.append((made.guard.skipped, {name: value.nan_to_num() for name, value in weights.items()}))
    return found


def assert_both_skip(found, tolerance):
    (skipped, weights), (also_skipped, others) = found
    assert 1 < skipped == also_skipped < STEPS / 2
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_replayed_step_that_is_not_finite_is_skipped(encoder, optimizer):
    trainers = [make_trainer(encoder, "source-only", capture=capture, optimizer=optimizer) for capture in (None, tape.capture)]
    assert_both_skip(runs_with_an_infinite_word(trainers), 1e-5)


@GPU
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_so_is_one_of_a_cuda_graph(encoder, optimizer):
    trainers = [
        make_trainer(encoder, "source-only", "cuda", optimizer=optimizer, cuda_graphs=captured) for captured in (False, True)
    ]
    assert_both_skip(runs_with_an_infinite_word(trainers), 1e-4)
    assert trainers[1].graphs.active and trainers[1].graphs.count


# ---------------------------------------------------------------------- what is captured


class Counted(SourceOnly):
    """Counts how often Python runs the step."""

    calls = 0

    def step(self, number, source, target, update):
        self.calls += 1
        return super().step(number, source, target, update)


def counted(encoder, capture=tape.capture):
    trainer = make_trainer(encoder, "source-only", labeled=False)
    method = trainer.method = Counted(trainer.method.model, SourceOnlySettings(), trainer.method.context)
    return method, StepGraphs(method, trainer._step, capture), trainer


def batch(trainer, size, length, mask=True):
    ids = torch.full((size, length), 5)
    masks = torch.ones(size, length, dtype=torch.int64) if mask else torch.ones(1, 1, dtype=torch.int64).expand(size, length)
    return Batch({"input_ids": ids, "attention_mask": masks}, torch.zeros(size, dtype=torch.int64), torch.arange(size))


def test_the_second_step_of_a_shape_is_captured_and_the_third_replayed(encoder):
    method, steps, trainer = counted(encoder)
    for number, (size, length, mask) in enumerate([(4, 8, True), (4, 8, True), (4, 8, True), (4, 8, True)]):
        steps.step(number, batch(trainer, size, length, mask), None)
    assert (method.calls, steps.count) == (2, 1)
    # another length, another number of texts, and a batch without padding are other shapes
    for other in ((4, 12, True), (3, 8, True), (4, 8, False)):
        for number in range(3):
            steps.step(number, batch(trainer, *other), None)
    assert (method.calls, steps.count) == (8, 4)


def test_no_more_graphs_than_the_limit(encoder, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    method, steps, trainer = counted(encoder)
    for length in (8, 12):
        for number in range(3):
            steps.step(number, batch(trainer, 4, length), None)
    assert (method.calls, steps.count) == (5, 1)


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted\nwhen stream is capturing"), torch.OutOfMemoryError()])
def test_a_failed_capture_changes_nothing_and_is_reported_once(encoder, caplog, error):
    def failing(run):
        torch.rand(3)
        raise error

    expected = run(make_trainer(encoder, "mtem", optimizer="sgd"))
    trainer = make_trainer(encoder, "mtem", capture=failing, optimizer="sgd")
    with caplog.at_level(logging.WARNING):
        found = run(trainer)
    assert_same_run(found, expected, 2e-6)
    assert caplog.text.count("without CUDA graphs") == 1 and not trainer.graphs.active and not trainer.graphs.count


def test_after_a_failed_capture_nothing_is_replayed(encoder):
    """The generator of the earlier graphs belongs to the failed capture."""
    captures = []

    def once(run):
        captures.append(run)
        if len(captures) > 1:
            raise RuntimeError("no")
        return tape.capture(run)

    method, steps, trainer = counted(encoder, once)
    for length in (8, 12):
        for number in range(3):
            steps.step(number, batch(trainer, 4, length), None)
    assert (len(captures), steps.count, steps.active) == (2, 0, False)
    calls = method.calls
    steps.step(0, batch(trainer, 4, 8), None)
    assert method.calls == calls + 1


def test_a_replayable_step_that_logs_a_number_is_refused(encoder):
    class Numbers(SourceOnly):
        def step(self, number, source, target, update):
            return {**super().step(number, source, target, update), "number": float(number)}

    trainer = make_trainer(encoder, "source-only", capture=tape.capture)
    trainer.method.__class__ = Numbers
    with pytest.raises(RunError, match="'number' is a number"):
        trainer.run()


def test_a_first_gradient_is_not_captured(encoder, caplog):
    """The optimizer would begin with an empty state at every replay."""

    class Late(SourceOnly):
        def step(self, number, source, target, update):
            self.model.head.weight.requires_grad_(number > 0)
            return super().step(number, source, target, update)

    trainer = make_trainer(encoder, "source-only", capture=tape.capture, labeled=False)
    trainer.method.__class__ = Late
    steps = trainer.graphs
    for number in range(3):
        steps.step(number, batch(trainer, 4, 8), None)
    assert not steps.active and "first gradient" in caplog.text


def test_on_a_cpu_nothing_is_captured_or_padded(encoder):
    trainer = make_trainer(encoder, "mtem")
    assert trainer.graphs is None and trainer.source.multiple == 1 and length_multiple(trainer.method.model) == 1
    assert all(isinstance(group["lr"], float) for group in trainer.optimizer.param_groups)


def test_what_may_be_captured_on_a_gpu(encoder, monkeypatch, caplog):
    method = make_trainer(encoder, "mtem").method
    monkeypatch.setattr(type(method.model), "device", torch.device("cuda"))
    monkeypatch.setattr(graphs, "cuda_capture", lambda: "captured")
    settings = TrainingSettings()
    assert find_capture(method, settings) == "captured"
    assert find_capture(method, dataclasses.replace(settings, cuda_graphs=False)) is None
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(type(method), "replayable", False)
        assert find_capture(method, settings) is None
        assert "mtem is not declared replayable" in caplog.text
        monkeypatch.setattr(type(method), "replayable", True)
        monkeypatch.setattr(type(method.model), "replayable", False)
        assert find_capture(method, settings) is None
        assert "TextModel is not declared replayable" in caplog.text


@pytest.mark.parametrize("longest, multiple", [(16, 32), (100, 32), (128, 32), (256, 64), (257, 96), (512, 128)])
def test_padded_lengths_are_few(encoder, monkeypatch, longest, multiple):
    model = make_trainer(encoder, "mtem").method.model
    model.max_length = longest
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert length_multiple(model) == multiple
    more = pretraining.all_texts(model, [model.encode_texts(["fine"])], TrainingSettings())
    assert more.multiple == 32 and length_multiple(model, 2) >= multiple


@pytest.mark.parametrize("multiple, widths", [(1, [3, 7]), (4, [4, 8]), (32, [16, 16])])
def test_batches_are_padded_to_a_multiple_and_never_beyond_the_longest_text(encoder, tmp_path, multiple, widths):
    model = TextModel.create(encoder, ("bad", "good"), max_length=16)
    file = tmp_path / "texts.csv"
    file.write_text("text\nfine\nfine fine fine fine fine\n")
    tokens = model.encode(load_corpus(file, labeled=False))
    for row, width in enumerate(widths):
        inputs = model.collate(tokens, np.array([row]), multiple=multiple)
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (1, width)
        assert int(inputs["attention_mask"].sum()) == tokens.lengths[row]


# ---------------------------------------------------------------------- values from the CPU


def ask(generator, rate, number):
    return (
        draws(lambda: torch.rand(2, 3, generator=generator), CPU),
        from_host(lambda: rate[0], CPU),
        by_step(lambda step: 10.0 * step, number, CPU),
    )


def test_values_are_made_again_for_every_replay():
    generator, expected = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    rate, values = [0.5], HostValues()
    with recorded(values):
        drawn, number, by_number = ask(generator, rate, 2)
        assert not is_recording()
    assert torch.equal(drawn, torch.rand(2, 3, generator=expected)) and (number, by_number) == (0.5, 20.0)
    with values.capture(3):
        assert is_recording()
        drawn, number, by_number = ask(generator, rate, 3)
    values.send()
    assert torch.equal(drawn, torch.rand(2, 3, generator=expected)) and float(number) == 0.5 and float(by_number) == 30
    rate[0] = 0.25
    values.refill(8)
    assert torch.equal(drawn, torch.rand(2, 3, generator=expected)) and float(number) == 0.25 and float(by_number) == 80


def test_a_captured_step_asks_for_what_it_asked_before():
    values = HostValues()
    with recorded(values):
        draws(lambda: torch.rand(2, 3), CPU)
    with pytest.raises(RuntimeError, match="other values"), values.capture(0):
        draws(lambda: torch.rand(2, 4), CPU)
    with pytest.raises(RuntimeError, match="other values"), values.capture(0):
        for _ in range(2):
            draws(lambda: torch.rand(2, 3), CPU)
    assert not values.capturing and not is_recording()


def test_without_a_capture_numbers_stay_numbers():
    assert from_host(lambda: 0.1, CPU) == 0.1 and by_step(lambda step: step / 3, 1, CPU) == 1 / 3
    assert isinstance(from_host(lambda: 0.1, CPU), float)
