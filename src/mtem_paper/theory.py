r"""Theorems 1 and 2, measured on a small model.

Theorem 1 is about the entropy indexes, Theorem 2 about the model:

.. math::
    \min_{t \le T} \mathbb{E} \lVert \nabla_\psi \mathcal{L}_S(\hat\theta_t(\psi_t) | D_S) \rVert^2 = O(T^{-1/3}), \qquad
    \lim_{t \to \infty} \mathbb{E} \lVert \nabla_\theta \mathcal{L}_T(\theta_t, \psi_{t+1} | D_T^u) \rVert^2 = 0.

`reproduce` runs Algorithm 1 as printed, with the rates of Assumption 2, on a model as smooth as the theory assumes, and measures
both quantities on all of the data. The proofs do not establish either statement (docs/errata.md), so the result holds for these
runs only. Since :math:`\hat\theta(\psi) = \theta - \eta_t \nabla_\theta \mathcal{L}_T`, the first gradient has the factor
:math:`\eta_t = k_1 / t` whatever the indexes do. A second curve divides by it, and in a second case the indexes never move.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn

from mtem import annealing, metagrad, parallel, schedules, settings, tsallis
from mtem.atomic import write_json
from mtem.data.readers import read_rows
from mtem.errors import RequestError
from mtem.methods.base import Batch, Context, functional
from mtem.methods.mtem import PAPER, Mtem, MtemSettings
from mtem.methods.source_only import SourceOnly, SourceOnlySettings
from mtem.models.base import EncodedCorpus, Inputs
from mtem.progress import Progress
from mtem.run.record import machine, versions
from mtem.training.settings import TrainingSettings
from mtem.training.streams import Stream
from mtem.training.trainer import Trainer
from mtem_paper import splits
from mtem_paper.array_model import ArrayModel

TARGET = "kitchen"
PROMISED = 1 / 3
# The paper's constants for its smaller model; rates at which a perceptron learns; the same with indexes fixed at 2.
CASES: dict[str, dict[str, Any]] = {
    "paper": {"learning_rate": 5e-3, "index_learning_rate": 0.1},
    "larger": {"learning_rate": 1.0, "index_learning_rate": 10.0},
    "fixed": {"learning_rate": 1.0, "meta": False},
}
# name of a curve -> (what it shows, the exponent that a theorem promises, or None)
CURVES: dict[str, tuple[str, float | None]] = {
    "theorem-1": (
        "least squared norm so far of the source loss's gradient in the indexes, which contains the rate eta_t",
        PROMISED,
    ),
    "theorem-1-over-rate": ("squared norm of that gradient divided by eta_t, at each step", None),
    "theorem-2": ("squared norm of the gradient in theta of the target's mean Tsallis entropy (Eq. 8)", None),
    "theorem-2-update": ("squared norm of the expected update of theta: labels drawn at kappa_t, then held fixed", None),
}


class Words(NamedTuple):
    """The TF-IDF weights of some texts, [texts, words], used like tokens."""

    values: Tensor
    padded: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the texts, all 1: nothing is padded."""
        return np.ones(len(self.values), np.int64)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.values)


class Perceptron(ArrayModel):
    """A model as smooth as the theory assumes: TF-IDF, one hidden layer with tanh, softmax."""

    head_path = "network.2"

    def __init__(self, words: int, hidden: int, classes: Sequence[str]) -> None:
        super().__init__()
        self.classes = tuple(classes)
        self.network = nn.Sequential(nn.Linear(words, hidden), nn.Tanh(), nn.Linear(hidden, len(classes)))

    def collate(self, encoded: EncodedCorpus, rows: np.ndarray, *, multiple: int = 1) -> dict[str, Tensor]:
        """Return the batch of some rows."""
        assert isinstance(encoded, Words)
        return {"values": encoded.values[torch.from_numpy(np.asarray(rows))]}

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(inputs["values"])
        return logits


