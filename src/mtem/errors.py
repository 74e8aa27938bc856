"""Errors that a user sees, one line each; the command line turns them into exit codes."""

LONGEST_MESSAGE = 2000  # characters; what a message quotes may come from a hostile file


class RequestError(ValueError):
    """The request was wrong (exit code 2); the message says what is wrong, where, and what to do."""

    def __init__(self, message: object) -> None:
        super().__init__(_one_line(message))


class RunError(RuntimeError):
    """The request was correct, but the run failed (exit code 1)."""

    def __init__(self, message: object) -> None:
        super().__init__(_one_line(message))


class DiskFullError(RunError):
    """The disk is full. Each command adds how to continue."""


def _one_line(message: object) -> str:
    """Return the message without line breaks, and without the middle of a very long one: the end says what to do."""
    text = " ".join(str(message).splitlines())
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 2 :]}"
