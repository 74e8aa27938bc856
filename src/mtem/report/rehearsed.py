"""The page of a rehearsal: what adaptation was worth in the source domains, and what it advises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtem.atomic import read_json
from mtem.errors import RequestError
from mtem.report.answer import Answer, duration, points
from mtem.report.charts import Figure, figure, safe
from mtem.report.files import finite, inside
from mtem.selection.rehearsed import RECORD, SOURCE_ONLY


def holds_rehearsal(path: Path) -> bool:
    """Return whether a folder is that of a rehearsal."""
    return (path / RECORD).is_file()


def read_rehearsal(path: Path) -> dict[str, Any]:
    """Return the record of a rehearsal.

    Raises
    ------
    RequestError
        If it cannot be read.
    """
    try:
        record = read_json(path / RECORD)
    except (OSError, ValueError, RecursionError, RequestError) as error:
        raise RequestError(f"{path / RECORD}: cannot be read ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(record, dict):
        raise RequestError(f"{path / RECORD}: is not the record of a rehearsal")
    return record


def answer(record: Mapping[str, Any], path: Path) -> Answer:
    """Return what a rehearsal says."""
    notes = [str(line) for line in record["notes"]] if isinstance(record.get("notes"), list) else []
    if record.get("status") != "done":
        return Answer(
            "unfinished", "This rehearsal is not finished.", [], notes, ["Continue it: the same command with --resume."]
        )
    recommended, why = str(record.get("recommended")), str(record.get("why", ""))
    figures = [("metric", str(record.get("metric", ""))), ("model", str(record.get("model", "")))]
    if (seconds := finite(record.get("seconds"))) is not None:
        figures.append(("time", duration(seconds)))
    if recommended == SOURCE_ONLY:
        return Answer(
            "unclear", f"Do not adapt: {why}.", figures, notes, ["Use the source model: mtem adapt ... --method source-only"]
        )
    step = f"Adapt as rehearsed: mtem adapt ... --rehearsal {path.name}/."
    return Answer("helped", f"Adaptation pays on your source domains: {why}.", figures, notes, [step])


def _advice(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = record.get("advice")
    if not isinstance(found, dict):
        return {}
    return {str(name): entry for name, entry in found.items() if isinstance(entry, dict) and name != SOURCE_ONLY}


def _gains(record: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the gain by domain; of a method that is not advised what its last pass would have given."""
    found: dict[str, Any] = entry["gains"] if isinstance(entry.get("gains"), dict) else {}
    if not entry.get("adapt"):
        trials = record.get("trials")
        found = {
            str(trial.get("domain")): last - before
            for trial in (trials if isinstance(trials, list) else [])
            if isinstance(trial, dict)
            and trial.get("method") == name
            and not trial.get("rare")
            and trial.get("after") is not None
            if (last := finite(trial.get("last"))) is not None and (before := finite(trial.get("before"))) is not None
        }
    return {str(domain): value for domain, gain in found.items() if (value := finite(gain)) is not None}


def charts(record: Mapping[str, Any]) -> list[Figure]:
    """Return the gains by domain and method."""
    data, told = [], []
    for name, entry in _advice(record).items():
        gains = _gains(record, name, entry)
        if gains:
            title = safe(name) if entry.get("adapt") else f"{safe(name)}, last pass (not advised)"
            data.append({"type": "bar", "name": title, "x": [safe(domain) for domain in gains], "y": list(gains.values())})
            told.append(f"{title}: " + ", ".join(f"{safe(domain)} {points(value)}" for domain, value in gains.items()))
    if not data:
        return []
    layout = {
        "showlegend": True,
        "barmode": "group",
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": "gain"}, "tickformat": "+.1%"},
    }
    note = "Each source domain stood for the target once, its labels hidden until the end."
    return [{"id": "gains", **figure("Gain in the source domains", note, "; ".join(told) + ".", data, **layout)}]


def table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of methods."""
    rows: list[list[str]] = []
    for name, entry in _advice(record).items():
        low, high, mean = (finite(entry.get(key)) for key in ("low", "high", "mean"))
        if not entry.get("adapt"):
            gains = list(_gains(record, name, entry).values())
            low, high, mean = None, None, sum(gains) / len(gains) if gains else None
        settings = [inside(entry, "settings", key) for key in ("learning_rate", "stop_epochs", "target_class_prior")]
        rows.append(
            [
                name, "yes" if entry.get("adapt") else "no", "" if mean is None else points(mean),
                "" if low is None or high is None else f"{points(low)} to {points(high)}",
                *("" if value is None else str(value) for value in settings),
            ]
        )  # fmt: skip
    return ["method", "adapt?", "mean gain", "95 % interval", "learning rate", "passes", "assumed class shares"], rows
