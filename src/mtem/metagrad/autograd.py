r"""The entropy-index gradient (Eq. 11-13): how the source loss after a virtual step changes with each entropy index.

One virtual step on the pseudo-labeled target batch :math:`\mathcal{B}`, then the loss on source data:

.. math::
    \hat\theta(\psi) = \theta - \eta \nabla_\theta \frac{1}{|\mathcal{B}|} \sum_i \ell_{\psi_{[i]}}(x_i, \tilde{y}_i),
    \qquad v = \nabla_{\hat\theta} \mathcal{L}_S(\hat\theta), \qquad
    \frac{\partial \mathcal{L}_S(\hat\theta)}{\partial \psi_{[i]}}
    = -\frac{\eta}{|\mathcal{B}|} \; v \cdot \nabla_\theta \frac{\partial \ell_{\psi_{[i]}}}{\partial \psi_{[i]}}.

(The paper's Eq. 14 leaves out the :math:`1/|\mathcal{B}|` of the mean.) The engines differ in the product with v.

``forward``
    Exact. Since :math:`\nabla_\theta \ell_\psi = -p_z^{\psi-1} \nabla_\theta \log p_z`, the derivative is
    :math:`\frac{\eta}{|\mathcal{B}|}\, p_z^{\psi-1} \log p_z \; (v \cdot \nabla_\theta \log p_z)`, and one forward-mode
    pass gives the last factor for the whole batch.
``taylor``
    The paper's Eq. 12-13: a central difference of Eq. 14 between :math:`\theta \pm \epsilon v`, two passes without
    gradients. Its error is of the order :math:`\epsilon^2`, and in half precision the difference drowns in rounding.
``second-order``
    Exact, by differentiating the virtual step's gradient again; the reference, at three times the memory.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtem import tsallis
from mtem.errors import RequestError

Params = dict[str, Tensor]


class MetaGradient(NamedTuple):
    """``gradient``: float32 ``[N]``. ``source_loss``: the loss it is the gradient of, a scalar. Both without graph."""

    gradient: Tensor
    source_loss: Tensor


class InnerLoss(NamedTuple):
    """The loss of the virtual step, as a function of what the outer loop learns: one number for each example.

    It depends on an example through the log-probability of its label. All take ``log_probs [N, K]``, ``labels [N]`` and the
    numbers ``[N]``. ``value`` is the loss, a scalar; ``weights`` its derivative in each example's surprisal, ``[N]``;
    ``slope`` that in each number, ``[N]``; ``mixed(log_probs, slopes, labels, numbers)`` the derivative of ``slope`` when the
    labels' log-probabilities move at the speeds ``slopes [N]``.
    """

    value: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    mixed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _tsallis_mixed(log_probs: Tensor, slopes: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    weight = tsallis.pseudo_weight(log_probs, labels, index) * tsallis.surprisal(log_probs, labels)
    return weight * slopes / len(labels)


TSALLIS = InnerLoss(
    lambda log_probs, labels, index: tsallis.loss(log_probs, labels, index).mean(),
    lambda log_probs, labels, index: tsallis.pseudo_weight(log_probs, labels, index) / len(labels),
    lambda log_probs, labels, index: tsallis.index_gradient(log_probs, labels, index) / len(labels),
    _tsallis_mixed,
)


def math_attention() -> AbstractContextManager[None]:
    """PyTorch's attention as plain arithmetic: its fused kernels have neither forward mode nor a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def index_gradient(
    logits: Callable[[Params, Any], Tensor],
    params: Params,
    batch: Any,
    labels: Tensor,
    index: float | Tensor,
    source_loss: Callable[[Params], Tensor],
    learning_rate: float,
    engine: str = "forward",
    *,
    differentiable_attention: Callable[[], AbstractContextManager[Any]] = math_attention,
    step: float = 0.01,
    virtual_step: bool = True,
) -> Tensor:
    """The derivative of ``source_loss(params - learning_rate * grad of the mean Tsallis loss)`` in each index, float32 ``[N]``.

    See :func:`meta_gradient`, which also returns that source loss.
    """
    options = {"differentiable_attention": differentiable_attention, "step": step, "virtual_step": virtual_step}
    return meta_gradient(logits, params, batch, labels, index, source_loss, learning_rate, engine, **options).gradient


