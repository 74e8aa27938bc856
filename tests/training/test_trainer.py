"""The loop's parts: optimizer groups, rates, clipping, mixed batches, state, and errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from mtem import methods, schedules
from mtem.data.loading import load_corpus
from mtem.errors import RequestError, RunError
from mtem.methods.base import Context
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models import text
from mtem.models.text import TextModel
from mtem.models.trees.model import BigcnModel, BigcnSettings
from mtem.progress import Progress
from mtem.training import optimizer as optimizers
from mtem.training.devices import find_device, find_precision
from mtem.training.optimizer import make_optimizer
from mtem.training.settings import TrainingSettings, find_learning_rates
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem.training.weights import clone, current
from tests.conftest import make_texts
from tests.threads import make_threads
from tests.tolerance import assert_weights_near

CPU = torch.device("cpu")


@pytest.fixture
def model(encoder):
    torch.manual_seed(0)
    return TextModel.create(encoder, ("bad", "good"), max_length=16)


def stream(model, count=40, size=10, **extra):
    rows = make_texts(count, 1)
    labels = np.array([label == "good" for _, label in rows], dtype=np.int64)
    return Stream(model, model.encode_texts([text for text, _ in rows]), np.arange(count), labels, size, 3, **extra)


def trainer(model, *, steps=8, learning_rate=1e-3, method=None, lines=None, after=lambda done: None, **changes):
    context = Context(steps, 0, 2, torch.Generator(), lambda: 0.0)
    method = method or SourceOnly(model, SourceOnlySettings(), context)
    given = dataclasses.replace(TrainingSettings(), **changes)
    record = (lambda line: None) if lines is None else lines.append
    return Trainer(
        method, given, name="source", steps=steps, learning_rate=learning_rate, source=stream(model), target=None,
        progress=Progress(quiet=True), record=record, after_step=after,
    )  # fmt: skip


def groups(model, **changes):
    method = SourceOnly(model, SourceOnlySettings(), Context(1, 0, 2, torch.Generator(), lambda: 0.0))
    made = make_optimizer(method, dataclasses.replace(TrainingSettings(), **changes), "adamw", 1e-3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group for group in made.param_groups for p in group["params"]}


# ---------------------------------------------------------------------- optimizer


def test_every_layer_has_its_rate(model):
    found = groups(model, layer_decay=0.5)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, depth in model.depths().items():
        assert found[name]["lr"] == pytest.approx(1e-3 * 0.5 ** (4 - depth)), name
    assert found["network.classifier.weight"]["lr"] == 1e-3


def test_one_rate_without_layer_decay(model):
    assert {group["lr"] for group in groups(model).values()} == {1e-3}


def test_matrices_decay_and_biases_and_norms_do_not(model):
    found = groups(model, weight_decay=0.1)
    for name, parameter in model.named_parameters():
        assert found[name]["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0), name
    assert found["network.bert.encoder.layer.0.output.LayerNorm.weight"]["weight_decay"] == 0.0


def test_frozen_parameters_are_not_optimized(model):
    model.freeze(2)
    assert groups(model).keys() == model.trainable().keys()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RequestError, match="nothing to train"):
        groups(model)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_follows_its_schedule_in_every_group(model, schedule):
    seen = []
    made = trainer(model, schedule=schedule, warmup_ratio=0.25, layer_decay=0.5)
    made.after_step = lambda done: seen.append(
        (made.learning_rate(), [group["lr"] / group["factor"] for group in made.optimizer.param_groups])
    )
    made.run()
    wanted = [1e-3 * schedules.SCHEDULES[schedule](step, 8, 2) for step in range(8)]
    assert [rate for rate, _ in seen] == pytest.approx(wanted)
    for rate, others in seen:
        assert others == pytest.approx([rate] * len(others))
    assert wanted[0] < wanted[1] and (schedule == "constant") == (wanted[-1] == wanted[2])


def test_the_rate_of_assumption_2(model):
    seen = []
    made = trainer(model, steps=4, learning_rate=2.0, schedule="assumption-2", optimizer="sgd", max_grad_norm=1e-9)
    made.after_step = lambda done: seen.append(made.learning_rate())
    made.run()
    assert seen == pytest.approx([1.0, 1.0, 2 / 3, 0.5])


def test_clipping_bounds_the_step_and_reports_the_norm(model):
    lines = []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = trainer(
        model, steps=1, learning_rate=1.0, optimizer="sgd", max_grad_norm=0.01, weight_decay=0.0, schedule="constant",
        warmup_ratio=0.0, lines=lines,
    )  # fmt: skip
    made.run()
    moved = torch.stack([(p.detach() - before[name]).norm() for name, p in model.named_parameters()]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3) and lines[0]["gradient_norm"] > 0.01
    lines.clear()
    trainer(model, steps=1, max_grad_norm=0.0, lines=lines).run()
    assert "gradient_norm" not in lines[0]


def fresh(encoder):
    torch.manual_seed(0)
    model = TextModel.create(encoder, ("bad", "good"), max_length=16)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_state_round_trip_continues_to_the_same_weights(encoder, optimizer):
    whole = fresh(encoder)
    trainer(whole, optimizer=optimizer).run()
    first, kept = fresh(encoder), {}

    def stop(done):
        if done == 5:
            kept.update({name: value.clone() for name, value in cut.state().items()})
            raise KeyboardInterrupt

    cut = trainer(first, optimizer=optimizer, after=stop)
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    second = fresh(encoder)
    second.load_state_dict(first.state_dict())
    resumed = trainer(second, optimizer=optimizer)
    resumed.load_state(kept)
    assert resumed.state().keys() == kept.keys() and bool(kept) == (optimizer != "sgd")
    resumed.run(5)
    wanted = dict(whole.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in second.named_parameters())
    assert not torch.equal(first.head.weight, second.head.weight)


def assert_alike(one, other):
    """But for the biases of the keys: attention does not depend on them, and Adam makes steps of their gradient's rounding."""
    assert_weights_near({name: value for name, value in one.items() if not name.endswith("key.bias")}, other)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_the_fused_kernel_takes_the_steps_of_the_plain_one(encoder, monkeypatch, optimizer):
    ends = []
    for places in (optimizers.FUSED, ()):
        monkeypatch.setattr(optimizers, "FUSED", places)
        model = fresh(encoder)
        made = trainer(model, optimizer=optimizer, weight_decay=0.1, layer_decay=0.7, steps=12)
        assert bool(made.optimizer.param_groups[0]["fused"]) == bool(places)
        made.run()
        ends.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    begun = dict(fresh(encoder).named_parameters())
    assert_alike(ends[0], ends[1])
    assert not torch.allclose(ends[0]["network.classifier.weight"], begun["network.classifier.weight"], atol=1e-4)


