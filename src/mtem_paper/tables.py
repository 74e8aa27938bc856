"""The paper's tables and ours, as Markdown: from cells, without running anything.

A difference is called clear, or marked ≈ if it is not, after a correction for the number of comparisons in its family. These are
the families, each corrected separately (`statistics.family`):

- headline: MTEM over the source model, in every place (`gains`)
- one table's column "over Out" (or "over MTEM"): every row of it (`over`)
- the best of one table against every other method in it, by the mean over the targets (`behind`)
- the best on a target against every other method, all targets of one table together (`behind_by_target`)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtem_paper import protocol, published
from mtem_paper.formatting import NOT_RUN, difference, digits, table
from mtem_paper.protocol import DATASETS, SETTINGS, UNSUPERVISED, VARIANTS
from mtem_paper.statistics import LEVEL, Board, Cell, Difference, Figure, family


class Place(NamedTuple):
    """Where runs are compared with each other."""

    dataset: str
    model: str
    pool: str
    setting: str

    @property
    def title(self) -> str:
        """What headings and rows call it."""
        return DATASETS[self.dataset].place(self.model, self.pool, self.setting)


def places(cells: Sequence[Cell]) -> list[Place]:
    """Return the places of the cells, in the order of data sets, models, pools and settings."""
    distinct = {Place(cell["dataset"], cell["model"], cell["pool"], cell["setting"]) for cell in cells}
    return sorted(distinct, key=lambda place: (list(DATASETS).index(place.dataset), *place[1:3], SETTINGS.index(place.setting)))


def at(cells: Sequence[Cell], place: Place) -> list[Cell]:
    """Return the cells of a place."""
    return [cell for cell in cells if all(cell[name] == value for name, value in place._asdict().items())]


def make_board(cells: Sequence[Cell], place: Place, variants: Sequence[str]) -> Board:
    """Return the board of some variants in a place."""
    about = DATASETS[place.dataset]
    return Board(at(cells, place), variants, about.targets, about.positive)


def boards(cells: Sequence[Cell]) -> dict[Place, Board]:
    """Return the boards of the general comparison (Tables 1 and 2), with methods from files as further rows."""
    own = sorted({cell["variant"] for cell in cells} - set(VARIANTS))
    all_boards = {place: make_board(cells, place, (*protocol.in_group(protocol.GENERAL), *own)) for place in places(cells)}
    return {place: board for place, board in all_boards.items() if board.variants}


# ---------------------------------------------------------------------- families of comparisons


def over(board: Board, baseline: str) -> dict[str, Difference | None]:
    """Return the family of a column: each variant against the baseline, or the source model with the same correction."""
    return family({variant: board.compare(variant, other) for variant, other in _against(board, baseline).items()})


def behind(board: Board, best: str, among: Sequence[str] | None = None) -> dict[str, Difference | None]:
    """Return the family of the best (by the mean over the targets) against every other method (in `among`) but oracles."""
    others = [variant for variant in _fair(board) if variant != best and (among is None or variant in among)]
    return family({variant: board.compare(best, variant) for variant in others})


def behind_by_target(board: Board) -> dict[tuple[str, str], Difference | None]:
    """Return the family of the best on each target against every other method, by (variant, target)."""
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


def _baseline(board: Board, variant: str) -> str:
    """Return the source model with the same correction of the class shares."""
    return "out-as-is" if protocol.find(variant).uncorrected and "out-as-is" in board.variants else "out"


def _against(board: Board, baseline: str) -> dict[str, str]:
    """Return what each variant of a table is compared with."""
    own = {variant: _baseline(board, variant) if baseline == "out" else baseline for variant in board.variants}
    return {variant: baseline if variant == "out-as-is" else other for variant, other in own.items() if variant != baseline}


class MethodGroup(NamedTuple):
    """The methods of a place with the same correction of the class shares."""

    title: str
    source_model: str
    mtem: str
    variants: list[str]


def _method_groups(place: Place, board: Board) -> list[MethodGroup]:
    plain = [variant for variant in _fair(board) if _baseline(board, variant) == "out-as-is"]
    groups = [MethodGroup(place.title, "out", "mtem", [variant for variant in _fair(board) if variant not in plain])]
    if "mtem-as-is" in plain:
        groups.append(MethodGroup(f"{place.title}, no class shares assumed", "out-as-is", "mtem-as-is", plain))
    return groups


def gains(by_place: Mapping[Place, Board]) -> dict[str, Difference | None]:
    """Return the family of the headline: MTEM over the source model in every place, by title."""
    return family(
        {
            group.title: board.compare(group.mtem, group.source_model)
            for place, board in by_place.items()
            for group in _method_groups(place, board)
        }
    )


# ---------------------------------------------------------------------- the headline


class Headline(NamedTuple):
    """MTEM against the source model: a table, and how many comparisons had which result."""

    table: str
    comparisons: int
    better: int
    worse: int
    best: int
    """In how many MTEM is the best, or not clearly behind the best."""


def headline(by_place: Mapping[Place, Board]) -> Headline:
    """Return MTEM against the source model, here and in the paper, and the best method of each place."""
    rows, differences, best_or_level = [], gains(by_place), 0
    for place, board in by_place.items():
        paper = _paper(place)
        for group in _method_groups(place, board):
            best = board.best(among=group.variants)
            means = (digits(board.mean(variant)) for variant in (group.source_model, group.mtem))
            row = [group.title, str(len(board.seeds)), *means, difference(differences[group.title]), _gain(paper, "mtem", "out")]
            if best is None:
                rows.append([*row, "unfinished", ""])
                continue
            # The same family as the table's if it has the same best, so that both mark the same differences.
            family_of_best = behind(board, best, None if best == board.best() else group.variants)
            compared = {variant: result for variant, result in family_of_best.items() if variant in group.variants}
            mtem = compared.get(group.mtem)
            best_or_level += group.mtem == best or (mtem is not None and not mtem.clear)
            rows.append([*row, _best(board, paper, group.variants), _clearly_behind(compared, paper)])
    clear = [result.value > 0 for result in differences.values() if result and result.clear]
    header = ["where", "seeds", "Out", "MTEM", "MTEM over Out", "in the paper", "best here", "clearly worse than the best"]
    comparisons = sum(result is not None for result in differences.values())
    return Headline(table(header, rows), comparisons, sum(clear), len(clear) - sum(clear), best_or_level)


def _best(board: Board, paper: published.Table, among: Sequence[str] | None = None) -> str:
    """Return the best method with its mean, and the methods that have the same one."""
    best = board.all_best(among=among)
    return f"{', '.join(_name(variant, paper) for variant in best)} {digits(board.mean(best[0]))}"


def _clearly_behind(compared: Mapping[str, Difference | None], paper: published.Table) -> str:
    return ", ".join(_name(variant, paper) for variant, result in compared.items() if result and result.clear) or "none"


# ---------------------------------------------------------------------- Tables 1 and 2


def general(dataset: str, by_place: Mapping[Place, Board]) -> str:
    """Return Table 1 (pheme) or 2 (amazon): a section for each model, pool and setting."""
    parts = []
    for place, board in by_place.items():
        if place.dataset == dataset:
            paper = _paper(place)
            parts += [f"### {place.title}\n", summary(board, paper), scores(board, paper, "out")]
            parts += ["The paper's:\n", _printed(paper, "out")]
            parts += ["More of our runs:\n", _more(board, paper)] if board.best() else []
    return "\n".join(parts) or NOT_RUN


def _paper(place: Place) -> published.Table:
    return next(paper for paper in published.GENERAL if (paper.dataset, paper.setting) == (place.dataset, place.setting))


def _name(variant: str, paper: published.Table) -> str:
    return protocol.find(variant).title(paper.setting)


def summary(board: Board, paper: published.Table) -> str:
    """Return the main figures of a place beside the paper's."""
    best, column = board.best(), over(board, "out")
    # The paper assumes no class shares.
    source_model, oracle = ("out-as-is", "oracle-as-is") if "out-as-is" in board.variants else ("out", "oracle")
    rows = [["best method", _best(board, paper) if best else "unfinished", ""]]
    if best:
        rows.append(["clearly worse than the best", _clearly_behind(behind(board, best), paper), ""])
    rows.append([_name(source_model, paper), digits(board.mean(source_model)), digits(paper.score("out", "mean"))])
    for variant, other, theirs in (
        ("mtem", "out", _gain(paper, "mtem", "out")), ("mtem-as-is", "out-as-is", _gain(paper, "mtem", "out")),
        (oracle, source_model, ""),
    ):  # fmt: skip
        if column.get(variant):
            rows.append([f"{_name(variant, paper)} over {_name(other, paper)}", difference(column[variant]), theirs])
    uncorrected = column.get("out-as-is")
    if uncorrected:
        rows.append([f"{_name('out', paper)} over {_name('out-as-is', paper)}", difference(uncorrected.turned()), ""])
    mean, chosen = board.mean("mtem"), board.mean("mtem", figure=_by_target_labels)
    if mean is not None and chosen is not None:
        rows.append(["MTEM, gain if target labels chose the weights", digits(chosen - mean), ""])
    return table(["figure", "here", "in the paper"], [*rows, *_precision(board, paper, "out")])


