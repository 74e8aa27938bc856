"""The texts of a run: which are trained on, which are held out, and their batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mtem import parallel
from mtem.data.corpus import Corpus
from mtem.data.splits import hold_out
from mtem.errors import RequestError
from mtem.models.base import EncodedCorpus, Model
from mtem.progress import Progress
from mtem.run.directory import RunDirectory
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream, texts_per_batch

FROZEN_LIMIT = 4 * 2**30  # bytes of frozen layers' output stored on disk for each corpus


class RunInputs:
    """Rows, labels and batches of one run.

    Labeled target texts join the labeled set. All of them are trained on, so validation uses source texts alone.

    Attributes
    ----------
    labeled
        Source texts, followed by the labeled target texts.
    labels
        Class numbers of `labeled`.
    train_rows, held_out_rows, outer_rows, target_labeled_rows
        Rows of `labeled`: trained on (the target's among them), held out of the source, kept for the outer loop of mtem (by the
        setting `outer_share`), and those of the target.
    class_shares
        Share of each class among the labels that are trained on.
    source_stream, target_stream, target_labeled_stream, outer_stream
        Batches by step number, after `encode`. The last two are None without such texts. After `keep_lower` they have the
        output of the frozen layers, if there are any.
    """

    source_stream: Stream
    target_stream: Stream
    target_labeled_stream: Stream | None
    outer_stream: Stream | None

    def __init__(
        self, model: Model, settings: TrainingSettings, source: Corpus, target: Corpus, target_labeled: Corpus | None
    ) -> None:
        self.model, self.settings, self.target, self.classes = model, settings, target, source.classes
        train, self.held_out_rows = hold_out(source, source.classes, settings.validation_share, settings.seed)
        if not len(self.held_out_rows):
            raise RequestError(
                f"{source.name}: no {source.unit} could be held out for validation, there are too few different ones; "
                f"give more labeled {source.unit}"
            )
        train, self.outer_rows = keep_for_outer_loop(source, train, settings)
        self.labeled = source if target_labeled is None else Corpus.concatenate([source, target_labeled])
        self.labels = self.labeled.label_numbers(source.classes)
        self.target_labeled_rows = np.arange(len(source), len(self.labeled))
        self.train_rows = np.concatenate([train, self.target_labeled_rows])
        self.domains, self.domain_numbers = source.domains, source.domain_numbers()
        self.class_shares = np.bincount(self.labels[self.train_rows], minlength=len(self.classes)) / len(self.train_rows)

    @property
    def unit(self) -> str:
        """What messages call the examples: texts or threads."""
        return self.target.unit

    @property
    def target_labeled_labels(self) -> np.ndarray:
        """Class numbers of the labeled target texts."""
        return self.labels[self.target_labeled_rows]

    def encode(self, progress: Progress) -> None:
        """Tokenize both corpora, and make the batches."""
        model, size, seed = self.model, self.settings.batch_size, self.settings.seed
        labeled = self._encoded(self.labeled, "labeled", progress)
        target = self._encoded(self.target, "target", progress)
        domains = np.full(len(self.labeled), -1)
        domains[: len(self.domain_numbers)] = self.domain_numbers
        model.learn_domains(labeled, domains, target)
        share, rows = self.settings.target_labeled_share, self.target_labeled_rows
        self.source_stream = Stream(
            model, labeled, self.train_rows, self.labels, size, 2 * seed, extra=rows, extra_share=share or 0.0
        )
        self.target_stream = Stream(model, target, np.arange(len(self.target)), None, size, 2 * seed + 1)
        self.target_labeled_stream = None
        if len(rows):  # the same texts that the labeled batches have
            often = share or len(rows) / len(self.train_rows)
            self.target_labeled_stream = Stream(model, labeled, rows, self.labels, texts_per_batch(size, often), 2 * seed + 1)
        self.outer_stream = None
        if len(self.outer_rows):
            self.outer_stream = Stream(model, labeled, self.outer_rows, self.labels, size, 2 * seed + 1)

    def _encoded(self, corpus: Corpus, name: str, progress: Progress) -> EncodedCorpus:
        with progress.stage(f"tokens of the {name} {self.unit}", len(corpus)), parallel.main_first():
            return self.model.encode(corpus, progress=lambda done, _: progress.advance(done))

    def keep_lower(self, directory: RunDirectory, progress: Progress) -> None:
        """Run the frozen layers of the model, if there are any, once for each text."""
        labeled = self.source_stream, self.target_labeled_stream, self.outer_stream
        for name, streams in (("labeled", labeled), ("target", (self.target_stream,))):
            path, stage = directory.frozen_path(name), f"frozen layers, {name} {self.unit}"
            store = directory.frozen_store
            with parallel.main_first():
                tokens = self.model.keep_lower(streams[0].tokens, path, progress, stage, FROZEN_LIMIT, store)
            for stream in streams:
                if stream is not None:
                    stream.tokens = tokens

    def class_weights(self) -> Tensor | None:
        """Return the weight of each class in the cross-entropy; None: all equal."""
        if self.settings.class_weights == "none":
            return None
        weights = 1 / (len(self.classes) * np.maximum(self.class_shares, 1 / len(self.train_rows)))
        return torch.tensor(weights, dtype=torch.float32, device=self.model.device)


def keep_for_outer_loop(source: Corpus, train: np.ndarray, settings: TrainingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows into those that are trained on and those of the setting `outer_share`.

    Parameters
    ----------
    source
        The labeled source texts.
    train
        The rows that are not held out for validation.
    settings
        With `outer_share`, `validation_share` and `seed`.

    Raises
    ------
    RequestError
        If texts are asked for and there are too few.
    """
    share = settings.outer_share
    if not share:
        return train, np.array([], dtype=np.int64)
    if share + settings.validation_share >= 1:
        raise RequestError(
            f"setting outer_share={share}: with validation_share={settings.validation_share} no {source.unit} are left to train "
            "on; give a smaller share"
        )
    train, outer = hold_out(source, source.classes, share / (1 - settings.validation_share), settings.seed, among=train)
    if not len(outer):
        raise RequestError(
            f"{source.name}: no {source.unit} could be kept for outer_share={share}, there are too few different ones; give more "
            f"labeled {source.unit}, or outer_share=0"
        )
    return train, outer
