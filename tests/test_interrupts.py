"""Signals: a training waits for the end of its step, everything else unwinds, a second signal ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from mtem import interrupts

CODES = [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated"), ("SIGHUP", 129, "the terminal was closed")]


@pytest.mark.parametrize("name, code, ending", CODES)
def test_a_signal_unwinds_once_something_is_written(name, code, ending):
    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(KeyboardInterrupt), interrupts.handled():
        interrupts.unwind()
        os.kill(os.getpid(), getattr(signal, name))
    assert interrupts.exit_code() == code and interrupts.ending() == ending
    assert signal.getsignal(getattr(signal, name)) is before


def test_a_signal_waits_for_a_step(capsys):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.handled(), interrupts.deferred():
        for step in range(5):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(step)
            if interrupts.pending():
                interrupts.stop()
    assert done == [0, 1, 2] and "finishing the step and saving" in capsys.readouterr().err


def test_a_signal_that_came_too_late_for_the_block_unwinds_after_it():
    with pytest.raises(KeyboardInterrupt), interrupts.handled(), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGTERM)


def test_without_the_command_line_signals_are_the_program_s_own():
    with interrupts.deferred():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not interrupts.pending()


def run(code, *names):
    """A process that gets the signals when it has said that it is ready."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for name in names:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_a_second_signal_ends_the_process():
    code = """
import sys, time
from mtem import interrupts
with interrupts.handled(), interrupts.deferred():
    for _ in range(2):
        print("ready", flush=True)
        while not interrupts.pending(): time.sleep(.01)
        print("ready", flush=True)
        time.sleep(60)
"""
    code, errors = run(code, "SIGTERM", "SIGINT")
    assert code == 130 and errors.splitlines() == [
        "mtem: finishing the step and saving; again to stop at once",
        "mtem: terminated",
    ]


@pytest.mark.parametrize("module", ["mtem.cli.start", "mtem.cli.main"])
def test_a_signal_while_libraries_are_imported_gives_no_traceback(module):
    code = f"""
import sys, time, types
sys.argv = ["mtem", "adapt"]
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "{"typer" if module.endswith("start") else "mtem.run.adapt"}":
            print("ready", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
import importlib
sys.argv += ["--source", "a.csv", "--target", "b.csv", "--output", "c"]
importlib.import_module("{module}").main()
"""
    assert run(code, "SIGINT") == (130, "mtem: interrupted\n")
