"""Settings: typed dataclass fields that carry their meaning, so that help, checks and records are written once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from mtem.errors import RequestError

# A setting's name before version 0.2.0 -> its name now.
RENAMED = {
    "clip": "max_grad_norm",
    "coldest": "temperature_end",
    "corruption": "mask_ratio",
    "discriminator_rate": "discriminator_learning_rate_ratio",
    "head_rate": "head_learning_rate_ratio",
    "hottest": "temperature_start",
    "index_rate": "index_learning_rate",
    "pieces": "source_microbatches",
    "prior": "target_class_prior",
    "rate": "learning_rate",
    "source_rate": "source_learning_rate",
    "target_head_rate": "target_head_learning_rate_ratio",
    "teacher": "ema_decay",
    "virtual_rate": "virtual_learning_rate",
    "warmup": "warmup_ratio",
    "weight_rate": "weight_learning_rate",
}


def setting(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field with its meaning and the values it may take."""
    extra = {"help": help, "choices": tuple(choices) if choices else None, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=extra)


def names(*kinds: type) -> list[str]:
    return [field.name for kind in kinds for field in dataclasses.fields(kind)]


def build(kinds: Mapping[str, type], values: Mapping[str, Any]) -> dict[str, Any]:
    """One instance of every settings class from one flat mapping; text is parsed, unknown names and bad values refused."""
    known = {field.name: (part, field) for part, kind in kinds.items() for field in dataclasses.fields(kind)}
    chosen: dict[str, dict[str, Any]] = {part: {} for part in kinds}
    for name, value in values.items():
        if name not in known and RENAMED.get(name) in known:
            raise RequestError(f"unknown setting '{name}': it is called '{RENAMED[name]}' since version 0.2.0")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'? There are" if near else "there are"
            raise RequestError(f"unknown setting '{name}': {hint} {', '.join(sorted(known))}")
        part, field = known[name]
        chosen[part][name] = _checked(field, typing.get_type_hints(kinds[part])[name], value)
    return {part: kind(**chosen[part]) for part, kind in kinds.items()}


def record(*instances: Any) -> dict[str, Any]:
    """All settings as one flat mapping, for the run's record."""
    return {key: value for instance in instances for key, value in dataclasses.asdict(instance).items()}


def changed(*instances: Any) -> dict[str, Any]:
    """Those settings that are not at their defaults."""
    fields = ((instance, field) for instance in instances for field in dataclasses.fields(instance))
    return {field.name: getattr(one, field.name) for one, field in fields if getattr(one, field.name) != field.default}


def describe(kind: type) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of every field."""
    rows = []
    for field in dataclasses.fields(kind):
        choices = field.metadata.get("choices")
        meaning = field.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
        rows.append((field.name, str(field.default), meaning))
    return rows


def _checked(field: dataclasses.Field[Any], kind: Any, value: Any) -> Any:
    value = _parsed(field.name, kind, value)
    choices, low, high = (field.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value is not None and value not in choices:
        raise RequestError(f"setting {field.name}={value}: it must be one of {', '.join(map(str, choices))}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = (-math.inf if low is None else low), (math.inf if high is None else high)
        if not math.isfinite(value) or not least <= value <= most:
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"setting {field.name}={value}: it must be {bounds if low is not None else 'a finite number'}")
    return value


def _parsed(name: str, kind: Any, value: Any) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and type(None) in options):
        if type(None) in options:
            return None
        raise RequestError(f"setting {name} may not be none")
    if isinstance(value, str) and str not in options:
        text = value.strip().lower()
        if bool in options and text in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text in ("true", "yes", "on", "1")
        for number in (int, float):
            if number in options or (number is int and float in options):
                try:
                    parsed = number(text)
                    return parsed if number in options else float(parsed)
                except (ValueError, OverflowError):
                    continue
        raise RequestError(f"setting {name}={value}: a {_named(options)} is wanted")
    if bool in options and isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's whole numbers are not Python's
    if float in options and isinstance(value, int) and not isinstance(value, bool) and int not in options:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, tuple(option for option in options if option is not type(None))):
        raise RequestError(f"setting {name}={value!r}: a {_named(options)} is wanted")
    return value


def _named(options: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "whole number", float: "number", str: "word"}
    return " or ".join(words.get(option, "none") for option in options)
