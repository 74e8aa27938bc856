r"""The case study (section 5.5, appendix E): the texts with the smallest and the largest entropy index, word by word.

The paper says that texts in words which all domains share get a small index, and texts in the target's own words a large one.
How much a word w belongs to the target T rather than to the source S is the log-odds ratio of its frequencies under an
informative Dirichlet prior, divided by its standard error (Monroe, Colaresi and Quinn, Political Analysis 2008):

.. math::
    z_w = \frac{\delta_w}{\sqrt{1 / a_w^T + 1 / a_w^S}}, \qquad
    \delta_w = \log \frac{a_w^T}{A^T - a_w^T} - \log \frac{a_w^S}{A^S - a_w^S}, \qquad
    a_w^D = y_w^D + \alpha_w, \quad A^D = \sum_w a_w^D,

with :math:`y_w^D` the occurrences of w in the texts of D and :math:`\alpha_w` its share of all words of both, times the weight
of the prior in words. Below the threshold a word is neutral and counts 0, and so is one that is seen too rarely for a z. In
many texts even small differences are clear ones ("it" is a little more frequent in reviews of devices than of books), so only
words whose odds differ by a factor of at least two are marked in a text.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from mtem.atomic import read_json, write_json
from mtem.data.corpus import text_key
from mtem.data.loading import load_corpus
from mtem.errors import RequestError
from mtem.models import encoders
from mtem.progress import Progress
from mtem.run.adapt import adapt
from mtem.run.defaults import ON_CPU
from mtem.run.record import machine
from mtem_paper import splits
from mtem_paper.bound import bound

PRIOR = 1000.0  # words that the prior weighs
THRESHOLD = 3.0  # standard errors
MARKED = 2.0  # odds ratio of the words that are marked
RAREST = 5  # occurrences in both domains together
LONGEST = 80  # words of a text that are shown
STRONGEST = 15.0  # z of the deepest colour
_WORD = re.compile("[^\\W_]+(?:['\u2019][^\\W_]+)*")


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return _WORD.findall(text.lower())


def targetness(
    source_texts: Iterable[str],
    target_texts: Iterable[str],
    prior: float = PRIOR,
    threshold: float = THRESHOLD,
    rarest: int = RAREST,
    ratio: float = 1.0,
) -> dict[str, float]:
    """Return z of every word: above 0 for words of the target, below 0 for those of the source, 0 for neutral ones.

    Parameters
    ----------
    source_texts, target_texts
        The texts of both domains.
    prior
        Weight of the prior in words.
    threshold
        Smallest z, in standard errors, of a word that is not neutral.
    rarest
        Smallest number of occurrences of a word that is not neutral.
    ratio
        Smallest ratio of the odds of a word that is not neutral.

    Raises
    ------
    RequestError
        If a domain has no words.
    """
    source, target = (Counter(word for text in texts for word in words(text)) for texts in (source_texts, target_texts))
    sums = target.total(), source.total()
    if not all(sums):
        raise RequestError("one of the two domains has no words; expected texts with words in both")
    z_scores = dict.fromkeys(target | source, 0.0)
    if len(z_scores) == 1:  # both domains have only one and the same word
        return z_scores
    for word in z_scores:
        share = prior * (target[word] + source[word]) / sum(sums)
        own, other = target[word] + share, source[word] + share
        odds = math.log(own / (sums[0] + prior - own)) - math.log(other / (sums[1] + prior - other))
        z = odds / math.sqrt(1 / own + 1 / other)
        clear = abs(z) >= threshold and abs(odds) >= math.log(ratio) and target[word] + source[word] >= rarest
        z_scores[word] = z if clear else 0.0
    return z_scores


def cases(
    table: pd.DataFrame, source_texts: Iterable[str], target_texts: Iterable[str], count: int = 5, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the texts with the smallest and with the largest index.

    Many texts share the ends of the range; those shown are drawn at random, not picked. A text that occurs several times is shown
    once.

    Parameters
    ----------
    table
        `Adapted.indexes` of a run of MTEM.
    source_texts, target_texts
        The texts that z of the words is computed from.
    count
        Number of texts at each end.
    seed
        Seed of the draw.

    Returns
    -------
    list of dict
        For each text: end ("smallest" or "largest"), text (cut after some 80 words), cut, index, prediction, confidence, words:
        [{"word", "weight"}], the words between spaces with their z, 0 where they are not marked.
    """
    check(table)
    z_scores = targetness(source_texts, target_texts, ratio=MARKED)
    shuffled = table.iloc[np.random.default_rng(seed).permutation(len(table))].sort_values("index", kind="stable")
    unique = shuffled[~shuffled["text"].map(text_key).duplicated()]
    count = min(count, len(unique) // 2)
    ends = {"smallest": unique.head(count), "largest": unique.tail(count)[::-1]}
    return [case(row, end, z_scores) for end, rows in ends.items() for row in rows.itertuples(index=False)]


def case(row: Any, end: str, z_scores: Mapping[str, float]) -> dict[str, Any]:
    """Return one text of the case study; `row` is a named tuple of the table."""
    row, tokens = row._asdict(), row.text.split()
    shown = tokens[:LONGEST]
    return {
        "end": end,
        "text": " ".join(shown),
        "cut": len(tokens) > LONGEST,
        "index": round(float(row["index"]), 4),
        "prediction": str(row["prediction"]),
        "confidence": round(float(row["confidence"]), 4),
        "words": [{"word": token, "weight": round(weight(token, z_scores), 2)} for token in shown],
    }


def weight(token: str, z_scores: Mapping[str, float]) -> float:
    """Return the z of what stands between two spaces; of several words, the one with the largest absolute value."""
    return max((z_scores.get(word, 0.0) for word in words(token)), key=abs, default=0.0)


def summary(table: pd.DataFrame, source_texts: Iterable[str], target_texts: Iterable[str], seed: int = 0) -> dict[str, Any]:
    """Return the words' z by tenths of the index, correlations, and how many texts are at the ends of the index's range.

    Texts with equal indexes fall into tenths at random. `mean_weight` averages the mean z of each text's words; `target_words`
    and `source_words` are shares of words that are not neutral. Correlations are Spearman's, with 95 % intervals by Fisher's
    transformation; None where one of the two does not vary.
    """
    check(table)
    z_scores = targetness(source_texts, target_texts)
    weights = [np.array([z_scores.get(word, 0.0) for word in words(text)] or [0.0]) for text in table["text"]]
    figures = pd.DataFrame(
        {
            "index": table["index"].to_numpy(np.float64),
            "confidence": table["confidence"].to_numpy(np.float64),
            "mean_weight": [values.mean() for values in weights],
            "target_words": [(values > 0).mean() for values in weights],
            "source_words": [(values < 0).mean() for values in weights],
        }
    )
    shuffled = figures.iloc[np.random.default_rng(seed).permutation(len(figures))].sort_values("index", kind="stable")
    tenths = []
    for rows in np.array_split(np.arange(len(shuffled)), min(10, len(shuffled))):
        part = shuffled.iloc[rows]
        tenths.append({"texts": len(part), **{name: float(part[name].mean()) for name in figures}})
    low, high = float(figures["index"].min()), float(figures["index"].max())
    return {
        "texts": len(figures),
        "deciles": tenths,
        "index_and_confidence": correlation(figures["index"], figures["confidence"]),
        "index_and_weight": correlation(figures["index"], figures["mean_weight"]),
        "ends": {
            "smallest": {"index": low, "share": float((figures["index"] <= low + 1e-6).mean())},
            "largest": {"index": high, "share": float((figures["index"] >= high - 1e-6).mean())},
        },
    }


def correlation(x: pd.Series, y: pd.Series) -> dict[str, Any] | None:
    """Return Spearman's correlation with a 95 % interval, or None where one of the two does not vary."""
    if x.nunique() < 2 or y.nunique() < 2 or len(x) < 5:
        return None
    rho = float(stats.spearmanr(x, y).statistic)
    reach = stats.norm.ppf(0.975) / math.sqrt(len(x) - 3)
    centre = math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12))
    return {"spearman": rho, "interval": [math.tanh(centre - reach), math.tanh(centre + reach)]}


