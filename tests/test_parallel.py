"""Two processes follow one: every method and every engine, with gloo on the CPU."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import mtem
from tests.conftest import make_texts, write_jsonl
from tests.threads import make_threads, write_threads
from tests.together import distance, outcome, run_together

# Eleven texts in a batch: six of them in one process and five in the other. Plain steps: Adam would turn the rounding of a
# gradient that is 0 into a whole step.
COMMON = {
    "max_length": 16, "batch_size": 11, "source_epochs": 0, "steps": 3, "optimizer": "sgd", "learning_rate": 0.2,
    "schedule": "constant", "max_grad_norm": 0.0, "evaluations": 1, "criterion": "last", "left_out_models": 0,
    "frozen_layers": 0, "ema_decay": 0.5, "view": "mixed", "view_strength": 0.3,
}  # fmt: skip
MTEM = {"method": "mtem", "preset": "learned", "index_step": "rms", "threshold": 0.0, "virtual_learning_rate": 0.5}
THREADS = {"model": "bigcn", "features": "tfidf", "graph_dropout": 0.0, "drop_edge": 0.0, "head_dropout": 0.0}
CASES = {
    "perturbed": {"method": "fixmatch", "threshold": 0.5, "view_radius": 0.1},
    "layerwise": {**MTEM, "engine": "layerwise"},
    "forward": {**MTEM, "engine": "forward"},
    "taylor": {**MTEM, "engine": "taylor", "taylor_step": 0.1},
    "second-order": {**MTEM, "engine": "second-order"},
    "layerwise at theta": {**MTEM, "engine": "layerwise", "virtual_step": False, "index_step": "soft"},
    "layerwise in parts": {**MTEM, "engine": "layerwise", "microbatches": 2, "activation_checkpointing": True},
    "second-order in parts": {**MTEM, "engine": "second-order", "microbatches": 2},
    "shared index": {**MTEM, "index_mode": "shared", "target_class_prior": "auto", "class_weights": "balanced"},
    "frozen layers": {**MTEM, "frozen_layers": 2, "view": "mask"},
    "source-only": {
        "method": "source-only",
        "source_epochs": 0.5,
        "source_learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "pretrain_epochs": 0.5,
        "left_out_models": 1,
    },
    "dann": {"method": "dann", "discriminator_dropout": 0.0},
    "fixmatch": {"method": "fixmatch", "threshold": 0.5, "target_class_prior": "auto"},
    "cst": {"method": "cst", "threshold": 0.5},
    "mme": {"method": "mme", "learning_rate": 0.02},
    "biat": {"method": "biat", "labeled": True},
    "wind": {"method": "wind", "labeled": True, "class_weights": "balanced"},
    "threads": {**MTEM, "index_mode": "shared", **THREADS},
    "biat over threads": {"method": "biat", **THREADS},
    "perturbed over threads": {**MTEM, "view_radius": 0.1, **THREADS},
    "wind taylor": {"method": "wind", "labeled": True, "engine": "taylor", "taylor_step": 0.1, "weight_step": "norm"},
}


@pytest.fixture(scope="module")
def requests(encoder, reviews, tmp_path_factory):
    """The cases as arguments of `mtem.adapt`, with an encoder without dropout: its draws are each process's own."""
    folder = tmp_path_factory.mktemp("without-dropout")
    without = shutil.copytree(encoder, folder / "encoder")
    config = json.loads((without / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (without / "config.json").write_text(json.dumps(config))
    few = write_jsonl(folder / "few.jsonl", make_texts(5, 9, 0.7))
    data = {"source": [str(reviews["books"]), str(reviews["dvd"])], "target": str(reviews["kitchen"]), "model": str(without)}
    threads = {
        "source": [str(write_threads(folder / f"event{seed}.jsonl", make_threads(40, seed))) for seed in (1, 2)],
        "target": str(write_threads(folder / "ferguson.jsonl", make_threads(40, 3, 0.5), labeled=False)),
    }
    all_requests = {}
    for name, case in CASES.items():
        given = {**COMMON, **case}
        if given.get("model") == "bigcn":
            all_requests[name] = {**threads, **given}
            continue
        labeled = {"target_labeled": str(few)} if given.pop("labeled", False) else {}
        all_requests[name] = {**data, **labeled, **given}
    return all_requests


@pytest.fixture(scope="module")
def in_two(requests, tmp_path_factory):
    """The outcomes in two processes; among them that of a run which one process has begun."""
    folder = tmp_path_factory.mktemp("together")
    begun = {**requests["layerwise"], "output": str(folder / "begun"), "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        mtem.adapt(**begun, log_every=1, observe=interrupt)
    return run_together({**requests, "begun by one": {**begun, "resume": True}}, folder)


def interrupt(line, model):
    if line["stage"] == "adapt" and line["step"] == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", CASES)
def test_two_processes_follow_one(name, requests, in_two):
    one, two = outcome(requests[name]), in_two[name]
    moved = max(distance(one["weights"][key], one["start"][key]) for key in one["weights"])
    apart = max(distance(one["weights"][key], two["weights"][key]) for key in one["weights"])
    if CASES[name]["method"] != "source-only":  # which is trained before the adaptation, with Adam
        assert moved > 1e-3 and apart < 1e-3 * moved
    np.testing.assert_allclose(one["confidence"], two["confidence"], atol=2e-3)
    assert len(one["history"]) == len(two["history"]) > 1
    for line, other in zip(one["history"], two["history"], strict=True):
        assert line == pytest.approx(other, rel=5e-3, abs=1e-5)
    if one["index"] is not None:
        assert np.std(one["index"]) > 0
        np.testing.assert_allclose(one["index"], two["index"], atol=2e-3)


def test_two_processes_go_on_with_a_run_of_one(requests, in_two):
    one, two = outcome(requests["layerwise"]), in_two["begun by one"]
    assert len(two["history"]) < len(one["history"])  # it did not begin again
    assert max(distance(one["weights"][key], two["weights"][key]) for key in one["weights"]) < 1e-4
    np.testing.assert_allclose(one["index"], two["index"], atol=2e-3)
