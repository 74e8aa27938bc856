"""Line plots as self-contained SVG strings: for a page in a browser, a README or a file, with nothing to install."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, without their yellow, which is lost on white: told apart by colour-blind eyes too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
# Corners of the markers around (0, 0); None is a disc. One more than the colours, so that pairs repeat late.
MARKERS: tuple[tuple[tuple[float, float], ...] | None, ...] = (
    None,
    ((-3.4, -3.4), (3.4, -3.4), (3.4, 3.4), (-3.4, 3.4)),
    ((0, -4.6), (4.3, 3.2), (-4.3, 3.2)),
    ((0, -4.9), (4.9, 0), (0, 4.9), (-4.9, 0)),
    ((0, 4.6), (4.3, -3.2), (-4.3, -3.2)),
    ((-1.4, -4.4), (1.4, -4.4), (1.4, -1.4), (4.4, -1.4), (4.4, 1.4), (1.4, 1.4), (1.4, 4.4), (-1.4, 4.4), (-1.4, 1.4),
     (-4.4, 1.4), (-4.4, -1.4), (-1.4, -1.4)),
    ((-3.4, 0), (3.8, -4.2), (3.8, 4.2)),
    ((3.4, 0), (-3.8, -4.2), (-3.8, 4.2)),
)  # fmt: skip
MOST_MARKERS = 12  # per line: more of them hide it
TICKS = 6  # about so many per axis
FONT = 12
DASHES = ' stroke-dasharray="6 4"'
CHARACTER = 0.56 * FONT  # about the width of a character: nothing measures text here


@dataclass(frozen=True)
class Series:
    """One line: its points in order, and a band around it if ``low`` and ``high`` are given."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


def line_plot(
    series: Sequence[Series],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    width: int = 560,
    height: int = 380,
) -> str:
    """An SVG document. A point that cannot be drawn (None, not finite, not positive on a logarithmic axis) leaves a gap.

    ``from_zero``: the vertical axis begins at zero, so that heights can be compared by eye; without it, near the lowest value.
    """
    shown = [_points(each, log_x, log_y) for each in series]
    xs = [x for points in shown for x, *_ in points]
    ys = [value for points in shown for _, *values in points for value in values if math.isfinite(value)]
    x_axis, y_axis = _Axis(xs, log_x, tight=True), _Axis([*ys, 0.0] if from_zero and ys and not log_y else ys, log_y)

    heading = textwrap.wrap(title, max(10, int((width - 24) / (1.12 * CHARACTER))))
    legend = list(_legend(series, width - 24))
    rows = 1 + max((row for row, *_ in legend), default=-1)
    left = 16 + (20 if y_label else 0) + CHARACTER * max((len(text) for _, text in y_axis.ticks), default=1)
    right, top = width - 18.0, 16.0 + 18 * len(heading)
    bottom = height - 30.0 - (18 if x_label else 0) - 19 * rows

    def at_x(x: float) -> float:
        return left + (right - left) * x_axis.share(x)

    def at_y(y: float) -> float:
        return bottom - (bottom - top) * y_axis.share(y)

    parts = [_opening(width, height), f"<title>{escape(title)}</title>"]
    for k, line in enumerate(heading):
        parts.append(_text(line, width / 2, 20 + 18 * k, 'text-anchor="middle" font-size="14" font-weight="bold"'))
    for y, text in y_axis.ticks:
        parts.append(_line(left, at_y(y), right, at_y(y), "#e4e4e4"))
        parts.append(_text(text, left - 7, at_y(y) + 4, 'text-anchor="end"'))
    for x, text in x_axis.ticks:
        parts.append(_line(at_x(x), top, at_x(x), bottom, "#e4e4e4"))
        parts.append(_text(text, at_x(x), bottom + 17, 'text-anchor="middle"'))
    parts.append(_line(left, top, left, bottom, "#777777"))
    parts.append(_line(left, bottom, right, bottom, "#777777"))
    if x_label:
        parts.append(_text(x_label, (left + right) / 2, bottom + 36, 'text-anchor="middle"'))
    if y_label:
        middle = (top + bottom) / 2
        parts.append(_text(y_label, 18, middle, f'text-anchor="middle" transform="rotate(-90 18 {_number(middle)})"'))
    if not any(shown):
        parts.append(_text("no data", (left + right) / 2, (top + bottom) / 2, 'text-anchor="middle" fill="#777777"'))
    parts += [_band(points, k, at_x, at_y) for k, points in enumerate(shown)]  # under all the lines
    parts += [_curve(points, k, series[k].dashed, at_x, at_y) for k, points in enumerate(shown)]
    for k, (row, offset, name) in enumerate(legend):
        x, y = 12 + offset, height - 19 * (rows - row) + 6
        parts.append(_line(x, y, x + 26, y, _colour(k), "2", series[k].dashed) + _marker(k, x + 13, y))
        parts.append(_text(name, x + 32, y + 4))
    return "\n".join([*(part for part in parts if part), "</svg>"]) + "\n"


