"""The contract of models, and the cosine head: its formula, its use in five architectures, and how it is saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import pipeline

import mtem
from mtem.models.base import Model
from mtem.models.heads import CosineHead
from mtem.models.text import COSINE, TextModel
from mtem_paper.array_model import ArrayModel
from tests.conftest import SHAPES, make_encoder, make_texts
from tests.tolerance import assert_near

CLASSES = ("bad", "good", "nëutral thing")
TEXTS = [text for text, _ in make_texts(24, 5)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: make_encoder(tmp_path_factory.mktemp(shape), shape) for shape in SHAPES}


def batch(model):
    return model.collate(model.encode_texts(TEXTS), np.arange(len(TEXTS)))


def cosine_model(directory, temperature=0.1):
    """A model whose classes divide the plane in which its features differ most, so that all of them are predicted."""
    torch.manual_seed(1)
    model = TextModel.create(directory, CLASSES, max_length=24).eval()
    model.head = CosineHead(model.head, temperature)
    with torch.no_grad():
        _, features = model.logits_and_features(batch(model))
        middle = nn.functional.normalize(features.mean(dim=0), dim=0)
        plane = torch.linalg.svd(features - torch.outer(features @ middle, middle), full_matrices=False).Vh[:2]
        model.head.weight.copy_(torch.tensor([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]]) @ plane)
    return model


@pytest.fixture(params=SHAPES)
def model(request, directories):
    return cosine_model(directories[request.param])


def test_scores_are_cosines_over_the_temperature():
    linear = nn.Linear(2, 3)
    head = CosineHead(linear, 0.5)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]))
        linear.weight.zero_()  # the head's weight is its own
    scores = head(torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]]))
    torch.testing.assert_close(scores, torch.tensor([[1.2, 3.2, 0.4], [1.2, 3.2, 0.4], [0.0, 0.0, 0.0]]))
    assert [name for name, _ in head.named_parameters()] == ["weight"]


def test_it_starts_from_the_linear_layers_weight_and_not_its_bias():
    linear = nn.Linear(4, 3)
    head = CosineHead(linear, 0.05)
    assert torch.equal(head.weight, linear.weight) and not head.bias.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_it_takes_the_heads_place(model, frozen):
    model.freeze(frozen)
    assert bool(model._upper) == bool(frozen)
    inputs = batch(model)
    logits, features = model.logits_and_features(inputs)
    by_hand = features @ model.head.weight.T / features.norm(dim=1, keepdim=True) / 0.1
    assert_near(model(inputs), by_hand)
    assert_near(logits, by_hand)
    names = [name for name, p in model.named_parameters() if p is model.head.weight]
    assert names == [f"{model.head_path}.weight"] and model.head_names() == set(names)
    assert not any(name.startswith("head") for name, _ in model.named_modules())
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), [model.head.weight])
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("frozen", [0, 1])
def test_saved_it_is_read_back_exactly_and_by_others_with_the_same_labels(model, frozen, tmp_path):
    model.freeze(frozen)
    before = model(batch(model))
    model.save(tmp_path / "model")
    assert isinstance(model.head, CosineHead) and torch.equal(model(batch(model)), before)
    loaded = mtem.load(tmp_path / "model")
    assert loaded.classes == CLASSES and loaded.model.head.temperature == 0.1
    assert_near(loaded.predict_proba(TEXTS), torch.softmax(before, dim=1))
    labels = loaded.predict(TEXTS)
    assert set(labels) == set(CLASSES)
    found = pipeline("text-classification", str(tmp_path / "model"))(TEXTS)
    assert [one["label"] for one in found] == labels


def test_others_see_its_confidence_where_features_are_as_long_as_they_have_dimensions():
    head = CosineHead(nn.Linear(16, 3), 0.05)
    features = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    features = 4 * features / features.norm(dim=1, keepdim=True)
    assert_near(head.folded()(features), head(features))
    again = CosineHead.unfolded(head.folded(), 0.05)
    torch.testing.assert_close(again.weight, head.weight)


def test_a_bias_survives_saving(directories, tmp_path):
    model = cosine_model(directories["bert"])
    model.head.bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
    before = model(batch(model))
    model.save(tmp_path)
    assert_near(TextModel.load(tmp_path).eval()(batch(model)), before)


def test_half_precision_does_not_round_the_scores(model):
    model.precision = torch.bfloat16
    logits, features = model.logits_and_features(batch(model))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, model.head(features))


def test_an_encoder_from_a_cosine_run_gets_a_plain_head_again(directories, tmp_path):
    cosine_model(directories["bert"]).save(tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())[COSINE] == 0.1
    model = TextModel.create(tmp_path / "first", CLASSES, max_length=24).eval()
    model.save(tmp_path / "second")
    loaded = TextModel.load(tmp_path / "second").eval()
    assert isinstance(loaded.head, nn.Linear)
    torch.testing.assert_close(loaded(batch(loaded)), model(batch(model)))


# ---------------------------------------------------------------------- the contract


class Direct(ArrayModel):
    """A model that is its own parent of the head."""

    head_path = "head"

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(3, 2)
        self.head = nn.Linear(2, 4)

    def collate(self, encoded, rows, *, multiple=1):
        return {"values": encoded[rows]}

    def forward(self, inputs):
        return self.head(self.network(inputs["values"]))


def test_a_model_must_define_the_whole_contract():
    class Forward(Model):
        def forward(self, inputs):
            return inputs["values"]

    with pytest.raises(TypeError, match=r"abstract.*collate") as caught:
        Forward()
    names = ["augment", "classes", "create", "default_learning_rates", "embedding_norms", "encode", "encode_texts"]
    assert all(name in str(caught.value) for name in [*names, "input_embeddings", "load", "save"])


def test_a_head_may_be_called_head():
    model = Direct()
    assert [name for name, _ in model.named_parameters()] == ["network.weight", "network.bias", "head.weight", "head.bias"]
    assert isinstance(model.head, nn.Linear) and model.head_names() == {"head.weight", "head.bias"}
    inputs = model.collate(torch.randn(5, 3), torch.arange(2))
    logits, features = model.logits_and_features(inputs)
    torch.testing.assert_close(features, model.network(inputs["values"]))
    torch.testing.assert_close(logits, model.head(features))
    model.head = CosineHead(model.head, 0.5)
    assert model.get_submodule("head") is model.head and isinstance(model.head, CosineHead)
    swapped = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(model, swapped, (inputs,)).any()


def test_a_model_of_arrays_reads_no_texts():
    model = Direct()
    assert not model.has_layers and len(model.layers) == 0 and model.depths() == {} and model.probe() is None
    values = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(model.unit_directions(values, {"values": values}), values / 5)
    with pytest.raises(NotImplementedError, match="Direct: its examples are arrays"):
        model.encode_texts(["a"])
    with pytest.raises(mtem.RequestError, match="frozen_layers=1"):
        model.freeze(1)
    with pytest.raises(mtem.RequestError, match="activation_checkpointing=true"):
        model.save_memory(activation_checkpointing=True)
    model.save_memory(microbatches=3)
    assert model.parts({"values": values}) == [{"values": values}], "it does not split batches"
