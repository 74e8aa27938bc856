"""Frozen lower layers: an encoder cut in two, and the output of the lower part kept on disk.

The lower part of a frozen encoder is a constant function of the text. It runs once for each text; methods then pass its output
through the upper part alone, however often.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtem.atomic import replaced
from mtem.data.batching import sequential
from mtem.data.tokens import Tokens
from mtem.progress import Progress

_CHECKED = 1 << 16  # rows of a file that are looked at together
TOKENS_PER_BATCH = 1024  # in the lower part: the activations of that many tokens fit into a processor's cache

Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger(__name__)


class FrozenTokens:
    """Tokens together with the input of the first trainable layer, memory-mapped.

    Parameters
    ----------
    tokens
        The tokens of the texts.
    values
        One row for each token of all texts, [tokens, width].
    starts
        The first row of each text; by default the texts follow one another.
    """

    def __init__(self, tokens: Tokens, values: np.ndarray, starts: np.ndarray | None = None) -> None:
        self.tokens, self.values = tokens, values
        self.lengths: np.ndarray = tokens.lengths
        self.starts = _starts(tokens) if starts is None else starts

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.tokens)

    def ids(self, row: int) -> np.ndarray:
        """Return the token numbers of a text."""
        return self.tokens.ids(row)

    def hidden(self, row: int) -> np.ndarray:
        """Return the input of the first trainable layer for a text, [tokens, width]."""
        return self.values[self.starts[row] : self.starts[row] + self.lengths[row]]


def frozen_tokens(
    tokens: Tokens,
    lower: Callable[[np.ndarray], Tensor],
    width: int,
    path: Path,
    progress: Progress,
    name: str,
    store: Path | None = None,
) -> FrozenTokens:
    """Return the tokens with the output of the lower part for every text.

    Parameters
    ----------
    tokens
        The tokens of the texts.
    lower
        The lower part, from row numbers to a tensor [rows, tokens, width].
    width
        The last dimension of that tensor.
    path
        The file of the output. A complete file is used again.
    progress, name
        Shows the work as a stage of this name.
    store
        The file of another corpus. If it has all of these texts, its output is used, and nothing is computed.
    """
    if store is not None and (found := _find(tokens, store)) is not None:
        return found
    total = int(np.asarray(tokens.lengths, dtype=np.int64).sum())
    values = _stored(path, (total, width)) if path.exists() else None
    if values is None:
        with replaced(path) as temporary, progress.stage(name, len(tokens)):
            _write(temporary, tokens, lower, (total, width), progress)
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    return FrozenTokens(tokens, values)


def _stored(path: Path, shape: tuple[int | None, int | None]) -> np.ndarray | None:
    """Return the output in a file, memory-mapped; None, with a warning, if it is damaged or not of this shape."""
    try:
        values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        right = values.dtype == np.dtype("<f4") and values.ndim == 2
        right = right and all(size in (None, found) for size, found in zip(shape, values.shape, strict=True))
        if right and all(np.isfinite(values[first : first + _CHECKED]).all() for first in range(0, len(values), _CHECKED)):
            return values
        reason = "not the output of these layers for these texts"
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())[:160]
    logger.warning("%s: is damaged (%s); it is computed again", path, reason)
    return None


def write_keys(tokens: Tokens, path: Path) -> None:
    """Write which texts a file of the lower part's output has, so that other corpora can find theirs in it."""
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.save(file, _keys(tokens))


def _find(tokens: Tokens, store: Path) -> FrozenTokens | None:
    """Return the tokens with the output that a store has for them; None if it lacks a text."""
    keys_path = keys_of(store)
    if not (store.is_file() and keys_path.is_file()):
        return None
    own = _keys(tokens)
    try:
        stored = np.load(keys_path, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError):
        return None
    if stored.dtype != own.dtype or stored.ndim != 1:
        return None
    places = {bytes(key): int(start) for key, start in zip(stored["key"], stored["start"], strict=True)}
    starts = [places.get(bytes(key), -1) for key in own["key"]]
    if -1 in starts:
        return None
    values = _stored(store, (None, None))
    if values is None or any(start + length > len(values) for start, length in zip(starts, tokens.lengths, strict=True)):
        return None
    return FrozenTokens(tokens, values, np.array(starts, dtype=np.int64))


def keys_of(store: Path) -> Path:
    """Return the file of a store's keys."""
    return store.with_suffix(".keys.npy")


