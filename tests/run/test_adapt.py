"""A whole adaptation on a tiny encoder: the run directory, repeatability, kill and resume, choice, semi-supervised, K classes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import mtem
from mtem import inference
from mtem.errors import RequestError
from mtem.run.pipeline import Run
from mtem.selection import accuracy_estimate, criteria
from mtem.training.weights import add_bias
from tests.bench import stopped_after
from tests.conftest import make_encoder, make_texts, write_jsonl
from tests.processes import content, wait_for_begun
from tests.tolerance import assert_near, assert_weights_near

MODEL = "model/model.safetensors"


def weights(path):
    return load_file(path / MODEL)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def adapt(tiny, **changes):
    return mtem.adapt(**{**tiny, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, encoder, reviews):
    output = tmp_path_factory.mktemp("finished") / "run"
    adapted = mtem.adapt(
        [str(reviews["books"]), str(reviews["dvd"])], str(reviews["kitchen"]), model=encoder, output=output,
        preset="learned", max_length=16, batch_size=10, source_epochs=4, source_learning_rate=3e-3, epochs=2, learning_rate=1e-3,
        frozen_layers=0,
    )  # fmt: skip
    return output, adapted


def test_a_run_that_saves_memory(tiny, tmp_path):
    """Recomputed layers draw the same dropout masks; parts of batches draw others."""
    short = {"steps": 2, "source_epochs": 0.5, "evaluations": 1, "left_out_models": 0}
    adapt(tiny, **short, output=tmp_path / "plain")
    adapt(tiny, **short, output=tmp_path / "again", activation_checkpointing=True)
    plain, again = weights(tmp_path / "plain"), weights(tmp_path / "again")
    assert_weights_near(again, plain)
    adapted = adapt(tiny, **short, output=tmp_path / "parts", microbatches=3)
    assert adapted.record["settings"]["microbatches"] == 3 and adapted.model.microbatches == 3
    assert not same(weights(tmp_path / "parts"), plain)


def test_repeated_texts_alone_cannot_be_held_out(tiny, tmp_path):
    """Copies of a text stay on one side of the split, so two different texts leave nothing to validate on."""
    with pytest.raises(RequestError, match="no texts could be held out for validation"):
        adapt(tiny, source=(["good1"] * 3 + ["bad1"] * 3, ["good"] * 3 + ["bad"] * 3), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_directory(finished):
    output, _ = finished
    record = json.loads((output / "run.json").read_text())
    assert record["status"] == "done" and record["classes"] == ["bad", "good"]
    assert [entry["domain"] for entry in record["data"]["source"]] == ["books", "dvd"]
    assert record["settings"]["index_initial"] == 1.0 and record["versions"]["torch"] == metadata.version("torch")
    assert {"before", "after"} == set(record["estimate"]) and record["memory"]["process"] > 2**20
    history = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    stages = {line["stage"] for line in history}
    assert stages == {"source", "adapt", "evaluation"}
    adapting = [line for line in history if line["stage"] == "adapt"]
    assert {"temperature", "target_loss", "source_loss", "meta_loss", "index_quantiles", "learning_rate"} <= adapting[0].keys()
    table = pq.read_table(output / "indexes.parquet").to_pandas()
    assert list(table.columns) == ["row", "text", "index", "prediction", "confidence", "source_prediction", "source_confidence"]
    assert len(table) == 80 and table["index"].between(1.0, 5).all() and table["index"].nunique() > 2
    assert set(table["prediction"]) <= {"bad", "good"} and table["confidence"].between(0.5, 1).all()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["source.safetensors"]
    assert not list(output.rglob("*.pt")) + list(output.rglob("*.bin")) + list(output.rglob("*.pkl"))


def test_loading_gives_the_same_predictions(finished):
    output, adapted = finished
    texts = [text for text, _ in make_texts(30, 9, 0.7)]
    loaded = mtem.load(output)
    assert loaded.predict(texts) == adapted.predict(texts)
    assert_near(loaded.predict_proba(texts), adapted.predict_proba(texts), dtype=torch.float32)
    assert loaded.classes == ("bad", "good")
    pd.testing.assert_frame_equal(loaded.indexes, adapted.indexes)


def test_saving_elsewhere_keeps_everything(finished, tmp_path):
    output, _ = finished
    loaded = mtem.load(output)
    loaded.indexes  # noqa: B018  (read before it is written elsewhere)
    loaded.save(tmp_path / "copy")
    assert same(weights(output), weights(tmp_path / "copy"))
    assert mtem.load(tmp_path / "copy").record == loaded.record
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in output.iterdir()} - {"history.jsonl"}


def test_transformers_pipeline_gives_the_same_labels(finished):
    from transformers import pipeline

    output, adapted = finished
    texts = [text for text, _ in make_texts(20, 10, 0.7)]
    classify = pipeline("text-classification", str(output / "model"))
    assert [one["label"] for one in classify(texts)] == adapted.predict(texts)
    longer = ["bad1 " + "word1 " * 200, "good2 " * 30]  # the pipeline itself never cuts texts unless told so
    assert [one["label"] for one in classify(longer, truncation=True)] == adapted.predict(longer)


def test_a_run_repeats_bit_for_bit(tiny, tmp_path):
    adapt(tiny, output=tmp_path / "a")
    adapt(tiny, output=tmp_path / "b")
    adapt(tiny, output=tmp_path / "c", seed=1)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_without_an_output_nothing_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapted = adapt(tiny)
    assert not list(tmp_path.iterdir())
    assert len(adapted.indexes) == 80 and adapted.predict(["good1 good2"])[0] in ("good", "bad")
    adapted.save(tmp_path / "kept")
    assert mtem.load(tmp_path / "kept").predict(["bad1", "good3"]) == adapted.predict(["bad1", "good3"])


@pytest.mark.parametrize("where", [("source", 3), ("source", 14), ("adapt", 1), ("adapt", 5)])
def test_a_stopped_run_resumes_to_the_same_weights(tiny, tmp_path, monkeypatch, where):
    stage, stop = where
    whole = adapt(tiny, output=tmp_path / "whole", checkpoint_seconds=0.0)
    with stopped_after(stop, stage):
        adapt(tiny, output=tmp_path / "cut", checkpoint_seconds=0.0)
    with pytest.raises(RequestError, match="not finished"):
        mtem.load(tmp_path / "cut")
    resumed = adapt(tiny, output=tmp_path / "cut", resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    pd.testing.assert_frame_equal(resumed.indexes, whole.indexes)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "history.jsonl").read_text().splitlines()]
    other = [json.loads(line)["step"] for line in (tmp_path / "whole" / "history.jsonl").read_text().splitlines()]
    assert steps == other


# The command line, but for one thing: in the last but one of its adapting steps it waits to be killed.
WAITS = """
import sys, time
from mtem.cli import main
from mtem.training.trainer import Trainer

