"""Checks that a model directory is complete: its files before they are opened, its tokenizer and weights once they are loaded.

The libraries that read a directory fill gaps with random weights or guesses, and would predict with them all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mtem.data.tokens import encode
from mtem.errors import RequestError
from mtem.files import check_folder, special_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm", "*.tiktoken", "tekken.json")
AGAIN = "copy the whole model again, or train it again"
MOST_LAYERS = 1000
_HEAD_WEIGHTS = 20_000_000  # that a new head may add to those in the files
# Tensors that other uses of an encoder leave in its file and that a text classifier does not need: its pooled output, position
# numbers, and the heads of its pretraining.
_UNNEEDED = re.compile(
    r"(^|\.)(pooler\.|position_ids$|inv_freq$|lm_head\.|cls\.(predictions|seq_relationship)\.|predictions\.|sop_classifier\.|"
    r"vocab_(transform|layer_norm|projector)\.|(generator|discriminator|lm|mask)_predictions\.)|^decoder\.(weight|bias)$"
)
_PROBES = ("a", "An unusual text: naïve 中文 😀!", "word " * 40)
_CLASSIFIER = "ForSequenceClassification"


# ---------------------------------------------------------------------- the files, before any is opened


def check_files(directory: Path, name: str) -> None:
    """Check that a Hugging Face directory has a configuration, weights in safetensors, and the vocabulary of a tokenizer.

    Parameters
    ----------
    directory
        The directory.
    name
        What messages call it.

    Raises
    ------
    RequestError
        If one of them is missing or cannot be read.
    """
    config = _json(directory / "config.json", name, ", so this is not a Hugging Face model directory")
    check_folder(directory)
    if (directory / "adapter_config.json").is_file():
        raise RequestError(f"{name}: expected a whole model, got an adapter (adapter_config.json); merge it and save the result")
    for file in ("config.json", "tokenizer_config.json"):
        content = config if file == "config.json" else _json(directory / file, name) if (directory / file).is_file() else {}
        if content.get("auto_map"):
            raise RequestError(
                f"{name}: {file} names code to run ({_first_of(content['auto_map'])}), and no code of a model is run; if "
                "transformers knows this kind of model by itself, remove 'auto_map' from the file"
            )
    _check_numbers(config, name)
    named = config.get("transformers_weights")  # the name of another file, of any format
    if named is not None:
        _check_shard(directory, name, "config.json", named)
    _check_index(directory, name, alone=named is None and not (directory / WEIGHTS).is_file())
    if named is None and not any((directory / file).is_file() for file in (WEIGHTS, INDEX)):
        raise RequestError(f"{name}: no safetensors weights ({WEIGHTS}); other formats can execute code and are not loaded")
    if not any(True for pattern in VOCABULARIES for _ in directory.glob(pattern)):
        raise RequestError(f"{name}: its tokenizer is missing (no tokenizer.json or vocabulary file); {AGAIN}")


def _check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Refuse a configuration of more layers than any model has: to build them would take hours."""
    for key, value in config.items():
        if "layers" in key and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise RequestError(f"{name}: config.json: {key} is {value:g}, expected at most {MOST_LAYERS}; {AGAIN}")


def check_size(parameters: int, directory: Path, name: str) -> None:
    """Refuse a configuration that describes a much larger network than the weights are: it would only fill the memory.

    Parameters
    ----------
    parameters
        The number of weights of the network that the configuration describes.
    directory
        Where the weights are.
    name
        What messages call the directory.

    Raises
    ------
    RequestError
        If most of these weights are not in the files.
    """
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))  # at least a byte each
    if parameters > _HEAD_WEIGHTS + 2 * stored:
        raise RequestError(
            f"{name}: its config.json describes {parameters} weights, but the files of weights have {stored} bytes; {AGAIN}"
        )


def _first_of(auto_map: Any) -> str:
    values = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    return str(values[0])[:80]


def _check_index(directory: Path, name: str, alone: bool) -> None:
    """Check the index of weights in several files. They are needed if they are `alone`: a single file is read first."""
    if not (directory / INDEX).is_file():
        return
    files = _json(directory / INDEX, name).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise RequestError(f"{name}: {INDEX} names no weights; {AGAIN}")
    for file in dict.fromkeys(map(str, files.values())):
        _check_shard(directory, name, INDEX, file, needed=alone)


