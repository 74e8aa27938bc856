"""The case study: which texts, which words, and what is written of them."""

from __future__ import annotations

import gzip
import html.parser
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from mtem.errors import RequestError
from mtem_paper import cases, splits
from mtem_paper.bound import bound_table
from mtem_paper.protocol import DATASETS
from tests.conftest import examples, make_texts

SOURCE = ["the book tells a story", "the story of a book", "a good book", "the plot is good", "a bad story in a bad book"] * 60
# The same texts in the other domain's words, so that all others are exactly as frequent.
TARGET = [text.replace("book", "knife").replace("story", "pan").replace("plot", "blade") for text in SOURCE]


def table(texts: list[str], index: list[float], confidence: list[float] | None = None) -> pd.DataFrame:
    confidence = confidence or [0.9] * len(texts)
    return pd.DataFrame({"row": range(len(texts)), "text": texts, "index": index, "prediction": "good", "confidence": confidence})


def literal(word: str, source: list[str], target: list[str], prior: float) -> float:
    """The formula of the module's docstring, one occurrence at a time."""
    y = {"T": [w for text in target for w in text.split()], "S": [w for text in source for w in text.split()]}
    everything = y["T"] + y["S"]
    alpha = {w: prior * sum(1 for v in everything if v == w) / len(everything) for w in set(everything)}
    a = {side: {w: sum(1 for v in found if v == w) + alpha[w] for w in alpha} for side, found in y.items()}
    odds = {side: a[side][word] / (sum(a[side].values()) - a[side][word]) for side in a}
    return (math.log(odds["T"]) - math.log(odds["S"])) / math.sqrt(1 / a["T"][word] + 1 / a["S"][word])


@examples(40)
@given(
    source=st.lists(st.sampled_from(["a b", "a a c", "b c d", "d d", "e"]), min_size=1, max_size=6),
    target=st.lists(st.sampled_from(["a b b", "c c", "f g", "d", "a f"]), min_size=1, max_size=6),
    prior=st.floats(0.5, 50),
)
@example(source=["d d"], target=["d"], prior=0.5)
def test_z_is_the_literal_formula(source, target, prior) -> None:
    found = cases.targetness(source, target, prior=prior, threshold=0.0, rarest=1)
    assert set(found) == {word for text in source + target for word in text.split()}
    if len(found) == 1:  # one word is all that both have: it tells nothing
        assert set(found.values()) == {0.0}
        return
    for word, z in found.items():
        assert z == pytest.approx(literal(word, source, target, prior), abs=1e-9)


def test_z_turns_around_with_the_domains_and_shared_words_are_neutral() -> None:
    found, turned = cases.targetness(SOURCE, TARGET), cases.targetness(TARGET, SOURCE)
    assert found["knife"] > cases.THRESHOLD and found["book"] < -cases.THRESHOLD
    assert found["a"] == found["good"] == found["the"] == 0.0
    assert {word: -z for word, z in turned.items()} == pytest.approx(found)


def test_words_below_the_threshold_or_too_rare_are_neutral() -> None:
    loose = cases.targetness(SOURCE, TARGET, threshold=0.0, rarest=1)
    between = (loose["blade"] + loose["knife"]) / 2
    strict = cases.targetness(SOURCE, TARGET, threshold=between, rarest=1)
    assert strict["knife"] == loose["knife"] and strict["blade"] == strict["plot"] == 0.0 < loose["blade"] < between
    rare = cases.targetness(SOURCE, [*TARGET, "spatula " * 4], threshold=0.1)
    enough = cases.targetness(SOURCE, [*TARGET, "spatula " * 5], threshold=0.1)
    assert rare["spatula"] == 0.0 < enough["spatula"]
    with pytest.raises(RequestError, match="one of the two domains has no words"):
        cases.targetness(SOURCE, ["...", ""])


def test_clear_but_small_differences_are_not_marked() -> None:
    more = ["it is a knife"] * 3000 + ["a knife"] * 1000
    less = ["it is a book"] * 2200 + ["a book"] * 1800
    assert cases.targetness(less, more)["it"] > cases.THRESHOLD
    twice = cases.targetness(less, more, ratio=cases.MARKED)
    assert twice["it"] == twice["is"] == 0.0 and twice["knife"] > cases.THRESHOLD and twice["book"] < -cases.THRESHOLD
    shown = cases.cases(table(["it is a knife", "a book"], [1.0, 2.0]), less, more, count=1)
    assert [word["weight"] != 0 for entry in shown for word in entry["words"]] == [False, False, False, True, False, True]


