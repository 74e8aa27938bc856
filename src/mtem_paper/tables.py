"""The paper's tables and ours, as Markdown: from cells, without running anything.

A difference is called clear, or marked ≈ if it is not, after a correction for the number of comparisons in its family. These are
the families, each corrected by itself (`comparison.family`):

- headline: MTEM over the source model, in every place (`_gains`)
- one table's column "over Out" (or "over MTEM"): every row of it (`over`)
- the best of one table against every other method in it, by the mean over the targets (`behind`)
- the best on a target against every other method, all targets of one table together (`behind_by_target`)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from mtem_paper import protocol, published
from mtem_paper.statistics import LEVEL, POSITIVE, Board, Cell, Difference, family

SETTINGS = ("unsupervised", "semi-supervised")
ENGINES = ("taylor", "second-order", "layerwise")
TITLES = {"amazon": "Amazon", "pheme": "PHEME"}
MEASURED = {"amazon": "accuracy on Amazon", "pheme": "F1 of the class rumour on PHEME (the paper's TWITTER)"}
GENERAL = ("out", "out-as-is", "dann", "fixmatch", "cst", "mme", "biat", "wind", "mtem", "mtem-as-is", "mtem-paper", "oracle",
           "oracle-as-is")  # fmt: skip
UNCORRECTED = ("out-as-is", "mtem-as-is", "mtem-paper", "oracle-as-is")  # on PHEME: without assumed class shares, as in the paper
ABLATION = ("mtem", "mtem-without-meta", "mtem-without-annealing", "mtem-without-sampling")
NAMES = {
    "out": "Out",
    "out-as-is": "Out (uncorrected)",
    "dann": "DANN",
    "fixmatch": "FixMatch",
    "cst": "CST",
    "mme": "MME",
    "biat": "BiAT",
    "wind": "WIND",
    "mtem": "MTEM",
    "mtem-as-is": "MTEM (uncorrected)",
    "mtem-paper": "MTEM (paper's settings)",
    "oracle": "*oracle: target labels*",
    "oracle-as-is": "*oracle (uncorrected)*",
    "mtem-without-meta": "w/o M: one index",
    "mtem-without-annealing": "w/o A: no annealing",
    "mtem-without-sampling": "w/o S: no sampling",
}

Place = tuple[str, str, str, str]  # dataset, model, pool, setting

REASONS = {
    "amazon": """\
What the runs tell about why the paper's figures differ stands below each heading. Not tested: the encoder (BERT-base there), the
splits and the unlabeled reviews, and settings that the paper leaves open. [protocol.md](protocol.md) has the list.
""",
    "pheme": """\
F1 of the smaller class hangs on how many threads are called rumours as much as on the method, so all methods assume even class
shares: their mean probabilities are corrected to these, and the column "called rumours" says what comes of it. The rows
"uncorrected" and "paper's settings" go without, as the paper does; they are compared with Out (uncorrected). Average precision
does not depend on a bias. What the runs tell about why the paper's figures differ stands below each heading. Not tested: what the
trees' nodes hold (TF-IDF here; the paper does not say), the splits, the number of seeds. [protocol.md](protocol.md) has the list.
""",
}


def places(cells: Sequence[Cell], dataset: str) -> list[tuple[str, str]]:
    """(model, pool) of the dataset's cells."""
    return sorted({(cell["model"], cell["pool"]) for cell in cells if cell["dataset"] == dataset})


def of(cells: Sequence[Cell], **wanted: str) -> list[Cell]:
    return [cell for cell in cells if all(cell[key] == value for key, value in wanted.items())]


def told_place(place: Place) -> str:
    dataset, model, pool, setting = place
    return ", ".join([TITLES[dataset], model, *([f"{pool} pool"] if dataset == "amazon" else []), setting])


def boards(cells: Sequence[Cell]) -> dict[Place, Board]:
    """The general comparison (Tables 1 and 2), Amazon first."""
    found = {}
    for dataset in TITLES:
        for model, pool in places(cells, dataset):
            for setting in SETTINGS:
                here = of(cells, dataset=dataset, model=model, pool=pool, setting=setting)
                own = sorted({cell["variant"] for cell in here} - set(protocol.VARIANTS))  # methods from files
                board = Board(here, (*GENERAL, *own), published.TARGETS[dataset], POSITIVE[dataset])
                if board.variants:
                    found[dataset, model, pool, setting] = board
    return found


