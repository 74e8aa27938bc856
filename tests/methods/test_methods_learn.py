"""Each method learns: on a shift that can be bridged it beats source-only by a margin, over several seeds.

In the target half of the class words are new, but stand beside the old ones. WIND looks at labeled texts alone, so for it
the shift is another one: nearly half of the source labels are wrong, and some labeled target texts tell which. Its rival has the
same texts.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import mtem
from tests.conftest import make_texts

SEEDS = (0, 1, 2)
GAIN = 0.02
SHARED = {
    **{"max_length": 16, "batch_size": 20, "source_epochs": 6, "source_learning_rate": 2e-3, "epochs": 5, "learning_rate": 1e-3},
    **{"frozen_layers": 0, "evaluations": 5, "left_out_models": 0},
}


def columns(rows):
    return tuple(map(list, zip(*rows, strict=True)))


@functools.cache
def accuracy(encoder, method, seed, target_labeled=0, wrong=0.0, share=0.5):
    source = make_texts(200, 21)
    draw = np.random.default_rng(seed)
    flip = {"good": "bad", "bad": "good"}
    source = [(text, flip[label] if draw.random() < wrong else label) for text, label in source]
    given = (
        {"target_labeled": columns(make_texts(target_labeled, 24, 0.5)), "target_labeled_share": share} if target_labeled else {}
    )
    target, test = make_texts(400, 22, 0.5), make_texts(400, 23, 0.5)
    adapted = mtem.adapt(
        columns(source), [text for text, _ in target], model=encoder, method=method, seed=seed, **SHARED, **given
    )
    return float(np.mean([found == label for found, (_, label) in zip(adapted.predict([t for t, _ in test]), test, strict=True)]))


@pytest.mark.parametrize("method", ["mtem", "dann", "fixmatch", "cst", "mme", "biat"])
def test_adaptation_beats_source_only(encoder, method):
    gains = [accuracy(encoder, method, seed) - accuracy(encoder, "source-only", seed) for seed in SEEDS]
    assert np.mean(gains) > GAIN, gains


def test_wind_beats_training_on_everything_alike_when_labels_are_wrong(encoder):
    # without a share: as half of every batch the labeled target texts would outweigh the wrong labels
    noisy = {"target_labeled": 60, "wrong": 0.45, "share": None}
    gains = [accuracy(encoder, "wind", seed, **noisy) - accuracy(encoder, "source-only", seed, **noisy) for seed in SEEDS]
    assert np.mean(gains) > GAIN, gains


@pytest.mark.parametrize("method", ["mtem", "mme", "biat"])
def test_labeled_target_texts_do_not_harm(encoder, method):
    """Semi-supervised: at least as good as In+Out, the same texts without adaptation."""
    assert accuracy(encoder, method, 0, target_labeled=20) > accuracy(encoder, "source-only", 0, target_labeled=20) - 0.01
