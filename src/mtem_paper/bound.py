r"""Theorem 3 for a finished run: the terms of its bound that can be computed, and a lower limit of the bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from mtem import inference, tsallis
from mtem.data.batching import sequential
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.models.base import Model
from mtem.progress import Progress
from mtem.run.result import Adapted

UNKNOWN = {
    "q, c": "the constants of the expansion that is assumed of the data; no procedure is known that finds them",
    "radius": "that of the neighbourhood in which the data are assumed to expand; R is given for several",
    "R": "a supremum over all perturbations; directions that were tried give a lower estimate",
    "complexity": "a supremum over all weights of the model; heads fitted to random labels give a lower estimate",
    "zeta": "its constant hides in O(.); given is the expression inside, for delta = 0.05",
    "target error": "what is bounded; it needs target labels",
}


def bound(
    adapted: Adapted,
    source: Any,
    target: Any,
    *,
    radii: Sequence[float] = (0.01, 0.03, 0.1),
    texts: int | None = None,
    attacked: int = 500,
    draws: int = 5,
    delta: float = 0.05,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    r"""Compute the terms of Theorem 3 for a finished run of MTEM, corrected as follows (docs/errata.md).

    .. math::
        \epsilon_T \le \bar\Gamma_S + \bar\Gamma_T + 2q + 2K \hat{\mathcal{R}}(\mathcal{H}|_{D_S})
        + 4K \hat{\mathcal{R}}(\tilde{\mathcal{H}} \times \mathcal{H}|_{D_T^u}) + R / \min\{c, q\} + \zeta, \qquad
        \Gamma \le 2 \ell_2 \le 2 \ell_\psi \text{ for } \psi \le 2.

    The paper prints :math:`\ell_\psi` for :math:`2 \ell_{\min(\psi, 2)}` in the target's term and :math:`\ell_1` for
    :math:`2 \ell_1` in the source's. Whatever q and c are, :math:`2q + R / \min\{c, q\} \ge 2 \sqrt{2R}`, since
    :math:`\min\{c, q\} \le q`. With lower estimates of R and of the complexities this gives a lower limit of the right-hand side
    (``least``): where it is 1 or more, the theorem says nothing about the run.

    Parameters
    ----------
    adapted
        A finished run of a method with entropy indexes.
    source, target
        The labeled and the unlabeled texts of the run, in any form that `load_corpus` reads.
    radii
        Radii of perturbations, as shares of the norm of an example's input embeddings.
    texts
        Number of texts of each set at most, as if the run had had no more; None: all.
    attacked
        Number of texts of each set that are perturbed, one step along the gradient and along a random direction.
    draws
        Number of random labelings that a head is fitted to.
    delta
        Probability with which the bound may fail, in zeta.
    seed
        Seed of all random choices.
    progress
        Where to report.

    Returns
    -------
    dict
        The terms, their lower limits, and what is unknown.

    Raises
    ------
    RequestError
        If the run has no indexes, or other target texts.
    """
    progress = progress or Progress(quiet=True)
    table = adapted.indexes
    if "index" not in table:
        raise RequestError("Theorem 3 is about entropy indexes, and this run has none: expected a run of the method mtem")
    model, random = adapted.model, np.random.default_rng(seed)
    labeled, unlabeled = load_corpus(source, labeled=True, name="source"), load_corpus(target, labeled=False, name="target")
    if len(unlabeled) != len(table):
        raise RequestError(f"target: expected the {len(table)} texts that the run adapted to, got {len(unlabeled)}")
    outputs_of, broken, perturbed = {}, np.zeros(len(radii)), 0
    for name, corpus in (("source", labeled), ("target", unlabeled)):
        tokens = model.encode(corpus)
        rows = np.sort(random.permutation(len(corpus))[:texts])
        with progress.stage(f"bound: {name} texts", len(rows)):
            outputs = inference.compute_logits(model, tokens, rows, features=True, progress=progress)
        assert outputs.features is not None
        outputs_of[name] = (rows, torch.from_numpy(inference.probabilities(outputs.logits)), outputs.features)
        tried = random.permutation(rows)[:attacked]
        with progress.stage(f"bound: perturbed {name} texts", len(tried)):
            broken += flipped(model, tokens, tried, radii, seed, progress) * len(rows) / len(tried)
        perturbed += len(tried)
    rows, probs, features = outputs_of["source"]
    terms: dict[str, Any] = {"source": source_terms(probs, torch.from_numpy(labeled.label_numbers(model.classes)[rows]))}
    complexity = {"source": complexity_at_least(features, draws, seed)}
    rows, probs, features = outputs_of["target"]
    terms["target"] = target_terms(probs, torch.from_numpy(table["index"].to_numpy(np.float64)[rows]))
    complexity["target"] = complexity_at_least(features, draws, seed)
    classes, sizes = len(model.classes), {name: len(rows) for name, (rows, _, _) in outputs_of.items()}
    complexity_part = 2 * classes * complexity["source"] + 4 * classes * complexity["target"]
    robustness = [
        {"radius": radius, "R_at_least": share, "least_of_2q_and_R": 2 * math.sqrt(2 * share)}
        for radius, share in zip(radii, (broken / sum(sizes.values())).tolist(), strict=True)
    ]
    losses = terms["source"]["corrected"] + terms["target"]["corrected"]
    ramps = terms["source"]["ramp"] + terms["target"]["ramp"]
    return {
        "classes": classes,
        "texts": sizes,
        "perturbed": perturbed,
        "terms": terms,
        "complexity_at_least": {**complexity, "part_of_bound": complexity_part},
        "robustness": robustness,
        "zeta_order": sum(math.sqrt(-math.log(delta) / size) for size in sizes.values()),
        "least": [
            {"radius": entry["radius"], "theorem-3": losses + complexity_part + entry["least_of_2q_and_R"],
             "with_ramps": ramps + complexity_part + entry["least_of_2q_and_R"]}
            for entry in robustness
        ],
        "unknown": UNKNOWN,
    }  # fmt: skip


def ramp(probs: Tensor, labels: Tensor) -> Tensor:
    r"""Return :math:`\Gamma(p_z - \max_{k \ne z} p_k)` of each row, :math:`\Gamma(o) = \min\{1, \max\{0, 1 - o\}\}`."""
    own = probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = probs.scatter(1, labels.unsqueeze(1), -1.0).amax(dim=1)
    return (1 - (own - others)).clamp(0, 1)


def source_terms(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the source's part of the bound: the ramp loss, and cross-entropy with the factor 2 and as printed."""
    loss = float(tsallis.loss(probs.log(), labels, 1.0).mean())
    return {"ramp": float(ramp(probs, labels).mean()), "corrected": 2 * loss, "printed": loss}


