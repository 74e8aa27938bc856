"""A last layer at the first position: logits, gradients and index gradients are as without the hooks; where there are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForSequenceClassification
from transformers.masking_utils import sdpa_mask

from mtem import metagrad
from mtem.metagrad import layerwise
from mtem.methods.base import cross_entropy, functional
from mtem.models.heads import CosineHead
from mtem.models.text import TextModel
from tests.conftest import SHAPES, make_texts, make_tokenizer
from tests.tolerance import assert_near, assert_weights_near

CLASSES = ("bad", "good", "neither")
# The modules of the last layer that are given the first position only, by architecture.
CUT = {
    "bert": ["attention.self", "attention.output"],
    "roberta": ["attention.self", "attention.output"],
    "electra": ["attention.self", "attention.output"],
    "distilbert": ["attention.out_lin", "sa_layer_norm"],
    "mpnet": ["attention.attn.o", "attention.LayerNorm"],
    "modernbert": ["attn.Wo", "mlp_norm"],
}
TEXTS = [text for text, _ in make_texts(4, 3)] + ["", "good1 bad2"]
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
INDEX = torch.tensor([1.05, 1.5, 2.0, 3.0, 5.0, 1.2])


def network_of(shape, **more):
    torch.manual_seed(1)
    base = {"vocab_size": 77, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    base |= {"max_position_embeddings": 66, "pad_token_id": 0, "initializer_range": 0.1, "num_labels": len(CLASSES)}
    config = AutoConfig.for_model(shape, **{**base, **SHAPES.get(shape, {}), **more})
    return AutoModelForSequenceClassification.from_config(config)


def made(shape, frozen=0, **more):
    model = TextModel(network_of(shape, **more), make_tokenizer(), 24).eval()
    model.freeze(frozen)
    return model


def without_hooks(shape, frozen=0, **more):
    """The same model as transformers made it."""
    model = made(shape, frozen, **more)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return model


def hooked(model):
    last = model.layers[-1]
    return [name for name, module in last.named_modules() if module._forward_pre_hooks]


def batch(model, rows=range(6)):
    return model.prepare(model.collate(model.encode_texts(TEXTS), np.array(rows)))


def gradients(model, rows):
    model.zero_grad()
    logits, features = model.logits_and_features(batch(model, rows))
    (F.cross_entropy(logits, LABELS[: len(logits)]) + features.square().mean()).backward()
    return logits, {name: value.grad for name, value in model.trainable().items()}


@pytest.fixture(params=[(shape, frozen) for shape in CUT for frozen in (0, 2)], ids=str)
def pair(request):
    return made(*request.param), without_hooks(*request.param)


# ---------------------------------------------------------------------- the same function


@pytest.mark.parametrize("shape", CUT)
def test_what_is_cut(shape):
    model = made(shape)
    assert hooked(model) == CUT[shape]
    assert not any(module._forward_pre_hooks for layer in model.layers[:-1] for module in layer.modules())


@pytest.mark.parametrize("rows", [range(6), [0], [4], [1, 1]], ids=["padding", "one text", "two tokens", "no padding"])
def test_logits_and_gradients_are_those_of_the_whole_layer(pair, rows):
    model, plain = pair
    (found, found_gradients), (wanted, wanted_gradients) = gradients(model, rows), gradients(plain, rows)
    assert_near(found, wanted)
    assert found_gradients.keys() == wanted_gradients.keys()
    missing = {name for name, value in wanted_gradients.items() if value is None}
    assert {name for name, value in found_gradients.items() if value is None} == missing
    kept = [name for name in wanted_gradients if name not in missing]
    assert_weights_near({name: found_gradients[name] for name in kept}, {name: wanted_gradients[name] for name in kept})


def test_a_training_step_leaves_them_the_same(pair):
    """The hooks were chosen at other weights."""
    for model in pair:
        gradients(model, range(6))
        with torch.no_grad():
            for value in model.trainable().values():
                value -= 0.5 * value.grad if value.grad is not None else 0
    assert_near(pair[0](batch(pair[0])), pair[1](batch(pair[1])))


@pytest.mark.parametrize("engine", ["forward", "taylor", "second-order", "layerwise"])
def test_the_index_gradient_of_every_engine_is_that_of_the_whole_layer(pair, engine):
    found, wanted = (index_gradient(model, engine) for model in pair)
    assert (found - wanted).norm() < 1e-5 * wanted.norm() * (100 if engine == "taylor" else 1)  # taylor: a finite difference


def index_gradient(model, engine):
    target, source, truth = batch(model), batch(model, [4, 0, 2]), torch.tensor([1, 0, 2])
    if engine == "layerwise":
        watch = layerwise.Recorder(model, model.trainable(), lambda: model(model.probe()))
        recording = watch.record(lambda: model(target), len(LABELS))
        recording.backward(F.cross_entropy(recording.logits, LABELS, reduction="none"))
        log_probs = torch.log_softmax(recording.logits, dim=1)
        source_loss = lambda: [cross_entropy(model(source), truth)]  # noqa: E731
        return layerwise.meta_gradient(recording, log_probs, LABELS, INDEX, source_loss, 0.1).gradient
    return metagrad.meta_gradient(
        lambda params, inputs: functional(model, params, inputs), model.trainable(), target, LABELS, INDEX,
        lambda params: cross_entropy(functional(model, params, source), truth), 0.1, engine,
        differentiable_attention=model.differentiable_attention,
    ).gradient  # fmt: skip


def test_noise_reaches_all_positions(pair):
    found = []
    for model in pair:
        inputs = batch(model)
        noise = torch.randn(model.input_embeddings(inputs).shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        logits = model({**inputs, "noise": noise})
        found.append((logits, *torch.autograd.grad(logits.square().sum(), noise)))
    assert found[1][1][:, 1:].abs().max() > 0
    for one, other in zip(*found, strict=True):
        assert_near(one, other)


def test_eager_attention_and_another_head(pair):
    for model in pair:
        torch.manual_seed(3)
        model.network.config._attn_implementation = "eager"
        model.head = CosineHead(model.head, 0.05)
        model.freeze(model.frozen_layers)
    (found, found_gradients), (wanted, wanted_gradients) = (gradients(model, range(6)) for model in pair)
    assert_near(found, wanted)
    kept = [name for name, value in wanted_gradients.items() if value is not None]
    assert_weights_near({name: found_gradients[name] for name in kept}, {name: wanted_gradients[name] for name in kept})


# ---------------------------------------------------------------------- all positions


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("shape", CUT)
def test_all_positions(shape, frozen):
    model, plain = made(shape, frozen), without_hooks(shape, frozen)
    inputs = batch(model)

    def last_layer(model):
        seen = []
        handle = model.layers[-1].register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        model(inputs)
        handle.remove()
        return seen[-1]

    wanted = last_layer(plain)
    assert wanted.shape[1] == inputs["input_ids"].shape[1] > 2
    with model.all_positions():
        with pytest.raises(ZeroDivisionError), model.all_positions():
            raise ZeroDivisionError
        torch.testing.assert_close(last_layer(model), wanted, rtol=0, atol=0)
        base = getattr(model.network, model.network.base_model_prefix)
        hidden = base(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        assert hidden.shape[1] == wanted.shape[1]
    outside = last_layer(model)
    assert outside.shape[1] == (wanted.shape[1] if shape == "modernbert" else 1)  # there a residual is added last
    assert_near(outside[:, 0], wanted[:, 0])


# ---------------------------------------------------------------------- where nothing may be cut


def test_a_head_that_reads_all_positions_gets_them():
    model = made("modernbert", classifier_pooling="mean")
    assert not hooked(model)
    assert hooked(made("modernbert", classifier_pooling="cls"))


def test_a_decoder_stays_as_it_is():
    assert not hooked(made("gpt2", n_embd=32, n_layer=3, n_head=2))


class Adapter(nn.Module):
    """Adds a path to a linear layer that is zero before the training."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.down, self.up = linear, nn.Linear(32, 4), nn.Linear(4, 32)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, values):
        return self.linear(values) + self.up(self.down(values))


