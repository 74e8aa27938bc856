"""The bundled sample of Amazon reviews."""

from __future__ import annotations

from pathlib import Path

from mtem.errors import RequestError


def sample_path(name: str | None = None) -> Path:
    """The folder of the bundled sample of Amazon reviews, or a file in it: `sample_path("books.jsonl.gz")`."""
    folder = Path(__file__).parent / "amazon_sample"
    if name is None:
        return folder
    path = folder / name
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("*.jsonl.gz"))) or "nothing"
        raise RequestError(f"{name}: not in the bundled sample; there is {there}")
    return path
