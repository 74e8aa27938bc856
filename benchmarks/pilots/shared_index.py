r"""A pilot: self-training with one rule for the entropy indexes of all texts instead of a number for each.

The student sees a masked, shortened and shuffled view of a text and learns the label that an averaged teacher gives the text
as it is, with weight :math:`p^{\psi_i - 1}`. `trust` says where :math:`\psi_i` comes from:

- ``fixed``: `index_initial` for all;
- ``threshold``: 1, and only labels that the teacher is sure of count;
- ``per-text``: a number for each text, moved by the sign of its gradient, as in MTEM's preset;
- ``shared``: :math:`\psi_i = 1 + \mathrm{softplus}(w \cdot \phi_i)`, with :math:`\phi_i` blind to which class is predicted (1,
  the teacher's confidence, the student's agreement on its view, how stable the label was over visits), and w learned through the
  same exact gradients.

`outer` says which labels the outer loop uses: ``source`` (the batch that is also trained on) or ``kept`` (the labeled target
texts' rows, which a pilot fills with source texts that are kept out of the training; theta never learns from them here).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem import tsallis
from mtem.metagrad import layerwise
from mtem.methods.base import Batch, Context, StepLog, Update
from mtem.methods.mtem import Mtem, MtemSettings
from mtem.models.base import Model
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class PilotSettings(MtemSettings):
    """What the pilot compares."""

    trust: str = setting("fixed", "where the index comes from", choices=("fixed", "threshold", "per-text", "shared"))
    outer: str = setting("source", "whose labels the outer loop uses", choices=("source", "kept"))
    threshold: float = setting(0.95, "smallest probability of a label, with trust=threshold", low=0.0, high=1.0)
    shared_rate: float = setting(0.02, "learning rate of w (Adam)", low=0.0)
    start: float = setting(-4.0, "constant in w at the start: psi - 1 = softplus(start)")


class Pilot(Mtem):
    """See the module docstring."""

    name = "pilot"
    summary = "pilot: one rule of trust for all texts"
    Settings = PilotSettings
    settings: PilotSettings
    presets = {"recommended": {"sampling": False, "ema_decay": 0.99, "index_initial": 1.0, "index_low": 1.0}, "paper": {}}  # noqa: RUF012
    current: Any = None  # the last instance, for observers of the run

    def __init__(self, model: Model, settings: PilotSettings, context: Context) -> None:
        super().__init__(model, settings, context)
        assert self.recorder is not None
        device = model.device
        self.w = torch.tensor([settings.start, 0.0, 0.0, 0.0], device=device)
        self.moments = torch.zeros(2, 4, device=device)
        self.updates = 0
        self.previous = torch.full((context.target_size,), -1, device=device)
        self.stable = torch.ones(context.target_size, device=device)
        Pilot.current = self

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        settings = self.settings
        kept = self.context.is_target_labeled(source.rows)
        labels, sure = self.teacher_labels(target)
        rows = target.rows
        visited = self.previous[rows] >= 0
        unchanged = (self.previous[rows] == labels).float()
        self.stable[rows] = torch.where(visited, 0.7 * self.stable[rows] + 0.3 * unchanged, self.stable[rows])
        self.previous[rows] = labels

        student = self.model.prepare(self.student_view(target.inputs))
        learned = settings.trust in ("per-text", "shared")
        outer = layerwise.source_gradient(self.recorder, lambda: [self.outer_loss(source, kept)]) if learned else None
        self.model.train()
        recording = self.recorder.record(lambda: self.model(student), len(rows), save_memory=False)
        log_probs = torch.log_softmax(recording.logits, dim=-1)
        recording.backward(tsallis.surprisal(log_probs, labels))
        log_probs = log_probs.detach()
        phi = self.phi(sure, log_probs.gather(1, labels[:, None])[:, 0].exp(), self.stable[rows])
        if settings.trust == "shared":
            self.index[rows] = 1 + F.softplus(phi @ self.w)
        if outer is not None:
            meta = layerwise.meta_gradient(recording, log_probs, labels, self.index[rows], outer, self.virtual_learning_rate())
            if settings.trust == "per-text":
                self.index[rows] = self.updated_index(self.index[rows], meta.gradient, number)
            else:
                self.move_shared(self.through(meta.gradient, phi))
                self.index[rows] = 1 + F.softplus(phi @ self.w)
        weights = tsallis.pseudo_weight(log_probs, labels, self.index[rows])
        if settings.trust == "threshold":
            weights = weights * (sure >= settings.threshold)
        gradients = recording.gradient(weights / len(rows))
        self.model.train()
        losses = F.cross_entropy(self.model(source.inputs), source.labels, reduction="none")
        ours = (~kept).float()
        loss = (losses * ours).sum() / ours.sum().clamp_min(1)
        update(loss, gradients=gradients)
        return {"source_loss": loss.detach(), "weight": weights.mean(), "index": self.index[rows].mean()}

    @torch.no_grad()
    def teacher_labels(self, target: Batch) -> tuple[Tensor, Tensor]:
        logits = self.context.align(self.teacher_logits(self.model.prepare(target.inputs)))
        sure, labels = torch.softmax(logits, dim=-1).max(dim=-1)
        return labels, sure

    def outer_loss(self, source: Batch, kept: Tensor) -> Tensor:
        """Without dropout, over the kept rows or over all."""
        self.model.eval()
        losses = F.cross_entropy(self.model(self.model.prepare(source.inputs)), source.labels, reduction="none")
        mass = kept.float() if self.settings.outer == "kept" else torch.ones_like(losses)
        return (losses * mass).sum() / mass.sum().clamp_min(1)

    @staticmethod
    def phi(sure: Tensor, agreement: Tensor, stable: Tensor) -> Tensor:
        """[N, 4], of about unit size; the same for either class."""
        logit = torch.logit(sure.clamp(1e-4, 1 - 1e-4))
        return torch.stack([torch.ones_like(sure), (logit - 3) / 2, (agreement - 0.8) / 0.2, (stable - 1) * 4], dim=1)

    def through(self, gradient: Tensor, phi: Tensor) -> Tensor:
        """The chain rule: dL/dw from dL/dpsi of each text."""
        return (gradient * torch.sigmoid(phi @ self.w)) @ phi

    def move_shared(self, gradient: Tensor) -> None:
        self.updates += 1
        self.moments[0].lerp_(gradient, 0.1)
        self.moments[1].lerp_(gradient.square(), 0.01)
        first, second = self.moments[0] / (1 - 0.9**self.updates), self.moments[1] / (1 - 0.99**self.updates)
        self.w = self.w - self.settings.shared_rate * first / (second.sqrt() + 1e-16)

    def signal(self, target: Batch, outers: list[Batch]) -> dict[str, Any]:
        """Return how far the gradients of disjoint outer batches agree for the same texts: by text, and in w."""
        labels, sure = self.teacher_labels(target)
        student = self.model.prepare(self.student_view(target.inputs))
        per_text, shared = [], []
        for batch in outers:
            all_rows = torch.ones(len(batch.rows), dtype=torch.bool, device=batch.rows.device)
            outer = layerwise.source_gradient(self.recorder, lambda batch=batch, rows=all_rows: [self.outer_loss(batch, rows)])
            self.model.eval()
            recording = self.recorder.record(lambda: self.model(student), len(target.rows), save_memory=False)
            log_probs = torch.log_softmax(recording.logits, dim=-1)
            recording.backward(tsallis.surprisal(log_probs, labels))
            log_probs = log_probs.detach()
            phi = self.phi(sure, log_probs.gather(1, labels[:, None])[:, 0].exp(), self.stable[target.rows])
            index = torch.full_like(sure, 1.5)  # where the derivative is not yet flat
            gradient = layerwise.meta_gradient(recording, log_probs, labels, index, outer, 1.0).gradient
            per_text.append(gradient)
            shared.append(gradient @ phi)
        pairs = [(a, b) for a in range(len(outers)) for b in range(a)]
        cosine = lambda x, y: float(F.cosine_similarity(x, y, dim=0))  # noqa: E731
        return {
            "text_correlation": [
                round(float(torch.corrcoef(torch.stack([per_text[a], per_text[b]]))[0, 1]), 3) for a, b in pairs
            ],
            "text_sign": round(
                sum(float((per_text[a].sign() == per_text[b].sign()).float().mean()) for a, b in pairs) / len(pairs), 3
            ),
            "shared_cosine": [round(cosine(shared[a], shared[b]), 3) for a, b in pairs],
            "shared_mean": [float(value) for value in torch.stack(shared).mean(dim=0)],
        }

    def state(self) -> dict[str, Tensor]:
        own = {"w": self.w, "moments": self.moments, "previous": self.previous, "stable": self.stable}
        return {**super().state(), **own, "updates": torch.tensor(self.updates)}
