"""What each package may import, and that the tables of commands and packages are complete."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# From the bottom up: a package imports packages before it and itself, never those after it. docs/design.md explains the order.
PACKAGES = (
    ("__init__", "errors", "settings", "terminal", "progress", "files", "schema", "interrupts", "atomic", "locks"),
    ("tensors", "capture", "dropout", "memory", "recompute"),
    ("processes", "ray_pool", "liveness", "parallel"),
    ("tsallis", "annealing", "schedules"),
    ("metrics",),
    ("metagrad",),
    ("data",),
    ("datasets",),
    ("models",),
    ("inference",),
    ("methods",),
    ("selection",),
    ("training",),
    ("run",),
    ("rehearsal",),
    ("report",),
    ("cli", "__main__"),
)
LEVEL = {package: level for level, packages in enumerate(PACKAGES) for package in packages}


def package_of(module: str) -> str:
    """Return the package of a module, "__init__" for the package itself: mtem.data.corpus -> data."""
    return [*module.split("."), "__init__"][1]


def modules() -> list[Path]:
    return sorted((SRC / "mtem").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the mtem modules that a file imports, wherever in it, but for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "mtem" else {node.module}
    return {name for name in names if name.split(".")[0] in ("mtem", "mtem_paper")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_a_package_imports_only_packages_below_it(path):
    own = path.relative_to(SRC / "mtem").with_suffix("").parts[0]
    assert own in LEVEL, f"{own} is not a known package: add it to PACKAGES and to docs/design.md"
    for name in imported(path):
        assert name.split(".")[0] == "mtem", f"{name}: nothing in mtem imports mtem_paper"
        package = package_of(name)
        if own != "__init__":  # the public surface imports lazily from every package
            assert LEVEL[package] <= LEVEL[own]


def test_no_package_names_a_model_of_another():
    """Models are found in their registry: no `== "bigcn"` outside it."""
    for path in modules():
        if "models" not in path.parts:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
            assert not [text for text in compared if "bigcn" in text.lower()], path


def test_every_command_has_the_first_line_of_its_help_in_the_table():
    from mtem.cli.main import COMMANDS, load_command

    for name, (_, _, line) in COMMANDS.items():
        assert (load_command(name).help or "").splitlines()[0].strip() == line, name


def test_the_paper_is_imported_only_when_it_is_called():
    code = (
        "import sys\nimport mtem.cli.main as main\nsys.argv = ['mtem', '--help']\n"
        "try:\n    main.main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('mtem_paper', 'mtem.run', 'torch', 'matplotlib')\n"
        "print('LOADED', sorted(name for name in sys.modules if name.startswith(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout and "reproduce" in done.stdout


def test_a_quiet_library_prints_nothing():
    """Warnings go to the logger "mtem"; without a handler of the user's they are not printed."""
    code = "import logging, mtem\nlogging.getLogger('mtem.run.pipeline').warning('only for loggers')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
