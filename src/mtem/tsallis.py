r"""Tsallis entropy, the Tsallis loss, and the derivative of the loss in the entropy index (Eq. 1-3 and 14).

Everything is computed in log space. With :math:`a = \psi - 1`, :math:`\ell_1 = -\log p_z` and :math:`u = a \ell_1`,

.. math::
    \ell_\psi = \frac{1 - p_z^{\psi - 1}}{\psi - 1} = \ell_1 \, \varphi(u), \qquad
    \frac{\partial \ell_\psi}{\partial \psi} = \ell_1^2 \, \varphi'(u), \qquad
    \varphi(u) = \frac{1 - e^{-u}}{u}.

:math:`\varphi` is smooth at 0, where the printed formulas read 0/0; near 0 its power series is used. The functions
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
_PHI_DERIVATIVE_SERIES = [k * (-1) ** k / math.factorial(k + 1) for k in range(1, 17)]


def entropy(probs: Tensor, index: float | Tensor) -> Tensor:
    r"""Compute the Tsallis entropy of each row of probabilities (Eq. 1); the Gibbs entropy at index 1 (Eq. 2).

    .. math:: e_\psi(p) = \frac{1}{\psi - 1}\Bigl(1 - \sum_j p_{[j]}^\psi\Bigr) = \sum_j p_{[j]} \, \ell_\psi(p_{[j]})

    Parameters
    ----------
    probs : Tensor
        Probabilities ``[..., K]``. Exact zeros and ones are allowed.
    index : float or Tensor
        Entropy index :math:`\psi`, one number or one per row ``[...]``.

    Returns
    -------
    Tensor
        The entropy of each row, ``[...]``.

    Raises
    ------
    ValueError
        If the shapes or the dtype do not fit.

    Notes
    -----
    The right-hand form is computed. It agrees with the left one wherever the probabilities sum to 1, and it stays finite
    as :math:`\psi \to 1` also when they sum to 1 only up to rounding. The gradients of the two forms differ by a
    constant, which a softmax in front of them cancels.
    """
    if probs.dim() < 1:
        raise ValueError("probs: expected [..., K] with the K classes last, got a scalar")
    values = _at_least_float32(probs)
    excess = _excess(index, probs.shape[:-1], values, "probs")
    # The floor keeps the second derivative, of the size 1/p, inside the range of the dtype.
    floor = torch.finfo(values.dtype).tiny * 1e4
    surprisals = -values.clamp(min=floor).log()
    return (values * _loss(surprisals, excess.unsqueeze(-1))).sum(-1).to(probs.dtype)


def gibbs_entropy(log_probs: Tensor) -> Tensor:
    r"""Compute the Gibbs entropy of each row of log-probabilities: :math:`-\sum_j p_{[j]} \log p_{[j]}` (Eq. 2).

    This is :func:`entropy` at index 1, from log-probabilities, for the methods that use no other index.

    Parameters
    ----------
    log_probs : Tensor
        Finite log-probabilities ``[..., K]``, as :func:`torch.log_softmax` returns them.

    Returns
    -------
    Tensor
        The entropy of each row, ``[...]``.
    """
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def loss(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""Compute the Tsallis loss of each row for its label (Eq. 3).

    .. math:: \ell_\psi(p, z) = \frac{1 - p_z^{\psi - 1}}{\psi - 1}

    It is the cross-entropy at index 1 and :math:`1 - p_z` at index 2. Its gradient is the gradient of the cross-entropy
    multiplied by :func:`pseudo_weight`.

    Parameters
    ----------
    log_probs : Tensor
        Log-probabilities ``[N, K]``.
    labels : Tensor
        The class :math:`z` of each row, integers ``[N]``.
    index : float or Tensor
        Entropy index :math:`\psi`, one number or one per row ``[N]``.

    Returns
    -------
    Tensor
        The loss of each row, ``[N]``.

    Raises
    ------
    ValueError
        If the shapes or the dtype do not fit.
    """
    surprisals = surprisal(log_probs, labels)
    return _loss(surprisals, _excess(index, labels.shape, surprisals, "log_probs")).to(log_probs.dtype)