def over(board: Board, baseline: str) -> dict[str, Difference | None]:
    """The family of a table's column: each variant against the baseline, or against the source model that was corrected alike."""
    return family({variant: board.compare(variant, other) for variant, other in _against(board, baseline).items()})


def behind(board: Board, best: str, among: Sequence[str] | None = None) -> dict[str, Difference | None]:
    """The family of the best (by the mean over the targets) against every other method, or `among` some; oracles left out."""
    others = [variant for variant in _fair(board) if variant != best and (among is None or variant in among)]
    return family({variant: board.compare(best, variant) for variant in others})


def behind_by_target(board: Board) -> dict[tuple[str, str], Difference | None]:
    """The family of the best on each target against every other method, by (variant, target)."""
    best = {target: board.best(target) for target in board.targets}
    return family(
        {
            (variant, target): board.compare(first, variant, target)
            for target, first in best.items()
            for variant in _fair(board)
            if first and variant != first
        }
    )


def _fair(board: Board) -> list[str]:
    return [variant for variant in board.variants if not board.oracle(variant)]


def _against(board: Board, baseline: str) -> dict[str, str]:
    """What each variant of a table is compared with."""
    own = {variant: _baseline(board, variant) if baseline == "out" else baseline for variant in board.variants}
    return {variant: baseline if variant == "out-as-is" else other for variant, other in own.items() if variant != baseline}


def _kinds(place: Place, board: Board) -> dict[str, tuple[str, str, list[str]]]:
    """By name: source model, MTEM, and all methods that were corrected alike."""
    plain = [variant for variant in _fair(board) if _baseline(board, variant) == "out-as-is"]
    kinds = {told_place(place): ("out", "mtem", [variant for variant in _fair(board) if variant not in plain])}
    if "mtem-as-is" in plain:
        kinds[f"{told_place(place)}, no class shares assumed"] = ("out-as-is", "mtem-as-is", plain)
    return kinds


def _gains(found: Mapping[Place, Board]) -> dict[str, Difference | None]:
    """The family of the headline: MTEM over the source model in every place."""
    return family(
        {
            where: board.compare(mtem, out)
            for place, board in found.items()
            for where, (out, mtem, _) in _kinds(place, board).items()
        }
    )


def headline(found: Mapping[Place, Board]) -> str:
    """MTEM against the source model, here and in the paper, and who wins."""
    rows, gains, level = [], _gains(found), 0
    for place, board in found.items():
        paper = _paper(place)
        for where, (out, mtem, rivals) in _kinds(place, board).items():
            best = board.best(among=rivals)
            row = [where, str(len(board.seeds)), *(digits(board.mean(variant)) for variant in (out, mtem)), told(gains[where])]
            row.append(_gain(paper, "mtem", "out"))
            if best is None:
                rows.append([*row, "unfinished"])
                continue
            # The same family as the table's, so that both say the same; the best of another kind has its own.
            compared = {variant: each for variant, each in _family_of(board, best, rivals).items() if variant in rivals}
            level += mtem == best or _unclear(compared.get(mtem))
            rows.append([*row, f"{_name(best, paper)} {digits(board.mean(best))}{_level(compared, paper)}"])
    known = [gain for gain in gains.values() if gain]
    up, down = (sum(gain.clear and (gain.value > 0) is sign for gain in known) for sign in (True, False))
    said = (
        f"Of {len(known)} comparisons, MTEM is clearly better than Out in {up} and clearly worse in {down}; in "
        f"{len(known) - up - down} the runs do not tell. It is the best, or cannot be told apart from the best, in {level}.\n"
    )
    return f"{said}\n{markdown(['where', 'seeds', 'Out', 'MTEM', 'MTEM over Out', 'in the paper', 'best here'], rows)}"


def _family_of(board: Board, best: str, among: Sequence[str]) -> dict[str, Difference | None]:
    return behind(board, best) if best == board.best() else behind(board, best, among)


def _unclear(difference: Difference | None) -> bool:
    return difference is not None and not difference.clear


def _parted(compared: Mapping[str, Difference | None], paper: published.Table) -> tuple[list[str], list[str]]:
    """The names of those that cannot be told apart from the best, and of those it is clearly ahead of."""
    near = [_name(variant, paper) for variant, difference in compared.items() if _unclear(difference)]
    return near, [_name(variant, paper) for variant, difference in compared.items() if difference and difference.clear]


