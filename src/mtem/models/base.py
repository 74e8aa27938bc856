"""The contract of a model: a function from a batch to logits, with a head, and with other views of its inputs.

Methods and the trainer use only what `Model` declares, so they work with texts and with threads. `mtem.models.registry`
explains how to add another kind of model.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from mtem import parallel
from mtem.capture import draws
from mtem.data.corpus import Corpus
from mtem.data.threads import Thread
from mtem.errors import RequestError
from mtem.models.heads import CosineHead
from mtem.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

# A batch as `collate` makes it. The names are the model's own, except "noise": added to the `input_embeddings` if present.
Inputs: TypeAlias = Mapping[str, Tensor]
# What `noise_gradient` and `random_noise` of a model return and its `with_noise` takes: a tensor, or a shorter form of its own.
Noise: TypeAlias = Any


class EncodedCorpus(Protocol):
    """The examples of a corpus as numbers. Only the model that encoded them can `collate` them."""

    @property
    def lengths(self) -> np.ndarray:
        """The size of each example: tokens of a text, posts of a thread."""
        ...

    def __len__(self) -> int:
        """Return the number of examples."""
        ...


Head: TypeAlias = nn.Linear | CosineHead


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The settings of a model; the base class has none."""

    def check(self) -> None:
        """Refuse settings that name missing files, before any data is read."""


