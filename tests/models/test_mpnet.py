"""MPNet's fused attention: logits, gradients and index gradients are those of transformers' own attention."""

from __future__ import annotations

import pytest
import torch

from mtem.models import mpnet
from mtem.models.text import TextModel
from tests.conftest import make_encoder, make_tokenizer
from tests.models.test_positions import batch, gradients, index_gradient, network_of
from tests.tolerance import assert_near, assert_weights_near


def made(frozen: int, fused: bool) -> TextModel:
    network = network_of("mpnet", hidden_size=24, num_attention_heads=2)  # 1 / sqrt(12) is rounded
    if fused:
        mpnet.fuse_attention(network)
    model = TextModel(network, make_tokenizer(), 24).eval()
    model.freeze(frozen)
    return model


@pytest.fixture(params=[0, 2], ids=["all layers", "upper layer"])
def pair(request):
    return made(request.param, True), made(request.param, False)


@pytest.mark.parametrize("rows", [range(6), [0], [4], [1, 1]], ids=["padding", "one text", "two tokens", "no padding"])
def test_logits_and_gradients_are_those_of_the_plain_attention(pair, rows):
    (found, found_gradients), (wanted, wanted_gradients) = (gradients(model, rows) for model in pair)
    assert_near(found, wanted)
    kept = {name for name, value in wanted_gradients.items() if value is not None}
    assert kept == {name for name, value in found_gradients.items() if value is not None}
    assert_weights_near({name: found_gradients[name] for name in kept}, {name: wanted_gradients[name] for name in kept})


@pytest.mark.parametrize("engine", ["forward", "second-order", "layerwise"])
def test_so_are_index_gradients(pair, engine):
    found, wanted = (index_gradient(model, engine) for model in pair)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


def test_the_positions_have_a_bias_and_padding_has_none(pair):
    """What the two attentions agree on is not nothing."""
    fused = pair[0]
    alone, padded = (fused(batch(fused, rows))[0] for rows in ([4], [4, 0]))
    assert_near(alone, padded)
    before = fused(batch(fused))
    with torch.no_grad():
        fused.network.mpnet.encoder.relative_attention_bias.weight.add_(torch.randn(32, 2))
    assert (fused(batch(fused)) - before).abs().max() > 1e-3


def test_half_precision_and_dropout():
    models = [made(0, fused) for fused in (True, False)]
    for model in models:
        model.precision = torch.bfloat16
    found, wanted = (model(batch(model)) for model in models)
    assert_near(found, wanted, 10, dtype=torch.bfloat16)
    models[0].train()
    torch.manual_seed(0)
    assert (models[0](batch(models[0])) - found).abs().max() > 1e-3


def test_the_attention_itself_can_be_asked_for():
    fused, plain = (made(0, kind).network for kind in (True, False))
    ids, mask = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    found, wanted = (net(ids, attention_mask=mask, output_attentions=True).attentions for net in (fused, plain))
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other)


def test_it_is_used_unless_an_attention_is_named(tmp_path):
    directory = make_encoder(tmp_path / "mpnet", "mpnet")
    kinds = {attention: TextModel.create(directory, ("a", "b"), attention=attention) for attention in (None, "eager")}
    used = {attention: {type(module) for module in model.network.modules()} for attention, model in kinds.items()}
    assert mpnet.FusedSelfAttention in used[None] and mpnet.FusedSelfAttention not in used["eager"]
    kinds[None].save(tmp_path / "saved")
    assert mpnet.FusedEncoder in {type(module) for module in TextModel.load(tmp_path / "saved").network.modules()}
