"""Model directories damaged in every way that used to answer at random: each is refused, at every door, in one line."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

import mtem
from mtem import models
from mtem.cli import main
from mtem.errors import RequestError
from mtem.models.text import TextModel
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.model import BigcnModel, BigcnSettings
from tests.conftest import SHAPES, make_encoder

CLASSES = ("bad", "good")
FAST = {"max_length": 16, "batch_size": 10, "source_epochs": 0.2, "steps": 1, "evaluations": 1, "frozen_layers": 0}


def tensors(change, file="model.safetensors"):
    def changed(place):
        found = load_file(place / file)
        change(found)
        save_file(found, place / file, metadata={"format": "pt"})

    return changed


def config(**values):
    def changed(place):
        told = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**told, **values}))

    return changed


def without(*files):
    def changed(place):
        for file in files:
            (place / file).unlink()

    return changed


def renamed(found, old, new):
    for key in [key for key in found if key.startswith(old)]:
        found[key.replace(old, new)] = found.pop(key)


def dropped(found, part):
    for key in [key for key in found if part in key]:
        del found[key]


def put(key, value):
    def change(found):
        found[key].view(-1)[1] = value

    return change


def index(names, keep=()):
    """The weights in the files `names`, of which those in `keep` are there."""

    def changed(place):
        found = load_file(place / "model.safetensors")
        (place / "model.safetensors").unlink()
        places = {key: names[number % len(names)] for number, key in enumerate(found)}
        for name in keep:
            save_file({key: found[key] for key in found if places[key] == name}, place / name, metadata={"format": "pt"})
        (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

    return changed


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
# what is done to a classifier's directory -> what the message must say
DAMAGE = {
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), ["tokenizer is missing"]),
    "no vocabulary": (without("tokenizer.json"), ["tokenizer is missing"]),
    "no way to read it": (without("tokenizer_config.json"), ["tokenizer_config.json", "missing"]),
    "no head": (tensors(lambda found: dropped(found, "classifier.")), ["no head", "classifier.bias and 1 more"]),
    "half a head": (tensors(lambda found: found.pop("classifier.bias")), ["no head", "missing: classifier.bias"]),
    "head renamed": (tensors(lambda found: renamed(found, "classifier", "klassifier")), ["no head", "unknown: klassifier.bias"]),
    "fewer layers told": (config(num_hidden_layers=2), ["config.json", "unknown: bert.encoder.layer.2."]),
    "more layers told": (config(num_hidden_layers=4), ["config.json", "missing: bert.encoder.layer.3.", "and 15 more"]),
    "a layer gone": (tensors(lambda found: dropped(found, "layer.1.")), ["missing: bert.encoder.layer.1."]),
    "other shapes": (config(intermediate_size=64), ["[48]", "[64]", "bert.encoder.layer.0.intermediate.dense.bias"]),
    "other words": (config(vocab_size=50), ["word_embeddings.weight"]),
    "the encoder renamed": (tensors(lambda found: renamed(found, "bert.", "bart.")), ["missing: bert."]),
    "a pooler gone": (tensors(lambda found: dropped(found, "pooler")), ["missing: bert.pooler.dense.bias"]),
    "NaN": (tensors(put("bert.encoder.layer.1.output.dense.weight", float("nan"))), ["NaN", "layer.1.output.dense.weight"]),
    "infinite": (tensors(put("classifier.weight", float("inf"))), ["infinite", "classifier.weight"]),
    "pickled shards": (index(["pytorch_model-00001-of-00001.bin"]), ["'pytorch_model-00001-of-00001.bin'", ".safetensors"]),
    "shards elsewhere": (index(["../model/model.safetensors"]), ["'../model/model.safetensors'", "directory itself"]),
    "absolute shards": (index(["/tmp/model.safetensors"]), ["'/tmp/model.safetensors'", "directory itself"]),
    "a shard gone": (index(SHARDS, SHARDS[:1]), [SHARDS[1], "missing"]),
    "an index of nothing": (lambda place: (place / "model.safetensors").rename(place / "x.safetensors"), ["no safetensors"]),
    "weights named by the configuration": (config(transformers_weights="adapter_model.bin"), ["'adapter_model.bin'"]),
    "an adapter": (lambda place: (place / "adapter_config.json").write_text("{}"), ["adapter"]),
    "half the weights": (
        lambda place: (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:5000]),
        ["could not be loaded"],
    ),
    "no configuration": (without("config.json"), ["config.json"]),
}  # fmt: skip
# what an encoder to train on may be, while what is to predict may not
TRAINABLE = {"no way to read it"}


@pytest.fixture(scope="module")
def classifier(encoder, tmp_path_factory):
    torch.manual_seed(2)
    place = tmp_path_factory.mktemp("classifier") / "model"
    TextModel.create(encoder, CLASSES, max_length=16).save(place)
    return place


@pytest.fixture(scope="module")
def run(reviews, encoder, tmp_path_factory):
    """A finished run with two files of weights, those after and those before the adaptation."""
    output = tmp_path_factory.mktemp("whole") / "run"
    mtem.adapt([str(reviews["books"])], str(reviews["kitchen"]), model=encoder, output=output, **FAST)
    return output


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["mtem", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main()
        lines = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and lines[-1].startswith("mtem: ") and "Traceback" not in "".join(lines), lines
        return lines[-1]

    return call


def adapt_words(reviews, output, **options):
    given = {"source": reviews["books"], "target": reviews["kitchen"], "output": output, **options}
    words = [str(word) for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ["adapt", "-q", *words, *(word for name, value in FAST.items() for word in ("--set", f"{name}={value}"))]


def damaged(whole, place, damage):
    shutil.copytree(whole, place)
    damage(place)
    return place


# ---------------------------------------------------------------------- classifiers of texts


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_classifier_is_not_loaded(classifier, tmp_path, kind):
    damage, words = DAMAGE[kind]
    place = damaged(classifier, tmp_path / "model", damage)
    with pytest.raises(RequestError) as caught:
        models.load(place)
    message = str(caught.value)
    assert message.startswith(str(place)) and "\n" not in message and "--" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind not in TRAINABLE])
def test_nor_is_it_an_encoder_to_train(classifier, tmp_path, kind):
    damage, words = DAMAGE[kind]
    place = damaged(classifier, tmp_path / "model", damage)
    with pytest.raises(RequestError) as caught:
        TextModel.create(place, CLASSES)
    assert str(caught.value).startswith(str(place)) and "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", ["no tokenizer", "head renamed", "more layers told", "NaN", "pickled shards"])
def test_every_command_refuses_it(run, reviews, tmp_path, command, kind):
    damage, words = DAMAGE[kind]
    place = damaged(run, tmp_path / "run", lambda place: damage(place / "model"))
    told = [
        command("predict", place, reviews["test"], "--output", tmp_path / "out.csv"),
        command("evaluate", place, reviews["test"]),
        command("evaluate", place / "model", reviews["test"]),
        command(*adapt_words(reviews, tmp_path / "a", source_model=place)),
        command(*adapt_words(reviews, tmp_path / "b", model=place / "model")),
    ]
    for message in told:
        assert all(word in message for word in [str(place / "model"), *words]), message
    assert not any("--model" in message for message in told)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_whole_ones_are_taken(classifier, run, tmp_path):
    assert models.load(classifier).classes == CLASSES and mtem.load(run).source_model() is not None
    place = damaged(classifier, tmp_path / "shards", index(SHARDS, SHARDS))
    assert models.load(place).classes == CLASSES
    wanted = models.load(classifier).network.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in models.load(place).network.state_dict().items())
    # An index left behind beside a whole file is not read, but must not name what could be code.
    both = damaged(classifier, tmp_path / "both", lambda place: None)
    (both / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert models.load(both).classes == CLASSES
    (both / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.bin"}}))
    with pytest.raises(RequestError, match=r"'gone\.bin'"):
        models.load(both)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pretraining", [False, True])
def test_encoders_without_a_head_are_what_is_trained(tmp_path, shape, pretraining):
    """As the library writes them, and with the head of their pretraining; but nobody predicts with them."""
    place = make_encoder(tmp_path / shape, shape)
    if pretraining:
        AutoModelForMaskedLM.from_pretrained(place).save_pretrained(place)
    assert TextModel.create(place, ("a", "b", "c")).classes == ("a", "b", "c")
    assert Embeddings.find(place, 16).width == 32
    with pytest.raises(RequestError, match=r"no head for its classes|not those that its config"):
        models.load(place)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_checked(tmp_path, shape):
    torch.manual_seed(0)
    TextModel.create(make_encoder(tmp_path / "encoder", shape), CLASSES).save(tmp_path / "model")
    assert models.load(tmp_path / "model").classes == CLASSES
    assert Embeddings.find(tmp_path / "model", 16).width == 32  # a classifier's encoder will do
    layers = "n_layers" if shape == "distilbert" else "num_hidden_layers"
    for number, count in enumerate((2, 4)):
        place = damaged(tmp_path / "model", tmp_path / str(number), config(**{layers: count, "layer_types": None}))
        for load in (models.load, lambda place: TextModel.create(place, CLASSES), lambda place: Embeddings.find(place, 16)):
            with pytest.raises(RequestError, match=r"not those that its config\.json describes"):
                load(place)


def test_a_head_for_other_classes_is_replaced(classifier):
    assert TextModel.create(classifier, ("a", "b", "c")).classes == ("a", "b", "c")


@pytest.mark.parametrize("names", [{"0": "a"}, {"0": "a", "5": "b"}, {"0": "a", "1": "a"}])
def test_classes_that_are_none(classifier, tmp_path, names):
    place = damaged(classifier, tmp_path / "model", config(id2label=names))
    with pytest.raises(RequestError, match=r"two or more classes numbered|requires `num_labels > 1`"):
        models.load(place)


def test_a_folder_with_the_name_of_an_encoder_is_that_folder(classifier, tmp_path, monkeypatch):
    shutil.copytree(classifier, tmp_path / "minilm")
    monkeypatch.chdir(tmp_path)
    assert mtem.load("minilm").model.network.config.hidden_size == 32


def test_a_tokenizer_of_another_model(classifier, tmp_path):
    def longer(place):
        told = json.loads((place / "tokenizer.json").read_text())
        told["model"]["vocab"]["elsewhere"] = 5000
        (place / "tokenizer.json").write_text(json.dumps(told))

    with pytest.raises(RequestError, match="tokenizer has 5001 tokens and its weights have 69"):
        models.load(damaged(classifier, tmp_path / "model", longer))


def test_an_encoder_whose_tokenizer_would_be_read_otherwise(encoder, tmp_path):
    """Without its configuration a tokenizer is rebuilt as is usual for the architecture: here that lowers letters."""
    place = damaged(encoder, tmp_path / "model", without("tokenizer_config.json"))
    with pytest.raises(RequestError, match=r"tokenizer_config\.json"):
        TextModel.create(place, CLASSES)


# ---------------------------------------------------------------------- runs


def test_a_run_whose_parts_do_not_fit(run, tmp_path):
    def says(**values):
        place = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        shutil.copytree(run, place)
        told = json.loads((place / "run.json").read_text())
        (place / "run.json").write_text(json.dumps({**told, **values}))
        return place

    with pytest.raises(RequestError, match=r"the classes bad, good and its run\.json has good, bad"):
        mtem.load(says(classes=["good", "bad"]))
    place = says()
    (place / "run.json").write_text("[1]")
    with pytest.raises(RequestError, match="expected an object, got a list"):
        mtem.load(place)
    place = says()
    shutil.rmtree(place / "model")
    with pytest.raises(RequestError, match="model: no such folder"):
        mtem.load(place)


SOURCE_DAMAGE = {
    "missing": (lambda found: found.pop("network.classifier.weight"), "network.classifier.weight is missing"),
    "unknown": (lambda found: renamed(found, "network.classifier", "head"), "has head.bias, which is unknown|classifier.bias is"),
    "NaN": (put("network.classifier.weight", float("nan")), "NaN or infinite in network.classifier.weight"),
    "shape": (lambda found: found.update({"network.classifier.bias": torch.zeros(3)}), r"expected shape \[2\], got \[3\]"),
}


@pytest.mark.parametrize("kind", SOURCE_DAMAGE)
def test_a_damaged_source_model(run, reviews, tmp_path, kind, command):
    change, words = SOURCE_DAMAGE[kind]
    place = damaged(run, tmp_path / "run", lambda place: tensors(change, "checkpoints/source.safetensors")(place))
    with pytest.raises(RequestError, match=words) as caught:
        mtem.load(place).source_model()
    assert str(place / "checkpoints" / "source.safetensors") in str(caught.value)
    assert "source.safetensors" in command("evaluate", place, reviews["test"], "--compare")
    assert "source.safetensors" in command(*adapt_words(reviews, tmp_path / "a", source_model=place))
    assert not (tmp_path / "a").exists()


def test_a_source_model_of_upper_layers(reviews, encoder, tmp_path):
    given = {**FAST, "frozen_layers": -1}
    mtem.adapt([str(reviews["books"])], str(reviews["kitchen"]), model=encoder, output=tmp_path / "run", **given)
    file = tmp_path / "run" / "checkpoints" / "source.safetensors"
    assert mtem.load(tmp_path / "run").source_model() is not None
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(RequestError, match=r"source\.safetensors: is damaged"):
        mtem.load(tmp_path / "run").source_model()


# ---------------------------------------------------------------------- models of threads


def arrays(change):
    def changed(place):
        found = load_arrays(place / "vocabulary.safetensors")
        change(found)
        save_arrays(found, place / "vocabulary.safetensors")

    return changed


THREAD_DAMAGE = {
    "no words": (without("vocabulary.json"), "vocabulary.json: no such file"),
    "no numbers for them": (without("vocabulary.safetensors"), "vocabulary.safetensors: no such file"),
    "no weights": (without("model.safetensors"), "model.safetensors"),
    "no frequencies": (arrays(lambda found: found.update(other=found.pop("idf"))), "has no 'idf'"),
    "NaN among them": (arrays(lambda found: found["idf"].__setitem__(0, float("nan"))), "'idf'"),
    "repeated words": (
        lambda place: (place / "vocabulary.json").write_text(
            json.dumps(["a"] * len(json.loads((place / "vocabulary.json").read_text())))
        ),
        "different words",
    ),
    "no head": (tensors(lambda found: dropped(found, "head.weight")), "model.safetensors: head.weight is missing"),
    "renamed": (tensors(lambda found: renamed(found, "head.", "kopf.")), "model.safetensors: head.bias is missing"),
    "one more": (tensors(lambda found: found.update(more=torch.zeros(2))), "has more, which is unknown"),
    "other shape": (config(hidden=7), "expected shape"),
    "other width": (config(width=3), "config.json says 3"),
    "NaN": (tensors(put("head.weight", float("nan"))), "NaN or infinite in head.weight"),
    "one class": (config(classes=["a"]), "two or more different classes"),
}


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    from mtem.data.loading import load_corpus
    from tests.threads import make_threads

    corpus = load_corpus(make_threads(20, 1), labeled=True)
    place = tmp_path_factory.mktemp("threads") / "model"
    BigcnModel.create("bigcn", CLASSES, corpora=[corpus], settings=BigcnSettings(hidden=8, vocabulary=30)).save(place)
    return place


@pytest.mark.parametrize("kind", THREAD_DAMAGE)
def test_a_damaged_model_of_threads(threads, tmp_path, kind):
    damage, words = THREAD_DAMAGE[kind]
    place = damaged(threads, tmp_path / "model", damage)
    with pytest.raises(RequestError) as caught:
        models.load(place)
    message = str(caught.value)
    assert words in message and str(place) in message and "\n" not in message and "--" not in message, message


@pytest.mark.parametrize("kind", ["no tokenizer", "more layers told", "NaN", "pickled shards", "no configuration"])
def test_a_damaged_encoder_of_posts(encoder, tmp_path, kind):
    damage, words = DAMAGE[kind]
    if kind == "NaN":
        damage = tensors(put("encoder.layer.1.output.dense.weight", float("nan")))
    words = [word.replace("bert.", "") for word in words]
    settings = BigcnSettings(hidden=8, features="encoder", encoder=str(encoder))
    BigcnModel.create("bigcn", CLASSES, settings=settings).save(tmp_path / "model")
    damage(tmp_path / "model" / "encoder")
    with pytest.raises(RequestError) as caught:
        models.load(tmp_path / "model")
    message = str(caught.value)
    assert str(tmp_path / "model" / "encoder") in message and "--" not in message
    assert all(word in message for word in words), message


def test_threads_and_runs_are_no_encoders(threads, run, reviews, tmp_path, command):
    assert "give --model bigcn" in command(*adapt_words(reviews, tmp_path / "a", model=threads))
    assert str(run / "model") in command(*adapt_words(reviews, tmp_path / "a", model=run))
    assert not (tmp_path / "a").exists()
