"""The model card: README.md of a saved model."""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mtem.models.base import Model
from mtem.selection.diagnostics import no_estimate

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|!]")


def model_card(record: dict[str, Any], model_cls: type[Model]) -> str:
    """Return the card of a model.

    Parameters
    ----------
    record
        The contents of run.json; empty for a model without a run.
    model_cls
        Says which library reads the model, and how.
    """
    base = record.get("model")
    data = ModelCardData(
        library_name=model_cls.library_name, pipeline_tag=model_cls.pipeline_tag,
        tags=["domain-adaptation", "mtem"], base_model=base if isinstance(base, str) and _HUB_NAME.fullmatch(base) else None,
    )  # fmt: skip
    lines = [f"# {model_cls.card_title}"]
    if record:
        texts, choice, unit = record["texts"], record["selection"], record.get("unit", "texts")
        step = "The source model was kept." if choice["kept_source_model"] else f"Weights of step {choice['chosen_step']}."
        lines += [
            "",
            f"Adapted by `mtem` {record['versions']['mtem']} (method `{record['method']}`, preset `{record['preset']}`, "
            f"seed {record['seed']}) from `{_plain(base)}`.",
            "",
            f"- Classes: {', '.join(map(_plain, record['classes']))}",
            f"- Labeled {unit} trained on: {texts['source_trained_on']}; unlabeled target {unit}: {texts['target']}",
            f"- Weights chosen by `{choice['criterion']}`, without target labels. {step}",
            f"- {_estimate(record)}",
            *(f"- {line}" for line in _confidence(record)),
            *(f"- Warning: {_plain(line)}" for line in record["warnings"]),
            "",
            model_cls.usage(record["settings"], record["resolved"]["max_length"]),
            *_data(record),
            *_settings(record),
            *_limits(unit),
        ]
    return str(ModelCard("\n".join(["---", data.to_yaml(), "---", *lines]) + "\n"))


def _plain(value: Any) -> str:
    """Return a name from a user's file so that it cannot be read as markup."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split())
    return _MARKUP.sub(lambda match: "\\" + match[0], text[:200])


def _data(record: dict[str, Any]) -> list[str]:
    """Return the table of the files."""
    rows = []
    for role, entries in (record.get("data") or {}).items():
        for entry in entries or []:
            cells = [role.replace("_", " "), *(_plain(entry.get(name, "")) for name in ("domain", "name", "rows"))]
            rows.append(f"| {' | '.join(cells)} |")
    return ["", "## Data", "", "| role | domain | file | rows |", "|---|---|---|---:|", *rows] if rows else []


def _settings(record: dict[str, Any]) -> list[str]:
    """Return the settings that somebody or something chose; run.json has all."""
    origins = {name: origin for name, origin in (record.get("choices") or {}).items() if origin != "default"}
    values = {**record.get("settings", {}), **record.get("resolved", {})}
    rows = [f"| {name} | {_plain(values[name])} | {_plain(origin)} |" for name, origin in origins.items() if name in values]
    return ["", "## Settings", "", "| setting | value | from |", "|---|---|---|", *rows] if rows else []


def _limits(unit: str) -> list[str]:
    """Return what users of the model should know."""
    return [
        "", "## Limits", "",
        f"- The model is meant for {unit} like the unlabeled ones it was adapted to. "
        "On others it may be worse than the source model.",
        "- No target labels were used to choose the weights. An estimate without labels can be wrong: "
        f"measure on labeled {unit} before you rely on it (`mtem evaluate`).",
        "- It has the biases of its encoder and of its training texts.",
    ]  # fmt: skip


def _estimate(record: dict[str, Any]) -> str:
    estimate = (record.get("estimate") or {}).get("after")
    if estimate is None:
        reason = no_estimate(record)
        return reason[0].upper() + reason[1:] + "."
    return (
        f"Estimated accuracy on the target, without labels: {estimate['accuracy']:.3f} "
        f"({estimate['low']:.3f} to {estimate['high']:.3f})"
    )


def _confidence(record: dict[str, Any]) -> list[str]:
    if (temperature := record.get("temperature")) is None:  # a run of version 0.2.0 or older
        return []
    value, origin = temperature["value"], temperature["from"]
    origin = "source domains that stood for the target in a rehearsal" if origin == "rehearsal" else origin
    if value == 1:
        return [f"Confidences were not scaled by a temperature ({origin})."]
    return [f"Confidences were scaled by a temperature of {value:.3g}, fitted on {origin}; labels do not depend on it."]
