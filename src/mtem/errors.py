"""What can go wrong, by whose fault: the command line turns the first into exit code 2 and the second into 1."""


class RequestError(ValueError):
    """The request was wrong: the message says what, where, and what to do. One line."""


class RunError(RuntimeError):
    """The request was fine but the run could not be finished. One line."""


class DiskFullError(RunError):
    """There is no room for what is being written. How to go on depends on the command, which adds it."""