def meta_gradient(
    logits: Callable[[Params, Any], Tensor],
    params: Params,
    batch: Any,
    labels: Tensor,
    index: float | Tensor,
    source_loss: Callable[[Params], Tensor],
    learning_rate: float,
    engine: str = "forward",
    *,
    differentiable_attention: Callable[[], AbstractContextManager[Any]] = math_attention,
    step: float = 0.01,
    virtual_step: bool = True,
    inner: InnerLoss = TSALLIS,
) -> MetaGradient:
    r"""The entropy-index gradient and the source loss at the virtual step. No ``.grad`` and no graph is left behind.

    Every call of ``logits`` and ``source_loss`` starts from the random state found on entry, so that dropout draws the
    same masks in all passes, and that state is put back at the end: an update that follows repeats the virtual step's
    masks. Two kernels need not turn one state into the same masks, though: fused attention draws its dropout otherwise
    than the plain arithmetic of ``differentiable_attention``. Exactness wants attention dropout off in these passes.

    Args:
        logits: ``logits(params, batch)`` -> ``[N, K]``, a pure function of the parameters.
        params: the trainable parameters by name; the functions close over the frozen ones.
        batch: handed to ``logits`` as it is.
        labels: pseudo labels :math:`\tilde{y}`, integers ``[N]``.
        index: :math:`\psi`, one per row ``[N]`` (a single number stands for all of them).
        source_loss: ``source_loss(params)`` -> scalar, :math:`\mathcal{L}_S` on a batch of source data.
        learning_rate: :math:`\eta` of the virtual step, a plain gradient step.
        engine: a name in :data:`ENGINES`.
        differentiable_attention: makes the context manager around the one pass that is differentiated in forward mode (``forward``) or
            twice (``second-order``). A model with other attention kernels than PyTorch's brings its own.
        step: ``taylor``'s :math:`\epsilon \lVert v \rVert`: how far it moves the parameters.
        virtual_step: take v at :math:`\hat\theta`. Otherwise at :math:`\theta`, which saves ``forward`` and ``taylor``
            a forward and a backward pass for an error of the order :math:`\eta`.
        inner: another loss than the mean Tsallis loss; ``index`` then is whatever number it has for each example.
    """
    if engine not in ENGINES:
        raise RequestError(f"engine: got {engine!r}, wanted one of {', '.join(ENGINES)}")
    if not params:
        raise ValueError("params: got none, wanted at least one trainable parameter")
    index = torch.as_tensor(index, device=labels.device).detach()
    index = index.to(torch.float64 if index.dtype == torch.float64 else torch.float32)
    devices = {value.device for value in params.values() if value.device.type == "cuda"}
    with torch.random.fork_rng([device.index for device in devices]), torch.enable_grad(), _uncached_casts():
        rewind = _rewinder(devices)
        problem = _Problem(
            logits=lambda values: _rewound(rewind, logits, values, batch),
            source_loss=lambda values: _rewound(rewind, source_loss, values),
            params={name: value.detach().requires_grad_() for name, value in params.items()},
            labels=labels,
            index=index.expand(labels.shape) if index.dim() == 0 else index,
            learning_rate=learning_rate,
            differentiable_attention=differentiable_attention,
            step=step,
            virtual_step=virtual_step,
            inner=inner,
        )
        gradient, value = ENGINES[engine](problem)
    return MetaGradient(gradient.detach().float(), value)


