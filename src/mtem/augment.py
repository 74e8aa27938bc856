"""Other views of a batch of texts: tokens masked, words deleted, words swapped. Plain functions on padded token numbers.

A text's words are numbered from its tokens (`word_numbers`), so that the pieces of a word share its fate. Special tokens and
padding are never touched, and no text loses all of its words. All draws come from the generator on the CPU, so that every
device sees the same views. The fourth view, dropout, needs no function: it is the same text in training mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("mask", "delete", "swap", "dropout", "mixed")


def word_numbers(ids: Tensor, mask: Tensor, continues: Tensor, special: Tensor) -> Tensor:
    """Which word of its text each token belongs to, [N, L]; -1 for special tokens and padding.

    Args:
        continues: [vocabulary] bool, whether a token goes on with the word before it.
        special: [vocabulary] bool.
    """
    free = mask.bool() & ~special[ids]
    starts = free & (~continues[ids] | ~_behind(free))
    return torch.where(free, starts.long().cumsum(dim=1) - 1, -1)


def mask_tokens(ids: Tensor, words: Tensor, share: float, token: int, generator: torch.Generator) -> Tensor:
    """The token numbers with a random share of the tokens replaced by `token`."""
    return ids.masked_fill(chosen_tokens(words, share, generator), token)


def chosen_tokens(words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A random share of the tokens that belong to words, [N, L] bool."""
    return (torch.rand(words.shape, generator=generator).to(words.device) < share) & (words >= 0)


def delete_words(
    ids: Tensor, mask: Tensor, words: Tensor, share: float, padding: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Token numbers and attention mask without a random share of the words; the gaps are closed."""
    draws = _per_word(words, generator)
    gone = (draws < share) & (words >= 0)
    # The word with the largest draw stays, so that something does.
    last = torch.where(words >= 0, draws, -1.0).amax(dim=1, keepdim=True)
    kept = mask.bool() & ~(gone & (draws < last))
    order = torch.argsort((~kept).long(), dim=1, stable=True)
    kept = kept.gather(1, order)
    return ids.gather(1, order).masked_fill(~kept, padding), kept.to(mask.dtype)


def swap_words(ids: Tensor, words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The token numbers with a random share of the words put in another order among themselves."""
    draws, ranks = _per_word(words, generator), _per_word(words, generator)
    moved = (draws < share) & (words >= 0)
    # Each moved word gets the place of the moved word whose rank is as high among the ranks as its own place is among places.
    width = ids.shape[1]
    first = torch.ones_like(moved)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    heads = moved & first  # one token stands for each moved word
    places = torch.where(heads, words, width).sort(dim=1).values
    by_rank = torch.where(heads, ranks, 2.0).argsort(dim=1)
    number = words.gather(1, by_rank)  # the moved words in their new order
    goal = torch.arange(width, device=ids.device).repeat(len(ids), 1)
    count = heads.sum(dim=1, keepdim=True)
    there = torch.arange(width, device=ids.device) < count
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(there)
    goal[rows[there], number[there]] = places[there]
    place = goal.gather(1, words.clamp_min(0))
    # Special tokens in front of the words stay there, what comes behind them too.
    begun = (words >= 0).long().cumsum(dim=1) > 0
    place = torch.where(words >= 0, place, torch.where(begun, width, -1))
    return ids.gather(1, torch.argsort(place, dim=1, stable=True))


def _behind(flags: Tensor) -> Tensor:
    """The flags of the tokens before."""
    return torch.cat([torch.zeros_like(flags[:, :1]), flags[:, :-1]], dim=1)


def _per_word(words: Tensor, generator: torch.Generator) -> Tensor:
    """A uniform draw for every token, the same for all tokens of a word."""
    return torch.rand(words.shape, generator=generator).to(words.device).gather(1, words.clamp_min(0))
