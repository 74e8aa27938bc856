"""Back to the beginning of a step, for a step that ran out of memory: it is taken again with the batch in smaller parts."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtem.methods.base import Batch
from mtem.models.base import Model
from mtem.training import checkpoints

if TYPE_CHECKING:
    from mtem.training.trainer import Trainer


class StepStart:
    """What a step begins with, as far as a step that fails can have changed it.

    Weights and optimizer change only in an update. A method that updates once in a step fails before it, if at all, so they are
    copied only for methods that update more often.

    Parameters
    ----------
    trainer
        Whose step is about to begin.
    copy
        Whether to copy weights and optimizer too.
    """

    def __init__(self, trainer: Trainer, copy: bool) -> None:
        self.trainer = trainer
        self.random = checkpoints.random_state(trainer.method.context.generator)
        self.training = trainer.method.model.training
        self.known = set(trainer.optimizer.state)
        self.weights: list[Tensor] | None = None
        self.state: dict[str, Tensor] = {}
        if copy:
            self.weights = [parameter.detach().clone() for parameter in trainer.parameters]
            self.state = {name: value.clone() for name, value in trainer.state().items()}

    @torch.no_grad()
    def restore(self, updates: int) -> bool:
        """Put everything back after so many updates; return whether that was possible."""
        trainer = self.trainer
        trainer.optimizer.zero_grad(set_to_none=True)
        for parameter in set(trainer.optimizer.state) - self.known:
            del trainer.optimizer.state[parameter]
        if updates:
            if self.weights is None:
                return False
            for parameter, value in zip(trainer.parameters, self.weights, strict=True):
                parameter.copy_(value)
            trainer.load_state(self.state)
        trainer.method.model.train(self.training)
        checkpoints.restore_random_state(self.random, trainer.method.context.generator)
        return True


def use_less_memory(model: Model, batch: Batch) -> str | None:
    """Let the model pass a batch in smaller parts, or keep less of each layer; return what is set now, None if nothing helps."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    parts, size = model.microbatches, len(batch.rows)
    if parts < size and len(model.split(batch.inputs, 2)) > 1:
        model.save_memory(min(size, 2 * parts), model.activation_checkpointing)
        return f"microbatches={model.microbatches}"
    if not model.activation_checkpointing and model.has_layers:
        model.save_memory(parts, True)
        return "activation_checkpointing=true"
    return None