def _precision(board: Board, paper: published.Table, baseline: str) -> list[list[str]]:
    """Return the seeds, and how large a difference has to be to be clear: the smallest p of n has to be below LEVEL / n."""
    rows = [["seeds", ", ".join(map(str, board.seeds)), ""]]
    if incomplete := [str(seed) for seed in board.ran if seed not in board.seeds]:
        rows.append(["seeds left out, not complete", ", ".join(incomplete), ""])
    against = {variant: other for variant, other in _against(board, baseline).items() if len(board.paired(variant, other)) > 1}
    reaches = [reach for variant, other in against.items() if (reach := board.reach(variant, other, LEVEL / len(against)))]
    if reaches:
        label = f"smallest clear difference from {_name(baseline, paper)}, median of {len(against)} comparisons"
        rows.append([label, digits(statistics.median(reaches)), ""])
    return rows


def _by_target_labels(cell: Cell) -> float:
    return float((cell.get("target_selected") or {}).get("score", math.nan))


def scores(board: Board, paper: published.Table, baseline: str) -> str:
    """Return a row for each variant: its score on every target, the mean, the difference from the baseline and the best.

    Without the baseline there are no means, and the best is known only if enough rows are complete.
    """
    winner, by_target = board.best(), behind_by_target(board)
    begun = winner is not None or board.complete(baseline)
    column = over(board, baseline) if begun else {}
    rivals = behind(board, winner) if winner else {}
    winners, bests = board.all_best(), {target: board.all_best(target) for target in board.targets}
    second = board.best(but=winner) if winner else None
    rows = []
    for variant in board.variants:
        own = board.seeds_of(variant)
        unfinished = (
            "" if board.complete(variant) or not begun else f" (seed {', '.join(map(str, own))})" if own else " (unfinished)"
        )
        row = [_name(variant, paper) + unfinished]
        for target in board.targets:
            row.append(_marked(digits(board.mean(variant, target)), variant in bests[target], by_target.get((variant, target))))
        if begun:
            spread = board.spread(variant)
            mean = _marked(digits(board.mean(variant)), variant in winners, rivals.get(variant))
            row.append(mean + (f" ± {digits(spread)}" if spread is not None else ""))
            row.append("" if variant == baseline else difference(column[variant]))
        if winner and baseline == "out":
            ahead, after = rivals.get(second or "") if variant == winner else None, rivals.get(variant)
            row.append(difference(ahead or (after and after.turned())) if ahead or after else "")
        rows.append(row)
    header = ["method", *board.targets, "mean", f"over {_name(baseline, paper)}", "over the best other"]
    return table(header[: len(rows[0])], rows)


