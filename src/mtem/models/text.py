"""A text classifier: any Hugging Face encoder with a classification head, as one function `model(batch) -> logits`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification, Cache, PreTrainedModel, PreTrainedTokenizerBase, masking_utils

from mtem import parallel
from mtem.capture import is_recording
from mtem.data.batching import on_device
from mtem.data.corpus import Corpus
from mtem.data.tokens import Tokens, encode, tokenize
from mtem.dropout import quick_dropout
from mtem.errors import RequestError
from mtem.models import augment, encoders, integrity, masked_words, mpnet, pretrained
from mtem.models.base import EncodedCorpus, Inputs, Model, ModelSettings
from mtem.models.frozen import FrozenTokens, frozen_tokens, keys_of, run_lower, same_function, upper_part, write_keys
from mtem.models.heads import CosineHead
from mtem.models.positions import first_position_only
from mtem.progress import Progress
from mtem.recompute import recomputed, recomputed_layer

if TYPE_CHECKING:
    from typing_extensions import Self

# Architectures in which every layer attends to all positions and passes a mask with four axes on unchanged.
SAME_MASK_IN_ALL_LAYERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
WIDE = 256  # hidden states of that many values or more gain by bf16 on a CPU
SMALL_WIDTH = 512  # encoders with narrower hidden states are pretrained at a larger learning rate
COSINE = "mtem_cosine_temperature"  # in the configuration of a model whose head was a CosineHead


class TextModel(Model):
    """An encoder with its head and its tokenizer.

    `forward` takes the batches of `collate` and returns float32 logits. With `frozen_layers` > 0 the embeddings and the first
    layers are constant: they run without gradients and without dropout, once for each batch (`prepare`), however often a
    method passes the batch through the other layers.

    If the head reads only the first position, the last layer of `network` is computed only there, except in `all_positions`.

    Parameters
    ----------
    network
        A sequence classifier of transformers.
    tokenizer
        Its tokenizer.
    max_length
        The number of tokens to read of each text.
    """

    replayable = True
    library_name = "transformers"
    pipeline_tag = "text-classification"
    card_title = "A text classifier"

    network: PreTrainedModel
    max_length: int

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.head_path = "network." + _head_path(network)
        self._upper: list[PreTrainedModel] = []  # a list hides it from the module registry: its weights are network's
        self._vocabulary_flags: tuple[Tensor, Tensor] | None = None
        self._words: Tensor | None = None
        self._differentiable_twice = False
        self._first_position = first_position_only(self)

    # ------------------------------------------------------------------ creating, saving, loading

    @classmethod
    def find(cls, name: str | os.PathLike[str]) -> str:
        """Return the directory of an encoder, given by a packaged name, a directory or a Hugging Face name."""
        return encoders.find(name)

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
        """Return a pretrained encoder with a new head for `classes`, drawn from torch's global generator.

        `corpora`, `settings` and `like` are ignored: the vocabulary is the encoder's.
        """
        labels = dict(enumerate(classes))
        network, tokenizer = _load(
            encoders.find(name),
            str(name),
            attention,
            num_labels=len(classes),
            id2label=labels,
            label2id={label: number for number, label in labels.items()},
            problem_type="single_label_classification",
        )
        network.config.__dict__.pop(COSINE, None)  # from the run that made the encoder: this head is new
        return cls(network, tokenizer, min(max_length, pretrained.max_positions(network, tokenizer)))

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, attention: str | None = None) -> Self:
        """Return a model that `save` wrote, or any other text classifier of transformers with all its weights.

        Parameters
        ----------
        directory
            A Hugging Face directory.
        attention
            The attention implementation of transformers; None: its default.

        Raises
        ------
        RequestError
            If the directory is missing, incomplete or damaged.
        """
        path = Path(directory).absolute()  # never the name of an encoder elsewhere
        if not path.is_dir():
            raise RequestError(f"{directory}: no such folder; {integrity.AGAIN}")
        integrity.check_files(path, str(directory))
        network, tokenizer = _load(str(path), str(directory), attention, classifier=True)
        model = cls(network, tokenizer, pretrained.max_positions(network, tokenizer))
        temperature = getattr(network.config, COSINE, None)
        if temperature:
            model.head = CosineHead.unfolded(cast(nn.Linear, model.head), temperature)
        return model

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory: config.json, model.safetensors, and the tokenizer with the training length."""
        self.tokenizer.model_max_length = self.max_length
        head = self.head
        try:
            if isinstance(head, CosineHead):
                setattr(self.network.config, COSINE, head.temperature)
                self.head = head.folded()
            with pretrained.quietly():
                self.network.save_pretrained(directory, safe_serialization=True)
                self.tokenizer.save_pretrained(directory)
        finally:
            self.head = head

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names in the configuration, in the order of the logits."""
        names = cast(dict[int, str], self.network.config.id2label)
        return tuple(str(names[number]) for number in range(len(names)))

    @classmethod
    def warnings_for(cls, corpus: Corpus) -> list[str]:
        """Return a warning for a corpus of threads, whose replies an encoder does not read."""
        if not corpus.threaded:
            return []
        return [f"{corpus.name}: contains threads; an encoder reads only the first post of each, --model bigcn reads the replies"]

    @classmethod
    def usage(cls, settings: Mapping[str, Any], max_length: int | None) -> str:
        """Return how to use the model in a pipeline, with the length of its training."""
        return (
            f"Texts are truncated to {max_length} tokens. A pipeline truncates them if asked to: "
            '`pipeline("text-classification", PATH)(texts, truncation=True)`.'
        )

    # ------------------------------------------------------------------ from texts to tensors

    def encode(self, corpus: Corpus, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None) -> Tokens:
        """Return the tokens of a corpus, from the cache if it was tokenized before."""
        return tokenize(corpus, self.tokenizer, self.max_length, cache=cache, progress=progress)

    def encode_texts(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of a few texts, in memory."""
        return Tokens.of_ids(encode(texts, self.tokenizer, self.max_length) if texts else [])

    def collate(self, encoded: EncodedCorpus, rows: np.ndarray, *, multiple: int = 1) -> dict[str, Tensor]:
        """Return the rows as one padded batch on the model's device: "input_ids", "attention_mask", and "hidden" if stored.

        The length is a multiple of `multiple`, or the largest that the model reads.

        A mask without padding is one value in memory, expanded.
        """
        tokens = _tokens(encoded)
        sequences = [tokens.ids(int(row)) for row in rows]
        lengths = np.array([len(sequence) for sequence in sequences])
        width = max(1, int(lengths.max()))
        width = max(width, min(-(-width // multiple) * multiple, self.max_length))
        ids = np.full((len(sequences), width), self.tokenizer.pad_token_id or 0, dtype=np.int64)
        for line, sequence in enumerate(sequences):
            ids[line, : len(sequence)] = sequence
        device = self.device
        batch = {"input_ids": on_device(ids, device)}
        if lengths.min() == width:
            batch["attention_mask"] = torch.ones((1, 1), dtype=torch.int64, device=device).expand(ids.shape)
        else:
            batch["attention_mask"] = on_device((np.arange(width) < lengths[:, None]).astype(np.int64), device)
        if isinstance(tokens, FrozenTokens):
            hidden = np.zeros((len(sequences), width, tokens.values.shape[1]), dtype=np.float32)
            for line, row in enumerate(rows):
                stored = tokens.hidden(int(row))
                hidden[line, : len(stored)] = stored
            batch["hidden"] = on_device(hidden, device)
        return batch

    # ------------------------------------------------------------------ other views of the same texts

    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """Return the same texts with a random share of their tokens masked, or of their words deleted or swapped.

        A masked token becomes the tokenizer's mask token. Without a mask token, or where "hidden" replaces the text, it is
        removed from the attention instead. Texts with deleted or swapped words pass through the frozen layers again.

        Parameters
        ----------
        inputs
            A batch.
        kind
            "mask", "delete" or "swap"; "mixed": all three, each with a third of the share; "dropout": the unchanged texts,
            since the view is the model's own dropout.
        share
            The share of the tokens or words to change.
        generator
            A CPU generator, for all random draws.
        """
        if kind == "dropout" or not share:
            return inputs
        if kind == "mixed":
            for view in ("delete", "swap", "mask"):
                inputs = self.augment(inputs, view, share / 3, generator)
            return inputs
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        words = augment.word_numbers(ids, mask, *self._vocabulary())
        token = self.tokenizer.mask_token_id
        if kind == "mask" and (token is None or "hidden" in inputs):
            return {**inputs, "attention_mask": mask.masked_fill(augment.chosen_tokens(words, share, generator), 0)}
        if kind == "mask":
            return {**inputs, "input_ids": augment.mask_tokens(ids, words, share, token, generator)}
        if kind == "swap":
            return {"input_ids": augment.swap_words(ids, words, share, generator), "attention_mask": mask}
        padding = self.tokenizer.pad_token_id or 0
        ids, mask = augment.delete_words(ids, mask, words, share, padding, generator)
        return {"input_ids": ids, "attention_mask": mask}

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """For every token: whether it continues a word, and whether it is special."""
        if self._vocabulary_flags is None or self._vocabulary_flags[0].device != self.device:
            embeddings = cast(nn.Embedding, self.network.get_input_embeddings())
            size = max(len(self.tokenizer), embeddings.num_embeddings)
            tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
            names = ["" if name is None else str(name) for name in tokens]
            continues, special = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
            continues[: len(names)] = torch.tensor(augment.continuations(names), dtype=torch.bool)
            roles = (getattr(self.tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "sep", "pad", "mask"))
            # An unknown word is a word, unless its token has another role too.
            numbers = (set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}) | {*roles} - {None}
            special[[number for number in numbers if number < size]] = True
            self._vocabulary_flags = continues.to(self.device), special.to(self.device)
        return self._vocabulary_flags

    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """Return the input embeddings, or the input of the first trainable layer; zeros at padding."""
        inputs = self.prepare(inputs)
        values: Tensor = inputs["hidden"] if "hidden" in inputs else self.network.get_input_embeddings()(inputs["input_ids"])
        return (values * inputs["attention_mask"].unsqueeze(-1)).detach().float()

    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Return the norm over all tokens of each text, [N, 1, 1]."""
        norms: Tensor = torch.linalg.vector_norm(values, dim=(1, 2), keepdim=True)
        return norms

    # ------------------------------------------------------------------ the function

    def forward(self, inputs: Inputs) -> Tensor:
        """Return float32 logits, [N, K]."""
        return self.spread(lambda own: self._in_parts(lambda part: (self._pass(part),), self.prepare(own)), inputs)[0]

    def logits_and_features(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return logits and the features that enter the head, both differentiable."""
        if self.microbatches == 1:
            return super().logits_and_features(inputs)

        def run(own: Inputs) -> tuple[Tensor, ...]:
            return self._in_parts(lambda part: self._with_features(self._pass, part), self.prepare(own))

        logits, features = self.spread(run, inputs)
        return logits, features

    def _in_parts(self, one_pass: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return what the passes of all parts return; with gradients, only one part's activations are kept at a time."""
        if self.microbatches == 1 or self._differentiated_twice:
            return one_pass(inputs)
        names = list(inputs)

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            return one_pass(dict(zip(names, tensors, strict=True)))

        parts = self.parts(inputs)
        results = [recomputed(self.network, of_tensors, list(part.values()), self.device) for part in parts]
        return tuple(torch.cat(values) for values in zip(*results, strict=True))

    @property
    def _differentiated_twice(self) -> bool:
        """Whether a pass is differentiated twice: what is computed again in a backward pass has no second derivatives."""
        return self._differentiable_twice and torch.is_grad_enabled()

    def one_pass(self, inputs: Inputs) -> Tensor:
        """Return float32 logits of one pass with all texts, [N, K]."""
        return self.spread(lambda own: (self._pass(own),), inputs)[0]

    def _pass(self, inputs: Inputs) -> Tensor:
        inputs = self.prepare(inputs)
        noise, mask = inputs.get("noise"), self._mask(inputs)
        with self.autocast(), self._quick_dropout(), self._recomputed_layers(), _no_new_mask(mask):
            if "hidden" in inputs:
                hidden = inputs["hidden"] if noise is None else inputs["hidden"] + noise
                out = self._upper[0](inputs_embeds=hidden, attention_mask=mask)
            else:
                with _added(self.network.get_input_embeddings(), noise):
                    out = self.network(input_ids=inputs["input_ids"], attention_mask=mask)
        logits: Tensor = out.logits
        return logits.float()

    def _quick_dropout(self) -> contextlib.AbstractContextManager[None]:
        return quick_dropout(self.training and self.device.type == "cpu")

    def all_positions(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the last layer is computed at all positions, for those who read hidden states."""
        return self._first_position.off()

    @contextlib.contextmanager
    def _recomputed_layers(self) -> Iterator[None]:
        """Let the layers keep no activations in this pass, if `activation_checkpointing` is set."""
        if not self.activation_checkpointing or self._differentiated_twice or not torch.is_grad_enabled():
            yield
            return
        device, layers = self.device, self.layers[self.frozen_layers :]

        def forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
            # A decoder would write its keys and values a second time; nothing reads them.
            arguments = tuple(None if isinstance(value, Cache) else value for value in arguments)
            named = {name: None if isinstance(value, Cache) else value for name, value in named.items()}
            return recomputed_layer(layer, device, *arguments, **named)

        for layer in layers:
            layer.forward = functools.partial(forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _mask(self, inputs: Inputs) -> Tensor | None:
        """Return the attention mask in a form whose values transformers does not inspect, which would wait for the GPU."""
        mask = inputs["attention_mask"]
        if all(step == 0 or size == 1 for step, size in zip(mask.stride(), mask.shape, strict=True)):
            return None  # no padding
        config = self.network.config
        if config.model_type in SAME_MASK_IN_ALL_LAYERS and config._attn_implementation == "sdpa":
            return mask.bool()[:, None, None, :]
        return mask

    def count(self, inputs: Inputs) -> int:
        """Return the number of texts."""
        return len(inputs["input_ids"])

    def take(self, inputs: Inputs, rows: slice) -> Inputs:
        """Return consecutive texts of a batch."""
        return {name: value[rows] for name, value in inputs.items()}

    def split(self, inputs: Inputs, pieces: int) -> list[tuple[Inputs, slice]]:
        """Return the batch in up to `pieces` parts of equal size, each with the slice of its examples."""
        count = self.count(inputs)
        size = -(-count // max(1, pieces))
        parts = [slice(start, start + size) for start in range(0, count, size)]
        return [(self.take(inputs, part), part) for part in parts]

    def probe(self) -> Inputs:
        """Return two texts of four and two tokens."""
        ids = torch.tensor([[7, 11, 13, 5], [3, 2, 9, 6]], device=self.device) % self.network.config.vocab_size
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=self.device)
        return self.prepare({"input_ids": ids, "attention_mask": mask})

    def prepare(self, inputs: Inputs) -> Inputs:
        """Return the inputs with the output of the frozen layers added as "hidden", so that it is computed once."""
        if not self._upper or "hidden" in inputs:
            return inputs
        if not parallel.is_together():
            return {**inputs, "hidden": self.lower(inputs)}
        # Only of the texts that this process computes: nothing reads the zeros of the others.
        count = self.count(inputs)
        rows = parallel.part_of(count).rows
        own = self.lower(self.take(inputs, rows))
        hidden = own.new_zeros((count, *own.shape[1:]))
        hidden[rows] = own
        return {**inputs, "hidden": hidden}

    @contextlib.contextmanager
    def differentiable_attention(self) -> Iterator[None]:
        """Use attention with forward-mode and second derivatives, whatever implementation the model was loaded with."""
        config = self.network.config
        loaded = config._attn_implementation
        if loaded not in ("eager", "sdpa"):
            config._attn_implementation = "eager"
        self._differentiable_twice = True
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            config._attn_implementation = loaded
            self._differentiable_twice = False

    # ------------------------------------------------------------------ masked words

    def pretraining_obstacle(self) -> str | None:
        """Return a reason if the tokenizer has no mask token, or if layers are frozen."""
        if self.tokenizer.mask_token_id is None:
            return "the encoder's tokenizer has no mask token; use pretrain_epochs=0, or another encoder"
        if self.frozen_layers:
            return (
                f"pretraining trains all layers, but {self.frozen_layers} layers are frozen (by default all but two on a CPU); "
                "set frozen_layers=0"
            )
        return None

    def hide_words(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Tensor, Tensor]:
        """Return the batch with some of its words' tokens hidden, their places and their numbers."""
        ids, (_, special) = inputs["input_ids"], self._vocabulary()
        if self._words is None or self._words.device != self.device:
            self._words = torch.nonzero(~special[: len(self.tokenizer)]).view(-1)
        free = inputs["attention_mask"].bool() & ~special[ids]
        hidden, places, words = masked_words.hide_words(ids, free, self._words, self.tokenizer.mask_token_id, generator)
        return {**inputs, "input_ids": hidden}, places, words

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the output of the last layer at all positions, [N, L, D]."""
        mask = self._mask(inputs)
        with self.autocast(), self._quick_dropout(), self.all_positions(), self._recomputed_layers(), _no_new_mask(mask):
            out = self.network.base_model(input_ids=inputs["input_ids"], attention_mask=mask)
        states: Tensor = out.last_hidden_state
        return states

    @property
    def hidden_width(self) -> int:
        """The width of the hidden states."""
        return int(self.network.config.hidden_size)

    @property
    def is_wide(self) -> bool:
        """Whether the hidden states are wide."""
        return self.hidden_width >= WIDE

    @property
    def word_embeddings(self) -> nn.Embedding:
        """The embeddings of the tokens."""
        return cast(nn.Embedding, self.network.get_input_embeddings())

    def default_pretraining_rate(self) -> float:
        """Return a larger rate for small encoders."""
        return default_pretraining_rate(self.hidden_width)

    # ------------------------------------------------------------------ layers

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the encoder."""
        return cast(nn.ModuleList, self.network.get_submodule(self._layers_path()))

    @property
    def has_layers(self) -> bool:
        """Whether the layers are a list; some encoders apply one layer many times."""
        try:
            return bool(self._layers_path())
        except RequestError:
            return False

    def _layers_path(self) -> str:
        count = getattr(self.network.config, "num_hidden_layers", None) or getattr(self.network.config, "n_layers", None)
        for path, module in self.network.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return str(path)
        raise RequestError(
            f"{type(self.network).__name__}: cannot find its list of layers; set frozen_layers=0 and layer_decay=1"
        )

    def depths(self) -> dict[str, int]:
        """Return the depth of each parameter: 0 embeddings, 1..L layers, L+1 the head."""
        path = self._layers_path()
        top = len(self.layers) + 1
        outside = _outside_layers(self.network)
        depths = {}
        for name, _ in self.network.named_parameters():
            if name.startswith(path + "."):
                depth = int(name[len(path) + 1 :].split(".")[0]) + 1
            else:
                depth = 0 if any(name.startswith(prefix + ".") for prefix in outside) else top
            depths["network." + name] = depth
        return depths

    def freeze(self, layers: int) -> None:
        """Make the embeddings and the first `layers` layers constant; -2: all layers but the last two."""
        total = len(self.layers) if layers else 0
        layers = max(0, total + layers) if layers < 0 else layers
        if layers > total:
            raise RequestError(f"frozen_layers={layers}: the encoder has {total} layers")
        self.frozen_layers = layers
        self._upper = []
        depths = self.depths() if layers else {}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not layers or depths[name] > layers)
        upper = upper_part(self.network, self._layers_path(), layers) if 0 < layers < total else None
        precision, self.precision = self.precision, None  # they are compared in full precision
        if upper is not None and same_function(self.network, upper, self.lower):
            self._upper = [upper]
        self.precision = precision

    def default_learning_rates(self) -> tuple[float, float]:
        """Return larger rates if layers are frozen: the others have further to go, and cannot damage pretrained layers below."""
        return (5e-4, 2e-4) if self.frozen_layers else (5e-5, 2e-5)

    def lower(self, inputs: Inputs) -> Tensor:
        """Return the input of the first trainable layer, without gradients and without dropout."""
        return run_lower(self.network, self.layers[self.frozen_layers], inputs["input_ids"], self._mask(inputs), self.autocast)

    def keep_lower(
        self, encoded: EncodedCorpus, path: Path, progress: Progress, name: str, limit: float, store: Path | None = None
    ) -> EncodedCorpus:
        """Return the tokens with the output of the frozen layers, stored in `path`, unless that takes more than `limit` bytes."""
        width = self.network.config.hidden_size
        if not self._upper or 4.0 * width * float(np.asarray(encoded.lengths, dtype=np.int64).sum()) > limit:
            return encoded
        tokens = _tokens(encoded)
        if isinstance(tokens, FrozenTokens):
            return tokens
        shared = None if store is None else self._store_path(store)
        return frozen_tokens(tokens, lambda rows: self.lower(self.collate(tokens, rows)), width, path, progress, name, shared)

    def _store_path(self, store: Path) -> Path:
        """Return the file of a store for this depth."""
        return store.with_name(f"{store.stem}-{self.frozen_layers}.npy")

    def store_lower(self, encoded: EncodedCorpus, path: Path, progress: Progress, name: str, limit: float) -> bool:
        """Store the output of the frozen layers for `keep_lower` of parts of this corpus; return whether there is any."""
        path = self._store_path(path)
        kept = self.keep_lower(encoded, path, progress, name, limit)
        if not isinstance(kept, FrozenTokens):
            return False
        write_keys(kept.tokens, keys_of(path))
        return True


def _tokens(encoded: EncodedCorpus) -> Tokens | FrozenTokens:
    if not isinstance(encoded, (Tokens, FrozenTokens)):
        raise TypeError(f"expected Tokens or FrozenTokens, got {type(encoded).__name__}")
    return encoded


def default_pretraining_rate(width: int) -> float:
    """Return the learning rate of pretraining on masked words, by the width of the hidden states: larger for small encoders."""
    return 2e-4 if width < SMALL_WIDTH else 1e-4


def _load(
    directory: str, name: str, attention: str | None, *, classifier: bool = False, **config: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    auto_cls = AutoModelForSequenceClassification
    network, tokenizer = pretrained.load(
        auto_cls, directory, name, attention=attention, classifier=classifier, saved=classifier, **config
    )
    network.config.pad_token_id = tokenizer.pad_token_id
    if network.config.model_type == mpnet.MODEL_TYPE and attention is None:
        mpnet.fuse_attention(network)
    return network, tokenizer


def _head_path(network: PreTrainedModel) -> str:
    """Return the path of the last linear layer with one output per class."""
    size, inside = network.config.num_labels, network.base_model_prefix + "."
    linear = [name for name, m in network.named_modules() if isinstance(m, nn.Linear) and m.out_features == size]
    # Some architectures register the head before the encoder, whose layers may have as many outputs as there are classes.
    return str(([name for name in linear if not name.startswith(inside)] or linear)[-1])


@contextlib.contextmanager
def _added(module: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """Add `noise` to the output of the module."""
    if noise is None:
        yield
        return
    handle = module.register_forward_hook(lambda _, __, out: out + noise)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _no_new_mask(mask: Tensor | None) -> Iterator[None]:
    """Keep transformers from making a mask where there is none: while a step is captured, some of its versions do."""
    if mask is not None or not is_recording():
        yield
        return
    names = vars(masking_utils)
    original = names["is_tracing"]
    names["is_tracing"] = lambda *_, **__: False
    try:
        yield
    finally:
        names["is_tracing"] = original


def _outside_layers(network: PreTrainedModel) -> list[str]:
    """Return the prefixes of the encoder's parameters at the depth of the embeddings, such as tables of relative positions."""
    prefix = network.base_model_prefix
    inside = ("embeddings", "embeddings_project", "encoder.relative_attention_bias", "encoder.rel_embeddings")
    words = network.get_input_embeddings()
    return [f"{prefix}.{name}" for name in inside] + [name for name, module in network.named_modules() if module is words]
