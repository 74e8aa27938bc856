"""The bundled sample of Amazon reviews."""

from __future__ import annotations

from pathlib import Path

from mtem.errors import RequestError


def sample_path(name: str | None = None) -> Path:
    """Return the folder of the bundled sample, or a file in it: `sample_path("books.jsonl.gz")`.

    Raises
    ------
    RequestError
        If there is no file of this name.
    """
    folder = Path(__file__).parent / "amazon_sample"
    if name is None:
        return folder
    path = folder / name
    if not path.is_file():
        names = ", ".join(sorted(file.name for file in folder.glob("*.jsonl.gz"))) or "none"
        raise RequestError(f"{name}: not in the bundled sample; its files are {names}")
    return path
