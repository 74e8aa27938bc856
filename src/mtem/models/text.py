"""A text classifier: any Hugging Face encoder with a classification head, as one function `model(batch) -> logits`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from mtem.data.batching import on_device
from mtem.data.corpus import Corpus
from mtem.data.tokens import Tokens, encode, tokenize
from mtem.errors import RequestError
from mtem.models import augment, encoders, integrity
from mtem.models.base import CosineHead, Inputs, Model
from mtem.models.frozen import FrozenTokens, frozen_tokens, run_lower, same_function, upper_part
from mtem.progress import Progress

LONGEST = 512  # when neither the tokenizer nor the configuration says
# Architectures whose layers all attend to all positions, and that hand a mask with four axes on as it is.
SAME_MASK_IN_ALL_LAYERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
COSINE = "mtem_cosine_temperature"  # in the configuration of a model whose head was a CosineHead


class TextModel(Model):
    """Encoder, head and tokenizer.

    `forward` takes the inputs made by `collate` and returns float32 logits. With `frozen_layers` > 0 the embeddings and the
    first layers are constants: they run without gradients and without dropout, once per batch (`prepare`), however often a
    method passes the batch through the rest.
    """

    library_name = "transformers"
    pipeline_tag = "text-classification"
    card_title = "A text classifier"

    @classmethod
    def card_usage(cls, record: Mapping[str, Any]) -> str:
        """Return how to use a saved model, for its card."""
        return (
            f"Texts are truncated at {record['resolved']['max_length']} tokens. A pipeline needs to be told: "
            '`pipeline("text-classification", PATH)(texts, truncation=True)`.'
        )

    @classmethod
    def warnings_for(cls, corpus: Corpus) -> list[str]:
        """Return what a user should know about giving this corpus to such a model."""
        if not corpus.threaded:
            return []
        return [f"{corpus.name}: these are threads; an encoder reads their first post only; --model bigcn reads the replies"]

    def __init__(self, network: nn.Module, tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.head_path = "network." + _head_path(network)
        self._upper: list[nn.Module] = []  # a list hides it from the module registry: its weights are network's
        self._tokens: tuple[Tensor, Tensor] | None = None

    # ------------------------------------------------------------------ making, saving, loading

    @classmethod
    def create(
        cls, name: str | os.PathLike[str], classes: Sequence[str], *, max_length: int = 256, attention: str | None = None
    ) -> TextModel:
        """A pretrained encoder with a new head for `classes`; the head is drawn from torch's global generator."""
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
        network.config.__dict__.pop(COSINE, None)  # of the run that made the encoder: this head is a new one
        return cls(network, tokenizer, min(max_length, longest(network, tokenizer)))

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, attention: str | None = None) -> TextModel:
        """A model that `save` wrote, or any text classifier in the same form; every one of its weights must be there."""
        place = Path(directory).absolute()  # never the name of an encoder elsewhere
        if not place.is_dir():
            raise RequestError(f"{directory}: no such folder; {integrity.AGAIN}")
        integrity.check_files(place, str(directory))
        network, tokenizer = _load(str(place), str(directory), attention, classifier=True)
        model = cls(network, tokenizer, longest(network, tokenizer))
        temperature = getattr(network.config, COSINE, None)
        if temperature:
            model.head = CosineHead.unfolded(model.head, float(temperature))
        return model

    def save(self, directory: str | os.PathLike[str]) -> None:
        """A plain Hugging Face directory: config.json, model.safetensors, the tokenizer cut to the training length."""
        self.tokenizer.model_max_length = self.max_length
        head = self.head
        try:
            if isinstance(head, CosineHead):
                setattr(self.network.config, COSINE, head.temperature)
                self.head = head.folded()
            with quietly():
                self.network.save_pretrained(directory, safe_serialization=True)
                self.tokenizer.save_pretrained(directory)
        finally:
            self.head = head

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.network.config.id2label
        return tuple(str(names[number]) for number in range(len(names)))

    # ------------------------------------------------------------------ from texts to tensors

    def encode(self, corpus: Corpus, *, cache: Path | None = None, progress: Any = None) -> Tokens:
        return tokenize(corpus, self.tokenizer, self.max_length, cache=cache, progress=progress)

    def encode_texts(self, texts: Sequence[str]) -> Tokens:
        """A handful of texts, in memory."""
        return Tokens.of_ids(encode(texts, self.tokenizer, self.max_length) if texts else [])

    def collate(self, tokens: Tokens | FrozenTokens, rows: np.ndarray) -> dict[str, Tensor]:
        """The rows as one padded batch on the model's device. A mask that hides nothing has a single value in memory."""
        sequences = [tokens.ids(int(row)) for row in rows]
        lengths = np.array([len(sequence) for sequence in sequences])
        width = max(1, int(lengths.max()))
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
                kept = tokens.hidden(int(row))
                hidden[line, : len(kept)] = kept
            batch["hidden"] = on_device(hidden, device)
        return batch

    # ------------------------------------------------------------------ other views of the same texts

    def augment(self, inputs: Inputs, kind: str, share: float, generator: torch.Generator) -> Inputs:
        """The same texts with a random share of their tokens masked, or of their words deleted or swapped.

        "mixed" does all three, each to a third of the share; "dropout" leaves the texts as they are, for the view is the
        model's own noise in training mode. A masked token becomes the tokenizer's mask token; where there is none, or the
        lower layers' output stands in for the text, it is taken out of the attention instead. Deleted and swapped words
        have the lower layers run again.
        """
        if kind == "dropout" or not share:
            return inputs
        if kind == "mixed":
            for each in ("delete", "swap", "mask"):
                inputs = self.augment(inputs, each, share / 3, generator)
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
        """Of every token: whether it goes on with a word, and whether it is special."""
        if self._tokens is None or self._tokens[0].device != self.device:
            size = max(len(self.tokenizer), self.network.get_input_embeddings().num_embeddings)
            known = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
            names = ["" if name is None else str(name) for name in known]
            continues, special = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
            continues[: len(names)] = torch.tensor(augment.continuations(names), dtype=torch.bool)
            roles = (getattr(self.tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "sep", "pad", "mask"))
            # An unknown word is a word, unless its token serves as another one too.
            numbers = (set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}) | {*roles} - {None}
            special[[number for number in numbers if number < size]] = True
            self._tokens = continues.to(self.device), special.to(self.device)
        return self._tokens

    def input_embeddings(self, inputs: Inputs) -> Tensor:
        """The input embeddings, or what enters the first trainable layer; zeros in the place of padding."""
        inputs = self.prepare(inputs)
        values = inputs["hidden"] if "hidden" in inputs else self.network.get_input_embeddings()(inputs["input_ids"])
        return (values * inputs["attention_mask"].unsqueeze(-1)).detach().float()

    def embedding_norms(self, values: Tensor, inputs: Inputs) -> Tensor:
        """The norm over all tokens of each text, [N, 1, 1]."""
        return torch.linalg.vector_norm(values, dim=(1, 2), keepdim=True)

    # ------------------------------------------------------------------ the function

    def forward(self, inputs: Inputs) -> Tensor:
        inputs = self.prepare(inputs)
        noise = inputs.get("noise")
        with self.autocast():
            if "hidden" in inputs:
                hidden = inputs["hidden"] if noise is None else inputs["hidden"] + noise
                out = self._upper[0](inputs_embeds=hidden, attention_mask=self._mask(inputs))
            else:
                with _added(self.network.get_input_embeddings(), noise):
                    out = self.network(input_ids=inputs["input_ids"], attention_mask=self._mask(inputs))
        return out.logits.float()

    def _mask(self, inputs: Inputs) -> Tensor | None:
        """The attention mask in a form that transformers takes without looking at its values, which would wait for the GPU."""
        mask = inputs["attention_mask"]
        if all(step == 0 or size == 1 for step, size in zip(mask.stride(), mask.shape, strict=True)):
            return None  # it hides nothing
        config = self.network.config
        if config.model_type in SAME_MASK_IN_ALL_LAYERS and config._attn_implementation == "sdpa":
            return mask.bool()[:, None, None, :]
        return mask

    def split(self, inputs: Inputs, pieces: int) -> list[tuple[Inputs, slice]]:
        count = len(inputs["input_ids"])
        size = -(-count // max(1, pieces))
        parts = [slice(start, start + size) for start in range(0, count, size)]
        return [({name: value[part] for name, value in inputs.items()}, part) for part in parts]

    def probe(self) -> Inputs:
        ids = torch.tensor([[7, 11, 13, 5], [3, 2, 9, 6]], device=self.device) % self.network.config.vocab_size
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=self.device)
        return self.prepare({"input_ids": ids, "attention_mask": mask})

    def prepare(self, inputs: Inputs) -> Inputs:
        """With frozen layers: the inputs with the frozen part's output added, so that it is computed once."""
        if not self._upper or "hidden" in inputs:
            return inputs
        return {**inputs, "hidden": self.lower(inputs)}

    @contextlib.contextmanager
    def differentiable_attention(self) -> Iterator[None]:
        """Attention with forward-mode and double backward derivatives, whatever kernel the model was loaded with."""
        config = self.network.config
        loaded = config._attn_implementation
        if loaded not in ("eager", "sdpa"):
            config._attn_implementation = "eager"
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            config._attn_implementation = loaded

    # ------------------------------------------------------------------ layers

    @property
    def layers(self) -> nn.ModuleList:
        return self.network.get_submodule(self._layers_path())

    @property
    def has_layers(self) -> bool:
        """Whether the layers are a list; some encoders pass through one layer many times."""
        try:
            return bool(self._layers_path())
        except RequestError:
            return False

    def _layers_path(self) -> str:
        count = getattr(self.network.config, "num_hidden_layers", None) or getattr(self.network.config, "n_layers", None)
        for path, module in self.network.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return path
        raise RequestError(
            f"{type(self.network).__name__}: its list of layers was not found; set frozen_layers=0 and layer_decay=1"
        )

    def depths(self) -> dict[str, int]:
        """Each parameter's depth: 0 the embeddings, 1..L the layers, L+1 the head."""
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
        """Make the embeddings and the first `layers` layers constants; -2 keeps the upper two trainable."""
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
        precision, self.precision = self.precision, None  # the two are compared in full precision
        if upper is not None and same_function(self.network, upper, self.lower):
            self._upper = [upper]
        self.precision = precision

    def default_learning_rates(self) -> tuple[float, float]:
        """A few upper layers alone have farther to go, and no pretrained layers below that could suffer."""
        return (5e-4, 2e-4) if self.frozen_layers else (5e-5, 2e-5)

    def lower(self, inputs: Inputs) -> Tensor:
        """What enters the first trainable layer: no gradients, no dropout."""
        return run_lower(self.network, self.layers[self.frozen_layers], inputs["input_ids"], self._mask(inputs), self.autocast)

    def keep_lower(self, tokens: Tokens, path: Path, progress: Progress, name: str, limit: float) -> Tokens | FrozenTokens:
        """The tokens with the frozen part's output on disk, unless that would take more than `limit` bytes."""
        width = self.network.config.hidden_size
        if not self._upper or 4.0 * width * float(np.asarray(tokens.lengths, dtype=np.int64).sum()) > limit:
            return tokens
        return frozen_tokens(tokens, lambda rows: self.lower(self.collate(tokens, rows)), width, path, progress, name)


