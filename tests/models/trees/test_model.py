"""The model of threads: its batches and views, its directory, and whole adaptations of it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import mtem
from mtem import inference, metagrad, methods, models, settings
from mtem.data.loading import load_corpus
from mtem.data.threads import Thread
from mtem.errors import RequestError
from mtem.methods.base import cross_entropy, functional
from mtem.models import encoders
from mtem.models.heads import CosineHead
from mtem.models.trees import model as tree_model
from mtem.models.trees.encoded import EncodedThreads
from mtem.models.trees.model import BigcnModel, BigcnSettings
from mtem.models.trees.neighbours import neighbour_means
from mtem.run.adapt import find_settings
from mtem.training.settings import TrainingSettings
from tests.bench import stopped_after
from tests.conftest import GOOD, PLAIN, make_encoder, make_texts, write_jsonl
from tests.reference import bigcn as reference
from tests.threads import make_threads, write_threads
from tests.tolerance import assert_near

CLASSES = ("bad", "good", "nëutral thing")


def weights_of(module) -> dict[str, np.ndarray]:
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


# ---------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def rows():
    return make_threads(24, 3)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "vectors.txt"
    draw = np.random.default_rng(0)
    lines = [" ".join([word, *(f"{value:.4f}" for value in draw.normal(size=12))]) for word in [*GOOD, *PLAIN]]
    path.write_text("\n".join(lines) + "\n")
    return path


KINDS = ["tfidf", "vectors", "encoder"]


@pytest.fixture(params=KINDS)
def model(request, rows, vectors, encoder):
    return make_model(rows, features=request.param, vectors=str(vectors), encoder=str(encoder))


@pytest.fixture
def tfidf(rows):
    return make_model(rows)


def make_model(rows, **changes) -> BigcnModel:
    torch.manual_seed(2)
    corpus = load_corpus(rows, labeled=True)
    made = BigcnModel.create(
        "bigcn", CLASSES, corpora=[corpus], settings=BigcnSettings(**{"hidden": 6, **changes}), max_length=32
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made.eval()


def trees_of(rows) -> list[Thread]:
    return load_corpus(rows, labeled=True).threads()


def batch(model, rows, numbers=None):
    threads = model.encode_threads(trees_of(rows))
    return model.collate(threads, np.arange(len(rows)) if numbers is None else np.asarray(numbers))


def matrices_of(model, inputs, trees) -> list[np.ndarray]:
    """Dense features of each tree as the network gets them, which are those of its posts one by one but for rounding.

    An encoder's are kept in float16: what rounds otherwise in another batch may be a whole step of float16 away, and the
    network's sums would have to be compared with that.
    """
    found = model.input_embeddings(inputs).double().numpy()
    kept = np.float16 if model.features.name == "encoder" else np.float32
    alone = np.concatenate(posts_one_by_one(model, trees))
    assert_near(found, alone, 2, dtype=getattr(torch, np.dtype(kept).name))
    return np.split(found, np.cumsum([len(tree.parents) for tree in trees])[:-1])


def posts_one_by_one(model, trees) -> list[np.ndarray]:
    matrices = []
    for tree in trees:
        lines = []
        for text in tree.texts:
            arrays = model.features.encode([text])
            if "values" in arrays:
                lines.append(arrays["values"][0].astype(np.float64))
            else:
                lines.append(np.zeros(model.features.width))
                for word, weight in zip(arrays["words"], arrays["weights"], strict=True):
                    lines[-1][word] += weight
        matrices.append(np.stack(lines))
    return matrices


def test_the_model_is_the_slow_reading_of_the_threads(model, rows):
    trees = trees_of(rows)
    inputs = batch(model, rows)
    matrices, parents = matrices_of(model, inputs, trees), [tree.parents for tree in trees]
    found = model(inputs)
    assert found.dtype is torch.float32 and found.shape == (24, 3)
    wanted = reference.logits(weights_of(model.network), matrices, parents)
    assert_near(found, wanted)

    values = model.input_embeddings(inputs)
    noise = 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    sizes = [len(part) for part in parents]
    noisy = [matrix + part.numpy() for matrix, part in zip(matrices, noise.split(sizes), strict=True)]
    wanted = reference.logits(weights_of(model.network), noisy, parents)
    assert_near(model({**inputs, "noise": noise}), wanted)
    assert_near(model({**inputs, "noise": torch.zeros_like(noise)}), found)


def test_noise_has_a_gradient_and_a_norm_for_each_thread(model, rows):
    inputs = batch(model, rows, [0, 5, 9])
    noise = torch.zeros_like(model.input_embeddings(inputs)).requires_grad_()
    (gradient,) = torch.autograd.grad(model({**inputs, "noise": noise}).logsumexp(1).sum(), noise)
    assert gradient.abs().sum() > 0
    norms = model.embedding_norms(gradient, inputs)
    assert norms.shape == (len(noise), 1)
    for number in range(3):
        mine = inputs["threads"] == number
        torch.testing.assert_close(norms[mine], gradient[mine].norm().expand(int(mine.sum()), 1))
    unit = model.unit_directions(gradient, inputs)
    torch.testing.assert_close(model.embedding_norms(unit, inputs), torch.ones(len(noise), 1))


def test_collating_is_picking_threads(model, rows):
    numbers = [7, 0, 23, 7, 2]
    together = model(batch(model, rows, numbers))
    alone = torch.cat([model(batch(model, rows, [number])) for number in numbers])
    assert_near(together, alone)
    inputs = batch(model, rows, numbers)
    first = 0
    for place, number in enumerate(numbers):
        tree = trees_of(rows)[number]
        mine = slice(first, first + len(tree.parents))
        assert inputs["roots"][place] == first and (inputs["threads"][mine] == place).all()
        assert inputs["parents"][mine].tolist() == [first + max(parent, 0) for parent in tree.parents]
        first += len(tree.parents)
    assert len(inputs["parents"]) == first


def test_taking_threads_is_collating_them(model, rows):
    whole = batch(model, rows, [7, 0, 23, 7, 2])
    for part in (slice(0, 2), slice(2, 5), slice(4, 5)):
        taken, collated = model.take(whole, part), batch(model, rows, [7, 0, 23, 7, 2][part])
        assert taken.keys() == collated.keys() and model.count(taken) == part.stop - part.start
        for name, value in collated.items():
            assert torch.equal(taken[name], value), name


def test_a_text_is_a_thread_without_replies(model):
    texts = ["good1 word3 word5", "", "word1"]
    threads = model.encode_texts(texts)
    assert threads.lengths.tolist() == [1, 1, 1] and len(model.encode_texts([])) == 0
    inputs = model.collate(threads, np.arange(3))
    matrices = matrices_of(model, inputs, [Thread([t], [-1]) for t in texts])
    assert_near(model(inputs), reference.logits(weights_of(model.network), matrices, [[-1]] * 3))


def index_gradient(model, rows, engine):
    target, source = batch(model, rows[:6]), batch(model, rows[6:12])
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    return metagrad.meta_gradient(
        lambda parameters, inputs: functional(model, parameters, inputs),
        model.trainable(),
        target,
        labels,
        torch.linspace(1.2, 4.0, 6),
        lambda parameters: cross_entropy(functional(model, parameters, source), labels),
        0.1,
        engine=engine,
        differentiable_attention=model.differentiable_attention,
    ).gradient


@pytest.mark.parametrize("training", [False, True])
def test_the_three_engines_agree(model, rows, training):
    """In training mode too: dropout and dropped edges are drawn alike in all passes."""
    model.train(training)
    wanted = index_gradient(model, rows, "second-order")
    error = lambda engine: float((index_gradient(model, rows, engine) - wanted).norm() / wanted.norm())  # noqa: E731
    assert wanted.abs().min() > 0 and error("forward") < 1e-4 and error("taylor") < 0.05


def test_engines_agree_with_noise(tfidf, rows):
    noise = 0.1 * torch.randn(tfidf.input_embeddings(batch(tfidf, rows)).shape)
    call = lambda parameters: functional(tfidf, parameters, {**batch(tfidf, rows), "noise": noise})  # noqa: E731
    plain = {name: value.detach() for name, value in tfidf.trainable().items()}
    direction = {name: torch.randn_like(value) for name, value in plain.items()}
    _, tangent = torch.func.jvp(call, (plain,), (direction,))
    ahead, behind = (call({n: v + shift * direction[n] for n, v in plain.items()}) for shift in (1e-3, -1e-3))
    near = (ahead - behind) / 2e-3
    assert float((tangent - near).norm() / near.norm()) < 1e-2


def test_half_precision_gives_float32_logits_near_the_full_ones(model, rows):
    full = model(batch(model, rows))
    model.precision = torch.bfloat16
    half = model(batch(model, rows))
    assert half.dtype is torch.float32 and not torch.equal(half, full)
    torch.testing.assert_close(half, full, atol=0.05, rtol=0.05)
    model.train()(batch(model, rows)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_head_and_features(model, rows):
    logits, features = model.logits_and_features(batch(model, rows))
    layers = [layer for layer in (model.network.root, model.network.neighbours) if layer is not None]
    assert features.shape == (24, 4 * 6 + sum(layer.out_features for layer in layers))
    assert len(layers) == (2 if model.features.name == "encoder" else 0)
    torch.testing.assert_close(model.head(features), logits)
    assert model.head_names() == {"network.head.weight", "network.head.bias"}


def test_nothing_can_be_frozen(tfidf):
    tfidf.freeze(0)
    with pytest.raises(RequestError, match="frozen_layers=-2: this model has no pretrained layers"):
        tfidf.freeze(-2)


@pytest.mark.parametrize("view", [None, "mixed"])
def test_nothing_there_depends_on_values(model, rows, view):
    """On the meta device tensors have shapes alone, so that whatever would have to wait for a GPU's numbers fails."""
    inputs = batch(model, rows)
    model.to("meta").train()
    assert all(value.device.type == "cpu" for value in inputs.values())
    inputs = inputs if view is None else model.augment(inputs, view, 0.4, draws())
    noise = torch.zeros_like(model.input_embeddings(inputs)).requires_grad_()
    assert model.unit_directions(noise, inputs).device.type == "meta"
    for given in (inputs, {**inputs, "noise": noise}):
        scores = model(given)
        assert scores.device.type == "meta" and scores.shape == (24, 3)
        scores.sum().backward()
        assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())
    assert noise.grad.shape == (len(inputs["parents"]), model.features.width)