def check(table: pd.DataFrame) -> None:
    """Check that a table is of a run of MTEM, with at least two texts.

    Raises
    ------
    RequestError
        If it is not.
    """
    if missing := [name for name in ("text", "index", "prediction", "confidence") if name not in table]:
        raise RequestError(f"the table of target texts has no column '{missing[0]}'; expected a finished run of the method mtem")
    if len(table) < 2:
        raise RequestError(f"expected at least two texts for a smallest and a largest index, got {len(table)}")


# ---------------------------------------------------------------------- HTML and Markdown

_STYLE = """\
.mtem-cases { font: 16px/1.55 system-ui, sans-serif; color: #1c1c1c; max-width: 52rem; margin: auto; padding: 1rem }
.mtem-cases h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem }
.mtem-cases article { border-left: 3px solid #ddd; padding: .1rem 0 .1rem .9rem; margin: .9rem 0 }
.mtem-cases header, .mtem-cases .legend { font-size: .85rem; color: #555 }
.mtem-cases header b { color: #1c1c1c }
.mtem-cases p { margin: .25rem 0; overflow-wrap: anywhere }
.mtem-cases mark { color: #1c1c1c; border-radius: 3px; padding: 0 .12em }
.mtem-cases .target { text-decoration: underline 2px #b35806; text-underline-offset: 3px }
"""
_COLOURS = {"target": "241, 143, 47", "source": "70, 130, 200"}
_TITLES = {"smallest": "The smallest entropy indexes", "largest": "The largest entropy indexes"}


