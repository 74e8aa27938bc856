"""Models on devices that are not there: as much of them as defaults depend on."""

from mtem.models.base import Model
from mtem.models.trees.model import BigcnModel


class Encoder:
    """An encoder of texts."""

    threads, defaults, prior_without_labels, default_view_radius = False, Model.defaults, "none", 0.0

    def __init__(self, device, frozen_layers=0, hidden_width=384, obstacle=None):
        self.device, self.frozen_layers, self.hidden_width, self.obstacle = device, frozen_layers, hidden_width, obstacle

    def pretraining_obstacle(self):
        return self.obstacle

    def default_learning_rates(self):
        return (5e-4, 2e-4) if self.frozen_layers else (5e-5, 2e-5)


class Threads(Encoder):
    """A model of threads, which has no hidden states."""

    threads, defaults, default_view_radius = True, BigcnModel.defaults, 0.2

    @property
    def hidden_width(self):
        raise NotImplementedError

    @hidden_width.setter
    def hidden_width(self, value):
        pass

    def default_learning_rates(self):
        return 2e-3, 5e-4
