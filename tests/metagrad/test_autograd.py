import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForSequenceClassification
from transformers.masking_utils import sdpa_mask

from mtem import metagrad
from mtem.errors import RequestError

ENGINES = ("forward", "taylor", "second-order")
CLASSES = 3
Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


class Problem:
    """A model with a target batch, pseudo labels and indexes, and a source batch, ready to be handed over."""

    def __init__(self, model: nn.Module, logits: Callable[[Params, Any], Tensor], target: Any, source: Any, rows: int):
        self.model, self.logits, self.target, self.source = model, logits, target, source
        self.params: Params = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.labels = torch.arange(rows) % CLASSES
        self.source_labels = torch.randint(0, CLASSES, (rows,))
        # Index 1 exactly, the range in use, and one below 1.
        self.index = torch.cat([torch.tensor([1.0, 0.8]), torch.linspace(1.05, 5.0, rows - 2)])

    def source_loss(self, params: Params) -> Tensor:
        return cross_entropy(self.logits(params, self.source).float(), self.source_labels)

    def gradient(self, engine: str, rate: float = 0.1, **options: Any) -> Tensor:
        arguments = (self.logits, self.params, self.target, self.labels, self.index, self.source_loss, rate, engine)
        return metagrad.index_gradient(*arguments, **options)


