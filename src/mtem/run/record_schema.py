"""What run.json looks like, as far as anything that reads it depends on it."""

from __future__ import annotations

from typing import Any

from mtem.schema import NUMBER

_TEXT = (str, None)
_ENTRY: dict[Any, Any] = {"path?": _TEXT, "sha256": _TEXT, "texts?": _TEXT, "domain?": _TEXT}
_DATA: dict[Any, Any] = {"source": [_ENTRY], "target": [_ENTRY], "target_labeled": [_ENTRY]}
_ORIGIN: dict[Any, Any] = {"path?": _TEXT, "sha256?": _TEXT}
_ESTIMATE: dict[Any, Any] = {"accuracy": NUMBER, "low": NUMBER, "high": NUMBER, "notes?": [str]}

# Whatever reads a run: predict, evaluate, --source-model.
RUN: dict[Any, Any] = {
    "status": str,
    "classes?": [str],
    "settings?": dict,
    "resolved?": {"frozen_layers?": int},
    "data?": _DATA,
    "left_out?": [{"kind": str, "name": str}],
}
# A run to be resumed or repeated.
UNFINISHED_RUN: dict[Any, Any] = {
    **RUN,
    "method": str,
    "preset": str,
    "model": str,
    "classes": [str],
    "settings": dict,
    "data": _DATA,
    "source_model?": (_ORIGIN, None),
    "pretrained?": (_ORIGIN, None),
    "rehearsal?": (_ORIGIN, None),
    "columns?": {"text_column": _TEXT, "label_column": _TEXT},
    "versions?": {str: str},
    "resolved?": {"frozen_layers?": int, "threads?": int},
}
# A finished one, whose summary is printed.
FINISHED_RUN: dict[Any, Any] = {
    **UNFINISHED_RUN,
    "selection": {"kept_source_model": bool, "criterion": str, "chosen_step": int},
    "steps": {"adapt": int},
    "texts": {"source_held_out": int},
    "unit?": str,
    "choices?": dict,
    "estimate?": ({"before?": (_ESTIMATE, None), "after?": (_ESTIMATE, None)}, None),
    "warnings?": [str],
}
