"""Features of posts from an encoder: the mean of its last layer over the tokens, computed once for each distinct text."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from mtem.data.batching import sequential
from mtem.data.cache import cache_folder, fingerprint_of
from mtem.data.tokens import encode as token_numbers
from mtem.data.tokens import tokenizer_fingerprint
from mtem.models import encoders, integrity, pretrained
from mtem.models.text import TextModel
from mtem.models.trees.features import Arrays, PostFeatures
from mtem.models.trees.store import Store

_FORMAT = "1"  # part of every cache address: increase it when the stored values change
_TOKENS = 2048  # in a batch, with padding; more is slower on a CPU


class Embeddings(PostFeatures):
    """Normalized embeddings, scaled to values of about 1, in half precision. They are cached by encoder and text.

    Parameters
    ----------
    network
        An encoder of transformers.
    tokenizer
        Its tokenizer.
    max_length
        The number of tokens to read of each post.
    """

    name = "encoder"
    max_length: int

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        network.train(False)
        network.requires_grad_(False)
        self.network, self.tokenizer = network, tokenizer
        self.max_length = min(max_length, pretrained.max_positions(network, tokenizer))
        self.width = int(network.config.hidden_size)
        self.fingerprint = fingerprint_of(
            _FORMAT, self.name, _network_fingerprint(network), tokenizer_fingerprint(tokenizer), str(self.max_length)
        )

    @classmethod
    def find(cls, name: str | os.PathLike[str], max_length: int) -> Embeddings:
        """Return the features of an encoder, given by a packaged name, a directory or a Hugging Face name."""
        directory = encoders.find(name, encoders.FEATURES_OPTION)
        return cls(*pretrained.load(AutoModel, directory, str(name)), max_length)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Store | None = None) -> Arrays:
        """Return {"values": [texts, width]}. With a store, only missing embeddings are computed, and then added to it."""
        distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        keys = np.array([_key(text) for text in distinct], np.uint64)
        values = np.zeros((len(distinct), self.width), np.float16)
        missing = np.arange(len(distinct))
        if store is not None:
            missing = store.fill(keys, values)
        if len(missing):
            names = list(distinct)
            values[missing] = self._computed([names[number] for number in missing], device)
            if store is not None:
                store.add(keys[missing], values[missing])
        return {"values": values[[distinct[text] for text in texts]]}

    @torch.no_grad()
    def _computed(self, texts: list[str], device: torch.device | None) -> np.ndarray:
        network: nn.Module = self.network
        network.to(device or torch.device("cpu"))
        ids = token_numbers(texts, self.tokenizer, self.max_length)
        values = np.zeros((len(texts), self.width), np.float16)
        for rows in sequential(np.array([len(token_ids) for token_ids in ids]), tokens_per_batch=_TOKENS):
            width = max(1, max(len(ids[row]) for row in rows))
            padded = np.full((len(rows), width), self.tokenizer.pad_token_id, np.int64)
            mask = np.zeros((len(rows), width), np.int64)
            for line, row in enumerate(rows):
                padded[line, : len(ids[row])] = ids[row]
                mask[line, : len(ids[row])] = 1
            inputs = {"input_ids": torch.from_numpy(padded).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
            hidden = network(**inputs).last_hidden_state
            mean = (hidden * inputs["attention_mask"].unsqueeze(-1)).sum(dim=1)  # a sum will do: only its direction counts
            values[rows] = (F.normalize(mean, dim=1) * self.width**0.5).cpu().numpy()
        return values

    def text_model(self, device: torch.device) -> TextModel:
        """Return a new model of texts with a copy of this encoder, to be pretrained."""
        with pretrained.quietly():
            config = copy.deepcopy(self.network.config)
            network = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
        network.base_model.load_state_dict(self.network.state_dict(), strict=False)  # with or without a pooler
        network.config.pad_token_id = self.tokenizer.pad_token_id
        return TextModel(network, self.tokenizer, self.max_length).to(device)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Embeddings:
        """Return the features of an encoder with other weights; what is not among them stays."""
        network = copy.deepcopy(self.network).cpu()
        network.load_state_dict(dict(weights), strict=False)
        return Embeddings(network, self.tokenizer, self.max_length)

    def store(self, cache: Path | None = None) -> Store:
        """Return the cached embeddings of this encoder."""
        return Store(cache_folder("embeddings", cache) / self.fingerprint, self.width)

    def save(self, directory: Path) -> None:
        """Write the encoder to the folder "encoder" of a directory."""
        self.tokenizer.model_max_length = self.max_length
        with pretrained.quietly():
            self.network.save_pretrained(directory / "encoder", safe_serialization=True)
            self.tokenizer.save_pretrained(directory / "encoder")

    @classmethod
    def load(cls, directory: Path) -> Embeddings:
        """Return the features that `save` wrote."""
        path = directory / "encoder"
        integrity.check_files(path, str(path))
        return cls(*pretrained.load(AutoModel, str(path.absolute()), str(path), saved=True), 1 << 30)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _network_fingerprint(network: PreTrainedModel) -> str:
    """Return a fingerprint that is the same for an encoder and a saved copy of it, whatever the files look like."""
    config = network.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()