def side_by_side(*plots: str) -> str:
    """One SVG document with the given ones from left to right."""
    sizes = []
    for plot in plots:
        found = re.match(r'<svg [^>]*?width="(\d+)" height="(\d+)"', plot)
        if not found:
            raise ValueError(f"an SVG document of line_plot is wanted, got {plot[:40]!r}")
        sizes.append((int(found[1]), int(found[2])))
    parts = [_opening(sum(size[0] for size in sizes), max((size[1] for size in sizes), default=0))]
    offset = 0
    for plot, size in zip(plots, sizes, strict=True):
        parts.append(plot.strip().replace("<svg ", f'<svg x="{offset}" ', 1))
        offset += size[0]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _opening(width: int, height: int) -> str:
    """The root element, and a white ground: a page in dark mode shows through otherwise."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="{FONT}" fill="#222222">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )


class _Axis:
    """The range of an axis, its ticks with their texts, and where in the range a value lies."""

    def __init__(self, values: Sequence[float], log: bool, tight: bool = False) -> None:
        self.log = log
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if high - low <= 1e-12 * abs(high):
            low, high = (low / 2, high * 2) if log else (low - abs(low or 1) / 2, high + abs(high or 1) / 2)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) if log else range(0)
        if len(powers) > 3:
            every = -(-len(powers) // (TICKS + 2))
            ticks = [(10.0**power, _power(power)) for power in powers if power % every == 0]
        elif log:
            ticks = [(lead * 10.0**power, _plain(lead * 10.0**power)) for power in powers for lead in (1, 2, 5)]
        else:
            ticks = _linear_ticks(low, high)
        if log and sum(low <= value <= high for value, _ in ticks) < 3:
            ticks = _linear_ticks(low, high)  # within an octave or two: 1-2-5 would leave it bare
            ticks = [tick for tick in ticks if tick[0] > 0]
        if not tight and not log:
            low, high = min(low, ticks[0][0]), max(high, ticks[-1][0])
        edge = 0.03 if tight else 0.04 if log else 0.0
        self.low, self.high = self._scaled(low), self._scaled(high)
        spread = self.high - self.low
        self.low, self.high = self.low - edge * spread, self.high + edge * spread
        self.ticks = [tick for tick in ticks if -1e-9 <= self.share(tick[0]) <= 1 + 1e-9]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def share(self, value: float) -> float:
        return (self._scaled(value) - self.low) / (self.high - self.low)


def _linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Multiples of 1, 2 or 5 times a power of ten, the first at or under ``low``, the last at or over ``high``."""
    rough = (high - low) / (TICKS - 1)
    power = math.floor(math.log10(rough))
    step = min((lead * 10.0**power for lead in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [round(k * step, decimals) + 0.0 for k in range(first, last + 1)]
    small = decimals > 4 or max(map(abs, values)) >= 1e7
    return [(value, f"{value:.3g}" if small else f"{value:,.{decimals}f}") for value in values]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e7 else f"{value:.3g}"


def _power(power: int) -> str:
    return {0: "1", 1: "10"}.get(power, "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")))