def index_gradient(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""Compute the derivative of each row's Tsallis loss in its own index (Eq. 14); never positive.

    .. math::
        \frac{\partial \ell_\psi}{\partial \psi} = \frac{\ell_1 - \ell_\psi}{\psi - 1} - \ell_1 \ell_\psi
        = \ell_1^2 \, \frac{(1 + u) e^{-u} - 1}{u^2}, \qquad u = (\psi - 1) \, \ell_1

    It is :math:`-\ell_1^2 / 2` at index 1. Parameters and result are those of :func:`loss`.

    Notes
    -----
    The paper's :math:`\nabla_{\psi_{[i]}} \mathcal{L}_T` is the derivative of a mean over the batch: divide by the
    batch size.
    """
    surprisals = surprisal(log_probs, labels)
    exponent = _exponent(surprisals, _excess(index, labels.shape, surprisals, "log_probs"))
    return (surprisals * (surprisals * _phi_derivative(exponent))).to(log_probs.dtype)


def pseudo_weight(log_probs: Tensor, labels: Tensor, index: float | Tensor) -> Tensor:
    r"""Compute the factor between the gradients of cross-entropy and Tsallis loss: :math:`p_z^{\psi - 1}` of each row.

    .. math:: \nabla_\theta \ell_\psi = -p_z^{\psi - 2} \, \nabla_\theta p_z = p_z^{\psi - 1} \, \nabla_\theta \ell_1

    Parameters and result are those of :func:`loss`.
    """
    surprisals = surprisal(log_probs, labels)
    exponent = _exponent(surprisals, _excess(index, labels.shape, surprisals, "log_probs"))
    return torch.exp(-exponent).to(log_probs.dtype)


def surprisal(log_probs: Tensor, labels: Tensor) -> Tensor:
    r"""Compute :math:`\ell_1 = -\log p_z` of each row.

    Parameters
    ----------
    log_probs : Tensor
        Log-probabilities ``[N, K]``.
    labels : Tensor
        The class :math:`z` of each row, integers ``[N]``.

    Returns
    -------
    Tensor
        The surprisals ``[N]``, at least float32 and at most 1000 (where :math:`p_z = 0`).

    Raises
    ------
    ValueError
        If the shapes do not fit.
    """
    if log_probs.dim() != 2 or labels.shape != log_probs.shape[:1]:
        shapes = f"log_probs {list(log_probs.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"expected log_probs [N, K] and labels [N], got {shapes}")
    chosen = log_probs.gather(1, labels.long().unsqueeze(1)).squeeze(1)
    return -_at_least_float32(chosen).clamp(min=-_LARGEST_SURPRISAL)


def _loss(surprisals: Tensor, excess: Tensor) -> Tensor:
    return surprisals * _phi(_exponent(surprisals, excess))


def _exponent(surprisals: Tensor, excess: Tensor) -> Tensor:
    """Return u = (psi - 1) l_1, negative for an index below 1; clamped before exp(-u) l_1^2 overflows."""
    return (excess * surprisals).clamp(min=-0.8 * math.log(torch.finfo(surprisals.dtype).max))


def _phi(u: Tensor) -> Tensor:
    """Return (1 - exp(-u)) / u, 1 at 0."""
    near = u.abs() < _SERIES_RADIUS
    # Both branches need arguments at which they are differentiable: torch.where multiplies the unused gradient by 0.
    far = torch.where(near, 1.0, u)
    return torch.where(near, _polynomial(torch.where(near, u, 0.0), _PHI_SERIES), -torch.expm1(-far) / far)


def _phi_derivative(u: Tensor) -> Tensor:
    """Return the derivative of phi: ((1 + u) exp(-u) - 1) / u^2, -1/2 at 0."""
    near = u.abs() < _SERIES_RADIUS
    far = torch.where(near, 1.0, u)
    closed = (torch.exp(-far) + torch.expm1(-far) / far) / far
    return torch.where(near, _polynomial(torch.where(near, u, 0.0), _PHI_DERIVATIVE_SERIES), closed)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _at_least_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise ValueError(f"expected floating-point probabilities, got a tensor of {tensor.dtype}")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _excess(index: float | Tensor, rows: Sequence[int], like: Tensor, owner: str) -> Tensor:
    """Return psi - 1 with the shape of the rows; subtracted before any cast, because rounding psi near 1 loses psi - 1."""
    if not isinstance(index, Tensor):
        return torch.full(tuple(rows), index - 1.0, dtype=like.dtype, device=like.device)
    if index.dim() > 0 and index.shape != tuple(rows):
        raise ValueError(
            f"index: expected one number or one per row of {owner}, shape {list(rows)}, got shape {list(index.shape)}"
        )
    if not index.is_floating_point() or index.dtype in (torch.float16, torch.bfloat16):
        index = index.float()
    return (index - 1.0).to(dtype=like.dtype, device=like.device).expand(tuple(rows))
