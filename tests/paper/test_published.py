"""Published figures agree with each other and with the protocol."""

from __future__ import annotations

import dataclasses
from decimal import ROUND_HALF_UP, Decimal

import pytest

from mtem_paper import protocol, published
from mtem_paper.protocol import DATASETS

AMAZON, EVENTS = DATASETS["amazon"].targets, DATASETS["pheme"].targets


def test_printed_means_are_those_of_the_scores_or_corrected():
    for table in published.TABLES:
        for row in table.rows:
            exact = sum(Decimal(str(score)) for score in row.scores) / 4
            assert Decimal(str(row.mean)) == exact.quantize(Decimal("0.001"), ROUND_HALF_UP), (table.number, row.name)
    corrected = {
        (t.number, r.variant, t.setting[0]): r.correction[8:12] for t in published.TABLES for r in t.rows if r.correction
    }
    assert corrected == {
        (1, "cst", "u"): ".598", (1, "mme", "s"): ".567", (1, "mtem", "s"): ".709", (2, "cst", "u"): ".920",
        (4, "mtem-without-meta", "u"): ".916", (4, "mtem-without-annealing", "u"): ".930",
    }  # fmt: skip


def test_claims_of_the_text_are_those_of_the_tables():
    mean = {(table.number, table.setting, row.variant): row.mean for table in published.TABLES for row in table.rows}
    assert mean[1, "unsupervised", "mtem"] - mean[1, "unsupervised", "cst"] == pytest.approx(0.078)
    assert mean[3, "unsupervised", "mtem"] - mean[3, "unsupervised", "mtem-without-meta"] == pytest.approx(0.083)
    assert sum(rumours for rumours, _ in published.EVENT_SIZES.values()) == 1972
    trivial = [round(published.trivial_f1(*published.EVENT_SIZES[event]), 3) for event in EVENTS]
    assert trivial == [0.361, 0.398, 0.691, 0.599]
    below = [e for e, t in zip(EVENTS, trivial, strict=True) if published.PHEME_UNSUPERVISED.score("out", e) < t]
    assert below == ["ferguson", "ottawashooting", "sydneysiege"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"variant": "mtme"}, "row MTEM: no variant 'mtme'"), ({"scores": (0.9, 0.8)}, "expected one score for each target, got 2")],
)
def test_a_row_that_does_not_fit_the_protocol_is_an_error(change, message):
    row = dataclasses.replace(published.AMAZON_SEMI.rows[-1], **change)
    broken = dataclasses.replace(published.AMAZON_SEMI, rows=(row,))
    published.check([published.AMAZON_SEMI], {})
    with pytest.raises(ValueError, match=message):
        published.check([broken], {})


def test_table_5_must_fit_the_protocol():
    with pytest.raises(ValueError, match="Table 5, row taylor"):
        published.check([], {"taylor": (0.9,)})
    with pytest.raises(ValueError, match="Table 5, row magic"):
        published.check([], {"magic": (0.9,) * len(protocol.BATCH_SIZES)})
