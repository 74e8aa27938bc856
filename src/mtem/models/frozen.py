"""Frozen lower layers: an encoder cut in two, and the lower half's output kept on disk.

The lower part of a frozen encoder is a constant function of the text. It runs once per text; what a method then passes
through the network, however often, is the upper part alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtem.atomic import replaced
from mtem.data.batching import sequential
from mtem.data.tokens import Tokens
from mtem.progress import Progress

TOKENS_PER_BATCH = 1024  # of the lower pass: what a layer makes of so many stays in a processor's cache


class FrozenTokens:
    """Tokens together with what enters the first trainable layer, memory-mapped."""

    def __init__(self, tokens: Tokens, values: np.ndarray) -> None:
        self.tokens, self.values = tokens, values
        self.lengths = tokens.lengths
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(tokens.lengths, dtype=np.int64))])

    def __len__(self) -> int:
        return len(self.tokens)

    def ids(self, row: int) -> np.ndarray:
        return self.tokens.ids(row)

    def hidden(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row + 1]]


def frozen_tokens(
    tokens: Tokens, lower: Callable[[np.ndarray], Tensor], width: int, path: Path, progress: Progress, name: str
) -> FrozenTokens:
    """Run `lower` (rows -> [rows, tokens, width]) over all texts once, into `path`; a complete file is used again."""
    total = int(np.asarray(tokens.lengths, dtype=np.int64).sum())
    if not path.exists():
        with replaced(path) as temporary, progress.stage(name, len(tokens)):
            _write(temporary, tokens, lower, (total, width), progress)
    return FrozenTokens(tokens, np.load(path, mmap_mode="r"))


def _write(path: Path, tokens: Tokens, lower: Callable[[np.ndarray], Tensor], shape: tuple[int, int], progress: Progress) -> None:
    """Written, not mapped: on a full disk a write fails, while a mapped page takes the whole process with it."""
    starts = np.concatenate([[0], np.cumsum(np.asarray(tokens.lengths, dtype=np.int64))])
    done = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        begin = file.tell()
        for rows in sequential(tokens.lengths, tokens_per_batch=TOKENS_PER_BATCH):
            hidden = lower(rows).cpu().numpy()
            for line, row in enumerate(rows):
                file.seek(begin + 4 * shape[1] * int(starts[row]))
                file.write(hidden[line, : tokens.lengths[row]].astype("<f4").tobytes())
            done += len(rows)
            progress.advance(done)


class _ReachedError(Exception):
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Passthrough(nn.Module):
    """Stands in for the embeddings when the lower part's output is given as `inputs_embeds`."""

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        given = [*arguments, *named.values()]
        return next(value for value in given if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3)


def run_lower(
    network: nn.Module, first: nn.Module, ids: Tensor, mask: Tensor | None, autocast: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    """What enters the layer `first`: without gradients, without dropout, and without running the rest."""

    def stop(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _ReachedError(arguments[0] if arguments else named["hidden_states"])

    handle = first.register_forward_pre_hook(stop, with_kwargs=True)
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad(), autocast():
            network(input_ids=ids, attention_mask=mask)
    except _ReachedError as reached:
        return reached.hidden.float()
    finally:
        handle.remove()
        for module, mode in modes.items():
            module.training = mode
    raise AssertionError("the first trainable layer was never reached")


def upper_part(network: nn.Module, path: str, layers: int) -> nn.Module | None:
    """The network from layer `layers` on, fed through `inputs_embeds`; None where its embeddings were not found.

    The layers and the head are the network's own modules; only the containers above them are shallow copies.
    """
    base = getattr(network, network.base_model_prefix, None)
    if base is None or not isinstance(getattr(base, "embeddings", None), nn.Module):
        return None

    def shallow(module: nn.Module, names: list[str]) -> nn.Module:
        twin = copy.copy(module)
        twin._modules = dict(module._modules)
        child = module._modules[names[0]]
        rest = names[1:]
        twin._modules[names[0]] = shallow(child, rest) if rest else nn.ModuleList(list(child)[layers:])
        if module is base:
            twin._modules["embeddings"] = _Passthrough()
        return twin

    return shallow(network, path.split("."))


def same_function(network: nn.Module, upper: nn.Module, lower: Callable[[Mapping[str, Tensor]], Tensor]) -> bool:
    """Whether lower and upper part together are the network: architectures differ, so it is tried, not assumed."""
    device = next(network.parameters()).device
    ids = torch.tensor([[7, 11, 13, 5], [3, 2, 9, 6]], device=device) % network.config.vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=device)}
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            whole = network(**inputs).logits
            parts = upper(inputs_embeds=lower(inputs), attention_mask=inputs["attention_mask"]).logits
        return bool(torch.allclose(whole, parts, atol=1e-4, rtol=1e-4))
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError, StopIteration):
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode
