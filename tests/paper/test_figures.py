"""The figures: what they show, that they are the same every time, and what happens without matplotlib."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from mtem.errors import RequestError
from mtem_paper import figures
from mtem_paper.protocol import DATASETS
from tests.made_up import grid, make_cell

AMAZON, EVENTS = DATASETS["amazon"].targets, DATASETS["pheme"].targets


SPACE = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [text for element in ElementTree.fromstring(svg).iter(f"{SPACE}text") if (text := "".join(element.itertext()))]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of the data's lines: they are drawn 1.8 wide."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SPACE}g"):
        if group.get("id", "").startswith("line2d"):
            for path in group.findall(f"{SPACE}path"):
                if "stroke-width: 1.8" in path.get("style", ""):
                    found.append([(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.e]+) ([-\d.e]+)", path.get("d", ""))])
    return found


def drawn(*series, **options) -> str:
    return figures.draw([figures.Panel(series, "title", "x", "y", **options)])


def test_a_figure_is_the_same_every_time_and_names_no_date():
    first, second = (figures.entropy_figure() for _ in range(2))
    assert first == second and "<dc:date>" not in first and "Matplotlib" not in first
    assert ElementTree.fromstring(first).find(f"{SPACE}title").text == "Tsallis entropy of two classes"


def test_the_users_style_changes_nothing():
    import matplotlib

    before = figures.entropy_figure()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "axes.facecolor": "black"}):
        assert figures.entropy_figure() == before
        assert matplotlib.rcParams["lines.linewidth"] == 9


def test_text_is_text_and_escaped():
    svg = figures.draw([figures.Panel([figures.Series("<b> & 'co'", [1, 2], [1, 2])] * 2, "x < y & z", "<x>", '"y"')])
    assert {"<b> & 'co'", "x < y & z", "<x>", '"y"'} <= set(texts(svg))


def test_none_leaves_a_gap():
    whole = lines(drawn(figures.Series("a", [0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])))
    gap = drawn(figures.Series("a", [0, 1, 2, 3, 4], [1.0, 2.0, None, 3.0, 4.0]))
    assert [len(line) for line in whole] == [4] and len(lines(gap)[0]) == 4
    assert "nan" not in gap and re.search(r"M [^M]*L [^M]*\nM", gap)


def test_values_that_a_logarithmic_axis_cannot_show_are_left_out():
    (line,) = lines(drawn(figures.Series("a", [1, 10, 100, 1000], [0.0, 1.0, 10.0, -1.0]), log=True))
    assert len(line) == 2


def test_a_power_law_is_straight_on_logarithmic_axes():
    steps = [1, 10, 100, 1000]
    (line,) = lines(drawn(figures.Series("a", steps, [step**-0.5 for step in steps]), log=True))
    slopes = np.diff([y for _, y in line]) / np.diff([x for x, _ in line])
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-3) and slopes[0] > 0  # y grows downwards in SVG


def test_the_vertical_axis_can_start_at_zero():
    series = figures.Series("a", [1, 2], [90.0, 100.0])
    assert "0" in texts(drawn(series, from_zero=True)) and "0" not in texts(drawn(series))


def test_lines_differ_in_colour_and_marker():
    pairs = {(figures.COLOURS[k % len(figures.COLOURS)], figures.MARKERS[k % len(figures.MARKERS)]) for k in range(40)}
    assert len(pairs) == 40


def test_nothing_to_draw_says_so():
    for series in ([], [figures.Series("a", [], [])], [figures.Series("a", [1.0], [None])]):
        assert "no data" in texts(drawn(*series)) and "no data" in texts(drawn(*series, log=True))


def test_entropy_figure_has_a_curve_for_each_index():
    svg = figures.entropy_figure()
    assert sum(len(line) > 50 for line in lines(svg)) == len(figures.ENTROPY_INDEXES)
    assert {"ψ = 1 (Gibbs)", "ψ = 5", "probability of the first class", "entropy"} <= set(texts(svg))


def test_cost_figure_of_rows_and_of_none():
    engines = ("plain", "taylor", "second-order")
    rows = [{"engine": engine, "batch": size, "seconds": 1.0, "memory": 2**30} for size in (10, 20, 30) for engine in engines]
    del rows[-1]["seconds"], rows[-1]["memory"]  # out of memory
    svg = figures.cost_figure(rows)
    assert sorted(len(line) for line in lines(svg) if len(line) > 1)[-4:] == [3, 3, 3, 3]
    assert svg.count("stroke-dasharray") >= 2 and set(engines) <= set(texts(svg)) and {"milliseconds", "GiB"} <= set(texts(svg))
    apart = figures.cost_figure([{**row, "length": 128 + 128 * (k % 2)} for k, row in enumerate(rows)])
    assert "plain, length 256" in texts(apart)
    assert "no data" in texts(figures.cost_figure([]))


def test_trajectories_are_medians_over_runs():
    def history(top):
        return [{"step": step, "index_quantiles": [1.0, middle, 9.0]} for step, middle in ((0, 2.0), (10, top))]

    found = figures.over_histories("", [history(2.0), history(3.0), history(9.0)], lambda point: point["index_quantiles"][1])
    assert (found.ys[0], found.ys[-1]) == (2.0, 3.0) and (found.low[-1], found.high[-1]) == (2.0, 9.0)
    assert len(found.ys) == len(figures.GRID)
    assert figures.over_histories("", [], lambda point: point).ys == [None] * len(figures.GRID)
    svg = figures.trajectory_figure(grid({"mtem": 0.9}))
    assert "half of the texts are below" in texts(svg) and "no data" not in texts(svg)
    assert texts(figures.trajectory_figure([make_cell("out")])).count("no data") == 2


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def missing(name, *arguments):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RequestError, match=re.escape("pip install 'mtem[figures]'")):
        figures.cost_figure([])
