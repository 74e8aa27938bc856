r"""Pretraining: before the source training the encoder learns to restore masked words of all texts of the run.

.. math::
    L = -\frac{1}{|M|} \sum_{m \in M} \log p(w_m \mid \tilde x)

:math:`M` are 15 % of the tokens of a batch (never special tokens or padding), :math:`w_m` the original tokens, and
:math:`\tilde x` the texts in which 80 % of the tokens in :math:`M` are masked and 10 % are replaced by random ones
(Devlin et al., NAACL 2019). No label is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mtem import parallel
from mtem.data.corpus import Corpus
from mtem.data.tokens import JoinedTokens, Tokens
from mtem.errors import RequestError
from mtem.methods.base import Batch, Context, Method, StepLog, Update
from mtem.models.base import EncodedCorpus, Inputs, Model
from mtem.models.masked_words import NO_WORD, WordHead, restoring_loss
from mtem.progress import Progress
from mtem.training.devices import find_precision
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer

STAGE = "pretrain"  # its name in the history, in run.json and on the progress bar
PADDED_LENGTHS = 16  # a step has one batch, and there are thousands of steps: many graphs are worth their capture
SEED, HEAD_SEED = 5, 6  # added to ten times the run's seed: of the stage, and of the new head


@dataclasses.dataclass(frozen=True)
class MaskedWordsSettings:
    """No settings: those of the stage are training settings."""


class MaskedWords(Method):
    """Restore masked words. It is a stage of a run and no method to choose, so it is not in the registry."""

    name = STAGE
    summary = "masked words of all texts are restored"
    paper = "Devlin et al., NAACL 2019"
    replayable = True
    Settings = MaskedWordsSettings
    settings: MaskedWordsSettings

    def __init__(self, model: Model, settings: MaskedWordsSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        self.head = WordHead(model.hidden_width, model.word_embeddings).to(model.device)

    def modules(self) -> dict[str, nn.Module]:
        """Return the head over the vocabulary."""
        return {"words": self.head}

    def step(self, number: int, source: Batch, target: Batch | None, update: Update) -> StepLog:
        """Take one step on the batch, which has no labels."""
        model = self.model
        model.train()
        inputs, places, words = model.hide_words(source.inputs, self.context.generator)
        if parallel.is_together():
            return self.divided_step(inputs, places, words, update)
        states = model.hidden_states(inputs).flatten(0, 1).index_select(0, places)
        with model.autocast():
            logits = self.head(states, model.word_embeddings.weight)
        loss = restoring_loss(logits, words)
        update(loss)
        return {"word_loss": loss.detach()}

    def divided_step(self, inputs: Inputs, places: Tensor, words: Tensor, update: Update) -> StepLog:
        """Take one step of which this process computes its own texts: states and logits of all would be too much to gather."""
        model, part = self.model, parallel.part_of(self.model.count(inputs))
        length, first = inputs["input_ids"].shape[1], part.rows.start
        own = (places >= first * length) & (places < (first + part.kept) * length)
        states = model.hidden_states(model.take(inputs, part.rows)).flatten(0, 1).index_select(0, places[own] - first * length)
        with model.autocast():
            logits = self.head(states, model.word_embeddings.weight)
        share = (words[own] != NO_WORD).sum() / (words != NO_WORD).sum().clamp_min(1)
        loss = parallel.size() * share * restoring_loss(logits, words[own])  # its mean over the processes is that of the batch
        update(loss)
        return {**parallel.average({"word_loss": loss.detach()})}


def check_pretraining(model: Model, settings: TrainingSettings) -> None:
    """Refuse to pretrain a model that cannot be."""
    if settings.pretrain_epochs and (obstacle := model.pretraining_obstacle()) is not None:
        raise RequestError(f"pretrain_epochs={settings.pretrain_epochs:g}: {obstacle}")


def find_learning_rate(model: Model, settings: TrainingSettings) -> float:
    """Return the learning rate of the pretraining: that of the settings, or the model's default."""
    given = settings.pretrain_learning_rate
    return model.default_pretraining_rate() if given is None else given


def new_method(model: Model, settings: TrainingSettings, context: Context) -> MaskedWords:
    """Return the method with a new head."""
    torch.manual_seed(settings.seed * 10 + HEAD_SEED)
    return MaskedWords(model, MaskedWordsSettings(), context)


def pretrain_model(model: Model, corpora: Sequence[Corpus], settings: TrainingSettings, progress: Progress) -> int:
    """Pretrain a model, or the encoder of its posts, on some corpora outside of a run; return the number of steps."""
    check_pretraining(model, settings)
    encoder = model.encoder_of_posts()
    if encoder is None:
        return pretrain(model, [model.encode(corpus) for corpus in corpora], settings, progress)
    encoder.precision = find_precision(settings.precision, encoder.device, encoder)
    texts = {text: None for corpus in corpora for thread in corpus.threads() for text in thread.texts if text.strip()}
    steps = pretrain(encoder, [encoder.encode_texts(list(texts))], settings, progress)
    model.take_encoder(encoder)
    return steps


def pretrain(model: Model, corpora: Sequence[EncodedCorpus], settings: TrainingSettings, progress: Progress) -> int:
    """Pretrain a model outside of a run, as a run with these texts and settings would; return the number of steps."""
    check_pretraining(model, settings)
    stream = all_texts(model, corpora, settings)
    steps = round((settings.pretrain_epochs or 0.0) * stream.per_epoch)
    context = Context(steps, 0, len(model.classes), torch.Generator().manual_seed(settings.seed), lambda: 0.0)
    trainer = Trainer(
        new_method(model, settings, context), settings, name=STAGE, steps=steps, source=stream, target=None, progress=progress,
        learning_rate=find_learning_rate(model, settings), optimizer="adamw", schedule="linear",
    )  # fmt: skip
    torch.manual_seed(settings.seed * 10 + SEED)
    trainer.run()
    return steps


def all_texts(model: Model, corpora: Sequence[EncodedCorpus], settings: TrainingSettings) -> Stream:
    """Return batches of the texts of several encoded corpora, without labels."""
    parts = [corpus for corpus in corpora if isinstance(corpus, Tokens)]
    if len(parts) < len(corpora):
        raise TypeError("expected Tokens: the model's layers are frozen, or it reads no texts")
    tokens = JoinedTokens(parts)
    rows, size = np.arange(len(tokens)), settings.pretrain_batch_size
    return Stream(model, tokens, rows, None, size, 2 * settings.seed, padded_lengths=PADDED_LENGTHS)