def _keys(tokens: Tokens) -> np.ndarray:
    """Return a digest of the tokens of each text, and its first row."""
    starts = _starts(tokens)
    keys = np.zeros(len(tokens), dtype=[("key", "S16"), ("start", "<i8")])
    for row in range(len(tokens)):
        # Hexadecimal: a string of NumPy loses zeros at its end.
        keys[row] = hashlib.sha256(tokens.ids(row).tobytes()).hexdigest()[:16].encode(), starts[row]
    return keys


def _write(path: Path, tokens: Tokens, lower: Callable[[np.ndarray], Tensor], shape: tuple[int, int], progress: Progress) -> None:
    # Written, not mapped: on a full disk a write raises an error, while a mapped page kills the process.
    starts = _starts(tokens)
    done = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        offset = file.tell()
        for rows in sequential(tokens.lengths, tokens_per_batch=TOKENS_PER_BATCH):
            hidden = lower(rows).cpu().numpy()
            for line, row in enumerate(rows):
                file.seek(offset + 4 * shape[1] * int(starts[row]))
                file.write(hidden[line, : tokens.lengths[row]].astype("<f4").tobytes())
            done += len(rows)
            progress.advance(done)


def _starts(tokens: Tokens) -> np.ndarray:
    """Return the first row of each text, and the end of the last."""
    return np.concatenate([[0], np.cumsum(np.asarray(tokens.lengths, dtype=np.int64))])


class _ReachedError(Exception):
    """Carries the input of the first trainable layer out of the forward pass."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Passthrough(nn.Module):
    """Replaces the embeddings when the output of the lower part is given as `inputs_embeds`."""

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        values = [*arguments, *named.values()]
        return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3)


def run_lower(
    network: PreTrainedModel,
    first: nn.Module,
    ids: Tensor,
    mask: Tensor | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Return the input of the layer `first`, without gradients, without dropout, and without running the later layers.

    Parameters
    ----------
    network
        The whole encoder.
    first
        The first trainable layer.
    ids, mask
        Token numbers and attention mask.
    autocast
        Makes the context that sets the precision.
    """

    def stop(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _ReachedError(arguments[0] if arguments else named["hidden_states"])

    handle = first.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with evaluation_mode(network), torch.no_grad(), autocast():
            network(input_ids=ids, attention_mask=mask)
    except _ReachedError as reached:
        return reached.hidden.float()
    finally:
        handle.remove()
    raise AssertionError("the first trainable layer was not called")


def upper_part(network: PreTrainedModel, path: str, layers: int) -> PreTrainedModel | None:
    """Return the network from layer `layers` on, with `inputs_embeds` as input; None if it has no module "embeddings".

    The layers and the head are the network's own modules; only the containers above them are shallow copies.

    Parameters
    ----------
    network
        The whole encoder with its head.
    path
        The path of the list of layers in the network.
    layers
        The number of layers to leave out.
    """
    base = getattr(network, network.base_model_prefix, None)
    if base is None or not isinstance(getattr(base, "embeddings", None), nn.Module):
        return None

    def shallow(module: Module, names: list[str]) -> Module:
        twin = copy.copy(module)
        twin._modules = dict(module._modules)
        child, remaining = cast(nn.Module, module._modules[names[0]]), names[1:]
        twin._modules[names[0]] = (
            shallow(child, remaining) if remaining else nn.ModuleList(list(cast(nn.ModuleList, child))[layers:])
        )
        if module is base:
            twin._modules["embeddings"] = _Passthrough()
        return twin

    return shallow(network, path.split("."))


def same_function(network: PreTrainedModel, upper: PreTrainedModel, lower: Callable[[Mapping[str, Tensor]], Tensor]) -> bool:
    """Return whether the lower and the upper part together compute what the network does.

    Architectures differ, so this is tested with an example.
    """
    device = next(network.parameters()).device
    ids = torch.tensor([[7, 11, 13, 5], [3, 2, 9, 6]], device=device) % network.config.vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=device)}
    try:
        with evaluation_mode(network), torch.no_grad():
            expected = network(**inputs).logits
            split = upper(inputs_embeds=lower(inputs), attention_mask=inputs["attention_mask"]).logits
        return bool(torch.allclose(expected, split, atol=1e-4, rtol=1e-4))
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError, StopIteration):
        return False


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put the network into evaluation mode for a while."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