def _level(compared: Mapping[str, Difference | None], paper: published.Table) -> str:
    """Who is level with the best, in brackets; those who are not, if they are fewer."""
    near, after = _parted(compared, paper)
    if len(near) > 1 and not after:
        return " (≈ all others)"
    few = f"all but {', '.join(after)}" if len(near) > max(3, len(after)) else ", ".join(near)
    return f" (≈ {few})" if near else ""


def general(dataset: str, found: Mapping[Place, Board]) -> str:
    """Table 1 (pheme) or 2 (amazon), a section for each model, pool and setting."""
    title = f"## Table {2 if dataset == 'amazon' else 1}: {MEASURED[dataset]}\n"
    here = {place: board for place, board in found.items() if place[0] == dataset}
    if not here:
        return f"{title}\nNot run.\n"
    parts = [title, REASONS[dataset]]
    for place, board in here.items():
        paper = _paper(place)
        parts += [f"### {told_place(place)}\n", _verdict(board, paper), _why(board, paper), _scores(board, paper, "out")]
        parts += ["The paper's:\n", _printed(paper, "out"), _more(board, paper) if board.best() else ""]
    if dataset == "pheme":
        parts += [_trivial(board) for (*_, setting), board in here.items() if setting == "unsupervised"][:1]
    return "\n".join(parts)


def _paper(place: Place) -> published.Table:
    return next(table for table in published.TABLES[:4] if (table.dataset, table.setting) == (place[0], place[3]))


def _baseline(board: Board, variant: str) -> str:
    """The source model that was corrected alike."""
    return "out-as-is" if variant in UNCORRECTED and "out-as-is" in board.variants else "out"


def _verdict(board: Board, paper: published.Table) -> str:
    """What the table says, in words."""
    best = board.best()
    if best is None:
        return f"**Unfinished**: seed {board.seeds[0]}, and few methods have all targets yet.\n"
    near, after = _parted(behind(board, best), paper)
    others = "every other" if all(map(board.complete, board.variants)) else "all others that are finished"
    if not near:
        level = f"clearly ahead of {others}"
    elif len(near) > 1 and not after:
        level = "cannot be told apart from any other"
    else:
        few = len(near) > max(3, len(after))
        level = f"clearly ahead of {', '.join(after)} only" if few else f"cannot be told apart from {', '.join(near)}"
    said = f"**Best: {_name(best, paper)}, {digits(board.mean(best))}**, {level}."
    gain = over(board, "out").get("mtem")
    if gain and best != "out":
        clear = _worded(gain, "a clear gain", "a clear loss")
        said += f" MTEM over {_name('out', paper)}: {told(gain)}, {clear}; in the paper {_gain(paper, 'mtem', 'out')}."
    return f"{said} {_seeds(board)}{_smallest(board, paper, 'out')}\n"


def _worded(gain: Difference, better: str, worse: str) -> str:
    if gain.seeds == 1:
        return "one seed, so not known"
    return "no clear difference" if not gain.clear else better if gain.value > 0 else worse


def _smallest(board: Board, paper: published.Table, baseline: str) -> str:
    """What a table of so few seeds cannot show: how large a difference has to be, for a method that varies as most do.

    The smallest p of n comparisons has to be below LEVEL / n (`comparison.holm`).
    """
    against = {each: other for each, other in _against(board, baseline).items() if len(board.paired(each, other)) > 1}
    reaches = [reach for each, other in against.items() if (reach := board.reach(each, other, LEVEL / len(against)))]
    if not reaches:
        return ""
    return (
        f" With {len(board.seeds)} seeds and {len(against)} comparisons, a difference from {_name(baseline, paper)} has to be "
        f"about {digits(statistics.median(reaches))} (median over the methods) to be clear; smaller ones may be there, unseen."
    )


