from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from mtem_paper.plots import COLOURS, MARKERS, Series, line_plot, side_by_side

SPACE = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SPACE}text")]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = [element.get("points", "") for element in parsed(svg).iter(f"{SPACE}polyline")]
    return [[tuple(map(float, point.split(","))) for point in points.split()] for points in found]


def test_values_lie_where_the_ticks_say():
    svg = line_plot([Series("a", [0, 1, 2, 3], [0.0, 10.0, 20.0, 30.0])], "title", "x", "y")
    labels = {text: place for text, place in zip(texts(svg), places(svg), strict=True)}
    (line,) = lines(svg)
    for value, (x, y) in zip(("0", "10", "20", "30"), line, strict=True):
        assert y == pytest.approx(labels[value][1] - 4, abs=0.2)  # the text's baseline is 4 under its tick
        assert x > labels["30"][0]
    assert [b[0] - a[0] for a, b in itertools.pairwise(line)] == pytest.approx([line[1][0] - line[0][0]] * 3, abs=0.2)


def places(svg: str) -> list[tuple[float, float]]:
    return [(float(element.get("x", 0)), float(element.get("y", 0))) for element in parsed(svg).iter(f"{SPACE}text")]


def test_a_power_law_is_straight_on_logarithmic_axes():
    steps = [1, 10, 100, 1000, 10_000]
    (line,) = lines(line_plot([Series("a", steps, [step**-0.5 for step in steps])], log_x=True, log_y=True))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(line)]
    assert slopes == pytest.approx([slopes[0]] * 4, rel=0.01)
    assert slopes[0] > 0  # downwards: y grows downwards in SVG


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.873, 0.935), (3, 2900), (-5e-7, 4e-7), (1e6, 3e6), (7.2, 7.4)])
def test_ticks_are_round_and_cover_the_values(low, high):
    svg = line_plot([Series("a", [0, 1], [low, high])])
    found = re.findall(r'text-anchor="end">([^<]*)<', svg)
    values = [float(text.replace(",", "")) for text in found]
    steps = np.diff(values)
    assert 4 <= len(values) <= 9
    assert len(set(found)) == len(found)
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-2)
    lead = steps[0] / 10 ** math.floor(math.log10(steps[0] * 1.0001))
    assert min(abs(lead - wanted) for wanted in (1, 2, 5)) < 0.02
    assert values[0] <= low + 1e-12 and values[-1] >= high - 1e-12


def test_from_zero():
    series = [Series("a", [1, 2], [90.0, 100.0])]
    assert "0" in texts(line_plot(series, from_zero=True))
    assert "0" not in texts(line_plot(series))
    line_plot([Series("a", [1, 2], [90.0, 100.0])], log_y=True, from_zero=True)  # no zero there: as without it


def test_what_cannot_be_drawn_leaves_a_gap():
    svg = line_plot([Series("a", [0, 1, 2, 3, 4], [1.0, 2.0, math.nan, 3.0, None])])
    assert [len(line) for line in lines(svg)] == [2]
    circles = [element for element in parsed(svg).iter(f"{SPACE}circle")]
    assert len(circles) == 4  # three points, the lonely one too, and the legend's
    assert "nan" not in svg and "inf" not in svg
    assert [len(line) for line in lines(line_plot([Series("a", [1, 2, 3, 4], [0.0, 1.0, 2.0, -1.0])], log_y=True))] == [2]


def test_nothing_to_draw_says_so():
    for series in ([], [Series("a", [], [])], [Series("a", [1.0], [math.inf])], [Series("a", [math.nan], [1.0])]):
        assert "no data" in texts(line_plot(series, "title", "x", "y"))
        assert "no data" in texts(line_plot(series, log_x=True, log_y=True))


def test_a_band_lies_between_its_edges():
    svg = line_plot([Series("a", [0, 1, 2], [1.0, 2.0, 3.0], [0.5, 1.5, None], [1.5, 2.5, 9.0])])
    band = next(element for element in parsed(svg).iter(f"{SPACE}polygon") if element.get("fill-opacity"))
    assert len(band.get("points", "").split()) == 4  # two points have both edges
    (line,) = lines(svg)
    corners = [tuple(map(float, point.split(","))) for point in band.get("points", "").split()]
    assert corners[0][1] < line[0][1] < corners[3][1]


def test_text_is_escaped_and_the_ground_is_white():
    svg = line_plot([Series("<b> & 'co'", [1, 2], [1, 2])], "x < y & z", "<x>", '"y"')
    assert {"<b> & 'co'", "x < y & z", "<x>", '"y"'} <= set(texts(svg))
    ground = parsed(svg).find(f"{SPACE}rect")
    assert ground is not None and ground.get("fill") == "#ffffff"
    assert "script" not in svg and "href" not in svg


def test_lines_differ_in_colour_and_marker_and_stay_apart_for_long():
    assert len({(COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]) for k in range(40)}) == 40
    svg = line_plot([Series(f"line {k}", [0, 1], [k, k + 1]) for k in range(20)], height=500)
    assert {f"line {k}" for k in range(20)} <= set(texts(svg))


def test_long_names_are_cut_and_long_titles_broken():
    svg = line_plot([Series("n" * 300, [0, 1], [0, 1])], "word " * 40, width=400)
    assert max(map(len, texts(svg))) < 70
    assert sum(text.startswith("word") for text in texts(svg)) > 1


def test_a_dashed_line_is_dashed_in_the_legend_too():
    assert line_plot([Series("a", [0, 1], [0, 1], dashed=True)]).count("stroke-dasharray") == 2
    assert "stroke-dasharray" not in line_plot([Series("a", [0, 1], [0, 1])])


def test_many_points_have_few_markers():
    svg = line_plot([Series("a", list(range(500)), list(range(500)))])
    assert len(list(parsed(svg).iter(f"{SPACE}circle"))) <= 14


def test_side_by_side():
    one, two = line_plot([], "one", width=300, height=200), line_plot([], "two", width=400, height=250)
    both = parsed(side_by_side(one, two))
    assert (both.get("width"), both.get("height")) == ("700", "250")
    assert [element.get("x") for element in both.findall(f"{SPACE}svg")] == ["0", "300"]
    assert {"one", "two"} <= set(texts(side_by_side(one, two)))
    parsed(side_by_side())
    with pytest.raises(ValueError, match="SVG document"):
        side_by_side("<html>")


def test_awkward_numbers_never_break_it():
    random = np.random.default_rng(0)
    for _ in range(300):
        size = int(random.integers(1, 6))
        scale = 10.0 ** random.integers(-12, 12)
        ys = random.choice([scale, -scale, 0.0, 0.9, 0.9 + 1e-15, math.nan, math.inf, 1e-300, scale * 1.0001], size=size)
        xs = random.choice([1.0, 2.0, scale, 0.0, -3.0], size=size)
        log_x, log_y, zero = random.random(3) < 0.5
        svg = line_plot(
            [Series("a", xs.tolist(), ys.tolist(), ys.tolist(), (2 * ys).tolist())], "t", "x", "y", log_x, log_y, zero
        )
        assert "nan" not in svg and "inf" not in svg
        assert len(texts(svg)) < 60
        for line in lines(svg):
            assert all(0 <= x <= 560 and 0 <= y <= 380 for x, y in line)
