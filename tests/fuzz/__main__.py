"""Fuzz every reader: ``python -m tests.fuzz --cases 20000``. Each failure is printed with its number; then the exit code is 1."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.fuzz import cases
from tests.fuzz.targets import TARGETS
from tests.fuzz.workers import Case, run_all
from tests.fuzz.workshop import Workshop


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="how many, beside the past failures")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--target", action="append", choices=[*TARGETS, cases.PAST], help="only this one; may be given again")
    parser.add_argument("--number", type=int, help="only the case of this number, in this process, with its traceback")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mtem-fuzz-shop-") as folder:
        shop = Path(folder)
        cases.environment(shop)
        print("making the runs that are damaged", flush=True)
        Workshop(shop).make()
        if given.number is not None:
            cases.run(Case(given.target[0], given.number, given.seed), shop)
            return 0
        targets = [name for name in given.target or [] if name != cases.PAST]
        drawn = list(cases.cases(given.cases, given.seed, targets or None)) if targets or not given.target else []
        if given.target and cases.PAST in given.target:
            drawn = [*cases.past_cases(), *drawn]
        return report(drawn, shop, given.jobs)


def report(drawn: list[Case], shop: Path, jobs: int) -> int:
    began = time.monotonic()
    seconds: dict[str, list[float]] = defaultdict(list)
    failures: Counter[str] = Counter()
    peak = 0
    for number, outcome in enumerate(run_all(drawn, shop, cases.run, jobs), start=1):
        seconds[outcome.case.target].append(outcome.seconds)
        peak = max(peak, outcome.peak)
        if outcome.problem:
            failures[outcome.case.target] += 1
            case = outcome.case
            print(f"FAILED --target {case.target} --number {case.number} --seed {case.seed}\n{outcome.problem}", flush=True)
        if number % 1000 == 0:
            print(f"{number} of {len(drawn)} cases, {sum(failures.values())} failed", flush=True)
    for name, taken in seconds.items():
        print(f"{name:12} {len(taken):6} cases  {failures[name]:4} failed  longest {max(taken):6.1f} s")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(drawn)} cases, {sum(failures.values())} failed, most memory {peak >> 20} MB, {minutes:.0f} minutes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
