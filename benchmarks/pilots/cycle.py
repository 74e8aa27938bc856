"""A pilot's method: MTEM with the terms that CST has beside its labels, each with a weight; 0 leaves a term out.

CST minimises, with FixMatch's loss, the Tsallis entropy of the unchanged target texts (`tsallis_weight`) and the source loss of a
head that is fitted to the pseudo labels in closed form (`reverse_weight`). The second one is a meta-loss too: labels are good if
what learns them is right on the source. Here both stand beside MTEM's loss with one index for all, without CST's SAM.

    python benchmarks/pilots/pheme_graph.py run --rehearse ... --runs mtem,benchmarks/pilots/cycle.py:reverse_weight=0.5
"""

from __future__ import annotations

import dataclasses

import torch

from mtem.capture import by_step
from mtem.methods.base import Batch, StepLog, Update
from mtem.methods.cst import reverse_loss, tsallis_term
from mtem.methods.mtem import Mtem, MtemSettings
from mtem.settings import setting


@dataclasses.dataclass(frozen=True)
class CycleSettings(MtemSettings):
    """The weights of the terms; their other constants are CST's."""

    tsallis_weight: float = setting(0.0, "weight of the Tsallis entropy of the target predictions", low=0.0)
    reverse_weight: float = setting(0.0, "weight of the source loss of the target head", low=0.0)


class Cycle(Mtem):
    """MTEM whose labels must also train a head that works on the source."""

    name = "cycle"
    summary = "MTEM with CST's Tsallis term and reverse loss"
    paper = "a pilot"
    Settings = CycleSettings
    settings: CycleSettings

    def step(self, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        """Take one step; the index is the same for all texts and is not learned."""
        settings, model, source_labels = self.settings, self.model, source.require_labels()
        pseudo = self.pseudo_labels(target, by_step(self.temperature, number, model.device))
        plain = model.prepare(target.inputs)
        view = self.perturbed_view(model.prepare(self.student_view(plain)), pseudo.labels)
        model.train()
        log_probs = torch.log_softmax(model(view), dim=-1)
        target_loss = pseudo.inner_loss.value(log_probs, pseudo.labels, self.index[target.rows])
        source_logits, source_features = model.logits_and_features(source.inputs)
        source_loss = self.cross_entropy(source_logits, source_labels)
        loss = source_loss + settings.target_weight * target_loss
        log: StepLog = {"source_loss": source_loss.detach(), "target_loss": target_loss.detach()}
        if settings.tsallis_weight or settings.reverse_weight:
            logits, features = model.logits_and_features(plain)
            tsallis = tsallis_term(logits, 2.0, 1.9)
            reverse = reverse_loss(source_features, source_labels, features, pseudo.labels, logits.shape[1], 1e-3)
            loss = loss + settings.tsallis_weight * tsallis + settings.reverse_weight * reverse
            log |= {"tsallis_loss": tsallis.detach(), "reverse_loss": reverse.detach()}
        update(loss)
        return log