# ---------------------------------------------------------------------- other views of the same threads


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def test_masking_hides_a_share(model):
    inputs = batch(model, make_threads(200, 5))
    name = "values" if "values" in inputs else "weights"
    hidden = model.augment(inputs, "mask", 0.3, draws())
    changed = hidden[name] != inputs[name]
    assert (hidden[name][changed] == 0).all() and abs(float(changed[inputs[name] != 0].float().mean()) - 0.3) < 0.02
    assert torch.equal(hidden["parents"], inputs["parents"])
    assert torch.equal(model.augment(inputs, "mask", 0.3, draws())[name], hidden[name])
    assert not torch.equal(model.augment(inputs, "mask", 0.3, draws(1))[name], hidden[name])


def test_deleting_replies_leaves_a_thread_of_the_others(model):
    """As if the others had been read from a file, in which orphans hang from the root."""
    rows = make_threads(40, 6, largest=12)
    for number, row in enumerate(rows):
        for post, node in enumerate(row["nodes"]):  # found again by their place, since features need not be unique
            node["text"] += f" word{(number * 7 + post) % 40}"
    trees = trees_of(rows)
    inputs = {**batch(model, rows), "noise": torch.zeros(sum(len(tree.parents) for tree in trees), model.features.width)}
    inputs["noise"][:, 0] = torch.arange(len(inputs["noise"]))  # a post's number, carried along
    left = model.augment(inputs, "delete", 0.4, draws())
    kept = left["noise"][:, 0].long().tolist()
    assert set(inputs["roots"].tolist()) <= set(kept) and abs(len(kept) / len(inputs["noise"]) - 0.65) < 0.1
    remaining, first = [], 0
    for tree in trees:
        mine = [number - first for number in kept if first <= number < first + len(tree.parents)]
        place = {old: new for new, old in enumerate(mine)}
        parents = [-1, *(place.get(tree.parents[old], 0) for old in mine[1:])]
        remaining.append(Thread([tree.texts[old] for old in mine], parents))
        first += len(tree.parents)
    wanted = model.collate(model.encode_threads(remaining), np.arange(40))
    for name, value in wanted.items():
        if name == "values":  # an encoder's sums round otherwise in other batches, and are kept in float16
            assert_near(left[name], value, 2, dtype=torch.float16)
        else:
            assert torch.equal(left[name], value), name
    lonely = model.augment(batch(model, rows), "delete", 1.0, draws())
    assert len(lonely["parents"]) == 40 and torch.isfinite(model(lonely)).all(), "roots stay"


