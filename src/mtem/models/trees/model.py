"""A classifier of threads: BiGCN over the features of the posts, as one function `model(batch) -> logits`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mtem import parallel
from mtem.atomic import read_json, write_json
from mtem.capture import send
from mtem.data.cache import cache_folder, fingerprint_of
from mtem.data.corpus import Corpus
from mtem.data.threads import Thread
from mtem.errors import RequestError
from mtem.models import encoders, integrity
from mtem.models.base import EncodedCorpus, Inputs, Model, ModelSettings
from mtem.models.base import Noise as NoiseOfModel
from mtem.models.heads import CosineHead
from mtem.models.text import TextModel, default_pretraining_rate
from mtem.models.trees import views
from mtem.models.trees.bigcn import BiGCN, Dense, Features, Graph, Sparse
from mtem.models.trees.embeddings import Embeddings
from mtem.models.trees.encoded import EncodedThreads, stored
from mtem.models.trees.features import TEXT_VERSION, PostFeatures, Tfidf, Vectors
from mtem.models.trees.neighbours import bank_of, neighbour_means
from mtem.models.trees.noise import Noise, Noisy, Watched, random, zeros
from mtem.models.trees.store import Store
from mtem.settings import setting
from mtem.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

FEATURES: dict[str, type[PostFeatures]] = {features.name: features for features in (Tfidf, Vectors, Embeddings)}
_FORMAT = 1  # of a saved model, and part of every cache address: increase it when the files change
_POSTS = 2048  # encoded at once
# Defaults. Those with the features of an encoder were compared on events left out of the sources (docs/recipe.md).
OF_WORDS: dict[str, Any] = {"hidden": 64, "root_hidden": 0, "head_dropout": 0.0, "centre": False, "neighbours": 0}
OF_ENCODERS: dict[str, Any] = {"hidden": 16, "root_hidden": 64, "head_dropout": 0.5, "centre": True, "neighbours": 20}
CENTRE = "centre.safetensors"
BANK = "neighbours.safetensors"


@dataclasses.dataclass(frozen=True)
class BigcnSettings(ModelSettings):
    """The size of the network, and the features of a post."""

    features: str = setting(
        "tfidf", "features of a post: TF-IDF of its words, averaged word vectors, or the embedding of an encoder",
        choices=tuple(FEATURES),
    )  # fmt: skip
    vocabulary: int = setting(5000, "words of the tfidf features: the most frequent ones of all texts except the test set", low=1)
    vectors: str | None = setting(None, "file of word vectors for features=vectors, with lines 'word v1 v2 ...' (.gz too)")
    encoder: str = setting("minilm", "encoder for features=encoder: a packaged name, a directory or a Hugging Face name")
    hidden: int | None = setting(None, "width of each graph convolution; none: 16 with features=encoder, else 64", low=1)
    graph_dropout: float = setting(0.5, "dropout rate between the convolutions, in training", low=0.0, high=0.95)
    drop_edge: float = setting(0.2, "share of the edges dropped in each direction and pass, in training", low=0.0, high=1.0)
    root_hidden: int | None = setting(
        None, "width of a layer that reads the first post alone, beside the convolutions; none: 64 with features=encoder, "
        "else 0", low=0,
    )  # fmt: skip
    head_dropout: float | None = setting(
        None, "dropout rate of what the head reads of the convolutions, in training; none: 0.5 with features=encoder, else 0",
        low=0.0, high=0.95,
    )  # fmt: skip
    centre: bool | None = setting(
        None, "subtract the mean over the posts of its domain from the features of a post (not with tfidf); none: true with "
        "features=encoder"
    )  # fmt: skip
    neighbours: int | None = setting(
        None, "first posts of the same domain, the most similar ones, whose mean a second layer of width root_hidden reads (not "
        "with tfidf); none: 20 with features=encoder and root_hidden above 0, else 0", low=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check that the settings fit together."""
        if self.features == "vectors" and self.vectors is None:
            raise RequestError("features=vectors needs a file of word vectors: --set vectors=FILE")
        if self.features == "tfidf" and self.centre:
            raise RequestError("centre=true needs dense features; use features=encoder or features=vectors, or centre=false")
        if self.features == "tfidf" and self.neighbours:
            raise RequestError("neighbours needs dense features; use features=encoder or features=vectors, or neighbours=0")
        if self.neighbours and not self.found("root_hidden"):
            raise RequestError("neighbours needs a layer for the first post; use root_hidden=64, or neighbours=0")

    def found(self, name: str) -> Any:
        """Return a setting whose default depends on the features."""
        value = getattr(self, name)
        if value is not None:
            return value
        if name == "neighbours" and not self.found("root_hidden"):
            return 0
        return (OF_ENCODERS if self.features == Embeddings.name else OF_WORDS)[name]

    def check(self) -> None:
        """Check that the word vectors or the encoder exist.

        Raises
        ------
        RequestError
            If they do not.
        """
        if self.features == "vectors" and not Path(str(self.vectors)).is_file():
            raise RequestError(f"vectors={self.vectors}: no such file; give a file with lines 'word v1 v2 ...'")
        if self.features == "encoder":
            try:
                encoders.find(self.encoder, encoders.FEATURES_OPTION)
            except RequestError as error:
                raise RequestError(f"{error}; --features {Tfidf.name} needs no encoder") from error


