"""The cases of `make fuzz`, and how one of them is run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from mtem.errors import RequestError, RunError
from tests.fuzz import past
from tests.fuzz.targets import SHARES, TARGETS, check_message
from tests.fuzz.workers import Case, drawn, folder
from tests.fuzz.workshop import Workshop

torch.set_num_threads(1)  # tiny models

PAST = "past"
_workshops: dict[Path, Workshop] = {}


def run(case: Case, shop: Path) -> None:
    """Run a case in this process.

    Raises
    ------
    Exception
        Whatever is neither an answer nor a refusal in one line.
    """
    workshop = _workshops.setdefault(shop, Workshop(shop))
    with folder() as place:
        if case.target == PAST:
            past.run(sorted(past.FAILURES)[case.number], Path(place), workshop)
            return
        try:
            TARGETS[case.target](Path(place), drawn(case), workshop)
        except (RequestError, RunError) as error:
            check_message(error)
        except OSError as error:  # the command line prints those in one line, too
            if not error.errno or not error.strerror:
                raise


def cases(count: int, seed: int, targets: list[str] | None = None) -> Iterator[Case]:
    """Yield the past failures, then `count` cases of the targets in turn, the quick ones more often."""
    names = targets or list(TARGETS)
    if targets is None:
        yield from past_cases()
    quick = [name for name in names if name not in SHARES]
    plan = [name for name in names for _ in range(SHARES.get(name, 0))]
    if quick:
        plan += list(itertools.islice(itertools.cycle(quick), max(100 - len(plan), len(quick))))
    for number, name in enumerate(itertools.islice(itertools.cycle(plan), count)):
        yield Case(name, number, seed)


def past_cases() -> Iterator[Case]:
    """Yield every past failure once."""
    for number, _ in enumerate(sorted(past.FAILURES)):
        yield Case(PAST, number)


def environment(shop: Path) -> None:
    """Keep all that the cases cache in the workshop."""
    os.environ["MTEM_CACHE"] = str(shop / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