def _check_shard(directory: Path, name: str, by: str, file: Any, needed: bool = True) -> None:
    plain = isinstance(file, str) and "\\" not in file and PurePosixPath(file).name == file
    if not plain or not file.endswith(".safetensors"):
        raise RequestError(
            f"{name}: {by} names {file!r} as weights; only .safetensors files in the directory itself are read "
            "(other formats can execute code)"
        )
    if needed and not (directory / file).is_file():
        raise RequestError(f"{name}: {by} names {file}, which is missing; {AGAIN}")


def _json(path: Path, name: str, consequence: str = "") -> dict[str, Any]:
    if kind := special_kind(path):
        raise RequestError(f"{path}: is {kind}; only regular files are read: copy the folder again without it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{name}: no {path.name}{consequence}; {AGAIN}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise RequestError(f"{name}: {path.name} cannot be read ({error}); {AGAIN}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{name}: {path.name}: expected an object, got a {type(content).__name__}; {AGAIN}")
    return content


# ---------------------------------------------------------------------- the tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, embeddings: nn.Module, directory: Path, name: str, *, saved: bool
) -> None:
    """Check that a tokenizer is complete, fits the model, and reads texts as its file says.

    Parameters
    ----------
    tokenizer
        The loaded tokenizer.
    embeddings
        The input embeddings of the model.
    directory
        Where the tokenizer was loaded from.
    name
        What messages call the directory.
    saved
        Whether the model was trained with this tokenizer, so that its tokenizer_config.json is required.

    Raises
    ------
    RequestError
        If the tokenizer is not that of the model.
    """
    if tokenizer.pad_token_id is None:
        raise RequestError(f"{name}: its tokenizer has no padding token")
    complete = (directory / "tokenizer.json").is_file()
    merges = "merges.txt"
    if not complete and merges in tokenizer.vocab_files_names.values() and not (directory / merges).is_file():
        raise RequestError(f"{name}: its tokenizer is incomplete ({merges} is missing); {AGAIN}")
    vocabulary = tokenizer.get_vocab()
    if not set(vocabulary) - set(tokenizer.all_special_tokens):
        raise RequestError(f"{name}: its tokenizer has no words (is a vocabulary file missing?); {AGAIN}")
    embedding_count = getattr(embeddings, "num_embeddings", None)
    if embedding_count is not None and max(vocabulary.values()) >= embedding_count:
        raise RequestError(
            f"{name}: its tokenizer has {max(vocabulary.values()) + 1} tokens and its weights have {embedding_count}: "
            f"they belong to different models; {AGAIN}"
        )
    try:
        numbers = [number for ids in encode(_PROBES, tokenizer, 16) for number in ids]
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    if not numbers or (embedding_count is not None and not 0 <= min(numbers) <= max(numbers) < embedding_count):
        raise RequestError(f"{name}: its tokenizer gives no numbers of its words; {AGAIN}")
    if (directory / "tokenizer_config.json").is_file():
        return
    if saved or (complete and not _reads_as_its_file(tokenizer, directory / "tokenizer.json", vocabulary)):
        raise RequestError(f"{name}: tokenizer_config.json, which defines how texts are read, is missing; {AGAIN}")