def test_what_is_read_through_weights_of_zero_is_not_cut():
    network = network_of("bert")
    attention = network.bert.encoder.layer[-1].attention.self
    attention.value = Adapter(attention.value)
    model = TextModel(network, make_tokenizer(), 24).eval()
    assert hooked(model) == CUT["bert"]
    with torch.no_grad():
        attention.value.up.weight.normal_()
    found = model(batch(model))
    with model.all_positions():
        assert_near(found, model(batch(model)))


def test_an_attention_that_does_not_run_here_stays_as_it_is():
    def fails(*_, **__):
        raise RuntimeError("only on a GPU")

    AttentionInterface.register("elsewhere", fails)
    AttentionMaskInterface.register("elsewhere", sdpa_mask)
    network = network_of("bert")
    network.config._attn_implementation = "elsewhere"
    model = TextModel(network, make_tokenizer(), 24).eval()
    assert not hooked(model) and len(model.layers) == 3
    network.config._attn_implementation = "sdpa"
    assert torch.isfinite(model(batch(model))).all()


def test_setting_up_changes_neither_modes_nor_weights_nor_random_numbers():
    network = network_of("bert")
    network.bert.encoder.layer[0].eval()
    modes = [module.training for module in network.modules()]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    model = TextModel(network, make_tokenizer(), 24)
    assert [module.training for module in network.modules()] == modes and len(set(modes)) == 2
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(value.grad is None for value in model.parameters())
    assert len(model.layers) == 3 and list(model.layers._modules) == ["0", "1", "2"]


def test_the_last_layer_alone_still_has_dropout():
    model = made("bert", 2).train()
    inputs = batch(model)
    assert not torch.equal(model(inputs), model(inputs))