def test_what_a_plain_optimizer_left_a_fused_one_goes_on_with(encoder, monkeypatch):
    whole, cut = fresh(encoder), fresh(encoder)
    trainer(whole).run()
    monkeypatch.setattr(optimizers, "FUSED", ())
    kept = {}

    def stop(done):
        if done == 5:
            kept.update({name: value.clone() for name, value in first.state().items()})
            raise KeyboardInterrupt

    first = trainer(cut, after=stop)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    monkeypatch.undo()
    resumed = trainer(cut)
    resumed.load_state(kept)
    assert resumed.optimizer.param_groups[0]["fused"]
    resumed.run(5)
    assert_alike(dict(cut.named_parameters()), dict(whole.named_parameters()))


def test_given_gradients_may_have_any_strides(encoder):
    """The fused kernels on the CPU read a gradient's memory as if it had the parameter's strides."""
    ends = []
    for transposed in (False, True):
        model = fresh(encoder)
        draw = torch.Generator().manual_seed(1)
        given = {name: torch.randn(p.shape, generator=draw) for name, p in model.trainable().items()}
        if transposed:
            given = {name: value.T.contiguous().T if value.dim() == 2 else value for name, value in given.items()}
            assert not given["network.classifier.weight"].is_contiguous()
        trainer(model, max_grad_norm=0.0).update(None, gradients=given)
        ends.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# ---------------------------------------------------------------------- nothing in a step waits for the device


