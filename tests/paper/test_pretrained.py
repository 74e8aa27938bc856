"""The encoder that rehearsals and cells of a target share."""

from __future__ import annotations

import dataclasses
import json
import threading

import torch
from safetensors.torch import load_file

from mtem.data.loading import load_corpus
from mtem_paper import pretrained, protocol, rehearsals, runner, splits
from mtem_paper.rehearsals import SourceTask
from tests.paper.tiny import TINY

PLACE = ("amazon", "tiny", "mixed", "kitchen", "0")


def corpora(data, pool="mixed"):
    target = splits.read("amazon", data, "kitchen", pool)
    unlabeled = load_corpus(splits.divide(target, 0).unlabeled, labeled=False, name="target")
    return load_corpus(target.sources, labeled=True), unlabeled


def test_an_encoder_is_pretrained_once_for_each_place_and_settings(amazon, encoder, tmp_path):
    store = pretrained.Store(tmp_path, str(encoder), "cpu")
    source, target = corpora(amazon)
    given = {"frozen_layers": 0, "max_length": 12, "pretrain_epochs": 1.0, "seed": 0}
    path = store.find(PLACE, source, target, given)
    written = path.stat().st_mtime_ns
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["texts"] == len(source) + len(target) and record["settings"]["pretrain_epochs"] == 1.0
    assert store.find(PLACE, source, target, given) == path and path.stat().st_mtime_ns == written
    other = store.find(PLACE, source, target, {**given, "pretrain_epochs": 2.0})
    assert other != path and other.parent == path.parent
    one, two = load_file(path), load_file(other)
    assert one.keys() == two.keys() and not all(torch.equal(one[name], two[name]) for name in one)
    assert store.find(PLACE, source, target, {**given, "pretrain_epochs": 0.0}) is None


def test_processes_wait_for_the_first(tmp_path):
    order, entered = [], threading.Event()

    def second():
        entered.wait()
        with pretrained.locked(tmp_path / "folder" / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with pretrained.locked(tmp_path / "folder" / "lock"):
        entered.set()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_rehearsals_of_a_target_have_the_encoder_of_its_cells(amazon, encoder, tmp_path, monkeypatch):
    about = protocol.DATASETS["amazon"]
    share = protocol.Share(given={"pretrain_epochs": 1.0})
    monkeypatch.setitem(protocol.DATASETS, "amazon", dataclasses.replace(about, planned={**about.planned, "tiny": share}))
    tasks = rehearsals.plan(
        "amazon", "tiny", targets=["kitchen"], methods=["fixmatch"], seeds=[0], overrides=TINY | {"epochs": 1}
    )
    sources = [task for task in tasks if isinstance(task.work, SourceTask) and not task.final]
    assert [task.work.domain for task in sources] == ["books", "dvd", "electronics"]
    rehearser = rehearsals.Rehearser(amazon, str(encoder), "cpu", tmp_path)
    assert not rehearsals.run([*sources, *(task for task in tasks if task not in sources)][:4], rehearser).failed
    (path,) = (tmp_path / runner.SOURCE_MODELS / pretrained.FOLDER).glob("*/*/*/*.safetensors")
    assert path.relative_to(tmp_path / runner.SOURCE_MODELS / pretrained.FOLDER).parts[:3] == ("amazon", "tiny", "mixed")
    cells = protocol.plan(
        ["general"], "amazon", str(encoder), "tiny", seeds=[0], targets=["kitchen"], settings_=["unsupervised"], pools=["mixed"],
        variants=["out"], overrides=TINY,
    )  # fmt: skip
    monkeypatch.setattr(pretrained, "pretrain_model", None)  # it must not be needed again
    assert not runner.run(cells, tmp_path, data=amazon, model=str(encoder), device="cpu").failed
