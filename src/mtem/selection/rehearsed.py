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
from mtem.schema import NUMBER
from mtem.selection.accuracy_estimate import Estimate
from mtem.selection.left_out import LeftOut, from_tensors
from mtem.tensors import read_tensors

SOURCE_ONLY = "source-only"
RECORD, LEFT_OUT = "rehearsal.json", "left-out.safetensors"
# The spread of estimate errors over domains before any was seen: a deviation of 2 points, worth two domains.
ASSUMED_ERROR, ASSUMED_DOMAINS = 0.02, 2
_BY_DOMAIN: dict[Any, Any] = {str: NUMBER}
_ADVICE: dict[Any, Any] = {
    "method": str, "settings": dict, "adapt": bool, "gains": _BY_DOMAIN, "mean": NUMBER, "low": (*NUMBER, None),
    "high": (*NUMBER, None), "score": NUMBER, "accuracy_before": _BY_DOMAIN, "accuracy_after": _BY_DOMAIN,
    "errors_before": _BY_DOMAIN, "errors_after": _BY_DOMAIN, "temperature_before": NUMBER, "temperature_after": NUMBER,
    "shares": [[NUMBER]], "confidence": [NUMBER],
}  # fmt: skip
_ENTRY: dict[Any, Any] = {"sha256": (str, None), "texts?": (str, None), "domain?": (str, None)}
# An unfinished rehearsal, and a finished one, as far as what reads them depends on it.
UNFINISHED: dict[Any, Any] = {"status": str, "data": [_ENTRY], "resolved?": {str: dict}}
FINISHED: dict[Any, Any] = {
    **UNFINISHED, "model": str, "preset": str, "classes": [str], "settings": dict, "advice": {str: _ADVICE}, "recommended": str,
    "why": str, "rehearsed": [str], "left_out": [{"kind": str, "name": str}], "metric": str, "notes": [str],
    "trials": [{
        "method": str, "domain": str, "rare": str, "after": (*NUMBER, None), "before": NUMBER, "last": NUMBER, "best": NUMBER,
        "by_infomax": NUMBER,
    }],
}  # fmt: skip
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
    accuracy_before, accuracy_after
        True accuracy of the source model and of the adapted one, by domain.
    errors_before, errors_after
        Accuracy estimated without labels less the true one, by domain.
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
    accuracy_before: dict[str, float]
    accuracy_after: dict[str, float]
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
        again = "rehearse again"
        record = read_json(path / RECORD, {"status": str}, again)
        if record["status"] != "done":
            raise RequestError(f"{path}: this rehearsal is not finished; finish it with 'mtem rehearse ... --resume'")
        record = read_json(path / RECORD, FINISHED, again)
        wrong = [name for name in record["advice"] if not _is_whole(record, name)]
        if wrong or record["recommended"] not in {SOURCE_ONLY, *record["advice"]}:
            raise RequestError(f"{path / RECORD}: is damaged (advice for {(wrong or [record['recommended']])[0]}); {again}")
        try:
            return cls(record, from_tensors(read_tensors(path / LEFT_OUT), record["left_out"]), path)
        except RequestError as error:
            raise RequestError(f"{error}; {again}") from error
        except ValueError as error:
            raise RequestError(f"{path / LEFT_OUT}: is damaged ({error}); {again}") from error

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
        return None if found is None else Advice(**{field.name: found[field.name] for field in dataclasses.fields(Advice)})

    def left_out(self) -> list[LeftOut]:
        """Return logits of the source models for the domains that they were trained without."""
        return self._left_out

    def check(self, **wanted: Any) -> None:
        """Refuse a rehearsal with another model, another preset or other classes."""
        for name, other in wanted.items():
            if self.record[name] != other:
                raise RequestError(
                    f"{self.path or 'rehearsal'}: {name} was {self.record[name]} there and is {other} here; rehearse again"
                )


def _is_whole(record: Mapping[str, Any], method: str) -> bool:
    """Return whether the advice for a method has all classes and domains, and the trials that it came from."""
    advice, domains = record["advice"][method], set(record["rehearsed"])
    trials = [trial for trial in record["trials"] if trial["method"] == method and trial["after"] is not None]
    gains = set(advice["gains"]) if advice["adapt"] else {trial["domain"] for trial in trials if not trial["rare"]}
    return (
        [len(row) for row in advice["shares"]] == 2 * [len(record["classes"])]
        and len(advice["confidence"]) == 2
        and min(advice["temperature_before"], advice["temperature_after"]) > 0
        and set(advice["errors_after"]) <= set(advice["accuracy_after"])
        and (method == SOURCE_ONLY or (bool(trials) and domains <= gains))
    )


def correct_estimate(estimate: Estimate, accuracies: Mapping[str, float], errors: Mapping[str, float]) -> Estimate:
    r"""Return an accuracy estimate that has learned from the rehearsed domains, with an interval sized by its errors there.

    Parameters
    ----------
    estimate
        Of the target, without labels.
    accuracies, errors
        By rehearsed domain: the true accuracy :math:`a_d`, and the error of the same label-free estimate.

    Notes
    -----
    The estimate is halfway between the label-free one and the mean accuracy in the D domains. The label-free one knows the target
    but is off by a different amount in every domain; the mean knows nothing of the target but has no such error. The errors
    :math:`e_d` of this mixture are seen by giving each domain the mean of the others. The interval is Student's with
    :math:`n = 2 + D` degrees of freedom and scale

    .. math:: s \sqrt{1 + 1/D}, \qquad s^2 = \big(2 \cdot 0.02^2 + \sum_d e_d^2\big) / n,

    as if two domains with errors of 2 points had been seen before: two or three errors alone say little about their spread.
    """
    domains = [name for name in accuracies if name in errors]
    if not domains:
        return estimate
    known = np.array([accuracies[name] for name in domains])
    label_free = known + np.array([errors[name] for name in domains])
    count = len(domains)
    if count > 1:
        others = (known.sum() - known) / (count - 1)
        wrong = (label_free + others) / 2 - known
    else:
        wrong = label_free - known
    freedom = ASSUMED_DOMAINS + count
    variance = (ASSUMED_DOMAINS * ASSUMED_ERROR**2 + float(np.square(wrong).sum())) / freedom
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance * (1 + 1 / count))
    accuracy = (estimate.accuracy + float(known.mean())) / 2
    return dataclasses.replace(
        estimate, accuracy=accuracy, low=max(0.0, accuracy - half), high=min(1.0, accuracy + half), left_out=count,
        method=f"{estimate.method}, halfway to the rehearsed accuracy",
        domain_error=math.sqrt(float(np.square(wrong).mean())),
        notes=(
            f"halfway between {estimate.accuracy:.3f}, estimated by confidence, and {known.mean():.3f}, the accuracy in "
            f"{count} rehearsed domain{'s' if count > 1 else ''}; there such estimates were off by {shown(wrong)}",
        ),
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