def test_words_are_letters_and_digits_in_small_letters() -> None:
    found = cases.words("It's 2-piece (GREAT), isn\u2019t it? naïve_x 日本")
    assert found == ["it's", "2", "piece", "great", "isn\u2019t", "it", "naïve", "x", "日本"]


def test_the_ends_are_the_smallest_and_largest_without_repeats() -> None:
    texts = [f"text number {n}" for n in range(30)]
    texts[3], texts[4] = "The same text!", "the same text"
    index = [2.0 + n / 100 for n in range(30)]
    index[3], index[4], index[10] = 1.05, 1.05, 5.0
    found = cases.cases(table(texts, index), SOURCE, TARGET, count=3)
    assert [entry["end"] for entry in found] == ["smallest"] * 3 + ["largest"] * 3
    assert [entry["index"] for entry in found] == [1.05, 2.0, 2.01, 5.0, 2.29, 2.28]
    assert found[0]["text"].lower().startswith("the same text") and found[3]["text"] == "text number 10"
    assert found[3]["prediction"] == "good" and found[3]["confidence"] == 0.9


def test_among_equal_indexes_a_seeded_draw_chooses() -> None:
    data = table([f"text number {n}" for n in range(40)], [1.05] * 20 + [5.0] * 20)
    first, again, other = (cases.cases(data, SOURCE, TARGET, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert {int(entry["text"].split()[-1]) < 20 for entry in other[:5]} == {True}


def test_a_case_shows_its_words_with_their_weights_and_is_cut() -> None:
    long = " ".join(["knife,"] + ["and"] * 200)
    found = cases.cases(table([long, "A <b>BOOK</b>|", "the blade-book"], [1.0, 2.0, 3.0]), SOURCE, TARGET, count=1)
    scores = cases.targetness(SOURCE, TARGET)
    assert found[0]["cut"] and len(found[0]["words"]) == cases.LONGEST == len(found[0]["text"].split())
    assert found[0]["words"][0] == {"word": "knife,", "weight": round(scores["knife"], 2)}
    # of two words in one piece the one that says most
    assert not found[1]["cut"] and found[1]["words"][1]["weight"] == round(scores["book"], 2)


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data) -> None:
        self.text += data


def test_html_is_escaped_and_needs_nothing_else() -> None:
    nasty = '<script>alert(1)</script> knife" onload="x & book </p>'
    data = table([nasty, "a pan"], [1.05, 5.0])
    data["prediction"] = "<i>good</i>"
    page = cases.to_html(cases.cases(data, SOURCE, TARGET))
    reader = Reader()
    reader.feed(page)
    assert {"script", "i", "link", "img"}.isdisjoint(tag for tag, _ in reader.tags)
    assert "<script>alert(1)</script>" in reader.text and "<i>good</i>" in reader.text
    assert not re.search(r"(https?:)?//", page.split("<style>")[1].split("</style>")[0]) and "url(" not in page
    marks = [attributes for tag, attributes in reader.tags if tag == "mark"]
    # the legend's two, knife and book, pan
    assert [mark["class"] for mark in marks] == ["target", "source", "target", "source", "target"]
    assert all(set(mark) == {"class", "style", "title"} for mark in marks)


def test_markdown_keeps_its_table_whatever_the_text() -> None:
    data = table(["a | knife * _of_ `the` <br> [book](x)", "a pan"], [1.05, 5.0])
    lines = cases.to_markdown(cases.cases(data, SOURCE, TARGET)).splitlines()
    assert len(lines) == 4
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines)
    assert "**knife**" in lines[2] and r"*\[book\]\(x\)*" in lines[2] and "&lt;br&gt;" in lines[2] and "<br>" not in lines[2]


def test_summary_by_hand() -> None:
    texts = ["knife"] * 10 + ["book"] * 10 + ["a"] * 80
    index, confidence = [5.0] * 10 + [1.05] * 10 + [2.0] * 80, [0.6] * 10 + [0.99] * 10 + [0.8] * 80
    found = cases.summary(table(texts, index, confidence), SOURCE, TARGET)
    scores = cases.targetness(SOURCE, TARGET)
    assert [tenth["texts"] for tenth in found["deciles"]] == [10] * 10
    first, last = found["deciles"][0], found["deciles"][-1]
    assert first["index"] == pytest.approx(1.05) and (first["source_words"], first["target_words"]) == (1.0, 0.0)
    assert first["mean_weight"] == pytest.approx(scores["book"]) and last["mean_weight"] == pytest.approx(scores["knife"])
    assert found["deciles"][4]["mean_weight"] == 0.0
    assert found["index_and_confidence"]["spearman"] == pytest.approx(-1.0)
    assert found["index_and_weight"]["spearman"] == pytest.approx(1.0)
    assert found["ends"] == {"smallest": {"index": 1.05, "share": 0.1}, "largest": {"index": 5.0, "share": 0.1}}