def perceptron(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Problem:
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    model = nn.Sequential(*layers).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    target, source = torch.randn(7, 5, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    return Problem(model, lambda params, batch: functional_call(model, params, (batch,)), target, source, 7)


SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "mpnet": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    # Its layers alternate between global and local attention: three show both.
    "modernbert": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    | {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}
# transformers has no sdpa for MPNet.
ENCODERS = [(name, kind) for name in SHAPES for kind in ("eager", "sdpa") if (name, kind) != ("mpnet", "sdpa")]


def encoder(name: str, attention: str) -> Problem:
    shape = {"vocab_size": 60, "max_position_embeddings": 40, "num_labels": CLASSES} | SHAPES[name]
    config = AutoConfig.for_model(name, **shape)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # as initialised, the layers hardly do anything

    def tokens() -> dict[str, Tensor]:
        mask = torch.ones(6, 10, dtype=torch.long)
        mask[0, 7:] = 0
        mask[3, 4:] = 0
        return {"input_ids": torch.randint(4, 60, (6, 10)), "attention_mask": mask}

    def logits(params: Params, batch: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (), batch).logits

    return Problem(model, logits, tokens(), tokens(), 6)


def error(got: Tensor, wanted: Tensor) -> float:
    assert wanted.norm() > 0
    return ((got - wanted).norm() / wanted.norm()).item()


def by_definition(problem: Problem, rate: float, nudge: float = 1e-4) -> Tensor:
    """Central differences of source_loss(params - rate * grad) in each index, with the printed loss of Eq. 3."""

    def value(index: Tensor) -> float:
        probs = torch.softmax(problem.logits(problem.params, problem.target), dim=1)
        chosen = probs[torch.arange(len(index)), problem.labels]
        power = index - 1
        safe = torch.where(power == 0, torch.ones_like(power), power)
        losses = torch.where(power == 0, -chosen.log(), (1 - chosen**power) / safe)
        gradients = torch.autograd.grad(losses.mean(), list(problem.params.values()))
        moved = zip(problem.params.items(), gradients, strict=True)
        return problem.source_loss({name: value - rate * gradient for (name, value), gradient in moved}).item()

    index = problem.index.double()
    nudges = nudge * torch.eye(len(index), dtype=torch.float64)
    return torch.tensor([(value(index + row) - value(index - row)) / (2 * nudge) for row in nudges])


def float64_perceptron() -> Problem:
    problem = perceptron(torch.float64)
    # The source loss of the problem class rounds to float32, too coarse for differences.
    problem.source_loss = lambda params: cross_entropy(problem.logits(params, problem.source), problem.source_labels)
    return problem


@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize(("engine", "tolerance"), [("forward", 1e-5), ("second-order", 1e-5), ("taylor", 1e-3)])
def test_engines_give_the_derivative_of_the_definition(engine: str, tolerance: float, rate: float) -> None:
    problem = float64_perceptron()
    wanted = by_definition(problem, rate)
    got = problem.gradient(engine, rate)
    assert error(got, wanted.float()) < tolerance
    # No row is carried by the others.
    torch.testing.assert_close(got, wanted.float(), rtol=50 * tolerance, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize(("name", "attention"), ENCODERS)
def test_forward_and_taylor_agree_with_second_order_on_encoders(name: str, attention: str) -> None:
    problem = encoder(name, attention)
    wanted = problem.gradient("second-order")
    assert error(problem.gradient("forward"), wanted) < 1e-4
    # DistilBERT's head has a ReLU, and a difference across its kink is no derivative: the usual 0.01 may straddle it.
    taylor = problem.gradient("taylor", step=1e-3 if name == "distilbert" else 1e-2)
    assert error(taylor, wanted) < 5e-2
    assert torch.cosine_similarity(taylor, wanted, dim=0) > 0.999


def test_taylor_converges_with_the_square_of_its_step() -> None:
    problem = float64_perceptron()
    exact = problem.gradient("forward")
    errors = [error(problem.gradient("taylor", step=step), exact) for step in (0.3, 0.03, 0.003)]
    assert errors[0] > 1e-4
    assert errors[1] < errors[0] / 50
    assert errors[2] < errors[1] / 10


@pytest.mark.parametrize("engine", ENGINES)
def test_source_loss_is_the_one_at_the_virtual_step(engine: str) -> None:
    problem = perceptron()
    arguments = (problem.logits, problem.params, problem.target, problem.labels, 1.0, problem.source_loss, 0.7, engine)
    target_loss = cross_entropy(problem.logits(problem.params, problem.target), problem.labels)
    gradients = torch.autograd.grad(target_loss, list(problem.params.values()))
    moved = zip(problem.params.items(), gradients, strict=True)
    wanted = problem.source_loss({name: value - 0.7 * gradient for (name, value), gradient in moved})
    there = metagrad.meta_gradient(*arguments)
    torch.testing.assert_close(there.source_loss, wanted.detach())
    assert not there.source_loss.requires_grad
    here = metagrad.meta_gradient(*arguments, virtual_step=False)
    torch.testing.assert_close(here.source_loss, problem.source_loss(problem.params).detach())
    assert abs(there.source_loss - here.source_loss) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_direction_at_theta_is_close_for_a_small_rate_and_the_same_for_all_engines(engine: str) -> None:
    problem = perceptron()
    near = error(problem.gradient(engine, 1e-3, virtual_step=False), problem.gradient("second-order", 1e-3))
    far = error(problem.gradient(engine, 1.0, virtual_step=False), problem.gradient("second-order", 1.0))
    assert near < 1e-2 < far
    exact = problem.gradient("second-order", 1.0, virtual_step=False)
    assert error(problem.gradient(engine, 1.0, virtual_step=False), exact) < (5e-3 if engine == "taylor" else 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_leaves_nothing_behind(engine: str) -> None:
    problem = perceptron()
    problem.index.requires_grad_()
    before = {name: value.clone() for name, value in problem.params.items()}
    got = problem.gradient(engine)
    assert got.dtype == torch.float32
    assert got.shape == (7,)
    assert got.grad_fn is None
    assert not got.requires_grad
    assert problem.index.grad is None
    for name, value in problem.model.named_parameters():
        assert value.grad is None
        assert value.requires_grad
        assert torch.equal(value, before[name])
    with torch.no_grad():
        torch.testing.assert_close(problem.gradient(engine), got)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_source_gradient_gives_zeros(engine: str) -> None:
    problem = perceptron()
    for source_loss in (
        lambda params: 0 * sum(value.sum() for value in params.values()),
        lambda params: torch.tensor(1.5),
    ):
        problem.source_loss = source_loss
        assert torch.equal(problem.gradient(engine), torch.zeros(7))


@pytest.mark.parametrize("engine", ENGINES)
def test_certain_and_impossible_pseudo_labels_give_no_nan(engine: str) -> None:
    problem = perceptron()
    logits = problem.logits
    problem.logits = lambda params, batch: 1e4 * logits(params, batch)
    assert torch.isfinite(problem.gradient(engine, 1e-9)).all()


@pytest.mark.parametrize("scale", [1e-12, 1e6])
@pytest.mark.parametrize("engine", ENGINES)
def test_result_is_linear_in_the_source_loss_whatever_its_scale(engine: str, scale: float) -> None:
    problem = perceptron()
    wanted = problem.gradient(engine)
    source_loss = problem.source_loss
    problem.source_loss = lambda params: scale * source_loss(params)
    assert error(problem.gradient(engine) / scale, wanted) < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_unused_parameters_and_values_that_are_no_leaves(engine: str) -> None:
    problem = perceptron()
    wanted = problem.gradient(engine)
    logits, params = problem.logits, problem.params
    problem.params = {name: value * 1.0 for name, value in params.items()} | {"unused": torch.ones(3)}
    problem.logits = lambda values, batch: logits({name: values[name] for name in params}, batch)
    torch.testing.assert_close(problem.gradient(engine), wanted)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_frozen_layers(name: str) -> None:
    problem = encoder(name, "sdpa")
    full = problem.gradient("forward")
    for parameter_name, parameter in problem.model.named_parameters():
        parameter.requires_grad_(parameter_name.startswith("classifier"))
    problem.params = {name: value for name, value in problem.params.items() if value.requires_grad}
    assert len(problem.params) == 2
    wanted = problem.gradient("second-order")
    assert error(problem.gradient("forward"), wanted) < 1e-4
    assert error(problem.gradient("taylor"), wanted) < 5e-2
    assert error(wanted, full) > 1e-2


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank one added to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, frozen.in_features) / 5)
        self.up = nn.Parameter(torch.randn(frozen.out_features, 2) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + (x @ self.down.T) @ self.up.T


def test_low_rank_adapters() -> None:
    problem = encoder("bert", "sdpa")
    problem.model.requires_grad_(False)
    for layer in problem.model.bert.encoder.layer:
        layer.attention.self.query = LowRank(layer.attention.self.query)
        layer.attention.self.value = LowRank(layer.attention.self.value)
    problem.params = {name: value for name, value in problem.model.named_parameters() if value.requires_grad}
    assert len(problem.params) == 8
    wanted = problem.gradient("second-order")
    assert error(problem.gradient("forward"), wanted) < 1e-4
    assert error(problem.gradient("taylor"), wanted) < 5e-2


def test_dropout_draws_the_same_masks_in_every_pass() -> None:
    problem = perceptron(dropout=0.5)
    problem.model.train()
    state = torch.get_rng_state()
    wanted = problem.gradient("second-order")
    assert torch.equal(torch.get_rng_state(), state)
    assert error(problem.gradient("forward"), wanted) < 1e-4
    assert error(problem.gradient("taylor"), wanted) < 5e-2
    torch.rand(100)
    assert error(problem.gradient("forward"), wanted) > 1e-2  # other masks: the masks do matter


def test_dropout_in_an_encoder() -> None:
    problem = encoder("bert", "eager")
    problem.model.train()
    assert error(problem.gradient("forward"), problem.gradient("second-order")) < 1e-4


class FusedAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gradient: Tensor, mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            output = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        return torch.autograd.grad(output, inputs, gradient)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> None:
        raise RuntimeError("no second derivative")


class FusedAttention(torch.autograd.Function):
    """Stands for a fused attention kernel: a backward pass, but no forward mode and no second derivative."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        context.save_for_backward(query, key, value, mask)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mask = context.saved_tensors
        return (*FusedAttentionBackward.apply(gradient, mask, *inputs), None)


def fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Any:
    return FusedAttention.apply(query, key, value, mask).transpose(1, 2).contiguous(), None


@pytest.fixture
def fused_problem() -> Problem:
    AttentionInterface.register("fused", fused)
    AttentionMaskInterface.register("fused", sdpa_mask)
    problem = encoder("bert", "sdpa")
    problem.model.set_attn_implementation("fused")
    return problem


@pytest.mark.parametrize("engine", ["forward", "second-order"])
def test_attention_without_a_second_derivative_is_bypassed_for_one_pass_only(engine: str, fused_problem: Problem) -> None:
    problem, implementations = fused_problem, []
    logits = problem.logits

    def watched(params: Params, batch: Any) -> Tensor:
        implementations.append(problem.model.config._attn_implementation)
        return logits(params, batch)

    problem.logits = watched

    @contextmanager
    def differentiable_attention() -> Iterator[None]:
        problem.model.set_attn_implementation("eager")
        yield
        problem.model.set_attn_implementation("fused")

    with pytest.raises(RuntimeError, match=r"no second derivative|functorch|forward mode|jvp"):
        problem.gradient(engine)  # the default one knows PyTorch's own attention only
    implementations.clear()
    got = problem.gradient(engine, differentiable_attention=differentiable_attention)
    passes = {"forward": ["fused", "fused", "eager"], "second-order": ["eager", "fused"]}
    assert implementations == passes[engine]
    problem.model.set_attn_implementation("eager")
    assert error(got, problem.gradient("second-order")) < 1e-4


def test_taylor_needs_no_smooth_attention(fused_problem: Problem) -> None:
    got = fused_problem.gradient("taylor", differentiable_attention=lambda: pytest.fail("entered"))
    fused_problem.model.set_attn_implementation("eager")
    assert error(got, fused_problem.gradient("second-order")) < 5e-2


@pytest.mark.parametrize("engine", ["forward", "second-order"])
def test_the_default_is_needed_for_pytorchs_own_attention(engine: str) -> None:
    """On the CPU too the fused kernel is taken where nothing forbids it, and then cannot be differentiated so."""
    query = torch.randn(2, 2, 4, 8)
    weight = nn.Parameter(torch.randn(8, CLASSES))
    projection = nn.Parameter(torch.randn(8, 8))

    def logits(params: Params, batch: Tensor) -> Tensor:
        heads = batch @ params["projection"]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).mean((1, 2)) @ params["weight"]

    params = {"projection": projection, "weight": weight}
    labels, index = torch.tensor([0, 1]), torch.tensor([1.5, 2.0])
    arguments = (logits, params, query, labels, index, lambda p: logits(p, query).square().mean(), 0.1, engine)
    assert metagrad.index_gradient(*arguments).abs().min() > 0
    with pytest.raises((RuntimeError, NotImplementedError)):
        metagrad.index_gradient(*arguments, differentiable_attention=nullcontext)


@pytest.mark.parametrize("engine", ["forward", "second-order"])
def test_autocast(engine: str) -> None:
    problem = encoder("bert", "sdpa")
    wanted = problem.gradient("second-order")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = problem.gradient(engine)
        again = problem.gradient(engine)
    assert got.dtype == torch.float32
    assert torch.cosine_similarity(got, wanted, dim=0) > 0.98
    torch.testing.assert_close(again, got)


def test_half_precision_tangents_do_not_underflow() -> None:
    problem = perceptron()
    wanted = problem.gradient("second-order")
    source_loss = problem.source_loss

    def tiny_source_loss(params: Params) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # it is the tangents that float16 is to be survived by, not v
            return 1e-9 * source_loss(params)

    problem.source_loss = tiny_source_loss
    with torch.autocast("cpu", dtype=torch.float16):
        assert problem.logits(problem.params, problem.target).dtype == torch.float16
        assert error(problem.gradient("forward") * 1e9, wanted) < 1e-2


@pytest.mark.parametrize("engine", ENGINES)
def test_virtual_parameters_are_freed(engine: str) -> None:
    problem, seen = perceptron(), []
    source_loss = problem.source_loss

    def watched(params: Params) -> Tensor:
        seen.extend(weakref.ref(value) for value in params.values())
        return source_loss(params)

    problem.source_loss = watched
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem.gradient(engine)
        gc.collect()
        assert len(seen) == len(problem.params)
        assert all(reference() is None for reference in seen)
        assert torch.is_autocast_cache_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_a_cuda_device(dropout: float) -> None:
    problem = perceptron(dropout=dropout)
    problem.model.cuda().train()
    problem.params = dict(problem.model.named_parameters())
    problem.target, problem.source = problem.target.cuda(), problem.source.cuda()
    problem.labels, problem.source_labels = problem.labels.cuda(), problem.source_labels.cuda()
    state = torch.cuda.get_rng_state()
    wanted = problem.gradient("second-order")  # the indexes are still on the CPU
    assert wanted.is_cuda
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert error(problem.gradient("forward"), wanted) < 1e-4
    assert error(problem.gradient("taylor"), wanted) < 5e-2


@pytest.mark.parametrize("engine", ENGINES)
def test_one_index_for_all_rows(engine: str) -> None:
    problem = perceptron()
    problem.index = torch.full((7,), 1.5)
    wanted = problem.gradient(engine)
    for index in (1.5, torch.tensor(1.5), torch.full((7,), 1.5, dtype=torch.bfloat16)):
        problem.index = index
        torch.testing.assert_close(problem.gradient(engine), wanted)


PASSES = {"forward": (2, 1), "taylor": (3, 2), "second-order": (1, 1)}


@pytest.mark.parametrize("engine", ENGINES)
def test_passes_are_not_wasted(engine: str) -> None:
    for virtual_step, wanted in zip((True, False), PASSES[engine], strict=True):
        problem, target, source = perceptron(), [], []
        logits, source_loss = problem.logits, problem.source_loss

        def count_target(params: Params, batch: Any, seen: list = target, logits: Any = logits) -> Tensor:
            seen.append(batch)
            return logits(params, batch)

        def count_source(params: Params, seen: list = source, source_loss: Any = source_loss) -> Tensor:
            seen.append(params)
            return source_loss(params)

        problem.logits, problem.source_loss = count_target, count_source
        problem.gradient(engine, virtual_step=virtual_step)
        # The source loss calls the logits, too.
        assert len([batch for batch in target if batch is problem.target]) == wanted
        assert len(source) == 1


def test_wrong_requests_are_refused() -> None:
    problem = perceptron()
    with pytest.raises(RequestError, match="expected one of forward, taylor, second-order, got 'backward'"):
        problem.gradient("backward")
    problem.index = torch.ones(3)
    for engine in ENGINES:
        with pytest.raises(ValueError, match=r"index: expected one number .* shape \[7\], got shape \[3\]"):
            problem.gradient(engine)
    problem.params = {}
    with pytest.raises(ValueError, match="at least one trainable parameter"):
        problem.gradient("forward")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("virtual_step", [True, False])
def test_second_order_in_parts_is_that_of_the_whole_batch(dropout: float, virtual_step: bool) -> None:
    problem = perceptron(dropout=dropout)
    whole = problem.logits

    def logits(params: Params, batch: Tensor) -> Tensor:  # as a model that splits its batches, mask by mask
        return torch.cat([whole(params, part) for part in torch.split(batch, 3)])

    problem.logits = logits
    wanted = problem.gradient("second-order", virtual_step=virtual_step)
    sizes: list[int] = []

    def split(batch: Tensor) -> list[Tensor]:
        parts = list(torch.split(batch, 3))
        sizes.extend(len(part) for part in parts)
        return parts

    drawn = torch.get_rng_state()
    found = metagrad.meta_gradient(
        logits, problem.params, problem.target, problem.labels, problem.index, problem.source_loss, 0.1, "second-order",
        virtual_step=virtual_step, split=split,
    ).gradient  # fmt: skip
    assert sizes == [3, 3, 1] and torch.equal(torch.get_rng_state(), drawn)
    assert error(found, wanted) < 1e-5
