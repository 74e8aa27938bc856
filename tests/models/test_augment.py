"""Views of texts: what stays untouched, what keeps together, how much is touched, for three kinds of vocabularies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from mtem.models import augment
from mtem.models.text import TextModel
from tests.conftest import examples

# A vocabulary of its own for the pure functions: 0 padding, 1 CLS, 2 SEP, 3 MASK, 10..39 begin words, 40..59 go on with them.
PAD, CLS, SEP, MASK = range(4)
CONTINUES = torch.arange(60) >= 40
SPECIAL = torch.arange(60) < 10

word = st.builds(lambda first, rest: (first, *rest), st.integers(10, 39), st.lists(st.integers(40, 59), max_size=3))
texts = st.lists(st.lists(word, max_size=8), min_size=1, max_size=4)
share = st.floats(0.0, 1.0)
seed = st.integers(0, 2**32 - 1)

patient = examples(80)


def padded(batch, extra=2):
    """Token numbers and attention mask of texts given as lists of words; `extra` columns of padding behind the longest."""
    rows = [[CLS, *(piece for one in text for piece in one), SEP] for text in batch]
    width = max(map(len, rows)) + extra
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def words_of(ids, mask):
    """The words of every text, read back."""
    batch = []
    for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        text = []
        for token, here in zip(row, kept, strict=True):
            if here and token >= 40 and text:
                text[-1] += (token,)
            elif here and token >= 10:
                text.append((token,))
        batch.append(text)
    return batch


def numbered(ids, mask):
    return augment.word_numbers(ids, mask, CONTINUES, SPECIAL)


def generator(number=0):
    return torch.Generator().manual_seed(number)


def subsequence(part, whole):
    rest = iter(whole)
    return all(one in rest for one in part)


# ---------------------------------------------------------------------- numbering


@patient
@given(texts)
def test_word_numbers_count_the_words(batch):
    ids, mask = padded(batch)
    for row, text in zip(numbered(ids, mask).tolist(), batch, strict=True):
        inside = [number for number, one in enumerate(text) for _ in one]
        assert row == [-1, *inside] + [-1] * (len(row) - 1 - len(inside))


def test_a_piece_behind_a_special_token_begins_a_word():
    ids = torch.tensor([[CLS, 41, 42, 10, SEP, 43, 44, SEP, 45]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]])
    assert numbered(ids, mask).tolist() == [[-1, 0, 0, 1, -1, 2, 2, -1, -1]]


# ---------------------------------------------------------------------- masking


@patient
@given(texts, share, seed)
def test_masking_replaces_tokens_of_words_alone_and_never_all(batch, share, seed):
    ids, mask = padded(batch)
    words = numbered(ids, mask)
    masked = augment.mask_tokens(ids, words, share, MASK, generator(seed))
    changed = masked != ids
    assert (masked[changed] == MASK).all() and not (changed & (words < 0)).any()
    assert ((words >= 0) & ~changed).any(dim=1).tolist() == [bool(text) for text in batch]
    assert torch.equal(changed, augment.chosen_tokens(words, share, generator(seed)))
    assert share > 0 or not changed.any()


# ---------------------------------------------------------------------- deleting


@patient
@given(texts, share, seed)
def test_deleting_keeps_whole_words_in_order_and_at_least_one(batch, share, seed):
    ids, mask = padded(batch)
    left, seen = augment.delete_words(ids, mask, numbered(ids, mask), share, PAD, generator(seed))
    assert left.shape == ids.shape and seen.dtype == mask.dtype
    for row, kept, before, after in zip(left.tolist(), seen.tolist(), batch, words_of(left, seen), strict=True):
        assert subsequence(after, before) and bool(after) == bool(before)
        length = sum(kept)
        assert kept == [1] * length + [0] * (len(kept) - length), "no gaps"
        assert row[:1] == [CLS] and row[length - 1] == SEP and set(row[length:]) <= {PAD}
        assert length == 2 + sum(map(len, after))
    if share == 0:
        assert torch.equal(left, ids) and torch.equal(seen, mask)


@patient
@given(texts, seed)
def test_deleting_everything_leaves_one_word(batch, seed):
    ids, mask = padded(batch)
    left, seen = augment.delete_words(ids, mask, numbered(ids, mask), 1.0, PAD, generator(seed))
    assert [len(text) for text in words_of(left, seen)] == [min(1, len(text)) for text in batch]


# ---------------------------------------------------------------------- swapping


@patient
@given(texts, share, seed)
def test_swapping_permutes_whole_words(batch, share, seed):
    ids, mask = padded(batch)
    swapped = augment.swap_words(ids, numbered(ids, mask), share, generator(seed))
    for before, after in zip(batch, words_of(swapped, mask), strict=True):
        assert Counter(after) == Counter(before)
    still = numbered(ids, mask) < 0
    assert torch.equal(swapped[still], ids[still]), "special tokens and padding stay where they are"
    assert share > 0 or torch.equal(swapped, ids)


def test_swapping_leaves_unmoved_words_in_their_places():
    """With words of one token the others do not even shift; about a share of the words is free to move."""
    batch = [[(number,) for number in range(10, 40)]] * 400
    ids, mask = padded(batch)
    swapped = augment.swap_words(ids, numbered(ids, mask), 0.3, generator())
    moved = (swapped != ids).float().mean(dim=0)[1:31]
    # 9 of 30 words are permuted on average; of those one, on average, happens to stay
    assert moved.mean() == pytest.approx(8 / 30, abs=0.02) and moved.min() > 0.15


def test_every_order_of_the_moved_words_is_as_likely():
    ids, mask = padded([[(10,), (11, 40), (12,)]] * 6000, extra=0)
    swapped = augment.swap_words(ids, numbered(ids, mask), 1.0, generator())
    counts = Counter(tuple(text) for text in words_of(swapped, mask))
    assert len(counts) == 6 and all(abs(count - 1000) < 150 for count in counts.values())


def test_special_tokens_between_words_keep_their_turn():
    """Words of one length: they stay in place. Otherwise they come as the same number of words have passed."""
    ids = torch.tensor([[CLS, 10, SEP, 11, 12, SEP, 13, SEP]])
    words = numbered(ids, torch.ones_like(ids))
    for number in range(20):
        swapped = augment.swap_words(ids, words, 1.0, generator(number))
        assert torch.equal(swapped[words < 0], ids[words < 0])
    ids = torch.tensor([[CLS, 10, 40, 41, SEP, 11, SEP]])
    words = numbered(ids, torch.ones_like(ids))
    found = {tuple(augment.swap_words(ids, words, 1.0, generator(number))[0].tolist()) for number in range(20)}
    assert found == {(CLS, 10, 40, 41, SEP, 11, SEP), (CLS, 11, SEP, 10, 40, 41, SEP)}


# ---------------------------------------------------------------------- all three


def views(ids, mask, share, seed):
    words = numbered(ids, mask)
    return (
        augment.mask_tokens(ids, words, share, MASK, generator(seed)),
        augment.swap_words(ids, words, share, generator(seed)),
        *augment.delete_words(ids, mask, words, share, PAD, generator(seed)),
    )


@patient
@given(texts, share, seed)
def test_the_generator_decides(batch, share, seed):
    ids, mask = padded(batch)
    before = ids.clone(), mask.clone()
    assert all(
        torch.equal(one, other) for one, other in zip(views(ids, mask, share, seed), views(ids, mask, share, seed), strict=True)
    )
    assert torch.equal(ids, before[0]) and torch.equal(mask, before[1]), "the inputs are not written to"


def test_other_seeds_give_other_views():
    ids, mask = padded([[(10 + number, 40 + number) for number in range(20)]] * 3)
    for one, other in zip(views(ids, mask, 0.4, 0), views(ids, mask, 0.4, 1), strict=True):
        assert not torch.equal(one, other)
    for view in views(ids, mask, 0.4, 0)[:3]:
        assert not torch.equal(view[0], view[1]), "each text has its own draws"


def test_empty_texts_and_single_words_stay_as_they_are():
    ids, mask = padded([[], [(10,)], [(11, 40, 41)]])
    words = numbered(ids, mask)
    for number in range(10):
        assert torch.equal(augment.swap_words(ids, words, 1.0, generator(number)), ids)
        left, seen = augment.delete_words(ids, mask, words, 1.0, PAD, generator(number))
        assert torch.equal(left, ids) and torch.equal(seen, mask)
        masked = augment.mask_tokens(ids, words, 1.0, MASK, generator(number))
        assert torch.equal(masked[:2], ids[:2]) and (masked[2] == MASK).sum() == 2


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_is_that_of_the_words(share):
    batch = [[(10 + number, *[40] * (number % 3)) for number in range(30)]] * 300
    ids, mask = padded(batch)
    words = numbered(ids, mask)
    left, seen = augment.delete_words(ids, mask, words, share, PAD, generator())
    kept = np.mean([len(text) for text in words_of(left, seen)]) / 30
    assert kept == pytest.approx(1 - share, abs=0.015)
    survivors = Counter(one for text in words_of(left, seen) for one in text)
    assert max(survivors.values()) - min(survivors.values()) < 75, "long and short words, first and last ones alike"
    chosen = augment.chosen_tokens(words, share, generator())
    assert float(chosen[words >= 0].float().mean()) == pytest.approx(share, abs=0.015)


# ---------------------------------------------------------------------- vocabularies


SENTENCE = "unbelievable things happen, unbelievable"


def wordpiece():
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "un",
        "##believ",
        "##able",
        "thing",
        "##s",
        "happen",
        ",",
        "\u0120",
        "\u2581a",
    ]
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    template = {"single": "[CLS] $A [SEP]", "special_tokens": [("[CLS]", 2), ("[SEP]", 3)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer, {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def sentencepiece():
    pieces = [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        "<mask>",
        "\u2581un",
        "believ",
        "able",
        "\u2581thing",
        "s",
        "\u2581happen",
        ",",
        "##",
        "\u2581",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    template = {"single": "<s> $A </s>", "special_tokens": [("<s>", 2), ("</s>", 3)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer, {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


def byte_level():
    pieces = ["<pad>", "<s>", "</s>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for whole in ("un", "believ", "able", "\u0120thing", "\u0120happen", "\u0120a"):
        for end in range(1, len(whole)):
            merges.append((whole[:end], whole[end]))
    merges = list(dict.fromkeys(merges))
    pieces += [piece for piece in dict.fromkeys("".join(pair) for pair in merges) if piece not in pieces]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = {"single": "<s> $A </s>", "special_tokens": [("<s>", 1), ("</s>", 2)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer, {"pad": "<pad>", "cls": "<s>", "sep": "</s>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}


def model_with(tokenizer, named):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **{f"{role}_token": t for role, t in named.items()}
    )
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = AutoConfig.for_model("bert", vocab_size=len(fast) + 3, max_position_embeddings=64, pad_token_id=0, **shape)
    torch.manual_seed(0)
    return TextModel(AutoModelForSequenceClassification.from_config(config), fast, 64)


def batch_of(model, sentences):
    return model.collate(model.encode_texts(sentences), np.arange(len(sentences)))


def read(model, inputs):
    """Every text as its tokens, without special ones and padding."""
    special = set(model.tokenizer.all_special_ids)
    rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    return [
        [model.tokenizer.convert_ids_to_tokens(t) for t, m in zip(ids, mask, strict=True) if m and t not in special]
        for ids, mask in rows
    ]


@pytest.fixture(scope="module", params=[wordpiece, sentencepiece, byte_level], ids=lambda make: make.__name__)
def speller(request):
    return model_with(*request.param())


# the words of SENTENCE in each vocabulary: a comma is a word of its own in WordPiece, a part of the one before elsewhere
GROUPS = {
    "##": [["un", "##believ", "##able"], ["thing", "##s"], ["happen"], [","], ["un", "##believ", "##able"]],
    "\u2581": [["\u2581un", "believ", "able"], ["\u2581thing", "s"], ["\u2581happen", ","], ["\u2581un", "believ", "able"]],
    "\u0120": [["un", "believ", "able"], ["\u0120thing", "s"], ["\u0120happen", ","], ["\u0120", "un", "believ", "able"]],
}


def groups_of(model):
    (tokens,) = read(model, batch_of(model, [SENTENCE]))
    return next(groups for groups in GROUPS.values() if tokens == [piece for group in groups for piece in group])


def test_words_are_found_in_every_vocabulary(speller):
    groups = groups_of(speller)
    inputs = batch_of(speller, [SENTENCE, "un"])
    found = augment.word_numbers(inputs["input_ids"], inputs["attention_mask"], *speller._vocabulary())
    wanted = [-1, *(number for number, group in enumerate(groups) for _ in group), -1]
    assert found[0].tolist() == wanted and found[1].tolist() == [-1, 0, -1] + [-1] * (len(wanted) - 3)


@pytest.mark.parametrize("kind", ["delete", "swap"])
def test_words_share_their_fate_in_every_vocabulary(speller, kind):
    groups = groups_of(speller)
    inputs = batch_of(speller, [SENTENCE] * 50)
    view = speller.augment(inputs, kind, 0.5, generator())
    changed = 0
    for tokens in read(speller, view):
        rest, taken = list(tokens), []
        while rest:
            group = next(group for group in groups if rest[: len(group)] == group)
            taken.append(group)
            rest = rest[len(group) :]
        changed += taken != groups
        assert subsequence(taken, groups) if kind == "delete" else sorted(taken) == sorted(groups)
    assert changed > 10


def test_marks_that_are_letters_do_not_mislead():
    """Vocabularies of many languages hold each other's marks; the convention is the one that marks most."""
    assert augment.continuations(["a", "##b", "##c", "\u0120", "\u2581"]) == [False, True, True, False, False]
    assert augment.continuations(["\u2581a", "\u2581b", "c", "##", "\u0120"]) == [False, False, True, True, True]
    assert augment.continuations(["\u0120a", "\u0120b", "c", "\u010a", "\u2581"]) == [False, False, True, False, True]
    assert augment.continuations(["good", "bad"]) == [False, False] and augment.continuations([]) == []


