"""Scaling the head: every kind of model and head, in memory and saved."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from mtem import models
from mtem.data.loading import load_corpus
from mtem.models.heads import CosineHead
from mtem.models.text import TextModel
from mtem.models.trees.model import BigcnModel, BigcnSettings
from mtem.training.weights import add_bias, scale_head
from tests.conftest import SHAPES, make_encoder, make_texts, make_tokenizer
from tests.tolerance import assert_near

CLASSES = ("bad", "good", "neither")
TEXTS = [text for text, _ in make_texts(40, 5)]


def make_decoder(directory):
    """A GPT-2, whose head has no bias and classifies every position."""
    tokenizer = make_tokenizer()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "pad_token_id": 0, "initializer_range": 0.1}
    AutoModel.from_config(AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_model(kind, directory):
    torch.manual_seed(1)
    if kind.startswith("bigcn"):
        texts = load_corpus(TEXTS, labeled=False)
        model = BigcnModel.create("bigcn", CLASSES, corpora=[texts], settings=BigcnSettings(hidden=8))
    else:
        shape = kind.removesuffix("-cosine")
        place = make_decoder(directory) if shape == "gpt2" else make_encoder(directory, shape)
        model = TextModel.create(place, CLASSES, max_length=24)
    if kind.endswith("-cosine"):
        model.head = CosineHead(model.head, 0.05)
    if model.head.bias is not None:
        add_bias(model, [0.3, -0.2, 0.1])
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(model.collate(model.encode_texts(TEXTS), np.arange(len(TEXTS))))


@pytest.mark.parametrize("kind", [*SHAPES, "bert-cosine", "gpt2", "bigcn", "bigcn-cosine"])
def test_logits_are_scaled_labels_are_not_and_it_is_kept(kind, tmp_path):
    model = make_model(kind, tmp_path / "encoder")
    assert (model.head.bias is None) == (kind == "gpt2")
    before = logits(model)
    rest = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith(model.head_path)}
    scale_head(model, 1 / 1.7)
    assert_near(logits(model), before / 1.7)
    assert torch.equal(logits(model).argmax(dim=1), before.argmax(dim=1))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in rest.items()), "only the head has changed"
    assert model.head.weight.requires_grad and model.head.weight.dtype is torch.float32
    model.save(tmp_path / "model")
    assert_near(logits(models.load(tmp_path / "model").eval()), before / 1.7)


@pytest.mark.parametrize("layers", [1, 2])
def test_behind_frozen_layers_too(encoder, layers):
    """Whose upper part is a network of its own with the same head."""
    model = TextModel.create(encoder, CLASSES, max_length=24).eval()
    model.freeze(layers)
    before = logits(model)
    scale_head(model, 0.4)
    assert_near(logits(model), 0.4 * before)


def test_ties_stay_ties(encoder):
    model = TextModel.create(encoder, CLASSES, max_length=24).eval()
    with torch.no_grad():
        model.head.weight[2] = model.head.weight[1]
        model.head.bias[2] = model.head.bias[1] = 0.7
        model.head.weight[0] = 0.0
    before = logits(model)
    assert torch.equal(before[:, 1], before[:, 2]) and (before[:, 1] > before[:, 0]).any()
    for temperature in (0.05, 0.3, 1.1, 3.7, 20.0):
        kept = model.head.weight.detach().clone(), model.head.bias.detach().clone()
        scale_head(model, 1 / temperature)
        after = logits(model)
        assert torch.equal(after[:, 1], after[:, 2]) and torch.equal(after.argmax(dim=1), before.argmax(dim=1))
        with torch.no_grad():
            model.head.weight.copy_(kept[0])
            model.head.bias.copy_(kept[1])


def test_one_changes_nothing(encoder):
    model = TextModel.create(encoder, CLASSES, max_length=24).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scale_head(model, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [nn.Linear, CosineHead])
def test_half_precision_computes_from_full_weights(encoder, kind):
    """The head holds float32, whatever a pass is computed in: the scale is not rounded to half precision."""
    model = TextModel.create(encoder, CLASSES, max_length=24).eval()
    if kind is CosineHead:
        model.head = CosineHead(model.head, 0.05)
    model.precision = torch.bfloat16
    before = logits(model)
    weight = model.head.weight.detach().clone()
    scale_head(model, 1 / 1.7)
    assert model.head.weight.dtype is torch.float32
    assert_near(model.head.weight, weight / 1.7, 1)
    assert_near(logits(model), before / 1.7, dtype=torch.float32 if kind is CosineHead else torch.bfloat16, roundings=4)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_other_factors_are_refused(encoder, factor):
    model = TextModel.create(encoder, CLASSES, max_length=24)
    with pytest.raises(ValueError, match="expected a positive number"):
        scale_head(model, factor)
