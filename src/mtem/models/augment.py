"""Other views of a batch of texts: tokens masked, words deleted, words swapped. Plain functions on padded token numbers.

The words of a text are numbered from its tokens (`word_numbers`), so the tokens of a word are deleted or moved together. Special
tokens and padding are never changed, and no text loses all its words. All draws come from a CPU generator, so every device gets
the same views. The view "dropout" needs no function: it is the same text in training mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtem.capture import draws

KINDS = ("mask", "delete", "swap", "dropout", "mixed")

# WordPiece marks the tokens that continue a word. SentencePiece and byte-level vocabularies mark those that start one (the second
# mark of the latter is a line break).
_CONTINUES = "##"
_BEGINS = {"\u2581": ("\u2581",), "\u0120": ("\u0120", "\u010a")}


def continuations(names: Sequence[str]) -> list[bool]:
    """Return, for every token of a vocabulary, whether it continues the word before it.

    The convention is the one that marks the most tokens, since each mark may also be a letter of some language. A vocabulary
    without marks consists of whole words.
    """
    marked = {mark: sum(name.startswith(mark) for name in names) for mark in (_CONTINUES, *_BEGINS)}
    mark = max(marked, key=marked.__getitem__)
    if mark == _CONTINUES:
        return [name.startswith(_CONTINUES) for name in names]
    return [not name.startswith(_BEGINS[mark]) for name in names]


def word_numbers(ids: Tensor, mask: Tensor, continues: Tensor, special: Tensor) -> Tensor:
    """Return the number of each token's word in its text, [N, L]; -1 for special tokens and padding.

    Parameters
    ----------
    ids, mask
        Token numbers and attention mask, [N, L].
    continues
        Whether a token continues the word before it, [vocabulary] bool.
    special
        Whether a token is special, [vocabulary] bool.
    """
    free = mask.bool() & ~special[ids]
    starts = free & (~continues[ids] | ~_before(free))
    return torch.where(free, starts.long().cumsum(dim=1) - 1, -1)


def mask_tokens(ids: Tensor, words: Tensor, share: float, token: int, generator: torch.Generator) -> Tensor:
    """Return the token numbers with a random share of the words' tokens replaced by `token`."""
    return ids.masked_fill(chosen_tokens(words, share, generator), token)


def chosen_tokens(words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Choose a random share of the words' tokens, though never all of a text, [N, L] bool."""
    return _chosen(_draws(words, generator), words, share)


def delete_words(
    ids: Tensor, mask: Tensor, words: Tensor, share: float, padding: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return token numbers and attention mask without a random share of the words, the others moved together."""
    kept = mask.bool() & ~_chosen(_per_word(words, generator), words, share)
    order = torch.argsort((~kept).long(), dim=1, stable=True)
    kept = kept.gather(1, order)
    return ids.gather(1, order).masked_fill(~kept, padding), kept.to(mask.dtype)


def swap_words(ids: Tensor, words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return the token numbers with a random share of the words permuted among themselves."""
    draws = _per_word(words, generator)
    width = ids.shape[1]
    first = words != torch.cat([torch.full_like(words[:, :1], -2), words[:, :-1]], dim=1)
    unit = first.long().cumsum(dim=1) - 1  # tokens that stay together: a word, or the other tokens between two words
    moved = first & (words >= 0) & (draws < share)  # one token represents each moved word
    # The moved word of the j-th smallest draw goes to the j-th of the moved words' positions; column `width` takes the rest.
    order = torch.where(moved, draws, 2.0).argsort(dim=1, stable=True)
    leaving = torch.where(moved.gather(1, order), unit.gather(1, order), width)
    positions = torch.where(moved, unit, width).sort(dim=1).values
    goal = torch.arange(width + 1, device=ids.device).repeat(len(ids), 1).scatter(1, leaving, positions)
    return ids.gather(1, goal.gather(1, unit).argsort(dim=1, stable=True))


def _chosen(draws: Tensor, words: Tensor, share: float) -> Tensor:
    """Return the words' tokens whose draw is below the share, except the largest draw of each text: something must remain."""
    draws = draws.masked_fill(words < 0, -1.0)
    return (draws >= 0) & (draws < share) & (draws < draws.amax(dim=1, keepdim=True))


def _before(flags: Tensor) -> Tensor:
    """Return the flag of the token before each token."""
    return torch.cat([torch.zeros_like(flags[:, :1]), flags[:, :-1]], dim=1)


def _per_word(words: Tensor, generator: torch.Generator) -> Tensor:
    """Return a uniform draw for every token, the same for all tokens of a word."""
    return _draws(words, generator).gather(1, words.clamp_min(0))


def _draws(words: Tensor, generator: torch.Generator) -> Tensor:
    return draws(lambda: torch.rand(words.shape, generator=generator), words.device)
