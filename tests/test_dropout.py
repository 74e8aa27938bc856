"""Quick dropout: the right probability, the right expectation, the same draws from the same state, and only where it applies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mtem.dropout import is_quick, keep, quick_dropout
from mtem.recompute import recomputed


@given(st.floats(0.001, 0.999), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 2**31))
def test_as_many_values_are_dropped_as_asked_for(p: float, shape: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    size = torch.Size([*shape, 500])
    mask, scale = keep(size, p)
    assert mask.shape == size
    deviation = (p * (1 - p) / size.numel()) ** 0.5
    assert abs(float(mask.float().mean()) - (1 - p)) < 6 * deviation + 1e-4
    assert scale * (1 - p) == pytest.approx(1, abs=0.01)


@given(st.one_of(st.floats(0, 1), st.sampled_from([2**-17, 2**-16, 1 - 2**-16, 1 - 2**-17])), st.integers(0, 2**31))
def test_masks_of_all_types_keep_the_same_values(p: float, seed: int) -> None:
    masks = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(seed)
        masks.append(keep(torch.Size([7, 300]), p, dtype))
    assert [mask.dtype for mask, _ in masks] in ([torch.bool, torch.bfloat16, torch.float16], [torch.bool] * 3)
    values = torch.full((7, 300), -3.0)
    expected = torch.where(masks[0][0], values, 0.0)
    for mask, scale in masks:
        assert scale == masks[0][1]
        assert torch.equal(values * mask, expected)


def test_every_bit_of_the_numbers_is_random() -> None:
    torch.manual_seed(0)
    mask, _ = keep(torch.Size([4, 100_000]), 0.5)  # four values share a number of 64 bits
    by_place = mask.view(-1, 4).float()
    assert torch.allclose(by_place.mean(dim=0), torch.full((4,), 0.5), atol=0.01)
    assert torch.allclose(torch.corrcoef(by_place.T), torch.eye(4), atol=0.02)


def test_a_probability_close_to_one_keeps_something_finite() -> None:
    mask, scale = keep(torch.Size([1000]), 1 - 1e-12)
    assert scale == 2**16
    assert mask.sum() < 5


def attention(*tensors: Tensor, mask: Tensor | None = None, p: float = 0.0) -> Tensor:
    return F.scaled_dot_product_attention(*tensors, attn_mask=mask, dropout_p=p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_attention_is_torchs_in_the_mean(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=dtype).unbind()
    seen = torch.rand(2, 1, 1, 5) < 0.7
    seen[..., 0] = True
    mask = {"none": None, "bool": seen, "float": torch.zeros(2, 1, 1, 5, dtype=dtype).masked_fill(~seen, -torch.inf)}[kind]
    expected = attention(query, key, value, mask=mask)
    with quick_dropout():
        mean = torch.stack([attention(query, key, value, mask=mask, p=0.2).float() for _ in range(4000)]).mean(dim=0)
        assert torch.equal(attention(query, key, value, mask=mask), expected)  # without dropout it is torch's own
    assert torch.allclose(mean, expected.float(), atol=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_of_padding_alone_gets_finite_values_and_gradients(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 1, 1, 3, 4, dtype=dtype).requires_grad_().unbind()
    with quick_dropout():
        out = attention(query, key, value, mask=torch.zeros(1, 1, 1, 3, dtype=torch.bool), p=0.1)
    gradients = torch.autograd.grad(out.sum(), [value])
    assert out.isfinite().all()
    assert gradients[0].isfinite().all()


def test_only_dropout_in_training_is_replaced() -> None:
    values = torch.ones(64)
    layer = nn.Dropout(0.5)
    torch.manual_seed(0)
    with quick_dropout():
        assert is_quick()
        assert torch.equal(layer.eval()(values), values)
        torch.manual_seed(0)
        quick = layer.train()(values)
    assert not is_quick()
    torch.manual_seed(0)
    mask, scale = keep(values.shape, 0.5)
    assert torch.equal(quick, mask * scale)
    torch.manual_seed(0)
    assert not torch.equal(layer(values), quick)  # torch's own draws outside
    with quick_dropout(False):
        assert not is_quick()


def test_a_pass_that_is_run_again_draws_the_same() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.5), nn.Linear(40, 1))
    values = torch.randn(6, 40)
    state = torch.get_rng_state()
    with quick_dropout():
        expected = torch.autograd.grad(module(values).sum(), [*module.parameters()])
    torch.set_rng_state(state)
    with quick_dropout():
        (out,) = recomputed(module, lambda x: (module(x),), [values], torch.device("cpu"))
    found = torch.autograd.grad(out.sum(), [*module.parameters()])  # runs the pass again, outside of the block
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
