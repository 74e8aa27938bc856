"""Masked words: what is chosen, what becomes of it, static shapes, and the loss against a literal one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mtem.models import masked_words
from mtem.models.masked_words import NO_WORD, WordHead, hide_words, number_of_places, restoring_loss
from mtem.models.text import TextModel
from mtem.models.trees.model import BigcnModel, BigcnSettings
from tests.conftest import SHAPES, examples, make_encoder, make_texts
from tests.reference import masked_words as literal
from tests.tolerance import assert_near

MASK, PAD, SPECIAL, SIZE = 1, 0, 4, 50  # token numbers below SPECIAL are special


@st.composite
def batches(draw):
    """Padded texts with special tokens at both ends and sometimes in between; some texts have nothing else."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    width = max(lengths)
    tokens = st.integers(0, SIZE - 1)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.tensor([2, *(draw(tokens) for _ in range(length - 2)), 3][:length])
        mask[row, :length] = 1
    return ids, mask.bool() & (ids >= SPECIAL)


def hide(ids, free, seed=0):
    return hide_words(ids, free, torch.arange(SPECIAL, SIZE), MASK, torch.Generator().manual_seed(seed))


@examples(200)
@given(batches(), st.integers(0, 2**31))
def test_only_words_are_chosen_and_their_number_is_their_share(batch, seed):
    ids, free = batch
    hidden, places, words = hide(ids, free, seed)
    chosen = words != NO_WORD
    assert len(places) == len(words) == -(-15 * ids.numel() // 100) and len(places.unique()) == len(places)
    assert int(chosen.sum()) == -(-15 * int(free.sum()) // 100)
    flat = ids.flatten()
    assert free.flatten()[places[chosen]].all() and torch.equal(flat[places[chosen]], words[chosen])
    changed = torch.nonzero(hidden.flatten() != flat).view(-1)
    assert set(changed.tolist()) <= set(places[chosen].tolist())
    assert hidden.dtype == ids.dtype and hidden.shape == ids.shape
    new = hidden.flatten()[changed]
    assert ((new == MASK) | (new >= SPECIAL)).all()


def test_of_the_chosen_tokens_80_percent_are_masked_10_replaced_10_kept():
    ids = torch.randint(SPECIAL, SIZE, (64, 250))
    hidden, places, words = hide(ids, torch.ones_like(ids, dtype=torch.bool))
    new = hidden.flatten()[places]
    count = len(places)
    assert count == 2400 and (words != NO_WORD).all()
    masked, kept = (new == MASK).float().mean(), (new == words).float().mean()
    replaced = 1 - masked - kept
    # Five standard deviations of a share; one of the 46 random tokens is the original one.
    for share, wanted in ((masked, 0.8), (kept, 0.1 + 0.1 / 46), (replaced, 0.1 - 0.1 / 46)):
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / count) ** 0.5
    other = new[(new != MASK) & (new != words)]
    assert len(other.unique()) > 35, "random tokens come from the whole vocabulary"


def test_every_word_is_chosen_equally_often():
    ids = torch.randint(SPECIAL, SIZE, (4, 10))
    free = torch.ones_like(ids, dtype=torch.bool)
    free[:, 0] = free[:, 9] = free[3, 5:] = False
    counts, generator = torch.zeros(40), torch.Generator().manual_seed(0)
    for _ in range(2000):
        _, places, words = hide_words(ids, free, torch.arange(SPECIAL, SIZE), MASK, generator)
        counts[places[words != NO_WORD]] += 1
    wanted = 2000 * number_of_places(int(free.sum())) / int(free.sum())
    assert ((counts[free.flatten()] - wanted).abs() < 5 * wanted**0.5).all() and counts[~free.flatten()].sum() == 0


@pytest.mark.parametrize("free", [0, 1, 6])
def test_shapes_are_those_of_the_batch_alone(free):
    """So a step can be replayed: neither padding nor special tokens change a shape, nor what is drawn."""
    ids = torch.randint(SPECIAL, SIZE, (3, 7))
    may = torch.arange(21).view(3, 7) < free
    generator = torch.Generator().manual_seed(0)
    hidden, places, words = hide_words(ids, may, torch.arange(SPECIAL, SIZE), MASK, generator)
    assert (hidden.shape, places.shape, words.shape) == ((3, 7), (4,), (4,))
    assert int((words != NO_WORD).sum()) == min(free, 1)
    other = torch.Generator().manual_seed(0)
    hide_words(ids, torch.ones_like(may), torch.arange(SPECIAL, SIZE), MASK, other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_a_batch_without_words_has_no_loss_and_no_gradient():
    logits = torch.randn(4, SIZE, requires_grad=True)
    loss = restoring_loss(logits, torch.full((4,), NO_WORD))
    loss.backward()
    assert float(loss.detach()) == 0 and not logits.grad.any()


@examples(50)
@given(batches(), st.integers(0, 2**31))
def test_the_loss_is_that_of_the_logits_of_all_positions(batch, seed):
    ids, free = batch
    _, places, words = hide(ids, free, seed)
    scores = torch.randn(*ids.shape, SIZE, generator=torch.Generator().manual_seed(seed))
    everywhere = torch.full((ids.numel(),), NO_WORD).scatter(0, places, words)
    loss = restoring_loss(scores.flatten(0, 1)[places], words)
    if free.any():
        assert_near(loss, F.cross_entropy(scores.flatten(0, 1), everywhere, ignore_index=NO_WORD))
    chosen = (everywhere != NO_WORD).view(ids.shape).tolist()
    assert_near(loss, literal.loss(scores, ids.tolist(), chosen))


# ---------------------------------------------------------------------- the head


def test_the_head_is_the_literal_one():
    torch.manual_seed(0)
    embeddings = torch.nn.Embedding(SIZE, 6)
    head = WordHead(8, embeddings)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    states = torch.randn(5, 8)
    wanted = [literal.head(state, head.dense, head.norm, head.bias, embeddings.weight) for state in states]
    assert_near(head(states, embeddings.weight), torch.stack(wanted))


# ---------------------------------------------------------------------- encoders


@pytest.fixture(scope="module", params=SHAPES)
def model(request, tmp_path_factory):
    torch.manual_seed(1)
    return TextModel.create(
        make_encoder(tmp_path_factory.mktemp("encoder"), request.param), ("a", "b", "c"), max_length=24
    ).eval()


def batch_of(model, texts):
    return model.collate(model.encode_texts(texts), np.arange(len(texts)))


def test_an_encoder_hides_words_and_has_hidden_states_everywhere(model):
    inputs = batch_of(model, [text for text, _ in make_texts(20, 1)])
    hidden, places, words = model.hide_words(inputs, torch.Generator().manual_seed(0))
    words = words[words != NO_WORD]
    tokenizer = model.tokenizer
    special = {tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id}
    assert len(words) >= 20 and not special & set(words.tolist())
    assert (hidden["input_ids"] == tokenizer.mask_token_id).sum() > len(words) / 2
    states = model.hidden_states(hidden)
    assert states.shape == (*inputs["input_ids"].shape, model.hidden_width)
    assert states[:, 1].std() > 0
    logits = WordHead(model.hidden_width, model.word_embeddings)(states.flatten(0, 1)[places], model.word_embeddings.weight)
    assert logits.shape == (len(places), model.word_embeddings.num_embeddings)


def test_hidden_states_do_not_depend_on_padding(model):
    alone = batch_of(model, ["good1 word2"])
    padded = batch_of(model, ["good1 word2", " ".join(f"word{i}" for i in range(18))])
    with torch.no_grad():
        assert_near(model.hidden_states(padded)[:1, :4], model.hidden_states(alone))


def test_random_tokens_are_never_special(model, monkeypatch):
    monkeypatch.setattr(masked_words, "MASKED", 0.0)
    monkeypatch.setattr(masked_words, "REPLACED", 1.0)
    inputs = batch_of(model, [text for text, _ in make_texts(400, 1)])
    hidden, places, words = model.hide_words(inputs, torch.Generator().manual_seed(0))
    new = hidden["input_ids"].flatten()[places[words != NO_WORD]]
    _, special = model._vocabulary()
    assert not special[new].any() and int(new.max()) < len(model.tokenizer) and len(new.unique()) > 50


def test_small_encoders_have_the_larger_rate(model, monkeypatch):
    assert model.default_pretraining_rate() == 2e-4
    monkeypatch.setattr("mtem.models.text.SMALL_WIDTH", 32)
    assert model.default_pretraining_rate() == 1e-4


# ---------------------------------------------------------------------- who cannot


def test_what_cannot_be_pretrained_says_why(encoder):
    text = TextModel.create(encoder, ("a", "b"))
    assert text.pretraining_obstacle() is None
    text.freeze(1)
    assert "1 layers are frozen" in text.pretraining_obstacle() and "set frozen_layers=0" in text.pretraining_obstacle()
    text.freeze(0)
    text.tokenizer.mask_token = None
    assert "no mask token" in text.pretraining_obstacle()
    tree = BigcnModel.create("bigcn", ("a", "b"), settings=BigcnSettings(features="encoder", encoder=str(encoder)))
    assert tree.pretraining_obstacle() is None
    tree.features.tokenizer.mask_token = None
    assert "no mask token" in tree.pretraining_obstacle()
