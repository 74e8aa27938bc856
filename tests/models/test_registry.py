"""The table of model kinds: names, settings, saved directories."""

from __future__ import annotations

import json

import pytest

from mtem import models
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.models import registry
from mtem.models.base import Model, ModelSettings
from tests.threads import make_threads


def test_rows_and_classes_agree():
    for kind in (*registry.KINDS, registry.ENCODER):
        model_cls = kind.import_class()
        assert issubclass(model_cls, Model) and not model_cls.__abstractmethods__
        assert model_cls.model_type == kind.model_type and issubclass(model_cls.Settings, ModelSettings)
    assert len({kind.name for kind in registry.KINDS}) == len({kind.model_type for kind in registry.KINDS}) == len(registry.KINDS)


def test_names():
    assert models.names() == ["bigcn"] == models.names("drop_edge") and models.names("no such setting") == []
    assert models.get_class("bigcn").threads and not models.get_class("bigcnn").threads


def test_a_saved_model_is_recognized_by_its_configuration(encoder, tmp_path):
    corpus = load_corpus(make_threads(6, 1), labeled=True)
    made = models.create("bigcn", ("bad", "good"), corpora=[corpus])
    made.save(tmp_path / "threads")
    assert json.loads((tmp_path / "threads" / "config.json").read_text())["model_type"] == type(made).model_type
    assert type(models.load(tmp_path / "threads")) is type(made)
    with pytest.raises(RequestError, match="saved bigcn model, expected an encoder; give --model bigcn"):
        models.find(tmp_path / "threads", ModelSettings())
    assert models.find(encoder, ModelSettings()) == str(encoder)
    assert models.find("bigcn", models.get_class("bigcn").Settings()) == "bigcn"


def test_settings_are_checked_before_a_model_is_created(tmp_path):
    settings = models.get_class("bigcn").Settings(features="vectors", vectors=str(tmp_path / "none.txt"))
    with pytest.raises(RequestError, match=r"none\.txt: no such file"):
        models.find("bigcn", settings)
    with pytest.raises(TypeError, match="expected BigcnSettings, got ModelSettings"):
        models.create("bigcn", ("a", "b"), settings=ModelSettings())


def test_warnings_and_cards(encoder):
    threads, texts = load_corpus(make_threads(4, 1), labeled=True), load_corpus(["a", "b"], labeled=False)
    text_cls, thread_cls = models.get_class(encoder), models.get_class("bigcn")
    assert thread_cls.warnings_for(threads) == text_cls.warnings_for(texts) == []
    assert "--model bigcn reads the replies" in text_cls.warnings_for(threads)[0]
    assert "texts without replies" in thread_cls.warnings_for(texts)[0]
    assert (text_cls.library_name, thread_cls.library_name) == ("transformers", "mtem")
    assert "truncated to 16 tokens" in text_cls.usage({}, 16)
    assert "`tfidf` features" in thread_cls.usage({"features": "tfidf"}, None)