def _why(board: Board, paper: published.Table) -> str:
    """What our own runs say about the distance from the paper's figures."""
    out = "out-as-is" if "out-as-is" in board.variants else "out"  # the paper assumes no class shares
    oracle = "oracle-as-is" if out == "out-as-is" else "oracle"
    name, lines = _name(out, paper), []
    mean, best, theirs = board.mean(out), board.mean(oracle), paper.score("out", "mean")
    if mean is not None:
        higher = (
            f", more than a model has here that learned from target labels ({digits(best)})" if best and theirs > best else ""
        )
        lines.append(f"- {name} has {digits(mean)} here and {digits(theirs)} in the paper{higher}")
    column = over(board, "out")
    labels = column.get(oracle)
    if labels:
        what = "half of the test set's labels, and no unlabeled texts" if paper.dataset == "amazon" else "on 70 % of the event"
        lines.append(
            f"- Training on target labels as well (oracle: {what}) changes it by {told(labels)}; the paper's MTEM, without them, "
            f"by {_gain(paper, 'mtem', 'out')}"
        )
    chosen = board.mean("mtem", figure=_by_target_labels)
    if chosen is not None and math.isfinite(chosen):
        lines.append(
            "- Had MTEM's weights been chosen by target labels (the paper does not say how its own were), it would be better by "
            f"{digits(chosen - board.mean('mtem'))} at most"
        )
    shares, own = column.get("out-as-is"), column.get("mtem-as-is")
    if shares:
        said = f"- Assuming even class shares changes it by {told(shares.turned())} before any adaptation"
        lines.append(said + (f"; without it, MTEM over Out is {told(own)}" if own else ""))
    return "\n".join(lines) + "\n" if lines else ""


def _by_target_labels(cell: Cell) -> float:
    return (cell.get("target_selected") or {}).get("score", math.nan)


def _seeds(board: Board) -> str:
    listed = ", ".join(map(str, board.seeds))
    unknown = "how much training varies is not known, so intervals are over texts only and nothing is called clear"
    said = f"Seeds {listed}." if len(board.seeds) > 1 else f"One seed ({listed}): {unknown}."
    left = [str(seed) for seed in board.ran if seed not in board.seeds]
    return said + (f" Left out, as not complete: seed {', '.join(left)}." if left else "")


def _scores(board: Board, paper: published.Table, baseline: str) -> str:
    """A row for each variant: its score on every target, the mean, and how far it is from the baseline and from the best."""
    winner = board.best()
    column, by_target = over(board, baseline), behind_by_target(board)
    rivals = behind(board, winner) if winner else {}
    rows = []
    for variant in board.variants:
        own = board.seeds_of(variant)
        seeds = f" (seed {', '.join(map(str, own))})" if own else " (unfinished)"
        row = [_name(variant, paper) + ("" if board.complete(variant) or not winner else seeds)]
        for target in board.targets:
            text = digits(board.mean(variant, target))
            row.append(_marked(text, variant == board.best(target), by_target.get((variant, target))))
        if winner:
            spread = board.spread(variant)
            mean = _marked(digits(board.mean(variant)), variant == winner, rivals.get(variant))
            row.append(mean + (f" ± {digits(spread)}" if spread is not None else ""))
            row.append("" if variant == baseline else told(column[variant]))
            second = board.best(but=winner)
            ahead = rivals.get(second) if second and variant == winner else None
            row.append(told(ahead or rivals[variant].turned()) if ahead or rivals.get(variant) else "")
        rows.append(row)
    header = ["method", *board.targets, "mean", f"over {_name(baseline, paper)}", "over the best other"]
    header = header[: len(rows[0]) if baseline == "out" else min(len(rows[0]), len(header) - 1)]
    return markdown(header, [row[: len(header)] for row in rows])


def _marked(text: str, best: bool, difference: Difference | None) -> str:
    """A score: bold if it is the best, with ≈ if it cannot be told apart from the best."""
    return f"**{text}**" if best else text + ("≈" if _unclear(difference) else "")


def _more(board: Board, paper: published.Table) -> str:
    """Further means of the same runs."""

    def precision(cell: Cell) -> float:
        found = cell["metrics"]["average_precision"][board.positive]
        return float("nan") if found is None else found

    def called(cell: Cell) -> float:
        return cell["predictions"].count(str(cell["classes"].index(board.positive))) / len(cell["predictions"])

    figures = {"score, had target labels chosen (oracle)": _by_target_labels}
    if board.positive:
        figures |= {
            f"called {board.positive}s": called,
            "accuracy": lambda cell: cell["metrics"]["accuracy"], "average precision": precision,
        }  # fmt: skip
    rows = []
    for variant in board.variants:
        if board.seeds_of(variant):
            values = [digits(board.mean(variant, figure=figure)) for figure in figures.values()]
            seconds = board.mean(variant, figure=lambda cell: cell.get("seconds") or math.nan) or math.nan
            kept = sum(cell["search"][cell["chosen"]]["chosen_step"] == 0 for cell in board.found(variant))
            alone = all(cell["method"] == "source-only" for cell in board.found(variant))
            share = "" if alone else f"{kept} of {len(board.found(variant))}"
            rows.append([_name(variant, paper), *values, share, f"{seconds:.0f}" if math.isfinite(seconds) else "—"])
    header = ["method", *figures, "runs that kept the source model", "seconds per run"]
    return f"More of our runs:\n\n{markdown(header, rows)}"