def test_unknown_words_are_words():
    model = model_with(*wordpiece())
    inputs = batch_of(model, ["thing zebra un happen"] * 60)
    unknown, mask = model.tokenizer.unk_token_id, model.tokenizer.mask_token_id
    assert inputs["input_ids"][0].tolist() == [2, 8, unknown, 5, 10, 3]
    hidden = model.augment(inputs, "mask", 0.5, generator())["input_ids"]
    assert (hidden[:, 2] == mask).any() and (hidden[:, 2] == unknown).any()
    swapped = model.augment(inputs, "swap", 0.5, generator())["input_ids"]
    assert set((swapped == unknown).nonzero()[:, 1].tolist()) == {1, 2, 3, 4}


# ---------------------------------------------------------------------- the model's views


def test_kinds_of_the_model(speller):
    inputs = batch_of(speller, [SENTENCE, "un", ""] * 20)
    for kind in augment.KINDS:
        same = speller.augment(inputs, kind, 0.0, generator())
        assert all(torch.equal(same[name], inputs[name]) for name in inputs)
        view = speller.augment(inputs, kind, 0.4, generator())
        assert view.keys() == inputs.keys() and view["input_ids"].shape == inputs["input_ids"].shape
        changed = (view["input_ids"] != inputs["input_ids"]).any(dim=1)
        assert bool(changed[::3].any()) == (kind != "dropout")
        assert not changed[1::3].any() and not changed[2::3].any(), "one word and no words stay"
        again = speller.augment(inputs, kind, 0.4, generator())
        assert all(torch.equal(view[name], again[name]) for name in view)
        with torch.no_grad():
            assert torch.isfinite(speller.eval()(view)).all()


