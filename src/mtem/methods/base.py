"""The contract of a method, and small functions that several methods share.

A method is one file: a settings dataclass and a subclass of :class:`Method`. It sees batches and a model, never a file or a
text. How to add one is described in :mod:`mtem.methods.registry` and in docs/adding-a-method.md.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.methods.alignment import Alignment
from mtem.models.base import Inputs, Model

# What a step logs, by name. Tensors are read only when they are written to the history.
StepLog: TypeAlias = dict[str, Tensor | float]


class Batch(NamedTuple):
    """A batch of examples.

    Attributes
    ----------
    inputs : mapping of str to Tensor
        The inputs of the model.
    labels : Tensor or None
        The classes, integers ``[N]``; None for unlabeled examples.
    rows : Tensor
        The row of each example in its corpus, integers ``[N]``.
    """

    inputs: Inputs
    labels: Tensor | None
    rows: Tensor

    def require_labels(self) -> Tensor:
        """Return the labels of a labeled batch.

        Raises
        ------
        ValueError
            If the batch is unlabeled.
        """
        if self.labels is None:
            raise ValueError("expected a labeled batch, got an unlabeled one")
        return self.labels


@dataclasses.dataclass
class Context:
    """What a method knows of its run.

    Attributes
    ----------
    steps : int
        The number of steps of the run.
    target_size : int
        The number of unlabeled target examples.
    classes : int
        The number of classes.
    generator : torch.Generator
        On the CPU, so that every device draws the same. Methods draw from it, or from torch's own generator.
    learning_rate : callable
        Returns the current learning rate of the model.
    source_size : int
        The number of labeled examples, those of the target included. The rows of the source batches are numbers below it.
    target_labeled_rows : Tensor or None
        The rows, among these, of the labeled target examples.
    target_labeled : callable or None
        Returns the labeled target examples of the labeled batch of a step, as a batch. None: there are none.
    outer : callable or None
        Returns labeled source examples that no weight is trained on, as a batch for a step. None: there are none.
    class_weights : Tensor or None
        The class weights of the cross-entropy ``[K]``.
    align : Alignment
        Gives the logits that pseudo labels are made from the assumed class shares.
    ema_decay : float
        The decay of the average of the weights, which is the teacher and is saved in the end; 0: there is none.
    view, view_strength : str, float
        The view of the texts in which pseudo labels are learned, and the share of the words that it changes.
    """

    steps: int
    target_size: int
    classes: int
    generator: torch.Generator
    learning_rate: Callable[[], float]
    source_size: int = 0
    target_labeled_rows: Tensor | None = None
    target_labeled: Callable[[int], Batch] | None = None
    outer: Callable[[int], Batch] | None = None
    class_weights: Tensor | None = None
    align: Alignment = dataclasses.field(default_factory=Alignment)
    ema_decay: float = 0.0
    view: str = "dropout"
    view_strength: float = 0.0
    view_radius: float = 0.0

    def is_target_labeled(self, rows: Tensor) -> Tensor:
        """Return which rows of a source batch are labeled target examples, bool ``[N]``."""
        if self.target_labeled_rows is None or not len(self.target_labeled_rows):
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        return (rows.unsqueeze(1) == self.target_labeled_rows).any(dim=1)


class Update(Protocol):
    """A function that runs a backward pass, clips the gradients and takes one optimizer step."""

    def __call__(
        self, loss: Tensor | None, before_step: Callable[[], None] | None = None, gradients: dict[str, Tensor] | None = None
    ) -> None:
        """Update the model and the method's modules.

        Parameters
        ----------
        loss : Tensor or None
            The loss; None if all gradients are in `gradients`.
        before_step : callable, optional
            Called after the backward pass, before the optimizer step.
        gradients : dict of str to Tensor, optional
            Gradients of the model's parameters that are already known; added to those of the loss.
        """


class Method(abc.ABC):
    """One way to train. Subclasses set the class attributes and define `step`.

    Parameters
    ----------
    model : Model
        The model to train.
    settings : object
        An instance of `Settings`.
    context : Context
        What the method knows of its run.

    Attributes
    ----------
    name : str
        The name of the method on the command line.
    summary : str
        One line for the list of methods.
    paper : str
        The publication of the method.
    needs_target_labels : bool
        Whether the method cannot run without labeled target examples.
    learns_in_view : bool
        Whether the method learns labels in the run's view of the texts (`student_view`, `perturbed_view`).
    replayable : bool
        Whether `step` may be captured once on a GPU and replayed: all that the CPU computes in it reaches the device through
        :mod:`mtem.capture`, it reads no number from the device, and what it keeps between steps it changes in place.
    Settings : type
        The settings dataclass of the method, its fields made with :func:`mtem.settings.setting`.
    presets : dict
        Preset name -> settings that differ from the defaults. Names of training settings are allowed too.
    average : dict of str to Tensor
        The averaged weights by parameter name; empty if the run has none. The trainer changes them after each step.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    needs_target_labels: ClassVar[bool] = False
    learns_in_view: ClassVar[bool] = False
    replayable: ClassVar[bool] = False
    Settings: ClassVar[type]
    presets: ClassVar[dict[str, dict[str, Any]]] = {"recommended": {}, "paper": {"ema_decay": 0.0}}

    # Subclasses declare the type of their settings: `settings: MtemSettings`.
    settings: Any

    def __init__(self, model: Model, settings: Any, context: Context) -> None:
        self.model, self.settings, self.context = model, settings, context
        self.average: dict[str, Tensor] = {}
        if context.ema_decay:
            self.average = {name: parameter.detach().clone() for name, parameter in model.trainable().items()}

    @abc.abstractmethod
    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Train for one step.

        Parameters
        ----------
        number : int
            The number of the step, from 0.
        source : Batch
            Labeled examples, those of the target included.
        target : Batch
            Unlabeled target examples.
        update : Update
            Updates the weights; called as often as the method needs.

        Returns
        -------
        dict of str to Tensor or float
            What is logged. Tensors are read only when they are written to the history.
        """

    @classmethod  # noqa: B027
    def prepare_model(cls, model: Model, settings: Any) -> None:
        """Change the new model before any training, for methods that need another kind of classifier."""

    @classmethod
    def unused(cls, settings: Any) -> dict[str, str]:
        """Return the settings that others leave without effect, each with the one that does; users are told if they give one."""
        return {}

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, with the run's class weights if there are any."""
        return cross_entropy(logits, labels, self.context.class_weights)

    def modules(self) -> dict[str, nn.Module]:
        """Return trainable modules beside the model, by name (a discriminator, for example)."""
        return {}

    def learning_rate_factor(self, name: str) -> float:
        """Return the factor of the learning rate of a parameter; those of `modules()` are named "module.parameter"."""
        return 1.0

    @torch.no_grad()
    def teacher_logits(self, inputs: Inputs) -> Tensor:
        """Return the logits that pseudo labels are made of: of the averaged weights if there are any, without dropout."""
        with without_dropout(self.model), self.model.labeling():
            return functional(self.model, self.average, inputs) if self.average else self.model(inputs)

    def student_view(self, inputs: Inputs) -> Inputs:
        """Return the run's view of the texts, in which the model learns the teacher's labels."""
        if not self.context.view_strength:
            return inputs
        return self.model.augment(inputs, self.context.view, self.context.view_strength, self.context.generator)

    def perturbed_view(self, inputs: Inputs, labels: Tensor) -> Inputs:
        """Return a view with noise in its embeddings, if the run has any: of the norm `view_radius`, against the labels.

        Parameters
        ----------
        inputs : mapping of str to Tensor
            A prepared batch, such as `student_view` returns.
        labels : Tensor
            The labels that are to be learned in it, ``[N]``.
        """
        if not self.context.view_radius:
            return inputs
        with without_dropout(self.model):
            noise = self.model.noise_gradient(inputs, lambda logits, _: F.cross_entropy(logits, labels, reduction="sum"))
        return self.model.with_noise(inputs, self.model.rescaled_noise(inputs, noise, self.context.view_radius))

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the averaged weights towards those of the model."""
        if self.average:
            pairs = [(self.average[name], parameter.detach()) for name, parameter in self.model.trainable().items()]
            averages, current = zip(*pairs, strict=True)
            torch._foreach_lerp_(averages, current, 1 - self.context.ema_decay)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to evaluate and to save: the average, or those of the model."""
        return self.average or {name: parameter.detach() for name, parameter in self.model.trainable().items()}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs beside the model, the optimizer and the random states."""
        return {f"average.{name}": value for name, value in self.average.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, value in self.average.items():
            value.copy_(state[f"average.{name}"])

    def meta_loss(self, source: Batch, target: Batch) -> float | None:
        """Return the meta-validation loss; None for methods that have none."""
        return None

    def indexes(self) -> Tensor | None:
        """Return the entropy index of every target example; None for methods that have none."""
        return None


def functional(model: nn.Module, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
    """Return the logits of a model with other values in the place of its trainable parameters.

    Parameters
    ----------
    model : nn.Module
        The model.
    parameters : dict of str to Tensor
        The values by parameter name.
    inputs : mapping of str to Tensor
        The inputs of the model.
    """
    return cast(Tensor, torch.func.functional_call(model, parameters, (inputs,)))


def cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of a batch, weighted by class if `class_weights` are given."""
    return F.cross_entropy(logits, labels, weight=class_weights)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the ``with`` block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def reverse_gradient(values: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return the values unchanged; in the backward pass their gradient is multiplied by ``-scale``."""
    return cast(Tensor, _ReverseGradient.apply(values, scale))  # type: ignore[no-untyped-call]


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None
