"""A made-up run directory with everything a report can show, and a real browser to look at the page."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtem.data.threads import Thread, dump
from mtem.run.evaluation import text_digest

CLASSES = ["negative", "positive"]
HOSTILE = [
    "<script>document.title = 'attacked'</script>",
    '"><img src=x onerror="document.title=1"> &lt;b&gt; {{ title }}',
    '=HYPERLINK("http://example.invalid";"open")',
    "\u202eright to left\u202c שלום",
    "]]> </script><!-- \u0000 \U0001f600",
]


def make_run(folder: Path, texts: list[str], *, finished: bool = True, threads: bool = False) -> Path:
    """Write the files of a run with these target texts."""
    folder.mkdir(parents=True)
    count, random = len(texts), np.random.default_rng(0)
    before, after = random.integers(0, 2, count), random.integers(0, 2, count)
    columns = {
        "row": pa.array(np.arange(1, count + 1)), "text": pa.array(texts), "index": pa.array(1 + random.random(count) * 4),
        "prediction": pa.DictionaryArray.from_arrays(pa.array(after.astype(np.int32)), pa.array(CLASSES)),
        "confidence": pa.array(0.5 + random.random(count) / 2),
        "source_prediction": pa.DictionaryArray.from_arrays(pa.array(before.astype(np.int32)), pa.array(CLASSES)),
        "source_confidence": pa.array(0.5 + random.random(count) / 2),
    }  # fmt: skip
    if threads:
        columns["tree"] = pa.array([dump(Thread([text, "a reply", "a reply to the reply"], [-1, 0, 1])) for text in texts])
    pq.write_table(pa.table(columns), folder / "indexes.parquet")
    words = pa.table({"word": ["blender", "novel", "the"], "source": [1, 80, 100], "target": [90, 2, 100]})
    pq.write_table(words.replace_schema_metadata({"source_texts": "100", "target_texts": "100"}), folder / "words.parquet")
    points = {
        "domain": ["books"] * 20 + [""] * 20,
        "label": ["negative"] * 20 + [""] * 20,
        "position": [-1] * 20 + list(range(20)),
    }
    for ending in ("before", "after"):
        points |= {f"prediction_{ending}": CLASSES * 20, f"x_{ending}": random.random(40), f"y_{ending}": random.random(40)}
    pq.write_table(pa.table(points), folder / "map.parquet")
    history = [{"stage": "source", "step": step, "source_loss": 0.7 / step} for step in (1, 2, 3)]
    for step in range(0, 31, 10):
        shares = {"negative": round(0.6 - step * 0.003, 4), "positive": round(0.4 + step * 0.003, 4)}
        history.append(
            {
                "stage": "evaluation",
                "step": step,
                "score": step / 100,
                "source-validation": 0.8,
                "infomax": step / 100,
                "target_shares": shares,
            }
        )
        history.append(
            {"stage": "adapt", "step": step + 1, "temperature": 1 - step / 40, "source_loss": 0.3, "target_loss": 0.2,
             "meta_loss": 0.25, "index_quantiles": [1.0, 1.5, 2.0 + step / 10]}
        )  # fmt: skip
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    record = {
        "status": "done" if finished else "running", "method": "mtem", "model": "minilm", "classes": CLASSES,
        "unit": "threads" if threads else "texts", "settings": {"seed": 0, "epochs": 2.0}, "versions": {"mtem": "0"},
        "texts": {"source_trained_on": 90, "target": count, "target_labeled": 0}, "resolved": {"device": "cpu"},
    }  # fmt: skip
    if finished:
        record |= {
            "selection": {"criterion": "infomax", "chosen_step": 30, "kept_source_model": False},
            "steps": {"adapt": 30}, "seconds": {"source": 12.0, "adapt": 30.0}, "memory": {"process": 3 * 2**30},
            "warnings": ["classes drift <apart>"],
            "estimate": {"before": {"accuracy": 0.8}, "after": {"accuracy": 0.85, "low": 0.8, "high": 0.9}},
            "class_shares": {
                "source_labels": {"negative": 0.5, "positive": 0.5}, "target_before": {"negative": 0.4, "positive": 0.6},
                "target_after": {"negative": 0.45, "positive": 0.55},
            },
        }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def write_evaluation(run: Path, texts: list[str], labels: list[str], before: list[str], after: list[str]) -> None:
    """Write what 'mtem evaluate --compare' would."""
    sides = {
        name: {"predictions": predictions, "confidence": [0.9] * len(labels)}
        for name, predictions in (("before", before), ("after", after))
    }
    record = {"texts": [text_digest(text) for text in texts], "labels": labels, **sides}
    (run / "evaluation.json").write_text(json.dumps(record))


def find_chromium() -> str | None:
    """Return the browser, if the machine has one."""
    found = (os.environ.get("MTEM_CHROMIUM"), *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    return next((path for path in found if path), None)


@pytest.fixture(scope="session")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mtem[test]'")
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or MTEM_CHROMIUM=PATH")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield launched
        launched.close()
