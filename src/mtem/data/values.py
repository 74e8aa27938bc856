"""Cells of a table as text, whichever library wrote them: Python, NumPy, pandas or Arrow."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty by the rules of Python, NumPy or pandas."""
    if isinstance(value, str):
        return False
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and math.isnan(value)


def text_of(value: Any) -> str:
    """Return the text in a cell, "" if the cell is empty or blank.

    Raises
    ------
    TypeError
        If the cell holds no text, for example a list.
    UnicodeDecodeError
        If the cell holds bytes that are not UTF-8.
    """
    if is_missing(value):
        return ""
    if isinstance(value, bytes):
        value = value.decode()
    elif not isinstance(value, str) and isinstance(value, (bool, numbers.Number, np.generic)):
        value = str(value)
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got a {type(value).__name__}")
    text = value.replace("\0", "")
    return encodable(text) if text.strip() else ""


def encodable(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, which JSON can express but UTF-8 and Arrow cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
