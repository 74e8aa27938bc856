"""The page's parts on measurements other than cells: what a step costs, the theorems, the case study, trajectories.

Each function returns Markdown, and adds its figures to ``drawn``: file name in docs/figures -> content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtem.errors import RequestError
from mtem_paper import figures
from mtem_paper.bound import bound_table
from mtem_paper.cases import to_html, to_markdown
from mtem_paper.cost import ENGINES
from mtem_paper.formatting import NOT_RUN, blank_repeats, bullets, digits, interval, percent, picture, table
from mtem_paper.protocol import UNSUPERVISED
from mtem_paper.statistics import Cell
from mtem_paper.tables import at, places

PEERS = ("betty darts", "higher", "torchopt MetaSGD")  # rows of benchmarks/peers.py beside the engines of `mtem cost`
CONDITIONS = ("model", "device", "precision", "length", "machine")  # what rows of one comparison of costs share
Row = dict[str, Any]


def read(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    RequestError
        If it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not readable as JSON ({error}); remove it and make it again") from None


def trajectories(cells: Sequence[Cell], drawn: dict[str, str]) -> str:
    """Return a figure of temperature and indexes for each place."""
    parts = []
    for place in places(cells):
        runs = [cell for cell in at(cells, place) if cell["variant"] in ("mtem", "mtem-learned") and _has_outer_loop(cell)]
        if runs and place.setting == UNSUPERVISED:
            name = f"trajectory-{place.dataset}-{place.model}-{place.pool}"
            drawn[f"{name}.svg"] = figures.trajectory_figure(runs)
            parts += [picture(name, f"temperature and indexes, {place.title}"), f"MTEM, {place.title}, runs: {len(runs)}.\n"]
    return "\n".join(parts) or NOT_RUN


def _has_outer_loop(cell: Cell) -> bool:
    return any("meta_loss" in point for point in cell.get("history") or ())


# ---------------------------------------------------------------------- cost


def cost_groups(folder: Path) -> list[tuple[str, tuple[str, ...], list[Row]]]:
    """Return the rows of `mtem cost` and benchmarks/peers.py with their file and conditions; other files are ignored."""
    comparisons = []
    for path in sorted(folder.glob("*.json")):
        rows, groups = read(path), dict[tuple[str, ...], list[Row]]()
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and row.get("engine") in (*ENGINES, *PEERS):
                groups.setdefault(tuple(str(row.get(name)) for name in CONDITIONS), []).append(row)
        several = len(groups) > 1
        comparisons += [(f"{path.stem}-{rows[0]['length']}" if several else path.stem, *group) for group in groups.items()]
    return comparisons


def cost_figures(folder: Path, drawn: dict[str, str]) -> str:
    """Return Figure 3 for each comparison with at least three batch sizes."""
    parts = []
    for stem, conditions, rows in cost_groups(folder):
        if len({row["batch"] for row in rows}) >= 3:
            drawn[f"cost-{stem}.svg"] = figures.cost_figure(rows)
            parts.append(picture(f"cost-{stem}", f"time and memory of a step, {', '.join(conditions)}"))
    return "\n".join(parts)


def cost_table(folder: Path, peers: bool) -> str:
    """Return the ratios to a plain step of our engines, or of benchmarks/peers.py, at batch 50 or the largest one."""
    lines = []
    for stem, conditions, rows in cost_groups(folder):
        if stem.startswith("peers") is peers:
            where, shown = _at_batch(conditions, rows)
            for row in shown:
                ratios = [f"{row[key]:.2f}" if row.get(key) else row.get("failed", "—") for key in ("time_ratio", "memory_ratio")]
                lines.append([where, row["engine"], *ratios, digits(row.get("cosine"), 5)])
    return table(["where", "step", "time", "memory", "cosine"], blank_repeats(lines))


def second_order_over_taylor(folder: Path) -> str:
    """Return time and memory of a whole step with second order, as multiples of those with the Taylor approximation."""
    lines = []
    for stem, conditions, rows in cost_groups(folder):
        where, shown = _at_batch(conditions, rows)
        engines = {row["engine"]: row for row in shown if row.get("time_ratio") and row.get("memory_ratio")}
        if not stem.startswith("peers") and {"taylor", "second-order"} <= set(engines):
            time, memory = (engines["second-order"][key] / engines["taylor"][key] for key in ("time_ratio", "memory_ratio"))
            lines.append([where, f"{time:.2f}", f"{memory:.1f}"])
    return table(["where", "time", "memory"], lines)


def _at_batch(conditions: Sequence[str], rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the rows of batch 50 or the largest one, without the plain step, and what they share."""
    sizes = sorted({row["batch"] for row in rows})
    batch = 50 if 50 in sizes else sizes[-1]
    model, _, precision, length, machine = conditions
    where = f"{model}, {machine}, {precision}, length {length}, batch {batch}"
    if any(row.get("graphs") for row in rows):
        where += ", CUDA graphs"
    return where, [row for row in rows if row["batch"] == batch and row["engine"] != "plain"]