def _reads_as_its_file(tokenizer: PreTrainedTokenizerBase, file: Path, vocabulary: Mapping[str, int]) -> bool:
    from tokenizers import Tokenizer

    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    some = words[:: max(1, len(words) // 50)]
    probe = " ".join([*some, *(word.title() for word in some), "Café,", "(it's)"])
    expected = Tokenizer.from_file(str(file)).encode(probe, add_special_tokens=False).ids
    return bool(tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"] == expected)


# ---------------------------------------------------------------------- the weights


def check_loaded(network: nn.Module, info: Mapping[str, Any], name: str, *, classifier: bool) -> None:
    """Check that the weights of a network are those that its configuration describes, and finite.

    Parameters
    ----------
    network
        The loaded network.
    info
        The loading report of transformers.
    name
        What messages call the directory.
    classifier
        Whether all weights must be present. An encoder may have no head, or one for another task.

    Raises
    ------
    RequestError
        If weights are missing, unknown, of another shape, or not finite.
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {key: (list(expected), list(shape)) for key, shape, expected in info["mismatched_keys"]}
    if info.get("error_msgs"):
        raise RequestError(f"{name}: its weights could not be loaded ({str(info['error_msgs'][0])[:160]}); {AGAIN}")
    if not classifier:
        declared = getattr(network.config, "architectures", None) or [""]
        if not (type(network).__name__.endswith(_CLASSIFIER) and str(declared[0]).endswith(_CLASSIFIER)):
            missing -= _outside(network, missing) | {key for key in missing if _UNNEEDED.search(key)}
        if not missing:
            unexpected -= _outside(network, unexpected)
        mismatched = {key: shapes for key, shapes in mismatched.items() if key not in _outside(network, mismatched)}
    unexpected = {key for key in unexpected if not _UNNEEDED.search(key)}
    if not (missing or mismatched or unexpected):
        check_finite(network.state_dict(), name)
        return
    problems = []
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if unexpected:
        problems.append(f"unknown: {_some(unexpected)}")
    if mismatched:
        problems.append("expected shape {}, got {}: {}".format(*mismatched[min(mismatched)], _some(mismatched)))
    details = "; ".join(problems)
    if missing and missing <= _outside(network, missing):
        advice = f"a bare encoder must be adapted first; otherwise {AGAIN}" if classifier else AGAIN
        raise RequestError(f"{name}: its weights have no head for its classes ({details}); {advice}")
    raise RequestError(f"{name}: its weights are not those that its config.json describes ({details}); {AGAIN}")


def check_types(network: nn.Module, directory: Path, name: str) -> None:
    """Refuse files that hold whole numbers where the network has weights: they would be converted, and mean something else.

    Raises
    ------
    RequestError
        With `name` and the first such tensor.
    """
    floats = {key for key, value in network.state_dict().items() if value.is_floating_point()}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (it is no dict)
                kind = str(stored.get_slice(key).get_dtype())
                if key in floats and not kind.startswith(("F", "BF")):
                    raise RequestError(f"{name}: {file.name}: {key}: expected weights, got numbers of type {kind}; {AGAIN}")


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, advice: str = f"; {AGAIN}") -> None:
    """Check that tensors have the expected names, shapes and kinds of numbers and are finite.

    Raises
    ------
    RequestError
        With `name` and the first tensor that differs.
    """
    for key in sorted({*tensors, *expected}):
        if key not in tensors:
            raise RequestError(f"{name}: {key} is missing{advice}")
        if key not in expected:
            raise RequestError(f"{name}: has {key}, which is unknown to the model{advice}")
        shape, expected_shape = list(tensors[key].shape), list(expected[key].shape)
        if shape != expected_shape:
            raise RequestError(f"{name}: {key}: expected shape {expected_shape}, got {shape}{advice}")
        if tensors[key].is_floating_point() != expected[key].is_floating_point():
            kinds = [str(value.dtype).removeprefix("torch.") for value in (expected[key], tensors[key])]
            raise RequestError(f"{name}: {key}: expected numbers of type {kinds[0]}, got {kinds[1]}{advice}")
    check_finite(tensors, name, advice)


def check_finite(tensors: Mapping[str, Tensor], name: str, advice: str = f"; {AGAIN}") -> None:
    """Check that tensors have no NaN or infinite values.

    Raises
    ------
    RequestError
        With `name` and the first tensor that has.
    """
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if bad:
        more = f" and in {len(bad) - 1} more" if len(bad) > 1 else ""
        raise RequestError(f"{name}: its weights are not finite (NaN or infinite in {bad[0]}{more}){advice}")


def _outside(network: nn.Module, keys: Iterable[str]) -> set[str]:
    """Return the keys that do not belong to the encoder, whether or not they start with its name."""
    prefix = getattr(network, "base_model_prefix", "") + "."
    body = {part for part, _ in getattr(network, "base_model", network).named_children()}
    return {key for key in keys if not key.startswith(prefix) and key.split(".")[0] not in body}


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