def _marked(text: str, best: bool, behind_best: Difference | None) -> str:
    """Return a score: bold if it is the best, with ≈ if it is not clearly below the best."""
    return f"**{text}**" if best else text + ("≈" if behind_best is not None and not behind_best.clear else "")


def _printed(paper: published.Table, baseline: str) -> str:
    rows = []
    for row in paper.rows:
        gain = "" if row.variant == baseline else _gain(paper, row.variant, baseline)
        rows.append([row.name, *map(digits, row.scores), digits(row.mean), gain])
    return table(["method", *DATASETS[paper.dataset].targets, "mean", f"over {_name(baseline, paper)}"], rows)


def _gain(paper: published.Table, variant: str, baseline: str) -> str:
    mine, theirs = paper.row(variant), paper.row(baseline)
    if mine is None or theirs is None:
        return "—"
    return digits(round(statistics.fmean(mine.scores) - statistics.fmean(theirs.scores), 6), sign=True)


def _more(board: Board, paper: published.Table) -> str:
    """Further means of the same runs."""
    positive = board.positive

    def precision(cell: Cell) -> float:
        value = cell["metrics"]["average_precision"][positive]
        return math.nan if value is None else float(value)

    def called(cell: Cell) -> float:
        return float(cell["predictions"].count(str(cell["classes"].index(positive))) / len(cell["predictions"]))

    figures: dict[str, Figure] = {"score, had target labels chosen (oracle)": _by_target_labels}
    if positive is not None:
        figures |= {f"called {positive}s": called, "accuracy": lambda cell: float(cell["metrics"]["accuracy"])}
        figures |= {"average precision": precision}
    rows = []
    for variant in board.variants:
        cells = board.cells_of(variant)
        if cells:
            values = [digits(board.mean(variant, figure=figure)) for figure in figures.values()]
            seconds = board.mean(variant, figure=lambda cell: cell.get("seconds") or math.nan) or math.nan
            kept = sum(cell["search"][cell["chosen"]]["chosen_step"] == 0 for cell in cells)
            share = "" if all(cell["method"] == "source-only" for cell in cells) else f"{kept} of {len(cells)}"
            rows.append([_name(variant, paper), *values, share, f"{seconds:.0f}" if math.isfinite(seconds) else "—"])
    return table(["method", *figures, "runs that kept the source model", "seconds per run"], rows)


