"""`mtem adapt --processes N`: the same command in several processes of this machine, watched by this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console
from rich.text import Text

from mtem.errors import RequestError
from mtem.liveness import CONTINUE, PARENT, launched

POLL = 0.1  # seconds between two looks at the processes
GRACE = 10.0  # seconds that processes have to end by themselves after the first has failed
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_processes(count: int | None) -> bool:
    """Return whether this process is to start others, by the option ``--processes``.

    Raises
    ------
    RequestError
        If a launcher has started another number of processes than it was asked to.
    """
    already = launched()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_PORT" in os.environ and already == 1:
        raise RequestError(
            "'accelerate launch --cpu' has started one process only; use 'mtem adapt --processes N', or 'accelerate launch "
            "--multi_gpu ...' with '--set device=cpu'"
        )
    if count is None or count == already:
        return False
    if already > 1:
        raise RequestError(f"--processes {count}: {already} processes were started for this run; leave the option out")
    return True


def launch(count: int, arguments: list[str]) -> int:
    """Run ``mtem ARGUMENTS`` in `count` processes; return the exit code of the run.

    The first process has this one's terminal. When one fails the others are ended, and a message says which it was.
    """
    with tempfile.TemporaryDirectory(prefix="mtem-") as folder:
        logs = [Path(folder) / f"process-{number}.log" for number in range(count)]
        children = list(_start(count, arguments, logs))
        with _signals_forwarded(children):
            failed = _wait(children)
        if failed is None:
            return 0
        code = _exit_code(children[failed])
        if failed > 0 or code < 0:
            _tell(failed, count, code, logs[failed])
        return code if code > 0 else 128 - code if -code in FORWARDED else 1


def _start(count: int, arguments: list[str], logs: list[Path]) -> Iterator[subprocess.Popen[bytes]]:
    from mtem.processes import cores

    environment = {
        **os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), PARENT: str(os.getpid()),
    }  # fmt: skip
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    for number in range(count):
        own = {**environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        with contextlib.ExitStack() as stack:
            log: IO[bytes] | None = stack.enter_context(logs[number].open("wb")) if number else None
            # A session of its own: signals come from this process alone, so that each comes once.
            yield subprocess.Popen(command(arguments), env=own, stdout=log, stderr=log, start_new_session=True)


def command(arguments: list[str]) -> list[str]:
    """Return the command line of a process."""
    return [sys.executable, "-m", "mtem", *arguments]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _signals_forwarded(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all processes; after a failure for a while. Return the number of the process that the run failed with."""
    failed: list[int] = []
    until = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        failed += [number for number, child in enumerate(children) if child.poll() and number not in failed]
        if failed and until == float("inf"):
            until = time.monotonic() + (0.0 if (children[failed[0]].returncode or 0) < 0 else GRACE)
        time.sleep(POLL)
    failed += [number for number, child in enumerate(children) if child.poll() and number not in failed]
    if not failed:
        return None
    # A message of the first process has been seen already; where a process was killed, that is the reason.
    killed = [number for number in failed if (children[number].returncode or 0) < 0]
    return killed[0] if killed else 0 if 0 in failed else failed[0]


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    return child.returncode or 0


def _tell(number: int, count: int, code: int, log: Path) -> None:
    """Say which process failed, and what it said last."""
    name = f"process {number + 1} of {count}"
    if code < 0:
        line = f"{name} was ended by {_signal_name(-code)}; {CONTINUE}"
    else:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
        line = f"{name}: {said[-1].removeprefix('mtem: ') if said else f'ended with exit code {code}'}"
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(f"mtem: {line}", style="red"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
