"""docs/results.md and its figures, from the files under results/. Nothing is run, and the same results give the same page.

The sentences are in page.md; this module fills in the tables and figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from string import Template

from mtem.atomic import replaced
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem_paper import cells as cell_files
from mtem_paper import checks, coverage, figures, measurements, rehearsal_tables, rehearsals, statistics, tables, twins
from mtem_paper.formatting import bullets, digits, percent, picture
from mtem_paper.protocol import DATASETS
from mtem_paper.statistics import LEVEL, name_of, recomputed

TEMPLATE = Path(__file__).with_name("page.md")
FIGURES = ("entropy", "trajectory", "cost", "theory", "cases")  # how the names of the page's own figures begin


def write(results: Path, docs: Path, progress: Progress | None = None) -> None:
    """Write docs/results.md and its figures in docs/figures; figures of an earlier page that this one lacks are removed.

    Parameters
    ----------
    results
        The folder of cells and other measurements.
    docs
        Where to write.
    progress
        Where to report.

    Raises
    ------
    RequestError
        If a file of results is damaged, or matplotlib is not installed.
    """
    figures.require_matplotlib()
    progress = progress or Progress(quiet=True)
    drawn: dict[str, str] = {}  # by file name
    parts = sections(results, load(results), drawn)
    values: dict[str, str] = {}
    with progress.stage("page of results", len(parts)):
        for number, (name, make) in enumerate(parts.items()):
            value = make()
            values |= value if isinstance(value, dict) else {name: value.strip()}
            progress.advance(number + 1)
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    for name, content in drawn.items():
        _save(docs / "figures" / name, content)
    _save(docs / "results.md", re.sub(r"\n{3,}", "\n\n", text))
    for path in (docs / "figures").iterdir():
        if path.stem.split("-")[0] in FIGURES and path.suffix in (".svg", ".html") and path.name not in drawn:
            path.unlink()


def load(results: Path) -> cell_files.Results:
    """Read all cells, and check their scores against their predictions.

    Raises
    ------
    RequestError
        If a cell is damaged, or its predictions give another score.
    """
    loaded = cell_files.read(results, twins.fill)
    if loaded.damaged:
        more = f" ({len(loaded.damaged) - 1} more)" if len(loaded.damaged) > 1 else ""
        raise RequestError(loaded.damaged[0] + more)
    for cell in loaded.cells:
        if abs(recomputed(cell) - cell["score"]) > 1e-6:
            raise RequestError(
                f"cell {name_of(cell)}: its score is {cell['score']}, its predictions give {recomputed(cell)}; run it again"
            )
    return loaded


def sections(results: Path, loaded: cell_files.Results, drawn: dict[str, str]) -> dict[str, Callable[[], str | dict[str, str]]]:
    """Return what makes the value of each placeholder of the template; a dict has the values of several."""
    cells = loaded.cells
    boards = tables.boards(cells)
    rehearsed = rehearsals.of_default_models(rehearsals.read(results))

    def headline() -> dict[str, str]:
        result = tables.headline(boards)
        counts = {name: str(getattr(result, name)) for name in ("comparisons", "better", "worse", "best")}
        return {**counts, "unclear": str(result.comparisons - result.better - result.worse), "headline": result.table.strip()}

    def constants() -> dict[str, str]:
        without, runs = checks.without_estimate(loaded.current)
        about = {f"{key}_measured": dataset.measured for key, dataset in DATASETS.items()}
        about |= {f"{key}_oracle": dataset.oracle_labels for key, dataset in DATASETS.items()}
        about |= {"draws": f"{statistics.DRAWS:,}", "level": digits(LEVEL, 2), "percent": percent(LEVEL)}
        return {**about, "without_estimate": str(without), "estimate_runs": str(runs)}

    def entropy() -> str:
        drawn["entropy.svg"] = figures.entropy_figure()
        return picture("entropy", "Tsallis entropy of two classes")

    cost, theory = results / "cost", results / "theory"
    return {
        "constants": constants,
        "headline": headline,
        "runs": lambda: coverage.runs(cells),
        "lent": lambda: str(twins.lent(cells)),
        "failures": lambda: bullets(coverage.failures(results)),
        "source_models": lambda: coverage.source_models(cells),
        "earlier_rules": lambda: coverage.earlier_rules(cells, loaded.current),
        "so_far": lambda: coverage.so_far(cells, loaded.current),
        "amazon": lambda: tables.general("amazon", boards),
        "outside": lambda: tables.outside(boards),
        "pheme": lambda: tables.general("pheme", boards),
        "trivial": lambda: tables.trivial(boards),
        "ablation": lambda: tables.ablation(cells),
        "batch_sizes": lambda: tables.batch_sizes(cells),
        "estimates": lambda: checks.estimates(loaded.current),
        "choices": lambda: checks.choices(cells),
        "rehearsal_stopping": lambda: rehearsal_tables.stopping(rehearsed),
        "rehearsal_automatic": lambda: rehearsal_tables.automatic(rehearsed),
        "rehearsal_estimates": lambda: rehearsal_tables.estimates(rehearsed),
        "rehearsal_calibration": lambda: rehearsal_tables.calibration(results),
        "rehearsal_shares": lambda: rehearsal_tables.shares(rehearsed),
        "entropy_figure": entropy,
        "trajectories": lambda: measurements.trajectories(cells, drawn),
        "cost_figures": lambda: measurements.cost_figures(cost, drawn),
        "cost": lambda: measurements.cost_table(cost, peers=False),
        "second_order": lambda: measurements.second_order_over_taylor(cost),
        "peers": lambda: measurements.cost_table(cost, peers=True),
        "convergence": lambda: measurements.convergence(theory, drawn),
        "bounds": lambda: measurements.bounds(theory),
        "cases": lambda: measurements.case_studies(results / "cases", drawn),
        "corrections": lambda: bullets(tables.corrections()),
    }


def _save(path: Path, text: str) -> None:
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
