"""The page in a real browser: charts, filters, sorting, export, keyboard, and that nothing leaves it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from mtem.report.page import write_report
from tests.report.conftest import HOSTILE, make_run, write_evaluation

WORDS = ("blender", "toaster", "novel")
TEXTS = [f"{WORDS[number % 3]} number {number}" for number in range(300)]
READY = "html[data-ready=true]"


class Opened:
    """A page, and what it asked for and complained about."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options})
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(READY)

    def rows(self, column):
        """What the visible rows show in a column."""
        return self.page.locator(f"#rows .row > :nth-child({column})").all_inner_texts()

    def count(self):
        return self.page.inner_text("#count")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("report") / "run", TEXTS)
    write_evaluation(folder, TEXTS, ["negative"] * 300, ["positive"] * 150 + ["negative"] * 150, ["negative"] * 300)
    return write_report(folder)


@pytest.fixture
def opened(browser, run):
    made = Opened(browser, run)
    yield made
    made.context.close()


def test_charts_show_the_run_and_nothing_leaves_the_page(opened, run):
    page = opened.page
    assert page.locator(".plot .main-svg").count() >= 12 and page.title() == "run: report"
    assert "The adaptation helped" in page.inner_text("h1")
    shown = page.evaluate("document.getElementById('balance-plot').data.map((trace) => trace.y)")
    assert shown == [[0.5, 0.5], [0.4, 0.6], [0.45, 0.55]]
    assert page.locator("#balance-plot .bars .point").count() == 6
    assert page.locator("#selection-plot .annotation-text").text_content() == "chosen"
    assert "negative 45.0 %" in page.get_attribute("#balance-plot", "aria-label")
    assert opened.requests == [run.as_uri()] and opened.complaints == []


def test_filters_and_sorting(opened):
    page = opened.page
    assert opened.count() == "300 of 300 texts"
    indexes = [float(text) for text in opened.rows(1)]
    assert indexes == sorted(indexes, reverse=True) and len(indexes) < 40, "only what is in sight is drawn"
    page.fill("#filter-words", "TOASTER")
    assert opened.count() == "100 of 300 texts" and all("toaster" in text for text in opened.rows(6))
    page.fill("#filter-words", "")
    page.fill("#filter-low", "2")
    page.fill("#filter-high", "3")
    assert all(1.995 <= float(text) <= 3.005 for text in opened.rows(1))
    page.fill("#filter-low", "")
    page.fill("#filter-high", "")
    page.check("#filter-changed")
    assert all(one != other for one, other in zip(opened.rows(2), opened.rows(3), strict=True))
    page.uncheck("#filter-changed")
    page.check("#filter-wrong")
    assert set(opened.rows(3)) == {"positive"}, "every label is negative"
    page.uncheck("#filter-wrong")
    page.select_option("#filter-class", label="negative")
    assert set(opened.rows(3)) == {"negative"}
    page.select_option("#filter-class", label="all")
    page.click("#head button[data-key=text]")
    assert opened.rows(6)[:2] == sorted(TEXTS)[:2]
    assert page.get_attribute("#head button[data-key=text]", "aria-sort") == "ascending"
    page.click("#head button[data-key=text]")
    assert opened.rows(6)[0] == sorted(TEXTS)[-1]


def test_keyboard_and_detail(opened):
    page = opened.page
    page.focus("#body")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.get_attribute("#body", "aria-activedescendant") == "row-1"
    text = page.inner_text("#detail-text")
    assert page.is_visible("#detail") and text == opened.rows(6)[1]
    page.fill("#filter-words", "blender")
    page.click("#rows .row >> nth=0")
    assert page.locator("#detail-text mark").all_inner_texts() == ["blender"], "typical of the target"
    page.keyboard.press("Tab")
    page.focus("#body")
    page.keyboard.press("End")
    assert page.get_attribute("#body", "aria-activedescendant") == "row-99"


def test_export_is_what_is_shown_and_runs_no_formula(browser, tmp_path):
    texts = ["=1+1", "+44 20", "-cmd", "@SUM(A1)", "\t=2", 'a "quoted", text\nof two lines', "plain", "x = 1"]
    opened = Opened(browser, write_report(make_run(tmp_path / "run", texts)))
    opened.page.click("#head button[data-key=text]")
    with opened.page.expect_download() as download:
        opened.page.click("#export")
    content = Path(download.value.path()).read_bytes().decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(content)))
    assert download.value.suggested_filename == "run-texts.csv" and len(rows) == len(texts)
    wanted = {text if text.lstrip()[0] not in "=+-@" else "'" + text for text in texts}
    assert {row["text"] for row in rows} == wanted
    assert {int(row["row"]) for row in rows} == set(range(1, 9)) and all(1 <= float(row["index"]) <= 5 for row in rows)
    opened.page.fill("#filter-words", "plain")
    with opened.page.expect_download() as download:
        opened.page.click("#export")
    assert len(Path(download.value.path()).read_text(encoding="utf-8-sig").splitlines()) == 2
    opened.context.close()


def test_hostile_texts_are_shown_as_texts(browser, tmp_path):
    opened = Opened(browser, write_report(make_run(tmp_path / "run", [*HOSTILE, "y" * 100_000])))
    page = opened.page
    for number in range(len(HOSTILE) + 1):
        page.click(f"#rows .row >> nth={number}")
        assert page.locator("#detail-text script, #detail-text img").count() == 0
    assert page.title() == "run: report" and opened.complaints == [] and len(opened.requests) == 1
    shown = page.evaluate("[...document.querySelectorAll('#rows .row > :nth-child(5)')].map((cell) => cell.textContent)")
    assert {text[:400] for text in (*HOSTILE, "y" * 100_000)} == set(shown)
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_a_laptop_and_a_phone_in_light_and_dark(browser, run, tmp_path, width, scheme):
    opened = Opened(browser, run, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = np.mean([int(part) for part in background.strip("rgb()").split(",")])
    assert (brightness > 200) == (scheme == "light")
    assert len(page.screenshot(path=tmp_path / "shot.png", full_page=True)) > 20_000
    opened.context.close()


def test_it_prints_in_light_colours_and_without_the_table(browser, run):
    opened = Opened(browser, run, color_scheme="dark")
    page = opened.page

    def charted():
        return page.evaluate("document.getElementById('balance-plot').layout.font.color")

    dark = charted()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert charted() == "#1c2127" != dark
    page.emulate_media(media="print")
    assert page.is_hidden("#explorer") and page.is_visible("#balance-plot")
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert charted() == dark
    assert page.pdf().startswith(b"%PDF") and opened.complaints == []
    opened.context.close()


def test_threads_open_to_their_tree(browser, tmp_path):
    opened = Opened(browser, write_report(str(make_run(tmp_path / "run", TEXTS[:5], threads=True))))
    opened.page.click("#rows .row >> nth=0")
    posts = opened.page.locator("#detail-text .post")
    assert posts.count() == 3 and posts.nth(2).inner_text() == "a reply to the reply"
    left = [posts.nth(number).evaluate("(post) => post.getBoundingClientRect().left") for number in range(3)]
    assert left == sorted(set(left)), "a reply is further to the right"
    opened.context.close()


def test_a_report_without_texts(browser, tmp_path):
    run = make_run(tmp_path / "run", TEXTS, finished=False)
    (run / "indexes.parquet").unlink()
    opened = Opened(browser, write_report(run))
    assert opened.page.locator("#explorer").count() == 0 and opened.complaints == []
    opened.context.close()