class Model(nn.Module, abc.ABC):
    """A classifier that methods can train: the part of it that does not depend on what an example is.

    Every forward pass must call the head with the features of the examples.

    Attributes
    ----------
    network
        The module that computes the logits.
    head_path
        The name of the head among the submodules, such as "network.head".
    max_length
        The number of tokens that the model reads of a text or post; None: no limit.
    precision
        The type used by `autocast`; None: full precision.
    frozen_layers
        The number of layers that `freeze` made constant.
    microbatches
        The number of parts in which `forward` passes a batch; see `save_memory`.
    activation_checkpointing
        Whether each layer's activations are computed again in the backward pass; see `save_memory`.
    threads
        Whether the model reads the replies of a thread.
    replayable
        Whether a pass launches the same operations for all batches of the same shape, so that a GPU can replay it.
    model_type
        The "model_type" in the config.json of a saved model; None: that of a Hugging Face architecture.
    Settings
        The class of the model's own settings.
    defaults
        Training settings that suit this model better than the general defaults.
    presets
        Preset name -> values that the papers give for this model. They replace those of the method's preset of that name.
    library_name, pipeline_tag, card_title
        Entries of the model card: the library that loads the model, the task of a Hugging Face pipeline, the heading.
    """

    network: nn.Module
    head_path: str
    max_length: int | None = None

    threads: ClassVar[bool] = False
    replayable: ClassVar[bool] = False
    model_type: ClassVar[str | None] = None
    Settings: ClassVar[type[ModelSettings]] = ModelSettings
    defaults: ClassVar[dict[str, Any]] = {}
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    library_name: ClassVar[str] = "mtem"
    pipeline_tag: ClassVar[str | None] = None
    card_title: ClassVar[str] = "A classifier"

    def __init__(self) -> None:
        super().__init__()
        self.precision: torch.dtype | None = None
        self._is_labeling = False
        self.frozen_layers = 0
        self.microbatches = 1
        self.activation_checkpointing = False

    # ------------------------------------------------------------------ creating, saving, loading

    @classmethod
    def find(cls, name: str | os.PathLike[str]) -> str:
        """Return the name that `create` takes for the name given to ``--model``.

        Raises
        ------
        RequestError
            If no such model can be loaded.
        """
        return os.fspath(name)

    @classmethod
    @abc.abstractmethod
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
        """Return a model for `classes` before any training. New weights are drawn from torch's global generator.

        Parameters
        ----------
        name
            The name that `find` returned.
        classes
            The class names, in the order of the logits.
        corpora
            All training data, labeled or not, for models that build their vocabulary from it. Never pass a test set.
        settings
            An instance of `Settings`; None: the defaults.
        max_length
            The number of tokens to read of each text or post.
        attention
            The attention implementation of transformers; None: its default.
        like
            A model whose vocabulary is used instead of a new one.
        """

    @classmethod
    @abc.abstractmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Return the model in a directory that `save` wrote.

        Raises
        ------
        RequestError
            If the directory is missing, incomplete or damaged.
        """

    @abc.abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model, and all that is needed to read new examples with it, to a directory."""

    @property
    @abc.abstractmethod
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the logits."""

    @classmethod
    def warnings_for(cls, corpus: Corpus) -> list[str]:
        """Return what users should know before they give this corpus to a model of this class."""
        return []

    @classmethod
    def usage(cls, settings: Mapping[str, Any], max_length: int | None) -> str:
        """Return the sentence of the model card that says how to use a saved model.

        Parameters
        ----------
        settings
            The settings of the run by name.
        max_length
            The `max_length` of the model.
        """
        return "Load it with `mtem.load(PATH)`."

    # ------------------------------------------------------------------ from examples to batches

    @abc.abstractmethod
    def encode(
        self, corpus: Corpus, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None
    ) -> EncodedCorpus:
        """Return the encoded corpus, from the cache if it was encoded before.

        Parameters
        ----------
        corpus
            The examples.
        cache
            The cache directory; None: that of the corpus.
        progress
            Called with (examples done, all examples) from time to time.
        """

    def learn_domains(self, labeled: EncodedCorpus, domains: np.ndarray, target: EncodedCorpus) -> None:
        """Learn, before any batch is made, what makes texts of different domains alike.

        Parameters
        ----------
        labeled
            The labeled texts of a run.
        domains
            The source domain of each of them, as a number; -1: the target.
        target
            The unlabeled texts. What is encoded later is taken to be of their domain.
        """

    @abc.abstractmethod
    def encode_texts(self, texts: Sequence[str]) -> EncodedCorpus:
        """Return a few encoded texts, in memory."""

    def encode_threads(self, threads: Sequence[Thread]) -> EncodedCorpus:
        """Return a few encoded threads, in memory. A model of texts reads the root post of each."""
        return self.encode_texts([thread.texts[0] for thread in threads])

    @abc.abstractmethod
    def collate(self, encoded: EncodedCorpus, rows: np.ndarray, *, multiple: int = 1) -> dict[str, Tensor]:
        """Return the examples at `rows` as one batch, padded to a multiple of `multiple` tokens if it is padded at all."""

    @abc.abstractmethod
    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """Return another view of the same examples.

        Parameters
        ----------
        inputs
            A batch.
        kind
            One of `mtem.models.augment.KINDS`.
        share
            The share of the tokens, words or posts to change.
        generator
            A CPU generator, for all random draws.
        """

    @abc.abstractmethod
    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """Return the continuous values that represent the examples; "noise" in `inputs` is added to them."""

    @abc.abstractmethod
    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Return the norm of each example's values, in a shape that broadcasts against `values`."""

    def unit_directions(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Return the values divided by the norm of their example. Examples of zeros stay zero."""
        norms = self.embedding_norms(values, inputs)
        return values * torch.where(norms > 0, 1 / norms, 0.0)

    def with_noise(self, inputs: Inputs, noise: Noise) -> Inputs:
        """Return the batch with noise that is added to its `input_embeddings`."""
        return {**inputs, "noise": noise}

    def noise_gradient(self, inputs: Inputs, objective: Callable[[Tensor, Tensor], Tensor], start: Noise | None = None) -> Noise:
        """Compute the gradient of an objective in the noise that is added to the embeddings.

        Parameters
        ----------
        inputs
            A batch.
        objective
            ``objective(logits, features)``, a sum over the examples.
        start
            The noise at which the gradient is computed, by default 0.
        """
        noise = torch.zeros_like(self.input_embeddings(inputs)) if start is None else start.detach()
        noise.requires_grad_()
        value = objective(*self.logits_and_features(self.with_noise(inputs, noise)))
        return torch.autograd.grad(value, noise)[0]

    def random_noise(self, inputs: Inputs, generator: torch.Generator) -> Noise:
        """Return noise of independent standard normal values, drawn from a CPU generator."""
        shape = self.input_embeddings(inputs).shape
        return draws(lambda: torch.randn(shape, generator=generator), self.device)

    def rescaled_noise(self, inputs: Inputs, noise: Noise, radius: float) -> Noise:
        """Return the noise with the norm ``radius`` times that of each example's embeddings, and zeros where these are zero.

        Zeros means tokens or posts with no other value than 0: padding, or a post without known words.
        """
        values = self.input_embeddings(inputs)
        noise = noise * (values != 0).any(dim=-1, keepdim=True)
        return radius * self.embedding_norms(values, inputs) * self.unit_directions(noise, inputs)

    def split(self, inputs: Inputs, pieces: int) -> list[tuple[Inputs, slice]]:
        """Return the batch in up to `pieces` parts, each with the slice of its examples. By default it stays whole."""
        return [(inputs, slice(None))]

    def count(self, inputs: Inputs) -> int:
        """Return the number of examples of a batch."""
        raise RequestError(f"{type(self).__name__}: this model cannot be trained in several processes; use one")

    def take(self, inputs: Inputs, rows: slice) -> Inputs:
        """Return consecutive examples of a batch as a batch."""
        raise NotImplementedError

    def spread(self, run: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return what a pass returns for a batch; several processes compute a part of it each (:mod:`mtem.parallel`)."""
        if not parallel.is_together():
            return run(inputs)
        return parallel.spread(lambda rows: run(self.take(inputs, rows)), self.count(inputs))

    def parts(self, inputs: Inputs) -> list[Inputs]:
        """Return the batch in the parts in which `forward` passes it."""
        return [part for part, _ in self.split(inputs, self.microbatches)]

    def probe(self) -> Inputs | None:
        """Return two tiny examples that show how layers are called; None: layers are not called example by example."""
        return None

    # ------------------------------------------------------------------ from batches to logits

    @abc.abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits, float32 of shape [N, K]."""

    if TYPE_CHECKING:

        def __call__(self, inputs: Inputs) -> Tensor:
            """Return `forward` of the inputs."""
            ...

    def one_pass(self, inputs: Inputs) -> Tensor:
        """Return the logits of one pass with all examples, whatever `microbatches` is."""
        return self(inputs)

    def save_memory(self, microbatches: int = 1, activation_checkpointing: bool = False) -> None:
        """Set how activations are kept. Without dropout the results are the same but for rounding.

        Parameters
        ----------
        microbatches
            In how many parts `forward` passes a batch. With gradients, the activations of a part are computed again in the
            backward pass, so that those of one part at a time are kept. No effect on models that do not `split` batches.
        activation_checkpointing
            Whether the activations inside each layer are computed again in the backward pass, so that only the inputs of the
            layers and the activations inside one of them are kept.

        Raises
        ------
        RequestError
            If the model has no list of layers.
        """
        if activation_checkpointing and not self.has_layers:
            raise RequestError(
                "activation_checkpointing=true: this model has no list of layers; leave it false (an encoder then needs less "
                "memory with microbatches)"
            )
        self.microbatches, self.activation_checkpointing = microbatches, activation_checkpointing

    def prepare(self, inputs: Inputs) -> Inputs:
        """Return the inputs together with everything that does not depend on trainable parameters, computed once."""
        return inputs

    def logits_and_features(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return logits and the features that enter the head, both differentiable."""
        logits, features = self.spread(lambda own: self._with_features(self, own), inputs)
        return logits, features

    def _with_features(self, forward: Callable[[Inputs], Tensor], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the logits of a pass and the features that entered the head in it."""
        seen: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            logits = forward(inputs)
        finally:
            handle.remove()
        features = seen[-1]
        if features.dim() == 3:  # a head that classifies every position and pools afterwards
            features = features[:, 0]
        return logits, features.float()

    def differentiable_attention(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which attention has forward-mode and second derivatives."""
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of one forward pass in the model's `precision`."""
        # One region per forward: autocast keeps copies of the weights while it is open, and they change between forwards.
        # On a CPU only training passes are rounded, so that probabilities depend neither on its kind nor on the batch.
        training = torch.is_grad_enabled() or self._is_labeling
        if self.precision is None or (self.device.type == "cpu" and not training):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    @contextlib.contextmanager
    def labeling(self) -> Iterator[None]:
        """Return a context in which passes without gradients are in `precision` on a CPU too: they give pseudo labels."""
        self._is_labeling = True
        try:
            yield
        finally:
            self._is_labeling = False

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Layers are visited only if it changes, since methods set it several times in each step."""
        return self if self.training is mode and self.network.training is mode else super().train(mode)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    @property
    def prior_without_labels(self) -> str:
        """What the setting `target_class_prior=auto` stands for where no target example is labeled."""
        return "none"

    @classmethod
    def preset(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a preset has for this model: `presets`, as far as it suits the other settings of the run.

        Parameters
        ----------
        name
            The preset.
        values
            The settings that are known so far, given ones included.
        """
        return cls.presets.get(name, {})

    @property
    def default_view_radius(self) -> float:
        """The setting `view_radius` of a model that has frozen layers or reads threads, where nothing is known of the target."""
        return 0.0

    # ------------------------------------------------------------------ masked words

    def pretraining_obstacle(self) -> str | None:
        """Return why the model cannot be pretrained on masked words, and what to do; None if it can.

        A model that can has the other members of this section, and its encoded corpora are `Tokens`.
        """
        return "this model cannot be pretrained on masked words; use pretrain_epochs=0"

    def encoder_of_posts(self) -> Model | None:
        """Return a new model of texts around the encoder of a thread's posts, which is pretrained instead of this model; or None.

        `take_encoder` takes it back, before anything is encoded.
        """
        return None

    def take_encoder(self, encoder: Model) -> None:
        """Read posts with an encoder from `encoder_of_posts` from now on."""
        raise NotImplementedError

    def pretrained_weights(self) -> dict[str, Tensor]:
        """Return the weights that pretraining changes: all but those of the head, which every method may have its own of."""
        return {name: value.detach() for name, value in self.trainable().items() if name not in self.head_names()}

    def load_pretrained(self, weights: Mapping[str, Tensor]) -> None:
        """Take over what `pretrained_weights` returned; names and shapes are the same."""
        own = self.trainable()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)

    @property
    def is_wide(self) -> bool:
        """Whether the matrices are large enough to be multiplied faster in bf16 on a CPU that has it."""
        return False

    def hide_words(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Tensor, Tensor]:
        """Return a batch with some words hidden, their places, and the words; see `mtem.models.masked_words.hide_words`."""
        raise NotImplementedError

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the output of the last layer at all positions, [N, L, D]."""
        raise NotImplementedError

    @property
    def hidden_width(self) -> int:
        """The last dimension of `hidden_states`."""
        raise NotImplementedError

    @property
    def word_embeddings(self) -> nn.Embedding:
        """The embeddings of the tokens."""
        raise NotImplementedError

    def default_pretraining_rate(self) -> float:
        """Return the learning rate of pretraining on masked words for settings that give none."""
        raise NotImplementedError

    # ------------------------------------------------------------------ head, layers, parameters

    @property
    def head(self) -> Head:
        """The last layer, from features to logits."""
        parent, _, name = self.head_path.rpartition(".")
        # Not by `getattr`: with head_path = "head" that would be this property again.
        return cast(Head, self.get_submodule(parent)._modules[name])

    @head.setter
    def head(self, module: nn.Module) -> None:
        parent, _, name = self.head_path.rpartition(".")
        nn.Module.__setattr__(self.get_submodule(parent), name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the head through its property, which torch would otherwise hide behind a submodule."""
        if name == "head":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def head_names(self) -> set[str]:
        """Return the names of the head's trainable parameters."""
        return {name for name in self.trainable() if name.startswith(self.head_path + ".")}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    @abc.abstractmethod
    def default_learning_rates(self) -> tuple[float, float]:
        """Return the learning rates of the source training and of the adaptation for settings that give none."""

    @property
    def has_layers(self) -> bool:
        """Whether `layers` is a list of layers that run one after the other, each once."""
        return False

    @property
    def layers(self) -> nn.ModuleList:
        """The layers from the input to the output; empty unless `has_layers`."""
        return nn.ModuleList()

    def depths(self) -> dict[str, int]:
        """Return the depth of each parameter: 0 embeddings, 1..L layers, L+1 the head; empty: all are equally deep."""
        return {}

    def freeze(self, layers: int) -> None:
        """Make the embeddings and the first `layers` layers constant; a negative number counts the trainable ones."""
        if layers:
            raise RequestError(f"frozen_layers={layers}: this model has no pretrained layers to freeze; use 0")

    def keep_lower(
        self, encoded: EncodedCorpus, path: Path, progress: Progress, name: str, limit: float, store: Path | None = None
    ) -> EncodedCorpus:
        """Return the corpus with the output of the frozen layers, computed once and stored, if there are any.

        Parameters
        ----------
        encoded
            The encoded corpus.
        path
            The file to store the output in.
        progress, name
            Shows the work as a stage of this name.
        limit
            The largest size in bytes; a corpus that needs more is returned unchanged.
        store
            A file that `store_lower` wrote for a larger corpus: what it has is not computed again.
        """
        return encoded

    def store_lower(self, encoded: EncodedCorpus, path: Path, progress: Progress, name: str, limit: float) -> bool:
        """Store the output of the frozen layers for `keep_lower` of parts of this corpus; return whether there is any."""
        return False
