"""Scoring side by side: the same figures as one plain pass per text, on every architecture, and a model left as it was."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

from mtem import inference
from mtem.data.loading import load_corpus
from mtem.data.threads import read
from mtem.errors import RequestError
from mtem.models import scoring
from mtem.models.heads import CosineHead
from mtem.models.text import TextModel
from mtem.models.trees.model import BigcnModel, BigcnSettings
from mtem.progress import Progress
from tests.conftest import SHAPES, make_encoder, make_texts
from tests.threads import make_threads, write_threads
from tests.tolerance import assert_near

CLASSES = ("bad", "good", "neither")
TEXTS = [text for text, _ in make_texts(60, 3)] + ["", "good1", "word1 " * 40]
QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """These few texts are many batches."""
    monkeypatch.setattr(inference, "TOKENS_PER_BATCH_CPU", 48)


@contextlib.contextmanager
def threads(count: int = 2):
    """So many inside, which must still be so many at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
        assert after == count


def score(*arguments, count: int = 2, **named) -> inference.Outputs:
    with threads(count):
        return inference.compute_logits(*arguments, **named)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: make_encoder(tmp_path_factory.mktemp(shape), shape) for shape in SHAPES}


def made(directory) -> TextModel:
    torch.manual_seed(1)
    model = TextModel.create(directory, CLASSES, max_length=24)
    with torch.no_grad():  # scores far enough apart for the labels to mean something
        model.head.weight.mul_(5 / model.head.weight.norm())
    return model


@pytest.fixture(params=SHAPES)
def model(request, directories):
    return made(directories[request.param])


@pytest.fixture
def bert(directories):
    return made(directories["bert"])


@torch.no_grad()
def plainly(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    """One text at a time through the model as it is, in evaluation mode: nothing padded, nothing skipped."""
    training = model.training
    model.eval()
    with model.all_positions() if isinstance(model, TextModel) else contextlib.nullcontext():
        found = [model.logits_and_features(model.collate(tokens, np.array([row]))) for row in range(len(tokens))]
    model.train(training)
    return tuple(torch.cat(part).numpy() for part in zip(*found, strict=True))


def check(model, tokens) -> None:
    logits, features = plainly(model, tokens)
    assert logits.std(axis=0).min() > 1e-2, "the texts must differ"
    found = score(model, tokens, features=True)
    assert_near(found.logits, logits)
    assert_near(found.features, features)
    alone = score(model, tokens)
    assert alone.features is None
    np.testing.assert_array_equal(alone.logits, found.logits)
    # a probability moves by what its score moves, and that has the scores' size
    largest = float(np.abs(logits).max())
    assert_near(inference.probabilities(found.logits), inference.probabilities(logits), dtype=torch.float32, size=largest)
    np.testing.assert_array_equal(found.logits.argmax(axis=1), logits.argmax(axis=1))
    rows = np.array([len(tokens) - 1, 0, 7, 7, *range(20, 50)])
    assert_near(score(model, tokens, rows).logits, logits[rows])


# ---------------------------------------------------------------------- the same figures


def test_scores_and_features_are_those_of_a_plain_pass(model):
    check(model, model.encode_texts(TEXTS))


def test_so_they_are_behind_frozen_layers(model, tmp_path):
    model.freeze(2)
    tokens = model.encode_texts(TEXTS)
    check(model, tokens)
    check(model, model.keep_lower(tokens, tmp_path / "lower.npy", QUIET, "frozen", 1e9))


def test_so_they_are_with_a_cosine_head_and_a_corrected_prior(bert):
    bert.head = CosineHead(bert.head, 0.05)
    with torch.no_grad():
        bert.head.bias.add_(torch.tensor([0.7, -0.2, 0.1]))
    check(bert, bert.encode_texts(TEXTS))


def test_so_they_are_for_threads(tmp_path):
    rows = make_threads(70, 2, largest=9)
    corpus = load_corpus(str(write_threads(tmp_path / "threads.jsonl", rows)), labeled=True)
    torch.manual_seed(1)
    model = BigcnModel.create("bigcn", CLASSES, corpora=[corpus])
    with torch.no_grad():
        model.head.weight.mul_(20)
    check(model, model.encode_threads([read(row, "here")[0] for row in rows]))


def test_half_precision_stays_half_precision(bert, monkeypatch):
    tokens = bert.encode_texts(TEXTS)
    exact = score(bert, tokens).logits
    bert.precision = torch.bfloat16
    monkeypatch.setattr(type(bert), "autocast", lambda self: torch.autocast("cpu", dtype=self.precision))  # as on a GPU
    rough = score(bert, tokens).logits
    assert 1e-4 < np.abs(rough - exact).max() < 0.1
    np.testing.assert_allclose(rough, plainly(bert, tokens)[0], atol=0.05)


def test_on_a_cpu_predictions_are_in_full_precision(bert):
    tokens = bert.encode_texts(TEXTS)
    exact = score(bert, tokens).logits
    bert.precision = torch.bfloat16
    np.testing.assert_array_equal(score(bert, tokens).logits, exact)


def test_the_number_of_threads_changes_nothing(bert):
    tokens = bert.encode_texts(TEXTS)
    found = [score(bert, tokens, features=True, count=count) for count in (1, 2, 3)]
    for other in found[1:]:
        np.testing.assert_array_equal(other.logits, found[0].logits)
        np.testing.assert_array_equal(other.features, found[0].features)


def test_a_file_gets_what_its_texts_get(bert, tmp_path, monkeypatch):
    from mtem.data import readers, writers

    monkeypatch.setattr(inference, "ROWS_AT_ONCE", 40)
    bert.head.bias.data = torch.tensor([0.0, 0.3, -0.1])
    with writers.Writer(tmp_path / "in.jsonl") as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"number": number, "text": text})
    with threads():
        done = inference.predict_file(bert, tmp_path / "in.jsonl", tmp_path / "out.jsonl", all_probabilities=True)
    rows = [record for _, record in readers.read_rows(tmp_path / "out.jsonl")]
    assert done.rows == len(TEXTS) and done.empty == 1 and [row["number"] for row in rows] == list(range(len(TEXTS)))
    wanted = inference.probabilities(plainly(bert, bert.encode_texts(TEXTS))[0])
    for row, text, probs in zip(rows, TEXTS, wanted, strict=True):
        if text:
            assert row["prediction"] == CLASSES[probs.argmax()]
            assert_near([row[f"probability {name}"] for name in CLASSES], probs, dtype=torch.float32, size=10.0)
        else:
            assert row["prediction"] is None


