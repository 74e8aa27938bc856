"""docs/results.md and its figures, from what lies under results/. Nothing is run, and the same results give the same page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtem.atomic import replaced
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem_paper import cells as cell_files
from mtem_paper import checks, figures, protocol, published, statistics, tables
from mtem_paper.statistics import LEVEL, Board, Cell, name_of, recomputed
from mtem_paper.tables import SETTINGS, digits, markdown, of, once, places

COMMAND = "mtem reproduce page"
FIGURES = ("entropy", "trajectory", "cost", "theory", "cases")  # how the names of the page's own figures begin
PEERS = ("betty darts", "higher", "torchopt MetaSGD")  # steps of benchmarks/peers.py beside the engines of `mtem cost`
CONDITIONS = ("model", "device", "precision", "length", "machine")  # what rows of one comparison of costs share

READING = """\
- A **run** is one method adapted to one target with one seed. The methods of a table share encoder, splits, source model (but for
  MME and the oracle, which train their own), number of passes over the unlabeled texts, a search over two learning rates, and
  the label-free criterion that picks the weights. In these runs no target label picks anything, except in rows and columns
  called oracle; what MTEM's recommended settings owe to earlier trials is told in [protocol.md](protocol.md), with the rest.
  **Out** is the source model without adaptation (In+Out: with 100 labeled target texts). **BiAT** is our reading of its article's
  description, with weights and perturbation sizes of our own.
- Amazon's unlabeled reviews are the **mixed** pool, classes about even, or the **natural** one, 80 to 90 % positive.
- **Means** are over the targets, then over the seeds. **±** is the standard deviation over the seeds: how much the mean
  differs from seed to seed. The best is in bold.
- **[low, high]** behind a difference is its 95 % interval: what the difference may be, given what varies by chance. Two things
  do. One is which texts the test set holds; the other is the seed, which decides splits and training. Both are drawn again,
  with replacement, {draws:,} times: the labeled examples of each target, the same draw for every method and every seed, and the
  seeds, the same for both methods and all targets. What the difference is in 95 % of the draws is the interval. A few seeds
  say little about all others; the draws of the seeds are widened for it, as Student's t does (`experiments/comparison.py` has
  the formula).
- **≈ marks what may be chance**: a difference that is not clear from none, or a score that is not clearly below the best. It does
  not say that two methods are equal. Without the mark, and where words say "clear", p is below {level}, two-sided, after Holm's
  correction: the more comparisons are made side by side, the smaller p has to be, so that the chance of even one false "clear"
  among them stays below {percent:.0f} %. Intervals are not corrected: one may leave 0 out and its difference still be marked ≈.
- Corrected together are: MTEM over Out in all places (the table at the top); all rows of one table's column "over Out" or "over
  MTEM"; the best of one table against all others, by means; and the same on single targets, all columns together. So the same
  difference may be clear in one table and marked ≈ in another.
