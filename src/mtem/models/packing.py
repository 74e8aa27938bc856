"""Batches without padding: the texts of a batch are joined to one row of tokens, and attention stays inside each text.

On a GPU most of a training step is spent on tokens, and a padded batch has up to half as many again as its texts. Joined, a
batch has as many tokens as its texts and a few at the end that belong to none (`ROOM`), so that lengths recur and steps can be
captured. Attention reads the bounds of the texts; on a GPU it is the flash kernel for texts of different lengths.

Only BERT and its relatives of the same code are joined here: what a layer consists of is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

MODEL_TYPES = ("bert",)
ROOM = 1024  # joined batches have a multiple of so many tokens
NAME = "mtem_joined"  # of the attention, in transformers' registry


@dataclasses.dataclass(frozen=True)
class Joined:
    """Where the tokens of a padded batch are when its texts are joined.

    Attributes
    ----------
    order : Tensor
        For each token of the joined batch its place in the flattened padded one, [T]. Tokens of no text repeat the first one.
    places : Tensor
        For each place in the flattened padded batch that of its token in the joined one, [N * L]; that of padding means nothing.
    bounds : Tensor
        Where texts begin and end, then where the tokens of no text are cut into parts no longer than a text, [2 N + 1] int32.
    longest : int
        No text has more tokens.
    """

    order: Tensor
    places: Tensor
    bounds: Tensor
    longest: int

    @property
    def firsts(self) -> Tensor:
        """The place of the first token of each text, [N]."""
        return self.bounds[: (len(self.bounds) - 1) // 2].long()


_current: ContextVar[Joined] = ContextVar("joined")


def is_possible(network: PreTrainedModel) -> bool:
    """Return whether the texts of a batch can be joined for this network."""
    return network.config.model_type in MODEL_TYPES and network.config._attn_implementation == "sdpa"


def room(tokens: int, texts: int, length: int) -> int:
    """Return the tokens of a joined batch: a multiple of `ROOM`, or as many as the padded batch of `length` has."""
    return min(-(-tokens // ROOM) * ROOM, texts * length)


def join(mask: Tensor, tokens: int) -> Joined:
    """Return where tokens go. Nothing waits for the device.

    Parameters
    ----------
    mask
        The attention mask of the padded batch, [N, L]. Every text has at least one token.
    tokens
        The number of tokens of the joined batch; at least as many as the mask has ones.
    """
    (texts, length), device = mask.shape, mask.device
    real = mask.flatten() != 0
    places = torch.where(real, real.long().cumsum(0) - 1, tokens)
    order = torch.zeros(tokens + 1, dtype=torch.long, device=device)
    order = order.scatter(0, places, torch.arange(texts * length, device=device))[:tokens]
    ends = (mask != 0).sum(dim=1).cumsum(0)
    rest = tokens - ends[-1]
    further = ends[-1] + torch.arange(1, texts + 1, device=device) * rest // texts
    bounds = torch.cat([ends.new_zeros(1), ends, further]).to(torch.int32)
    return Joined(order, places.clamp_max(tokens - 1), bounds, length)


def hidden_states(network: PreTrainedModel, ids: Tensor, joined: Joined, *, first_only: bool = False) -> Tensor:
    """Return the output of the last layer: at all tokens of the joined batch, [T, D], or at the first of each text, [N, D].

    Parameters
    ----------
    network
        A classifier for which `is_possible`.
    ids
        The token numbers of the padded batch, [N, L].
    joined
        Where they go.
    first_only
        Whether only the first token of each text is needed. Then the last layer is computed there after its attention.
    """
    encoder = cast(Any, network.base_model)
    tokens = ids.flatten().index_select(0, joined.order)[None]
    positions = (joined.order % ids.shape[1])[None]
    hidden: Tensor = encoder.embeddings(input_ids=tokens, token_type_ids=torch.zeros_like(tokens), position_ids=positions)
    *layers, last = encoder.encoder.layer
    with _attention_inside_texts(network, joined):
        for layer in layers:
            hidden = _tensor(layer(hidden))
        if not first_only:
            return _tensor(last(hidden))[0]
        mixed = last.attention.self(hidden)[0]
    firsts = joined.firsts
    attended = last.attention.output(mixed.index_select(1, firsts), hidden.index_select(1, firsts))
    return cast(Tensor, last.feed_forward_chunk(attended)[0])


def logits(network: PreTrainedModel, ids: Tensor, joined: Joined) -> Tensor:
    """Return the logits of each text, [N, K]."""
    first = hidden_states(network, ids, joined, first_only=True)
    classifier = cast(Any, network)
    return cast(Tensor, classifier.classifier(classifier.dropout(classifier.base_model.pooler(first[:, None]))))


def _tensor(output: Any) -> Tensor:
    """Return the hidden states that a layer returned; in some versions of transformers they come in a tuple."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


@contextlib.contextmanager
def _attention_inside_texts(network: PreTrainedModel, joined: Joined) -> Iterator[None]:
    """Let the layers of a network attend inside the texts of a joined batch."""
    config = network.config
    before, config._attn_implementation = config._attn_implementation, NAME
    token = _current.set(joined)
    try:
        yield
    finally:
        _current.reset(token)
        config._attn_implementation = before


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of a joined batch, [1, T, heads, width], from queries, keys and values [1, heads, T, width]."""
    joined = _current.get()
    query, key, value = (values[0].transpose(0, 1) for values in (query, key, value))
    if query.device.type == "cuda":
        output = torch.ops.aten._flash_attention_forward(
            query, key, value, joined.bounds, joined.bounds, joined.longest, joined.longest, dropout, False, False, scale=scaling
        )[0]
        return output[None], None
    # Elsewhere only tests come here: what the kernel computes, from all pairs of tokens.
    text = torch.searchsorted(joined.bounds[1:].contiguous(), torch.arange(len(query), dtype=torch.int32), right=True)
    same = text[:, None] == text
    query, key, value = (values.transpose(0, 1) for values in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=same, dropout_p=dropout, scale=scaling)
    return output.transpose(0, 1)[None], None


AttentionInterface.register(NAME, attend)
