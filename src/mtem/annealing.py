r"""Annealing sampling (Eq. 15): a temperature that falls during training, and pseudo labels sampled at that temperature."""

import math

import torch
from torch import Tensor

from mtem.capture import draws


def temperature(step: float, total: float, temperature_start: float, temperature_end: float, steepness: float) -> float:
    r"""Compute the temperature :math:`\kappa_t` of a step.

    .. math::
        \kappa_t = \kappa_{min} + (\kappa_{max} - \kappa_{min}) \,
        \frac{\sigma(s - 2s\,t/T) - \sigma(-s)}{\sigma(s) - \sigma(-s)}, \qquad \sigma(x) = \frac{1}{1 + e^{-x}}

    Parameters
    ----------
    step : float
        :math:`t`, counted from 0.
    total : float
        :math:`T_{max}`. With 0 every step is past the end.
    temperature_start : float
        :math:`\kappa_{max}`, the temperature at step 0.
    temperature_end : float
        :math:`\kappa_{min}`, the temperature from step ``total`` on.
    steepness : float
        :math:`s \geq 0`. With 0 the temperature falls along a straight line, with a large value in one step half-way.

    Returns
    -------
    float
        The temperature, between ``temperature_end`` and ``temperature_start``.

    Raises
    ------
    ValueError
        If a value is negative or the temperature would rise.

    Notes
    -----
    The paper prints Eq. 15 as :math:`\kappa_{max} - (\kappa_{max} - \kappa_{min})\,\sigma(s - 2st/T)`. Its footnote
    contradicts its text: with the :math:`\sigma(x) = 1/(1 + e^{x})` of the footnote's formula the temperature falls, as
    intended; the footnote's words and the text (near 1 at s, near 0 at -s) describe the usual sigmoid, with which it
    would rise. Here the temperature falls. The quotient makes both ends exact for every s.
    """
    if not 0 <= temperature_end <= temperature_start:
        raise ValueError(
            "expected temperature_start >= temperature_end >= 0, "
            f"got temperature_start {temperature_start} and temperature_end {temperature_end}"
        )
    if steepness < 0 or step < 0 or total < 0:
        raise ValueError(f"expected no negative values, got step {step}, total {total} and steepness {steepness}")
    if step >= total:
        return float(temperature_end)
    remaining = 1.0 - 2.0 * step / total
    # In terms of tanh, since sigmoid(x) - 1/2 = tanh(x/2) / 2, the quotient is free of cancellation.
    scaled = math.tanh(steepness / 2 * remaining) / math.tanh(steepness / 2) if steepness > 1e-300 else remaining
    share = (1.0 + scaled) / 2.0
    return min(max(temperature_start * share + temperature_end * (1.0 - share), float(temperature_end)), float(temperature_start))


@torch.no_grad()
def sample_labels(
    logits: Tensor, temperature: float | Tensor, generator: torch.Generator | None = None, greedy: bool = False
) -> Tensor:
    r"""Sample a pseudo label for each row: :math:`\tilde{y}_i \sim \mathrm{softmax}(score_i / \kappa)`.

    Parameters
    ----------
    logits : Tensor
        The model's logits or log-probabilities ``[N, K]`` (the paper's score).
    temperature : float or Tensor
        :math:`\kappa \geq 0`. At 0 the label is the class with the highest logit. A tensor without axes, on the device of the
        logits, is not checked.
    generator : torch.Generator, optional
        A generator on the CPU; PyTorch's default CPU generator if not given.
    greedy : bool, default False
        Take the class with the highest logit at any temperature. Nothing is drawn.

    Returns
    -------
    Tensor
        Classes, int64 ``[N]`` on the device of the logits, without gradient. A class of probability 0 is never drawn.

    Raises
    ------
    ValueError
        If the logits have the wrong shape, the temperature is negative, or the generator is not on the CPU.

    Notes
    -----
    One uniform number per row is drawn on the CPU, in float64, and the cumulative distribution is inverted on the device
    of the logits. So a run draws the same labels on every device, without a synchronisation.
    """
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: expected shape [N, K] with K >= 1, got {list(logits.shape)}")
    if not isinstance(temperature, Tensor) and not temperature >= 0:
        raise ValueError(f"temperature: expected a number >= 0, got {temperature}")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"generator: expected one on the cpu, got one on {generator.device}")
    if greedy or (not isinstance(temperature, Tensor) and temperature == 0):
        return logits.argmax(dim=1)
    # Apple's devices have no float64.
    precision = torch.float32 if logits.device.type == "mps" else torch.float64
    uniform = draws(lambda: torch.rand(logits.shape[0], 1, dtype=torch.float64, generator=generator).to(precision), logits.device)
    precise = logits.to(precision)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(precision).clamp_min(torch.finfo(torch.float32).tiny)
    # The highest logit is subtracted before the division, so that a tiny temperature cannot overflow.
    weights = torch.softmax((precise - precise.amax(dim=1, keepdim=True)) / temperature, dim=1)
    cumulative = weights.cumsum(dim=1)
    passed = cumulative <= uniform * cumulative[:, -1:]
    return passed.sum(dim=1).clamp(max=logits.shape[1] - 1)