# ---------------------------------------------------------------------- the model stays as it was


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_number_of_threads_stay_as_they_were(bert, training):
    bert.train(training)
    modules, weights = dict(bert.named_modules()), {name: value.clone() for name, value in bert.state_dict().items()}
    hooks = [(dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in bert.modules()]
    later = []
    with threads():
        inference.compute_logits(bert, bert.encode_texts(TEXTS))
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert later == [2], "threads that come later get the number that was set"
    assert all(module.training is training for module in bert.modules())
    assert all(module is modules[name] for name, module in bert.named_modules())
    assert [(module._forward_pre_hooks, module._forward_hooks) for module in bert.modules()] == hooks
    assert all(torch.equal(value, weights[name]) for name, value in bert.state_dict().items())


def test_scorers_share_the_weights_and_nothing_that_a_pass_changes(bert):
    first, second = scoring.scorers(bert, 2)
    for ours, one, other in zip(bert.parameters(), first.parameters(), second.parameters(), strict=True):
        assert ours is one is other
    assert first.tokenizer is second.tokenizer is bert.tokenizer
    assert not {id(module) for module in first.modules()} & {id(module) for module in [*second.modules(), *bert.modules()]}


def test_scorers_too_compute_the_last_layer_at_the_first_position_only(bert):
    tokens, widths = bert.encode_texts(TEXTS), []
    for scorer in scoring.scorers(bert, 2):
        scorer.layers[-1].register_forward_hook(lambda _, __, out: widths.append(out.shape[1]))
        scorer(scorer.collate(tokens, np.array([0, 1])))
    assert widths == [1, 1]


def test_few_texts_need_no_copies(bert, monkeypatch):
    monkeypatch.setattr(inference, "scorers", lambda *_: pytest.fail("a copy of the model for three texts"))
    tokens = bert.encode_texts(TEXTS[:3])
    assert_near(score(bert, tokens).logits, plainly(bert, tokens)[0])


@pytest.mark.parametrize("budget", [48, 10_000])
def test_an_interruption_between_batches_leaves_things_in_order(bert, monkeypatch, budget):
    class Interrupting(Progress):
        def advance(self, done, figures=None):
            raise KeyboardInterrupt

    monkeypatch.setattr(inference, "TOKENS_PER_BATCH_CPU", budget)
    bert.train()
    collate, computing = TextModel.collate, set()

    def watched(self, tokens, rows):
        computing.add(threading.current_thread())
        return collate(self, tokens, rows)

    monkeypatch.setattr(TextModel, "collate", watched)
    with pytest.raises(KeyboardInterrupt):
        score(bert, bert.encode_texts(TEXTS), progress=Interrupting(quiet=True))
    assert all(module.training for module in bert.modules())
    assert computing, "some of it must have been computed"
    assert not any(thread.is_alive() for thread in computing - {threading.current_thread()}), "no thread is left computing"


def test_a_failure_in_a_thread_is_told(bert, monkeypatch):
    def failing(self, tokens, rows):
        raise RuntimeError("no memory")

    tokens = bert.encode_texts(TEXTS)
    monkeypatch.setattr(TextModel, "collate", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        score(bert, tokens)


# ---------------------------------------------------------------------- texts and threads


@pytest.fixture
def bigcn(tmp_path):
    rows = make_threads(20, 2, largest=6)
    corpus = load_corpus(str(write_threads(tmp_path / "corpus.jsonl", rows)), labeled=True)
    torch.manual_seed(1)
    return BigcnModel.create("bigcn", CLASSES, corpora=[corpus], settings=BigcnSettings(hidden=8))


@pytest.mark.parametrize("name", ["bert", "bigcn"])
def test_texts_are_encoded_as_texts_and_threads_as_threads(name, request, tmp_path, monkeypatch):
    model = request.getfixturevalue(name)
    rows = make_threads(5, 3)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS[:5]))
    write_threads(tmp_path / "threads.jsonl", rows)
    calls = []

    def record(name):
        method = getattr(model, name)

        def recorded(examples):
            calls.append((name, examples))
            return method(examples)

        monkeypatch.setattr(model, name, recorded)

    record("encode_texts")
    record("encode_threads")
    inference.predict_texts(model, TEXTS[:5])
    assert calls[0] == ("encode_texts", TEXTS[:5])
    calls.clear()
    inference.predict_texts(model, rows)
    assert calls[0] == ("encode_threads", [read(row, "here")[0] for row in rows])
    for unit in ("texts", "threads"):
        calls.clear()
        inference.predict_file(model, tmp_path / f"{unit}.jsonl", tmp_path / "out.jsonl")
        assert calls[0][0] == f"encode_{unit}"


