"""Tiny data in the form of `mtem data prepare`, and cells that were run on them."""

from __future__ import annotations

import pytest

from mtem_paper import runner, statistics
from mtem_paper.protocol import DATASETS
from tests.conftest import make_texts
from tests.corpora import table
from tests.paper.tiny import RUMOUR, planned
from tests.threads import make_threads


@pytest.fixture
def few_draws(monkeypatch):
    """For tests of what the page says, not of how sure it is."""
    monkeypatch.setattr(statistics, "DRAWS", 1000)


@pytest.fixture(scope="session")
def amazon(tmp_path_factory):
    """Four domains with 240 labeled reviews, some of them twice, and a pool that has some of the labeled ones in it."""
    folder = tmp_path_factory.mktemp("amazon")
    for number, domain in enumerate(DATASETS["amazon"].domains):
        rows = make_texts(240, number, number / 5)
        labeled = [{"text": text, "label": {"bad": "negative", "good": "positive"}[label]} for text, label in rows + rows[:8]]
        table(folder, f"{domain}.labeled.jsonl.gz", labeled)
        pool = [{"text": text, "source": "fdu"} for text, _ in make_texts(60, 10 + number, 0.5) + rows[:5]]
        pool += [{"text": text, "source": ("hatn", "wind-tok")[i % 2]} for i, (text, _) in enumerate(make_texts(60, 20 + number))]
        table(folder, f"{domain}.unlabeled.jsonl.gz", pool)
    return folder


@pytest.fixture(scope="session")
def pheme(tmp_path_factory):
    """Five events of 260 threads; ten roots come again with another link."""
    folder = tmp_path_factory.mktemp("data") / "pheme"
    folder.mkdir()
    for number, event in enumerate(DATASETS["pheme"].domains):
        threads = [{**thread, "label": RUMOUR[thread["label"]]} for thread in make_threads(250, number, number / 5, largest=3)]
        for i in range(10):
            root = {**threads[i]["nodes"][0], "text": threads[i]["nodes"][0]["text"] + f" https://t.co/{i}"}
            threads.append({**threads[i], "id": f"again-{i}", "nodes": [root]})
        table(folder, f"{event}.jsonl.gz", threads)
    return folder.parent


@pytest.fixture(scope="session")
def ran(amazon, encoder, tmp_path_factory):
    """Both settings of a few variants, in this process."""
    folder = tmp_path_factory.mktemp("results")
    found = planned(encoder, ["out", "mtem", "mme"], settings_=None)
    summary = runner.run(found, folder, data=amazon, model=str(encoder), device="cpu")
    return folder, found, summary
