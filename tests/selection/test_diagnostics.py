"""Warnings about the data and about runs; those about predictions are tested in test_accuracy_estimate.py."""

from mtem.data.loading import load_corpus
from mtem.models.text import TextModel
from mtem.models.trees.model import BigcnModel
from mtem.selection import diagnostics


def test_no_estimate_says_how_many_texts_there_were():
    record = {"texts": {"source_held_out": 1}, "unit": "threads"}
    assert "only 1 source thread was held out, and at least 20 are needed" in diagnostics.no_estimate(record)
    record = {"texts": {"source_held_out": 7}}
    assert "only 7 source texts were held out" in diagnostics.no_estimate(record)


def test_messages_name_the_figures():
    assert diagnostics.source_model_kept("infomax", 0.25) == (
        "the source model is kept: by infomax no weights of the adaptation were better (0.2500); the adapted ones were not used"
    )
    assert diagnostics.text_cut(256, 64) == "max_length=256: the encoder takes 64 tokens; longer texts are truncated"


def test_data_warnings_come_from_the_corpus_its_files_and_the_model(tmp_path):
    for name, column, labels in (("a.csv", "text", "good bad"), ("b.csv", "review", "Good bad")):
        rows = [f"words {i},{label}" for i, label in enumerate(labels.split() * 2)]
        (tmp_path / name).write_text("\n".join([f"{column},label", *rows]) + "\n")
    corpus = load_corpus([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], labeled=True)
    lines = diagnostics.data_warnings(corpus, BigcnModel)
    assert any("text column differs" in line for line in lines)
    assert any("'Good'" in line and "'good'" in line for line in lines)
    assert any("without replies" in line for line in lines)
    assert not any("without replies" in line for line in diagnostics.data_warnings(corpus, TextModel))