Scale = Callable[[float], float]
Point = tuple[float, float, float, float]  # x, y, low, high; NaN where there is nothing


def _points(series: Series, log_x: bool, log_y: bool) -> list[Point]:
    """Points with x and at least one of y and the band; what cannot be drawn is NaN."""

    def usable(value: float | None, log: bool) -> float:
        ok = value is not None and math.isfinite(value) and (value > 0 or not log)
        return float(value) if ok else math.nan  # type: ignore[arg-type]

    bare = [None] * len(series.xs)
    columns = (series.ys, bare if series.low is None else series.low, bare if series.high is None else series.high)
    rows = [
        (usable(x, log_x), *(usable(value, log_y) for value in values)) for x, *values in zip(series.xs, *columns, strict=True)
    ]
    return [row for row in rows if not math.isnan(row[0])] if any(map(_drawn, rows)) else []


def _drawn(point: Sequence[float]) -> bool:
    return not math.isnan(point[0]) and any(not math.isnan(value) for value in point[1:])


def _pieces(points: Sequence[Point], whole: Callable[[Point], bool]) -> Iterator[list[Point]]:
    """Stretches of consecutive whole points."""
    piece: list[Point] = []
    for point in points:
        if whole(point):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _band(points: Sequence[Point], number: int, at_x: Scale, at_y: Scale) -> str:
    parts = []
    for piece in _pieces(points, lambda point: not math.isnan(point[2] + point[3])):
        upper = [(at_x(x), at_y(high)) for x, _, _, high in piece]
        lower = [(at_x(x), at_y(low)) for x, _, low, _ in reversed(piece)]
        parts.append(f'<polygon points="{_corners(upper + lower)}" fill="{_colour(number)}" fill-opacity="0.15"/>')
    return "\n".join(parts)


def _curve(points: Sequence[Point], number: int, dashed: bool, at_x: Scale, at_y: Scale) -> str:
    pieces = [[(at_x(x), at_y(y)) for x, y, *_ in piece] for piece in _pieces(points, lambda point: not math.isnan(point[1]))]
    style = f'fill="none" stroke="{_colour(number)}" stroke-width="2" stroke-linejoin="round"{DASHES if dashed else ""}'
    parts = [f'<polyline points="{_corners(piece)}" {style}/>' for piece in pieces if len(piece) > 1]
    every = max(1, -(-sum(map(len, pieces)) // MOST_MARKERS))
    count = -(number * every // 3)  # lines that run together show different markers: each begins to count elsewhere
    for piece in pieces:
        for spot in piece:
            if count % every == 0 or len(piece) == 1:
                parts.append(_marker(number, *spot))
            count += 1
    return "\n".join(parts)


def _legend(series: Sequence[Series], room: float) -> Iterator[tuple[int, float, str]]:
    """Row, offset and text of each name, as many in a row as fit."""
    row, offset = 0, 0.0
    for each in series:
        longest = max(8, int((room - 46) / CHARACTER))
        name = each.name if len(each.name) <= longest else each.name[: longest - 1] + "…"
        taken = 46 + CHARACTER * len(name)
        if offset and offset + taken > room:
            row, offset = row + 1, 0.0
        yield row, offset, name
        offset += taken


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _marker(number: int, x: float, y: float) -> str:
    corners = MARKERS[number % len(MARKERS)]
    style = f'fill="{_colour(number)}" stroke="#ffffff" stroke-width="0.8"'
    if corners is None:
        return f'<circle cx="{_number(x)}" cy="{_number(y)}" r="3.8" {style}/>'
    return f'<polygon points="{_corners([(x + dx, y + dy) for dx, dy in corners])}" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: str = "1", dashed: bool = False) -> str:
    ends = " ".join(f'{name}="{_number(value)}"' for name, value in zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True))
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{DASHES if dashed else ""}/>'


def _text(text: str, x: float, y: float, style: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}"{" " if style else ""}{style}>{escape(text)}</text>'


def _corners(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.1f}"