class NoWaiting(TorchDispatchMode):
    """Refuses what would have the CPU wait for a GPU: numbers read, and results whose shape depends on values.

    It runs without one, and so cannot see transfers; the test on a GPU does.
    """

    NAMES = ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "masked_select", "equal", "_linalg_check_errors")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        fills = name == "index_put_" and args[2].numel() == 1  # one number where a mask says so: no shape depends on it
        masked = name in ("index", "index_put", "index_put_") and not fills
        by_mask = masked and any(each is not None and each.dtype is torch.bool for each in args[1])
        if name in self.NAMES or by_mask or (name == "repeat_interleave" and "output_size" not in (kwargs or {})):
            raise AssertionError(f"{name}: the CPU would wait here")
        return function(*args, **(kwargs or {}))


def ready(encoder, name, device="cpu", threads=False, **changes):
    """A trainer of the method whose batches are there, with labeled target texts (or threads)."""
    kind = methods.get(name)
    settings = kind.Settings(**changes)
    torch.manual_seed(0)
    if threads:
        corpus = load_corpus(make_threads(40, 1), labeled=True)
        model = BigcnModel.create("bigcn", ("bad", "good"), corpora=[corpus], settings=BigcnSettings(hidden=8))
        tokens = model.encode_threads(corpus.threads())
        labels = np.arange(40) % 2
    else:
        rows = make_texts(40, 1)
        model = TextModel.create(encoder, ("bad", "good"), max_length=16)
        tokens = model.encode_texts([text for text, _ in rows])
        labels = np.array([label == "good" for _, label in rows], dtype=np.int64)
    kind.prepare_model(model, settings)
    model.to(device)
    few = np.arange(20, 40)
    streams = [Stream(model, tokens, *given) for given in (
        (np.arange(40), labels, 10, 1), (np.arange(40), None, 10, 2), (few, labels, 6, 3),
    )]  # fmt: skip
    given = {"source_size": 40, "target_labeled_rows": torch.from_numpy(few).to(device), "target_labeled": streams[2]}
    context = Context(6, 40, 2, torch.Generator(), lambda: 1e-3, **given)
    return Trainer(
        kind(model, settings, context), TrainingSettings(log_every=1000), name=name, steps=6, learning_rate=1e-3,
        source=streams[0], target=streams[1], progress=Progress(quiet=True),
    )  # fmt: skip


def run_inside(trainer, inside, warm):
    """The steps after the first `warm` ones, batches included, in the context that `inside` makes."""
    trainer.guard.deferred = True  # as on a GPU
    for step in range(warm + 2):
        trainer._set_learning_rate(step)
        with inside() if step >= warm else contextlib.nullcontext():
            target = trainer.target(step)
            trainer.guard.begin()
            log = trainer.method.step(step, trainer.source(step), target, trainer.update)
            trainer.guard.end(step, log)


STEPS = [("mtem", engine) for engine in ("layerwise", "forward", "taylor", "second-order")]
STEPS += [(name, None) for name in methods.METHODS if name != "mtem"]


@pytest.fixture
def unread_masks(monkeypatch):
    """transformers reads the attention mask in every forward pass, to leave it out where it hides nothing."""
    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False)


