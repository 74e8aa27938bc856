"""Finds a method by its name, or in a Python file of the user's own.

To add a method to the package:

1. Write one file in this folder: a settings dataclass and a subclass of :class:`mtem.methods.Method`.
2. Add its name and its file to `METHODS`.
3. Test it in tests/methods/; ``tests/bench.py`` has a tiny model, batches and plain gradient steps.

A file of one's own needs neither 2 nor 3. Give its path in the place of a name: ``--method infomax.py``. It must define exactly
one subclass of :class:`mtem.methods.Method` with a `name`, a `Settings` dataclass and a `step`. docs/adding-a-method.md has a
complete example.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from mtem.capture import is_recording
from mtem.errors import RequestError, RunError
from mtem.files import special_kind
from mtem.methods.base import Batch, Method, StepLog, Update

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
    """Return the class of a method.

    Parameters
    ----------
    name : str
        A name in `METHODS`, or the path of a Python file (it ends in ``.py``) with one method in it.

    Returns
    -------
    type
        The subclass of `Method`.

    Raises
    ------
    RequestError
        If there is no such method, or the file cannot be used.
    """
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in METHODS:
        raise RequestError(f"unknown method '{name}': choose one of {', '.join(METHODS)}, or give a file of your own: NAME.py")
    module = importlib.import_module(f"mtem.methods.{METHODS[name]}")
    return next(method_cls for method_cls in _methods_in(module) if method_cls.name == name)


def _load_file(path: Path) -> type[Method]:
    if kind := special_kind(path):
        raise RequestError(f"{path}: is {kind}; --method takes a name or a Python file with a method in it")
    if not path.is_file():
        raise RequestError(f"{path}: no such file; --method takes a name or a Python file with a method in it")
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except SystemExit as stop:
        raise RequestError(f"{path}: cannot be imported: it calls exit({stop.code!r})") from None
    except Exception as error:
        raise RequestError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    methods = [method_cls for method_cls in _methods_in(module) if method_cls.__module__ == module.__name__]
    if len(methods) != 1:
        raise RequestError(f"{path}: expected one method (a subclass of mtem.methods.Method with a name), found {len(methods)}")
    method_cls = methods[0]
    if inspect.isabstract(method_cls) or not hasattr(method_cls, "Settings"):
        missing = "step" if inspect.isabstract(method_cls) else "Settings"
        raise RequestError(f"{path}: {method_cls.__name__} has no '{missing}'; see docs/adding-a-method.md")
    if not (isinstance(method_cls.Settings, type) and dataclasses.is_dataclass(method_cls.Settings)):
        raise RequestError(f"{path}: {method_cls.__name__}.Settings is not a dataclass; see docs/adding-a-method.md")
    _name_the_file_in_errors(method_cls, path)
    return method_cls


def _name_the_file_in_errors(method_cls: type[Method], path: Path) -> None:
    """Let a step of a user's method end in one line that says where the file is wrong."""
    own_step = method_cls.step

    @functools.wraps(own_step)
    def step(self: Method, number: int, source: Batch, target: Batch, update: Update) -> StepLog:
        try:
            log = own_step(self, number, source, target, update)
        except (RequestError, RunError, torch.OutOfMemoryError):
            raise
        except SystemExit as stop:
            raise RunError(f"{path}: step {number + 1} calls exit({stop.code!r})") from None
        except Exception as error:
            if is_recording():  # a step that cannot be captured runs again, without
                raise
            raise RunError(f"{path}{_line_in(path, error)}: step {number + 1} failed: {type(error).__name__}: {error}") from error
        if not isinstance(log, dict) or not all(isinstance(value, (Tensor, int, float)) for value in log.values()):
            got = "nothing" if log is None else f"a {type(log).__name__}"
            raise RunError(f"{path}: step {number + 1} returned {got}; expected a dict of figures to log, as in {{'loss': loss}}")
        return log

    method_cls.step = step  # type: ignore[method-assign]


def _line_in(path: Path, error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()]
    return f", line {lines[-1]}" if lines else ""


def _methods_in(module: ModuleType) -> list[type[Method]]:
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
    return [method_cls for method_cls in classes if getattr(method_cls, "name", None)]