@dataclass(frozen=True)
class _Problem:
    """What an engine works on; the passes that the engines share."""

    logits: Callable[[Params], Tensor]
    source_loss: Callable[[Params], Tensor]
    params: Params
    labels: Tensor
    index: Tensor
    learning_rate: float
    differentiable_attention: Callable[[], AbstractContextManager[Any]]
    step: float
    virtual_step: bool
    inner: InnerLoss

    def log_probs(self, params: Params) -> Tensor:
        scores = self.logits(params)
        return torch.log_softmax(scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores, dim=1)

    def target_loss(self, index: Tensor) -> Tensor:
        return self.inner.value(self.log_probs(self.params), self.labels, index)

    def direction(self) -> tuple[Params, Tensor]:
        """v and the source loss it is the gradient of."""
        if not self.virtual_step:
            return self.source_gradient(self.params)
        return self.source_gradient(self.stepped(_gradient(self.target_loss(self.index), self.params)))

    def stepped(self, gradient: Params) -> Params:
        with torch.no_grad():
            moved = {name: value - self.learning_rate * gradient[name] for name, value in self.params.items()}
        return {name: value.requires_grad_() for name, value in moved.items()}

    def source_gradient(self, params: Params) -> tuple[Params, Tensor]:
        value = self.source_loss(params)
        return _gradient(value, params), value.detach()


def _forward(problem: _Problem) -> tuple[Tensor, Tensor]:
    direction, value = problem.direction()
    unit, norm = normalized(direction)
    plain = {name: param.detach() for name, param in problem.params.items()}
    with torch.no_grad(), problem.differentiable_attention():
        log_probs, tangents = torch.func.jvp(problem.log_probs, (plain,), (unit,))
    # the learning_rate first: norm and slopes may be so large that their product overflows
    slopes = tangents.gather(1, problem.labels.long().unsqueeze(1)).squeeze(1) * (-problem.learning_rate * norm)
    return problem.inner.mixed(log_probs, slopes, problem.labels, problem.index), value


def _taylor(problem: _Problem) -> tuple[Tensor, Tensor]:
    direction, value = problem.direction()
    unit, norm = normalized(direction)
    with torch.no_grad():
        ahead, behind = (
            problem.inner.slope(
                problem.log_probs({name: param + shift * unit[name] for name, param in problem.params.items()}),
                problem.labels,
                problem.index,
            )
            for shift in (problem.step, -problem.step)
        )
    return -problem.learning_rate * norm * (ahead - behind) / (2 * problem.step), value


def _second_order(problem: _Problem) -> tuple[Tensor, Tensor]:
    index = problem.index.clone().requires_grad_()
    with problem.differentiable_attention():
        target_loss = problem.target_loss(index)
    gradient = _gradient(target_loss, problem.params, create_graph=True)
    start = problem.stepped(gradient) if problem.virtual_step else problem.params
    direction, value = problem.source_gradient(start)
    product = sum((gradient[name] * direction[name]).sum() for name in gradient)
    return -problem.learning_rate * _gradient(product, {"index": index})["index"], value


ENGINES: dict[str, Callable[[_Problem], tuple[Tensor, Tensor]]] = {
    "forward": _forward,
    "taylor": _taylor,
    "second-order": _second_order,
}


def _gradient(loss: Tensor, params: Params, create_graph: bool = False) -> Params:
    """The gradient of a scalar, zero in the parameters it does not depend on."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(value) for name, value in params.items()}
    # A backward pass has the dtypes of its forward pass; autocast left on would round its float32 parts as well.
    with torch.autocast(loss.device.type, enabled=False):
        gradients = torch.autograd.grad(
            loss, list(params.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    return dict(zip(params, gradients, strict=True))


def normalized(direction: Params) -> tuple[Params, Tensor]:
    """The direction with norm 1, so that half-precision tangents of it do not underflow, and its norm.

    A direction of zeros stays one. Nothing here waits for the device.
    """
    norms = [torch.linalg.vector_norm(value.float() if value.itemsize < 4 else value) for value in direction.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.where(norm > 0, 1 / norm, 0.0)
    return {name: (value * scale).to(value.dtype) for name, value in direction.items()}, norm


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Autocast keeps the casts of all weights it meets until it ends, and with them the virtual step's parameters."""
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


def _rewound(rewind: Callable[[], None], function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    rewind()
    return function(*arguments)