def _head_path(network: nn.Module) -> str:
    """The last linear layer with one output per class."""
    size, inside = network.config.num_labels, network.base_model_prefix + "."
    linear = [name for name, m in network.named_modules() if isinstance(m, nn.Linear) and m.out_features == size]
    # Some architectures register the head before the encoder, whose layers may be as wide as there are classes.
    return ([name for name in linear if not name.startswith(inside)] or linear)[-1]


@contextlib.contextmanager
def _added(module: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """The module's output with `noise` added."""
    if noise is None:
        yield
        return
    handle = module.register_forward_hook(lambda _, __, out: out + noise)
    try:
        yield
    finally:
        handle.remove()


def _outside_layers(network: nn.Module) -> list[str]:
    """Parameter prefixes of the encoder body that belong to the embeddings side (relative position tables too)."""
    prefix = network.base_model_prefix
    inside = ("embeddings", "embeddings_project", "encoder.relative_attention_bias", "encoder.rel_embeddings")
    words = network.get_input_embeddings()
    return [f"{prefix}.{name}" for name in inside] + [name for name, module in network.named_modules() if module is words]


def longest(network: nn.Module, tokenizer: Any) -> int:
    positions = getattr(network.config, "max_position_embeddings", None) or LONGEST
    if getattr(network.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= 2  # these count positions from the padding index on
    declared = getattr(tokenizer, "model_max_length", None) or positions
    return int(min(positions, declared))


def _load(place: str, name: str, attention: str | None, *, classifier: bool = False, **config: Any) -> tuple[nn.Module, Any]:
    """The network and tokenizer in the directory `place`, which messages call `name`. A `classifier` has its head already."""
    # Remote code is never run and only safetensors are read: a model directory is data.
    safe: dict[str, Any] = {"trust_remote_code": False}
    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(place, use_fast=True, **safe)
            configuration = AutoConfig.from_pretrained(place, **config, **safe)
            if classifier:
                _check_classes(configuration, name)
            network, info = AutoModelForSequenceClassification.from_pretrained(
                place,
                config=configuration,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # those that must match are looked at below
                output_loading_info=True,
                **({"attn_implementation": attention} if attention else {}),
                **safe,
            )
        integrity.check_loaded(network, info, name, classifier=classifier)
        integrity.check_tokenizer(tokenizer, network.get_input_embeddings(), Path(place), name, exactly=classifier)
    except RequestError:
        raise
    except Exception as error:  # damaged files fail in as many ways as there are files
        raise encoders.damaged(name, error) from error
    network.config.pad_token_id = tokenizer.pad_token_id
    return network, tokenizer


def _check_classes(configuration: Any, name: str) -> None:
    names = configuration.id2label or {}
    if sorted(names) != list(range(len(names))) or len(set(map(str, names.values()))) != len(names) or len(names) < 2:
        raise RequestError(
            f"{name}: its config.json names the classes {names} (id2label); two or more, numbered from 0, are wanted"
        )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the loading report and bars of transformers: a new head is what we asked for."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