def to_html(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a self-contained HTML page; every text is escaped."""
    parts = []
    for end in dict.fromkeys(entry["end"] for entry in entries):
        parts.append(f"<h2>{html.escape(_TITLES[end])}</h2>")
        for entry in (entry for entry in entries if entry["end"] == end):
            header = f"index <b>{entry['index']:.2f}</b>, predicted <b>{html.escape(entry['prediction'])}</b>"
            text = " ".join(marked(word["word"], word["weight"]) for word in entry["words"]) + (" …" if entry["cut"] else "")
            parts.append(
                f'<article><header>{header} (confidence {entry["confidence"]:.2f})</header>\n<p dir="auto">{text}</p></article>'
            )
    legend = f"{marked('word', STRONGEST)} belongs to the target domain, {marked('word', -STRONGEST)} to the source, the deeper "
    legend += f"the colour the more clearly (odds {MARKED:g} times as high at least, {THRESHOLD:g} standard errors apart)."
    body = "\n".join([f'<p class="legend">{legend}</p>', *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Texts by entropy index</title>\n<style>\n{_STYLE}</style></head>\n"
        f'<body><div class="mtem-cases">\n{body}\n</div></body></html>\n'
    )


def marked(word: str, z: float) -> str:
    """Return a word as HTML, coloured by its z."""
    if not z:
        return html.escape(word)
    side = "target" if z > 0 else "source"
    depth = 0.15 + 0.6 * min(abs(z) / STRONGEST, 1.0)
    style = f"background: rgba({_COLOURS[side]}, {depth:.2f})"
    return f'<mark class="{side}" style="{style}" title="z = {z:.1f}">{html.escape(word)}</mark>'


def to_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a table; the target's words are bold, the source's in italics."""
    lines = ["| index | predicted | text (**the target's words**, *the source's*) |", "|---|---|---|"]
    for entry in entries:
        text = " ".join(_stressed(word["word"], word["weight"]) for word in entry["words"]) + (" …" if entry["cut"] else "")
        lines.append(f"| {entry['index']:.2f} | {_plain(entry['prediction'])} ({entry['confidence']:.2f}) | {text} |")
    return "\n".join(lines) + "\n"


def _stressed(word: str, z: float) -> str:
    mark = "**" if z > 0 else "*" if z < 0 else ""
    return f"{mark}{_plain(word)}{mark}"


def _plain(text: str) -> str:
    return html.escape(re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", text), quote=False)


# ---------------------------------------------------------------------- the run


def reproduce(
    data: Path,
    results: Path,
    *,
    target: str = "kitchen",
    model: str = encoders.DEFAULT,
    name: str | None = None,
    seed: int = 0,
    device: str = "auto",
    count: int = 5,
    progress: Progress | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Adapt to a domain of the Amazon reviews; write results/cases/TARGET.json and return its content.

    The terms of Theorem 3 for the same run are written to results/theory/bound-TARGET.json. If the cases exist, nothing is run.

    Parameters
    ----------
    data
        The Amazon reviews, as ``mtem data prepare`` has written them.
    results
        The folder of results.
    target, seed
        The target domain, and the seed of the split and the run.
    model, device
        As for ``mtem adapt``.
    name
        What the files call the model.
    count
        Number of texts at each end.
    progress
        Where to report.
    **given
        Settings of the adaptation; ``texts`` and ``attacked`` are those of `bound.bound`.
    """
    path = results / "cases" / f"{target}.json"
    if path.exists():
        existing: dict[str, Any] = read_json(path)
        return existing
    limits = {name: given.pop(name) for name in ("texts", "attacked") if name in given}
    target_data = splits.read("amazon", data, target, "mixed")
    source = load_corpus(target_data.sources, labeled=True)
    unlabeled = load_corpus(splits.divide(target_data, seed).unlabeled, labeled=False, name="target", domain=target)
    usual = {**ON_CPU, "learning_rate": 2e-5, "frozen_layers": 0}  # on every device
    chosen = {**usual, "seed": seed, "device": device, **given}
    adapted = adapt(source, unlabeled, model=model, progress=progress, **chosen)
    record, table = adapted.record, adapted.indexes
    about = {
        "target": target,
        "model": name or str(model),
        "seed": seed,
        "chosen_step": record["selection"]["chosen_step"],
        "settings": record["settings"],
        "machine": machine(record["resolved"]["device"]),
        "versions": record["versions"],
    }
    texts = source.texts(), unlabeled.texts()
    terms = bound(adapted, source, unlabeled, seed=seed, progress=progress, **limits)
    write_json(results / "theory" / f"bound-{target}.json", {**terms, **about})
    result = {"cases": cases(table, *texts, count=count), "summary": summary(table, *texts), **about}
    result["indexes"] = [round(float(index), 4) for index in table.sort_values("row")["index"]]  # of all texts, in their order
    write_json(path, result)
    return result