def test_texts_and_threads_in_one_list(bert, bigcn):
    rows = make_threads(5, 3)
    mixed = [TEXTS[0], rows[0], TEXTS[1], *rows[1:]]
    for model in (bert, bigcn):
        found = inference.predict_texts(model, mixed)
        assert_near(found[[0, 2]], inference.predict_texts(model, TEXTS[:2]), dtype=torch.float32)
        assert_near(found[[1, 3, 4, 5, 6]], inference.predict_texts(model, rows), dtype=torch.float32)
    roots = [row["nodes"][0]["text"] for row in rows]
    assert_near(inference.predict_texts(bert, rows), inference.predict_texts(bert, roots), dtype=torch.float32)


def test_wrong_lists_are_refused(bert):
    for given, words in (("a text", "got one text"), ({"nodes": []}, "got one thread"), (["fine", 7], "got int at position 1")):
        with pytest.raises(RequestError, match=words):
            inference.predict_texts(bert, given)


def test_columns_are_not_overwritten(bert, tmp_path):
    (tmp_path / "first.jsonl").write_text('{"text": "good1", "prediction": "x"}\n')
    with pytest.raises(RequestError, match=r"first\.jsonl, column 'prediction': .* rename it"):
        inference.predict_file(bert, tmp_path / "first.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "second.jsonl").write_text('{"text": "good1"}\n{"text": "good1", "confidence": 1}\n')
    with pytest.raises(RequestError, match=r"second\.jsonl: row 2, column 'confidence': .* rename it"):
        inference.predict_file(bert, tmp_path / "second.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_probabilities_of_large_logits_are_finite():
    found = inference.probabilities(np.array([[1e5, 0.0], [-1e5, -1e5 + 1]], np.float32))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [[1.0, 0.0], [1 / (1 + np.e), np.e / (1 + np.e)]], rtol=1e-12)