def reproduce(
    data: Path,
    results: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 2000,
    points: int = 41,
    texts: int = 2000,
    vocabulary: int = 1000,
    hidden: int = 16,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run every case of CASES with every seed, measure and fit; write results/theory/convergence.json and return its content.

    Parameters
    ----------
    data
        The Amazon reviews, as ``mtem data prepare`` has written them.
    results
        The folder of results.
    seeds, steps
        Seeds, and steps of a run.
    points
        Number of measured steps, evenly spaced in log t.
    texts
        Unlabeled reviews at most.
    vocabulary, hidden
        Size of the model.
    progress
        Where to report.

    Raises
    ------
    RequestError
        If there are too few steps or points to fit a slope.
    """
    if steps < 20 or points < 8:
        raise RequestError(f"expected at least 20 steps and 8 measured ones to fit a slope, got {steps} and {points}")
    progress = progress or Progress(quiet=True)
    amazon = splits.read("amazon", data, TARGET, "mixed")
    labeled = [record for path in amazon.sources.values() for _, record in read_rows(path)]
    pool = splits.divide(amazon, 0).unlabeled[:texts]
    classes = tuple(sorted({record["label"] for record in labeled}))
    labels = np.array([classes.index(record["label"]) for record in labeled])
    vectorizer = TfidfVectorizer(max_features=vocabulary, sublinear_tf=True, dtype=np.float32)
    vectorizer.fit([record["text"] for record in labeled] + pool)
    source, target = (
        Words(torch.from_numpy(vectorizer.transform(group).toarray())) for group in ([record["text"] for record in labeled], pool)
    )
    runs = {
        (case, seed): observed(case, seed, (source, labels, target), classes, hidden, steps, points, progress)
        for case in CASES
        for seed in seeds
    }
    result = {
        "curves": [curve for case in CASES for curve in curves(case, {seed: runs[case, seed] for seed in seeds})],
        "runs": [
            {"case": case, "seed": seed, "index": run["index"]}
            | {name: [run[name][0], run[name][-1]] for name in ("source_loss", "target_loss")}
            for (case, seed), run in runs.items()
        ],
        "settings": {
            "algorithm": "Algorithm 1 as printed (preset paper) with the rates of Assumption 2; the measured gradients are exact",
            "model": f"TF-IDF of {source.values.shape[1]} words, {hidden} hidden units with tanh, softmax",
            "data": f"Amazon reviews: {len(source)} labeled of {', '.join(amazon.sources)}, {len(target)} unlabeled of {TARGET}",
            "cases": {
                case: {"k1": changes["learning_rate"], "k2": changes.get("index_learning_rate", 0.0)}
                for case, changes in CASES.items()
            },
            "steps": steps,
            "seeds": list(seeds),
            "names": {name: what for name, (what, _) in CURVES.items()},
            "exponents": "a in the law t^-a, fitted in log-log over the later half of the measured steps; 95 % intervals: of one "
            "seed, a bootstrap of those points (too narrow: neighbours are alike). Seed null: values are means over the seeds, "
            "exponent and interval those of the seeds' exponents (Student's t). The proofs establish no rate (errata.md), so "
            "this is what was observed here and no more",
        },
        "machine": machine("cpu"),
        "versions": versions(),
    }
    write_json(results / "theory" / "convergence.json", result)
    return result


def observed(
    case: str, seed: int, data: tuple[Words, np.ndarray, Words], classes: Sequence[str], hidden: int, steps: int, points: int,
    progress: Progress,
) -> dict[str, list[Any]]:  # fmt: skip
    """Train theta_1 on the source, adapt it and measure.

    Returns
    -------
    dict
        A list for every figure of `measured`, and the range of the indexes at the end.
    """
    rates = {"schedule": "assumption-2", "index_schedule": "assumption-2", "log_every": steps, "seed": seed}
    parts = settings.build({"training": TrainingSettings, "method": MtemSettings}, {**PAPER, **rates, **CASES[case]})
    training: TrainingSettings = parts["training"]
    source, labels, target = data
    torch.manual_seed(seed)
    model = Perceptron(source.values.shape[1], hidden, classes)
    source_stream = Stream(model, cast(Any, source), np.arange(len(source)), labels, training.batch_size, 2 * seed)
    target_stream = Stream(model, cast(Any, target), np.arange(len(target)), None, training.batch_size, 2 * seed + 1)
    # Nothing is held out: the losses are on the data that Algorithm 1 draws from.
    full_batches = source_stream.of(np.arange(len(source))), target_stream.of(np.arange(len(target)))

    context = Context(steps, len(target), len(classes), torch.Generator().manual_seed(seed), lambda: 0.0)
    source_method = SourceOnly(model, SourceOnlySettings(), context)
    count = round(training.source_epochs * source_stream.per_epoch)
    Trainer(
        source_method, training, name="source", steps=count, learning_rate=1e-2, source=source_stream, target=None,
        progress=progress, optimizer="adamw", schedule="linear",
    ).run()  # fmt: skip

    method = Mtem(model, parts["method"], context)
    measured_steps = set(np.geomspace(1, steps, points).round().astype(int).tolist())
    figures: dict[str, list[Any]] = {}

    def measure(done: int) -> None:
        if done + 1 in measured_steps:  # before step t = done + 1
            for name, value in measured(method, done + 1, trainer.base_learning_rate, *full_batches).items():
                figures.setdefault(name, []).append(value)

    name = f"{case}, seed {seed}"
    assert training.learning_rate is not None
    trainer = Trainer(
        method, training, name=name, steps=steps, learning_rate=training.learning_rate, source=source_stream,
        target=target_stream, progress=progress, after_step=measure,
    )  # fmt: skip
    context.learning_rate = trainer.learning_rate
    measure(0)
    trainer.run()
    index = parallel.whole_rows(method.index)
    figures["index"] = [float(index.min()), float(index.max())]
    return figures


def measured(method: Mtem, t: int, k1: float, source: Batch, target: Batch) -> dict[str, float]:
    """Return the squared norms of the gradients of both theorems before step t, on all of the data.

    The pseudo labels of Theorem 1's gradient are drawn at the step's temperature with the same random numbers at every t. Theorem
    2's gradient is taken at psi_t, not psi_(t+1), which differs in the indexes of one batch by a step of size beta_t.
    """
    assert source.labels is not None
    source_labels = source.labels
    model, index, eta = method.model, parallel.whole_rows(method.index), schedules.assumption_theta(t, k1)
    model.eval()
    kappa = method.temperature(t - 1)
    logits = model(target.inputs)
    labels = annealing.sample_labels(logits.detach(), kappa, generator=torch.Generator().manual_seed(0))
    meta = metagrad.meta_gradient(
        lambda parameters, inputs: functional(model, parameters, inputs), model.trainable(), target.inputs, labels, index,
        lambda parameters: method.cross_entropy(functional(model, parameters, source.inputs), source_labels), eta, "forward",
    )  # fmt: skip
    log_probs = torch.log_softmax(logits, dim=1)
    entropy = tsallis.entropy(log_probs.exp(), index).mean()
    shares = torch.softmax(logits.detach() / kappa, dim=1)
    losses = [tsallis.loss(log_probs, torch.full_like(labels, k), index) for k in range(logits.shape[1])]
    drawn = (shares * torch.stack(losses, dim=1)).sum(dim=1).mean()
    parameters = list(model.trainable().values())
    first = square(meta.gradient)
    return {
        "steps": t,
        "theorem-1": first,
        "theorem-1-over-rate": first / eta**2,
        "theorem-2": square(*torch.autograd.grad(entropy, parameters, retain_graph=True)),
        "theorem-2-update": square(*torch.autograd.grad(drawn, parameters)),
        "source_loss": float(meta.source_loss),
        "target_loss": float(entropy.detach()),
    }


def square(*tensors: Tensor) -> float:
    """Return the squared norm of all tensors together."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def curves(case: str, runs: dict[int, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    """Return a curve of every seed for each name and, with seed None, of the mean over the seeds, in place of the expectation."""
    lines = []
    for name, (_, promised) in CURVES.items():
        fits = []
        for seed in (*runs, None):
            values = runs[seed][name] if seed is not None else np.mean([run[name] for run in runs.values()], axis=0).tolist()
            if name == "theorem-1":
                values = np.minimum.accumulate(values).tolist()
            steps = next(iter(runs.values()))["steps"]
            if seed is not None:
                fits.append(exponent(steps, values))
            fit = fits[-1] if seed is not None or len(fits) == 1 else over_seeds([value for value, _ in fits])
            about = {"name": name, "case": case, "seed": seed, "steps": steps, "values": values}
            lines.append({**about, "exponent": fit[0], "interval": fit[1], "promised": promised})
    return lines


def exponent(steps: Sequence[float], values: Sequence[float], draws: int = 1000) -> tuple[float, list[float]]:
    """Fit the law t^-a in log-log over the later half of the points; return a and a bootstrapped 95 % interval."""
    half = len(steps) // 2
    x, y = np.log(steps[half:]), np.log(np.maximum(values[half:], np.finfo(float).tiny))
    picks = np.random.default_rng(0).integers(len(x), size=(draws, len(x)))
    picks = np.concatenate([np.arange(len(x))[None], picks[np.ptp(x[picks], axis=1) > 0]])
    away = x[picks] - x[picks].mean(axis=1, keepdims=True)
    slopes = -(away * y[picks]).sum(axis=1) / (away**2).sum(axis=1)
    return float(slopes[0]), np.quantile(slopes[1:], [0.025, 0.975]).tolist()


def over_seeds(values: Sequence[float]) -> tuple[float, list[float]]:
    """Return mean and 95 % interval (Student's t)."""
    mean, error = float(np.mean(values)), float(stats.sem(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, [mean - reach, mean + reach]
