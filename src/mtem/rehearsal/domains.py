"""What stands for the target in a rehearsal: the source domains, or clusters of the texts if there is only one domain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans

from mtem.data.corpus import Corpus
from mtem.errors import RequestError

FEWEST_LABELED = 300  # labeled texts; with fewer there is no rehearsal
FEWEST_IN_DOMAIN = 100  # texts of a domain that stands for the target
FEWEST_IN_CLUSTER = 200
MOST_CLUSTERS = 4
DOMAINS, CLUSTERS = "domains", "clusters"


class NothingToRehearseError(RequestError):
    """The labeled texts are too few, or too much alike, for a rehearsal; an adaptation is still possible."""


@dataclasses.dataclass(frozen=True)
class Domains:
    """The parts of the labeled texts that stand for the target in turn.

    Attributes
    ----------
    kind
        `DOMAINS`, or `CLUSTERS` of the texts of one domain.
    names
        Of all parts, those that only serve as source among them.
    numbers
        The part of each labeled text, [N].
    rehearsed
        Positions in `names` of the parts that stand for the target.
    notes
        Why a part does not, and other remarks for the user.
    """

    kind: str
    names: tuple[str, ...]
    numbers: np.ndarray
    rehearsed: tuple[int, ...]
    notes: tuple[str, ...]

    def rows(self, number: int) -> np.ndarray:
        """Return the rows of a part."""
        return np.flatnonzero(self.numbers == number)

    def others(self, number: int) -> np.ndarray:
        """Return the rows of all other parts."""
        return np.flatnonzero(self.numbers != number)


def find_domains(source: Corpus, features: Callable[[], np.ndarray], seed: int) -> Domains:
    """Find what can stand for the target.

    Parameters
    ----------
    source
        The labeled texts.
    features
        Returns the encoder's features of all texts, [N, D]; called only if there is one domain.
    seed
        Of the clustering.

    Raises
    ------
    NothingToRehearseError
        If there are too few labeled texts, or nothing can stand for the target.
    """
    unit = source.unit
    if len(source) < FEWEST_LABELED:
        raise NothingToRehearseError(
            f"{source.name}: a rehearsal needs at least {FEWEST_LABELED} labeled {unit}, got {len(source)}; "
            f"give more labeled {unit}, or adapt without a rehearsal"
        )
    kind, names, numbers, notes = DOMAINS, tuple(source.domains), source.domain_numbers(), []
    if len(names) == 1:
        kind, numbers = CLUSTERS, cluster(features(), seed)
        names = tuple(f"cluster {number + 1}" for number in range(int(numbers.max()) + 1))
        if len(names) == 1:
            raise NothingToRehearseError(
                f"{source.name}: a rehearsal with one source domain needs clusters of at least {FEWEST_IN_CLUSTER} {unit}, "
                f"and its {len(source)} {unit} do not form any; give a second source domain, or adapt without a rehearsal"
            )
        notes.append(
            f"one source domain: {len(names)} clusters of its {unit} stand for domains; they differ less than real domains do, "
            "so take this rehearsal as weaker evidence"
        )
    labels = source.label_numbers(source.classes)
    rehearsed = []
    for number, name in enumerate(names):
        reason = why_not(labels, numbers, number, unit)
        if reason is None:
            rehearsed.append(number)
        else:
            notes.append(f"{name} does not stand for the target: {reason}")
    if not rehearsed:
        raise NothingToRehearseError(f"{source.name}: nothing can be rehearsed. {'; '.join(notes)}")
    if len(rehearsed) == 1:
        notes.append(f"only {names[rehearsed[0]]} could stand for the target: one domain is weak evidence")
    return Domains(kind, names, numbers, tuple(rehearsed), tuple(notes))


def why_not(labels: np.ndarray, numbers: np.ndarray, number: int, unit: str) -> str | None:
    """Return why a part cannot stand for the target; None if it can."""
    inside, outside = labels[numbers == number], labels[numbers != number]
    if len(inside) < FEWEST_IN_DOMAIN:
        return f"it has {len(inside)} {unit}, at least {FEWEST_IN_DOMAIN} are needed"
    if len(np.unique(inside)) < 2:
        return "all its labels are the same"
    if missing := len(np.unique(labels)) - len(np.unique(outside)):
        return f"{missing} of the classes occur{'s' if missing == 1 else ''} only there"
    return None


def cluster(features: np.ndarray, seed: int) -> np.ndarray:
    """Return the cluster of each text: at most `MOST_CLUSTERS`, as many as leave none below `FEWEST_IN_CLUSTER` texts.

    Directions of the features are clustered, not their lengths. If nothing fits, all texts are in cluster 0.
    """
    directions = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    for count in range(min(MOST_CLUSTERS, len(features) // FEWEST_IN_CLUSTER), 1, -1):
        numbers = KMeans(count, n_init=4, random_state=seed).fit_predict(directions)
        if np.bincount(numbers, minlength=count).min() >= FEWEST_IN_CLUSTER:
            return np.asarray(numbers, dtype=np.int64)
    return np.zeros(len(features), dtype=np.int64)


def keep_rows(labels: np.ndarray, rare: int, seed: int, share: float = 1 / 3) -> np.ndarray:
    """Return sorted positions of all texts but those of one class, of which only a `share` is kept."""
    of_class = np.flatnonzero(labels == rare)
    kept = np.random.default_rng([seed, 0x5EED, rare]).permutation(of_class)[: max(2, round(share * len(of_class)))]
    return np.sort(np.concatenate([np.flatnonzero(labels != rare), kept]))
