"""Masked words: a share of the tokens of a batch is hidden, and a head over the vocabulary restores them.

Shapes depend only on the shape of the batch, and nothing waits for the device: the number of places is the one that a batch
without padding needs, and places that are too many have no word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.capture import draws

PERCENT = 15  # of the words' tokens are to be restored
MASKED, REPLACED = 0.8, 0.1  # of these become the mask token, or a random token; the others stay
NO_WORD = -100  # the word of a place that is not to be restored; the `ignore_index` of torch


def number_of_places(tokens: int) -> int:
    """Return how many of so many tokens are to be restored: `PERCENT` of them, rounded up."""
    return -(-PERCENT * tokens // 100)


def hide_words(
    ids: Tensor, free: Tensor, vocabulary: Tensor, mask_token: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose tokens that are to be restored, and hide most of them.

    Parameters
    ----------
    ids
        Token numbers, [N, L].
    free
        Which of them may be chosen: neither special tokens nor padding, [N, L] bool.
    vocabulary
        The token numbers that random tokens are drawn from, [V].
    mask_token
        The number of the mask token.
    generator
        A CPU generator, for all random draws.

    Returns
    -------
    hidden
        The token numbers with the chosen ones masked, replaced or left as they are, [N, L].
    places
        Positions in the flattened batch, each at most once, [P]; P = `number_of_places(N * L)`.
    words
        The original tokens at the chosen places, `NO_WORD` at the others, [P].
    """
    device, count = ids.device, number_of_places(ids.numel())
    shape = tuple(ids.shape)
    order = draws(lambda: torch.rand(shape, generator=generator), device)
    kind = draws(lambda: torch.rand(count, generator=generator), device)
    other = draws(lambda: torch.randint(len(vocabulary), (count,), generator=generator), device)
    # The free tokens come first, in random order; so many of them are chosen.
    places = torch.where(free, order, 2.0).flatten().argsort(stable=True)[:count]
    chosen = torch.arange(count, device=device) < (PERCENT * free.sum() + 99) // 100
    original = ids.flatten().index_select(0, places)
    new = torch.where(kind < MASKED + REPLACED, vocabulary.index_select(0, other), original)
    new = new.masked_fill(kind < MASKED, mask_token)
    hidden = ids.flatten().scatter(0, places, torch.where(chosen, new, original))
    return hidden.view(shape), places, original.masked_fill(~chosen, NO_WORD)


def restoring_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Return the mean cross-entropy over the places that have a word; 0 if there are none.

    Parameters
    ----------
    logits
        Of every place, [P, vocabulary].
    words
        Token numbers or `NO_WORD`, [P].
    """
    total = F.cross_entropy(logits.float(), words, ignore_index=NO_WORD, reduction="sum")
    return total / (words != NO_WORD).sum().clamp_min(1)


class WordHead(nn.Module):
    """A new head over the vocabulary. Its matrix is that of the word embeddings, which it does not own.

    Parameters
    ----------
    width
        Of the encoder's hidden states.
    embeddings
        The word embeddings; they may be narrower than the hidden states.
    """

    def __init__(self, width: int, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, embeddings.embedding_dim), nn.LayerNorm(embeddings.embedding_dim)
        self.bias = nn.Parameter(torch.zeros(embeddings.num_embeddings))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return the logits of all tokens, [P, vocabulary], for hidden states [P, D] and the embeddings' matrix."""
        return F.linear(self.norm(F.gelu(self.dense(states))), embeddings, self.bias)
