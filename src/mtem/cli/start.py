"""Where the installed command begins: before the libraries are imported, so that Ctrl-C gives no traceback then either."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line and run it."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from mtem.cli.main import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"mtem: interrupted\n")
    os._exit(128 + number)
