"""What a model is to the methods and the trainer: a function from a batch to logits, with a head and views of its input.

A method may use what stands here and nothing else, so that it serves texts and reply trees alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtem.data.threads import Thread

Inputs = Mapping[str, Tensor]


class CosineHead(nn.Module):
    r"""A classifier that sees only the direction of the features: :math:`W f / (T \lVert f \rVert)`.

    `weight` is neither normalised nor accompanied by a learned bias; `bias` is zero and there for corrections of the prior.
    """

    def __init__(self, linear: nn.Linear, temperature: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.temperature = linear.in_features, linear.out_features, temperature
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.register_buffer("bias", linear.weight.detach().new_zeros(self.out_features))

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):  # a small temperature magnifies half precision's rounding
            directions = F.normalize(features.to(self.weight.dtype), dim=-1)
            return F.linear(directions, self.weight) / self.temperature + self.bias

    # A linear layer W' f with W' = W / (T sqrt(d)) has the same likeliest class for every f as long as the bias is zero, and
    # about the same confidence where the norm of f is about sqrt(d). That is what is saved, so that others can read the model.

    def folded(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight / (self.temperature * self.in_features**0.5))
            linear.bias.copy_(self.bias)
        return linear

    @classmethod
    def unfolded(cls, linear: nn.Linear, temperature: float) -> CosineHead:
        head = cls(linear, temperature)
        with torch.no_grad():
            head.weight.mul_(temperature * head.in_features**0.5)
            if linear.bias is not None:
                head.bias.copy_(linear.bias)
        return head


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """For models that have none of their own."""


class Model(nn.Module):
    """The part of the contract that does not depend on what an example is.

    Subclasses add

    ``forward(inputs) -> logits``
        float32 ``[N, K]``; ``inputs["noise"]``, if there, is added to what `input_embeddings` returns.
    ``input_embeddings(inputs) -> Tensor``, ``embedding_norms(values, inputs) -> Tensor``
        the continuous values that stand for the examples (input embeddings), and each example's norm of such values,
        in a shape that divides them.
    ``augment(inputs, kind, share, generator) -> inputs``
        another view of the same examples.
    ``prepare(inputs) -> inputs``
        whatever is constant in the trainable parameters, computed once.
    ``default_learning_rates() -> (source, adaptation)``
        learning rates where the settings give none.
    ``classes``, ``head_path``, ``encode``, ``encode_texts``, ``collate``, ``save``, ``load``, ``freeze``, ``depths``, ``differentiable_attention``
        as in `models.text`.
    """

    head_path: str
    threads: ClassVar[bool] = False  # whether it sees the replies of a thread
    Settings: ClassVar[type] = NoSettings
    # of the training: what suits this model better than the general default
    defaults: ClassVar[dict[str, Any]] = {}
    # preset name -> what the papers give for this model, in place of what a method's preset of that name says
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # of the model card
    library_name: ClassVar[str]
    pipeline_tag: ClassVar[str | None] = None
    card_title: ClassVar[str]

    @classmethod
    def card_usage(cls, record: Mapping[str, Any]) -> str:
        """Return how to use a saved model, for its card."""
        raise NotImplementedError

    @classmethod
    def warnings_for(cls, corpus: Any) -> list[str]:
        """Return what a user should know about giving this corpus to such a model."""
        return []

    def __init__(self) -> None:
        super().__init__()
        self.precision: torch.dtype | None = None  # autocast type, or None for full precision
        self.frozen_layers = 0

    @property
    def head(self) -> Any:
        """The last layer, from features to one score per class."""
        return self.get_submodule(self.head_path)

    @head.setter
    def head(self, module: nn.Module) -> None:
        parent, _, name = self.head_path.rpartition(".")
        setattr(self.get_submodule(parent), name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "head":  # torch would register a module of that name before the property is asked
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def head_names(self) -> set[str]:
        """The names of the head's trainable parameters among those of the model."""
        return {name for name in self.trainable() if name.startswith(self.head_path + ".")}

    def logits_and_features(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Logits, and what the head sees of each example; both with their graph."""
        seen: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            logits = self(inputs)
        finally:
            handle.remove()
        features = seen[-1]
        if features.dim() == 3:  # a head that classifies every position and pools afterwards
            features = features[:, 0]
        return logits, features.float()

    def split(self, inputs: Inputs, pieces: int) -> list[tuple[Inputs, slice]]:
        """The batch in up to so many pieces, each with the examples it holds; models that cannot cut it leave it whole."""
        return [(inputs, slice(None))]

    def probe(self) -> Inputs | None:
        """Two tiny examples, for a look at how the layers are called; None: the layers are not called example by example."""
        return None

    def encode_threads(self, trees: Sequence[Thread]) -> Any:
        """A handful of threads, in memory; a model of texts sees their roots."""
        return self.encode_texts([tree.texts[0] for tree in trees])

    def unit_directions(self, values: Tensor, inputs: Inputs) -> Tensor:
        """The values divided by each example's norm: directions of length 1 (an example of zeros stays one)."""
        norms = self.embedding_norms(values, inputs)
        return values * torch.where(norms > 0, 1 / norms, 0.0)

    def train(self, mode: bool = True) -> Model:
        """As ever, but without a walk through all layers when nothing changes: methods say the mode several times a step."""
        network = getattr(self, "network", self)
        return self if self.training is mode and network.training is mode else super().train(mode)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        # One region per forward: autocast keeps copies of the weights while it is open, and they change between forwards.
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)