update, done = Trainer.update, []

def waiting(self, *given, **named):
    done.append(self.name)
    if done.count("adapt") == {last}:
        time.sleep(3600)
    update(self, *given, **named)

Trainer.update = waiting
main.main()
"""


def test_a_killed_process_resumes_to_the_same_weights(tiny, tmp_path):
    """A real process and a real SIGKILL, whatever it was doing; but it cannot have finished."""
    adapt(tiny, output=tmp_path / "whole", epochs=6)
    words = ["adapt", "--output", str(tmp_path / "cut"), "--model", str(tiny["model"])]
    words += [word for path in tiny["source"] for word in ("--source", path)] + ["--target", tiny["target"]]
    given = {name: value for name, value in tiny.items() if name not in ("source", "target", "model")}
    given |= {"epochs": 6, "checkpoint_seconds": 0}
    words += [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    steps = json.loads((tmp_path / "whole" / "run.json").read_text())["steps"]["adapt"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(last=steps - 1), *words], env=environment, stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "errors").open("wb"),
    )  # fmt: skip
    history = tmp_path / "cut" / "history.jsonl"
    try:
        wait_for_begun(process, lambda: '"stage": "adapt"' in content(history), "a line of the adaptation")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, (tmp_path / "errors").read_text()
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["status"] == "running"
    assert not (tmp_path / "cut" / MODEL).exists()
    done = subprocess.run([sys.executable, "-m", "mtem.cli", *words, "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming: stage adapt" in done.stderr
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_resuming_a_finished_run_changes_nothing(tiny, tmp_path):
    adapt(tiny, output=tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert adapt(tiny, output=tmp_path / "run", resume=True).classes == ("bad", "good")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("change", "word"), [({"epochs": 2}, "epochs"), ({"seed": 5}, "seed"), ({"preset": "paper"}, "preset")])
def test_resuming_with_another_request_is_refused(tiny, tmp_path, change, word):
    adapt(tiny, output=tmp_path / "run")
    with pytest.raises(RequestError, match=word):
        adapt(tiny, output=tmp_path / "run", resume=True, **change)


def test_resuming_with_changed_data_is_refused(tiny, tmp_path):
    source = write_jsonl(tmp_path / "books.jsonl", make_texts(40, 1))
    adapt(tiny, source=str(source), output=tmp_path / "run")
    write_jsonl(source, make_texts(42, 1))
    with pytest.raises(RequestError, match="source data have changed"):
        adapt(tiny, source=str(source), output=tmp_path / "run", resume=True)


def test_another_run_is_never_overwritten(tiny, tmp_path):
    adapt(tiny, output=tmp_path / "run")
    kept = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(RequestError, match="holds another run"):
        adapt(tiny, output=tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").write_text("mine")
    with pytest.raises(RequestError, match="not empty"):
        adapt(tiny, output=tmp_path / "full")
    assert (tmp_path / "run" / "run.json").read_bytes() == kept


def test_a_full_disk_fails_in_one_line_and_resumes(tiny, tmp_path, monkeypatch):
    import errno

    from mtem import tensors

    def full(tensors, path, *rest):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(mtem.RunError, match="disk is full"):
        adapt(tiny, output=tmp_path / "run")
    assert not [path for path in (tmp_path / "run").rglob("*") if ".part" in path.name]
    monkeypatch.undo()
    adapt(tiny, output=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


# ---------------------------------------------------------------------- choice of the weights


def test_the_source_model_is_kept_when_nothing_beats_it(tiny, tmp_path, monkeypatch):
    calls = []

    def falling(criterion, evidence):
        calls.append(criterion)
        return -float(len(calls))

    monkeypatch.setattr(criteria, "score", falling)
    adapted = adapt(tiny, output=tmp_path / "run")
    assert adapted.record["selection"]["kept_source_model"] and adapted.record["selection"]["chosen_step"] == 0
    assert "source model is kept" in adapted.record["warnings"][0]
    source = load_file(tmp_path / "run" / "checkpoints" / "source.safetensors")
    kept = weights(tmp_path / "run")
    assert all(torch.equal(value, kept[name.removeprefix("network.")]) for name, value in source.items())


def test_the_best_candidate_is_restored_not_the_last(tiny, tmp_path, monkeypatch):
    seen = []

    def second_is_best(criterion, evidence):
        if criterion == "density":
            seen.append(evidence.target_logits)
            return {1: 0.0, 2: 2.0}.get(len(seen), 1.0)
        return 0.0

    monkeypatch.setattr(criteria, "score", second_is_best)
    adapted = adapt(tiny, output=tmp_path / "run", criterion="density")
    candidates = adapted.record["selection"]["candidates"]
    assert candidates[0]["step"] == 0 and len(candidates) == 4
    assert adapted.record["selection"]["chosen_step"] == candidates[1]["step"]
    table = adapted.indexes
    chosen = [("bad", "good")[number] for number in seen[1].argmax(axis=1)]
    assert list(table["prediction"]) == chosen  # the sample is all 80 texts


@pytest.mark.parametrize("criterion", ["source-validation", "infomax", "infomax-raw", "density", "dev", "reverse", "meta"])
def test_every_criterion_serves_a_run(tiny, criterion):
    record = adapt(tiny, criterion=criterion, source_epochs=1).record
    assert record["selection"]["criterion"] == criterion
    assert all(np.isfinite(entry["score"]) for entry in record["selection"]["candidates"])


# ---------------------------------------------------------------------- shapes of the task


def test_five_classes_keep_their_names(encoder, tmp_path):
    draw = np.random.default_rng(0)
    names = ["ünï", "two words", "3", "<b>four</b>", "five"]
    texts = [(f"word{3 * (k := int(draw.integers(5)))} word{int(draw.integers(20, 40))}", names[k]) for _ in range(150)]
    adapted = mtem.adapt(
        tuple(map(list, zip(*texts, strict=True))), [f"word{i % 40} word{i % 7}" for i in range(60)], model=encoder,
        output=tmp_path / "run", source_epochs=2, epochs=1, max_length=8, batch_size=10,
    )  # fmt: skip
    assert set(adapted.classes) == set(names) and mtem.load(tmp_path / "run").classes == adapted.classes
    assert mtem.load(tmp_path / "run").predict_proba(["word3"]).shape == (1, 5)


def test_few_labeled_target_texts_join_in(tiny, reviews, tmp_path, monkeypatch):
    few = write_jsonl(tmp_path / "few.jsonl", make_texts(6, 30, 0.7))
    rows = []
    original = Run.prepare

    def watched(self):
        original(self)
        stream = self.inputs.source_stream
        rows.extend(stream.rows(step) for step in range(stream.per_epoch))
        rows.append(set(self.inputs.target_labeled_rows.tolist()))

    monkeypatch.setattr(Run, "prepare", watched)
    record = adapt(tiny, target_labeled=str(few), target_labeled_share=0.3).record
    extra = rows.pop()
    assert record["texts"]["target_labeled"] == 6 and len(extra) == 6
    assert all(len(extra & set(batch.tolist())) == 3 for batch in rows if len(batch) == 10)
    rows.clear()
    adapt(tiny, target_labeled=str(few))
    extra = rows.pop()
    assert extra <= {row for batch in rows for row in batch.tolist()}, "without a share they come as often as the others"


def test_target_labels_of_an_unknown_class_are_refused(tiny, tmp_path):
    few = write_jsonl(tmp_path / "few.jsonl", [("good1", "good"), ("word1", "mediocre")])
    with pytest.raises(RequestError, match=r"few\.jsonl.*row 2.*mediocre"):
        adapt(tiny, target_labeled=str(few))


@pytest.mark.parametrize("layers", [1, 2, 3, -1])
def test_frozen_layers_do_not_move(tiny, encoder, tmp_path, layers):
    adapt(tiny, output=tmp_path / "run", frozen_layers=layers)
    start, end = load_file(encoder / "model.safetensors"), weights(tmp_path / "run")
    count = layers % 3 if layers < 0 else layers
    for name, value in start.items():
        moved = not torch.equal(value, end[f"bert.{name}"])
        layer = name.split(".")[2] if name.startswith("encoder.layer") else None
        if name.startswith("embeddings") or (layer is not None and int(layer) < count):
            assert not moved, name
        elif layer is not None and name.endswith("dense.weight"):
            assert moved, name


def test_source_only_is_a_run_like_any_other(tiny, tmp_path):
    adapted = adapt(tiny, method="source-only", output=tmp_path / "run")
    assert adapted.record["steps"]["adapt"] == 0 and adapted.record["warnings"] is not None
    assert "index" not in adapted.indexes and not any("kept" in line for line in adapted.record["warnings"])


def test_paper_preset_is_algorithm_1(tiny):
    free = {
        name: value for name, value in tiny.items() if name not in ("learning_rate", "batch_size", "max_length", "frozen_layers")
    }
    record = mtem.adapt(**free, preset="paper").record
    expected = {
        "optimizer": "sgd",
        "learning_rate": 5e-5,
        "batch_size": 50,
        "source_weight": 0.0,
        "index_step": "raw",
        "index_learning_rate": 0.1,
    }
    assert expected.items() <= record["settings"].items() and record["resolved"]["frozen_layers"] == 0


def test_unknown_names_are_refused_with_what_there_is(tiny):
    with pytest.raises(RequestError, match=r"unknown setting 'epoch': did you mean 'epochs'"):
        adapt(tiny, epoch=3)
    with pytest.raises(RequestError, match="unknown method 'dan'"):
        adapt(tiny, method="dan")
    with pytest.raises(RequestError, match="unknown preset"):
        adapt(tiny, preset="best")
    with pytest.raises(RequestError, match="between 0"):
        adapt(tiny, view_strength=3.0)


# ---------------------------------------------------------------------- a given source model, and an observer


@pytest.mark.parametrize("method", ["mtem", "mme", "dann"])
def test_a_given_source_model_leads_to_the_same_weights(tiny, tmp_path, method):
    whole = adapt(tiny, method=method, output=tmp_path / "whole")
    before = adapt(tiny, method=method if method == "mme" else "source-only", steps=0)
    adapt(tiny, method=method, output=tmp_path / "begun", source_model=before)
    adapt(tiny, method=method, output=tmp_path / "again", source_model=tmp_path / "whole", source_epochs=7)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "begun"))
    record = json.loads((tmp_path / "begun" / "run.json").read_text())
    assert record["steps"]["source"] == 0 and record["source_model"]["path"] is None and whole.record["source_model"] is None
    assert record["selection"] == whole.record["selection"]
    source = [load_file(tmp_path / run / "checkpoints" / "source.safetensors") for run in ("whole", "begun", "again")]
    assert same(source[0], source[1])
    stages = {json.loads(line)["stage"] for line in (tmp_path / "begun" / "history.jsonl").read_text().splitlines()}
    assert stages == {"adapt", "evaluation"}
    if method != "mme":  # whose head is saved as a linear one, up to rounding
        assert same(source[0], source[2]) and same(weights(tmp_path / "whole"), weights(tmp_path / "again"))


def test_a_source_model_may_have_been_trained_with_other_layers_frozen(tiny, tmp_path):
    before = adapt(tiny, method="source-only", output=tmp_path / "before")
    adapt(tiny, source_model=before, frozen_layers=2, method="source-only", output=tmp_path / "after")
    assert same(weights(tmp_path / "before"), weights(tmp_path / "after"))


def test_a_source_model_that_does_not_fit_is_refused(tiny, tmp_path):
    before = adapt(tiny, method="source-only", output=tmp_path / "before")
    with pytest.raises(RequestError, match="head is of another kind"):
        adapt(tiny, method="mme", source_model=before)
    texts = make_texts(40, 1)
    other = ([text for text, _ in texts], [label.upper() for _, label in texts])
    with pytest.raises(RequestError, match=r"classes are bad, good.*BAD, GOOD"):
        adapt(tiny, source=other, source_model=tmp_path / "before")
    wider = make_encoder(tmp_path / "other", "distilbert")
    with pytest.raises(RequestError, match="does not fit this model"):
        adapt(tiny, model=wider, source_model=before)
    (tmp_path / "before" / "checkpoints" / "source.safetensors").unlink()
    with pytest.raises(RequestError, match="not kept"):
        adapt(tiny, source_model=tmp_path / "before")


def test_a_run_from_a_source_model_resumes_with_that_one_only(tiny, tmp_path):
    one, other = (adapt(tiny, method="source-only", seed=seed) for seed in (0, 1))
    adapt(tiny, output=tmp_path / "whole", source_model=one)
    with stopped_after(3):
        adapt(tiny, output=tmp_path / "cut", source_model=one, checkpoint_seconds=0.0)
    for wrong in (other, None):
        with pytest.raises(RequestError, match="another source model"):
            adapt(tiny, output=tmp_path / "cut", source_model=wrong, resume=True)
    adapt(tiny, output=tmp_path / "cut", source_model=one, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.parametrize("method", ["mtem", "fixmatch"])
def test_an_observer_changes_nothing(tiny, tmp_path, method):
    lines = []

    def observe(line, model):
        lines.append(line)
        torch.rand(7)  # an observer may draw
        mtem.run.result.inference.predict_texts(model, ["good1 word1"])

    adapt(tiny, method=method, output=tmp_path / "alone", log_every=1)
    adapt(tiny, method=method, output=tmp_path / "seen", log_every=1, observe=observe)
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "seen"))
    written = [json.loads(line) for line in (tmp_path / "seen" / "history.jsonl").read_text().splitlines()]
    assert [{"seconds": entry["seconds"], **line} for entry, line in zip(written, lines, strict=True)] == written
    without = []
    adapt(tiny, method=method, log_every=1, observe=lambda line, model: without.append(line))
    assert without == lines, "a run without a folder is observed all the same"


@pytest.mark.parametrize("prior", ["none", "uniform"])
def test_an_observer_sees_the_weights_that_are_judged(tiny, reviews, prior):
    """Among them the ones that are kept, with the correction of the prior that the finished model has."""
    texts = [text for text, _ in make_texts(30, 9, 0.7)]
    seen = {}

    def observe(line, model):
        if line["stage"] == "evaluation":
            kept = [value.clone() for value in (model.head.weight, model.head.bias)]
            add_bias(model, line.get("bias", [0.0, 0.0]))
            seen[line["step"]] = mtem.run.result.inference.predict_texts(model, texts)
            with torch.no_grad():
                model.head.bias.copy_(kept[1])

    adapted = adapt(tiny, target_class_prior=prior, observe=observe)
    assert sorted(seen) == [entry["step"] for entry in adapted.record["selection"]["candidates"]]
    np.testing.assert_array_equal(seen[adapted.record["selection"]["chosen_step"]], adapted.predict_proba(texts))


@pytest.mark.parametrize("prior", ["none", "uniform"])
def test_the_estimate_compares_with_a_source_model_of_the_same_correction(tiny, monkeypatch, prior):
    calls = []

    def seen(*given, **options):
        calls.append((given, options))
        return estimate(*given, **options)

    estimate = accuracy_estimate.estimate_accuracy
    monkeypatch.setattr(accuracy_estimate, "estimate_accuracy", seen)
    monkeypatch.setattr(criteria, "choose", lambda scores: len(scores) - 1)  # not the source model
    tiny |= {"validation_share": 0.3}  # of 120 texts: enough for an estimate
    record = adapt(tiny, target_class_prior=prior).record
    (given, options) = calls[-1]
    anchor, scores = options["anchor"]
    assert record["estimate"]["after"]["source_model"] == anchor.accuracy
    means = [inference.probabilities(each).mean(axis=0) for each in (scores, given[2])]
    if prior == "uniform":
        np.testing.assert_allclose(means, 0.5, atol=1e-3)
        np.testing.assert_allclose(options["target_shares"], [0.5, 0.5])
    else:
        assert options["target_shares"] is None and record["estimate"]["before"]["accuracy"] == anchor.accuracy
    alone = adapt(tiny, target_class_prior=prior, method="source-only").record["estimate"]["after"]
    assert alone["source_model"] is None, "there is no other model"


def test_the_correction_of_the_prior_does_not_depend_on_the_method(tiny):
    """A method of many steps and one of none look at the same target texts for it."""
    target = [text for text, _ in make_texts(400, 12, 0.5)]
    found = []
    for changes in ({"method": "source-only"}, {"epochs": 2, "evaluations": 1}):
        lines = []
        adapt(
            tiny, target=target, target_class_prior="uniform", observe=lambda line, _, lines=lines: lines.append(line), **changes
        )
        found.append(next(line["bias"] for line in lines if line["stage"] == "evaluation"))
    assert found[0] == found[1]


def test_the_command_takes_a_source_model(tiny, tmp_path):
    from typer.testing import CliRunner

    from mtem.cli import main

    adapt(tiny, output=tmp_path / "whole")
    words = [word for path in tiny["source"] for word in ("--source", path)]
    words += ["--target", tiny["target"], "--model", str(tiny["model"]), "--source-model", str(tmp_path / "whole")]
    given = {name: value for name, value in tiny.items() if name not in ("source", "target", "model")}
    words += [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    told = CliRunner().invoke(main.app, ["adapt", *words, "--output", str(tmp_path / "run"), "-q"])
    assert told.exit_code == 0, told.output
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["source_model"]["path"] == str(tmp_path / "whole")


@pytest.mark.parametrize("prior", ["none", "uniform"])
def test_candidates_are_judged_as_they_would_be_shipped(tiny, monkeypatch, prior):
    """With the bias of the assumed class shares, and source texts weighted by them."""
    seen = []

    def criterion(evidence):
        seen.append(evidence)
        return float(len(seen))  # the last candidate wins

    monkeypatch.setitem(criteria.CRITERIA, "source-validation", criterion)
    source = [pair for number, pair in enumerate(make_texts(120, 1)) if number % 6]  # fewer bad ones
    adapted = adapt(
        tiny,
        source={"books": tuple(map(list, zip(*source, strict=True)))},
        target_class_prior=prior,
        criterion="source-validation",
    )
    probs = [inference.probabilities(evidence.target_logits).mean(axis=0) for evidence in seen]
    if prior == "none":
        assert all(evidence.source_weights is None for evidence in seen) and np.ptp(probs, axis=0).max() > 1e-3
        return
    np.testing.assert_allclose(probs, 0.5, atol=1e-3)
    for evidence in seen:
        by_class = np.bincount(evidence.source_labels, weights=evidence.source_weights)
        assert_near(by_class[0], by_class[1])
    shipped = inference.probabilities(seen[-1].target_logits)
    found = adapted.predict_proba(list(adapted.indexes["text"]))  # the sample is the whole target
    assert_near(np.sort(found[:, 1]), np.sort(shipped[:, 1]), size=20.0, dtype=torch.float32)


def test_an_estimate_that_rests_on_too_few_texts_is_withheld(tiny, capsys):
    assert accuracy_estimate.FEWEST_HELD_OUT_TEXTS == 20
    record = adapt(tiny, validation_share=0.1).record  # twelve texts
    assert record["estimate"] == {"before": None, "after": None} and record["texts"]["source_held_out"] == 12
    assert adapt(tiny, validation_share=0.2).record["estimate"]["after"]["accuracy"] > 0


@pytest.mark.parametrize("method", ["source-only", "mtem"])
def test_the_final_estimate_uses_all_held_out_texts(tiny, monkeypatch, method):
    """However few texts the candidates were judged on: a run without steps once estimated from 200 of 599."""
    judged, counted = [], []
    score, estimate = criteria.score, accuracy_estimate.estimate_accuracy
    monkeypatch.setattr(
        criteria, "score", lambda name, evidence: judged.append(len(evidence.source_labels)) or score(name, evidence)
    )
    monkeypatch.setattr(
        accuracy_estimate, "estimate_accuracy", lambda *given, **more: counted.append(len(given[0])) or estimate(*given, **more)
    )
    record = adapt(tiny, method=method, validation_share=0.3, evaluation_texts=10).record
    assert record["texts"]["source_held_out"] == 36
    assert set(judged) == {10} and set(counted) == {36}
