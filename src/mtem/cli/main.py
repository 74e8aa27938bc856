"""The command line: the table of commands, and how errors become exit codes.

A command is one function in a file of its own: it parses, calls the library and prints. To add one, write the file and an entry
in `COMMANDS`. A command's module is imported when the command is called, so `mtem --help` is quick.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from mtem import interrupts
from mtem.cli.console import ToldExit, out
from mtem.errors import DiskFullError, RequestError, RunError
from mtem.terminal import Terminal, visible

# name -> (module, function, the first line of its help)
COMMANDS = {
    "adapt": ("mtem.cli.adapt", "adapt", "Train on labeled texts of source domains, adapt to unlabeled texts of a new one."),
    "rehearse": (
        "mtem.cli.rehearse",
        "rehearse",
        "See on your own source domains what adaptation is worth, and how.",
    ),
    "predict": ("mtem.cli.predict", "predict", "Add a prediction and its confidence to every row of a file, of any size."),
    "evaluate": ("mtem.cli.evaluate", "evaluate", "Measure accuracy, macro-F1 and more on labeled texts."),
    "report": ("mtem.cli.report", "report", "Write the page that shows what happened in a run."),
    "methods": ("mtem.cli.methods", "methods", "List what can be given to --method."),
    "settings": ("mtem.cli.settings", "settings", "List what can be given to --set, with defaults and meanings."),
    "demo": ("mtem.cli.demo", "demo", "Adapt on the bundled Amazon sample (CPU, a few minutes) and show the result."),
    "data": ("mtem.cli.data", "app", "Prepare data sets."),
    "reproduce": ("mtem_paper.command", "reproduce", "Repeat the paper's experiments, run by run."),
    "cost": ("mtem_paper.cost_command", "cost", "Measure time, memory and error of a step with each gradient engine."),
}
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how the threads of a CPU wait for each other
DEBUG = "--debug"
INTERRUPTED = 130  # exit code of typer for Ctrl-C
CONTINUE = {
    "adapt": "; the same command with --resume continues",
    "rehearse": "; the same command with --resume continues",
    "demo": "; the same command continues from here",
    "reproduce": "; the same command continues from here",
}


class LazyGroup(TyperGroup):
    """Commands from `COMMANDS`. Their help comes from the table; they are imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in with the command's help, without importing it."""
        return _make_command(cmd_name, lambda: None, help=COMMANDS[cmd_name][2]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


def load_command(name: str) -> Any:
    """Import the command called `name`."""
    module, attribute, _ = COMMANDS[name]
    function: Any = getattr(importlib.import_module(module), attribute)
    return typer.main.get_command(function) if isinstance(function, typer.Typer) else _make_command(name, function)


def _make_command(name: str, function: Callable[..., None], help: str | None = None) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    single.command(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})(function)
    return typer.main.get_command(single)


app = typer.Typer(
    name="mtem",
    cls=LazyGroup,
    help="Adapt a text classifier to a domain without labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        out.print(f"mtem {version('mtem')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Print the traceback of an error too; for every command.")] = False,
) -> None:
    """Adapt a text classifier to a domain without labels."""


def main() -> None:
    """Run the command line. An error is one line: exit code 2 for a wrong request, 1 for a failed run, 130 for Ctrl-C.

    SIGTERM (143) and SIGHUP (129) are handled as Ctrl-C is.
    """
    wait_without_spinning()
    debug = _take_debug(sys.argv)
    try:
        with interrupts.handled():
            _run(debug)
    except RequestError as error:
        _fail(str(error), 2)
    except RunError as error:
        resume = isinstance(error, DiskFullError) and _command() in ("adapt", "rehearse")  # the others just run again
        _fail(str(error) + (" with --resume" if resume else ""), 1)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error) or type(error).__name__, 1)
    except KeyboardInterrupt:
        raise
    except SystemExit as stop:
        if stop.code == INTERRUPTED and not isinstance(stop, ToldExit):
            _fail(interrupts.ending() + CONTINUE.get(_command(), ""), interrupts.exit_code())
        raise
    except BaseException as error:  # what nobody foresaw; errors of libraries in Rust are no Exception
        _fail(_unforeseen(error), 1)


def _run(debug: bool) -> None:
    try:
        app()
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
        raise


def _take_debug(arguments: list[str]) -> bool:
    """Take the option that every command has out of the arguments; return whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if DEBUG not in arguments[1:end]:
        return False
    arguments[1:end] = [argument for argument in arguments[1:end] if argument != DEBUG]
    return True


def _unforeseen(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory; give smaller files, or a smaller batch_size and max_length"
    reason = next(iter(str(error).strip().splitlines()), "")[:300]
    return f"unexpected error: {type(error).__name__}: {reason}; {DEBUG} prints where it happened"


def wait_without_spinning() -> None:
    """Let the threads of torch sleep while they wait for each other, here and in child processes, unless the user has decided.

    By default they spin, which takes the cores from one another as soon as other processes are busy too. The variable is read
    when torch is imported.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _command() -> str:
    return next(iter(sys.argv[1:]), "")


def _fail(message: str, code: int) -> NoReturn:
    Terminal(stderr=True).print(Text(visible(f"mtem: {' '.join(message.splitlines())}"), style="red"))
    sys.exit(code)


if __name__ == "__main__":
    main()
