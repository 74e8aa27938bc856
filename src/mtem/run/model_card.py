"""The model card: README.md of a saved model."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mtem.models.base import Model
from mtem.selection.diagnostics import no_estimate


def model_card(record: dict[str, Any], model_cls: type[Model]) -> str:
    """Return the card of a model.

    Parameters
    ----------
    record
        The contents of run.json; empty for a model without a run.
    model_cls
        Says which library reads the model, and how.
    """
    data = ModelCardData(library_name=model_cls.library_name, pipeline_tag=model_cls.pipeline_tag, tags=["domain-adaptation"])
    lines = [f"# {model_cls.card_title}"]
    if record:
        texts, choice, unit = record["texts"], record["selection"], record.get("unit", "texts")
        step = "The source model was kept." if choice["kept_source_model"] else f"Weights of step {choice['chosen_step']}."
        lines += [
            "",
            f"Adapted by `mtem` {record['versions']['mtem']} (method `{record['method']}`, preset `{record['preset']}`, "
            f"seed {record['seed']}) from `{record['model']}`.",
            "",
            f"- Classes: {', '.join(record['classes'])}",
            f"- Labeled {unit} trained on: {texts['source_trained_on']}; unlabeled target {unit}: {texts['target']}",
            f"- Weights chosen by `{choice['criterion']}`, without target labels. {step}",
            f"- {_estimate(record)}",
            *(f"- {line}" for line in _confidence(record)),
            *(f"- Warning: {line}" for line in record["warnings"]),
            "",
            model_cls.usage(record["settings"], record["resolved"]["max_length"]),
        ]
    return str(ModelCard("\n".join(["---", data.to_yaml(), "---", *lines]) + "\n"))


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
