"""The contract of a method, and where they are found by name.

A method is one file: a settings dataclass and a subclass of `Method`. It sees batches and a model, never a file. To add one,
write the file and name it in `METHODS` (docs/adding-a-method.md), or give its path in the place of a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.methods.alignment import Alignment


class Batch(NamedTuple):
    """Inputs for the model, labels where known, and which rows of the corpus they are."""

    inputs: dict[str, Tensor]
    labels: Tensor | None
    rows: Tensor


@dataclasses.dataclass
class Context:
    """What a method may know of the run around it."""

    steps: int  # how many steps there will be
    target_size: int  # how many unlabeled examples
    classes: int
    generator: torch.Generator  # on the CPU, so that every device draws the same
    learning_rate: Callable[[], float]  # the current learning rate of theta
    source_size: int = 0  # how many labeled examples, the target's among them; the source batches' rows count through them
    target_labeled_rows: Tensor | None = None  # which of those rows are the target's
    target_labeled: Callable[[int], Batch] | None = None  # batches of those alone, by step number; None: there are none
    class_weights: Tensor | None = None  # of the cross-entropy
    align: Alignment = dataclasses.field(default_factory=Alignment)  # scores that pseudo labels are to be drawn from

    def is_target_labeled(self, rows: Tensor) -> Tensor:
        """Which rows of the source batches are the target's own, bool [N]."""
        if self.target_labeled_rows is None or not len(self.target_labeled_rows):
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        return (rows.unsqueeze(1) == self.target_labeled_rows).any(dim=1)


class Update(Protocol):
    """Backward, clipping, one optimizer step.

    `before_step` is called after the backward pass, before the step. `gradients` of the model's parameters that are known already
    are added to those of the loss, which may then be None.
    """

    def __call__(
        self, loss: Tensor | None, before_step: Callable[[], None] | None = None, gradients: dict[str, Tensor] | None = None
    ) -> None: ...


class Method:
    """One way to train. Subclasses set the class attributes and write `step`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    needs_target_labels: ClassVar[bool] = False
    Settings: ClassVar[type]
    # preset name -> settings that differ from the defaults; names of the training's settings are allowed too
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": {}}

    def __init__(self, model: Any, settings: Any, context: Context) -> None:
        self.model, self.settings, self.context = model, settings, context

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> dict[str, Tensor | float]:
        """One step; returns what is worth logging (tensors are read only when they are logged)."""
        raise NotImplementedError

    @classmethod
    def prepare_model(cls, model: Any, settings: Any) -> None:
        """Change the freshly made model, before any training, where the method has a classifier of its own kind."""

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch, with the run's class weights if it has them."""
        return cross_entropy(logits, labels, self.context.class_weights)

    def modules(self) -> dict[str, nn.Module]:
        """Trainable parts beside the model (a discriminator, say)."""
        return {}

    def learning_rate_factor(self, name: str) -> float:
        """What multiplies the learning rate of a parameter; those of `modules()` are called "part.name"."""
        return 1.0

    def weights(self) -> dict[str, Tensor]:
        """The weights to judge and to keep: the model's, unless the method averages."""
        return {name: parameter.detach() for name, parameter in self.model.trainable().items()}

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beside model, optimizer and random states."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`."""

    def meta_loss(self, source: Batch, target: Batch) -> float | None:
        """The meta-validation loss, for methods that have one."""
        return None

    def indexes(self) -> Tensor | None:
        """The entropy index of every target text, for methods that have them."""
        return None


def functional(model: nn.Module, parameters: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """The model's logits with other weights in the place of its trainable ones."""
    return torch.func.functional_call(model, parameters, (inputs,))


def cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    return F.cross_entropy(logits, labels, weight=class_weights)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


def reverse(values: Tensor, scale: float = 1.0) -> Tensor:
    """The values themselves; their gradient comes back multiplied by -scale."""
    return _Reverse.apply(values, scale)
