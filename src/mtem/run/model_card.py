"""The card beside a saved model."""

from __future__ import annotations

from typing import Any

from mtem import models
from mtem.selection.accuracy_estimate import FEWEST_HELD_OUT_TEXTS


def withheld(record: dict[str, Any]) -> str:
    """Why a run gives no estimate, in words."""
    count, unit = record["texts"]["source_held_out"], record.get("unit", "texts")
    counted = f"{count} source {unit[:-1] if count == 1 else unit} {'was' if count == 1 else 'were'}"
    return (
        f"no accuracy estimate: only {counted} held out, and at least {FEWEST_HELD_OUT_TEXTS} are needed; "
        f"give more labeled {unit}, or measure on labeled ones of the target"
    )


def _estimated(record: dict[str, Any]) -> str:
    estimate = (record.get("estimate") or {}).get("after")
    if estimate is None:
        told = withheld(record)
        return told[0].upper() + told[1:] + "."
    return (
        f"Estimated accuracy on the target, without labels: {estimate['accuracy']:.3f} "
        f"({estimate['low']:.3f} to {estimate['high']:.3f})"
    )


def card(record: dict[str, Any]) -> str:
    """A model card from the run's record."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-classification", "---", "# A text classifier"]
    if record.get("model") == models.BIGCN:
        lines = ["---", "library_name: mtem", "---", "# A classifier of threads"]
    if record:
        texts, choice, unit = record["texts"], record["selection"], record.get("unit", "texts")
        kept = "The source model was kept." if choice["kept_source_model"] else f"Weights of step {choice['chosen_step']}."
        lines += [
            "",
            f"Adapted by `mtem` {record['versions']['mtem']} (method `{record['method']}`, preset `{record['preset']}`, "
            f"seed {record['seed']}) from `{record['model']}`.",
            "",
            f"- Classes: {', '.join(record['classes'])}",
            f"- Labeled {unit} trained on: {texts['source_trained_on']}; unlabeled target {unit}: {texts['target']}",
            f"- Weights chosen by `{choice['criterion']}`, without target labels. {kept}",
            f"- {_estimated(record)}",
            *(f"- Warning: {line}" for line in record["warnings"]),
            "",
        ]
        if record["model"] == models.BIGCN:
            lines.append(f"A BiGCN over `{record['settings']['features']}` features: read it with `mtem.load(PATH)`.")
        else:
            lines.append(
                f"Texts are cut at {record['resolved']['max_length']} tokens. A pipeline does so when it is told to: "
                '`pipeline("text-classification", PATH)(texts, truncation=True)`.'
            )
    return "\n".join(lines) + "\n"