def told(difference: Difference | None) -> str:
    if difference is None:
        return "—"
    low, high = digits(difference.low, sign=True), digits(difference.high, sign=True)
    return f"{'' if difference.clear else '≈ '}{digits(difference.value, sign=True)} [{low}, {high}]"


def _gain(paper: published.Table, variant: str, baseline: str) -> str:
    mine, theirs = paper.row(variant), paper.row(baseline)
    if mine is None or theirs is None:
        return "—"
    return digits(round(statistics.fmean(mine.scores) - statistics.fmean(theirs.scores), 6), sign=True)


def _name(variant: str, paper: published.Table) -> str:
    name = NAMES.get(variant, variant)
    return f"In+{name}" if variant in ("out", "out-as-is") and paper.setting == "semi-supervised" else name


def _printed(paper: published.Table, baseline: str) -> str:
    """The paper's table."""
    rows = []
    for row in paper.rows:
        gain = "" if row.variant == baseline else _gain(paper, row.variant, baseline)
        rows.append([row.name, *map(digits, row.scores), digits(row.mean), gain])
    return markdown(["method", *published.TARGETS[paper.dataset], "mean", f"over {_name(baseline, paper)}"], rows)


def _trivial(board: Board) -> str:
    """What F1 is worth: calling every thread a rumour."""
    rows = []
    for target in published.EVENTS:
        rumours, threads = published.EVENT_SIZES[target]
        known = [cell["metrics"].get("trivial_f1") for (_, name, _), cell in board.cells.items() if name == target]
        known = [value for value in known if value is not None] or [published.trivial_f1(rumours, threads)]
        trivial = statistics.fmean(known)
        row = [target, f"{rumours} of {threads:,}", digits(trivial)]
        for score in (
            board.mean("out", target), board.mean("mtem", target),
            *(published.PHEME_UNSUPERVISED.score(variant, target) for variant in ("out", "mtem")),
        ):  # fmt: skip
            row.append(f"*{digits(score)}*" if score is not None and score < trivial else digits(score))
        rows.append(row)
    header = ["target", "rumours", "all called rumours", "Out", "MTEM", "the paper's Out", "the paper's MTEM"]
    said = "F1 of calling every thread a rumour, which needs no model; unsupervised scores below it are in italics.\n"
    return f"### What knowing nothing gives\n\n{said}\n{markdown(header, rows)}"


def outside(found: Mapping[Place, Board]) -> str:
    rows = [[each.method, digits(each.score), each.encoder, each.source] for each in published.OUTSIDE]
    for (dataset, model, pool, setting), board in found.items():
        best = board.best()
        if (dataset, setting) == ("amazon", "unsupervised") and best:
            where = f"ours, {pool} pool"
            rows.append([f"{NAMES.get(best, best)}, best here", digits(board.mean(best)), model, where])
            rows += [["MTEM", digits(board.mean("mtem")), model, where]] if best != "mtem" and board.mean("mtem") else []
    said = "Unsupervised, three source domains to one target, mean accuracy. Other encoders, other splits: not a ranking.\n"
    return f"### Beside what was published elsewhere\n\n{said}\n{markdown(['method', 'accuracy', 'encoder', 'where'], rows)}"


def ablation(cells: Sequence[Cell]) -> str:
    parts = ["## Tables 3 and 4: what each part of MTEM adds\n"]
    for dataset, number in (("amazon", 4), ("pheme", 3)):
        paper, ran = next(table for table in published.TABLES if table.number == number), False
        for model, pool in places(cells, dataset):
            place = (dataset, model, pool, "unsupervised")
            found = of(cells, dataset=dataset, model=model, pool=pool, setting="unsupervised")
            board = Board(found, ABLATION, published.TARGETS[dataset], POSITIVE[dataset])
            if len(board.variants) > 1:
                ran = True
                said = f"{_parts(board, paper)} {_seeds(board)}{_smallest(board, paper, 'mtem')}\n".lstrip()
                parts += [f"### Table {number}: {told_place(place)}\n", said, _scores(board, paper, "mtem")]
        parts += ["The paper's:\n", _printed(paper, "mtem")] if ran else [f"Table {number}, {TITLES[dataset]}: not run.\n"]
    return "\n".join(parts)


