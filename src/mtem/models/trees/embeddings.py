"""Posts as an encoder sees them: the mean of its last layer over a post's tokens, computed once per distinct text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from mtem.atomic import replaced
from mtem.data.batching import sequential
from mtem.data.cache import cache_folder, fingerprint_of
from mtem.data.tokens import encode as token_numbers
from mtem.data.tokens import tokenizer_fingerprint
from mtem.errors import RequestError
from mtem.models import encoders, integrity
from mtem.models.text import longest, quietly
from mtem.models.trees.features import Arrays, NodeFeatures

_FORMAT = "1"  # part of every cache address: raise it when what is written changes
_TOKENS = 2048  # in a batch, with padding; more is slower on a CPU


class Embeddings(NodeFeatures):
    """Directions of the embeddings, in numbers of about size 1 and half precision, kept in the cache by encoder and text."""

    kind = "encoder"

    def __init__(self, network: nn.Module, tokenizer: Any, max_length: int) -> None:
        self.network, self.tokenizer = network.eval().requires_grad_(False), tokenizer
        self.max_length = min(max_length, longest(network, tokenizer))
        self.width = int(network.config.hidden_size)
        self.fingerprint = fingerprint_of(
            _FORMAT, self.kind, _network_fingerprint(network), tokenizer_fingerprint(tokenizer), str(self.max_length)
        )

    @classmethod
    def find(cls, name: str | os.PathLike[str], max_length: int) -> Embeddings:
        """An encoder by a packaged name, a directory or a Hugging Face name."""
        return cls._of(encoders.find(name, encoders.FEATURES_OPTION), str(name), max_length)

    @classmethod
    def _of(cls, place: str, name: str, max_length: int, *, exactly: bool = False) -> Embeddings:
        safe: dict[str, Any] = {"trust_remote_code": False}  # and only safetensors: a model directory is data
        try:
            with quietly():
                tokenizer = AutoTokenizer.from_pretrained(place, use_fast=True, **safe)
                config = AutoConfig.from_pretrained(place, **safe)
                network, info = AutoModel.from_pretrained(
                    place, config=config, use_safetensors=True, dtype=torch.float32, ignore_mismatched_sizes=True,
                    output_loading_info=True, **safe,
                )  # fmt: skip
            integrity.check_loaded(network, info, name, classifier=False)
            integrity.check_tokenizer(tokenizer, network.get_input_embeddings(), Path(place), name, exactly=exactly)
        except RequestError:
            raise
        except Exception as error:  # damaged files fail in as many ways as there are files
            raise encoders.damaged(name, error) from error
        return cls(network, tokenizer, max_length)

    def encode(self, texts: Sequence[str], device: torch.device | None = None, store: Store | None = None) -> Arrays:
        """{"values": [texts, width]}; with a store only what it does not have is computed, and added to it."""
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
        network = self.network.to(device or torch.device("cpu"))
        ids = token_numbers(texts, self.tokenizer, self.max_length)
        found = np.zeros((len(texts), self.width), np.float16)
        for rows in sequential(np.array([len(one) for one in ids]), tokens_per_batch=_TOKENS):
            width = max(1, max(len(ids[row]) for row in rows))
            padded = np.full((len(rows), width), self.tokenizer.pad_token_id, np.int64)
            mask = np.zeros((len(rows), width), np.int64)
            for line, row in enumerate(rows):
                padded[line, : len(ids[row])] = ids[row]
                mask[line, : len(ids[row])] = 1
            inputs = {"input_ids": torch.from_numpy(padded).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
            hidden = network(**inputs).last_hidden_state
            mean = (hidden * inputs["attention_mask"].unsqueeze(-1)).sum(dim=1)  # its length is of no matter
            found[rows] = (F.normalize(mean, dim=1) * self.width**0.5).cpu().numpy()
        return found

    def store(self, cache: Path | None = None) -> Store:
        return Store(cache_folder("embeddings", cache) / self.fingerprint, self.width)

    def save(self, directory: Path) -> None:
        self.tokenizer.model_max_length = self.max_length
        with quietly():
            self.network.save_pretrained(directory / "encoder", safe_serialization=True)
            self.tokenizer.save_pretrained(directory / "encoder")

    @classmethod
    def load(cls, directory: Path) -> Embeddings:
        place = directory / "encoder"
        integrity.check_files(place, str(place))
        return cls._of(str(place.absolute()), str(place), 1 << 30, exactly=True)


class Store:
    """Rows of numbers by key, in files that are written once and only ever joined by others."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        self.type = np.dtype([("key", "<u8"), ("values", "<f2", (width,))])
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # keys in order, where each stands, the rows
        for path in sorted(folder.glob("*.npy")):
            self._open(path)

    def fill(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Copy what is there into the rows of `values`; the numbers of the rows that are not."""
        missing = np.arange(len(keys))
        for ordered, places, rows in self.parts:
            at = np.searchsorted(ordered, keys[missing]).clip(max=len(ordered) - 1)
            there = ordered[at] == keys[missing]
            values[missing[there]] = rows["values"][places[at[there]]]
            missing = missing[~there]
        return missing

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        rows = np.zeros(len(keys), self.type)
        rows["key"], rows["values"] = keys, values
        path = self.folder / f"{fingerprint_of(keys.tobytes())[:32]}.npy"
        with replaced(path) as temporary, temporary.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # damaged: what it held is computed again
            return
        if rows.dtype == self.type and len(rows):
            keys = np.array(rows["key"])
            places = np.argsort(keys)
            self.parts.append((keys[places], places, rows))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _network_fingerprint(network: nn.Module) -> str:
    """The same for an encoder and what was saved of it, whatever the files look like."""
    told = network.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        told.pop(name, None)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()
