"""A tiny real encoder, tiny real data, and a cache that is not the user's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

torch.set_num_threads(1)  # tiny tensors: threads only get in the way

GOOD = [f"good{i}" for i in range(12)]
BAD = [f"bad{i}" for i in range(12)]
PLAIN = [f"word{i}" for i in range(40)]
SHAPES = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48},
    "mpnet": {"max_position_embeddings": 66},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3},
}


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("MTEM_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *PLAIN]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    named = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **{f"{name}_token": token for name, token in named.items()}
    )


def make_encoder(directory: Path, shape: str = "bert", seed: int = 0) -> Path:
    """A randomly drawn encoder of that architecture, three layers of width 32, as a Hugging Face directory."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    base = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    base |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.1}
    config = AutoConfig.for_model(shape, **{**base, **SHAPES[shape]})
    AutoModel.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def make_texts(count: int, seed: int, shift: float = 0.0) -> list[tuple[str, str]]:
    """(text, label): a few class words among plain ones; `shift`: share of class words from the vocabulary's second half."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        words = [str(draw.choice(PLAIN)) for _ in range(int(draw.integers(3, 9)))]
        for _ in range(2):
            half = draw.integers(6) + (6 if draw.random() < shift else 0)
            words.insert(int(draw.integers(len(words) + 1)), (BAD, GOOD)[number % 2][int(half)])
        rows.append((" ".join(words), label))
    return rows


def write_jsonl(path: Path, rows: list[tuple[str, str]], labeled: bool = True) -> Path:
    lines = [{"text": text, "label": label} if labeled else {"text": text} for text, label in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def reviews(tmp_path_factory) -> dict[str, Path]:
    """Two labeled source files, an unlabeled target file, a labeled test file."""
    place = tmp_path_factory.mktemp("reviews")
    return {
        "books": write_jsonl(place / "books.jsonl", make_texts(60, 1)),
        "dvd": write_jsonl(place / "dvd.jsonl", make_texts(60, 2, 0.3)),
        "kitchen": write_jsonl(place / "kitchen.jsonl", make_texts(80, 3, 0.7), labeled=False),
        "test": write_jsonl(place / "test.jsonl", make_texts(60, 4, 0.7)),
    }


@pytest.fixture
def tiny(encoder, reviews) -> dict:
    """Arguments of a whole adaptation that takes a second or two."""
    return {
        "source": [str(reviews["books"]), str(reviews["dvd"])],
        "target": str(reviews["kitchen"]),
        "model": encoder,
        "max_length": 16,
        "batch_size": 10,
        "source_epochs": 2,
        "epochs": 1,
        "source_rate": 3e-3,
        "rate": 1e-3,
        "evaluations": 3,
        "frozen_layers": 0,
    }
