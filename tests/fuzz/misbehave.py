"""Cases that fail each in their own way, to test what the workers notice. Nothing heavy is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.fuzz.workers import Case


def misbehave(case: Case, shop: Path) -> None:
    if case.number == 0:
        raise KeyError("a bug")
    if case.number == 1:
        os._exit(9)
    if case.number == 3:
        time.sleep(600)
