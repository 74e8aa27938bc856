r"""The entropy-index gradient (Eq. 11-13): how the source loss after a virtual step changes with each entropy index.

One virtual step on the pseudo-labeled target batch :math:`\mathcal{B}`, then the loss on source data:

.. math::
    \hat\theta(\psi) = \theta - \eta \nabla_\theta \frac{1}{|\mathcal{B}|} \sum_i \ell_{\psi_{[i]}}(x_i, \tilde{y}_i),
    \qquad v = \nabla_{\hat\theta} \mathcal{L}_S(\hat\theta), \qquad
    \frac{\partial \mathcal{L}_S(\hat\theta)}{\partial \psi_{[i]}}
    = -\frac{\eta}{|\mathcal{B}|} \; v \cdot \nabla_\theta \frac{\partial \ell_{\psi_{[i]}}}{\partial \psi_{[i]}}.

(The paper's Eq. 14 leaves out the :math:`1/|\mathcal{B}|` of the mean.) The engines are plain functions of one signature
in the dict :data:`ENGINES`. They differ in how they compute the product with v.

``forward``
    Exact. Since :math:`\nabla_\theta \ell_\psi = -p_z^{\psi-1} \nabla_\theta \log p_z`, the derivative is
    :math:`\frac{\eta}{|\mathcal{B}|}\, p_z^{\psi-1} \log p_z \; (v \cdot \nabla_\theta \log p_z)`, and one forward-mode
    pass gives the last factor for the whole batch.
``taylor``
    The paper's Eq. 12-13: a central difference of Eq. 14 between :math:`\theta \pm \epsilon v`, two passes without
    gradients. Its error is of the order :math:`\epsilon^2`. In half precision rounding errors dominate the difference.
``second-order``
    Exact, by differentiating the gradient of the virtual step again. The reference; needs three times the memory. Of a batch
    in parts, one part at a time is differentiated twice: :math:`\nabla_\theta \log p` times v, as the ``forward`` engine.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtem import parallel, tsallis
from mtem.errors import RequestError

Params = dict[str, Tensor]
BatchT = TypeVar("BatchT")
AttentionContext = Callable[[], AbstractContextManager[Any]]


class MetaGradient(NamedTuple):
    """The gradient in the meta-parameters, and the source loss it is the gradient of.

    Attributes
    ----------
    gradient : Tensor
        float32 ``[N]``, without graph.
    source_loss : Tensor
        A scalar, without graph.
    """

    gradient: Tensor
    source_loss: Tensor


class InnerLoss(NamedTuple):
    """The loss of the virtual step, as a function of the meta-parameters: one number per example, learned in the outer loop.

    The loss depends on an example through the log-probability of its label. All functions take ``log_probs [N, K]``,
    ``labels [N]`` and ``meta_parameters [N]``.

    Attributes
    ----------
    value : callable
        The loss, a scalar.
    weights : callable
        Its derivative in each example's surprisal, ``[N]``.
    derivative : callable
        Its derivative in each meta-parameter, ``[N]``.
    mixed_derivative : callable
        ``mixed_derivative(log_probs, directional, labels, meta_parameters)``: the directional derivative of `derivative`
        ``[N]``, from those of the labels' log-probabilities, ``directional [N]``.
    """

    value: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor, Tensor], Tensor]
    mixed_derivative: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def tsallis_loss(shares: Tensor | None = None) -> InnerLoss:
    """Return the mean Tsallis loss as a function of its meta-parameters, the entropy indexes.

    Parameters
    ----------
    shares : Tensor, optional
        What the loss of each example is multiplied by, ``[N]``.
    """

    def mean(values: Tensor) -> Tensor:
        return (values if shares is None else shares * values) / len(values)

    def mixed_derivative(log_probs: Tensor, directional: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        weight = tsallis.pseudo_weight(log_probs, labels, index) * tsallis.surprisal(log_probs, labels)
        return mean(weight * directional)

    return InnerLoss(
        value=lambda log_probs, labels, index: mean(tsallis.loss(log_probs, labels, index)).sum(),
        weights=lambda log_probs, labels, index: mean(tsallis.pseudo_weight(log_probs, labels, index)),
        derivative=lambda log_probs, labels, index: mean(tsallis.index_gradient(log_probs, labels, index)),
        mixed_derivative=mixed_derivative,
    )


TSALLIS = tsallis_loss()


def math_attention() -> AbstractContextManager[None]:
    """Return a context in which PyTorch computes attention as plain arithmetic.

    The fused attention kernels have neither a forward mode nor a second derivative.
    """
    return sdpa_kernel(SDPBackend.MATH)


def index_gradient(
    logits: Callable[[Params, BatchT], Tensor],
    params: Mapping[str, Tensor],
    batch: BatchT,
    labels: Tensor,
    index: float | Tensor,
    source_loss: Callable[[Params], Tensor],
    learning_rate: float | Tensor,
    engine: str = "forward",
    *,
    differentiable_attention: AttentionContext = math_attention,
    step: float = 0.01,
    virtual_step: bool = True,
) -> Tensor:
    """Compute the derivative of ``source_loss(params - learning_rate * grad of the mean Tsallis loss)`` in each index.

    Parameters are those of :func:`meta_gradient`, which also returns that source loss.

    Returns
    -------
    Tensor
        The derivatives, float32 ``[N]``.
    """
    return meta_gradient(
        logits, params, batch, labels, index, source_loss, learning_rate, engine,
        differentiable_attention=differentiable_attention, step=step, virtual_step=virtual_step,
    ).gradient  # fmt: skip


def meta_gradient(
    logits: Callable[[Params, BatchT], Tensor],
    params: Mapping[str, Tensor],
    batch: BatchT,
    labels: Tensor,
    index: float | Tensor,
    source_loss: Callable[[Params], Tensor],
    learning_rate: float | Tensor,
    engine: str = "forward",
    *,
    differentiable_attention: AttentionContext = math_attention,
    step: float = 0.01,
    virtual_step: bool = True,
    inner_loss: InnerLoss = TSALLIS,
    rewind: bool = True,
    split: Callable[[BatchT], Sequence[BatchT]] | None = None,
) -> MetaGradient:
    r"""Compute the entropy-index gradient, and the source loss after the virtual step.

    Parameters
    ----------
    logits : callable
        ``logits(params, batch)`` -> ``[N, K]``, a pure function of the parameters.
    params : mapping of str to Tensor
        The trainable parameters by name. The functions close over the frozen ones.
    batch : object
        Passed to `logits` as it is.
    labels : Tensor
        Pseudo labels :math:`\tilde{y}`, integers ``[N]``.
    index : float or Tensor
        :math:`\psi`, one per row ``[N]``, or one number for all rows.
    source_loss : callable
        ``source_loss(params)`` -> scalar, :math:`\mathcal{L}_S` on a batch of source data.
    learning_rate : float or Tensor
        :math:`\eta` of the virtual step, a plain gradient step; a tensor without axes if it is on the device.
    engine : str, default "forward"
        A name in :data:`ENGINES`.
    differentiable_attention : callable
        Makes the context of the one pass that is differentiated in forward mode (``forward``) or twice
        (``second-order``). A model whose attention kernels are not PyTorch's has its own.
    step : float, default 0.01
        :math:`\epsilon \lVert v \rVert` of ``taylor``: how far it moves the parameters.
    virtual_step : bool, default True
        Compute v at :math:`\hat\theta`. If False, at :math:`\theta`: this saves ``forward`` and ``taylor`` a forward
        and a backward pass, for an error of the order :math:`\eta`.
    inner_loss : InnerLoss
        The loss of the virtual step, by default the mean Tsallis loss. `index` holds its meta-parameters.
    rewind : bool, default True
        Start every pass from the same random state. False: for functions that draw nothing.
    split : callable, optional
        Returns the parts, in order, in which ``second-order`` differentiates the batch; by default it stays whole. The other
        passes, and those of the other engines, are whole calls of `logits` and `source_loss`.

    Returns
    -------
    MetaGradient
        The gradient and the source loss. No ``.grad`` is set and no graph is kept.

    Raises
    ------
    RequestError
        If the engine is unknown.
    ValueError
        If there are no parameters, or the shapes do not fit.

    Notes
    -----
    Every call of `logits` and `source_loss` starts from the random state at entry, so that dropout draws the same masks
    in all passes, and this state is restored at the end: an update that follows repeats the masks of the virtual step.
    Two kernels may turn one state into different masks, though: fused attention draws its dropout differently from the
    plain arithmetic of `differentiable_attention`. For exact results switch attention dropout off in these passes.
    """
    if engine not in ENGINES:
        raise RequestError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if not params:
        raise ValueError("params: expected at least one trainable parameter, got none")
    index = torch.as_tensor(index, device=labels.device).detach()
    index = index.to(torch.float64 if index.dtype == torch.float64 else torch.float32)
    devices = {value.device for value in params.values() if value.device.type == "cuda"}
    with torch.random.fork_rng([device.index for device in devices], enabled=rewind), torch.enable_grad(), _uncached_casts():
        start = _rewinder(devices) if rewind else lambda: None
        problem = _Problem(
            logits=lambda values: _rewound(start, logits, values, batch),
            source_loss=lambda values: _rewound(start, source_loss, values),
            params={name: value.detach().requires_grad_() for name, value in params.items()},
            labels=labels,
            index=index.expand(labels.shape) if index.dim() == 0 else index,
            learning_rate=learning_rate,
            differentiable_attention=differentiable_attention,
            step=step,
            virtual_step=virtual_step,
            inner_loss=inner_loss,
            rewind=start,
            parts=[functools.partial(_call_part, logits, part) for part in (split(batch) if split else [batch])],
        )
        gradient, value = ENGINES[engine](problem)
    return MetaGradient(gradient.detach().float(), value)


@dataclass(frozen=True)
class _Problem:
    """The arguments of an engine, and the passes that the engines share."""

    logits: Callable[[Params], Tensor]
    source_loss: Callable[[Params], Tensor]
    params: Params
    labels: Tensor
    index: Tensor
    learning_rate: float | Tensor
    differentiable_attention: AttentionContext
    step: float
    virtual_step: bool
    inner_loss: InnerLoss
    rewind: Callable[[], None]
    parts: Sequence[Callable[[Params], Tensor]]

    def log_probs(self, params: Params) -> Tensor:
        return _log_probs(self.logits(params))

    def target_loss(self, index: Tensor) -> Tensor:
        return self.inner_loss.value(self.log_probs(self.params), self.labels, index)

    def direction(self) -> tuple[Params, Tensor]:
        """Return v and the source loss it is the gradient of."""
        if not self.virtual_step:
            return self.source_gradient(self.params)
        return self.source_gradient(self.after_step(_gradient(self.target_loss(self.index), self.params)))

    def after_step(self, gradient: Params) -> Params:
        with torch.no_grad():
            moved = {name: value - self.learning_rate * gradient[name] for name, value in self.params.items()}
        return {name: value.requires_grad_() for name, value in moved.items()}

    def source_gradient(self, params: Params) -> tuple[Params, Tensor]:
        value = self.source_loss(params)
        return _gradient(value, params), value.detach()


def _forward(problem: _Problem) -> tuple[Tensor, Tensor]:
    direction, value = problem.direction()
    unit, norm = normalized(direction)
    constants = {name: param.detach() for name, param in problem.params.items()}
    with torch.no_grad(), problem.differentiable_attention():
        result = torch.func.jvp(problem.log_probs, (constants,), (unit,))
    log_probs, tangents = result[0], result[1]
    # The learning rate is multiplied first: norm and tangents may be so large that their product overflows.
    directional = tangents.gather(1, problem.labels.long().unsqueeze(1)).squeeze(1) * (-problem.learning_rate * norm)
    return problem.inner_loss.mixed_derivative(log_probs, directional, problem.labels, problem.index), value


def _taylor(problem: _Problem) -> tuple[Tensor, Tensor]:
    direction, value = problem.direction()
    unit, norm = normalized(direction)
    with torch.no_grad():
        plus, minus = (
            problem.inner_loss.derivative(
                problem.log_probs({name: param + shift * unit[name] for name, param in problem.params.items()}),
                problem.labels,
                problem.index,
            )
            for shift in (problem.step, -problem.step)
        )
    return -problem.learning_rate * norm * (plus - minus) / (2 * problem.step), value


def _second_order(problem: _Problem) -> tuple[Tensor, Tensor]:
    if len(problem.parts) > 1:
        return _second_order_in_parts(problem)
    index = problem.index.clone().requires_grad_()
    with problem.differentiable_attention():
        target_loss = problem.target_loss(index)
    gradient = _gradient(target_loss, problem.params, create_graph=True)
    start = problem.after_step(parallel.average(gradient)) if problem.virtual_step else problem.params
    direction, value = problem.source_gradient(start)
    product = torch.as_tensor(sum((gradient[name] * direction[name]).sum() for name in gradient))
    return -problem.learning_rate * _gradient(product, {"index": index})["index"], value


def _second_order_in_parts(problem: _Problem) -> tuple[Tensor, Tensor]:
    direction, value = problem.direction()
    all_log_probs, all_tangents = [], []
    problem.rewind()
    for logits in problem.parts:
        with problem.differentiable_attention():
            log_probs = _log_probs(logits(problem.params))
        weights = torch.ones_like(log_probs, requires_grad=True)  # of any value: their gradient does not depend on it
        gradient = _gradient((weights * log_probs).sum(), problem.params, create_graph=True)
        product = torch.as_tensor(sum((gradient[name] * direction[name]).sum() for name in gradient))
        all_tangents.append(_gradient(product, {"weights": weights})["weights"])
        all_log_probs.append(log_probs.detach())
        del log_probs, gradient, product  # the graph, before that of the next part
    log_probs, tangents = torch.cat(all_log_probs), torch.cat(all_tangents)
    directional = -problem.learning_rate * tangents.gather(1, problem.labels.long().unsqueeze(1)).squeeze(1)
    return problem.inner_loss.mixed_derivative(log_probs, directional, problem.labels, problem.index), value


# name -> function(problem) -> (gradient [N], source loss)
ENGINES: dict[str, Callable[[_Problem], tuple[Tensor, Tensor]]] = {
    "forward": _forward,
    "taylor": _taylor,
    "second-order": _second_order,
}


def _gradient(loss: Tensor, params: Params, create_graph: bool = False) -> Params:
    """Return the gradient of a scalar; zero in the parameters it does not depend on.

    With a graph, it is this process's own part of it.
    """
    if not loss.requires_grad:
        return {name: torch.zeros_like(value) for name, value in params.items()}
    # A backward pass has the dtypes of its forward pass; autocast left on would round its float32 parts as well.
    with torch.autocast(loss.device.type, enabled=False):
        gradients = torch.autograd.grad(
            loss, list(params.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    named = dict(zip(params, gradients, strict=True))
    return named if create_graph else parallel.average(named)


def normalized(direction: Params) -> tuple[Params, Tensor]:
    """Scale a direction to norm 1, so that half-precision tangents along it do not underflow.

    Parameters
    ----------
    direction : dict of str to Tensor
        The direction by parameter name.

    Returns
    -------
    tuple
        The scaled direction, and the norm it had. A direction of zeros is returned as it is. The device is not
        synchronised.
    """
    norms = [torch.linalg.vector_norm(value.float() if value.itemsize < 4 else value) for value in direction.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.where(norm > 0, 1 / norm, 0.0)
    return {name: (value * scale).to(value.dtype) for name, value in direction.items()}, norm


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Switch autocast's cache off: it would keep casts of all weights, those of the virtual step included, until it ends."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _rewinder(devices: set[torch.device]) -> Callable[[], None]:
    state = torch.get_rng_state()
    device_states = {device: torch.cuda.get_rng_state(device) for device in devices}

    def rewind() -> None:
        torch.set_rng_state(state)
        for device, device_state in device_states.items():
            torch.cuda.set_rng_state(device_state, device)

    return rewind


def _call_part(logits: Callable[[Params, BatchT], Tensor], part: BatchT, params: Params) -> Tensor:
    return logits(params, part)


def _log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, dim=1)


def _rewound(rewind: Callable[[], None], function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    rewind()
    return function(*arguments)
