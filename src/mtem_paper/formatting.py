"""Numbers and tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtem_paper.statistics import Difference

NOT_RUN = "Not run.\n"


def digits(value: float | None, places: int = 3, sign: bool = False) -> str:
    """Return a number in the paper's form, such as .937."""
    if value is None or not math.isfinite(value):
        return "—"
    text = f"{round(value, places) + 0.0:{'+' if sign else ''}.{places}f}"  # + 0.0: no negative zero
    return text.replace("0.", ".", 1) if text.lstrip("+-").startswith("0.") else text


def interval(ends: Sequence[float], places: int = 3, sign: bool = True) -> str:
    """Return an interval, such as [-.002, +.013]."""
    return f"[{', '.join(digits(end, places, sign) for end in ends)}]"


def difference(value: Difference | None) -> str:
    """Return a difference with its interval, marked ≈ if it is not clear."""
    if value is None:
        return "—"
    return f"{'' if value.clear else '≈ '}{digits(value.value, sign=True)} {interval((value.low, value.high))}"


def percent(value: float, places: int = 0) -> str:
    """Return a share in percent."""
    return f"{100 * value:.{places}f} %"


def blank_repeats(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows with their first cell empty where it repeats the one above."""
    return [["" if k and row[0] == rows[k - 1][0] else row[0], *row[1:]] for k, row in enumerate(rows)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, with columns of numbers aligned to the right; without rows, "Not run."."""
    if not rows:
        return NOT_RUN
    numbers = [all(row[k] in ("", "not run") or row[k][0] in "0123456789.+-*≈—" for row in rows) for k in range(len(header))]
    lines = ["| " + " | ".join(header) + " |", "|" + "".join("---:|" if right else "---|" for right in numbers)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bullets(lines: Sequence[str]) -> str:
    """Return a list."""
    return "".join(f"- {line}\n" for line in lines)


def picture(name: str, alt: str) -> str:
    """Return an image of docs/figures with its alternative text."""
    return f"![{alt}](figures/{name}.svg)\n"
