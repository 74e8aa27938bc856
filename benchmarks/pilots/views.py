"""A pilot's method: FixMatch whose strong view is also shortened to a part of the review, or perturbed adversarially.

With `crop` a run of neighbouring words is kept before the run's own view is taken: a share between 1 - crop and 1 of them, from
a random place. `radius` adds the perturbation of the embeddings that raises the loss of the label most, with that norm relative
to the embeddings'.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem.capture import draws
from mtem.methods.base import Batch, StepLog, Update, without_dropout
from mtem.methods.fixmatch import FixMatch, FixMatchSettings, confident_labels, masked_cross_entropy
from mtem.models import augment
from mtem.models.base import Inputs
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class ViewsSettings(FixMatchSettings):
    """What is done to the strong view."""

    crop: float = setting(0.0, "largest share of the words that is cut away", low=0.0, high=1.0)
    radius: float = setting(0.0, "norm of the adversarial perturbation, relative to the embeddings", low=0.0)


class Views(FixMatch):
    """FixMatch with a shortened or perturbed strong view."""

    name = "views"
    summary = "confident labels, learned from parts of the texts or from perturbed ones"
    paper = "a pilot"
    Settings = ViewsSettings
    settings: ViewsSettings

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Label the texts, then take one step on both batches."""
        settings, model = self.settings, self.model
        plain = model.prepare(target.inputs)
        strong = self.student_view(self.cropped(plain) if settings.crop else plain)
        labels, confident = confident_labels(self.context.align(self.teacher_logits(plain)), settings.threshold)
        model.train()
        source_loss = self.cross_entropy(model(source.inputs), source.require_labels())
        if settings.radius:
            with without_dropout(model):
                noise = model.noise_gradient(strong, lambda logits, _: F.cross_entropy(logits, labels, reduction="sum"))
            strong = model.with_noise(strong, model.rescaled_noise(strong, noise, settings.radius))
        consistency_loss = masked_cross_entropy(model(strong), labels, confident)
        update(source_loss + settings.weight * consistency_loss)
        return {"source_loss": source_loss.detach(), "confident_share": confident.float().mean()}

    def cropped(self, inputs: Inputs) -> Inputs:
        """Return a run of neighbouring words of each text."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        words = augment.word_numbers(ids, mask, *self.model._vocabulary())  # type: ignore[attr-defined]
        count = (words.amax(dim=1, keepdim=True) + 1).clamp_min(1)
        drawn = draws(lambda: torch.rand(len(ids), 2, generator=self.context.generator), ids.device)
        length = (count * (1 - self.settings.crop * drawn[:, :1])).ceil().clamp_min(1)
        start = ((count - length + 1) * drawn[:, 1:]).floor()
        kept = mask.bool() & ((words < 0) | ((words >= start) & (words < start + length)))
        return compact(ids, kept, mask, self.model.tokenizer.pad_token_id or 0)  # type: ignore[attr-defined]


def compact(ids: Tensor, kept: Tensor, mask: Tensor, padding: int) -> Inputs:
    """Return the tokens that are kept, moved together."""
    order = torch.argsort((~kept).long(), dim=1, stable=True)
    kept = kept.gather(1, order)
    return {"input_ids": ids.gather(1, order).masked_fill(~kept, padding), "attention_mask": kept.to(mask.dtype)}
