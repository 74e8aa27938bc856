"""What a JSON file that mtem has written must look like, so that a damaged or edited one is refused with its name and place."""

from __future__ import annotations

from typing import Any, TypeAlias

# A type; [schema] for a list; {"name": schema} for an object with at least these names ("name?" where it may be missing);
# {str: schema} for an object with any names; a tuple of these for one of them, in which None stands for null.
Schema: TypeAlias = Any

NUMBER = (int, float)
LARGEST = 2**63  # of the numbers that mtem writes
_NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def find_problem(value: Any, schema: Schema, where: str = "") -> str | None:
    """Return what is wrong with a value that was read from JSON, in a few words with its place, or None.

    Parameters
    ----------
    value
        What was read.
    schema
        What is expected, see `Schema`.
    where
        The place of the value in its file, as in ``data.source[0]``.
    """
    if isinstance(schema, dict):
        return _object_problem(value, schema, where)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return _unexpected(value, (list,), where)
        found = (find_problem(item, schema[0], f"{where}[{number}]") for number, item in enumerate(value))
        return next((problem for problem in found if problem), None)
    kinds = schema if isinstance(schema, tuple) else (schema,)
    if value is not None and (inner := [kind for kind in kinds if isinstance(kind, (dict, list))]):
        return next((None for kind in inner if find_problem(value, kind) is None), find_problem(value, inner[0], where))
    if value is None:
        return None if None in kinds else _unexpected(value, kinds, where)
    plain = tuple(kind for kind in kinds if kind is not None)
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        return _unexpected(value, kinds, where)
    if isinstance(value, (int, float)) and not abs(value) < LARGEST:
        return f"{where or 'the number'} is out of range"
    return None


def _object_problem(value: Any, schema: dict[Any, Schema], where: str) -> str | None:
    if not isinstance(value, dict):
        return _unexpected(value, (dict,), where)
    if str in schema:
        found = (find_problem(item, schema[str], _inside(where, name)) for name, item in value.items())
        return next((problem for problem in found if problem), None)
    for name, inner in schema.items():
        known = name.removesuffix("?")
        if known not in value:
            if name == known:
                return f"{_inside(where, known)} is missing"
        elif problem := find_problem(value[known], inner, _inside(where, known)):
            return problem
    return None


def _inside(where: str, name: str) -> str:
    return f"{where}.{name[:80]}" if where else name[:80]


def _unexpected(value: Any, kinds: tuple[Any, ...], where: str) -> str:
    kinds = tuple(type(kind) if isinstance(kind, (dict, list)) else kind for kind in kinds)
    names = ("null" if kind is None else _NAMES[kind] for kind in kinds if kind is not int or float not in kinds)
    expected = " or ".join(names)
    got = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    return f"{where + ': ' if where else ''}expected {expected}, got {got}"
