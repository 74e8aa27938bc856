"""One of several processes that run adaptations together: ``python -m tests.together CASES RESULTS``, started by a launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """What came of an adaptation: the weights evaluated first and last, its indexes, and the figures of its history."""
    import mtem

    lines: list[dict[str, Any]] = []
    weights: list[dict[str, list[Any]]] = []

    def observe(line: dict[str, Any], model: torch.nn.Module) -> None:
        lines.append(line)
        if line["stage"] == "evaluation":
            weights.append({name: value.tolist() for name, value in model.named_parameters()})

    adapted = mtem.adapt(**case, log_every=1, observe=observe)
    history = [{name: value for name, value in line.items() if isinstance(value, float)} for line in lines]
    table = adapted.indexes
    return {
        "start": weights[0] if weights else {},  # only the first process observes
        "weights": weights[-1] if weights else {},
        "index": table["index"].tolist() if "index" in table else None,
        "confidence": table["confidence"].tolist(),
        "history": history,
    }


def distance(one: Any, other: Any) -> float:
    """The largest difference of two arrays."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max(initial=0.0))


def environment(count: int, number: int, port: int) -> dict[str, str]:
    """What a launcher tells a process."""
    told = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    values = {name: str(value) for name, value in told.items()}
    return {**os.environ, **values, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_together(cases: dict[str, dict[str, Any]], folder: Path, count: int = 2) -> dict[str, dict[str, Any]]:
    """The outcomes of some adaptations, each in `count` processes together."""
    (folder / "cases.json").write_text(json.dumps(cases, default=str))
    port = free_port()
    command = [sys.executable, "-m", "tests.together", str(folder / "cases.json"), str(folder / "results.json")]
    processes = [
        subprocess.Popen(command, env=environment(count, number, port), stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return json.loads((folder / "results.json").read_text())


def main() -> None:
    from mtem import parallel

    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = {name: outcome(case) for name, case in cases.items()}
    if parallel.is_main():
        Path(sys.argv[2]).write_text(json.dumps(results))
    assert parallel.size() > 1
    parallel.stop()


if __name__ == "__main__":
    main()
