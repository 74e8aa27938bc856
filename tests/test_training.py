"""The loop's parts: optimizer groups, rates, clipping, mixed batches, state, and errors in one line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mtem import rates
from mtem.errors import RequestError, RunError
from mtem.methods import Context
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training import Stream, Trainer, TrainingSettings, find_device, find_precision, find_rates, make_optimizer
from tests.conftest import make_texts

CPU = torch.device("cpu")


@pytest.fixture
def model(encoder):
    torch.manual_seed(0)
    return TextModel.create(encoder, ("bad", "good"), max_length=16)


def stream(model, count=40, size=10, **extra):
    rows = make_texts(count, 1)
    labels = np.array([label == "good" for _, label in rows], dtype=np.int64)
    return Stream(model, model.encode_texts([text for text, _ in rows]), np.arange(count), labels, size, 3, **extra)


def trainer(model, *, steps=8, rate=1e-3, method=None, lines=None, after=lambda done: None, **changes):
    context = Context(steps, 0, 2, torch.Generator(), lambda: 0.0)
    method = method or SourceOnly(model, SourceOnlySettings(), context)
    given = dataclasses.replace(TrainingSettings(), **changes)
    record = (lambda line: None) if lines is None else lines.append
    return Trainer(
        method, given, name="source", steps=steps, rate=rate, source=stream(model), target=None,
        progress=Progress(quiet=True), record=record, after=after,
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
    made = trainer(model, schedule=schedule, warmup=0.25, layer_decay=0.5)
    made.after = lambda done: seen.append((made.rate(), [group["lr"] / group["factor"] for group in made.optimizer.param_groups]))
    made.run()
    wanted = [1e-3 * rates.SCHEDULES[schedule](step, 8, 2) for step in range(8)]
    assert [rate for rate, _ in seen] == pytest.approx(wanted)
    for rate, others in seen:
        assert others == pytest.approx([rate] * len(others))
    assert wanted[0] < wanted[1] and (schedule == "constant") == (wanted[-1] == wanted[2])


def test_the_rate_of_assumption_2(model):
    seen = []
    made = trainer(model, steps=4, rate=2.0, schedule="assumption-2", optimizer="sgd", clip=1e-9)
    made.after = lambda done: seen.append(made.rate())
    made.run()
    assert seen == pytest.approx([1.0, 1.0, 2 / 3, 0.5])


def test_clipping_bounds_the_step_and_reports_the_norm(model):
    lines = []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = trainer(model, steps=1, rate=1.0, optimizer="sgd", clip=0.01, weight_decay=0.0, schedule="constant", warmup=0.0,
                   lines=lines)  # fmt: skip
    made.run()
    moved = torch.stack([(p.detach() - before[name]).norm() for name, p in model.named_parameters()]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3) and lines[0]["gradient_norm"] > 0.01
    lines.clear()
    trainer(model, steps=1, clip=0.0, lines=lines).run()
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


# ---------------------------------------------------------------------- errors


class Broken(SourceOnly):
    def step(self, number, source, target, update):
        log = super().step(number, source, target, update)
        return {**log, "source_loss": float("nan")} if number == 4 else log


def test_a_loss_that_is_no_number_ends_the_run_in_one_line(model):
    lines = []
    method = Broken(model, SourceOnlySettings(), Context(8, 0, 2, torch.Generator(), lambda: 0.0))
    with pytest.raises(RunError, match=r"^source, step 5: source_loss is nan; try a smaller learning rate$"):
        trainer(model, method=method, log_every=2, lines=lines).run()
    assert [line["step"] for line in lines] == [1, 3]


def test_a_real_divergence_is_noticed_at_the_end_at_the_latest(model):
    with pytest.raises(RunError, match="source_loss is nan"):
        trainer(model, rate=1e30, optimizer="sgd", clip=0.0, schedule="constant", warmup=0.0, log_every=1000).run()


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


def test_rates_follow_frozen_layers_unless_given(encoder):
    model = TextModel.create(encoder, ("bad", "good"), max_length=16)
    assert find_rates(TrainingSettings(), model.default_rates()) == (5e-5, 2e-5)
    model.freeze(2)
    assert find_rates(TrainingSettings(), model.default_rates()) == (5e-4, 2e-4)
    assert find_rates(TrainingSettings(source_rate=0.0, rate=1.0), model.default_rates()) == (0.0, 1.0)


# ---------------------------------------------------------------------- batches


def test_extra_rows_make_up_their_share_of_every_batch(model):
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
    assert {"stage", "step", "rate", "source_loss", "gradient_norm"} <= lines[0].keys()
