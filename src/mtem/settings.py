"""Settings: typed dataclass fields that carry their help text, so that help, checks and records are written once.

A settings class is a frozen dataclass whose fields are made with :func:`setting`. :func:`build` makes instances of several
settings classes from one flat mapping, such as the ``--set NAME=VALUE`` options of the command line.
"""

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

# A setting's earlier name -> its name now.
RENAMED = {
    "clip": "max_grad_norm",
    "coldest": "temperature_end",
    "corruption": "view_strength",
    "mask_ratio": "view_strength",
    "discriminator_rate": "discriminator_learning_rate_ratio",
    "head_rate": "head_learning_rate_ratio",
    "hottest": "temperature_start",
    "index_rate": "index_learning_rate",
    "pieces": "source_microbatches",
    "prior": "target_class_prior",
    "rate": "learning_rate",
    "source_rate": "source_learning_rate",
    "target_head_rate": "target_head_learning_rate_ratio",
    "strength": "view_strength",
    "strong": "view",
    "teacher": "ema_decay",
    "virtual_rate": "virtual_learning_rate",
    "warmup": "warmup_ratio",
    "weight_rate": "weight_learning_rate",
}

# No setting means anything beyond, and with larger numbers of steps or texts arithmetic overflows.
_LARGEST = 1e15

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def setting(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Make a dataclass field with its help text and the values it accepts.

    Parameters
    ----------
    default : object
        The default value.
    help : str
        What the setting means, for the command line's help.
    choices : iterable, optional
        The only values accepted.
    low, high : float, optional
        Bounds of a number, both included.

    Returns
    -------
    dataclasses.Field
        The field. It is typed as ``Any`` so that it can be assigned to a field of any type.
    """
    metadata = {"help": help, "choices": tuple(choices) if choices else None, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


def names(*settings_classes: type) -> list[str]:
    """Return the names of all settings of some settings classes."""
    return [field.name for cls in settings_classes for field in dataclasses.fields(cls)]


def build(settings_classes: Mapping[str, type], values: Mapping[str, Any]) -> dict[str, Any]:
    """Make one instance of every settings class from one flat mapping.

    Parameters
    ----------
    settings_classes : mapping
        Any key -> a settings class.
    values : mapping
        Setting name -> value. Text is parsed to the field's type. Settings that are not given have their defaults.

    Returns
    -------
    dict
        The keys of `settings_classes` -> an instance.

    Raises
    ------
    RequestError
        If a name is unknown or a value is not accepted.
    """
    known = {field.name: (key, field) for key, cls in settings_classes.items() for field in dataclasses.fields(cls)}
    accepted: dict[str, dict[str, Any]] = {key: {} for key in settings_classes}
    for name, value in values.items():
        if name not in known:
            raise RequestError(_unknown(name, known))
        key, field = known[name]
        accepted[key][name] = _check(field, _parse(name, typing.get_type_hints(settings_classes[key])[name], value))
    return {key: cls(**accepted[key]) for key, cls in settings_classes.items()}


def record(*instances: Any) -> dict[str, Any]:
    """Return all settings of some instances as one flat mapping, for the record of a run."""
    return {key: value for instance in instances for key, value in dataclasses.asdict(instance).items()}


def changed(*instances: Any) -> dict[str, Any]:
    """Return the settings of some instances that are not at their defaults, as one flat mapping."""
    fields = ((field, getattr(instance, field.name)) for instance in instances for field in dataclasses.fields(instance))
    return {field.name: value for field, value in fields if value != field.default}


def describe(settings_cls: type) -> list[tuple[str, str, str]]:
    """Return (name, default, help text) of every setting of a settings class."""
    rows = []
    for field in dataclasses.fields(settings_cls):
        choices = field.metadata.get("choices")
        meaning = field.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
        rows.append((field.name, str(field.default), meaning))
    return rows


def _unknown(name: str, known: Mapping[str, object]) -> str:
    """Return the error message for an unknown name, with the name that was probably meant."""
    if RENAMED.get(name) in known:
        return f"unknown setting '{name}': it is now called '{RENAMED[name]}'"
    similar = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{similar[0]}'? There are" if similar else "there are"
    return f"unknown setting '{_shown(name)}': {hint} {', '.join(sorted(known))}"


def _parse(name: str, annotation: Any, value: Any) -> Any:
    """Return the value in the field's type, parsed if it is text."""
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if is_union else (annotation,)
    error = RequestError(f"setting {name}={_shown(value)}: expected {_describe_type(options)}")
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and type(None) in options):
        if type(None) in options:
            return None
        raise error
    if isinstance(value, str) and str not in options:
        text = value.strip().lower()
        if bool in options and text in (*_TRUE, *_FALSE):
            return text in _TRUE
        for number in (int, float):
            if number in options or (number is int and float in options):
                try:
                    parsed = number(text)
                    return parsed if number in options else float(parsed)
                except (ValueError, OverflowError):
                    continue
        raise error
    if bool in options and isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # a NumPy integer is not an int
    if float in options and isinstance(value, int) and not isinstance(value, bool) and int not in options:
        try:
            return float(value)
        except OverflowError:
            raise RequestError(f"setting {name}={_shown(value)}: expected a number of at most 1e308") from None
    if isinstance(value, bool) or not isinstance(value, tuple(option for option in options if option is not type(None))):
        raise error
    return value


def _check(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value, if it is one of the field's choices and inside its bounds."""
    choices, low, high = (field.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value is not None and value not in choices:
        raise RequestError(f"setting {field.name}={_shown(value)}: expected one of {', '.join(map(str, choices))}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = (-math.inf if low is None else low), (_LARGEST if high is None else high)
        # Whole numbers beyond the range of floats can be compared with floats, but not converted.
        if value != value or not max(least, -_LARGEST) <= value <= most:
            bounds = f"a value of at least {low}" if high is None else f"a value between {low} and {high}"
            if low is None:
                bounds = "a finite number"
            if high is None and value == value and value > _LARGEST:
                bounds = f"a value of at most {_LARGEST:g}"
            raise RequestError(f"setting {field.name}={_shown(value)}: expected {bounds}")
    return value


def _shown(value: Any) -> str:
    """Return a value for a message, cut if it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # a whole number of more digits than Python converts
        text = "a number of thousands of digits"
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def _describe_type(options: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    return " or ".join(words.get(option, "none") for option in options)
