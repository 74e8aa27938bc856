r"""An entropy index that all texts share: one rule from what is known of a text to its index.

.. math::
    \psi_i = 1 + \mathrm{softplus}(w \cdot \phi_i), \qquad
    \frac{\partial L_S}{\partial w} = \sum_i \frac{\partial L_S}{\partial \psi_i}\, \sigma(w \cdot \phi_i)\, \phi_i

The features :math:`\phi_i` do not tell which class is predicted, so the rule cannot trade one class for another. A single text is
seen a few times in a run, and its own index gets as many noisy steps; :math:`w` gets one in every step of the run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtem import parallel

FEATURES = ("constant", "confidence", "agreement", "stability", "nearness")
START = -4.0  # of the constant: every index is 1.018 at first
FIRST_DECAY, SECOND_DECAY = 0.9, 0.99  # of Adam's averages: a run has hundreds of steps
STABILITY_DECAY = 0.7  # by visit of a text
CENTRE_DECAY = 0.95  # by step
STATE = ("w", "moments", "updates", "labels", "stability", "centres")
SMALLEST = 1e-16  # gradients are about 1e-6


class SharedIndex:
    """The rule, how it is learned, and what it remembers of the texts.

    All tensors are changed in place, so that steps can be captured.

    Parameters
    ----------
    texts : int
        The number of target texts.
    classes : int
        The number of classes.
    width : int
        The number of features that enter the head.
    learning_rate : float
        Of Adam, for `w`.
    device : torch.device
        Where it is.
    """

    def __init__(self, texts: int, classes: int, width: int, learning_rate: float, device: torch.device) -> None:
        self.learning_rate = learning_rate
        self.w = torch.zeros(len(FEATURES), device=device)
        self.w[0] = START
        self.moments = torch.zeros(2, len(FEATURES), device=device)
        self.updates = torch.zeros((), device=device)
        self.labels = parallel.new_rows(texts, -1, torch.zeros((), dtype=torch.int64, device=device))
        self.stability = parallel.new_rows(texts, 1.0, self.w)
        self.centres = torch.zeros(classes, width, device=device)

    def visit(self, rows: Tensor, labels: Tensor) -> None:
        """Remember the pseudo labels of a batch: how stable a text is, is the share of visits that did not change its label."""
        before = self.labels[rows]
        stability = self.stability[rows]
        moved = torch.lerp((before == labels).to(stability.dtype), stability, STABILITY_DECAY)
        self.stability[rows] = torch.where(before >= 0, moved, stability)
        self.labels[rows] = labels

    def see_labeled(self, features: Tensor, labels: Tensor) -> None:
        """Move the centre of each class that is in a labeled batch towards its texts."""
        members = F.one_hot(labels, len(self.centres)).to(features.dtype)
        counts = members.sum(dim=0).unsqueeze(1)
        means = members.T @ F.normalize(features, dim=1) / counts.clamp_min(1)
        known = self.centres.abs().sum(dim=1, keepdim=True) > 0
        moved = torch.where(known, torch.lerp(means, self.centres, CENTRE_DECAY), means)
        self.centres.copy_(torch.where(counts > 0, moved, self.centres))

    def describe(self, rows: Tensor, confidence: Tensor, agreement: Tensor, features: Tensor) -> Tensor:
        """Return phi of a batch, ``[N, 5]``, each column of about unit size.

        Parameters
        ----------
        rows : Tensor
            The rows of the texts in the target corpus.
        confidence : Tensor
            The teacher's probability of its likeliest class.
        agreement : Tensor
            The student's probability, on its view, of the pseudo label.
        features : Tensor
            The features of the texts, ``[N, D]``; how near the nearest centre of labeled texts is, is the largest cosine.
        """
        nearness = (F.normalize(features, dim=1) @ F.normalize(self.centres, dim=1).T).amax(dim=1)
        log_odds = torch.logit(confidence.clamp(1e-4, 1 - 1e-4))
        ones = torch.ones_like(confidence)
        columns = ones, (log_odds - 3) / 2, (agreement - 0.8) / 0.2, 4 * (self.stability[rows] - 1), 2 * (nearness - 0.5)
        return torch.stack(columns, dim=1)

    def index(self, phi: Tensor) -> Tensor:
        """Return psi of each text."""
        return 1 + F.softplus(phi @ self.w)

    def gradient(self, index_gradient: Tensor, phi: Tensor) -> Tensor:
        """Return the gradient in `w`, from that in the index of each text."""
        return (index_gradient * torch.sigmoid(phi @ self.w)) @ phi

    def learn(self, index_gradient: Tensor, phi: Tensor) -> None:
        """Take a step of Adam with `w`."""
        gradient = self.gradient(index_gradient, phi)
        self.updates += 1
        self.moments[0].lerp_(gradient, 1 - FIRST_DECAY)
        self.moments[1].lerp_(gradient.square(), 1 - SECOND_DECAY)
        first = self.moments[0] / (1 - FIRST_DECAY**self.updates)
        second = self.moments[1] / (1 - SECOND_DECAY**self.updates)
        self.w -= self.learning_rate * first / (second.sqrt() + SMALLEST)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, for a checkpoint."""
        return {name: parallel.whole_rows(getattr(self, name)) for name in STATE}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name in STATE:
            getattr(self, name).copy_(state[name])
