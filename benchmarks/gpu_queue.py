"""Many commands on one GPU: as many at once as its memory holds, in the order in which they are listed.

    python benchmarks/gpu_queue.py JOBS.jsonl --logs DIR --memory 130 --most 12

A job is a line {"name": "...", "command": "...", "memory": 8, "after": ["..."]}: GB of GPU memory, and jobs that have to be done
before. The list is the order of importance: where the next job does not fit yet, none behind it begins, so that a short time on a
GPU ends with whole results and not with many halves. Jobs without memory are not counted.

DIR gets NAME.log of each job and done.jsonl, one line for each that ended. Run again, jobs that ended well are left out. A job
begins after those it waits for, also if they failed. The list
is read anew when it changes, so jobs can be added while others run. Processes share a GPU much better under MPS
(`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def next_jobs(jobs: list[dict[str, Any]], running: list[str], done: set[str], memory: float, most: int) -> list[dict[str, Any]]:
    """Return the jobs to start now.

    Parameters
    ----------
    jobs
        All jobs, the most important ones first.
    running, done
        The names of jobs that run, and of those that have ended.
    memory, most
        What all running jobs may take together, and how many may run.
    """
    sizes = {job["name"]: job.get("memory", 0) for job in jobs}
    used, count = sum(sizes.get(name, 0) for name in running), sum(bool(sizes.get(name, 0)) for name in running)
    found = []
    for job in jobs:
        if job["name"] in done or job["name"] in running or any(name not in done for name in job.get("after", ())):
            continue
        size = job.get("memory", 0)
        if size:
            if used and (used + size > memory or count >= most):
                break
            used, count = used + size, count + 1
        found.append(job)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--memory", type=float, default=130.0)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--keep-running", action="store_true", help="wait for more jobs when all are done")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    report = args.logs / "done.jsonl"
    done = {line["name"] for line in read(report) if not line["code"]}
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while True:
        jobs = read(args.jobs)
        for job in next_jobs(jobs, list(running), done, args.memory, args.most):
            with (args.logs / f"{job['name']}.log").open("wb") as log:
                process = subprocess.Popen(["bash", "-c", job["command"]], stdout=log, stderr=subprocess.STDOUT)
            running[job["name"]] = process, time.time()
        for name, (process, started) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                done.add(name)
                with report.open("a") as file:
                    line = {"name": name, "code": process.returncode, "seconds": round(time.time() - started, 1)}
                    file.write(json.dumps(line) + "\n")
        if not running and all(job["name"] in done for job in jobs) and not args.keep_running:
            return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
