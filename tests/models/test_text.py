"""The text model on five architectures: saving, freezing, derivatives through it, noise on its input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForSequenceClassification
from transformers.masking_utils import sdpa_mask

from mtem import metagrad
from mtem.errors import RequestError, RunError
from mtem.inference import compute_logits
from mtem.methods.base import cross_entropy, functional
from mtem.models import encoders, frozen
from mtem.models.text import TextModel
from mtem.progress import Progress
from tests.conftest import SHAPES, make_encoder, make_texts
from tests.tolerance import assert_near

CLASSES = ("bad", "good", "nëutral thing")
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: make_encoder(tmp_path_factory.mktemp(shape), shape) for shape in SHAPES}


@pytest.fixture(params=SHAPES)
def model(request, directories):
    torch.manual_seed(1)
    return TextModel.create(directories[request.param], CLASSES, max_length=24).eval()


@pytest.fixture
def bert(directories):
    torch.manual_seed(1)
    return TextModel.create(directories["bert"], CLASSES, max_length=24).eval()


def batch(model, count=6, seed=5, rows=None):
    tokens = model.encode_texts([text for text, _ in make_texts(count, seed)])
    return model.collate(tokens, np.arange(count) if rows is None else rows)


def index_gradient(model, engine):
    """As the method computes it: the functional call, the prepared inputs, `model.differentiable_attention`."""
    target, source = model.prepare(batch(model)), model.prepare(batch(model, seed=6))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    return metagrad.meta_gradient(
        lambda parameters, inputs: functional(model, parameters, inputs),
        model.trainable(),
        target,
        labels,
        torch.linspace(1.2, 4.0, 6),
        lambda parameters: cross_entropy(functional(model, parameters, source), labels),
        0.1,
        engine=engine,
        differentiable_attention=model.differentiable_attention,
    ).gradient


def relative_error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


# ---------------------------------------------------------------------- saving and loading


def test_saving_and_loading_keeps_classes_logits_and_length(model, tmp_path):
    model.save(tmp_path / "model")
    loaded = TextModel.load(tmp_path / "model").eval()
    assert loaded.classes == CLASSES and loaded.max_length == 24
    assert_near(loaded(batch(loaded)), model(batch(model)))
    assert {path.suffix for path in (tmp_path / "model").iterdir()} <= {".json", ".safetensors", ".txt", ".jinja"}


def test_padding_changes_nothing(model):
    texts = ["good1 word2", " ".join(f"word{i}" for i in range(18))]
    tokens = model.encode_texts(texts)
    together = model(model.collate(tokens, np.array([0, 1])))
    alone = torch.cat([model(model.collate(tokens, np.array([row]))) for row in (0, 1)])
    assert_near(together, alone)


def test_very_long_and_empty_texts(model):
    tokens = model.encode_texts(["word1 " * 100_000, "", "good1"])
    assert tokens.lengths.tolist() == [24, 2, 3]
    assert torch.isfinite(model(model.collate(tokens, np.arange(3)))).all()
    assert len(model.encode_texts([])) == 0


def test_the_encoders_own_limit_wins(directories):
    for shape, directory in directories.items():
        model = TextModel.create(directory, CLASSES, max_length=5000).eval()
        assert model.max_length <= 64, shape
        tokens = model.encode_texts(["word1 " * 500])
        assert torch.isfinite(model(model.collate(tokens, np.array([0])))).all(), shape


def test_seven_classes(directories, tmp_path):
    names = [f"class {number}" for number in range(7)]
    model = TextModel.create(directories["bert"], names)
    assert model.classes == tuple(names) and model(batch(model)).shape == (6, 7)
    model.save(tmp_path)
    assert TextModel.load(tmp_path).classes == tuple(names)


def test_half_precision_gives_float32_logits_near_the_full_ones(model):
    full = model(batch(model))
    model.precision = torch.bfloat16
    half = model(batch(model))
    assert half.dtype is torch.float32 and not torch.equal(half, full)
    torch.testing.assert_close(half, full, atol=0.1, rtol=0.1)
    model.freeze(1)
    assert model(batch(model)).dtype is torch.float32


@pytest.mark.parametrize("width", [3, 32, 48])
def test_head_and_features(directories, width):
    """Also where there are as many classes as an inner layer is wide."""
    for shape, directory in directories.items():
        model = TextModel.create(directory, [str(number) for number in range(width)]).eval()
        logits, features = model.logits_and_features(batch(model))
        assert logits.shape == (6, width) and features.shape == (6, 32), shape
        assert_near(model.head(features), logits, msg=shape)
        assert_near(logits, model(batch(model)))


# ---------------------------------------------------------------------- frozen layers


@pytest.mark.parametrize("layers", [1, 2])
def test_lower_and_upper_part_together_are_the_whole_network(model, layers):
    whole = model(batch(model, 12))
    features = model.logits_and_features(batch(model, 12))[1]
    model.freeze(layers)
    assert model._upper, "the fast path is not taken"
    inputs = model.prepare(batch(model, 12))
    assert inputs["hidden"].shape[-1] == 32 and not inputs["hidden"].requires_grad
    assert_near(model(inputs), whole)
    assert_near(model.logits_and_features(inputs)[1], features)


@pytest.mark.parametrize(("layers", "kept"), [(1, 1), (2, 2), (3, 3), (-1, 2), (-2, 1), (-9, 0)])
def test_frozen_parameters_get_no_gradient(model, layers, kept):
    depths = model.depths()
    model.freeze(layers)
    assert model.frozen_layers == kept
    model.train()
    model(batch(model)).sum().backward()
    for name, parameter in model.named_parameters():
        constant = kept > 0 and depths[name] <= kept
        assert parameter.requires_grad is not constant, name
        assert (parameter.grad is None) if constant else True, name
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.trainable().values())
    model.freeze(0)
    assert all(parameter.requires_grad for parameter in model.parameters()) and "hidden" not in model.prepare(batch(model))


def test_depths_rise_from_the_embeddings_to_the_head(model):
    depths = model.depths()
    assert depths.keys() == dict(model.named_parameters()).keys()
    assert set(depths.values()) == {0, 1, 2, 3, 4}
    words = next(name for name, p in model.named_parameters() if p is model.network.get_input_embeddings().weight)
    assert depths[words] == 0
    assert depths[next(name for name, p in model.named_parameters() if p is model.head.weight)] == 4
    for name, depth in depths.items():
        if "relative_attention_bias" in name or "embeddings" in name:
            assert depth == 0, name
    for number, layer in enumerate(model.layers):
        inside = {id(p) for p in layer.parameters()}
        assert {depths[name] for name, p in model.named_parameters() if id(p) in inside} == {number + 1}


def test_too_many_layers_are_refused(bert):
    with pytest.raises(RequestError, match="frozen_layers=4: the encoder has 3 layers"):
        bert.freeze(4)


def test_frozen_layers_have_no_dropout_and_the_rest_has(bert):
    bert.freeze(1)
    bert.train()
    first, second = bert.prepare(batch(bert)), bert.prepare(batch(bert))
    torch.testing.assert_close(first["hidden"], second["hidden"], atol=0, rtol=0)
    assert not torch.equal(bert(first), bert(first))
    assert all(module.training for module in bert.network.modules())


def test_half_precision_keeps_the_fast_path(model):
    model.precision = torch.bfloat16
    model.freeze(1)
    assert model._upper and model.precision is torch.bfloat16


@pytest.mark.parametrize("layers", [0, 2])
def test_forward_mode_agrees_with_second_order(model, layers):
    model.freeze(layers)
    wanted = index_gradient(model, "second-order")
    assert wanted.abs().min() > 0 and relative_error(index_gradient(model, "forward"), wanted) < 1e-4
    assert relative_error(index_gradient(model, "taylor"), wanted) < 0.05


def test_frozen_layers_kept_on_disk_give_the_same_logits(model, tmp_path):
    model.freeze(2)
    tokens = model.encode_texts([text for text, _ in make_texts(40, 7)])
    kept = model.keep_lower(tokens, tmp_path / "lower.npy", QUIET, "frozen", 1e9)
    assert isinstance(kept, frozen.FrozenTokens) and len(kept) == 40
    rows = np.array([3, 39, 0, 17])
    inputs = model.collate(kept, rows)
    assert "hidden" in inputs and np.load(tmp_path / "lower.npy").shape == (int(tokens.lengths.sum()), 32)
    assert_near(model(inputs), model(model.collate(tokens, rows)))
    model.lower = lambda inputs: pytest.fail("computed again")
    again = model.keep_lower(tokens, tmp_path / "lower.npy", QUIET, "frozen", 1e9)
    np.testing.assert_array_equal(again.hidden(5), kept.hidden(5))
    assert model.keep_lower(tokens, tmp_path / "other.npy", QUIET, "frozen", 100.0) is tokens
    assert [path.name for path in tmp_path.iterdir()] == ["lower.npy"]


def test_a_full_disk_under_the_frozen_layers_output_is_told(bert, tmp_path, monkeypatch):
    import errno

    bert.freeze(2)
    tokens = bert.encode_texts(["good1 word1", "bad1"])

    def full(file, header):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(frozen.np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(RunError, match=r"lower\.npy: the disk is full"):
        bert.keep_lower(tokens, tmp_path / "lower.npy", QUIET, "frozen", 1e9)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- mask_ratio


def test_corruption_hides_a_share_and_spares_special_tokens_and_padding(bert):
    tokens = bert.encode_texts(["word1 " * 20, "good1 bad2", *["word3 word4 word5 word6 word7"] * 200])
    inputs = bert.collate(tokens, np.arange(len(tokens)))
    hidden = bert.augment(inputs, "mask", 0.3, torch.Generator().manual_seed(0))
    changed = hidden["input_ids"] != inputs["input_ids"]
    words = inputs["input_ids"] > 4
    assert (hidden["input_ids"][changed] == bert.tokenizer.mask_token_id).all()
    assert not changed[~words].any() and 0.25 < changed[words].float().mean() < 0.35
    assert torch.equal(hidden["attention_mask"], inputs["attention_mask"])
    again = bert.augment(inputs, "mask", 0.3, torch.Generator().manual_seed(0))
    assert torch.equal(again["input_ids"], hidden["input_ids"])
    assert torch.equal(bert.augment(inputs, "mask", 0.0, torch.Generator())["input_ids"], inputs["input_ids"])


def test_corruption_behind_frozen_layers_takes_tokens_out_of_the_attention(bert):
    bert.freeze(1)
    inputs = bert.prepare(batch(bert, 40))
    hidden = bert.augment(inputs, "mask", 0.5, torch.Generator().manual_seed(0))
    gone = inputs["attention_mask"].bool() & ~hidden["attention_mask"].bool()
    words = inputs["input_ids"] > 4
    assert not gone[~words].any() and 0.4 < gone[words].float().mean() < 0.6
    assert torch.equal(hidden["input_ids"], inputs["input_ids"]) and hidden["hidden"] is inputs["hidden"]
    assert not torch.allclose(bert(hidden), bert(inputs))


def test_corruption_without_a_mask_token(bert):
    bert.tokenizer.mask_token = None
    inputs = batch(bert)
    hidden = bert.augment(inputs, "mask", 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(hidden["input_ids"], inputs["input_ids"])
    assert hidden["attention_mask"].sum() < inputs["attention_mask"].sum()


# ---------------------------------------------------------------------- attention kernels


class KernelBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, gradient, mask, *inputs):
        inputs = [value.detach().requires_grad_() for value in inputs]
        with torch.enable_grad():
            output = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        return torch.autograd.grad(output, inputs, gradient)

    @staticmethod
    def backward(context, *gradients):
        raise RuntimeError("no second derivative")


class Kernel(torch.autograd.Function):
    """A fused kernel as libraries ship them: a backward pass, no forward mode, no second derivative."""

    calls = 0

    @staticmethod
    def forward(context, query, key, value, mask):
        Kernel.calls += 1
        context.save_for_backward(query, key, value, mask)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    @staticmethod
    def backward(context, gradient):
        *inputs, mask = context.saved_tensors
        return (*KernelBackward.apply(gradient, mask, *inputs), None)


@pytest.mark.parametrize("shape", ["bert", "roberta", "distilbert", "modernbert"])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_kernel_without_second_derivatives_is_bypassed_and_comes_back(directories, shape, layers):
    AttentionInterface.register("kernel", lambda module, query, key, value, mask, **_: (
        Kernel.apply(query, key, value, mask).transpose(1, 2).contiguous(), None
    ))  # fmt: skip
    AttentionMaskInterface.register("kernel", sdpa_mask)
    models = {}
    for attention in ("kernel", "eager"):
        torch.manual_seed(3)
        models[attention] = TextModel.create(directories[shape], CLASSES, attention=attention).eval()
        models[attention].freeze(layers)
    model = models["kernel"]
    Kernel.calls = 0
    assert_near(model(batch(model)), models["eager"](batch(model)))
    assert Kernel.calls >= 3
    wanted = index_gradient(models["eager"], "second-order")
    for engine in ("forward", "second-order"):
        assert relative_error(index_gradient(model, engine), wanted) < 1e-4
        assert model.network.config._attn_implementation == "kernel"
    Kernel.calls = 0
    with model.differentiable_attention():
        model(batch(model))
    assert Kernel.calls == 0 and model.network.config._attn_implementation == "kernel"
    with pytest.raises(ZeroDivisionError), model.differentiable_attention():
        raise ZeroDivisionError
    assert model.network.config._attn_implementation == "kernel"


def test_unknown_attention_is_refused(encoder):
    with pytest.raises(RequestError, match="no-such-attention"):
        TextModel.create(encoder, CLASSES, attention="no-such-attention")


@pytest.mark.skipif(encoders.packaged("minilm") is None, reason="the minilm package is not installed")
def test_the_packaged_encoder_loads():
    model = TextModel.create("minilm", ("bad", "good")).eval()
    assert "minilm" in encoders.available() and len(model.layers) == 6 and model.max_length == 256
    model.freeze(-2)
    assert model._upper and model.frozen_layers == 4
    tokens = model.encode_texts(["the lid does not fit", "lovely"])
    assert torch.isfinite(model(model.collate(tokens, np.arange(2)))).all()


def test_masks_are_taken_as_transformers_would(model):
    """Full batches go without a mask, padded ones with a mask of four axes where that is the same."""
    network = model.network.eval()
    tokens = model.encode_texts(["good1 bad2 word3", "word1 word2 word3", "bad3"])
    for rows, full in (([0, 1], True), ([0, 2], False), ([2], True)):
        inputs = model.collate(tokens, np.asarray(rows))
        assert (model._mask(inputs) is None) == full
        mask = inputs["attention_mask"].clone()
        assert mask.sum() == sum(tokens.lengths[row] for row in rows)
        with torch.no_grad():
            expected = network(input_ids=inputs["input_ids"], attention_mask=mask).logits
            assert_near(model(inputs), expected)


# ---------------------------------------------------------------------- less memory

SAVING = [(4, False), (1, True), (4, True)]  # microbatches, activation_checkpointing


def derivatives(model, noise):
    """Logits, features, and the gradient of a number that depends on both in the noise and in every parameter."""
    logits, features = model.logits_and_features({**model.prepare(batch(model)), "noise": noise})
    loss = logits.square().sum() + features.square().sum()
    found = torch.autograd.grad(loss, [noise, *model.trainable().values()], materialize_grads=True)
    return [logits.detach(), features.detach(), model(batch(model)).detach(), *found]


@pytest.mark.parametrize("frozen", [0, 1])
def test_batches_in_parts_and_recomputed_layers_have_the_same_derivatives(model, frozen):
    model.freeze(frozen)
    noise = (0.01 * torch.randn(model.input_embeddings(batch(model)).shape)).requires_grad_()
    wanted = derivatives(model, noise)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    for saving in SAVING:
        model.save_memory(*saving)
        for one, other in zip(derivatives(model, noise), wanted, strict=True):
            assert_near(one, other, size=max(1.0, float(other.abs().max())))
    assert not any("forward" in vars(module) for module in model.modules())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("engine", ["forward", "taylor", "second-order"])
def test_so_do_the_engines(bert, engine):
    wanted = index_gradient(bert, engine)
    for saving in SAVING:
        bert.save_memory(*saving)
        assert relative_error(index_gradient(bert, engine), wanted) < (1e-2 if engine == "taylor" else 1e-5)


def test_other_implementations_of_attention_are_back_before_the_backward_pass(bert):
    """Second order differentiates a pass with plain attention twice: nothing of it is recomputed with another one."""
    bert.save_memory(activation_checkpointing=True)
    with bert.differentiable_attention():
        loss = bert(batch(bert)).square().sum()
    first = torch.autograd.grad(loss, list(bert.trainable().values()), create_graph=True, materialize_grads=True)
    sum(value.square().sum() for value in first).backward()
    assert bert.head.weight.grad.abs().sum() > 0


def test_recomputed_layers_round_as_others_do(bert):
    bert.precision = torch.bfloat16
    wanted = torch.autograd.grad(bert(batch(bert)).square().sum(), list(bert.trainable().values()))
    bert.save_memory(activation_checkpointing=True)
    found = torch.autograd.grad(bert(batch(bert)).square().sum(), list(bert.trainable().values()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_parts_are_for_training_and_not_for_predictions(bert, monkeypatch):
    sizes, _pass = [], TextModel._pass
    monkeypatch.setattr(TextModel, "_pass", lambda self, inputs: sizes.append(len(inputs["input_ids"])) or _pass(self, inputs))
    bert.save_memory(4)
    with torch.no_grad():
        bert(batch(bert))
    assert sizes == [2, 2, 2]
    sizes.clear()
    compute_logits(bert, bert.encode_texts([text for text, _ in make_texts(6, 5)]))
    assert sizes == [6] and bert.microbatches == 4


def test_an_encoder_without_a_list_of_layers_is_refused(directories):
    """ALBERT applies one layer many times."""
    config = AutoConfig.for_model(
        "albert",
        vocab_size=70,
        hidden_size=32,
        embedding_size=16,
        num_attention_heads=2,
        intermediate_size=48,
        num_hidden_layers=3,
    )
    network = AutoModelForSequenceClassification.from_config(config)
    model = TextModel(network, TextModel.create(directories["bert"], CLASSES).tokenizer, 24).eval()
    with pytest.raises(RequestError, match="activation_checkpointing=true: this model has no list of layers"):
        model.save_memory(activation_checkpointing=True)
    wanted = torch.autograd.grad(model(batch(model)).square().sum(), model.head.weight)[0]
    model.save_memory(2)
    assert_near(torch.autograd.grad(model(batch(model)).square().sum(), model.head.weight)[0], wanted)


def test_a_decoder_does_not_write_its_keys_and_values_twice(directories):
    config = AutoConfig.for_model("gpt2", vocab_size=70, n_embd=32, n_layer=2, n_head=2, n_positions=32, pad_token_id=0)
    torch.manual_seed(1)
    network = AutoModelForSequenceClassification.from_config(config)
    model = TextModel(network, TextModel.create(directories["bert"], CLASSES).tokenizer, 24).eval()

    def gradients():
        return torch.autograd.grad(model(batch(model)).square().sum(), list(model.trainable().values()), materialize_grads=True)

    wanted = gradients()
    model.save_memory(2, True)
    for one, other in zip(gradients(), wanted, strict=True):
        assert_near(one, other, size=max(1.0, float(other.abs().max())))