def target_terms(probs: Tensor, index: Tensor) -> dict[str, float]:
    """Return the target's part of the bound, and how often the printed inequality does not hold.

    The pseudo label is the likeliest class, as in the theorem that the paper builds on; `sampled` is the printed loss in
    expectation over labels drawn from the prediction.
    """
    labels, log_probs = probs.argmax(dim=1), probs.log()
    ramps, losses = ramp(probs, labels), tsallis.loss(log_probs, labels, index)
    return {
        "ramp": float(ramps.mean()),
        "corrected": float(2 * tsallis.loss(log_probs, labels, index.clamp(max=2.0)).mean()),
        "printed": float(losses.mean()),
        "sampled": float(tsallis.entropy(probs, index).mean()),
        "index_above_2": float((index > 2).double().mean()),
        "ramp_above_printed": float((ramps > losses).double().mean()),
        "ramp_above_doubled": float((ramps > 2 * losses * (1 + 1e-9)).double().mean()),
    }


def flipped(model: Model, tokens: Any, rows: np.ndarray, radii: Sequence[float], seed: int, progress: Progress) -> np.ndarray:
    """Count the texts whose class changes within each radius along the directions tried: a lower estimate of R's count.

    A text that changes within a smaller radius counts for a larger one too.
    """
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    counts, done = np.zeros(len(radii)), 0
    for batch in sequential(np.asarray(tokens.lengths)[rows], tokens_per_batch=inference.TOKENS_PER_BATCH // 4):
        inputs = model.prepare(model.collate(tokens, rows[batch]))
        values = model.input_embeddings(inputs)
        noise = torch.zeros_like(values, requires_grad=True)
        logits = model({**inputs, "noise": noise})
        classes = logits.argmax(dim=1)
        loss = nn.functional.cross_entropy(logits, classes, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, noise)
        directions = [gradient, torch.randn(values.shape, generator=generator).to(values) * (values != 0)]
        norms = model.embedding_norms(values, inputs)
        changed = torch.zeros(len(batch), dtype=torch.bool, device=logits.device)
        with torch.no_grad():
            for number in np.argsort(radii):
                for direction in directions:
                    moved = model.unit_directions(direction, inputs) * norms * radii[number]
                    changed |= model({**inputs, "noise": moved}).argmax(dim=1) != classes
                counts[number] += int(changed.sum())
        done += len(batch)
        progress.advance(done)
    return counts


def complexity_at_least(features: np.ndarray, draws: int, seed: int) -> float:
    r"""Return a lower estimate of the complexity of the model's class of functions.

    That is :math:`\hat{\mathcal{R}}(\mathcal{H}|_D) = \mathbb{E}_\sigma \sup_h \sum_i \sigma_i h(x_i) / |D|`.
    Every h is below the supremum; here h is the probability of a class by a head on the model's own features, fitted to the
    signs :math:`\sigma`. The same number serves for :math:`\tilde{\mathcal{H}} \times \mathcal{H}`, which contains these.
    """
    random = np.random.default_rng(seed)
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-12)
    values = []
    for _ in range(draws):
        signs = random.choice([-1.0, 1.0], size=len(scaled))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a head that has not converged still gives a lower estimate
            head = LogisticRegression(C=10.0, max_iter=100).fit(scaled, signs)
        # The signs' own mean, 0 in expectation, would be noise, so 1/2 is subtracted.
        values.append(float(np.mean(signs * (head.predict_proba(scaled)[:, 1] - 0.5))))
    return max(0.0, float(np.mean(values)))


