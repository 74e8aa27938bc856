"""What stands in a cell of a table, whoever wrote it: Python, numpy, pandas or Arrow."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def is_missing(value: Any) -> bool:
    """Whether a cell is empty by the rules of Python, numpy or pandas."""
    if isinstance(value, str):
        return False
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and math.isnan(value)


def text_of(value: Any) -> str:
    """The text in a cell, "" where there is none or it is blank. TypeError for what is no text, UnicodeError for no UTF-8."""
    if is_missing(value):
        return ""
    if isinstance(value, bytes):
        value = value.decode()
    elif not isinstance(value, str) and isinstance(value, (bool, numbers.Number, np.generic)):
        value = str(value)
    if not isinstance(value, str):
        raise TypeError(f"is a {type(value).__name__}, not a text")
    text = value.replace("\0", "")
    return encodable(text) if text.strip() else ""


def encodable(text: str) -> str:
    """The text, with U+FFFD for halves of surrogate pairs: JSON can spell them, UTF-8 and Arrow cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
