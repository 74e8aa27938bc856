"""Reports without a browser: what is read, what is said, what is drawn, and that nothing of a run is needed."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtem.errors import RequestError
from mtem.report import charts, comparison, explorer, page, rehearsed
from mtem.report.answer import answer, measured_difference
from mtem.report.explorer import columns
from mtem.report.files import read_run
from tests.report.conftest import HOSTILE, make_run, write_evaluation

TEXTS = [f"text number {number} about a blender" for number in range(60)]


def unpacked(packed: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_every_chart_is_made_from_a_whole_run(tmp_path):
    run = make_run(tmp_path / "run", TEXTS)
    write_evaluation(run, TEXTS, ["negative", "positive"] * 30, ["negative"] * 60, ["negative", "positive"] * 30)
    found = {figure["id"]: figure for figure in charts.charts(read_run(run))}
    assert list(found) == [
        "selection", "losses", "temperature", "index-spread", "index-against-confidence", "index-against-right", "balance",
        "balance-along", "reliability", "feature-map", "source-training", "times",
    ]  # fmt: skip
    assert found["selection"]["data"][1]["x"] == [0, 10, 20, 30] and found["selection"]["layout"]["shapes"][0]["x0"] == 30
    assert found["balance"]["data"][2]["y"] == [0.45, 0.55] and found["times"]["data"][0]["x"] == [12.0, 30.0]
    assert found["balance-along"]["data"][1]["y"] == [0.4, 0.43, 0.46, 0.49]
    assert found["index-spread"]["data"][1]["y"] == [2.0, 3.0, 4.0, 5.0]
    for figure in found.values():
        assert figure["alt"] and figure["title"]
        json.dumps(figure, allow_nan=False)


def test_the_area_of_right_and_wrong_is_that_of_all_pairs(tmp_path):
    run = make_run(tmp_path / "run", TEXTS)
    labels = list(np.random.default_rng(1).choice(["negative", "positive"], 60))
    write_evaluation(run, TEXTS, labels, labels, labels)
    texts = read_run(run).texts
    right = (texts["label"] == texts["prediction"]).to_numpy()
    index = texts["index"].to_numpy()
    pairs = (index[~right][:, None] > index[right][None]).mean()
    shown = charts.index_against_right(read_run(run))["alt"]
    assert float(re.search(r"([\d.]+) %", shown)[1]) == pytest.approx(100 * pairs, abs=0.06)


@pytest.mark.parametrize(
    ("better", "verdict", "words"),
    [
        (20, "helped", "The adaptation helped. On 60 labeled texts"),
        (1, "unclear", "no clear difference"),
        (-20, "hurt", "did harm"),
    ],
)
def test_the_answer_where_labels_exist(tmp_path, better, verdict, words):
    run = make_run(tmp_path / "run", TEXTS)
    labels, wrong = ["negative"] * 60, ["positive"] * abs(better) + ["negative"] * (60 - abs(better))
    before, after = (wrong, labels) if better > 0 else (labels, wrong)
    write_evaluation(run, TEXTS, labels, before, after)
    found = answer(read_run(run))
    assert found.verdict == verdict and words in found.headline
    first, second, error, count = measured_difference(read_run(run))
    difference = np.array([a == "negative" for a in after], float) - np.array([b == "negative" for b in before], float)
    assert second - first == pytest.approx(difference.mean()) and count == 60
    assert error == pytest.approx(difference.std(ddof=1) / 60**0.5)


def test_the_answer_without_labels_claims_nothing(tmp_path):
    found = answer(read_run(make_run(tmp_path / "run", TEXTS)))
    assert found.verdict == "unclear" and "85.0 % (95 % interval 80.0 % to 90.0 %)" in found.headline
    assert "only labels can tell" in found.headline and "classes drift <apart>" in found.worries
    assert any("mtem evaluate run/" in step for step in found.next_steps)
    assert ("memory", "3.0 GiB") in found.figures and ("time", "42 s") in found.figures


def test_an_unfinished_run_has_a_report(tmp_path):
    run = make_run(tmp_path / "run", TEXTS, finished=False)
    (run / "indexes.parquet").unlink()
    found = answer(read_run(run))
    assert found.verdict == "unfinished" and "step 31 of the adaptation" in found.headline and "--resume" in found.next_steps[0]
    assert not found.worries, "what comes at the end of a run is not missed"
    assert 'id="losses-plot"' in page.run_page(read_run(run))


@pytest.mark.parametrize(
    "name", ["run.json", "history.jsonl", "indexes.parquet", "map.parquet", "words.parquet", "evaluation.json"]
)
@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b"null", b"\xff\xfe{", b'{"status": 3', b"[" * 100_000, b"PAR1garbagePAR1"]
)
def test_damaged_files_are_told_and_the_rest_is_shown(tmp_path, name, content):
    run = make_run(tmp_path / "run", TEXTS[:20])
    write_evaluation(run, TEXTS[:20], ["negative"] * 20, ["negative"] * 20, ["positive"] * 20)
    (run / name).unlink() if content is None else (run / name).write_bytes(content)
    files = read_run(run)
    made = page.run_page(files)
    told = any(line.startswith(name) for line in files.problems)
    needless = content is None and name in ("map.parquet", "words.parquet", "evaluation.json")  # earlier runs have none
    assert told is not (needless or (name == "history.jsonl" and content == b"")), files.problems
    assert made.startswith("<!doctype html>") and all(line.split(" ")[0] in made for line in files.problems)


@pytest.mark.parametrize("value", [None, [], "x", 3, float("inf"), {"a": {"b": [1]}}, True, [[[]]], -1e308])
def test_values_of_another_shape_break_nothing(tmp_path, value):
    run = make_run(tmp_path / "run", TEXTS[:20])
    record = json.loads((run / "run.json").read_text())
    for key in record:
        (run / "run.json").write_text(json.dumps({**record, key: value}))
        page.run_page(read_run(run))
    (run / "run.json").write_text(json.dumps(record))
    line = {"stage": "adapt", "step": value, "temperature": value, "index_quantiles": value, "source_loss": value}
    (run / "history.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "stage": "evaluation", "infomax": value}))
    (run / "evaluation.json").write_text(
        json.dumps({"labels": value, "texts": value, "after": value, "before": {"predictions": value}})
    )
    page.run_page(read_run(run))


def test_one_index_for_all_and_labels_that_are_not_drawn_have_no_charts(tmp_path):
    run = make_run(tmp_path / "run", TEXTS[:20])
    lines = [{"stage": "adapt", "step": step, "confident_share": step / 4, "index_quantiles": [1.0, 1.0, 1.0]} for step in (1, 2)]
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = pq.read_table(run / "indexes.parquet")
    one = pa.array([1.0] * len(table))
    pq.write_table(table.set_column(table.column_names.index("index"), "index", one), run / "indexes.parquet")
    text = page.run_page(read_run(run))
    assert "Sure texts" in text and "Entropy index" not in text and "Temperature" not in text
    assert "index" not in columns(read_run(run), read_run(run).texts, 100)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        read_run(tmp_path / "nothing")


def test_texts_cannot_leave_their_place(tmp_path):
    run = make_run(tmp_path / HOSTILE[0].replace("/", "|"), HOSTILE * 5)
    record = json.loads((run / "run.json").read_text())
    record |= {"classes": [HOSTILE[0], "b"], "warnings": HOSTILE, "model": HOSTILE[1], "settings": {HOSTILE[0]: HOSTILE[1]}}
    record["class_shares"] = {"source_labels": {text: 0.2 for text in HOSTILE}}
    (run / "run.json").write_text(json.dumps(record))
    made = page.run_page(read_run(run))
    scripts = re.findall(
        r"<script[ >]",
        made.split("<body>")[1].replace(page.asset("plotly-basic.min.js"), "").replace(page.asset("report.js"), ""),
    )
    assert len(scripts) == 4 and "<img" not in made and "onerror=&quot;" in made
    assert "{{ title }}" in made.replace("&", ""), "a text that looks like the template stays a text"


def test_the_policy_allows_the_two_scripts_and_nothing_from_outside(tmp_path):
    made = page.run_page(read_run(make_run(tmp_path / "run", TEXTS)))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', made)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and policy.count("sha256-") == 2
    assert "unsafe-eval" not in policy and "http" not in policy


def test_a_page_with_20_000_long_texts_is_small_enough(tmp_path):
    random = np.random.default_rng(0)
    vocabulary = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 6)) for _ in range(5000)]
    texts = [" ".join(random.choice(vocabulary, 150)) for _ in range(20_000)]
    target = page.write_report(make_run(tmp_path / "run", texts))
    assert target.name == "report.html" and 3_000_000 < target.stat().st_size <= page.LARGEST


def test_texts_are_whole_where_they_fit_and_rows_are_spread_where_they_do_not(tmp_path, monkeypatch):
    run = read_run(make_run(tmp_path / "run", [*TEXTS, "x" * 100_000]))
    found = explorer.explorer(run, 1_000_000)
    table = unpacked(found["packed"])
    assert found["cut"] is None and table["text"] == [*TEXTS, "x" * 100_000] and len(table["index"]) == 61
    assert set(table) == {
        "classes", "text", "row", "index", "prediction", "confidence", "source_prediction", "source_confidence",
    }  # fmt: skip
    monkeypatch.setattr(explorer, "MOST_ROWS", 10)
    found = explorer.explorer(run, 1_000_000)
    assert (found["rows"], found["total"]) == (10, 61) and unpacked(found["packed"])["row"][0] == 1


def test_typical_words_against_a_literal_reading():
    words = pd.DataFrame({"word": ["blender", "novel", "the"], "source": [1, 80, 100], "target": [90, 2, 100]})
    found = explorer.typical_words(words, 100, 100)
    ratio = np.log((90.5 / 10.5) / (1.5 / 99.5)) / np.sqrt(1 / 90.5 + 1 / 1.5)
    assert found == {"blender": pytest.approx(ratio, abs=0.05)}
    assert explorer.typical_words(words, 0, 0) == {}


def test_threads_keep_their_tree(tmp_path):
    table = unpacked(explorer.explorer(read_run(make_run(tmp_path / "run", TEXTS[:3], threads=True)), 1_000_000)["packed"])
    assert table["tree"][0] == [[-1, TEXTS[0]], [0, "a reply"], [1, "a reply to the reply"]]


# ---------------------------------------------------------------------- several runs, rehearsals


def test_runs_are_compared_on_the_same_labels(tmp_path):
    labels = ["negative"] * 60
    for name, wrong in (("a", 30), ("b", 2), ("c", 3)):
        run = make_run(tmp_path / name, TEXTS)
        write_evaluation(run, TEXTS, labels, labels, ["positive"] * wrong + ["negative"] * (60 - wrong))
    runs = [read_run(tmp_path / name) for name in "abc"]
    found = comparison.compare(runs)
    assert found.verdict == "unclear" and found.headline.startswith(
        "b has the highest accuracy, 96.7 % of 60 labeled texts; c is next"
    )
    assert comparison.compare(runs[:2]).verdict == "helped" and "is clear" in comparison.compare(runs[:2]).headline
    columns, rows = comparison.table(runs)
    assert [dict(zip(columns, row, strict=True))["measured"] for row in rows] == ["50.0 %", "96.7 %", "95.0 %"]
    assert [figure["id"] for figure in comparison.charts(runs)] == ["accuracy", "infomax", "source-validation"]
    target = page.write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    assert "96.7 %" in target.read_text()


def test_runs_without_the_same_labels_are_not_ranked(tmp_path):
    runs = [read_run(make_run(tmp_path / name / "run", TEXTS)) for name in "ab"]
    found = comparison.compare(runs)
    assert "none can be called the best" in found.headline and "a/run 85.0 %, b/run 85.0 %" in found.headline
    assert comparison.names_of([runs[0], runs[0]]) != comparison.names_of(runs)


def rehearsal_record(**changes):
    advice = {
        "adapt": True, "gains": {"books": 0.02, "dvd <b>": -0.01}, "mean": 0.005, "low": None, "high": None,
        "settings": {"learning_rate": 5e-5, "stop_epochs": 6.0, "target_class_prior": "none"},
    }  # fmt: skip
    return {"status": "done", "recommended": "mtem", "why": "mtem gained +0.005", "metric": "accuracy", "notes": ["few domains"],
            "advice": {"mtem": advice, "source-only": {}}} | changes  # fmt: skip


def test_the_page_of_a_rehearsal_and_of_a_run_that_was_rehearsed(tmp_path):
    run = make_run(tmp_path / "run", TEXTS)
    for folder in (tmp_path / "rehearsal", run / "rehearsal"):
        folder.mkdir()
        (folder / "rehearsal.json").write_text(json.dumps(rehearsal_record()))
    made = page.write_report(tmp_path / "rehearsal").read_text()
    assert (
        "Adaptation pays on your source domains: mtem gained +0.005." in made and "+0.5 points" in made and "few domains" in made
    )
    assert 'id="gains-plot"' in made and "dvd &lt;b&gt; -1.0 points" in made
    both = page.write_report(run).read_text()
    assert 'id="gains-plot"' in both and 'id="losses-plot"' in both and "The rehearsal before this run" in both
    (run / "rehearsal" / "rehearsal.json").write_text("[")
    assert "rehearsal.json: cannot be read" in page.write_report(run).read_text()


def test_of_a_method_that_is_not_advised_the_last_pass_is_shown():
    record = rehearsal_record(
        trials=[
            {"method": "mtem", "domain": domain, "rare": rare, "after": after, "before": 0.8, "last": 0.79}
            for domain, rare, after in (("books", "", 0.8), ("dvd", "", None), ("books", "good", 0.8))
        ]
    )
    record["advice"]["mtem"]["adapt"] = False
    (bars,) = rehearsed.charts(record)[0]["data"]
    assert bars["x"] == ["books"] and bars["y"] == pytest.approx([-0.01]) and "not advised" in bars["name"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "running"}, "not finished"),
        ({"recommended": "source-only"}, "Do not adapt"),
        ({"advice": [1], "notes": 3}, "pays"),
    ],
)
def test_rehearsals_of_all_kinds_have_a_page(tmp_path, changes, words):
    (tmp_path / "rehearsal.json").write_text(json.dumps(rehearsal_record(**changes)))
    assert words in page.write_report(tmp_path).read_text()
