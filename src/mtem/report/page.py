"""The page: template, style, script and data in one file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtem.atomic import replaced
from mtem.errors import RequestError
from mtem.report import answer as answers
from mtem.report import comparison, rehearsed
from mtem.report.answer import Answer
from mtem.report.charts import Figure, charts
from mtem.report.explorer import explorer, typical_words
from mtem.report.files import RunFiles, read_run
from mtem.run.directory import REHEARSAL, RunDirectory

LARGEST = 6_000_000  # bytes of a page
REPORT = "report.html"
POLICY = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
RESERVE = 100_000  # for what is written around the texts


def write_report(paths: str | Path | Sequence[str | Path], output: Path | None = None) -> Path:
    """Write the report of a run or of a rehearsal, or the comparison of several runs, and return the file.

    Parameters
    ----------
    paths
        Run directories, or that of one rehearsal.
    output
        The file; by default ``report.html`` in the directory, of a comparison ``comparison.html`` in the current one.

    Raises
    ------
    RequestError
        If a path is no such directory.
    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    first = folders[0]
    if len(folders) > 1:
        target, page = Path("comparison.html"), comparison_page([read_run(path) for path in folders])
    elif rehearsed.holds_rehearsal(first) and not RunDirectory(first).has_record():
        target, page = first / REPORT, rehearsal_page(rehearsed.read_rehearsal(first), first)
    else:
        target, page = RunDirectory(first).report_path, run_page(read_run(first))
    target = output or target
    with replaced(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return target


def run_page(run: RunFiles) -> str:
    """Return the page of a run, with its rehearsal if it has one."""
    name, figures, tables = run.path.resolve().name, charts(run), ""
    if rehearsed.holds_rehearsal(run.path / REHEARSAL):
        try:
            record = rehearsed.read_rehearsal(run.path / REHEARSAL)
        except RequestError as error:
            run.problems.append(str(error))
        else:
            figures += rehearsed.charts(record)
            tables = titled("The rehearsal before this run", table(*rehearsed.table(record)))
    words = {} if run.words is None else typical_words(run.words, *run.word_texts)
    data: dict[str, Any] = {"figures": figures, "words": words, "unit": run.unit, "name": name}
    fixed = sum(len(asset(file)) for file in ("plotly-basic.min.js", "report.js", "report.css")) + len(embedded(data))
    texts = explorer(run, LARGEST - fixed - RESERVE)
    data["texts"] = None if texts is None else {key: texts[key] for key in ("rows", "total", "cut")}
    parts = {"explorer": "" if texts is None else asset("explorer.html"), "tables": tables, "settings": settings_tables(run)}
    return assembled(name, answers.answer(run), data, parts, "" if texts is None else texts["packed"])


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Return the page that compares runs."""
    data = {"figures": comparison.charts(runs), "texts": None}
    parts = {"tables": titled("The runs", table(*comparison.table(runs)))}
    return assembled("comparison", comparison.compare(runs), data, parts)


def rehearsal_page(record: dict[str, Any], path: Path) -> str:
    """Return the page of a rehearsal."""
    data = {"figures": rehearsed.charts(record), "texts": None}
    parts = {"tables": titled("The methods", table(*rehearsed.table(record)))}
    return assembled(path.resolve().name, rehearsed.answer(record, path), data, parts)


def assembled(name: str, found: Answer, data: dict[str, Any], more: dict[str, str], packed: str = "") -> str:
    """Return the template with its values, data and scripts; a policy allows these scripts alone.

    Parameters
    ----------
    name
        What the page is about.
    found
        The top of the page.
    data
        For the script: "figures", and of a run the description of its texts.
    more
        Parts that not every page has.
    packed
        The texts of a run.
    """
    scripts = [asset("plotly-basic.min.js"), asset("report.js")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    parts = {
        "explorer": "", "tables": "", "settings": "", **more,
        "title": html.escape(f"{name}: report"),
        "heading": html.escape(name),
        "verdict": found.verdict,
        "headline": html.escape(found.headline),
        "figures": "".join(f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(text)}</dd></div>" for key, text in found.figures),
        "worries": listed("What to worry about", found.worries),
        "next_steps": listed("What to do next", found.next_steps),
        "charts": titled("What happened", f'<div class="charts">{"".join(map(chart, data["figures"]))}</div>'),
        "policy": f"default-src 'none'; script-src {hashes}; {POLICY}",
        "style": asset("report.css"),
        "data": embedded(data),
        "packed": packed,
        "scripts": "".join(f"<script>{script}</script>" for script in scripts),
    }  # fmt: skip
    page = asset("page.html")
    pieces = page.split("{{")  # one pass: what is filled in is never looked at again
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def asset(name: str) -> str:
    """Return a file of the page."""
    return (files("mtem.report") / "assets" / name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """Return JSON for a script element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def titled(title: str, content: str) -> str:
    """Return a section with a heading; both are HTML."""
    return f"<section><h2>{title}</h2>{content}</section>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def listed(title: str, lines: Sequence[str]) -> str:
    """Return a titled list, or nothing."""
    if not lines:
        return ""
    return (
        f"<section><h2>{html.escape(title)}</h2><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul></section>"
    )


def chart(figure: Figure) -> str:
    """Return the place of a figure, with its description for those who cannot see it."""
    name, note = html.escape(figure["id"]), figure["note"]
    # titles and notes were escaped for Plotly where they contain names, so they are HTML already
    return (
        f'<figure class="chart" id="{name}" aria-labelledby="{name}-title"><h3 id="{name}-title">{figure["title"]}</h3>'
        f'<div class="plot" id="{name}-plot" role="img" aria-label="{html.escape(html.unescape(figure["alt"]))}"></div>'
        f"<figcaption>{note}</figcaption></figure>"
    )


def settings_tables(run: RunFiles) -> str:
    """Return settings, data and versions as tables that are closed at first."""
    parts = []
    groups = {
        "Settings": "settings",
        "Found for this device": "resolved",
        "Versions": "versions",
        "Where choices came from": "choices",
    }
    for title, key in groups.items():
        values = run.get(key)
        if isinstance(values, dict) and values:
            rows = "".join(
                f"<tr><th scope='row'>{html.escape(str(name))}</th><td>{html.escape(shown(value))}</td></tr>"
                for name, value in list(values.items())[:500]
            )
            parts.append(f"<details><summary>{title}</summary><div class='wide'><table>{rows}</table></div></details>")
    return titled("Settings and versions", "".join(parts)) if parts else ""


def shown(value: Any) -> str:
    """Return a value of a setting as text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else text[:299] + "…"