# ---------------------------------------------------------------------- theorems


def convergence(folder: Path, drawn: dict[str, str]) -> str:
    """Return curves, fitted exponents and ends of what was measured for Theorems 1 and 2."""
    parts: list[str] = []
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if "curves" in result:
            parts += _convergence(path.stem, result, drawn)
    return "\n".join(parts) or NOT_RUN


def _convergence(stem: str, result: Mapping[str, Any], drawn: dict[str, str]) -> list[str]:
    settings: Mapping[str, Any] = result.get("settings", {})
    constants = {
        case: ", ".join(f"{name} {value:g}" for name, value in values.items())
        for case, values in settings.get("cases", {}).items()
    }
    lines = [f"{key}: {settings[key]}" for key in ("algorithm", "model", "data") if settings.get(key)]
    lines += [f"case {case}: {text}" for case, text in constants.items()]
    lines += [f"{name}: {meaning}" for name, meaning in settings.get("names", {}).items()]
    parts, fits, ends = [bullets(lines)], [], []
    for case in dict.fromkeys(curve["case"] for curve in result["curves"]):
        curves = [curve for curve in result["curves"] if curve["case"] == case]
        name = f"theory-{stem}-{case}"
        title = f"Convergence, {case} ({constants[case]})" if case in constants else f"Convergence, {case}"
        drawn[f"{name}.svg"] = figures.theory_figure(curves, title)
        parts.append(picture(name, f"convergence {case}"))
        reach = [abs(end - 2.0) for run in result.get("runs", ()) if run["case"] == case for end in run["index"]]
        for curve in (curve for curve in curves if curve.get("seed") is None):
            fit = digits(curve.get("exponent"), 2)
            fit += f" {interval(curve['interval'], places=2, sign=False)}" if curve.get("interval") else ""
            fits.append([case, curve["name"], fit, digits(curve.get("promised"), 2)])
            ends.append([case, curve["name"], f"{curve['values'][0]:.2g}", f"{curve['values'][-1]:.2g}"])
            ends[-1].append(f"{max(reach):.2g}" if reach else "—")
    header = ["case", "curve", "first step", "last step", "farthest index from 2"]
    return [*parts, table(["case", "curve", "a", "promised"], fits), table(header, ends)]


def bounds(folder: Path) -> str:
    """Return the terms of Theorem 3's bound for each run."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if "terms" in result:
            parts += [f"#### {path.stem}\n", bound_table(result)]
    return "\n".join(parts) or NOT_RUN


# ---------------------------------------------------------------------- the case study


def case_studies(folder: Path, drawn: dict[str, str]) -> str:
    """Return the texts with the smallest and the largest indexes, and what goes with the index."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        study = read(path)
        name = f"cases-{path.stem}.html"
        drawn[name] = to_html(study["cases"])
        parts += [f"### {study['target']}, {study['model']}, seed {study['seed']}\n", case_figures(study)]
        parts += [f"The same texts in colour: [figures/{name}](figures/{name}).\n", to_markdown(study["cases"])]
        parts.append(_deciles(study["summary"]))
    return "\n".join(parts) or NOT_RUN


def case_figures(study: Mapping[str, Any]) -> str:
    """Return the correlations of the index, how often it was updated, and how many texts are at the ends of its range."""
    summary, chosen = study["summary"], study["settings"]
    updates = chosen["steps"] * chosen["batch_size"] / summary["texts"] if chosen["steps"] else chosen["epochs"]
    rows = []
    for key, quantity in (("index_and_weight", "the mean z of the words"), ("index_and_confidence", "the confidence")):
        value = summary.get(key)
        text = f"{digits(value['spearman'], 2, sign=True)} {interval(value['interval'], places=2)}" if value else "—"
        rows.append([f"rank correlation of the index with {quantity}", text])
    rows.append(["texts", f"{summary['texts']:,}"])
    rows.append(["updates of each index", f"{updates:g}"])
    rows.append(["size of an update", f"{chosen['index_learning_rate']:g} ({chosen['index_step']})"])
    for end, value in summary["ends"].items():
        rows.append([f"texts with the {end} index, {value['index']:.2f}", percent(value["share"], 1)])
    if chosen["index_step"] == "sign" and updates == round(updates):
        rows.append(["texts at either end if signs were random", percent(0.5**updates)])
    rows.append(["step of the predictions", str(study["chosen_step"])])
    return table(["figure", "value"], rows)


def _deciles(summary: Mapping[str, Any]) -> str:
    rows = [
        [str(number + 1), str(tenth["texts"]), *(digits(tenth[key], 2) for key in ("index", "confidence", "mean_weight")),
         percent(tenth["target_words"], 1), percent(tenth["source_words"], 1)]
        for number, tenth in enumerate(summary["deciles"])
    ]  # fmt: skip
    header = ["tenth by index", "texts", "mean index", "confidence", "mean z of the words", "target's words", "source's words"]
    return table(header, rows)
