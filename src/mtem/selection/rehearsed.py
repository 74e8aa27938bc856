"""What a rehearsal has found out, for the runs that use it: `rehearsal.json` and the logits beside it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from mtem.atomic import read_json
from mtem.errors import RequestError
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.left_out import LeftOut, from_tensors
from mtem.tensors import read_tensors

SOURCE_ONLY = "source-only"
RECORD, LEFT_OUT = "rehearsal.json", "left-out.safetensors"
# The spread of estimate errors over domains before any was seen: a deviation of 3 points, worth three domains.
ASSUMED_ERROR, ASSUMED_DOMAINS = 0.03, 3
OUTSIDE = 0.05  # how far shares and confidence may lie outside what was rehearsed before a warning


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a rehearsal advises for one method.

    Attributes
    ----------
    method
        Its name, or its file.
    settings
        Learning rate, passes, assumed class shares and the like, by name.
    adapt
        Whether to adapt at all; if not, the source model was at least as good.
    gains
        Score after less score before the adaptation, by domain.
    mean, low, high
        Mean gain, and its 95 % interval (None with one domain).
    score
        Mean score after the adaptation.
    errors_before, errors_after
        Estimated less true accuracy of the source model and of the adapted one, by domain.
    temperature_before, temperature_after
        With which the logits fit the labels of the rehearsed domains best.
    shares
        Smallest and largest predicted share of each class, by the source models on the rehearsed domains, [2][K].
    confidence
        Smallest and largest mean confidence of the source models on the rehearsed domains.
    """

    method: str
    settings: dict[str, Any]
    adapt: bool
    gains: dict[str, float]
    mean: float
    low: float | None
    high: float | None
    score: float
    errors_before: dict[str, float]
    errors_after: dict[str, float]
    temperature_before: float
    temperature_after: float
    shares: list[list[float]]
    confidence: list[float]


class Rehearsal:
    """The result of `mtem.rehearse`.

    Attributes
    ----------
    record
        The contents of rehearsal.json.
    path
        Its folder, if it was written.
    """

    def __init__(self, record: dict[str, Any], left_out: Sequence[LeftOut] = (), path: Path | None = None) -> None:
        self.record, self.path, self._left_out = record, path, list(left_out)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rehearsal:
        """Read a finished rehearsal.

        Raises
        ------
        RequestError
            If there is none, it is not finished, or its file is damaged.
        """
        path = Path(path)
        if not (path / RECORD).is_file():
            raise RequestError(f"{path}: holds no rehearsal ({RECORD}); give the --output folder of 'mtem rehearse'")
        record = read_json(path / RECORD)
        if not isinstance(record, dict) or "status" not in record:
            raise RequestError(f"{path / RECORD}: is not the record of a rehearsal; rehearse again")
        if record["status"] != "done":
            raise RequestError(f"{path}: this rehearsal is not finished; finish it with 'mtem rehearse ... --resume'")
        try:
            left_out = from_tensors(read_tensors(path / LEFT_OUT), record["left_out"])
            rehearsal = cls(record, left_out, path)
            rehearsal.advice(rehearsal.method)
        except Exception as error:  # safetensors has an error type of its own
            raise RequestError(f"{path}: is damaged ({type(error).__name__}: {error}); rehearse again") from error
        return rehearsal

    @property
    def method(self) -> str:
        """The recommended method; "source-only" if adapting gained nothing."""
        return str(self.record["recommended"])

    @property
    def why(self) -> str:
        """Why it is recommended, in one sentence."""
        return str(self.record["why"])

    @property
    def methods(self) -> list[str]:
        """The methods that were tried."""
        return [name for name in self.record["advice"] if name != SOURCE_ONLY]

    def advice(self, method: str) -> Advice | None:
        """Return the advice for a method; None if it was not tried."""
        found = self.record["advice"].get(method)
        return None if found is None else Advice(**found)

    def left_out(self) -> list[LeftOut]:
        """Return logits of the source models for the domains that they were trained without."""
        return self._left_out

    def check(self, model: str, classes: Sequence[str]) -> None:
        """Refuse a rehearsal with another model or other classes."""
        for name, own, other in (
            ("model", self.record["model"], model), ("classes", self.record["classes"], list(classes)),
        ):  # fmt: skip
            if own != other:
                raise RequestError(f"{self.path or 'rehearsal'}: its {name} is {own}, this run's is {other}; rehearse again")


def correct_estimate(estimate: Estimate, errors: Mapping[str, float]) -> Estimate:
    r"""Return the estimate less its usual error in rehearsed domains, with an interval sized by these errors.

    With the errors :math:`e_d` in D domains, the estimate is lowered by :math:`m = \sum_d e_d / (D + 1)` (shrunk towards none).
    The interval is Student's with :math:`n = 3 + D` degrees of freedom and scale

    .. math:: s \sqrt{1 + 1/D}, \qquad s^2 = \big(3 \cdot 0.03^2 + \sum_d (e_d - m)^2\big) / n,

    as if three domains with errors of 3 points had been seen before: two or three errors alone say little about their spread.
    """
    values = np.array(list(errors.values()))
    if not len(values):
        return estimate
    count = len(values)
    shift = float(values.sum() / (count + 1))
    freedom = ASSUMED_DOMAINS + count
    variance = (ASSUMED_DOMAINS * ASSUMED_ERROR**2 + float(np.square(values - shift).sum())) / freedom
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance * (1 + 1 / count))
    accuracy = min(1.0, max(0.0, estimate.accuracy - shift))
    return dataclasses.replace(
        estimate, accuracy=accuracy, low=max(0.0, accuracy - half), high=min(1.0, accuracy + half), left_out=count,
        method=f"{estimate.method}, corrected by a rehearsal", domain_error=math.sqrt(float(np.square(values).mean())),
        notes=(f"by itself it is {estimate.accuracy:.3f}; in {count} rehearsed domains it was off by {shown(values)}",),
    )  # fmt: skip


def shown(values: np.ndarray) -> str:
    """Return errors for a message."""
    return ", ".join(f"{value:+.3f}" for value in values)


def outside_warnings(
    advice: Advice, classes: Sequence[str], shares: np.ndarray, confidence: float, unit: str = "texts"
) -> list[str]:
    """Warn where the target is unlike every rehearsed domain, as the source model sees them.

    Parameters
    ----------
    advice
        With what was seen in the rehearsed domains.
    classes
        Names, [K].
    shares, confidence
        Class shares that the source model predicts on the target, [K], and its mean confidence there.
    unit
        What the examples are called.
    """
    lines = []
    low, high = advice.shares
    for name, least, value, most in zip(classes, low, shares, high, strict=True):
        if not least - OUTSIDE <= value <= most + OUTSIDE:
            lines.append(
                f"not rehearsed: the source model predicts {name!r} for {value:.1%} of the target {unit}, for {least:.1%} to "
                f"{most:.1%} in the rehearsed domains; choices and estimate may not hold here"
            )
            break  # of two classes, the other one says the same
    if not advice.confidence[0] - OUTSIDE <= confidence <= advice.confidence[1] + OUTSIDE:
        lines.append(
            f"not rehearsed: the source model's mean confidence is {confidence:.1%} on the target {unit}, "
            f"{advice.confidence[0]:.1%} to {advice.confidence[1]:.1%} in the rehearsed domains: the shift is of another size"
        )
    return lines
