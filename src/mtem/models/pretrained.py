"""Loading a Hugging Face directory safely: no code from it is run, only safetensors are read, incomplete ones are refused."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtem.data.tokens import encode
from mtem.errors import RequestError
from mtem.models import encoders, integrity

DEFAULT_MAX_LENGTH = 512  # of an encoder whose tokenizer and configuration give no limit
_FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")  # these count positions from the padding index


def load(
    auto_cls: Any,
    directory: str,
    name: str,
    *,
    attention: str | None = None,
    classifier: bool = False,
    saved: bool = False,
    **config: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the network and the tokenizer in a directory.

    Parameters
    ----------
    auto_cls
        The class of transformers that loads the network, such as `AutoModel`.
    directory
        Where the files are.
    name
        What messages call it.
    attention
        The attention implementation of transformers; None: its default.
    classifier
        Whether all weights must be in the directory, those of the head included.
    saved
        Whether the model was trained with this tokenizer, so that its tokenizer_config.json is required.
    config
        Values to change in the configuration.

    Raises
    ------
    RequestError
        If the files are incomplete, damaged, or do not belong together.
    """
    safe: dict[str, Any] = {"trust_remote_code": False}  # and only safetensors: a model directory is data
    chosen: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=True, **safe)
            configuration = AutoConfig.from_pretrained(directory, **config, **safe)
            if classifier:
                _check_classes(configuration, name)
            integrity.check_size(_count_weights(auto_cls, configuration), Path(directory), name)
            network, info = auto_cls.from_pretrained(
                directory,
                config=configuration,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # `check_loaded` decides which ones must match
                output_loading_info=True,
                **chosen,
                **safe,
            )
        integrity.check_loaded(network, info, name, classifier=classifier)
        integrity.check_types(network, Path(directory), name)
        integrity.check_tokenizer(tokenizer, network.get_input_embeddings(), Path(directory), name, saved=saved)
        _check_runs(network, tokenizer, name)
    except RequestError:
        raise
    except Exception as error:  # damaged files fail in as many ways as there are files
        raise encoders.damaged(name, error) from error
    return cast(PreTrainedModel, network), cast(PreTrainedTokenizerBase, tokenizer)


def _count_weights(auto_cls: Any, configuration: PreTrainedConfig) -> int:
    """Return the number of weights of the network that a configuration describes, without making room for them."""
    with torch.device("meta"):
        network = auto_cls.from_config(copy.deepcopy(configuration))
    return sum(parameter.numel() for parameter in network.parameters())


@torch.no_grad()
def _check_runs(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Read one short text: a configuration may agree with the weights, and still describe a network that cannot run."""
    ids = torch.tensor(encode(["a text"], tokenizer, 8))
    output = network(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    if not torch.isfinite(output).all():
        raise RequestError(f"{name}: its weights give numbers that are not finite; {integrity.AGAIN}")


def max_positions(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that an encoder can read of a text."""
    positions = getattr(network.config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
    declared = getattr(tokenizer, "model_max_length", None) or positions
    for name, value in (("max_position_embeddings", positions), ("model_max_length", declared)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise RequestError(f"{network.name_or_path}: {name}: expected a positive number, got {value!r}; {integrity.AGAIN}")
    if getattr(network.config, "model_type", "") in _FROM_PADDING:
        positions -= 2
    return int(min(positions, declared))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence the loading reports and progress bars of transformers."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_classes(configuration: PreTrainedConfig, name: str) -> None:
    names = configuration.id2label or {}
    if sorted(names) != list(range(len(names))) or len(set(map(str, names.values()))) != len(names) or len(names) < 2:
        raise RequestError(f"{name}: config.json: expected two or more classes numbered from 0 in id2label, got {names}")