def bound_table(result: dict[str, Any]) -> str:
    """Return the terms as a Markdown table, and what could not be computed."""
    source, target, complexity = result["terms"]["source"], result["terms"]["target"], result["complexity_at_least"]
    lines = [
        ("source loss, 2 l_1 (as printed, l_1)", f"{source['corrected']:.3f} ({source['printed']:.3f})"),
        ("target loss, 2 l_min(ψ, 2) (as printed, l_ψ)", f"{target['corrected']:.3f} ({target['printed']:.3f})"),
        ("the ramp losses that both stand for", f"{source['ramp']:.3f} and {target['ramp']:.3f}"),
        ("texts with ψ > 2; where the ramp exceeds 2 l_ψ", f"{target['index_above_2']:.1%}; {target['ramp_above_doubled']:.1%}"),
        (f"2K times the complexity, source, K = {result['classes']}", f"≥ {2 * result['classes'] * complexity['source']:.3f}"),
        (f"4K times the complexity, target, K = {result['classes']}", f"≥ {4 * result['classes'] * complexity['target']:.3f}"),
    ]
    for entry, least in zip(result["robustness"], result["least"], strict=True):
        text = f"≥ {entry['least_of_2q_and_R']:.3f} (R ≥ {entry['R_at_least']:.3f})"
        lines.append((f"2q + R / min{{c, q}}, radius {entry['radius']:g}", text))
        lines.append((f"**right-hand side, radius {entry['radius']:g}**", f"**≥ {least['theorem-3']:.2f}**"))
    lines.append(("inside the O(.) of ζ, not added", f"{result['zeta_order']:.3f}"))
    rows = "\n".join(f"| {name} | {value} |" for name, value in lines)
    missing = "\n".join(f"- {name}: {why}" for name, why in result["unknown"].items())
    return f"| term | value |\n|---|---|\n{rows}\n\nNot known:\n\n{missing}\n"
