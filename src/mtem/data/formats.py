"""File formats of tables, by extension: CSV, TSV, JSON lines and Parquet, each also gzipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mtem.errors import RequestError

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
DELIMITERS = {"csv": ",", "tsv": "\t"}
PARQUET_BATCH = 1024  # records read or written at once
LARGEST_RECORD = 1 << 25  # characters in a row of a text file: no text is that long, a damaged or hostile file may be
MOST_COLUMNS = 1_000_000


def file_format(path: str | Path) -> tuple[str, bool]:
    """Return the format that a file's extension stands for, and whether the file is gzipped.

    Parameters
    ----------
    path : str or Path
        The file need not exist.

    Returns
    -------
    name : str
        "csv", "tsv", "json" or "parquet".
    gzipped : bool
        Whether the last extension is ".gz".

    Raises
    ------
    RequestError
        If the extension is unknown.
    """
    path = Path(path)
    gzipped = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix if gzipped else path.suffix
    name = FORMATS.get(suffix.lower())
    if name is None:
        raise RequestError(
            f"{path}: unknown file format {suffix or path.name!r}; use one of {', '.join(FORMATS)}, optionally with .gz"
        )
    return name, gzipped


def bare_name(path: str | Path) -> str:
    """Return a file's name without the extensions of its format: books.labeled.jsonl.gz -> books.labeled."""
    path = Path(path)
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    return path.stem if path.suffix.lower() in FORMATS else path.name


def check_names(names: Sequence[str], where: str) -> None:
    """Check the names of the columns of a table.

    Raises
    ------
    RequestError
        If a name occurs twice, or there are more than `MOST_COLUMNS`.
    """
    if len(names) > MOST_COLUMNS:
        raise RequestError(f"{where}: has {len(names)} columns; tables of up to {MOST_COLUMNS} are read")
    if repeated := next((name for name, count in Counter(names).items() if count > 1), None):
        raise RequestError(f"{where}: column {repeated!r} occurs twice; rename one")
