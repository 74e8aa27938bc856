"""Whether a model directory is whole: its files before they are opened, its tokenizer and its weights once they are loaded.

What is missing in a directory would be drawn at random or guessed by the libraries that read it, and answer all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from mtem.errors import RequestError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm", "*.tiktoken", "tekken.json")
AGAIN = "copy the whole model again, or make it anew"
# What other uses of an encoder leave in its file and a classifier of texts does without: its pooled output, positions counted
# off, and the heads of its pretraining.
_ELSEWHERE = re.compile(
    r"(^|\.)(pooler\.|position_ids$|inv_freq$|lm_head\.|cls\.(predictions|seq_relationship)\.|predictions\.|sop_classifier\.|"
    r"vocab_(transform|layer_norm|projector)\.|(generator|discriminator|lm|mask)_predictions\.)|^decoder\.(weight|bias)$"
)
_CLASSIFIER = "ForSequenceClassification"


# ---------------------------------------------------------------------- files, before any is opened


def check_files(directory: Path, name: str) -> None:
    """Refuse a Hugging Face directory without configuration, weights in safetensors, or a tokenizer's vocabulary."""
    config = _json(directory / "config.json", name, "so it is not a Hugging Face model directory")
    if (directory / "adapter_config.json").is_file():
        raise RequestError(f"{name}: holds an adapter (adapter_config.json) and no whole model; merge the two and save that")
    named = config.get("transformers_weights")  # a file of another name, of any kind
    if named is not None:
        _check_shard(directory, name, "config.json", named)
    _check_index(directory, name, alone=named is None and not (directory / WEIGHTS).is_file())
    if named is None and not any((directory / file).is_file() for file in (WEIGHTS, INDEX)):
        raise RequestError(f"{name}: no safetensors weights there ({WEIGHTS}; other formats can execute code and are not loaded)")
    if not any(True for pattern in VOCABULARIES for _ in directory.glob(pattern)):
        raise RequestError(f"{name}: its tokenizer is missing (no tokenizer.json or vocabulary there); {AGAIN}")


def _check_index(directory: Path, name: str, alone: bool) -> None:
    """Weights in several files; unless they are there `alone`, a single file is what is read."""
    if not (directory / INDEX).is_file():
        return
    places = _json(directory / INDEX, name).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise RequestError(f"{name}: {INDEX} names no weights; {AGAIN}")
    for file in dict.fromkeys(map(str, places.values())):
        _check_shard(directory, name, INDEX, file, needed=alone)


def _check_shard(directory: Path, name: str, by: str, file: Any, needed: bool = True) -> None:
    plain = isinstance(file, str) and "\\" not in file and PurePosixPath(file).name == file
    if not plain or not file.endswith(".safetensors"):
        raise RequestError(
            f"{name}: {by} names {file!r} as weights; only .safetensors files of the directory itself are read "
            "(other formats can execute code)"
        )
    if needed and not (directory / file).is_file():
        raise RequestError(f"{name}: {by} names {file}, which is not there; {AGAIN}")


def _json(path: Path, name: str, unless: str = "") -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{name}: no {path.name} there, {unless or AGAIN}") from None
    except (ValueError, OSError) as error:
        raise RequestError(f"{name}: {path.name} cannot be read ({error}); {AGAIN}") from None
    if not isinstance(told, dict):
        raise RequestError(f"{name}: {path.name} holds a {type(told).__name__} where an object is wanted; {AGAIN}")
    return told


# ---------------------------------------------------------------------- the tokenizer


def check_tokenizer(tokenizer: Any, embeddings: nn.Module, directory: Path, name: str, *, exactly: bool) -> None:
    """Refuse a tokenizer that was made up, cannot be the model's, or reads otherwise than its file says.

    `exactly`: the file that says how to use it must be there, since the model was trained with it so.
    """
    if tokenizer.pad_token_id is None:
        raise RequestError(f"{name}: its tokenizer has no padding token")
    whole = (directory / "tokenizer.json").is_file()
    merges = "merges.txt"
    if not whole and merges in tokenizer.vocab_files_names.values() and not (directory / merges).is_file():
        raise RequestError(f"{name}: its tokenizer is not whole ({merges} is missing); {AGAIN}")
    vocabulary = tokenizer.get_vocab()
    if not set(vocabulary) - set(tokenizer.all_special_tokens):
        raise RequestError(f"{name}: its tokenizer knows no words (is a vocabulary file missing?); {AGAIN}")
    known = getattr(embeddings, "num_embeddings", None)
    if known is not None and max(vocabulary.values()) >= known:
        raise RequestError(
            f"{name}: its tokenizer has {max(vocabulary.values()) + 1} tokens and its weights know {known}: "
            f"the two are of different models; {AGAIN}"
        )
    if (directory / "tokenizer_config.json").is_file():
        return
    if exactly or (whole and not _reads_as_its_file(tokenizer, directory / "tokenizer.json", vocabulary)):
        raise RequestError(f"{name}: tokenizer_config.json, which says how its texts are read, is missing; {AGAIN}")