- With **one seed** nobody can know how much training varies: the interval is over texts only, and no difference is called clear.
"""


def write(results: Path, docs: Path, progress: Progress | None = None) -> None:
    """Write docs/results.md and what it shows in docs/figures; what an earlier page showed and this one does not is removed."""
    progress = progress or Progress(quiet=True)
    cells = load(results)
    boards = tables.boards(cells)
    drawn: dict[str, str] = {}  # by file name
    sections = (
        lambda: _opening(results, cells, boards),
        lambda: tables.general("amazon", boards),
        lambda: tables.outside(boards),
        lambda: tables.general("pheme", boards),
        lambda: tables.ablation(cells),
        lambda: tables.batch_sizes(cells),
        lambda: checks.estimates(cell_files.read(results).current),
        lambda: checks.choices(cells),
        lambda: _entropy(drawn),
        lambda: _trajectories(cells, drawn),
        lambda: _cost(results / "cost", drawn),
        lambda: _theory(results / "theory", drawn),
        lambda: _cases(results / "cases", drawn),
        lambda: tables.corrections(),
    )
    text = []
    with progress.stage("page of results", len(sections)):
        for number, section in enumerate(sections):
            text.append(section().strip() + "\n")
            progress.advance(number + 1)
    for name, content in drawn.items():
        _save(docs / "figures" / name, content)
    _save(docs / "results.md", "\n".join(part for part in text if part.strip()))
    for path in (docs / "figures").iterdir():
        if path.stem.split("-")[0] in FIGURES and path.suffix in (".svg", ".html") and path.name not in drawn:
            path.unlink()


def load(results: Path) -> list[Cell]:
    """All cells, each with a score that its predictions bear out."""
    cells, damaged, _ = cell_files.read(results)
    if damaged:
        raise RequestError(damaged[0] + (f" ({len(damaged) - 1} more like it)" if len(damaged) > 1 else ""))
    for cell in cells:
        if abs(recomputed(cell) - cell["score"]) > 1e-6:
            raise RequestError(
                f"cell {name_of(cell)}: its score is {cell['score']}, its predictions give {recomputed(cell)}; run it again"
            )
    return cells


def _opening(results: Path, cells: Sequence[Cell], boards: Mapping[tables.Place, Board]) -> str:
    text = f"*Generated by `{COMMAND}` from `results/`; do not edit.*\n\n# The paper's tables and figures, run again\n\n"
    if not cells:
        return text + "**There are no results of runs yet**: `results/cells/` holds none. `mtem reproduce` makes them.\n"
    said = (
        "Mean scores over the four targets: accuracy on Amazon, F1 of the class rumour on PHEME. [ , ] is a 95 % interval over "
        "texts and seeds; ≈ is no clear difference. [How to read this](#how-to-read-this) says more.\n"
    )
    reading = READING.format(draws=statistics.DRAWS, level=digits(LEVEL, 2), percent=100 * LEVEL)
    parts = ["## In short\n", said, tables.headline(boards), "## How to read this\n", reading]
    return text + "\n".join([*parts, "## What was run, what is missing\n", _ran(results, cells)])


def source_of(cell: Cell) -> tuple[Any, ...]:
    """What cells share that begin from the same source model, corrected alike."""
    return *(cell[name] for name in ("dataset", "model", "pool", "setting", "target", "seed")), cell["settings"].get(
        "target_class_prior"
    )


def _source_models(cells: Sequence[Cell]) -> list[str]:
    """Where the methods of a group did not all begin from the very same source model, and what that does to their means."""
    lines = []
    fair = [cell for cell in cells if cell["method"] != "mme" and not cell["oracle"]]
    for dataset, model in dict.fromkeys((cell["dataset"], cell["model"]) for cell in fair):
        found: dict[tuple[Any, ...], set[float]] = {}
        means: dict[tuple[Any, ...], list[float]] = {}
        for cell in of(fair, dataset=dataset, model=model):
            found.setdefault(source_of(cell), set()).add(cell["source_score"])
            means.setdefault(
                (cell["pool"], cell["setting"], cell["settings"].get("target_class_prior"), cell["variant"]), []
            ).append(cell["source_score"])
        apart = [max(scores) - min(scores) for scores in found.values() if len(scores) > 1]
        if apart:
            most = {key: max(len(own) for other, own in means.items() if other[:3] == key[:3]) for key in means}
            whole = {key: sum(own) / len(own) for key, own in means.items() if len(own) == most[key]}
            gap = max(abs(one - other) for a, one in whole.items() for b, other in whole.items() if a[:3] == b[:3])
            lines.append(
                f"- {tables.TITLES[dataset]}, {model}: in {len(apart)} of {len(found)} groups (target, seed, setting) the source "
                "model was trained a second time, as a run was taken up again on a GPU or on another machine; inside a group its "
                f"score differs by {digits(max(apart), 4)} at most between methods, their means by {digits(gap, 4)}"
            )
    return lines


def _ran(results: Path, cells: Sequence[Cell]) -> str:
    """What is there of the plan."""
    rows, idle = [], []
    for dataset, about in protocol.DATASETS.items():
        for model in dict.fromkeys([*protocol.PLANNED[dataset], *sorted({cell["model"] for cell in of(cells, dataset=dataset)})]):
            for pool in about.pools:
                for setting in SETTINGS:
                    found = of(cells, dataset=dataset, model=model, pool=pool, setting=setting)
                    place = tables.told_place((dataset, model, pool, setting))
                    experiments = protocol.planned(dataset, model, pool, setting)
                    planned = {pair for pairs in experiments.values() for pair in pairs}
                    if not found:
                        idle += [f"{place} ({len(planned) * len(about.seeds)} runs)"] if planned else []
                        continue
                    there = [
                        cell for cell in found if cell["seed"] in about.seeds and (cell["variant"], cell["target"]) in planned
                    ]
                    hours = sum(cell.get("seconds") or 0.0 for cell in found) / 3600
                    machines = ", ".join(sorted({str(cell.get("machine") or "unknown") for cell in found}))
                    share = f"{len(there)} of {len(planned) * len(about.seeds)}"
                    rows.append([place, share, _absent(found, experiments, about.seeds), f"{hours:.1f}", machines])
    lines = [f"- Not begun: {'; '.join(idle)}"] if idle else []
    failed = sorted(path.relative_to(results / "failures") for path in (results / "failures").rglob("*.txt"))
    lines += [f"- Failed: {path.with_suffix('').as_posix()}" for path in failed]
    for what, kind in (("what a step costs", "cost"), ("the theorems", "theory"), ("the case study", "cases")):
        lines += [] if list((results / kind).glob("*.json")) else [f"- Not run: {what}"]
    lines += _source_models(cells)
    lines += _earlier(cells, cell_files.read(results).current)
    table = markdown(["where", "runs of the plan", "missing", "hours", "machine"], rows)
    return table + ("\n" + "\n".join(lines) + "\n" if lines else "")


def _earlier(cells: Sequence[Cell], current: Sequence[Cell]) -> list[str]:
    """Where the tables show runs that were made under earlier rules, and how many there are under those of today."""
    lines = []
    for place in dict.fromkeys(tuple(cell[name] for name in cell_files.PLACE) for cell in cells):
        here = [cell for cell in cells if tuple(cell[name] for name in cell_files.PLACE) == place]
        old = [cell for cell in here if cell["protocol"] != cell_files.current_protocol(cell)]
        if old:
            new = [cell for cell in of(current, **dict(zip(cell_files.PLACE, place, strict=True))) if cell["protocol"] > 1]
            dataset, model, setting, pool = place
            lines.append(
                f"- **Earlier rules**: {tables.told_place((dataset, model, pool, setting))}: {len(old)} of the {len(here)} runs "
                f"shown were made under protocol 1; {len(new)} have been run again so far. [protocol.md](protocol.md) says what "
                "changed"
            )
    return lines


def _absent(found: Sequence[Cell], experiments: Mapping[str, list[tuple[str, str]]], planned: Sequence[int]) -> str:
    """Which seeds, methods and experiments of the plan have no run, and how many runs the others lack."""
    seeds = [seed for seed in planned if any(cell["seed"] == seed for cell in found)]
    there = {(cell["variant"], cell["target"], cell["seed"]) for cell in found}
    begun = {variant for variant, *_ in there}
    unseen = [str(seed) for seed in planned if seed not in seeds]
    said = [f"seed{'s' if len(unseen) > 1 else ''} {', '.join(unseen)}"] if unseen else []
    lacking: dict[str, int] = {}
    for name, pairs in experiments.items():
        own = {variant: None for variant, _ in pairs if name == "general" or variant != "mtem"}
        missing = [variant for variant in own if variant not in begun]
        if name == "general":
            said += [tables.NAMES[variant] for variant in missing]
        elif missing:
            share = f" ({len(missing)} of {len(own)} rows)" if len(missing) < len(own) else ""
            said.append(name.replace("-", " ") + share)
        for variant, target in pairs:
            if variant in own and variant in begun and (left := sum((variant, target, seed) not in there for seed in seeds)):
                whose = tables.NAMES.get(variant, name.replace("-", " "))
                lacking[whose] = lacking.get(whose, 0) + left
    said += [f"{count} run{'s' if count > 1 else ''} of {whose}" for whose, count in lacking.items()]
    return ", ".join(said) or "nothing"


def _entropy(drawn: dict[str, str]) -> str:
    drawn["entropy.svg"] = figures.entropy_figure()
    said = "Computed from Eq. 1 and 2 with `mtem.tsallis.entropy`; the smaller the index, the higher and steeper the curve."
    return f"## Figure 1: Tsallis entropy\n\n{_picture('entropy', 'Tsallis entropy of two classes')}\n\n{said}\n"


def _trajectories(cells: Sequence[Cell], drawn: dict[str, str]) -> str:
    parts = []
    for dataset in published.TARGETS:
        for model, pool in places(cells, dataset):
            found = of(cells, dataset=dataset, model=model, pool=pool, setting="unsupervised", variant="mtem")
            found = [cell for cell in found if cell.get("history")]
            if found:
                name = f"trajectory-{dataset}-{model}-{pool}"
                drawn[f"{name}.svg"] = figures.trajectory_figure(found)
                where = tables.told_place((dataset, model, pool, "unsupervised"))
                runs = f"{len(found)} run{'s' if len(found) > 1 else ''}"
                parts += [_picture(name, f"temperature and indexes, {where}"), f"\nMTEM, {where}, {runs}.\n"]
    said = "Lines are medians over the runs, all targets together; bands reach from the least run to the largest.\n"
    return "## Temperature and indexes along a run\n\n" + ("\n".join([said, *parts]) if parts else "Not run.\n")


def _cost(folder: Path, drawn: dict[str, str]) -> str:
    """Figure 3, and what a step costs beside a plain one: `mtem cost` and benchmarks/peers.py."""
    from mtem_paper.cost import ENGINES  # it brings the whole library along

    parts, ours, peers, beside = ["## Figure 3: what a step costs\n"], [], [], []
    for path in sorted(folder.glob("*.json")):
        found, groups = _read(path), {}
        for row in found if isinstance(found, list) else []:  # other measurements lie there too
            if isinstance(row, dict) and row.get("engine") in (*ENGINES, *PEERS):
                groups.setdefault(tuple(str(row.get(name)) for name in CONDITIONS), []).append(row)
        for conditions, rows in groups.items():
            sizes = sorted({row["batch"] for row in rows})
            if len(sizes) >= 3:
                name = "-".join(["cost", path.stem, *([str(rows[0]["length"])] if len(groups) > 1 else [])])
                drawn[f"{name}.svg"] = figures.cost_figure(rows)
                parts += [_picture(name, f"time and memory of a step, {', '.join(conditions)}"), ""]
            batch = 50 if 50 in sizes else sizes[-1]
            model, _, precision, length, machine = conditions
            where = f"{model}, {machine}, {precision}, length {length}, batch {batch}"
            lines = peers if path.stem.startswith("peers") else ours
            paper = {
                row["engine"]: row for row in rows if row["batch"] == batch and row.get("time_ratio") and row.get("memory_ratio")
            }
            if lines is ours and {"taylor", "second-order"} <= set(paper):
                time, memory = (paper["second-order"][key] / paper["taylor"][key] for key in ("time_ratio", "memory_ratio"))
                beside.append(f"{time:.2f} times the time and {memory:.1f} times the memory ({model}, {precision})")
            lines += [[where, *_beside_plain(row)] for row in rows if row["batch"] == batch and row["engine"] != "plain"]
    if not ours and not peers:
        return parts[0] + "\nNot run.\n"
    parts.append(
        "A whole step, labels and update included, as a multiple of a plain fine-tuning step of the same batch; "
        "[cost.md](cost.md) tells how it was measured. Cosine: of the index gradient with that of second order in float32. What "
        "is there twice was measured twice. Of the index gradient alone, on a V100, the paper says that second order takes "
        "almost twice the time and 3 to 4 times the memory of the Taylor approximation"
        + (f"; a whole step takes {', '.join(beside)} here" if beside else "") + ".\n"
    )  # fmt: skip
    header = ["where", "step", "time", "memory", "cosine"]
    parts += [markdown(header, once(ours))] if ours else []
    if peers:
        said = "Beside libraries that one could build the step from, same model and batches (`benchmarks/peers.py`):\n"
        parts += [said, markdown(header, once(peers))]
    return "\n".join(parts)


def _beside_plain(row: Mapping[str, Any]) -> list[str]:
    ratios = [f"{row[key]:.2f}" if row.get(key) else row.get("failed", "—") for key in ("time_ratio", "memory_ratio")]
    return [row["engine"], *ratios, digits(row.get("cosine"), 5)]


def _theory(folder: Path, drawn: dict[str, str]) -> str:
    parts = ["## The theorems, measured\n"]
    files = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    for stem, found in files.items():
        if "curves" in found:
            parts += _convergence(stem, found, drawn)
    for stem, found in files.items():
        if "terms" in found:
            from mtem_paper.bound import bound_table  # it brings the whole library along

            parts += [f"### Theorem 3: the terms of its bound ({stem})\n", bound_table(found)]
    return "\n".join(parts if len(parts) > 1 else [*parts, "Not run.\n"])


def _convergence(stem: str, found: dict[str, Any], drawn: dict[str, str]) -> list[str]:
    told, settings = [], found.get("settings", {})
    for key in ("algorithm", "model", "data"):
        if settings.get(key):
            told.append(f"- {key}: {settings[key]}")
    for case, constants in settings.get("cases", {}).items():
        told.append(f"- case {case}: " + ", ".join(f"{name} = {value:g}" for name, value in constants.items()))
    told += [f"- {name}: {what}" for name, what in settings.get("names", {}).items()]
    parts, rows = [f"### Theorems 1 and 2 ({stem})\n", "\n".join(told) + "\n"], []
    for case in dict.fromkeys(curve.get("case", "") for curve in found["curves"]):
        curves = [curve for curve in found["curves"] if curve.get("case", "") == case]
        constants = ", ".join(f"{name} {value:g}" for name, value in settings.get("cases", {}).get(case, {}).items())
        name = "-".join(part for part in ("theory", stem, case) if part)
        drawn[f"{name}.svg"] = figures.theory_figure(
            curves, f"Convergence{', ' if case else ''}{case}{f' ({constants})' if constants else ''}"
        )
        parts += [_picture(name, f"convergence {case}"), ""]
        for curve in curves:
            if curve.get("seed") is None:
                interval = "" if not curve.get("interval") else " [{}, {}]".format(*(digits(end, 2) for end in curve["interval"]))
                rows.append([case, curve["name"], digits(curve.get("exponent"), 2) + interval, digits(curve.get("promised"), 2)])
    several = len(settings.get("seeds", ())) > 1
    said = "The law t^-a is fitted in log-log over the later half of the measured steps; the 95 % interval is " + (
        "that of the mean over the seeds (Student's t).\n" if several else "a bootstrap of these points: too narrow.\n"
    )
    return [*parts, said, markdown(["case", "curve", "a", "promised"], rows), _moved(found), _observed(found["curves"])]


def _moved(found: Mapping[str, Any]) -> str:
    """How far the indexes went in each case."""
    reach: dict[str, float] = {}
    for run in found.get("runs", ()):
        reach[run["case"]] = max(reach.get(run["case"], 0.0), *(abs(end - 2.0) for end in run["index"]))
    said = [f"{distance:.2g} (`{case}`)" for case, distance in reach.items()]
    return f"Farthest that an index went from 2, where all begin: {', '.join(said)}.\n" if said else ""


def _observed(curves: Sequence[dict[str, Any]]) -> str:
    """What the fall of Theorem 1's quantity says, and what not."""
    said = (
        "Theorem 1's quantity contains the rate η_t ([errata.md](errata.md), 30): its fall is that of the rate, and divided by "
        "the rate (theorem-1-over-rate) it is another curve."
    )
    means = [curve for curve in curves if curve["name"] == "theorem-1" and curve.get("seed") is None]
    fitted = {curve.get("case"): digits(curve.get("exponent"), 2) for curve in means}
    if {"fixed", "larger"} <= set(fitted):
        said += (
            f" The case `fixed`, whose indexes never move, is the control: a = {fitted['fixed']}, beside {fitted['larger']} of "
            "`larger`, whose indexes move, at the same rate."
        )
    ends = [
        f"{curve['values'][0]:.2g} to {curve['values'][-1]:.2g} (`{curve['case']}`)"
        for curve in curves
        if curve["name"] == "theorem-2" and curve.get("seed") is None
    ]
    if ends:
        said += (
            f" Theorem 2 promises a limit of 0 and no rate: between the first and the last step it went from {', '.join(ends)}."
        )
    return f"{said} The constants of `larger` were chosen after curves with others had been looked at.\n"


