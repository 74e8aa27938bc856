r"""Tsallis entropy, the Tsallis loss, and the loss's derivative in the entropy index (Eq. 1-3 and 14).

Everything is computed in log space. With :math:`a = \psi - 1`, :math:`\ell_1 = -\log p_z` and :math:`u = a \ell_1`,

.. math::
    \ell_\psi = \frac{1 - p_z^{\psi - 1}}{\psi - 1} = \ell_1 \, \varphi(u), \qquad
    \frac{\partial \ell_\psi}{\partial \psi} = \ell_1^2 \, \varphi'(u), \qquad
    \varphi(u) = \frac{1 - e^{-u}}{u}.

:math:`\varphi` is differentiable_attention through 0, where the printed formulas read 0/0; near 0 its power series is used. The functions
can be differentiated twice, in the probabilities and in the index, in reverse and in forward mode. float16 and
bfloat16 are computed in float32; the result has the dtype of the probabilities.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A probability below exp(-1000) counts as exp(-1000), so that p = 0 has a finite loss also at index 1.
_LARGEST_SURPRISAL = 1e3
# Within this distance of 0 the power series of phi is used: its 16 terms are exact in float64 there, and outside it the
# closed form loses at most a digit to cancellation in the second derivative.
_SERIES_RADIUS = 0.5
_PHI_SERIES = [(-1) ** k / math.factorial(k + 1) for k in range(16)]
_PHI_SLOPE_SERIES = [k * (-1) ** k / math.factorial(k + 1) for k in range(1, 17)]


def entropy(probs: Tensor, index: float | Tensor) -> Tensor:
    r"""Tsallis entropy of each row of probabilities (Eq. 1), the Gibbs entropy at index 1 (Eq. 2).

    .. math:: e_\psi(p) = \frac{1}{\psi - 1}\Bigl(1 - \sum_j p_{[j]}^\psi\Bigr) = \sum_j p_{[j]} \, \ell_\psi(p_{[j]})

    The right-hand form is the one computed: it agrees with the left one wherever the probabilities sum to 1, and is the
    only one of the two that stays finite as :math:`\psi \to 1` when they do so only up to rounding. The gradients of
    the two differ by a constant, which any softmax in front of them cancels.

    Args:
        probs: probabilities ``[..., K]``, exact zeros and ones included.
        index: :math:`\psi`, one number or one per row ``[...]``.

    Returns:
        The entropy of each row, ``[...]``.
    """
    if probs.dim() < 1:
        raise ValueError("probs: got a scalar, wanted [..., K] with the K classes last")
    values = _at_least_float32(probs)
    excess = _excess(index, probs.shape[:-1], values, "probs")
    # The floor keeps the second derivative, of the size 1/p, inside the range of the dtype.
    floor = torch.finfo(values.dtype).tiny * 1e4
    surprisals = -values.clamp(min=floor).log()
    return (values * _loss(surprisals, excess.unsqueeze(-1))).sum(-1).to(probs.dtype)


def loss(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""Tsallis loss of each row for its label (Eq. 3), the cross-entropy at index 1, :math:`1 - p_z` at index 2.

    .. math:: \ell_\psi(p, z) = \frac{1 - p_z^{\psi - 1}}{\psi - 1}

    Its gradient is that of the cross-entropy, weighted by :func:`pseudo_weight`.

    Args:
        log_probs: log-probabilities ``[N, K]``.
        labels: the class :math:`z` of each row, integers ``[N]``.
        index: :math:`\psi`, one number or one per row ``[N]``.

    Returns:
        The loss of each row, ``[N]``.
    """
    surprisals = surprisal(log_probs, labels)
    return _loss(surprisals, _excess(index, labels.shape, surprisals, "log_probs")).to(log_probs.dtype)


