"""The card beside a saved model."""

from __future__ import annotations

from typing import Any

from mtem import models
from mtem.models import encoders
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
    model_cls = models.get_class(record.get("model", encoders.DEFAULT))
    lines = ["---", f"library_name: {model_cls.library_name}"]
    if model_cls.pipeline_tag is not None:
        lines.append(f"pipeline_tag: {model_cls.pipeline_tag}")
    lines += ["---", f"# {model_cls.card_title}"]
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
            model_cls.usage(record["settings"], record["resolved"]["max_length"]),
        ]
    return "\n".join(lines) + "\n"