def _reads_as_its_file(tokenizer: Any, file: Path, vocabulary: Mapping[str, int]) -> bool:
    from tokenizers import Tokenizer

    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    some = words[:: max(1, len(words) // 50)]
    probe = " ".join([*some, *(word.title() for word in some), "Café,", "(it's)"])
    wanted = Tokenizer.from_file(str(file)).encode(probe, add_special_tokens=False).ids
    return tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"] == wanted


# ---------------------------------------------------------------------- the weights


def check_loaded(network: nn.Module, info: Mapping[str, Any], name: str, *, classifier: bool) -> None:
    """Refuse weights that are not those of the configuration; `info` is what transformers told of the loading.

    A `classifier` must have all of its weights. An encoder may come without a head, or with one for something else.
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {key: (list(there), list(wanted)) for key, there, wanted in info["mismatched_keys"]}
    if info.get("error_msgs"):
        raise RequestError(f"{name}: its weights could not be loaded ({str(info['error_msgs'][0])[:160]}); {AGAIN}")
    if not classifier:
        declared = getattr(network.config, "architectures", None) or [""]
        if not (type(network).__name__.endswith(_CLASSIFIER) and str(declared[0]).endswith(_CLASSIFIER)):
            missing -= _outside(network, missing) | {key for key in missing if _ELSEWHERE.search(key)}
        if not missing:
            unexpected -= _outside(network, unexpected)
        mismatched = {key: shapes for key, shapes in mismatched.items() if key not in _outside(network, mismatched)}
    unexpected = {key for key in unexpected if not _ELSEWHERE.search(key)}
    if not (missing or mismatched or unexpected):
        check_finite(network.state_dict(), name)
        return
    found = []
    if missing:
        found.append(f"missing: {_some(missing)}")
    if unexpected:
        found.append(f"unknown: {_some(unexpected)}")
    if mismatched:
        key = min(mismatched)
        found.append("of shape {} where {} is wanted: {}".format(*mismatched[key], _some(mismatched)))
    told = "; ".join(found)
    if missing and missing <= _outside(network, missing):
        way = f"a bare encoder must be adapted first; otherwise {AGAIN}" if classifier else AGAIN
        raise RequestError(f"{name}: its weights have no head for its classes ({told}); {way}")
    raise RequestError(f"{name}: its weights are not those that its config.json describes ({told}); {AGAIN}")


def check_tensors(there: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str) -> None:
    """Refuse tensors of other names or shapes than wanted, and numbers that are none."""
    for key in sorted({*there, *wanted}):
        if key not in there:
            raise RequestError(f"{name}: {key} is missing; {AGAIN}")
        if key not in wanted:
            raise RequestError(f"{name}: has {key}, which is unknown to the model; {AGAIN}")
        shapes = [list(each[key].shape) for each in (there, wanted)]
        if shapes[0] != shapes[1]:
            raise RequestError(f"{name}: {key} is of shape {shapes[0]} where {shapes[1]} is wanted; {AGAIN}")
    check_finite(there, name)


def check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if bad:
        more = f" and in {len(bad) - 1} more" if len(bad) > 1 else ""
        raise RequestError(f"{name}: its weights are not all numbers (NaN or infinite in {bad[0]}{more}); {AGAIN}")


def _outside(network: nn.Module, keys: Iterable[str]) -> set[str]:
    """Those of the keys that are not of the encoder, whether or not they begin with its name."""
    prefix = getattr(network, "base_model_prefix", "") + "."
    body = {part for part, _ in getattr(network, "base_model", network).named_children()}
    return {key for key in keys if not key.startswith(prefix) and key.split(".")[0] not in body}


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
