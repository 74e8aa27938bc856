"""A classifier of threads: BiGCN over the posts' features, as one function `model(batch) -> logits`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mtem.atomic import read_json, write_json
from mtem.data.batching import send
from mtem.data.cache import cache_folder, fingerprint_of
from mtem.data.corpus import Corpus
from mtem.data.threads import Thread
from mtem.errors import RequestError
from mtem.models import encoders, integrity
from mtem.models.base import CosineHead, Inputs, Model
from mtem.models.registry import MODEL_TYPE
from mtem.models.trees import views
from mtem.models.trees.bigcn import BiGCN, Dense, Graph, Sparse
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.encoded import EncodedThreads, stored
from mtem.models.trees.features import TEXT_VERSION, NodeFeatures, Tfidf, Vectors
from mtem.settings import setting
from mtem.tensors import read_tensors, write_tensors

KINDS: dict[str, Any] = {kind.kind: kind for kind in (Tfidf, Vectors, Embeddings)}
_FORMAT = 1  # of a saved model, and part of every cache address: raise it when what is written changes
_POSTS = 2048  # encoded at once


@dataclasses.dataclass(frozen=True)
class BigcnSettings:
    """The network's size and what it sees of a post."""

    features: str = setting(
        "tfidf", "numbers that stand for a post: TF-IDF of its words, averaged word vectors, or an encoder's embedding",
        choices=tuple(KINDS),
    )  # fmt: skip
    vocabulary: int = setting(5000, "words of the tfidf features, the most frequent ones of all texts but the test's", low=1)
    vectors: str | None = setting(None, "file of word vectors, 'word v1 v2 ...' in each line (.gz too), for features=vectors")
    encoder: str = setting("minilm", "encoder for features=encoder: a packaged name, a directory or a Hugging Face name")
    hidden: int = setting(64, "width of each graph convolution", low=1)
    graph_dropout: float = setting(0.5, "share of the values dropped between the convolutions, in training", low=0.0, high=0.95)
    drop_edge: float = setting(0.2, "share of a thread's links cut in each direction and pass, in training", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        if self.features == "vectors" and self.vectors is None:
            raise RequestError("features=vectors needs a file of word vectors: --set vectors=FILE")

    def check(self) -> None:
        """Refuse what is not there before any data is read."""
        if self.features == "vectors" and not Path(str(self.vectors)).is_file():
            raise RequestError(f"vectors={self.vectors}: no such file; lines 'word v1 v2 ...' are wanted")
        if self.features == "encoder":
            encoders.find(self.encoder, encoders.FEATURES_OPTION)


class TreeModel(Model):
    """BiGCN with the features of its posts.

    A batch is one graph, on the CPU: "parents" (a root is its own), "trees" and "roots" as in `bigcn.Graph`, and either "values"
    (a row for each post) or "words", "weights" and "nodes" (the entries of a sparse matrix).
    """

    head_path = "network.head"
    threads = True
    has_layers = False
    Settings = BigcnSettings
    # The source's by accuracy and loss on held-out source threads of PHEME. An event has few threads, each of which is cheap:
    # ten passes are what it takes for every index to find its place.
    # Events differ in their share of rumours, and self-training drives the rarer class out unless shares are assumed; even ones
    # served best on events held out of the sources (docs/pheme.md).
    defaults: ClassVar[dict[str, Any]] = {"source_epochs": 4.0, "epochs": 10.0, "target_class_prior": "uniform"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"learning_rate": 5e-3, "target_class_prior": "none"}}

    library_name = "mtem"
    card_title = "A classifier of threads"

    @classmethod
    def card_usage(cls, record: Mapping[str, Any]) -> str:
        """Return how to use a saved model, for its card."""
        return f"A BiGCN over `{record['settings']['features']}` features. Read it with `mtem.load(PATH)`."

    @classmethod
    def warnings_for(cls, corpus: Corpus) -> list[str]:
        """Return what a user should know about giving this corpus to such a model."""
        if corpus.threaded:
            return []
        return [f"{corpus.name}: these are texts without replies; bigcn sees nothing but their words"]

    def __init__(self, network: BiGCN, features: NodeFeatures, classes: Sequence[str]) -> None:
        super().__init__()
        self.network, self.features, self.classes = network, features, tuple(classes)
        self.max_length: int | None = features.max_length  # tokens of a post that an encoder sees

    # ------------------------------------------------------------------ making, saving, loading

    @classmethod
    def create(
        cls,
        classes: Sequence[str],
        corpora: Iterable[Corpus],
        settings: BigcnSettings,
        max_length: int = 256,
        like: Model | None = None,
    ) -> TreeModel:
        """A network drawn from torch's global generator; the words are those of `corpora`, so let no test set be among them.

        With `like` what a post is to the network is what it is to that model.
        """
        posts = (text for corpus in corpora for trees in _portions(corpus) for tree in trees for text in tree.texts)
        features: NodeFeatures
        if isinstance(like, TreeModel) and like.features.kind == settings.features:
            features = like.features
        elif settings.features == "tfidf":
            features = Tfidf.fit(posts, settings.vocabulary)
        elif settings.features == "vectors":
            assert settings.vectors is not None
            features = Vectors.fit(posts, settings.vectors)
        else:
            features = Embeddings.find(settings.encoder, max_length)
        network = BiGCN(features.width, len(classes), settings.hidden, settings.graph_dropout, settings.drop_edge)
        return cls(network, features, classes)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """config.json, model.safetensors, and what the features need: vocabulary.json and .safetensors, or encoder/."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        record = {
            "model_type": MODEL_TYPE,
            "format": _FORMAT,
            "classes": list(self.classes),
            "features": self.features.kind,
            "text_version": TEXT_VERSION,
            "width": self.features.width,
            "hidden": self.network.up.hidden,
            "graph_dropout": self.network.dropout,
            "drop_edge": self.network.drop_edge,
            "cosine_temperature": self.head.temperature if isinstance(self.head, CosineHead) else None,
        }
        self.features.save(directory)
        write_tensors(directory / "model.safetensors", self.network.state_dict())
        write_json(directory / "config.json", record)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TreeModel:
        """A model that `save` wrote."""
        directory = Path(directory)
        record = read_json(directory / "config.json")
        try:
            if record["model_type"] != MODEL_TYPE:
                raise RequestError(f"{directory}: holds a model of type {record['model_type']!r}, not {MODEL_TYPE!r}")
            if record["format"] > _FORMAT or record["text_version"] != TEXT_VERSION:
                raise RequestError(f"{directory}: was written by another version of mtem; this one cannot read it")
            classes = _checked_classes(record["classes"], directory)
            features = KINDS[record["features"]].load(directory)
            if features.width != record["width"]:
                raise RequestError(
                    f"{directory}: its {features.kind} features are of width {features.width} and its config.json says "
                    f"{record['width']}; {integrity.AGAIN}"
                )
            network = BiGCN(features.width, len(classes), record["hidden"], record["graph_dropout"], record["drop_edge"])
            if record["cosine_temperature"] is not None:
                network.head = CosineHead(network.head, record["cosine_temperature"])
            weights = read_tensors(directory / integrity.WEIGHTS)
            integrity.check_tensors(weights, network.state_dict(), f"{directory}: {integrity.WEIGHTS}")
            network.load_state_dict(weights)
            return cls(network, features, classes)
        except RequestError:
            raise
        except FileNotFoundError as error:
            raise RequestError(f"{error.filename or error}: no such file, and the model needs it; {integrity.AGAIN}") from None
        except Exception as error:  # damaged files fail in as many ways as there are files
            told = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {told[0][:160]}" if told else type(error).__name__
            raise RequestError(f"{directory}: is no model of threads, or a damaged one ({reason}); {integrity.AGAIN}") from error

    # ------------------------------------------------------------------ from threads to tensors

    def encode(
        self, corpus: Corpus, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None
    ) -> EncodedThreads:
        """The threads' features, from the cache if they were made before."""
        cache = cache if cache is not None else corpus.cache
        address = fingerprint_of(str(_FORMAT), corpus.fingerprint, self.features.fingerprint)

        def pieces() -> Iterator[dict[str, np.ndarray]]:
            store = self.features.store(cache)
            done = 0
            for trees in _portions(corpus):
                yield self._piece(trees, store)
                done += len(trees)
                if progress is not None:
                    progress(done, len(corpus))

        return stored(cache_folder("threads", cache) / address, pieces(), self.features.width)

    def encode_threads(self, trees: Sequence[Thread]) -> EncodedThreads:
        """A handful of threads, in memory."""
        return EncodedThreads.of([self._piece(trees)])

    def encode_texts(self, texts: Sequence[str]) -> EncodedThreads:
        """Texts as threads without replies, in memory."""
        return self.encode_threads([Thread([text], [-1]) for text in texts])

    def _piece(self, trees: Sequence[Thread], store: Any = None) -> dict[str, np.ndarray]:
        lengths = np.array([len(tree.parents) for tree in trees], np.int32)
        parents = np.array([parent for tree in trees for parent in tree.parents], np.int32)
        texts = [text for tree in trees for text in tree.texts]
        return {"lengths": lengths, "parents": parents, **self.features.encode(texts, self.device, store)}

    def collate(self, threads: EncodedThreads, rows: np.ndarray) -> dict[str, Tensor]:
        """The threads at `rows` as one graph. It stays on the CPU, wherever the model is: `bigcn` says why."""
        return {name: torch.from_numpy(array) for name, array in threads.batch(rows).items()}

    # ------------------------------------------------------------------ the function

    def forward(self, inputs: Inputs) -> Tensor:
        graph = _graph(inputs)
        with self.autocast():
            if "noise" in inputs:
                return self.network(Dense(self._values(inputs) + inputs["noise"], graph), graph).float()
            if "values" in inputs:
                return self.network(Dense(self._values(inputs), graph), graph).float()
            return self.network(Sparse(inputs["words"], inputs["weights"], inputs["nodes"], graph), graph).float()

    def _values(self, inputs: Inputs) -> Tensor:
        if "values" in inputs:
            return send(inputs["values"], self.device)
        return Sparse(inputs["words"], inputs["weights"], inputs["nodes"], _graph(inputs)).dense(self.features.width, self.device)

    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """The posts' features, [posts, width], zeros included."""
        return self._values(inputs).detach().float()

    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """The norm over all posts of each thread, [posts, 1]."""
        squares, trees = values.square().sum(dim=1), send(inputs["trees"], values.device)
        sums = squares.new_zeros(len(inputs["roots"])).index_add(0, trees, squares)
        return sums.sqrt().index_select(0, trees).unsqueeze(1)

    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """The same threads with a random share of their words hidden ("mask"), of their replies gone ("delete") or in one
        another's place ("swap"); "mixed" does all three, each to a third of the share, "dropout" nothing."""
        return views.augment(inputs, kind, share, generator)

    def prepare(self, inputs: Inputs) -> Inputs:
        return inputs

    def differentiable_attention(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # ------------------------------------------------------------------ layers

    def default_learning_rates(self) -> tuple[float, float]:
        return 2e-3, 5e-4

    def depths(self) -> dict[str, int]:
        """All parameters are as deep as each other: `layer_decay` has nothing to decay along."""
        return {}

    def freeze(self, layers: int) -> None:
        if layers:
            raise RequestError(f"frozen_layers={layers}: this model has no pretrained layers to freeze; use 0")

    def keep_lower(self, threads: EncodedThreads, path: Path, progress: Any, name: str, limit: float) -> EncodedThreads:
        return threads


def _checked_classes(names: Any, directory: Path) -> list[str]:
    if not isinstance(names, list) or len(names) < 2 or len(set(map(str, names))) != len(names):
        raise RequestError(f"{directory}: its config.json names the classes {names}; two or more different ones are wanted")
    return [str(name) for name in names]


def _graph(inputs: Inputs) -> Graph:
    return Graph(inputs["parents"], inputs["trees"], inputs["roots"])


def _portions(corpus: Corpus) -> Iterator[list[Thread]]:
    """The threads in portions of some thousand posts."""
    trees: list[Thread] = []
    posts = 0
    for start in range(0, len(corpus), 256):
        for tree in corpus.threads(range(start, min(start + 256, len(corpus)))):
            trees.append(tree)
            posts += len(tree.texts)
            if posts >= _POSTS:
                yield trees
                trees, posts = [], 0
    if trees or not len(corpus):
        yield trees