def trivial(by_place: Mapping[Place, Board]) -> str:
    """Return the F1 of predicting a rumour for every thread, beside unsupervised scores; scores below it are in italics."""
    paper, rows = published.PHEME_UNSUPERVISED, []
    for board in [board for place, board in by_place.items() if (place.dataset, place.setting) == (paper.dataset, paper.setting)][
        :1
    ]:
        for target in board.targets:
            rumours, threads = published.EVENT_SIZES[target]
            trivial_f1 = [cell["metrics"].get("trivial_f1") for (_, name, _), cell in board.cells.items() if name == target]
            trivial_f1 = [value for value in trivial_f1 if value is not None] or [published.trivial_f1(rumours, threads)]
            least = statistics.fmean(trivial_f1)
            values = [board.mean(variant, target) for variant in ("out", "mtem")] + [
                paper.score(variant, target) for variant in ("out", "mtem")
            ]
            marked = [f"*{digits(value)}*" if value is not None and value < least else digits(value) for value in values]
            rows.append([target, f"{rumours} of {threads:,}", digits(least), *marked])
    return table(["target", "rumours", "all called rumours", "Out", "MTEM", "the paper's Out", "the paper's MTEM"], rows)


def outside(by_place: Mapping[Place, Board]) -> str:
    """Return accuracies on Amazon that were published elsewhere, and ours."""
    rows = [[entry.method, digits(entry.score), entry.encoder, entry.source] for entry in published.OUTSIDE]
    for place, board in by_place.items():
        if (place.dataset, place.setting) == ("amazon", UNSUPERVISED):
            best, mtem, where = board.all_best(), board.mean("mtem"), [place.model, f"ours, {place.pool} pool"]
            if best:
                names = ", ".join(protocol.find(variant).name for variant in best)
                rows.append([f"{names}, best here", digits(board.mean(best[0])), *where])
            if mtem and "mtem" not in best:
                rows.append(["MTEM", digits(mtem), *where])
    return table(["method", "accuracy", "encoder", "where"], rows)


# ---------------------------------------------------------------------- Tables 3 to 5


def ablation(cells: Sequence[Cell]) -> str:
    """Return Tables 3 and 4: MTEM without each of its parts."""
    parts = []
    for paper in published.ABLATION:
        for place in places(cells):
            board = make_board(cells, place, protocol.in_group(protocol.ABLATION))
            if (place.dataset, place.setting) == (paper.dataset, paper.setting) and len(board.variants) > 1:
                parts += [f"### Table {paper.number}: {place.title}\n", scores(board, paper, "mtem")]
                parts.append(table(["figure", "here", ""], _precision(board, paper, "mtem")))
        parts += [f"The paper's Table {paper.number}, {DATASETS[paper.dataset].title}:\n", _printed(paper, "mtem")]
    return "\n".join(parts)


def batch_sizes(cells: Sequence[Cell]) -> str:
    """Return Table 5: the accuracy on kitchen by engine and batch size, with the standard deviation over the seeds."""
    header = ["engine", *map(str, protocol.BATCH_SIZES)]
    paper = [[f"{engine}, the paper", *map(digits, values)] for engine, values in published.BATCH_SIZE_SCORES.items()]
    variants = protocol.in_group(protocol.BATCH_SIZE)
    targets = tuple(dict.fromkeys(target for variant in variants for target in VARIANTS[variant].targets or ()))
    parts = []
    for place in places(cells):
        board = Board(at(cells, place), variants, targets, DATASETS[place.dataset].positive)
        rows = {engine: [f"{engine}, ours"] for engine in protocol.ENGINES}
        for variant in variants:
            mean, spread, own = board.mean(variant), board.spread(variant), board.seeds_of(variant)
            text = "not run" if mean is None else digits(mean) + (f" ± {digits(spread)}" if spread is not None else "")
            text += f" (seed {', '.join(map(str, own))})" if own and own != board.seeds else ""
            rows[VARIANTS[variant].given["engine"]].append(text)
        if board.variants:
            seeds = ", ".join(map(str, board.seeds))
            parts += [f"{place.title}, seeds {seeds}:\n", table(header, [*rows.values(), *paper])]
    return "\n".join(parts) or NOT_RUN


def corrections() -> list[str]:
    """Return what is wrong or inconsistent in the paper's own figures."""
    lines = []
    for paper in published.TABLES:
        title = f"Table {paper.number}" + (f", {paper.setting}" if paper in published.GENERAL else "")
        lines += [f"{title}, {row.name}: {row.correction}" for row in paper.rows if row.correction]
        lines += [f"{title}: {note}" for note in paper.notes]
    return [*lines, *(f"Table 5: {note}" for note in published.BATCH_SIZE_NOTES), f"PHEME: {published.EVENT_SIZES_CORRECTION}"]