# On events held out of the sources, a threshold of confidence was worse than none where an encoder reads the posts, and better
# over words if class shares are assumed. An index that all threads share was better than one for each; since threads are read
# with their neighbours it gains nothing over 1 for all (docs/recipe.md).
_LEARNED = {"index_mode": "shared", "sampling": True, "threshold": 0.0}
_RECOMMENDED = {**_LEARNED, "index_mode": "fixed"}


class BigcnModel(Model):
    """BiGCN with the features of its posts.

    A batch is one graph, on the CPU. `mtem.models.trees.encoded.EncodedThreads.batch` lists its entries.

    Parameters
    ----------
    network
        The graph network.
    features
        The features of posts that it takes.
    classes
        The class names, in the order of the logits.
    centred
        Whether the mean over its domain is subtracted from the features of a post; see `learn_domains`.
    neighbours
        How many of the first posts most like its own a thread is read with, by a network that has a layer for them.

    Attributes
    ----------
    centre
        The mean of the first posts and of the replies of the target, [2, width]; None before `learn_domains`.
    bank
        First posts of the target, among which neighbours are sought, [posts, width]; None before `learn_domains`.
    """

    head_path = "network.head"
    threads = True
    model_type = "mtem-bigcn"
    Settings = BigcnSettings
    # `source_epochs` was chosen by accuracy and loss on held-out source threads of PHEME. An event has few threads, each of them
    # cheap, so there is time for many passes. Read by an encoder, rumours are found much better than by words. Events differ in
    # their share of rumours; which shares to assume was found on events held out of the sources (docs/pheme.md).
    defaults: ClassVar[dict[str, Any]] = {
        "max_length": 256, "source_epochs": 4.0, "epochs": 24.0, "target_class_prior": "auto", "features": "encoder",
    }  # fmt: skip
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recommended": _RECOMMENDED,
        "learned": _LEARNED,
        "paper": {"learning_rate": 5e-3, "target_class_prior": "none", "epochs": 10.0, "features": "tfidf"},
    }
    card_title = "A classifier of threads"

    network: BiGCN

    def __init__(
        self, network: BiGCN, features: PostFeatures, classes: Sequence[str], *, centred: bool = False, neighbours: int = 0
    ) -> None:
        super().__init__()
        self.network, self.features, self._classes = network, features, tuple(classes)
        self.max_length = features.max_length
        self.centred, self.neighbours = centred, neighbours
        self.centre: np.ndarray | None = None
        self.bank: np.ndarray | None = None

    # ------------------------------------------------------------------ creating, saving, loading

    @classmethod
    def create(
        cls,
        name: str | os.PathLike[str],
        classes: Sequence[str],
        *,
        corpora: Sequence[Corpus] = (),
        settings: ModelSettings | None = None,
        max_length: int = 256,
        attention: str | None = None,
        like: Model | None = None,
    ) -> Self:
        """Return a network drawn from torch's global generator.

        Parameters
        ----------
        name, attention
            Ignored.
        classes
            The class names, in the order of the logits.
        corpora
            All training data; the words of the features are taken from it. Never pass a test set.
        settings
            A `BigcnSettings`; None: the defaults.
        max_length
            The number of tokens that an encoder reads of each post.
        like
            A model whose features are used if they are of the kind that the settings ask for.
        """
        settings = BigcnSettings() if settings is None else settings
        if not isinstance(settings, BigcnSettings):
            raise TypeError(f"expected BigcnSettings, got {type(settings).__name__}")
        if isinstance(like, BigcnModel) and like.features.name == settings.features:
            features = like.features
        else:
            posts = (text for corpus in corpora for threads in _portions(corpus) for thread in threads for text in thread.texts)
            features = _fit(posts, settings, max_length)
        network = BiGCN(
            features.width, len(classes), settings.found("hidden"), settings.graph_dropout, settings.drop_edge,
            settings.found("root_hidden"), settings.found("head_dropout"), bool(settings.found("neighbours")),
        )  # fmt: skip
        return cls(network, features, classes, centred=settings.found("centre"), neighbours=settings.found("neighbours"))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors, and the features: vocabulary.json and .safetensors, or a folder "encoder"."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        record = {
            "model_type": self.model_type,
            "format": _FORMAT,
            "classes": list(self.classes),
            "features": self.features.name,
            "text_version": TEXT_VERSION,
            "width": self.features.width,
            "hidden": self.network.up.hidden,
            "graph_dropout": self.network.dropout,
            "drop_edge": self.network.drop_edge,
            "root_hidden": self.network.root_hidden,
            "head_dropout": self.network.head_dropout,
            "centred": self.centred,
            "has_centre": self.centre is not None,
            "neighbours": self.neighbours,
            "bank": 0 if self.bank is None else len(self.bank),
            "cosine_temperature": self.head.temperature if isinstance(self.head, CosineHead) else None,
        }
        self.features.save(directory)
        write_tensors(directory / "model.safetensors", self.network.state_dict())
        if self.centre is not None:
            write_tensors(directory / CENTRE, {"centre": torch.from_numpy(self.centre)})
        if self.bank is not None:
            write_tensors(directory / BANK, {"bank": torch.from_numpy(self.bank)})
        write_json(directory / "config.json", record)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Return a model that `save` wrote.

        Raises
        ------
        RequestError
            If the directory is missing, incomplete, damaged, or of another version or kind of model.
        """
        directory = Path(directory)
        record = read_json(directory / "config.json")
        try:
            if record["model_type"] != cls.model_type:
                raise RequestError(f"{directory}: expected a model of type {cls.model_type!r}, got {record['model_type']!r}")
            if record["format"] > _FORMAT or record["text_version"] != TEXT_VERSION:
                raise RequestError(f"{directory}: was written by another version of mtem, and this version cannot read it")
            classes = _checked_classes(record["classes"], directory)
            features = FEATURES[record["features"]].load(directory)
            if features.width != record["width"]:
                raise RequestError(
                    f"{directory}: its {features.name} features have width {features.width}, but its config.json says "
                    f"{record['width']}; {integrity.AGAIN}"
                )
            weights = read_tensors(directory / integrity.WEIGHTS)
            with torch.device("meta"):  # sizes out of a damaged file take no memory
                integrity.check_tensors(
                    weights, _network(record, features.width, len(classes)).state_dict(), f"{directory}: {integrity.WEIGHTS}"
                )
            network = _network(record, features.width, len(classes))
            network.load_state_dict(weights)
            neighbours = record.get("neighbours", 0)
            if type(neighbours) is not int or neighbours < 0:
                raise RequestError(f"{directory}: config.json: neighbours: expected a whole number, got {neighbours!r}")
            model = cls(network, features, classes, centred=record.get("centred", False), neighbours=neighbours)
            if record.get("has_centre", False):
                expected = {"centre": torch.zeros(2, features.width)}
                integrity.check_tensors(read := read_tensors(directory / CENTRE), expected, f"{directory}: {CENTRE}")
                model.centre = read["centre"].numpy()
            if rows := record.get("bank", 0):
                expected = {"bank": torch.zeros(rows, features.width, device="meta")}
                integrity.check_tensors(read := read_tensors(directory / BANK), expected, f"{directory}: {BANK}")
                model.bank = read["bank"].numpy()
            return model
        except RequestError:
            raise
        except FileNotFoundError as error:
            raise RequestError(f"{error.filename or error}: no such file, but the model needs it; {integrity.AGAIN}") from None
        except Exception as error:  # damaged files fail in as many ways as there are files
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
            raise RequestError(f"{directory}: the model of threads could not be loaded ({reason}); {integrity.AGAIN}") from error

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the logits."""
        return self._classes

    @classmethod
    def warnings_for(cls, corpus: Corpus) -> list[str]:
        """Return a warning for a corpus of texts, which have no replies to read."""
        return [] if corpus.threaded else [f"{corpus.name}: contains texts without replies; bigcn reads only their words"]

    @classmethod
    def usage(cls, settings: Mapping[str, Any], max_length: int | None) -> str:
        """Return the kind of the features and how to load the model."""
        return f"A BiGCN over `{settings['features']}` features: load it with `mtem.load(PATH)`."

    # ------------------------------------------------------------------ from threads to tensors

    def encode(
        self, corpus: Corpus, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None
    ) -> EncodedThreads:
        """Return the threads with the features of their posts, from the cache if they were encoded before."""
        cache = cache if cache is not None else corpus.cache
        address = fingerprint_of(str(_FORMAT), corpus.fingerprint, self.features.fingerprint)

        def pieces() -> Iterator[dict[str, np.ndarray]]:
            store = self.features.store(cache)
            done = 0
            for threads in _portions(corpus):
                yield self._piece(threads, store)
                done += len(threads)
                if progress is not None:
                    progress(done, len(corpus))

        return self._of_the_target(stored(cache_folder("threads", cache) / address, pieces(), self.features.width))

    def learn_domains(self, labeled: EncodedCorpus, domains: np.ndarray, target: EncodedCorpus) -> None:
        """Centre the features: of each source domain at the mean of its posts, of all other threads at the mean of the target's.

        First posts and replies have their own means. Neighbours are sought in the same domain: for threads of the target, and for
        all that are encoded later, among the unlabeled ones.
        """
        if not isinstance(labeled, EncodedThreads) or not isinstance(target, EncodedThreads):
            return
        groups = [(domains == number).nonzero()[0] for number in range(int(domains.max(initial=-1)) + 1)]
        if self.centred:
            self.centre = target.means(np.arange(len(target)))
            centres = [labeled.means(group) for group in groups]
            labeled.centres, labeled.domains = np.stack([*centres, self.centre]), domains  # the last one is also number -1
        if self.neighbours:
            self.bank = bank_of(target.first_posts())
            labeled.neighbours = np.empty((len(labeled), self.features.width), np.float16)
            for group, bank in [(group, None) for group in groups] + [((domains < 0).nonzero()[0], self.bank)]:
                posts = labeled.first_posts(group)
                labeled.neighbours[group] = neighbour_means(posts, bank_of(posts) if bank is None else bank, self.neighbours)
        self._of_the_target(target)

    def _of_the_target(self, threads: EncodedThreads) -> EncodedThreads:
        """Return the threads, read as those of the target."""
        threads.centres = None if self.centre is None else self.centre[np.newaxis]
        threads.neighbours = None
        if self.bank is not None:
            threads.neighbours = neighbour_means(threads.first_posts(), self.bank, self.neighbours)
        return threads

    def encode_threads(self, threads: Sequence[Thread]) -> EncodedThreads:
        """Return a few encoded threads, in memory."""
        return self._of_the_target(EncodedThreads.of([self._piece(threads)]))

    def encode_texts(self, texts: Sequence[str]) -> EncodedThreads:
        """Return texts as threads without replies, in memory."""
        return self.encode_threads([Thread([text], [-1]) for text in texts])

    def _piece(self, threads: Sequence[Thread], store: Store | None = None) -> dict[str, np.ndarray]:
        lengths = np.array([len(thread.parents) for thread in threads], np.int32)
        parents = np.array([parent for thread in threads for parent in thread.parents], np.int32)
        texts = [text for thread in threads for text in thread.texts]
        return {"lengths": lengths, "parents": parents, **self.features.encode(texts, self.device, store)}

    def collate(self, encoded: EncodedCorpus, rows: np.ndarray, *, multiple: int = 1) -> dict[str, Tensor]:
        """Return the threads at `rows` as one graph, without padding. It stays on the CPU, for the reason given in `bigcn`."""
        if not isinstance(encoded, EncodedThreads):
            raise TypeError(f"expected EncodedThreads, got {type(encoded).__name__}")
        return {name: torch.from_numpy(array) for name, array in encoded.batch(rows).items()}

    def count(self, inputs: Inputs) -> int:
        """Return the number of threads."""
        return len(inputs["roots"])

    def take(self, inputs: Inputs, rows: slice) -> Inputs:
        """Return consecutive threads of a batch."""
        return views.take(inputs, rows)

    # ------------------------------------------------------------------ the function

    def forward(self, inputs: Inputs) -> Tensor:
        """Return float32 logits, [threads, K]."""
        return self.spread(lambda own: (self._pass(own),), inputs)[0]

    def _pass(self, inputs: Inputs) -> Tensor:
        graph = _graph(inputs)
        features: Features
        with self.autocast():
            if "noise" in inputs:
                features = Dense(self._values(inputs) + inputs["noise"], graph)
            else:
                features = Dense(self._values(inputs), graph) if "values" in inputs else _sparse(inputs, graph)
            if (noise := Noise.of(inputs)) is not None:
                features = Noisy(features, self._root_values(inputs), noise, graph.on(self.device))
            neighbours = inputs.get("neighbours")
            logits: Tensor = self.network(features, graph, None if neighbours is None else send(neighbours, self.device))
            return logits.float()

    def _values(self, inputs: Inputs) -> Tensor:
        if "values" in inputs:
            return send(inputs["values"], self.device)
        return _sparse(inputs, _graph(inputs)).dense(self.features.width, self.device)

    def _root_values(self, inputs: Inputs) -> Tensor:
        if "values" in inputs:
            return send(inputs["values"][inputs["roots"]], self.device)
        return _sparse(inputs, _graph(inputs)).root_values(self.features.width, self.device)

    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """Return the features of the posts as a dense matrix, [posts, width]."""
        return self._values(inputs).detach().float()

    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Return the norm over all posts of a thread, for each of its posts, [posts, 1]."""
        squares, threads = values.square().sum(dim=1), send(inputs["threads"], values.device)
        sums = squares.new_zeros(len(inputs["roots"])).index_add(0, threads, squares)
        return sums.sqrt().index_select(0, threads).unsqueeze(1)

    # ------------------------------------------------------------------ noise by its factors, as `noise` explains

    @property
    def _factored(self) -> bool:
        return 2 * self.network.up.hidden < self.features.width

    def with_noise(self, inputs: Inputs, noise: NoiseOfModel) -> Inputs:
        """Return the batch with noise that is added to the features of its posts."""
        return {**inputs, **noise.entries()} if isinstance(noise, Noise) else super().with_noise(inputs, noise)

    def noise_gradient(
        self, inputs: Inputs, objective: Callable[[Tensor, Tensor], Tensor], start: NoiseOfModel | None = None
    ) -> NoiseOfModel:
        """Compute the gradient of an objective in the noise; see `Model.noise_gradient`."""
        if not self._factored:
            return super().noise_gradient(inputs, objective, start)
        nodes, trees, width = len(inputs["parents"]), len(inputs["roots"]), self.features.width
        noise: Noise = zeros(nodes, trees, width, self.device) if start is None else start
        noise = noise._replace(roots=noise.roots.detach().requires_grad_())
        seen: list[Watched] = []

        def watch(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(Watched(given[0]))
            return seen[-1], *given[1:]

        handle = self.network.register_forward_pre_hook(watch)
        try:
            value = objective(*self.logits_and_features(self.with_noise(inputs, noise)))
        finally:
            handle.remove()
        roots, *products = torch.autograd.grad(value, [noise.roots, *seen[-1].products])
        own = torch.cat(products, dim=1)
        codes = own.new_zeros(nodes, own.shape[1])  # of several processes each has the gradient of its own threads
        codes[views.posts_of(inputs, parallel.part_of(trees).rows)] = own
        codes = codes * send(_graph(inputs).replies, self.device).unsqueeze(1)
        basis = torch.cat(seen[-1].weights, dim=1)
        return Noise(codes, basis, roots, basis.T @ basis, torch.zeros_like(noise.unseen))

    def random_noise(self, inputs: Inputs, generator: torch.Generator) -> NoiseOfModel:
        """Return noise of independent standard normal values, drawn from a CPU generator."""
        if not self._factored:
            return super().random_noise(inputs, generator)
        weights = torch.cat([self.network.up.weight1, self.network.down.weight1], dim=1).detach()
        _, replies, roots = _present(inputs)
        return random(weights, replies, roots, _graph(inputs), generator)

    def rescaled_noise(self, inputs: Inputs, noise: NoiseOfModel, radius: float) -> NoiseOfModel:
        """Return the noise with the norm `radius` times that of each thread, and zeros at posts without features."""
        if not isinstance(noise, Noise):
            return super().rescaled_noise(inputs, noise, radius)
        graph = _graph(inputs).on(self.device)
        lengths, replies, roots = (send(value, self.device) for value in _present(inputs))
        noise = noise._replace(codes=noise.codes * replies.unsqueeze(1), roots=noise.roots * roots.unsqueeze(1))
        norms = noise.norms(graph)
        return noise.scaled(torch.where(norms > 0, radius * lengths / norms, 0.0), graph)

    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """Return the same threads with a random share of their words or replies changed.

        Parameters
        ----------
        inputs
            A batch.
        kind
            "mask" (words are masked), "delete" (replies are deleted) or "swap" (replies exchange their contents); "mixed": all
            three, each with a third of the share; "dropout": the unchanged threads.
        share
            The share of the words or replies to change.
        generator
            A CPU generator, for all random draws.
        """
        return views.augment(inputs, kind, share, generator)

    @property
    def prior_without_labels(self) -> str:
        """Even shares for words, with which self-training loses the rarer class; with an encoder it does not."""
        return "none" if isinstance(self.features, Embeddings) else "uniform"

    @classmethod
    def preset(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the preset's values; over words, with class shares assumed, the recommended one leaves a method its threshold.

        Without assumed shares a threshold is seldom reached by the rarer class, which self-training then loses (docs/recipe.md).
        """
        found = dict(super().preset(name, values))
        words = values.get("features") != Embeddings.name
        if name == "recommended" and words and values.get("target_class_prior") != "none":
            del found["threshold"]
        return found

    @property
    def default_view_radius(self) -> float:
        """With an encoder, as rehearsed on PHEME: a better F1 of rumours, a lower average precision (docs/recipe.md)."""
        return 0.2 if isinstance(self.features, Embeddings) else 0.0

    # ------------------------------------------------------------------ masked words, for the encoder of the posts

    def pretraining_obstacle(self) -> str | None:
        """Return a reason if there is no encoder of posts, or if its tokenizer has no mask token."""
        if not isinstance(self.features, Embeddings):
            return (
                "pretraining on masked words needs an encoder of texts, and bigcn has one only with features=encoder; "
                "use that, or pretrain_epochs=0"
            )
        if self.features.tokenizer.mask_token_id is None:
            return "the encoder's tokenizer has no mask token; use pretrain_epochs=0, or another encoder"
        return None

    def encoder_of_posts(self) -> TextModel | None:
        """Return a new model of texts around the encoder of the posts, on the same device, if posts are read with one."""
        return self.features.text_model(self.device) if isinstance(self.features, Embeddings) else None

    def take_encoder(self, encoder: Model) -> None:
        """Read posts with an encoder from `encoder_of_posts` from now on."""
        if not isinstance(encoder, TextModel):
            raise TypeError(f"expected a TextModel, got {type(encoder).__name__}")
        self.load_pretrained(encoder.network.base_model.state_dict())

    def pretrained_weights(self) -> dict[str, Tensor]:
        """Return the weights of the encoder of the posts."""
        return dict(self.features.network.state_dict()) if isinstance(self.features, Embeddings) else {}

    def load_pretrained(self, weights: Mapping[str, Tensor]) -> None:
        """Give the encoder of the posts these weights; parts that it has beside them (a pooler) stay."""
        if isinstance(self.features, Embeddings):
            self.features = self.features.with_weights(weights)

    def default_pretraining_rate(self) -> float:
        """Return the learning rate of pretraining on masked words for settings that give none."""
        return default_pretraining_rate(self.features.width)

    def default_learning_rates(self) -> tuple[float, float]:
        """Return the rates of the source training and of the adaptation."""
        return (5e-4 if self.features.name == Embeddings.name else 2e-3), 5e-4


