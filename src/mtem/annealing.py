r"""Annealing sampling (Eq. 15): a temperature that falls during training, and pseudo labels drawn at it."""

import math

import torch
from torch import Tensor


def temperature(step: float, total: float, temperature_start: float, temperature_end: float, steepness: float) -> float:
    r"""The temperature :math:`\kappa_t` of a step: ``temperature_start`` at step 0, ``temperature_end`` from step ``total`` on.

    .. math::
        \kappa_t = \kappa_{min} + (\kappa_{max} - \kappa_{min}) \,
        \frac{\sigma(s - 2s\,t/T) - \sigma(-s)}{\sigma(s) - \sigma(-s)}, \qquad \sigma(x) = \frac{1}{1 + e^{-x}}

    The paper prints Eq. 15 as :math:`\kappa_{max} - (\kappa_{max} - \kappa_{min})\,\sigma(s - 2st/T)`. Its footnote
    contradicts its text: with the :math:`\sigma(x) = 1/(1 + e^{x})` of the footnote's formula the temperature falls, as
    intended; the footnote's words and the text (near 1 at s, near 0 at -s) describe the usual sigmoid, with which it
    would rise. The falling reading is taken here. The quotient makes both ends exact for every s.

    Args:
        step: :math:`t`, from 0.
        total: :math:`T_{max}`; with 0 every step is past the end.
        temperature_start: :math:`\kappa_{max}`.
        temperature_end: :math:`\kappa_{min}`.
        steepness: :math:`s \geq 0`; 0 is a straight line, a large one a step half-way.
    """
    if not 0 <= temperature_end <= temperature_start:
        raise ValueError(
            f"temperatures: got temperature_start {temperature_start} and temperature_end {temperature_end}, wanted temperature_start >= temperature_end >= 0"
        )
    if steepness < 0 or step < 0 or total < 0:
        raise ValueError(f"got step {step}, total {total} and steepness {steepness}, wanted none of them negative")
    if step >= total:
        return float(temperature_end)
    remaining = 1.0 - 2.0 * step / total
    # In terms of tanh, since sigmoid(x) - 1/2 = tanh(x/2) / 2, the quotient is free of cancellation.
    scaled = math.tanh(steepness / 2 * remaining) / math.tanh(steepness / 2) if steepness > 1e-300 else remaining
    share = (1.0 + scaled) / 2.0
    return min(max(temperature_start * share + temperature_end * (1.0 - share), float(temperature_end)), float(temperature_start))


@torch.no_grad()
def sample_labels(scores: Tensor, temperature: float, generator: torch.Generator | None = None, greedy: bool = False) -> Tensor:
    r"""A pseudo label for each row: :math:`\tilde{y}_i \sim \mathrm{softmax}(score_i / \kappa)`.

    One uniform number per row is drawn on the CPU, in float64, and the cumulative distribution is inverted where the
    scores are. So a run draws the same labels on every device, and waits for none.

    Args:
        scores: the model's scores (logits or log-probabilities) ``[N, K]``.
        temperature: :math:`\kappa \geq 0`; at 0 the label is the class with the highest score.
        generator: a CPU generator; without one, PyTorch's default CPU generator.
        greedy: take the class with the highest score, whatever the temperature; nothing is drawn.

    Returns:
        Classes, int64 ``[N]`` on the scores' device, without gradient. A class of probability 0 is never drawn.
    """
    if scores.dim() != 2 or scores.shape[1] < 1:
        raise ValueError(f"scores: got shape {list(scores.shape)}, wanted [N, K] with K >= 1")
    if not temperature >= 0:
        raise ValueError(f"temperature: got {temperature}, wanted a number >= 0")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"generator: got one on {generator.device}, wanted one on the cpu")
    if greedy or temperature == 0:
        return scores.argmax(dim=1)
    draws = torch.rand(scores.shape[0], 1, dtype=torch.float64, generator=generator)
    # Apple's devices have no float64.
    precision = torch.float32 if scores.device.type == "mps" else torch.float64
    draws = draws.to(precision).to(scores.device, non_blocking=True)
    precise = scores.to(precision)
    # The highest score is taken off before the division, so that a tiny temperature cannot overflow.
    weights = torch.softmax((precise - precise.amax(dim=1, keepdim=True)) / temperature, dim=1)
    cumulative = weights.cumsum(dim=1)
    passed = cumulative <= draws * cumulative[:, -1:]
    return passed.sum(dim=1).clamp(max=scores.shape[1] - 1)