def index_gradient(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""Derivative of each row's Tsallis loss in its own index (Eq. 14); never positive.

    .. math::
        \frac{\partial \ell_\psi}{\partial \psi} = \frac{\ell_1 - \ell_\psi}{\psi - 1} - \ell_1 \ell_\psi
        = \ell_1^2 \, \frac{(1 + u) e^{-u} - 1}{u^2}, \qquad u = (\psi - 1) \, \ell_1

    which is :math:`-\ell_1^2 / 2` at index 1. The paper's :math:`\nabla_{\psi_{[i]}} \mathcal{L}_T` is the derivative
    of a mean over the batch: divide by its size. Arguments and result as in :func:`loss`.
    """
    surprisals = surprisal(log_probs, labels)
    exponent = _exponent(surprisals, _excess(index, labels.shape, surprisals, "log_probs"))
    return (surprisals * (surprisals * _phi_slope(exponent))).to(log_probs.dtype)


def pseudo_weight(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""What the Tsallis loss multiplies the gradient of the cross-entropy with: :math:`p_z^{\psi - 1}`, per row.

    .. math:: \nabla_\theta \ell_\psi = -p_z^{\psi - 2} \, \nabla_\theta p_z = p_z^{\psi - 1} \, \nabla_\theta \ell_1

    Arguments and result as in :func:`loss`.
    """
    surprisals = surprisal(log_probs, labels)
    exponent = _exponent(surprisals, _excess(index, labels.shape, surprisals, "log_probs"))
    return torch.exp(-exponent).to(log_probs.dtype)


def surprisal(log_probs: Tensor, labels: Tensor) -> Tensor:
    r""":math:`\ell_1 = -\log p_z` of each row, ``[N]``, at least float32 and at most 1000 (where :math:`p_z = 0`)."""
    if log_probs.dim() != 2 or labels.shape != log_probs.shape[:1]:
        got = f"log_probs {list(log_probs.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"got {got}, wanted log_probs [N, K] and labels [N]")
    chosen = log_probs.gather(1, labels.long().unsqueeze(1)).squeeze(1)
    return -_at_least_float32(chosen).clamp(min=-_LARGEST_SURPRISAL)


def _loss(surprisals: Tensor, excess: Tensor) -> Tensor:
    return surprisals * _phi(_exponent(surprisals, excess))


def _exponent(surprisals: Tensor, excess: Tensor) -> Tensor:
    """u = (psi - 1) l_1; an index under 1 makes it negative, and it stops where exp(-u) l_1^2 would overflow."""
    return (excess * surprisals).clamp(min=-0.8 * math.log(torch.finfo(surprisals.dtype).max))


def _phi(u: Tensor) -> Tensor:
    """(1 - exp(-u)) / u, 1 at 0."""
    near = u.abs() < _SERIES_RADIUS
    # Neither branch may see an argument it cannot be differentiated at: the gradient of torch.where is 0 times its own.
    far = torch.where(near, 1.0, u)
    return torch.where(near, _polynomial(torch.where(near, u, 0.0), _PHI_SERIES), -torch.expm1(-far) / far)


def _phi_slope(u: Tensor) -> Tensor:
    """The derivative of phi: ((1 + u) exp(-u) - 1) / u^2, -1/2 at 0."""
    near = u.abs() < _SERIES_RADIUS
    far = torch.where(near, 1.0, u)
    closed = (torch.exp(-far) + torch.expm1(-far) / far) / far
    return torch.where(near, _polynomial(torch.where(near, u, 0.0), _PHI_SLOPE_SERIES), closed)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _at_least_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise ValueError(f"got a tensor of {tensor.dtype}, wanted floating-point probabilities")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _excess(index: float | Tensor, rows: Sequence[int], like: Tensor, owner: str) -> Tensor:
    """psi - 1 as a tensor of the rows' shape; subtracted first, because rounding the index would lose what is left."""
    if not isinstance(index, Tensor):
        return torch.full(tuple(rows), index - 1.0, dtype=like.dtype, device=like.device)
    if index.dim() > 0 and index.shape != tuple(rows):
        raise ValueError(f"index: got shape {list(index.shape)}, wanted one number or {list(rows)}, one per row of {owner}")
    if not index.is_floating_point() or index.dtype in (torch.float16, torch.bfloat16):
        index = index.float()
    return (index - 1.0).to(dtype=like.dtype, device=like.device).expand(tuple(rows))
