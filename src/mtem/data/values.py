"""Cells of a table as text, whichever library wrote them: Python, NumPy, pandas or Arrow."""

from __future__ import annotations

import decimal
import math
import numbers
import sys
from typing import Any

import numpy as np


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty by the rules of Python, NumPy or pandas."""
    if isinstance(value, str):
        return False
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    # Whole numbers are never missing, and may be too large for a float.
    return isinstance(value, (numbers.Real, decimal.Decimal)) and not isinstance(value, numbers.Rational) and math.isnan(value)


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
        value = number_text(value)
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got a {type(value).__name__}")
    text = value.replace("\0", "")
    return encodable(text) if text.strip() else ""


def number_text(value: Any) -> str:
    """Return a number as text.

    Raises
    ------
    TypeError
        If it is a whole number of more digits than Python converts.
    """
    try:
        return str(value)
    except ValueError:
        raise TypeError(f"expected a text, got a number of more than {sys.get_int_max_str_digits()} digits") from None


def encodable(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, which JSON can express but UTF-8 and Arrow cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
