"""Pretraining on masked words: the loss falls, what is trained, state, and texts without words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtem.data.tokens import JoinedTokens, Tokens
from mtem.errors import RequestError
from mtem.methods.base import Batch, Context
from mtem.models.masked_words import NO_WORD
from mtem.models.text import TextModel
from mtem.progress import Progress
from mtem.training.pretraining import MaskedWords, MaskedWordsSettings, all_texts, check_pretraining, find_learning_rate
from mtem.training.settings import TrainingSettings
from mtem.training.trainer import Trainer
from tests.conftest import make_texts
from tests.tolerance import assert_near
from tests.training.test_trainer import NoWaiting, check_waiting, run_inside


@pytest.fixture
def model(encoder):
    torch.manual_seed(0)
    return TextModel.create(encoder, ("bad", "good", "nëutral thing"), max_length=16)


def masked_words(model, seed=0):
    torch.manual_seed(seed)
    return MaskedWords(model, MaskedWordsSettings(), Context(1, 0, 3, torch.Generator().manual_seed(seed), lambda: 0.0))


def stream(model, size=16, count=60, seed=0):
    corpora = [model.encode_texts([text for text, _ in make_texts(count, number)]) for number in (1, 2)]
    return all_texts(model, corpora, TrainingSettings(pretrain_batch_size=size, seed=seed))


def batch_of(model, texts):
    return Batch(model.collate(model.encode_texts(texts), np.arange(len(texts))), None, torch.arange(len(texts)))


def trainer(model, steps, lines=None, **changes):
    method, settings = masked_words(model), dataclasses.replace(TrainingSettings(), log_every=1, **changes)
    return Trainer(
        method, settings, name="pretrain", steps=steps, learning_rate=3e-3, source=stream(model), target=None,
        progress=Progress(quiet=True), optimizer="adamw", schedule="linear", record=[].append if lines is None else lines.append,
    )  # fmt: skip


def gradients(model, method, batch):
    """Of one step, by name; None where the loss does not depend on a parameter."""
    losses = []
    method.step(0, batch, None, losses.append)
    own = {**model.trainable(), **dict(method.head.named_parameters(prefix="words"))}
    return losses[0].detach(), dict(zip(own, torch.autograd.grad(losses[0], list(own.values()), allow_unused=True), strict=True))


# ---------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_the_loss_falls(model, precision):
    lines = []
    model.precision = precision
    trainer(model, 150, lines).run()
    losses = [line["word_loss"] for line in lines]
    first, last = np.mean(losses[:10]), np.mean(losses[-10:])
    # Words of a text are drawn from 40 plain and 12 or 24 class words: no model gets far below the entropy of that.
    assert first > 4.0 and last < first - 0.4


def test_all_layers_are_trained_and_the_classifier_is_not(model):
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer(model, 3).run()
    for name, value in model.named_parameters():
        outside = "classifier" in name or "pooler" in name
        assert torch.equal(value, before[name]) == outside, name


def test_the_embeddings_have_the_gradient_of_both_uses(model):
    """Read and restored: the gradient of the shared matrix is the sum of the two with a matrix of its own for each use."""
    batch = batch_of(model, [text for text, _ in make_texts(12, 1)])
    method = masked_words(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss, found = gradients(model, method, batch)
    method.context.generator.manual_seed(0)
    inputs, places, words = model.hide_words(batch.inputs, method.context.generator)
    name = "network.bert.embeddings.word_embeddings.weight"
    read, restored = (model.word_embeddings.weight.detach().clone().requires_grad_() for _ in range(2))
    given = inputs["input_ids"], inputs["attention_mask"]
    with model.all_positions():
        states = torch.func.functional_call(
            model.network.base_model, {"embeddings.word_embeddings.weight": read}, given
        ).last_hidden_state
    scores = method.head(states, restored)  # at all positions
    everywhere = torch.full((states.shape[0] * states.shape[1],), NO_WORD).scatter(0, places, words)
    wanted = F.cross_entropy(scores.flatten(0, 1), everywhere, ignore_index=NO_WORD)
    assert_near(loss, wanted)
    parts = torch.autograd.grad(wanted, [read, restored])
    assert all(part.any() for part in parts)
    assert_near(found[name], sum(parts), size=float(parts[1].abs().max()))
    assert found["network.classifier.weight"] is None and found["words.dense.weight"].any() and found["words.bias"].any()


def test_batches_have_every_text_of_all_corpora_once_and_no_label(model):
    batches = stream(model, size=16)
    assert batches.per_epoch == 8
    rows = np.concatenate([batches.rows(step) for step in range(8)])
    assert sorted(rows.tolist()) == list(range(120)) and batches(0).labels is None
    later = batches.of(np.array([70]))
    text = model.tokenizer(make_texts(60, 2)[10][0], truncation=True, max_length=16)["input_ids"]
    assert later.inputs["input_ids"][0].tolist() == text


def test_steps_draw_from_the_generator_of_the_run_alone(model):
    model.eval()
    batch, found = batch_of(model, [text for text, _ in make_texts(12, 1)]), []
    for seed in (1, 1, 2):
        method = masked_words(model)
        method.context.generator.manual_seed(seed)
        torch.manual_seed(0)  # dropout
        found.append(float(gradients(model, method, batch)[0]))
    assert found[0] == found[1] != found[2]


# ---------------------------------------------------------------------- texts without words


@pytest.mark.parametrize("texts", [[""], ["", "", ""], ["good1"], ["", "good1 bad2"]], ids=repr)
def test_texts_without_words_give_no_nan(model, texts):
    batch = batch_of(model, texts)
    loss, found = gradients(model, masked_words(model), batch)
    assert torch.isfinite(loss) and all(value is None or torch.isfinite(value).all() for value in found.values())
    has_words = any(texts)
    assert (float(loss) > 0) == has_words and bool(found["words.bias"].any()) == has_words


# ---------------------------------------------------------------------- nothing in a step waits for the device


def test_no_step_reads_a_number(model):
    made = trainer(model, 6)
    made.target = made.source  # not used
    run_inside(made, NoWaiting, warm=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_no_step_waits_for_the_gpu(model, precision):
    made = trainer(model.to("cuda"), 6)
    made.target = made.source
    check_waiting(made, precision)


def test_every_draw_that_reaches_the_device_can_be_made_again(model, monkeypatch):
    """A replayed step calls them once more: with the same state of the generator they give the same."""
    drawn = []

    def twice(make, device):
        state = generator.get_state()
        first = make()
        generator.set_state(state)
        assert torch.equal(make(), first)
        drawn.append(first.shape)
        return first.to(device)

    monkeypatch.setattr("mtem.models.masked_words.draws", twice)
    method = masked_words(model)
    generator = method.context.generator
    gradients(model, method, batch_of(model, ["good1 word2 word3", "bad1"]))
    assert drawn == [(2, 5), (2,), (2,)]


# ---------------------------------------------------------------------- state, settings, refusals


def test_a_stopped_stage_continues_to_the_same_weights(encoder):
    from mtem.methods.alignment import Alignment
    from mtem.training import checkpoints

    def made():
        torch.manual_seed(0)
        return trainer(TextModel.create(encoder, ("bad", "good"), max_length=16), 6)

    whole, first, second = made(), made(), made()
    torch.manual_seed(5)
    whole.run()
    torch.manual_seed(5)
    first.last_step = 3
    first.run()
    state = checkpoints.collect(first, Alignment(), first.method.context.generator)
    assert any(name.startswith("module.words.") for name in state)
    checkpoints.restore(state, second, Alignment(), second.method.context.generator)
    second.run(3)
    for one, other in zip(whole.parameters, second.parameters, strict=True):
        assert torch.equal(one, other)


def test_the_learning_rate_is_the_one_given_or_the_models(model):
    assert find_learning_rate(model, TrainingSettings()) == model.default_pretraining_rate()
    assert find_learning_rate(model, TrainingSettings(pretrain_learning_rate=7e-5)) == 7e-5


def test_a_model_that_cannot_be_pretrained_is_refused(model):
    model.freeze(1)
    check_pretraining(model, TrainingSettings())
    with pytest.raises(RequestError, match=r"pretrain_epochs=2.5: .*set frozen_layers=0"):
        check_pretraining(model, TrainingSettings(pretrain_epochs=2.5))


def test_corpora_that_are_not_tokens_are_refused(model):
    with pytest.raises(TypeError, match="expected Tokens"):
        all_texts(model, [Tokens.of_ids([[1, 2]]), object()], TrainingSettings())


def test_joined_tokens_are_those_of_their_parts():
    joined = JoinedTokens([Tokens.of_ids([[1, 2], [3]]), Tokens.of_ids([]), Tokens.of_ids([[4, 5, 6]])])
    assert len(joined) == 3 and joined.lengths.tolist() == [2, 1, 3]
    assert [joined.ids(row).tolist() for row in range(3)] == [[1, 2], [3], [4, 5, 6]]
    for row in (-1, 3):
        with pytest.raises(IndexError, match="of 3"):
            joined.ids(row)
