"""The missing cells of the paper's tables as jobs for `gpu_queue.py`, one for each group that shares a source model.

    python benchmarks/gpu_jobs.py --dataset amazon --model minilm --data DATA --pools mixed --settings unsupervised \
        --seeds 0,1,2 --variants out,biat,cst --memory 10 >> JOBS.jsonl
    python benchmarks/gpu_queue.py JOBS.jsonl --logs DIR

Options without a default are those of `mtem reproduce general`. Nothing is run here. Groups come seed by seed; append the output
of several calls, the most important one first. --from is the folder whose cells exist already, --results the one that jobs write
to (with a copy of its folder `rehearsals`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtem_paper import protocol, rehearsed_settings, runner
from mtem_paper.cells import Cell
from mtem_paper.command import listed, numbers


def jobs_of(cells: Sequence[Cell], options: Sequence[str], memory: float) -> list[dict[str, Any]]:
    """Return a job for each group of cells.

    Parameters
    ----------
    cells
        Missing cells, those of a group after one another.
    options
        What all commands have in common.
    memory
        GB of GPU memory of a job.
    """
    jobs = []
    for _, group in itertools.groupby(cells, key=lambda cell: cell.group):
        found = list(group)
        cell = found[0]
        own = ["--pools", cell.pool, "--settings", cell.setting, "--targets", cell.target, "--seeds", str(cell.seed)]
        own += ["--variants", ",".join(cell.variant for cell in found)]
        command = shlex.join(["python3", "-m", "mtem", "reproduce", "general", "--dataset", cell.dataset, *options, *own])
        # Several calls may list the same group; no cell is in two of them, so the first one makes the name their own.
        jobs.append({"name": "-".join([*cell.group, cell.variant]), "command": command, "memory": memory})
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dataset", "model", "data"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("model-name", "pools", "settings", "targets", "seeds", "variants"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--from", dest="existing", type=Path, default=Path("results"))
    parser.add_argument("--results", default="results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory", type=float, default=10.0)
    args = parser.parse_args()
    name = protocol.model_name(args.model, args.model_name)
    cells = protocol.plan(
        ["general"], args.dataset, args.model, name, seeds=None if args.seeds is None else numbers(args.seeds),
        targets=listed(args.targets), settings_=listed(args.settings), pools=listed(args.pools), variants=listed(args.variants),
        rehearsed=rehearsed_settings.choices(args.existing, args.dataset, name),
    )  # fmt: skip
    options = ["--data", args.data, "--model", args.model, "--model-name", name, "--results", args.results]
    options += ["--device", args.device, "--jobs", "1", "--quiet"]
    for job in jobs_of(runner.missing(args.existing, cells), options, args.memory):
        print(json.dumps(job))


if __name__ == "__main__":
    main()
