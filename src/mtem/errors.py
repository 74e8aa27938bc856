"""Errors that a user sees, one line each; the command line turns them into exit codes."""


class RequestError(ValueError):
    """The request was wrong (exit code 2); the message says what is wrong, where, and what to do."""


class RunError(RuntimeError):
    """The request was correct, but the run failed (exit code 1)."""


class DiskFullError(RunError):
    """The disk is full. Each command adds how to continue."""