def test_swapping_moves_replies_inside_their_thread(model):
    inputs = batch(model, make_threads(60, 7, largest=12))
    moved = model.augment(inputs, "swap", 0.5, draws())
    before, after = model.input_embeddings(inputs), model.input_embeddings(moved)
    for name in ("parents", "threads", "roots"):
        assert torch.equal(moved[name], inputs[name])
    assert torch.equal(after[inputs["roots"]], before[inputs["roots"]])
    for number in range(60):
        mine = inputs["threads"] == number
        assert sorted(map(tuple, before[mine].tolist())) == sorted(map(tuple, after[mine].tolist()))
    changed = (before != after).any(dim=1).float().mean()
    assert 0.2 < changed < 0.5
    assert_near(model(moved), model({**inputs, "noise": after - before}))


def test_mixed_views_and_none(model, rows):
    inputs = batch(model, rows)
    assert model.augment(inputs, "dropout", 0.3, draws()) is inputs and model.augment(inputs, "mask", 0.0, draws()) is inputs
    mixed = model.augment(inputs, "mixed", 0.6, draws())
    assert len(mixed["parents"]) < len(inputs["parents"]) and torch.isfinite(model(mixed)).all()
    assert model.prepare(inputs) is inputs


# ---------------------------------------------------------------------- saving, loading, encoding


def test_saving_and_loading_keeps_everything(model, rows, tmp_path):
    model.save(tmp_path / "model")
    loaded = models.load(tmp_path / "model").eval()
    assert isinstance(loaded, BigcnModel) and loaded.classes == CLASSES and loaded.max_length == model.max_length
    assert_near(loaded(batch(loaded, rows)), model(batch(model, rows)))
    assert loaded.features.fingerprint == model.features.fingerprint
    assert loaded.network.dropout == 0.5 and loaded.network.drop_edge == 0.2
    kinds = {path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt"}


def test_a_cosine_head_is_kept(tfidf, rows, tmp_path):
    tfidf.head = CosineHead(tfidf.head, 0.05)
    tfidf.head.bias += torch.tensor([0.0, 1.0, 2.0])
    tfidf.save(tmp_path)
    loaded = models.load(tmp_path).eval()
    assert isinstance(loaded.head, CosineHead) and loaded.head.temperature == 0.05
    torch.testing.assert_close(loaded(batch(loaded, rows)), tfidf(batch(tfidf, rows)))


def change(**values):
    def changed(place):
        record = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**record, **values}))

    return changed


