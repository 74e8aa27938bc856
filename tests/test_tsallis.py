import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mtem import tsallis
from tests.conftest import examples
from tests.reference import tsallis as reference
from tests.tolerance import assert_near

PROBS = [1e-30, 1e-12, 1e-4, 0.03, 0.3, 0.5, 0.9, 0.999, 1.0]
INDEXES = [0.5, 1.0, 1.0 + 1e-9, 1.0 + 1e-5, 1.001, 1.05, 1.5, 2.0, 3.0, 5.0]

logits = st.lists(st.floats(-12, 12), min_size=2, max_size=6)
indexes = st.floats(1.0, 5.0)
NEXT_TO_1 = 1.0000000000000002


def table(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[tuple[float, float]]]:
    """Log-probabilities [N, 2] with the wanted one first, the index of each row, and the (p, index) of each row."""
    pairs = [(p, index) for p in PROBS for index in INDEXES]
    chosen = torch.tensor([math.log(p) for p, _ in pairs], dtype=torch.float64)
    others = torch.full_like(chosen, -7.0)
    return (
        torch.stack([chosen, others], dim=1).to(dtype),
        torch.tensor([index for _, index in pairs], dtype=torch.float64),
        pairs,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_loss_and_its_index_gradient_are_the_printed_formulas(dtype: torch.dtype, tolerance: float) -> None:
    log_probs, index, pairs = table(dtype)
    labels = torch.zeros(len(pairs), dtype=torch.long)
    # The log-probabilities are rounded to the dtype, so the reference gets the probabilities they stand for.
    meant = log_probs[:, 0].double().exp().tolist()
    rows = list(zip(meant, index.tolist(), strict=True))
    wanted = torch.tensor([reference.loss(p, a) for p, a in rows], dtype=torch.float64)
    slopes = torch.tensor([reference.index_gradient(p, a) for p, a in rows], dtype=torch.float64)
    weights = torch.tensor([p ** (a - 1) for p, a in rows], dtype=torch.float64)
    weight_tolerance = 40 * tolerance  # an exponent u is exact to its own size only
    torch.testing.assert_close(tsallis.loss(log_probs, labels, index).double(), wanted, rtol=weight_tolerance, atol=tolerance)
    torch.testing.assert_close(
        tsallis.index_gradient(log_probs, labels, index).double(), slopes, rtol=weight_tolerance, atol=tolerance
    )
    torch.testing.assert_close(
        tsallis.pseudo_weight(log_probs, labels, index).double(), weights, rtol=weight_tolerance, atol=tolerance
    )


@examples(60)
@given(scores=logits, index=indexes)
@example(scores=[0.0, 0.0, 0.0], index=NEXT_TO_1)
@example(scores=[12.0, -12.0], index=NEXT_TO_1)
def test_entropy_is_the_printed_formula(scores: list[float], index: float) -> None:
    probs = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
    assert_near(tsallis.entropy(probs, index), reference.entropy(probs.tolist(), index), 100, size=1.0)


def test_gibbs_and_gini_are_exact() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    gibbs = torch.special.entr(probs).sum(1)
    gini = 1 - probs.square().sum(1)
    torch.testing.assert_close(tsallis.entropy(probs, 1.0), gibbs, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(tsallis.entropy(probs, torch.tensor(2.0)), gini, rtol=1e-15, atol=1e-15)
    log_probs, labels = probs[:1].log(), torch.tensor([1])
    assert tsallis.loss(log_probs, labels, 1.0).item() == -math.log(0.3)
    assert tsallis.loss(log_probs, labels, 2.0).item() == pytest.approx(0.7, rel=1e-15)


def test_index_near_one_is_not_rounded_away_in_float32() -> None:
    log_probs, labels = torch.tensor([[math.log(1e-30), 0.0]]), torch.tensor([0])
    near = 1 + 1e-9  # float32 cannot hold it, its distance to 1 it can
    assert tsallis.pseudo_weight(log_probs, labels, near).item() < 1.0
    float64_index = torch.tensor([near], dtype=torch.float64)
    assert tsallis.pseudo_weight(log_probs, labels, float64_index).item() < 1.0


@examples(60)
@given(scores=logits, index=indexes)
@example(scores=[0.0, 0.0, 0.0], index=NEXT_TO_1)
def test_expected_loss_is_the_entropy(scores: list[float], index: float) -> None:
    """Eq. 9, and of its gradient only the share (psi - 1) / psi."""
    scores_tensor = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(scores_tensor, dim=0)
    probs = log_probs.exp()
    classes = len(scores)
    losses = tsallis.loss(log_probs.expand(classes, classes), torch.arange(classes), index)
    entropy = tsallis.entropy(probs, index)
    assert (probs * losses).sum().item() == pytest.approx(entropy.item(), abs=1e-12)
    (of_losses,) = torch.autograd.grad((probs.detach() * losses).sum(), scores_tensor, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy, scores_tensor)
    torch.testing.assert_close(of_losses, (index - 1) / index * of_entropy, rtol=1e-9, atol=1e-12)


@examples(60)
@given(scores=logits, index=indexes, more=st.floats(0.01, 2.0))
@example(scores=[0.0, 0.0, 0.0], index=NEXT_TO_1, more=0.01)
@example(scores=[0.0] * 6, index=NEXT_TO_1, more=2.0)
def test_bounds_order_and_permutation(scores: list[float], index: float, more: float) -> None:
    log_probs = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
    classes = len(scores)
    rows, labels = log_probs.expand(classes, classes), torch.arange(classes)
    losses, later = tsallis.loss(rows, labels, index), tsallis.loss(rows, labels, index + more)
    assert (losses >= 0).all()
    assert (later <= losses * (1 + 1e-14)).all()
    assert (tsallis.index_gradient(rows, labels, index) <= 0).all()
    assert (losses <= tsallis.surprisal(rows, labels) * (1 + 1e-14)).all()
    if index > 1:
        assert (losses <= (1 + 1e-14) / (index - 1)).all()
    entropy = tsallis.entropy(log_probs.exp(), index).item()
    largest = tsallis.entropy(torch.full((classes,), 1 / classes, dtype=torch.float64), index).item()
    assert -1e-15 <= entropy <= largest + 1e-12
    assert_near(largest, reference.entropy([1 / classes] * classes, index), 100, size=1.0)
    assert tsallis.entropy(log_probs.exp().flip(0), index).item() == pytest.approx(entropy, abs=1e-14)
    assert tsallis.entropy(log_probs.exp(), index + more).item() <= entropy + 1e-14


def test_entropy_takes_any_leading_shape_and_an_index_per_row() -> None:
    probs = torch.softmax(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    index = torch.tensor([[1.0, 1.3, 2.0], [2.5, 4.0, 5.0]], dtype=torch.float64)
    got = tsallis.entropy(probs, index)
    assert got.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            wanted = reference.entropy(probs[row, column].tolist(), index[row, column].item())
            assert got[row, column].item() == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize("function", [tsallis.loss, tsallis.index_gradient, tsallis.pseudo_weight])
def test_first_and_second_derivatives_in_log_probs_and_index(function) -> None:
    # Surprisals around the border of the series, at index 1 exactly, near it, and far from it.
    log_probs = torch.log(torch.tensor([[0.6, 0.4], [0.05, 0.95], [1e-4, 0.9999], [0.37, 0.63]], dtype=torch.float64))
    labels = torch.tensor([0, 0, 0, 1])
    for index in ([1.0] * 4, [1.0001, 1.2, 1.05, 2.0], [3.0, 0.7, 1.054, 2.08]):
        inputs = (log_probs.clone().requires_grad_(), torch.tensor(index, dtype=torch.float64, requires_grad=True))
        assert torch.autograd.gradcheck(lambda lp, a: function(lp, labels, a), inputs, check_forward_ad=True, fast_mode=False)
        assert torch.autograd.gradgradcheck(lambda lp, a: function(lp, labels, a), inputs, check_fwd_over_rev=True)


def test_first_and_second_derivatives_of_the_entropy() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.5], [0.01, 0.09, 0.9]], dtype=torch.float64)
    for index in ([1.0, 1.0], [1.001, 1.2], [2.0, 4.0]):
        inputs = (probs.clone().requires_grad_(), torch.tensor(index, dtype=torch.float64, requires_grad=True))
        assert torch.autograd.gradcheck(tsallis.entropy, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(tsallis.entropy, inputs, check_fwd_over_rev=True)


def test_index_gradient_is_the_derivative_of_the_loss() -> None:
    log_probs, index, pairs = table(torch.float64)
    labels = torch.zeros(len(pairs), dtype=torch.long)
    index.requires_grad_()
    (by_autograd,) = torch.autograd.grad(tsallis.loss(log_probs, labels, index).sum(), index)
    closed = tsallis.index_gradient(log_probs, labels, index)
    torch.testing.assert_close(closed, by_autograd, rtol=1e-11, atol=1e-14)


def test_loss_gradient_is_the_weighted_cross_entropy_gradient() -> None:
    scores = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    labels, index = torch.arange(8) % 3, torch.linspace(1.0, 5.0, 8, dtype=torch.float64)
    log_probs = torch.log_softmax(scores, dim=1)
    (of_loss,) = torch.autograd.grad(tsallis.loss(log_probs, labels, index).sum(), scores, retain_graph=True)
    weight = log_probs.detach().gather(1, labels.unsqueeze(1)).squeeze(1).exp() ** (index - 1)
    weighted = (weight * torch.nn.functional.cross_entropy(scores, labels, reduction="none")).sum()
    (of_cross_entropy,) = torch.autograd.grad(weighted, scores)
    torch.testing.assert_close(of_loss, of_cross_entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", [1.0, 1.0 + 1e-6, 1.01, 1.5, 2.0, 5.0])
def test_extreme_probabilities_stay_finite_twice_differentiated(dtype: torch.dtype, index: float) -> None:
    first = torch.tensor([0.0, 1e-30, 1e-12, 1e-3, 0.5, 0.999, 1.0], dtype=dtype)
    probs = torch.stack([first, 1 - first], dim=1).requires_grad_()
    log_probs = torch.stack([first.log(), first.log()], dim=1).requires_grad_()
    labels = torch.zeros(len(first), dtype=torch.long)
    # bfloat16 cannot tell 1 + 1e-6 from 1, so the index has its own dtype.
    psi = torch.full((len(first),), index, dtype=torch.float64, requires_grad=True)
    for values, inputs in (
        (tsallis.entropy(probs, psi), (probs, psi)),
        (tsallis.loss(log_probs, labels, psi), (log_probs, psi)),
        (tsallis.index_gradient(log_probs, labels, psi), (log_probs, psi)),
    ):
        assert values.dtype == dtype
        assert torch.isfinite(values).all()
        first_order = torch.autograd.grad(values.double().sum(), inputs, create_graph=True)
        total = sum(gradient.double().sum() for gradient in first_order)
        second_order = torch.autograd.grad(total, inputs)
        for gradient in (*first_order, *second_order):
            assert torch.isfinite(gradient).all()


def test_half_precision_is_computed_in_float32() -> None:
    exact = torch.log_softmax(torch.randn(64, 3, generator=torch.Generator().manual_seed(2)), dim=1)
    rounded = exact.bfloat16()
    labels = torch.arange(64) % 3
    wanted = tsallis.loss(rounded.float(), labels, 1.3).bfloat16()
    assert torch.equal(tsallis.loss(rounded, labels, 1.3), wanted)


def test_zero_and_one_have_their_limits() -> None:
    log_probs = torch.tensor([[-math.inf, 0.0]])
    assert tsallis.loss(log_probs, torch.tensor([0]), 3.0).item() == pytest.approx(0.5)
    assert tsallis.index_gradient(log_probs, torch.tensor([0]), 3.0).item() == pytest.approx(-0.25)
    assert tsallis.pseudo_weight(log_probs, torch.tensor([0]), 3.0).item() == 0.0
    for function, limit in ((tsallis.loss, 0.0), (tsallis.index_gradient, 0.0), (tsallis.pseudo_weight, 1.0)):
        assert function(log_probs, torch.tensor([1]), 3.0).item() == limit
    probs = torch.tensor([0.0, 1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(tsallis.entropy(probs, 3.0), probs)
    torch.testing.assert_close(gradient, torch.tensor([0.5, -1.0]))  # (1 - psi p^(psi-1)) / (psi - 1)


@examples(60)
@given(prob=st.floats(1e-30, 1.0), index=st.floats(-0.2, 1.0))
@example(prob=1e-30, index=-0.2)
@example(prob=1.0, index=0.9999999999999999)
def test_indexes_below_one_are_finite_in_float32(prob: float, index: float) -> None:
    log_probs = torch.tensor([[math.log(prob), 0.0]])
    for function in (tsallis.loss, tsallis.index_gradient, tsallis.pseudo_weight):
        assert torch.isfinite(function(log_probs, torch.tensor([0]), index)).all()
    got = tsallis.loss(log_probs, torch.tensor([0]), 0.25).item()
    assert got == pytest.approx(reference.loss(math.exp(log_probs[0, 0].item()), 0.25), rel=1e-4)


@pytest.mark.parametrize("index", [-3.0, 0.0, 0.5, 0.95])
def test_probability_zero_does_not_overflow_below_index_one(index: float) -> None:
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([[-math.inf, 0.0]], dtype=dtype)
        for function in (tsallis.loss, tsallis.index_gradient, tsallis.pseudo_weight):
            assert torch.isfinite(function(log_probs, torch.tensor([0]), index)).all()


def test_forward_mode_through_a_softmax() -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tangent = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1])

    def function(values: torch.Tensor) -> torch.Tensor:
        return tsallis.loss(torch.log_softmax(values, dim=1), labels, 1.0)

    _, slope = torch.func.jvp(function, (scores,), (tangent,))
    torch.testing.assert_close(
        slope, (function(scores + 1e-6 * tangent) - function(scores - 1e-6 * tangent)) / 2e-6, rtol=1e-6, atol=1e-8
    )


def test_the_gibbs_entropy_is_the_entropy_at_index_1() -> None:
    log_probs = torch.log_softmax(torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=-1)
    torch.testing.assert_close(tsallis.gibbs_entropy(log_probs), tsallis.entropy(log_probs.exp(), 1.0))


def test_shape_errors_tell_both_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"expected log_probs \[N, K\] and labels \[N\], got log_probs \[4, 2\] and labels \[3\]"
    ):
        tsallis.loss(torch.zeros(4, 2), torch.zeros(3, dtype=torch.long), 2.0)
    with pytest.raises(ValueError, match=r"index: expected one number or one per row of log_probs, shape \[4\], got shape \[3\]"):
        tsallis.loss(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), torch.full((3,), 2.0))
    with pytest.raises(ValueError, match=r"index: expected one number or one per row of probs, shape \[4\], got shape \[2\]"):
        tsallis.entropy(torch.full((4, 2), 0.5), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="floating-point"):
        tsallis.entropy(torch.ones(4, 2, dtype=torch.long), 2.0)
