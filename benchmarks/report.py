"""How large a report is, how long it takes to make, and how quick its table is in Chromium.

    python benchmarks/report.py --rows 20000 --json results/cost/report.json

The texts are made up: words of a Zipf-like vocabulary, 824 characters on average as in the Amazon reviews.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.report.conftest import find_chromium, make_run

from mtem.report.page import write_report
from mtem.run.record import machine, now

CLICK = """(key) => {
  const button = document.querySelector(`#head button[data-key=${key}]`), start = performance.now();
  button.click();
  return performance.now() - start;
}"""
FILTER = """() => {
  const input = document.getElementById("filter-words"), start = performance.now();
  input.value = "word7";
  input.dispatchEvent(new Event("input", { bubbles: true }));
  return performance.now() - start;
}"""
SCROLL = """async () => {
  const body = document.getElementById("body");
  let worst = 0;
  for (let place = 0; place < 40; place++) {
    const start = performance.now();
    body.scrollTop = (place * body.scrollHeight) / 40;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    worst = Math.max(worst, performance.now() - start);
  }
  return worst;
}"""


def make_texts(count: int) -> list[str]:
    """Return made-up texts."""
    random = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(20_000)])
    weights = 1 / np.arange(1, len(words) + 1)
    drawn = random.choice(words, size=(count, 115), p=weights / weights.sum())
    return [" ".join(row) for row in drawn]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = make_run(Path(folder) / "run", make_texts(arguments.rows))
        start = time.monotonic()
        path = write_report(run)
        row = {"rows": arguments.rows, "bytes": path.stat().st_size, "seconds_to_make": round(time.monotonic() - start, 2)}
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        start = time.monotonic()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        row["seconds_to_open"] = round(time.monotonic() - start, 2)
        for key in ("text", "confidence", "prediction", "index"):
            row[f"milliseconds_to_sort_by_{key}"] = round(page.evaluate(CLICK, key), 1)
        row["milliseconds_of_the_slowest_jump"] = round(page.evaluate(SCROLL), 1)
        row["milliseconds_to_filter"] = round(page.evaluate(FILTER), 1)
        row |= {"browser": browser.version, "machine": machine("cpu"), "finished": now()}
        browser.close()
    print(json.dumps(row, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