@pytest.mark.parametrize("name, engine", STEPS)
def test_no_step_reads_a_number(encoder, unread_masks, name, engine):
    if name == "cst":
        pytest.skip("one_hot reads its labels, though on the CPU alone: the test on a GPU must do")
    made = ready(encoder, name, **({"engine": engine} if engine else {}))
    run_inside(made, NoWaiting, warm=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, engine", STEPS)
def test_no_step_waits_for_the_gpu(encoder, unread_masks, name, engine, precision):
    check_waiting(ready(encoder, name, "cuda", **({"engine": engine} if engine else {})), precision)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mtem", "source-only"])
def test_nor_do_the_masks(encoder, name):
    check_waiting(ready(encoder, name, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("name, engine", STEPS)
def test_no_step_over_threads_needs_a_number(encoder, name, engine, monkeypatch):
    """The model is on a device whose tensors have shapes alone: what depends on the threads is found on the CPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # not known there
    made = ready(encoder, name, "meta", threads=True, **({"engine": engine} if engine else {}))
    run_inside(made, contextlib.nullcontext, warm=0)
    assert all(parameter.device.type == "meta" for parameter in made.method.model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("name, engine", STEPS)
def test_nor_do_steps_over_threads(encoder, name, engine, precision):
    check_waiting(ready(encoder, name, "cuda", threads=True, **({"engine": engine} if engine else {})), precision)


def check_waiting(made, precision):
    made.method.model.precision = precision
    made.scaler = torch.amp.GradScaler("cuda", enabled=precision is torch.float16)

    @contextlib.contextmanager
    def strictly():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run_inside(made, strictly, warm=3)


# ---------------------------------------------------------------------- errors


class Broken(SourceOnly):
    """Its loss is not finite in some steps."""

    wrong = (4,)

    def step(self, number, source, target, update):
        def spoiled(loss, **more):
            update(loss * float("nan") if number in self.wrong else loss, **more)

        return super().step(number, source, target, spoiled)


def broken(model, wrong, **more):
    method = Broken(model, SourceOnlySettings(), Context(8, 0, 2, torch.Generator(), lambda: 0.0))
    method.wrong = wrong
    return trainer(model, method=method, **more)


def test_a_full_gpu_ends_the_run_with_what_to_set(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SourceOnly, "step", full)
    with pytest.raises(RunError, match=r"source, step 1: out of GPU memory; set microbatches=5 or activation_checkpointing=true"):
        trainer(model).run()
    assert model.microbatches == 10 and model.activation_checkpointing  # all that could be tried


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_loss_that_is_no_number_is_skipped_wherever_it_comes(model, max_grad_norm, caplog):
    lines, weights = [], []
    made = broken(model, {4}, log_every=1000, lines=lines, max_grad_norm=max_grad_norm)
    made.after_step = lambda done: weights.append(clone(current(model)))
    made.run()
    assert all(torch.equal(weights[4][name], value) for name, value in weights[3].items())  # step 5 did nothing
    assert not all(torch.equal(weights[5][name], value) for name, value in weights[4].items())
    notice = next(line for line in lines if line["stage"] == "notice")
    assert (notice["of"], notice["step"]) == ("source", 5) and notice["texts"]["source"] == made.source.rows(4).tolist()
    assert (
        "source, step 5: the loss or the gradient is not finite; the step was skipped (1 of at most 10); source row"
        in caplog.text
    )


def test_the_texts_with_bad_outputs_are_named(model):
    lines = []
    made = broken(model, (), lines=lines, steps=1)
    tokens, rows = made.source.tokens, made.source.rows(0).tolist()
    word = int(tokens.ids(rows[0])[1])
    with torch.no_grad():
        model.network.bert.embeddings.word_embeddings.weight[word] = float("inf")
    made.run()
    culprits = [row for row in rows if word in tokens.ids(row)]
    assert lines[0]["texts"] == {"source": culprits} and 0 < len(culprits) < len(rows)


def test_too_many_skipped_steps_end_the_run(model):
    with pytest.raises(RunError, match=r"^source, step 5: the loss or the gradient is not finite, as in 2 steps before \(.*row"):
        broken(model, {1, 3, 4}, max_skipped_steps=2).run()
    with pytest.raises(RunError, match=r"^source, step 2: .* \(source row.*\); the last checkpoint is good; try a smaller"):
        broken(model, {1}, max_skipped_steps=0).run()


def test_a_real_divergence_is_noticed_at_the_end_at_the_latest(model):
    with pytest.raises(RunError, match="source: 7 of 8 steps were skipped, the loss or the gradient is not finite"):
        trainer(
            model, learning_rate=1e30, optimizer="sgd", max_grad_norm=0.0, schedule="constant", warmup_ratio=0.0, log_every=1000
        ).run()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("wrong", [(), (2, 3), (7,)])
def test_a_device_that_skips_by_itself_does_the_same(encoder, optimizer, wrong):
    """On a GPU the fused optimizer is told in a tensor; its CPU kernel can be told so too."""
    found = []
    for deferred in (False, True):
        torch.manual_seed(0)
        model = TextModel.create(encoder, ("bad", "good"), max_length=16)
        lines = []
        made = broken(model, wrong, optimizer=optimizer, lines=lines, log_every=1000)
        made.guard.deferred = deferred
        torch.manual_seed(3)
        made.run()
        found.append((clone(current(model)), made.state(), [line["step"] for line in lines if line["stage"] == "notice"]))
    (weights, state, notices), (others, other_state, other_notices) = found
    assert notices == other_notices == [step + 1 for step in wrong]
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())


@pytest.mark.parametrize("deferred", [False, True])
def test_a_skipped_step_leaves_the_method_as_it_was(encoder, deferred):
    made = ready(encoder, "mtem")
    made.guard.deferred = deferred
    seen = []
    made.after_step = lambda done: seen.append(made.method.index.clone())
    step = made.method.step

    def spoiled(number, source, target, update):
        log = step(number, source, target, update)
        if number == 3:
            made.method.index[target.rows[0]] = float("nan")
        return log

    made.method.step = spoiled
    made.run()
    assert made.guard.skipped == 1
    assert torch.equal(seen[3], seen[2]) and not torch.equal(seen[4], seen[3]) and bool(torch.isfinite(seen[-1]).all())


# ---------------------------------------------------------------------- out of memory


class Full:
    """A step that draws, computes gradients and then fails once, after so many of its updates.

    Without failing it passes its batch in two parts from this step on.
    """

    def __init__(self, trainer, number, after, fails):
        self.trainer, self.number, self.after, self.step, self.fails = trainer, number, after, trainer.method.step, fails

    def __call__(self, number, source, target, update):
        if number == self.number and not self.fails:
            self.trainer.method.model.save_memory(2)
        if number != self.number or not self.fails:
            return self.step(number, source, target, update)
        self.fails = False
        torch.rand(5), torch.rand(5, generator=self.trainer.method.context.generator)
        updates = []

        def full(*arguments, **named):
            if len(updates) == self.after:
                arguments[0].backward() if arguments[0] is not None else None
                raise torch.OutOfMemoryError("CUDA out of memory")
            updates.append(number)
            update(*arguments, **named)

        return self.step(number, source, target, full)


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name, after", [("mtem", 0), ("mme", 0), ("mme", 1), ("wind", 0), ("source-only", 0)])
def test_a_step_that_ran_out_of_memory_begins_again_from_the_same_state(encoder, name, after, number, caplog):
    results, lines = [], []
    for fails in (False, True):
        made = ready(encoder, name)
        made.record = lines.append
        made.method.step = Full(made, number, after, fails)
        torch.manual_seed(3)
        made.run()
        results.append((clone(current(made.method.model)), made.method.state(), made.state()))
        assert made.method.model.microbatches == 2
    for one, other in zip(*results, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
    (notice,) = [line for line in lines if line["stage"] == "notice"]
    assert notice == {"stage": "notice", "of": name, "step": number + 1, "out_of_memory": "microbatches=2"}
    assert f"{name}, step {number + 1}: out of GPU memory; it is taken again" in caplog.text


def test_devices_and_precisions(monkeypatch):
    assert find_device("cpu") == CPU and find_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("gpu", "", "meta", "cuda:x", "privateuseone"):
        with pytest.raises(RequestError, match=f"device '{name}'"):
            find_device(name)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no driver\nmore")))
    with pytest.raises(RequestError, match=r"device 'cuda' cannot be used here: no driver$"):
        find_device("cuda")
    assert find_precision("auto", CPU) is None and find_precision("fp32", CPU) is None
    assert find_precision("bf16", CPU) is torch.bfloat16
    with pytest.raises(RequestError, match="fp16 needs a GPU"):
        find_precision("fp16", CPU)


@pytest.mark.parametrize(
    ("capabilities", "expected"), [({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({}, None)]
)
def test_wide_encoders_are_trained_in_bf16_on_a_cpu_that_has_it(capabilities, expected, model, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert find_precision("auto", CPU, model) is None  # 32 values: nothing to gain
    monkeypatch.setattr(text, "WIDE", model.hidden_width)
    assert find_precision("auto", CPU, model) is expected
    assert find_precision("fp32", CPU, model) is None
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # before torch 2.6
    assert find_precision("auto", CPU, model) is None


def test_on_a_cpu_only_training_passes_are_rounded(model):
    model.eval()
    inputs = model.collate(model.encode_texts(["one two", "three"]), np.arange(2))
    with torch.no_grad():
        expected = model(inputs)
    model.precision = torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
    rounded = model(inputs)
    assert not torch.equal(rounded, expected)
    assert torch.allclose(rounded, expected, atol=0.05)
    with torch.no_grad(), model.labeling():
        assert torch.equal(model(inputs), rounded)
    with pytest.raises(KeyError), model.labeling():
        raise KeyError
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("averaged", [False, True])
def test_pseudo_labels_are_made_in_the_precision_of_training(encoder, averaged):
    method = ready(encoder, "fixmatch").method
    method.average = {name: value.detach().clone() for name, value in method.model.trainable().items()} if averaged else {}
    model = method.model
    inputs = model.prepare(model.collate(model.encode_texts(["one two", "three"]), np.arange(2)))
    full = method.teacher_logits(inputs)
    model.precision = torch.bfloat16
    half = method.teacher_logits(inputs)
    assert not half.requires_grad and not torch.equal(half, full)
    assert torch.equal(half, model.eval()(inputs))
    assert torch.allclose(half, full, atol=0.05)


def test_rates_follow_frozen_layers_unless_given(encoder):
    model = TextModel.create(encoder, ("bad", "good"), max_length=16)
    assert find_learning_rates(TrainingSettings(), model.default_learning_rates()) == (5e-5, 2e-5)
    model.freeze(2)
    assert find_learning_rates(TrainingSettings(), model.default_learning_rates()) == (5e-4, 2e-4)
    assert find_learning_rates(TrainingSettings(source_learning_rate=0.0, learning_rate=1.0), model.default_learning_rates()) == (
        0.0,
        1.0,
    )


# ---------------------------------------------------------------------- batches


def test_extra_rows_make_up_their_texts_per_batch_every_batch(model):
    made = stream(model, extra=np.arange(36, 40), extra_share=0.25)
    for step in range(3 * made.per_epoch):
        rows = made.rows(step)
        assert (rows >= 36).sum() == 2
    seen = np.concatenate([made.rows(step) for step in range(made.per_epoch)])
    assert sorted(seen[seen < 36]) == list(range(36)), "every other row comes once an epoch"


def test_extra_rows_alone_and_none(model):
    assert set(stream(model, extra=np.arange(36, 40), extra_share=1.0).rows(0)) <= set(range(36, 40))
    for plain in (stream(model), stream(model, extra=np.arange(0), extra_share=0.5)):
        assert sorted(np.concatenate([plain.rows(step) for step in range(plain.per_epoch)])) == list(range(40))


def test_a_batch_carries_inputs_labels_and_rows(model):
    made = stream(model)
    batch = made(1)
    assert torch.equal(batch.rows, torch.from_numpy(made.rows(1))) and torch.equal(batch.labels, batch.rows % 2)
    assert batch.inputs["input_ids"].shape[0] == 10
    tokens = made.tokens.ids(int(batch.rows[3]))
    assert batch.inputs["input_ids"][3, : len(tokens)].tolist() == tokens.tolist()
    assert int(batch.inputs["attention_mask"][3].sum()) == len(tokens)


def test_the_history_is_logged_every_so_many_steps_and_at_the_end(model):
    lines = []
    trainer(model, log_every=3, lines=lines).run()
    assert [line["step"] for line in lines] == [1, 4, 7, 8]
    assert {"stage", "step", "learning_rate", "source_loss", "gradient_norm"} <= lines[0].keys()


def test_quantiles_of_many_indexes_are_those_of_a_sample(model):
    class Indexed(SourceOnly):
        def indexes(self):
            return torch.linspace(1.0, 5.0, 1_000_003)

    lines = []
    method = Indexed(model, SourceOnlySettings(), Context(1, 0, 2, torch.Generator(), lambda: 0.0))
    trainer(model, steps=1, method=method, lines=lines).run()
    assert lines[0]["index_quantiles"] == pytest.approx([1.4, 3.0, 4.6], abs=1e-3)