def _fit(posts: Iterable[str], settings: BigcnSettings, max_length: int) -> PostFeatures:
    if settings.features == Tfidf.name:
        return Tfidf.fit(posts, settings.vocabulary)
    if settings.features == Vectors.name:
        assert settings.vectors is not None
        return Vectors.fit(posts, settings.vectors)
    return Embeddings.find(settings.encoder, max_length)


def _network(record: Mapping[str, Any], width: int, classes: int) -> BiGCN:
    """Return the network that a config.json describes, with new weights."""
    network = BiGCN(
        width, classes, record["hidden"], record["graph_dropout"], record["drop_edge"],
        record.get("root_hidden", 0), record.get("head_dropout", 0.0), bool(record.get("neighbours", 0)),
    )  # fmt: skip
    if record["cosine_temperature"] is not None:
        network.head = CosineHead(network.head, record["cosine_temperature"])
    return network


def _checked_classes(names: Any, directory: Path) -> list[str]:
    if not isinstance(names, list) or len(names) < 2 or len(set(map(str, names))) != len(names):
        raise RequestError(f"{directory}: config.json: expected two or more different classes, got {names}")
    return [str(name) for name in names]


def _graph(inputs: Inputs) -> Graph:
    return Graph(inputs["parents"], inputs["threads"], inputs["roots"])


def _sparse(inputs: Inputs, graph: Graph) -> Sparse:
    return Sparse(inputs["words"], inputs["weights"], inputs["posts"], graph)


def _present(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of each thread, and which posts are replies and which threads have a root with features, as 0 and 1."""
    graph = _graph(inputs)
    if "values" in inputs:
        squares = inputs["values"].square().sum(dim=1)
    else:
        weights = inputs["weights"]
        squares = weights.new_zeros(len(graph.parents)).index_add(0, inputs["posts"], weights.square())
    norms = squares.new_zeros(len(graph.roots)).index_add(0, graph.trees, squares).sqrt()
    found = squares > 0
    return norms, (found & graph.replies).float(), found[graph.roots].float()


def _portions(corpus: Corpus) -> Iterator[list[Thread]]:
    """Yield the threads in portions of some thousand posts."""
    threads: list[Thread] = []
    posts = 0
    for start in range(0, len(corpus), 256):
        for thread in corpus.threads(range(start, min(start + 256, len(corpus)))):
            threads.append(thread)
            posts += len(thread.texts)
            if posts >= _POSTS:
                yield threads
                threads, posts = [], 0
    if threads or not len(corpus):
        yield threads
