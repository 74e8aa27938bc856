"""Batches without padding: the same logits, states, gradients and training steps as those of padded batches."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtem import methods
from mtem.methods.base import Context
from mtem.models import packing
from mtem.models.masked_words import NO_WORD
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training import pretraining
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream, can_pack
from mtem.training.trainer import Trainer
from tests.conftest import examples, make_encoder, make_texts
from tests.reference import tape
from tests.tolerance import assert_near

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 6


def own_settings(name, preset="recommended"):
    kind = methods.get(name)
    own = {field.name for field in dataclasses.fields(kind.Settings)}
    return kind.Settings(**{key: value for key, value in kind.presets[preset].items() if key in own})


PACKABLE = [name for name in methods.METHODS if methods.get(name).packs(own_settings(name))]


@pytest.fixture
def model(encoder):
    torch.manual_seed(1)
    return TextModel.create(encoder, ("a", "b", "c"), max_length=16).eval()


def texts(count=7):
    return [text + " more" * (number % 4) for number, (text, _) in enumerate(make_texts(count, 1))]


def batches(model, count=7):
    """Return the same texts as a padded batch and as one that is joined."""
    encoded = model.encode_texts(texts(count))
    padded = model.collate(encoded, np.arange(count), multiple=16)
    return padded, model.packed(padded, int(np.asarray(encoded.lengths).sum()))


@examples(100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(0, 3))
def test_every_token_is_at_its_place_inside_the_bounds_of_its_text(lengths, more, wider):
    width = max(lengths) + wider
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    tokens = min(sum(lengths) + more, mask.numel())
    joined = packing.join(mask, tokens)
    bounds = joined.bounds.tolist()
    assert bounds[0] == 0 and bounds[-1] == tokens and len(bounds) == 2 * len(lengths) + 1
    assert all(0 <= end - start <= joined.longest for start, end in itertools.pairwise(bounds))
    for row, length in enumerate(lengths):
        own = slice(bounds[row], bounds[row + 1])
        assert joined.order[own].tolist() == [row * width + column for column in range(length)]
        assert joined.places[row * width : row * width + length].tolist() == list(range(own.start, own.stop))
    assert joined.firsts.tolist() == bounds[: len(lengths)]
    assert 0 <= int(joined.places.min()) <= int(joined.places.max()) < tokens


@pytest.mark.parametrize("tokens, expected", [(1, 1024), (1024, 1024), (1025, 2048), (5000, 5120), (25_601, 25_600)])
def test_lengths_recur(tokens, expected):
    assert packing.room(tokens, 50, 512) == expected


def test_the_logits_and_gradients_are_those_of_the_padded_batch(model, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 8)
    model.double()
    padded, joined = batches(model)
    assert len(joined["room"]) < padded["input_ids"].numel()
    found = []
    for inputs in (padded, joined):
        logits = model(inputs)
        gradients = torch.autograd.grad(logits.flatten() @ torch.arange(21.0).cos(), list(model.trainable().values()))
        found.append((logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    for one, other in zip(*found, strict=True):
        assert_near(one, other)


def test_tokens_that_belong_to_no_text_change_nothing(model, monkeypatch):
    padded, _ = batches(model)
    with torch.no_grad():
        expected = model(padded)
        for multiple in (1, 5, 64):
            monkeypatch.setattr(packing, "ROOM", multiple)
            _, joined = batches(model)
            assert_near(model(joined), expected)


def test_features_are_those_of_the_padded_batch(model):
    padded, joined = batches(model)
    with torch.no_grad():
        for one, other in zip(model.logits_and_features(joined), model.logits_and_features(padded), strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("kind", ["mask", "delete", "swap", "mixed", "dropout"])
def test_views_are_joined_too(model, kind):
    views = [model.augment(inputs, kind, 0.5, torch.Generator().manual_seed(3)) for inputs in batches(model)]
    assert "room" in views[1] and torch.equal(views[0]["input_ids"], views[1]["input_ids"])
    with torch.no_grad():
        assert_near(model(views[1]), model(views[0]))


def test_hidden_states_at_places_are_those_of_the_padded_batch(model):
    padded, joined = batches(model)
    places = torch.nonzero(padded["attention_mask"].flatten()).view(-1)[torch.tensor([3, 0, 20, 11])]
    with torch.no_grad():
        assert_near(model.hidden_states_at(joined, places), model.hidden_states_at(padded, places))


def test_no_more_places_are_hidden_than_the_joined_batch_has_words_for(model, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 8)
    padded, joined = batches(model)
    hidden, places, words = model.hide_words(joined, torch.Generator().manual_seed(0))
    _, more, others = model.hide_words(padded, torch.Generator().manual_seed(0))
    assert len(places) < len(more) and torch.equal(words[words != NO_WORD], others[others != NO_WORD])
    assert "room" in hidden


def test_a_joined_batch_in_parts_or_with_noise_is_padded(model, monkeypatch):
    padded, joined = batches(model)
    monkeypatch.setattr(packing, "logits", lambda *_: pytest.fail("the batch was joined"))
    noise = torch.zeros(7, 16, model.hidden_width)
    assert_near(model({**joined, "noise": noise}), model({**padded, "noise": noise}))
    with model.differentiable_attention():
        assert_near(model(joined), model(padded))
    model.save_memory(3, False)
    assert_near(model(joined), model(padded))


def test_other_encoders_are_not_joined(tmp_path, model):
    other = TextModel.create(make_encoder(tmp_path, "distilbert"), ("a", "b"), max_length=16)
    assert model.can_pack() and not other.can_pack()
    model.freeze(1)
    assert not model.can_pack()


def test_on_a_cpu_nothing_is_joined(model):
    assert not can_pack(model, TrainingSettings())


# ---------------------------------------------------------------------- training


def make_trainer(encoder, name, packed, *, device="cpu", precision=None, capture=None):
    kind = methods.get(name)
    settings, training = own_settings(name), TrainingSettings(log_every=1)
    torch.manual_seed(0)
    model = TextModel.create(encoder, ("bad", "good"), max_length=16).to(device)
    model.precision = precision
    if precision is None:
        model.double()
    kind.prepare_model(model, settings)
    for module in model.modules():  # joined tokens draw other dropout masks
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows = make_texts(40, 1)
    labels = np.array([label == "good" for _, label in rows], dtype=np.int64)
    encoded = model.encode_texts([text + " more" * (number % 3) for number, (text, _) in enumerate(rows)])
    encoded.padded = False  # padded batches are drawn without regard to length too
    source, target = [
        Stream(model, encoded, np.arange(40), given, 10, seed, packed=packed) for given, seed in ((labels, 1), (None, 2))
    ]
    for stream in (source, target):
        stream.multiple = 16  # the same draws for the views of both
    few = torch.arange(30, 40, device=device)
    context = Context(STEPS, 40, 2, torch.Generator().manual_seed(5), lambda: 0.0, source_size=40, target_labeled_rows=few)
    context = dataclasses.replace(context, **training.teacher_and_view(1000))
    trainer = Trainer(
        kind(model, settings, context), training, name=name, steps=STEPS, learning_rate=1e-3, source=source, target=target,
        progress=Progress(quiet=True), capture=capture,
    )  # fmt: skip
    context.learning_rate = trainer.learning_rate
    return trainer


def trained(trainer):
    torch.manual_seed(7)
    trainer.run()
    return {name: value.detach().cpu().double() for name, value in trainer.method.weights().items()}


def test_which_methods_join_their_texts():
    assert set(PACKABLE) == {"source-only", "fixmatch", "cst", "dann", "mme", "mtem"}
    assert not methods.get("mtem").packs(own_settings("mtem", "learned"))


@pytest.mark.parametrize("name", PACKABLE)
def test_a_method_takes_the_same_steps(encoder, name, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 8)
    padded, joined = (trained(make_trainer(encoder, name, packed)) for packed in (False, True))
    start = make_trainer(encoder, name, False).method.weights()
    for key, value in padded.items():
        moved = (value - start[key]).abs().max()
        assert (joined[key] - value).abs().max() <= 1e-6 * moved + 1e-12, key


def test_a_joined_step_can_be_replayed(encoder, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 40)
    plain = trained(make_trainer(encoder, "fixmatch", True))
    trainer = make_trainer(encoder, "fixmatch", True, capture=tape.capture)
    replayed = trained(trainer)
    assert trainer.graphs.count
    for key, value in plain.items():
        assert (replayed[key] - value).abs().max() < 1e-6, key


def test_pretraining_takes_the_same_steps(encoder, monkeypatch):
    monkeypatch.setattr(pretraining, "can_pack", lambda *_: True)
    found = []
    for packed in (False, True):
        torch.manual_seed(0)
        model = TextModel.create(encoder, ("bad", "good"), max_length=16).double()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        settings = TrainingSettings(pretrain_epochs=2.0, pretrain_batch_size=10)
        batch = pretraining.all_texts(model, [model.encode_texts(texts(40))], settings)(0)
        if not packed:
            batch = batch._replace(inputs={name: value for name, value in batch.inputs.items() if name != "room"})
        context = Context(1, 0, 2, torch.Generator().manual_seed(0), lambda: 0.0)
        method = pretraining.new_method(model, settings, context)
        method.head.double()
        loss = float(method.step(0, batch, None, lambda loss: loss.backward())["word_loss"])
        found.append((loss, model.word_embeddings.weight.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert_near(found[0][1], found[1][1], dtype=torch.float32)


# ---------------------------------------------------------------------- on a GPU


@GPU
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_flash_kernel_gives_the_logits_and_gradients_of_the_padded_batch(encoder, precision):
    torch.manual_seed(1)
    model = TextModel.create(encoder, ("a", "b", "c"), max_length=16).cuda().eval()
    exact, _ = batches(model, 40)
    found = []
    weights = torch.arange(120.0, device="cuda").cos()
    for inputs, used in ((exact, None), (exact, precision), (batches(model, 40)[1], precision)):
        model.precision = used
        logits = model(inputs)
        gradients = torch.autograd.grad(logits.flatten() @ weights, list(model.trainable().values()))
        found.append(torch.cat([logits.detach().flatten(), *(gradient.flatten() for gradient in gradients)]))
    exact, padded, joined = found
    error, usual = ((other - exact).norm() / exact.norm() for other in (joined, padded))
    assert torch.isfinite(joined).all() and float(error) <= 2 * float(usual) + 1e-3


@GPU
@pytest.mark.parametrize("name", [name for name in PACKABLE if name != "cst"])
def test_captured_steps_on_a_gpu_are_the_steps(encoder, name, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 40)
    weights = []
    for graphs in (False, True):
        trainer = make_trainer(encoder, name, True, device="cuda", precision=torch.bfloat16)
        if not graphs:
            trainer.graphs = None
        weights.append(trained(trainer))
        assert trainer.graphs is None or trainer.graphs.count
    for key, value in weights[0].items():
        assert torch.isfinite(value).all() and (weights[1][key] - value).abs().max() < 2e-2, key


@GPU
def test_a_whole_stage_on_a_gpu_is_joined(encoder):
    torch.manual_seed(0)
    model = TextModel.create(encoder, ("bad", "good"), max_length=16).cuda()
    model.precision = torch.bfloat16
    settings = TrainingSettings(pretrain_epochs=3.0, pretrain_batch_size=10)
    assert can_pack(model, settings) and not can_pack(model, dataclasses.replace(settings, packing=False))
    assert pretraining.pretrain(model, [model.encode_texts(texts(40))], settings, Progress(quiet=True)) == 12
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