DAMAGE = {
    "no weights": lambda place: (place / "model.safetensors").unlink(),
    "half the weights": lambda place: (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:999]),
    "no words": lambda place: (place / "vocabulary.json").unlink(),
    "no JSON": lambda place: (place / "vocabulary.json").write_text("["),
    "words missing": lambda place: (place / "vocabulary.json").write_text("[]"),
    "other size": change(hidden=7),
    "other features": change(features="pickle"),
    "no features": change(features=None),
    "a later format": change(format=99),
    "other words": change(text_version=0),
    "another class": change(classes=["a", "b"]),
    "nonsense": change(hidden="many"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_models_are_refused_in_one_line(tfidf, tmp_path, damage):
    tfidf.save(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(RequestError) as caught:
        models.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_directories_are_still_texts(encoder, tmp_path):
    with pytest.raises(RequestError):
        models.load(tmp_path)
    made = models.create(str(encoder), ("a", "b"), max_length=16)
    made.save(tmp_path)
    assert type(models.load(tmp_path)).__name__ == "TextModel"


def test_a_corpus_is_encoded_once(model, rows, tmp_path, monkeypatch):
    corpus = load_corpus(make_threads(700, 8), labeled=True, cache=tmp_path)
    monkeypatch.setattr(tree_model, "_POSTS", 300)
    seen = []
    threads = model.encode(corpus, progress=lambda done, total: seen.append((done, total)))
    assert len(threads) == 700 and len(seen) > 3 and seen[-1] == (700, 700) and not threads.padded
    whole = model.encode_threads(corpus.threads())
    numbers = np.random.default_rng(0).permutation(700)[:50]
    for name, value in model.collate(whole, numbers).items():
        # an encoder's sums round otherwise in other batches, and are kept in float16
        assert_near(model.collate(threads, numbers)[name], value, 2 if name == "values" else 0, dtype=torch.float16, msg=name)
    assert isinstance(threads.parents, np.memmap)
    monkeypatch.setattr(type(model.features), "encode", lambda *_: pytest.fail("computed again"))
    assert np.array_equal(model.encode(corpus).parents, threads.parents)
    monkeypatch.undo()
    for folder in (tmp_path / "threads").iterdir():
        (folder / "parents.i4").write_bytes(b"1234")
    assert len(model.encode(corpus).parents) == len(whole.parents), "what is damaged is made again"


def test_an_empty_piece_of_a_corpus(tfidf):
    """Posts without any known word have no entries at all."""
    threads = tfidf.encode_texts(["unheard of", "", "***"])
    assert isinstance(threads, EncodedThreads) and len(threads.arrays["words"]) == 0
    assert torch.isfinite(tfidf.train()(tfidf.collate(threads, np.arange(3)))).all()


# ---------------------------------------------------------------------- whole adaptations


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("threads")
    return {
        "paris": write_threads(place / "paris.jsonl", make_threads(60, 1)),
        "ottawa": write_threads(place / "ottawa.jsonl", make_threads(60, 2, 0.3)),
        "ferguson": write_threads(place / "ferguson.jsonl", make_threads(80, 3, 0.7), labeled=False),
        "test": write_threads(place / "test.jsonl", make_threads(60, 4, 0.7)),
    }


SMALL = {
    "features": "tfidf",
    "model": "bigcn",
    "hidden": 8,
    "batch_size": 10,
    "source_epochs": 4,
    "epochs": 1,
    "evaluations": 2,
    "source_learning_rate": 5e-3,
}


def adapt(files, **changes):
    return mtem.adapt([str(files["paris"]), str(files["ottawa"])], str(files["ferguson"]), **{**SMALL, **changes})


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    return output, adapt(files, output=output)


def test_a_run_learns_and_can_be_loaded(finished, files):
    output, adapted = finished
    test = [json.loads(line) for line in files["test"].read_text().splitlines()]
    loaded = mtem.load(output)
    assert_near(loaded.predict_proba(test), adapted.predict_proba(test), dtype=torch.float32)
    right = np.mean([found == row["label"] for found, row in zip(loaded.predict(test), test, strict=True)])
    assert right > 0.7
    record = json.loads((output / "run.json").read_text())
    assert record["settings"]["features"] == "tfidf" and record["settings"]["hidden"] == 8 and record["model"] == "bigcn"
    assert (
        record["resolved"]["learning_rate"] == loaded.model.default_learning_rates()[1]
        and record["resolved"]["max_length"] is None
    )
    assert loaded.indexes["text"].tolist() == [row["nodes"][0]["text"] for row in make_threads(80, 3, 0.7)]
    assert not [path for path in output.rglob("*") if path.suffix in (".pt", ".bin", ".pkl")]
    assert "threads" in (output / "model" / "README.md").read_text()
    before = loaded.source_model()
    assert isinstance(before, BigcnModel) and not torch.equal(before.head.weight, loaded.model.head.weight)


def test_replies_matter_to_it_and_not_to_a_model_of_texts(finished, files, tiny):
    row = json.loads(files["test"].read_text().splitlines()[0])
    root = row["nodes"][0]["id"]
    many = {"nodes": [row["nodes"][0], *({"id": f"r{n}", "parent": root, "text": "good1 good2"} for n in range(9))]}
    only = {"nodes": row["nodes"][:1]}
    found = finished[1].predict_proba([many, only, only["nodes"][0]["text"], Thread([only["nodes"][0]["text"]], [-1])])
    assert not np.allclose(found[0], found[1], atol=1e-3) and np.allclose(found[1], found[2]) and np.allclose(found[1], found[3])
    texts = mtem.adapt(**{**tiny, "source_epochs": 0.5, "steps": 0})
    found = texts.predict_proba([many, only, only["nodes"][0]["text"]])
    assert np.allclose(found[0], found[1]) and np.allclose(found[1], found[2])


def test_a_word_of_the_test_set_alone_has_no_influence(files, tmp_path):
    strange = json.loads(files["test"].read_text().splitlines()[0])
    strange["nodes"][0]["text"] += " zzyzx zzyzx"
    target, few = make_threads(30, 3), make_threads(4, 4)
    target[0]["nodes"][0]["text"] += " kilroy"
    few[0]["nodes"][0]["text"] += " croatoan"
    adapted = mtem.adapt(
        str(files["paris"]), target, target_labeled=few, output=tmp_path / "run", **{**SMALL, "steps": 0, "source_epochs": 1}
    )
    words = json.loads((tmp_path / "run" / "model" / "vocabulary.json").read_text())
    assert "zzyzx" not in words and {"good1", "bad1", "kilroy", "croatoan"} <= set(words), "the adaptation's own are known"
    plain = json.loads(files["test"].read_text().splitlines()[0])
    np.testing.assert_array_equal(adapted.predict_proba([strange]), adapted.predict_proba([plain]))


def test_a_run_repeats_and_resumes_bit_for_bit(files, tmp_path, monkeypatch):

    whole = adapt(files, output=tmp_path / "whole", checkpoint_seconds=0.0)
    with stopped_after(3):
        adapt(files, output=tmp_path / "cut", checkpoint_seconds=0.0)
    resumed = adapt(files, output=tmp_path / "cut", checkpoint_seconds=0.0, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_files_of_threads_are_predicted_with_every_field_kept(finished, files, tmp_path):
    done = inference.predict_file(finished[1].model, files["test"], tmp_path / "out.jsonl", all_probabilities=True)
    assert done.rows == 60 and done.empty == 0
    given = [json.loads(line) for line in files["test"].read_text().splitlines()]
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in given[0]} for row in found] == given
    assert [row["prediction"] for row in found] == finished[1].predict(given)
    texts = write_jsonl(tmp_path / "texts.jsonl", make_texts(5, 1))
    inference.predict_file(finished[1].model, texts, tmp_path / "texts-out.jsonl")
    found = [json.loads(line)["prediction"] for line in (tmp_path / "texts-out.jsonl").read_text().splitlines()]
    assert found == finished[1].predict([text for text, _ in make_texts(5, 1)])


def test_broken_threads_are_refused_by_row(finished, tmp_path):
    rows = make_threads(3, 1)
    rows[1]["nodes"] = [{"id": "a", "parent": "b", "text": "x"}, {"id": "b", "parent": "a", "text": "y"}]
    with pytest.raises(RequestError, match=r"row 2, thread '1'.*circle"):
        inference.predict_file(finished[1].model, write_threads(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(RequestError, match=r"position 1.*circle"):
        finished[1].predict(rows)
    with pytest.raises(RequestError, match=r"texts or threads .*got int at position 0"):
        finished[1].predict([7])
    with pytest.raises(RequestError, match="got one thread: put it in a list"):
        finished[1].predict(rows[0])


def test_threads_without_any_text_get_no_prediction(finished, tmp_path):
    rows = make_threads(3, 1)
    rows[1]["nodes"] = [{"id": "a", "parent": None, "text": ""}]
    done = inference.predict_file(finished[1].model, write_threads(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert done.empty == 1 and json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["prediction"] is None


def adapted_with_domains(files, encoder, tmp_path, **changes):
    """A run with 12 labeled target threads, and what `learn_domains` was given, as it left it."""
    seen, original = {}, BigcnModel.learn_domains

    def watched(self, labeled, domains, target):
        original(self, labeled, domains, target)
        seen.update(labeled=labeled, domains=domains, target=target)

    few = write_threads(tmp_path / "few.jsonl", make_threads(12, 7))
    given = {"features": "encoder", "encoder": str(encoder), "max_length": 32, "method": "source-only", **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BigcnModel, "learn_domains", watched)
        return adapt(files, output=tmp_path / "run", target_labeled=str(few), **given), seen


def test_features_are_centred_by_domain(files, encoder, tmp_path):
    """Roots and replies of each source domain, and of the target, have the mean 0; labeled and new threads are the target's."""
    adapted, seen = adapted_with_domains(files, encoder, tmp_path)
    groups = {name: (seen["labeled"], (seen["domains"] == number).nonzero()[0]) for name, number in (("paris", 0), ("ottawa", 1))}
    groups["target"] = seen["target"], np.arange(80)
    for name, (threads, numbers) in groups.items():
        found = threads.batch(numbers)
        is_root = np.zeros(len(found["parents"]), bool)
        is_root[found["roots"]] = True
        raw = threads.arrays["values"]
        assert len(numbers) and np.abs(raw).max() > 0.5, name
        for kind in (is_root, ~is_root):
            assert np.abs(found["values"][kind].mean(axis=0)).max() < 1e-3, name
    assert (seen["domains"] == -1).sum() == 12
    own = (seen["domains"] == -1).nonzero()[0]
    plain = dict(vars(seen["labeled"])) | {"centres": None}
    bare = EncodedThreads(plain["lengths"], plain["parents"], plain["arrays"]).batch(own)
    moved = seen["labeled"].batch(own)
    shift = bare["values"] - moved["values"]
    assert_near(shift[moved["roots"]], np.broadcast_to(adapted.model.centre[0], (12, shift.shape[1])), dtype=torch.float32)
    new = adapted.model.encode_threads(trees_of(make_threads(5, 9)))
    assert_near(new.centres, adapted.model.centre[np.newaxis])
    loaded = mtem.load(tmp_path / "run").model
    assert loaded.centred and np.array_equal(loaded.centre, adapted.model.centre)
    (tmp_path / "run" / "model" / tree_model.CENTRE).unlink()
    with pytest.raises(RequestError, match=r"centre\.safetensors"):
        mtem.load(tmp_path / "run")


def test_defaults_depend_on_the_features(encoder, rows):
    words, posts = make_model(rows, hidden=None), make_model(rows, hidden=None, features="encoder", encoder=str(encoder))
    for made, sizes, rate in ((words, (64, 0, 0.0), 2e-3), (posts, (16, 64, 0.5), 5e-4)):
        assert (made.network.up.hidden, made.network.root_hidden, made.network.head_dropout) == sizes
        assert made.default_learning_rates() == (rate, 5e-4) and made.centred is (made is posts)
    given = {"features": "encoder", "encoder": str(encoder), "hidden": 3, "root_hidden": 0, "head_dropout": 0.0, "centre": False}
    bare = make_model(rows, **given)
    assert (bare.network.up.hidden, bare.network.root, bare.network.head_dropout, bare.centred) == (3, None, 0.0, False)
    assert (words.neighbours, posts.neighbours, bare.neighbours) == (0, 20, 0)
    assert words.network.neighbours is None and posts.network.neighbours.out_features == 64
    assert make_model(rows, **given | {"root_hidden": 5, "neighbours": 0}).network.neighbours is None
    with pytest.raises(RequestError, match="centre=true needs dense features"):
        BigcnSettings(centre=True)
    with pytest.raises(RequestError, match="neighbours needs dense features"):
        BigcnSettings(neighbours=3, root_hidden=8)
    with pytest.raises(RequestError, match="neighbours needs a layer for the first post"):
        BigcnSettings(features="encoder", neighbours=3, root_hidden=0)


def test_a_thread_is_read_with_its_neighbours_in_the_same_domain(files, encoder, tmp_path):
    """Threads of the target, labeled or new, have theirs among the unlabeled ones; all are centred like first posts."""
    adapted, seen = adapted_with_domains(files, encoder, tmp_path, neighbours=3)
    labeled, domains, target = seen["labeled"], seen["domains"], seen["target"]
    own = {number: labeled.first_posts((domains == number).nonzero()[0]) for number in (0, 1)} | {-1: target.first_posts()}
    for number, bank in own.items():
        rows = (domains == number).nonzero()[0][:12]
        found, centre = labeled.batch(rows)["neighbours"], labeled.centres[number, 0]
        assert len(rows) and found.dtype == np.float32
        assert_near(found + centre, neighbour_means(labeled.first_posts(rows), bank, 3), 4, dtype=torch.float16)
        elsewhere = neighbour_means(labeled.first_posts(rows), own[(number + 2) % 3 - 1], 3)
        assert not np.allclose(found + centre, elsewhere, atol=0.05)
    new = adapted.model.encode_threads(trees_of(make_threads(5, 9)))
    assert np.array_equal(new.neighbours, neighbour_means(new.first_posts(), target.first_posts(), 3))

    inputs = adapted.model.collate(new, np.arange(5))
    trees = trees_of(make_threads(5, 9))
    matrices = np.split(inputs["values"].double().numpy(), np.cumsum([len(tree.parents) for tree in trees])[:-1])
    given = weights_of(adapted.model.network), matrices, [tree.parents for tree in trees]
    wanted = reference.logits(*given, neighbours=inputs["neighbours"].double().numpy())
    assert_near(adapted.model.eval()(inputs), wanted)
    taken = adapted.model.take(inputs, slice(1, 3))
    assert torch.equal(taken["neighbours"], inputs["neighbours"][1:3])
    view = adapted.model.augment(inputs, "mixed", 0.4, draws())
    assert torch.equal(view["neighbours"], inputs["neighbours"])

    loaded = mtem.load(tmp_path / "run")
    assert loaded.model.neighbours == 3 and np.array_equal(loaded.model.bank, adapted.model.bank)
    assert_near(loaded.predict_proba(make_threads(5, 9)), adapted.predict_proba(make_threads(5, 9)), dtype=torch.float32)
    (tmp_path / "run" / "model" / tree_model.BANK).unlink()
    with pytest.raises(RequestError, match=r"neighbours\.safetensors"):
        mtem.load(tmp_path / "run")


def test_models_from_before_neighbours_are_loaded(rows, encoder, tmp_path):
    made = make_model(rows, features="encoder", encoder=str(encoder), neighbours=0)
    made.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("neighbours") == config.pop("bank") == 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = BigcnModel.load(tmp_path).eval()
    assert loaded.neighbours == 0 and loaded.bank is None
    for wrong in ("x", -1, 2.5, None, True):
        (tmp_path / "config.json").write_text(json.dumps({**config, "neighbours": wrong}))
        with pytest.raises(RequestError):
            BigcnModel.load(tmp_path)
    assert_near(loaded(batch(loaded, rows)), made(batch(made, rows)))


@pytest.mark.parametrize("training", [False, True])
def test_the_three_engines_agree_with_neighbours(rows, encoder, training):
    made = make_model(rows, features="encoder", encoder=str(encoder), neighbours=2).train(training)
    made.bank = made.encode_threads(trees_of(make_threads(30, 8))).first_posts()
    assert "neighbours" in batch(made, rows)
    wanted = index_gradient(made, rows, "second-order")
    for engine, limit in {"forward": 1e-4, "taylor": 0.05}.items():
        assert (index_gradient(made, rows, engine) - wanted).norm() / wanted.norm() < limit, engine


def test_means_of_a_corpus_are_those_of_its_posts(rows, vectors, monkeypatch):
    monkeypatch.setattr("mtem.models.trees.encoded.CHUNK", 5)
    made = make_model(rows, features="vectors", vectors=str(vectors))
    threads = made.encode_threads(trees_of(rows))
    numbers = np.array([2, 3, 5, 7, 11, 13, 17, 19, 20, 21, 22, 23])
    matrices = posts_one_by_one(made, [trees_of(rows)[number] for number in numbers])
    replies = np.concatenate([matrix[1:] for matrix in matrices])
    assert len(replies)
    wanted = np.stack([np.mean([matrix[0] for matrix in matrices], axis=0), replies.mean(axis=0)])
    assert_near(threads.means(numbers), wanted, dtype=torch.float32)
    alone = made.encode_texts(["good1", "good2"])
    assert not alone.means(np.arange(2))[1].any(), "there are no replies"


@pytest.mark.parametrize("features", ["vectors", "encoder"])
def test_other_features_serve_a_run(files, vectors, encoder, tmp_path, features):
    place = tmp_path / "encoder"
    shutil.copytree(encoder, place)
    adapted = adapt(files, output=tmp_path / "run", features=features, vectors=str(vectors), encoder=str(place), max_length=32)
    shutil.rmtree(place)  # prediction needs nothing but the run
    test = make_threads(10, 9)
    assert_near(mtem.load(tmp_path / "run").predict_proba(test), adapted.predict_proba(test), dtype=torch.float32)


def test_plain_texts_are_allowed_with_a_warning(reviews, caplog):
    adapted = mtem.adapt(str(reviews["books"]), str(reviews["kitchen"]), **SMALL)
    warned = [line.split(":")[0] for line in caplog.messages if "without replies" in line]
    assert warned == ["books.jsonl", "kitchen.jsonl"]
    assert adapted.predict(["good1 good2", "bad1 bad2"]) == ["good", "bad"]


def test_requests_that_cannot_be_met(files, tmp_path):
    with pytest.raises(RequestError, match="features=vectors needs a file"):
        adapt(files, features="vectors")
    with pytest.raises(RequestError, match=r"vectors=.*none\.txt: no such file"):
        adapt(files, features="vectors", vectors=str(tmp_path / "none.txt"))
    with pytest.raises(RequestError, match="no such directory"):
        adapt(files, features="encoder", encoder=str(tmp_path / "none"))
    with pytest.raises(RequestError, match="one of tfidf, vectors, encoder"):
        adapt(files, features="words")
    with pytest.raises(RequestError, match="frozen_layers=2"):
        adapt(files, frozen_layers=2)


def test_settings_of_models_methods_and_training_have_names_of_their_own():
    for name in methods.METHODS:
        kinds = [methods.get(name).Settings, TrainingSettings, BigcnSettings]
        names = settings.names(*kinds)
        assert len(names) == len(set(names)), (name, sorted(each for each in names if names.count(each) > 1))


def test_defaults_of_the_model_give_way_to_presets_and_to_the_user(files):
    record = adapt(files, source_epochs=1, steps=1, preset="paper").record["settings"]
    assert record["learning_rate"] == 5e-3 and record["source_epochs"] == 1.0 and record["optimizer"] == "sgd"
    assert adapt(files, steps=1, preset="paper", learning_rate=1e-4).record["settings"]["learning_rate"] == 1e-4
    free = {name: value for name, value in SMALL.items() if name not in ("source_epochs", "source_learning_rate")}
    record = mtem.adapt(str(files["paris"]), str(files["ferguson"]), **free, steps=0).record
    assert record["settings"]["source_epochs"] == BigcnModel.defaults["source_epochs"]
    assert (record["resolved"]["source_learning_rate"], record["resolved"]["learning_rate"]) == (2e-3, 5e-4)
    assert (record["settings"]["index_mode"], record["settings"]["index_initial"]) == ("fixed", 1.0)
    assert record["settings"]["sampling"] and record["settings"]["threshold"] == 0.95, "of words; class shares are assumed"


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_takes_threads(files, method):
    few = str(files["test"])
    adapted = adapt(files, method=method, target_labeled=few, source_epochs=1, steps=3)
    assert set(adapted.predict(make_threads(6, 2))) <= {"bad", "good"}
    assert all(torch.isfinite(value).all() for value in adapted.model.state_dict().values())


def test_many_shapes_of_encoders_embed(tmp_path):
    for shape in ("roberta", "distilbert", "mpnet"):
        made = make_model(make_threads(8, 1), features="encoder", encoder=str(make_encoder(tmp_path / shape, shape)))
        assert torch.isfinite(made(batch(made, make_threads(4, 2)))).all()


# ---------------------------------------------------------------------- the command line


def test_a_session_on_the_command_line(files, vectors, tmp_path, command):
    given = {name: value for name, value in SMALL.items() if name != "model"} | {"vectors": vectors}
    settings_given = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    data = ["--source", files["paris"], "--source", files["ottawa"], "--target", files["ferguson"], "--output", tmp_path / "run"]
    code, out, err = command("adapt", *data, "--model", "bigcn", "--features", "vectors", *settings_given, "-q")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["features"] == "vectors"
    code, out, err = command("predict", tmp_path / "run", files["test"], "--output", tmp_path / "out.jsonl", "-q")
    assert code == 0 and "60 rows" in out, err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    code, out, err = command("evaluate", tmp_path / "run", files["test"], "--compare", "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures["after"]["accuracy"] == pytest.approx(np.mean([row["prediction"] == row["label"] for row in found]))
    assert set(figures) == {"before", "after"}


def test_features_are_for_threads_alone_and_settings_are_listed(files, encoder, tmp_path, command):
    data = ["--source", files["paris"], "--target", files["ferguson"], "--output", tmp_path / "run"]
    code, _, err = command("adapt", *data, "--model", encoder, "--features", "tfidf")
    assert code == 2 and "has no features of posts; use --model bigcn" in err
    code, out, _ = command("settings", "mtem")
    assert code == 0 and "drop_edge" in out and "source_epochs = " in out


def test_over_words_even_shares_are_assumed_unless_the_paper_is_asked_for(tmp_path):
    given = {"model": "bigcn", "features": "tfidf", "steps": 1, "source_epochs": 0.1, "vocabulary": 30}
    rows = [(f"good{i} word{i}", "yes") if i % 2 else (f"bad{i} word{i}", "no") for i in range(40)]
    source, target = tuple(map(list, zip(*rows, strict=True))), [f"word{i} good{i} bad{i}" for i in range(20)]
    assert mtem.adapt(source, target, **given).record["target_class_prior"]["shares"] == {"no": 0.5, "yes": 0.5}
    assert mtem.adapt(source, target, preset="paper", **given).record["target_class_prior"] is None
    assert mtem.adapt(source, target, target_class_prior="none", **given).record["target_class_prior"] is None


def test_over_an_encoder_shares_are_assumed_only_where_labels_show_them(files, encoder, tmp_path):
    given = {"features": "encoder", "encoder": str(encoder), "max_length": 32, "method": "source-only"}
    assert adapt(files, **given).record["target_class_prior"] is None
    few = write_threads(tmp_path / "few.jsonl", make_threads(12, 7))
    assumed = adapt(files, target_labeled=str(few), **given).record["target_class_prior"]
    assert assumed["kind"] == "auto" and sum(assumed["shares"].values()) == pytest.approx(1)


def test_an_encoder_given_threads_warns_that_it_reads_the_first_posts(files, encoder, caplog):
    given = {"max_length": 16, "steps": 1, "source_epochs": 0.2, "batch_size": 8}
    mtem.adapt(str(files["paris"]), str(files["ferguson"]), model=encoder, **given)
    warned = [line for line in caplog.messages if "reads only the first post" in line]
    assert len(warned) == 2 and all("--model bigcn" in line for line in warned)


def test_by_default_an_encoder_reads_the_posts_and_without_one_the_way_out_is_told(monkeypatch):
    chosen = find_settings("bigcn", "mtem", "recommended", {}).model
    assert (chosen.features, chosen.found("neighbours")) == ("encoder", 20)
    assert find_settings("bigcn", "mtem", "paper", {}).model.features == "tfidf", "as in the paper"
    monkeypatch.setattr(encoders, "packaged", lambda name: None)
    with pytest.raises(RequestError, match=r"'minilm' is not installed: .*; --features tfidf needs no encoder$"):
        chosen.check()
