"""Tokens: the tokenizer's own numbers, made once, read in place."""

import errno
import multiprocessing
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mtem.data import tokens
from mtem.data.loading import load_corpus
from mtem.data.tokens import Tokens, tokenize, tokenizer_fingerprint
from mtem.errors import RunError
from tests.processes import LIMIT


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small_tokenizer(extra=()):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "book", "##s", "a", "the", *extra]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def test_same_numbers_as_the_tokenizer():
    texts = ["a good book", "the bad books", "?", "good " * 50]
    tokens = tokenize(load_corpus(texts, labeled=False), small_tokenizer(), 8)
    assert tokens.ids(0).tolist() == [2, 8, 4, 6, 3] and tokens.ids(1).tolist() == [2, 9, 5, 6, 7, 3]
    assert tokens.lengths.tolist() == [5, 6, 3, 8] and tokens.lengths.dtype == np.int32
    assert tokens.ids(3).tolist() == [2, *[4] * 6, 3] and tokens.ids(3).dtype == np.int32
    assert len(tokens) == 4


def test_long_and_odd_texts():
    texts = ["good " * 100_000, "\U0001f600\u200b\ufffd", "漢字 عربى", "x" * 50_000, "\x07 a", "e\u0301" * 1000]
    tokenizer = small_tokenizer()
    tokens = tokenize(load_corpus(texts, labeled=False), tokenizer, 100_002)
    assert tokens.lengths[0] == 100_002
    for i, text in enumerate(texts):
        assert tokens.ids(i).tolist() == tokenizer(text)["input_ids"]
    assert tokenize(load_corpus(texts, labeled=False), tokenizer, 16).lengths.max() == 16


def test_more_than_one_batch_of_the_file():
    texts = [" ".join(["good"] * (1 + i % 7)) for i in range(20_000)]
    tokens = tokenize(load_corpus(texts, labeled=False), small_tokenizer(), 32)
    assert tokens.lengths.tolist() == [3 + i % 7 for i in range(20_000)]
    for i in (0, 8191, 8192, 16384, 19_999):
        assert tokens.ids(i).tolist() == [2, *[4] * (1 + i % 7), 3]
    with pytest.raises(IndexError):
        tokens.ids(20_000)


def test_views_not_copies():
    tokens = tokenize(load_corpus(["a good book"], labeled=False), small_tokenizer(), 8)
    assert np.shares_memory(tokens.ids(0), tokens.ids(0)) and not tokens.ids(0).flags.writeable


def test_second_time_reuses_the_file(own_cache):
    corpus, tokenizer = load_corpus(["a good book", "bad"], labeled=False), small_tokenizer()
    seen = []
    tokenize(corpus, tokenizer, 8, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    (stored,) = (own_cache / "tokens").iterdir()
    before = stored.stat()
    tokenizer(["other"], truncation=True, max_length=3, padding="max_length")  # leaves its traces in the tokenizer
    again = tokenize(corpus, tokenizer, 8)
    assert again.lengths.tolist() == [5, 3]
    after = stored.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert len(list((own_cache / "tokens").iterdir())) == 1


def test_what_matters_makes_a_new_file(own_cache):
    corpus = load_corpus(["a good book"], labeled=False)
    tokenize(corpus, small_tokenizer(), 8)
    tokenize(corpus, small_tokenizer(), 9)
    tokenize(corpus, small_tokenizer(["new"]), 8)
    left = small_tokenizer()
    left.truncation_side = "left"
    tokenize(corpus, left, 8)
    tokenize(load_corpus(["a bad book"], labeled=False), small_tokenizer(), 8)
    assert len(list((own_cache / "tokens").iterdir())) == 5
    assert tokenizer_fingerprint(small_tokenizer()) == tokenizer_fingerprint(small_tokenizer())


def send_lengths(pipe, cache, texts):
    pipe.send(tokenize(load_corpus(texts, labeled=False), small_tokenizer(), 64, cache=cache).lengths.tolist())


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_in_another_process_after_this_one_used_its_threads(tmp_path, monkeypatch, way):
    """A forked process has none of the threads of its parent's tokenizer, and must not wait for them."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    texts = [" ".join(["good"] * (1 + i % 7)) for i in range(3000)]
    here = tokenize(load_corpus(texts, labeled=False), small_tokenizer(), 64).lengths.tolist()
    context = multiprocessing.get_context(way)
    ours, theirs = context.Pipe()
    other = context.Process(target=send_lengths, args=(theirs, tmp_path / "other", texts), daemon=True)
    other.start()
    try:
        assert ours.poll(LIMIT), "no answer from the other process"
        assert ours.recv() == here
    finally:
        other.kill()


def test_damaged_file_is_made_again(own_cache):
    corpus = load_corpus(["a good book"], labeled=False)
    tokenize(corpus, small_tokenizer(), 8)
    (stored,) = (own_cache / "tokens").iterdir()
    stored.write_bytes(b"")
    assert tokenize(corpus, small_tokenizer(), 8).lengths.tolist() == [5]


def test_full_disk_leaves_nothing(own_cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        tokenize(load_corpus(["a"], labeled=False), small_tokenizer(), 8)
    assert list((own_cache / "tokens").iterdir()) == []


def test_in_memory():
    tokens = Tokens.of_ids([[1, 2], [], [3]])
    assert tokens.lengths.tolist() == [2, 0, 1] and tokens.ids(0).tolist() == [1, 2] and tokens.ids(1).tolist() == []
    assert len(Tokens.of_ids([])) == 0
    assert len(Tokens.of_ids([[1]] * 9000)) == 9000


# Long texts


def trained(kind):
    """A tokenizer of that kind, trained on a few words."""
    special = {"special_tokens": ["[PAD]", "[UNK]"], "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, **special)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="[UNK]", **special)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, **special)
    tokenizer.train_from_iterator([long_text(seed, 200) for seed in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def long_text(seed, words, separators=(" ", "  ", "\n", "\t ", "\u00a0", " \u0301")):
    draw = random.Random(seed)
    letters = "abcdefgé中ß'-."
    return "".join("".join(draw.choices(letters, k=draw.randint(1, 12))) + draw.choice(separators) for _ in range(words))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_long_texts_are_cut_before_they_are_tokenized(kind):
    tokenizer = trained(kind)
    texts = [long_text(seed, 3000) for seed in range(6)]
    texts += ["word" + " " * 20_000 + texts[0], texts[0].replace(" ", "")[:20_000] + " " + texts[1], "x" * 30_000, " " * 30_000]
    for max_length in (4, 32, 200):
        for text in texts:
            assert tokens.encode([text], tokenizer, max_length) == tokens._ids([text], tokenizer, max_length)
    assert len(tokens._beginning(texts[0], tokenizer, 32)) < 2000 < len(texts[0])


def test_texts_are_read_from_the_other_end_too():
    tokenizer = trained("wordpiece")
    tokenizer.truncation_side = "left"
    text = long_text(0, 3000)
    assert tokens.encode([text], tokenizer, 8) == tokens._ids([text], tokenizer, 8)


def test_white_space_without_end(monkeypatch):
    monkeypatch.setattr(tokens, "LONGEST_TEXT", 5000)
    read = []
    ids = tokens._ids

    def counted(texts, *rest):
        read.extend(map(len, texts))
        return ids(texts, *rest)

    monkeypatch.setattr(tokens, "_ids", counted)
    tokens.encode(["a" + " " * 100_000 + "b"], trained("bpe"), 4)
    assert max(read) <= 5000