def _cases(folder: Path, drawn: dict[str, str]) -> str:
    parts = [
        "## Table 6: which texts get which index\n",
        "The paper shows texts in words that all domains share with a small index, and texts in the target's own words with a "
        "large one. Here the texts at each end are drawn, not picked, and words are marked that are at least twice as frequent "
        "in the target as in the source, or the other way round.\n",
    ]
    for path in sorted(folder.glob("*.json")):
        from mtem_paper.cases import to_html, to_markdown  # it brings the whole library along

        found = _read(path)
        name, where = f"cases-{path.stem}.html", f"{found['target']}, {found['model']}, seed {found['seed']}"
        drawn[name] = to_html(found["cases"])
        parts += [f"### {where}\n", _verdict(found), f"The same in colour: [figures/{name}](figures/{name}).\n"]
        parts += [to_markdown(found["cases"]), _index_story(found["summary"])]
    return "\n".join(parts if len(parts) > 2 else [parts[0], "Not run.\n"])


def _verdict(case_study: Mapping[str, Any]) -> str:
    """Whether the index goes with whose words a text is in, and how often it was learned at all."""
    summary, chosen = case_study["summary"], case_study["settings"]
    found, texts, steps = summary.get("index_and_weight"), summary["texts"], chosen["steps"]
    passes = steps * chosen["batch_size"] / texts if steps else chosen["epochs"]
    told = f"The indexes are those at the end of the run, when each had been updated {passes:g} times"
    if chosen["index_step"] == "sign" and passes == round(passes):
        ends = summary["ends"]
        low, high = (f"{100 * ends[end]['share']:.1f}" for end in ("smallest", "largest"))
        told += (
            f" by ± {chosen['index_learning_rate']:g}, the sign of its gradient: a coin in its place would leave "
            f"{100 * 0.5**passes:.0f} % of the texts at either end, and here {low} and {high} % are there"
        )
    told += f"; the predictions are those of the chosen step, {case_study['chosen_step']}.\n"
    if found is None:
        return f"**The indexes do not differ, or the words do not: there is nothing to tell.** {told}"
    low, high = found["interval"]
    said = (
        "**As in the paper, texts in the target's own words have larger indexes**" if low > 0
        else "**Other than in the paper, texts in the target's own words have smaller indexes**" if high < 0
        else "**What the paper tells is not seen here**: the index does not go with whose words a text is in"
    )  # fmt: skip
    interval = ", ".join(digits(end, 2, sign=True) for end in (low, high))
    return f"{said} (rank correlation {digits(found['spearman'], 2, sign=True)} [{interval}] over {texts:,} texts). {told}"


