"""The command line, called in the process of the tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def mtem(command):
    """The command line in this process, by the name that users type."""
    return command