def _parts(board: Board, paper: published.Table) -> str:
    """What MTEM loses without each of its parts, in words."""
    parts = {"mtem-without-meta": "learned indexes", "mtem-without-annealing": "annealing", "mtem-without-sampling": "sampling"}
    lines, column = [], over(board, "mtem")
    for variant, name in parts.items():
        lost = column.get(variant)
        if lost is not None:
            clear = _worded(lost, "clearly better", "clearly worse")
            lines.append(f"without {name} {told(lost)}, {clear} (in the paper {_gain(paper, variant, 'mtem')})")
    return f"Against MTEM: {'; '.join(lines)}." if lines else ""


def batch_sizes(cells: Sequence[Cell]) -> str:
    title = "## Table 5: accuracy on kitchen by batch size\n"
    header = ["engine", *map(str, published.BATCH_SIZES)]
    paper = [[f"{engine}, the paper", *map(digits, scores)] for engine, scores in published.BATCH_SIZE_SCORES.items()]
    parts = []
    for model, pool in places(cells, "amazon"):
        found = of(cells, dataset="amazon", model=model, pool=pool, setting="unsupervised")
        variants = [f"mtem-{engine}-{size}" for engine in ENGINES for size in published.BATCH_SIZES]
        board, rows = Board(found, variants, ("kitchen",), None), []
        for engine in ENGINES if board.variants else ():
            row = []
            for size in published.BATCH_SIZES:
                variant = f"mtem-{engine}-{size}"
                mean, spread, own = board.mean(variant), board.spread(variant), board.seeds_of(variant)
                text = "not run" if mean is None else digits(mean) + (f" ± {digits(spread)}" if spread is not None else "")
                row.append(text + (f" (seed {', '.join(map(str, own))})" if own and own != board.seeds else ""))
            rows.append([f"{engine}, ours", *row])
        if rows:
            where = told_place(("amazon", model, pool, "unsupervised"))
            parts += [f"{where}. {_seeds(board)}{_span(board)}\n", markdown(header, [*rows, *paper])]
    if not parts:
        return f"{title}\nNot run.\n"
    return "\n".join([title, *parts, "The engine `layerwise` is not in the paper; — in its rows: out of memory.\n"])


def _span(board: Board) -> str:
    """How far the batch size and the engine move the score, beside the seeds."""
    means = [mean for variant in board.variants if (mean := board.mean(variant)) is not None]
    spreads = [spread for variant in board.variants if (spread := board.spread(variant)) is not None]
    if not spreads:
        return ""
    paper = [score for scores in published.BATCH_SIZE_SCORES.values() for score in scores if score is not None]
    moved = "less than" if max(means) - min(means) < max(spreads) else "not less than"
    return (
        f" From {digits(min(means))} to {digits(max(means))} over all sizes and engines, {moved} the seeds of one of them vary "
        f"(± {digits(max(spreads))}); in the paper from {digits(min(paper))} to {digits(max(paper))}."
    )


def corrections() -> str:
    """What is wrong or odd in the paper's own figures."""
    lines = []
    for table in published.TABLES:
        where = f"Table {table.number}" + (f", {table.setting}" if table.number < 3 else "")
        lines += [f"- {where}, {row.name}: {row.correction}" for row in table.rows if row.correction]
        lines += [f"- {where}: {note}" for note in table.notes]
    lines += [f"- Table 5: {note}" for note in published.BATCH_SIZE_NOTES]
    lines.append(f"- PHEME: {published.EVENT_SIZES_CORRECTION}")
    return "\n".join(["## The paper's own figures, set right\n", *lines]) + "\n"


def digits(value: float | None, places: int = 3, sign: bool = False) -> str:
    """As the paper writes it: .937"""
    if value is None or not math.isfinite(value):
        return "—"
    text = f"{round(value, places) + 0.0:{'+' if sign else ''}.{places}f}"  # + 0.0: no negative zero
    return text.replace("0.", ".", 1) if text.lstrip("+-").startswith("0.") else text


def once(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows with their first cell empty where it repeats the one above."""
    return [["" if k and row[0] == rows[k - 1][0] else row[0], *row[1:]] for k, row in enumerate(rows)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers on the right."""
    numbers = [all(row[k] in ("", "not run") or row[k][0] in "0123456789.+-*≈—" for row in rows) for k in range(len(header))]
    lines = ["| " + " | ".join(header) + " |", "|" + "".join("---:|" if right else "---|" for right in numbers)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