def test_tenths_of_equal_indexes_are_filled_at_random() -> None:
    data = table(["knife"] * 100 + ["book"] * 100, [2.0] * 200)
    found = cases.summary(data, SOURCE, TARGET)
    shares = [tenth["target_words"] for tenth in found["deciles"]]
    assert min(shares) > 0.2 and max(shares) < 0.8  # in the order of the table they would be 0 and 1
    assert found["index_and_confidence"] is None and found["index_and_weight"] is None


def test_correlation_and_its_interval() -> None:
    draw = np.random.default_rng(0)
    one = pd.Series(draw.normal(size=400))
    other = one + pd.Series(draw.normal(size=400))
    found = cases.correlation(one, other)
    assert found["spearman"] == pytest.approx(stats.spearmanr(one, other).statistic)
    low, high = found["interval"]
    assert low < found["spearman"] < high and (math.atanh(high) - math.atanh(low)) / 2 == pytest.approx(
        1.96 / math.sqrt(397), rel=1e-3
    )


@pytest.mark.parametrize("column", ["index", "text"])
def test_a_table_without_what_is_needed_is_refused(column) -> None:
    with pytest.raises(RequestError, match=f"no column '{column}'"):
        cases.cases(table(["a", "b"], [1.0, 2.0]).drop(columns=column), SOURCE, TARGET)
    with pytest.raises(RequestError, match="at least two"):
        cases.summary(table(["a"], [1.0]), SOURCE, TARGET)


def write_amazon(folder: Path) -> Path:
    """A tiny data set in the form of `mtem data prepare`."""
    folder.mkdir()
    for number, domain in enumerate(DATASETS["amazon"].domains):
        labeled = [{"text": text, "label": label} for text, label in make_texts(60, number, 0.3 if domain == "kitchen" else 0.0)]
        pool = [{"text": f"{text} u{place}", "source": "hatn"} for place, (text, _) in enumerate(make_texts(40, number + 9, 0.6))]
        for kind, rows in (("labeled", labeled), ("unlabeled", pool)):
            with gzip.open(folder / f"{domain}.{kind}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def test_reproduce_writes_both_files_and_runs_once(encoder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(splits, "TARGET_LABELED", 4)
    amazon = write_amazon(tmp_path / "amazon")
    given = {"model": str(encoder), "max_length": 16, "batch_size": 10, "source_epochs": 1, "steps": 6, "evaluations": 2}
    found = cases.reproduce(amazon, tmp_path / "results", name="tiny", count=2, device="cpu", texts=30, attacked=10, **given)
    assert found == json.loads((tmp_path / "results" / "cases" / "kitchen.json").read_text(encoding="utf-8"))
    assert [entry["end"] for entry in found["cases"]] == ["smallest"] * 2 + ["largest"] * 2
    assert found["summary"]["texts"] == 40 == len(found["indexes"]) and found["model"] == "tiny"
    assert min(found["indexes"]) == pytest.approx(found["summary"]["ends"]["smallest"]["index"], abs=1e-4)
    assert found["settings"]["index_step"] == "sign"
    terms = json.loads((tmp_path / "results" / "theory" / "bound-kitchen.json").read_text(encoding="utf-8"))
    assert terms["texts"] == {"source": 30, "target": 30} and terms["target"] == "kitchen"
    losses, complexity = terms["terms"], terms["complexity_at_least"]
    known = sum(losses[side]["corrected"] for side in losses) + 4 * complexity["source"] + 8 * complexity["target"]
    shares = [entry["R_at_least"] for entry in terms["robustness"]]
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
    assert [entry["theorem-3"] for entry in terms["least"]] == pytest.approx([known + math.sqrt(8 * share) for share in shares])
    assert f"**≥ {terms['least'][-1]['theorem-3']:.2f}**" in bound_table(terms)
    monkeypatch.setattr(cases, "adapt", lambda *_, **__: pytest.fail("it was there already"))
    assert cases.reproduce(amazon, tmp_path / "results") == found
