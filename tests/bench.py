"""A method on a tiny BERT with plain gradient steps: what the methods' own tests share."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from mtem.data.loading import load_corpus
from mtem.methods.base import Batch, Context
from mtem.models.text import TextModel
from mtem.training.trainer import Trainer
from tests.conftest import make_texts

CLASSES = ["bad", "good"]
SOURCE, TARGET, FEW, SIZE = 40, 30, 6, 8  # labeled source texts, unlabeled ones, labeled target texts, texts in a batch


class Bench:
    """A source and a target set, batches of them, and updates that are literally theta - rate * factor * gradient.

    `few`: labeled target texts join the labeled rows, at their end. The model is in evaluation mode until a method changes
    that; make it with `dropout=False` to have none in training mode either.
    """

    def __init__(self, kind, encoder, learning_rate=0.05, steps=12, seed=0, few=False, dropout=True, frozen=0, **changes):
        torch.manual_seed(seed)
        self.model = TextModel.create(encoder, CLASSES, max_length=16, attention="eager").to(torch.float32)
        settings = kind.Settings(**changes)
        kind.prepare_model(self.model, settings)
        if not dropout:
            for module in self.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        self.model.freeze(frozen)
        self.rate, self.steps, self.draw = learning_rate, steps, np.random.default_rng(seed)
        labeled, target = make_texts(SOURCE, 5) + (make_texts(FEW, 7, 0.5) if few else []), make_texts(TARGET, 6, 0.5)
        self.source_tokens = self.model.encode(load_corpus(([t for t, _ in labeled], [c for _, c in labeled]), labeled=True))
        self.labels = np.array([CLASSES.index(label) for _, label in labeled])
        self.target_tokens = self.model.encode(load_corpus([text for text, _ in target], labeled=False))
        self.target_labels = torch.tensor([CLASSES.index(label) for _, label in target])
        self.context = Context(
            steps, TARGET, 2, torch.Generator().manual_seed(seed), lambda: learning_rate, source_size=len(labeled)
        )
        self.context.target_labeled_rows = torch.arange(SOURCE, len(labeled))
        if few:
            self.context.target_labeled = lambda step: self.source_batch(np.arange(SOURCE, len(labeled)))
        self.method = kind(self.model, settings, self.context)
        self.model.eval()

    def source_batch(self, rows) -> Batch:
        rows = np.asarray(rows)
        labels = torch.from_numpy(self.labels[rows])
        return Batch(self.model.collate(self.source_tokens, rows), labels, torch.from_numpy(rows))

    def target_batch(self, rows) -> Batch:
        rows = np.asarray(rows)
        return Batch(self.model.collate(self.target_tokens, rows), None, torch.from_numpy(rows))

    def batches(self) -> tuple[Batch, Batch]:
        rows, held = self.draw.permutation(TARGET)[:SIZE], self.draw.permutation(len(self.labels))[:SIZE]
        return self.source_batch(held), self.target_batch(rows)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All that is trained: the model's, and the method's own parts as "part.name"."""
        parts = {f"{part}.{name}": p for part, module in self.method.modules().items() for name, p in module.named_parameters()}
        return {**self.model.trainable(), **parts}

    def update(self, loss, before_step=None, gradients=None) -> None:
        parameters = self.parameters()
        found = [None] * len(parameters)
        if loss is not None:
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        if before_step is not None:
            before_step()
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
                known = (gradients or {}).get(name)
                gradient = known if gradient is None else gradient if known is None else gradient + known
                if gradient is not None:
                    parameter -= self.rate * self.method.learning_rate_factor(name) * gradient

    def step(self, number=0, source=None, target=None):
        """One step of the method, on batches drawn for it unless they are given."""
        if source is None or target is None:
            source, target = self.batches()
        return self.method.step(number, source, target, self.update)

    def train_source(self, steps=60) -> None:
        """Some plain steps on the source loss, for a model that knows something."""
        for _ in range(steps):
            source, _ = self.batches()
            self.update(self.method.cross_entropy(self.model(source.inputs), source.labels))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters().items()}


@contextlib.contextmanager
def stopped_after(updates: int, stage: str = "adapt"):
    """The run inside is interrupted, and must be, when it has made so many updates in that stage."""
    update, seen = Trainer.update, []

    def stopping(self, *arguments, **named):
        seen.append(self.name)
        if seen.count(stage) > updates:
            raise KeyboardInterrupt
        update(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "update", stopping)
        yield
