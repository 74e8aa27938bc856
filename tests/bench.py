"""A method on a tiny BERT with plain gradient steps: shared by the tests of the methods."""

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
SOURCE, TARGET, TARGET_LABELED, SIZE = 40, 30, 6, 8  # numbers of source, target and labeled target texts, and of a batch
RECIPE = {"ema_decay": 0.0, "view": "mixed", "view_strength": 0.3, "view_radius": 0.0}  # of the run, for all methods


class Bench:
    """A source and a target set, batches of them, and updates that are literally theta - rate * factor * gradient.

    With `target_labeled`, labeled target texts are the last of the labeled rows. The model is in evaluation mode until a method
    changes it. With `dropout=False` there is no dropout in training mode either. `changes` are settings of the method, or of the
    recipe.
    """

    def __init__(
        self, method_cls, encoder, learning_rate=0.05, steps=12, seed=0, target_labeled=False, dropout=True, frozen=0, **changes
    ):
        recipe = {name: changes.pop(name, value) for name, value in RECIPE.items()}
        torch.manual_seed(seed)
        self.model = TextModel.create(encoder, CLASSES, max_length=16, attention="eager").to(torch.float32)
        settings = method_cls.Settings(**changes)
        method_cls.prepare_model(self.model, settings)
        if not dropout:
            for module in self.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        self.model.freeze(frozen)
        self.rate, self.steps, self.draw = learning_rate, steps, np.random.default_rng(seed)
        labeled, target = make_texts(SOURCE, 5), make_texts(TARGET, 6, 0.5)
        if target_labeled:
            labeled += make_texts(TARGET_LABELED, 7, 0.5)
        self.source_tokens = self.model.encode(load_corpus(([t for t, _ in labeled], [c for _, c in labeled]), labeled=True))
        self.labels = np.array([CLASSES.index(label) for _, label in labeled])
        self.target_tokens = self.model.encode(load_corpus([text for text, _ in target], labeled=False))
        self.target_labels = torch.tensor([CLASSES.index(label) for _, label in target])
        self.context = Context(
            steps, TARGET, 2, torch.Generator().manual_seed(seed), lambda: learning_rate, source_size=len(labeled), **recipe
        )
        self.context.target_labeled_rows = torch.arange(SOURCE, len(labeled))
        if target_labeled:
            self.context.target_labeled = lambda step: self.source_batch(np.arange(SOURCE, len(labeled)))
        self.method = method_cls(self.model, settings, self.context)
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
        """All trained parameters: those of the model, and those of the method's modules as "module.name"."""
        own = {f"{part}.{name}": p for part, module in self.method.modules().items() for name, p in module.named_parameters()}
        return {**self.model.trainable(), **own}

    def update(self, loss, before_step=None, gradients=None) -> None:
        parameters = self.parameters()
        computed = [None] * len(parameters)
        if loss is not None:
            computed = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        if before_step is not None:
            before_step()
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), computed, strict=True):
                known = (gradients or {}).get(name)
                gradient = known if gradient is None else gradient if known is None else gradient + known
                if gradient is not None:
                    parameter -= self.rate * self.method.learning_rate_factor(name) * gradient

    def step(self, number=0, source=None, target=None):
        """One step of the method, on batches drawn for it unless they are given."""
        if source is None or target is None:
            source, target = self.batches()
        log = self.method.step(number, source, target, self.update)
        self.method.update_average()
        return log

    def train_source(self, steps=60) -> None:
        """Some plain steps on the source loss, so that the model has learned something."""
        for _ in range(steps):
            source, _ = self.batches()
            self.update(self.method.cross_entropy(self.model(source.inputs), source.labels))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters().items()}


@contextlib.contextmanager
def stopped_after(updates: int, stage: str = "adapt"):
    """Interrupt the run inside the block after a number of updates of a stage; fails if the run ends before."""
    update, seen = Trainer.update, []

    def stopping(self, *arguments, **named):
        seen.append(self.name)
        if seen.count(stage) > updates:
            raise KeyboardInterrupt
        update(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "update", stopping)
        yield