def test_mixed_deletes_swaps_and_masks_a_third_each(speller):
    texts = 300
    inputs = batch_of(speller, [SENTENCE + " things happen" * 6] * texts)
    view = speller.augment(inputs, "mixed", 0.6, generator())
    tokens = inputs["attention_mask"].sum() - 2 * texts
    left = view["attention_mask"].sum() - 2 * texts
    masked = (view["input_ids"] == speller.tokenizer.mask_token_id).sum()
    assert float(left / tokens) == pytest.approx(0.8, abs=0.02)
    assert float(masked / left) == pytest.approx(0.2, abs=0.02)
    only = speller.augment(inputs, "delete", 0.2, generator())
    before, after = (row[view["attention_mask"].bool()] for row in (only["input_ids"], view["input_ids"]))
    unmasked = after != speller.tokenizer.mask_token_id
    assert (before != after)[unmasked].float().mean() > 0.05, "some words are in other places"


@pytest.mark.parametrize("kind", ["delete", "swap", "mixed"])
def test_moved_words_have_the_frozen_layers_run_again(speller, kind):
    plain = batch_of(speller, [SENTENCE] * 8)
    speller.freeze(1)
    try:
        view = speller.augment(speller.prepare(plain), kind, 0.5, generator())
        assert "hidden" not in view
        wanted = speller.augment(plain, kind, 0.5, generator())
        assert torch.equal(view["input_ids"], wanted["input_ids"])
        with torch.no_grad():
            frozen = speller.eval()(view)
            speller.freeze(0)
            torch.testing.assert_close(frozen, speller(wanted))
    finally:
        speller.freeze(0)