def _index_story(summary: dict[str, Any]) -> str:
    """By tenths of the index: how confident, and in whose words."""
    rows = [
        [str(number + 1), str(tenth["texts"]), *(digits(tenth[key], 2) for key in ("index", "confidence", "mean_weight")),
         f"{100 * tenth['target_words']:.1f} %", f"{100 * tenth['source_words']:.1f} %"]
        for number, tenth in enumerate(summary["deciles"])
    ]  # fmt: skip
    header = ["tenth by index", "texts", "mean index", "confidence", "mean z of the words", "target's words", "source's words"]
    lines = ["- z: by how many standard errors the odds of a word differ; whose a word is, here is told from 3 on, however small "
             "the difference"]  # fmt: skip
    for key, what in (("index_and_weight", "the words' mean z"), ("index_and_confidence", "confidence")):
        found = summary.get(key)
        if found:
            interval = ", ".join(digits(end, 2, sign=True) for end in found["interval"])
            lines.append(f"- Rank correlation of the index with {what}: {digits(found['spearman'], 2, sign=True)} [{interval}]")
    for end, found in summary["ends"].items():
        lines.append(f"- The {end} index, {found['index']:.2f}, is that of {100 * found['share']:.1f} % of the texts")
    return markdown(header, rows) + "\n" + "\n".join(lines) + "\n"


def _picture(name: str, told: str) -> str:
    return f"![{told}](figures/{name}.svg)"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not readable as JSON ({error}); remove it and make it again") from None


def _save(path: Path, text: str) -> None:
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
