"""Other views of a batch of texts: tokens masked, words deleted, words swapped. Plain functions on padded token numbers.

A text's words are numbered from its tokens (`word_numbers`), so that the pieces of a word are deleted or moved together.
Special tokens and padding are never touched, and no text is masked or deleted whole. All draws come from the generator on
the CPU, so that every device sees the same views. The fourth view, dropout, needs no function: it is the same text in
training mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("mask", "delete", "swap", "dropout", "mixed")

# WordPiece marks the tokens that go on with a word; SentencePiece and byte-level vocabularies (the second sign is their
# line break) mark those that begin one.
_CONTINUES = "##"
_BEGINS = {"\u2581": ("\u2581",), "\u0120": ("\u0120", "\u010a")}


def continuations(names: Sequence[str]) -> list[bool]:
    """Of every token of a vocabulary: whether it goes on with the word before it.

    The convention is the one that marks the most tokens, since any of the marks may also be a letter of some language. A
    vocabulary without marks has whole words.
    """
    marked = {mark: sum(name.startswith(mark) for name in names) for mark in (_CONTINUES, *_BEGINS)}
    mark = max(marked, key=marked.__getitem__)
    if mark == _CONTINUES:
        return [name.startswith(_CONTINUES) for name in names]
    return [not name.startswith(_BEGINS[mark]) for name in names]


def word_numbers(ids: Tensor, mask: Tensor, continues: Tensor, special: Tensor) -> Tensor:
    """Which word of its text each token belongs to, [N, L]; -1 for special tokens and padding.

    Args:
        continues: [vocabulary] bool, whether a token goes on with the word before it.
        special: [vocabulary] bool.
    """
    free = mask.bool() & ~special[ids]
    starts = free & (~continues[ids] | ~_before(free))
    return torch.where(free, starts.long().cumsum(dim=1) - 1, -1)


def mask_tokens(ids: Tensor, words: Tensor, share: float, token: int, generator: torch.Generator) -> Tensor:
    """The token numbers with a random share of the tokens replaced by `token`."""
    return ids.masked_fill(chosen_tokens(words, share, generator), token)


def chosen_tokens(words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A random share of the tokens that belong to words, though never all of a text's, [N, L] bool."""
    return _chosen(_draws(words, generator), words, share)


def delete_words(
    ids: Tensor, mask: Tensor, words: Tensor, share: float, padding: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Token numbers and attention mask without a random share of the words; the gaps are closed."""
    kept = mask.bool() & ~_chosen(_per_word(words, generator), words, share)
    order = torch.argsort((~kept).long(), dim=1, stable=True)
    kept = kept.gather(1, order)
    return ids.gather(1, order).masked_fill(~kept, padding), kept.to(mask.dtype)


def swap_words(ids: Tensor, words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The token numbers with a random share of the words put in another order among themselves."""
    draws = _per_word(words, generator)
    width = ids.shape[1]
    first = words != torch.cat([torch.full_like(words[:, :1], -2), words[:, :-1]], dim=1)
    unit = first.long().cumsum(dim=1) - 1  # what keeps together: a word, or the other tokens between two words
    moved = first & (words >= 0) & (draws < share)  # one token stands for each moved word
    # The moved word of the j-th smallest draw goes to the j-th of the moved words' places; column `width` takes the rest.
    order = torch.where(moved, draws, 2.0).argsort(dim=1, stable=True)
    leaving = torch.where(moved.gather(1, order), unit.gather(1, order), width)
    places = torch.where(moved, unit, width).sort(dim=1).values
    goal = torch.arange(width + 1, device=ids.device).repeat(len(ids), 1).scatter(1, leaving, places)
    return ids.gather(1, goal.gather(1, unit).argsort(dim=1, stable=True))


def _chosen(draws: Tensor, words: Tensor, share: float) -> Tensor:
    """The tokens of words whose draw is under the share, without a text's largest draw: something stays."""
    draws = draws.masked_fill(words < 0, -1.0)
    return (draws >= 0) & (draws < share) & (draws < draws.amax(dim=1, keepdim=True))


def _before(flags: Tensor) -> Tensor:
    """The flag of the token before each."""
    return torch.cat([torch.zeros_like(flags[:, :1]), flags[:, :-1]], dim=1)


def _per_word(words: Tensor, generator: torch.Generator) -> Tensor:
    """A uniform draw for every token, the same for all tokens of a word."""
    return _draws(words, generator).gather(1, words.clamp_min(0))


def _draws(words: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(words.shape, generator=generator).to(words.device, non_blocking=True)
