"""Warnings that do not depend on logits; those about predictions are tested in test_accuracy_estimate.py."""

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
