"""Finding a method: by its name, or in a file of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from mtem.errors import RequestError
from mtem.methods.base import Method

# name on the command line -> module of this package
METHODS = {
    "mtem": "mtem",
    "source-only": "source_only",
    "dann": "dann",
    "fixmatch": "fixmatch",
    "cst": "cst",
    "mme": "mme",
    "biat": "biat",
    "wind": "wind",
}


def get(name: str) -> type[Method]:
    """The method of that name, or the one in a file of the user's own (a path that ends in .py)."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in METHODS:
        raise RequestError(f"unknown method '{name}': there are {', '.join(METHODS)}, or give a file of your own: NAME.py")
    module = importlib.import_module(f"mtem.methods.{METHODS[name]}")
    return next(kind for kind in _methods_of(module) if kind.name == name)


def _from_file(path: Path) -> type[Method]:
    if not path.is_file():
        raise RequestError(f"{path}: no such file; --method takes a name or a Python file with a method in it")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    found = [kind for kind in _methods_of(module) if kind.__module__ == module.__name__]
    if len(found) != 1:
        raise RequestError(f"{path}: one method (a subclass of mtem.methods.Method with a name) is wanted, found {len(found)}")
    return found[0]


def _methods_of(module: Any) -> list[type[Method]]:
    return [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, Method) and getattr(k, "name", None)]
