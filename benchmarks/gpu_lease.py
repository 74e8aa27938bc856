"""Cells on a GPU machine that is lent for minutes: what travels is the working tree and files in an ignored folder.

Here, weights of models as fp16 and the reviews that pools have, in parts of a size that can be sent, and the jobs:

    python benchmarks/gpu_lease.py pack --model MINILM --model MPNET --data DATA/amazon
    python benchmarks/gpu_jobs.py --dataset amazon --model minilm --model-name minilm --data build/lease/data --pools mixed \
        --settings unsupervised --seeds 0,1,2 --variants mtem,cst --results build/lease/results > carry/jobs.jsonl

There, with the files of carry/ sent before; `collect` ends after so many seconds and may be called again:

    python benchmarks/gpu_lease.py start --most 6
    python benchmarks/gpu_lease.py collect --to "$OUT" --seconds 560

And here again, with what came back:

    tar xzf cells.tgz results/cells

`benchmarks/gpu_plan.sh` packs and writes the jobs of the next lease. On that machine everything is in build/lease, also the
models, each in a folder with the name of its own, which `start` puts into the jobs' commands: git ignores that folder, so a
second sending of the tree leaves it as it is.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

CARRY, LEASE = Path("carry"), Path("build/lease")
SOURCES = ("fdu", "hatn", "blitzer")  # the reviews that the pools of the protocol have
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def pack(models: Sequence[Path], data: Path, part: int) -> None:
    """Write the models and the data to the folder that is sent."""
    import torch
    from safetensors.torch import load_file, save

    CARRY.mkdir(exist_ok=True)
    for path in CARRY.glob("lease.*"):
        path.unlink()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for model in models:
            weights = load_file(model / "model.safetensors")
            half = {name: value.half() if value.dtype == torch.float32 else value for name, value in weights.items()}
            add(archive, f"models/{model.name}/model.safetensors", gzip.compress(save(half), 9))
            for name in MODEL_FILES:
                if (model / name).is_file():
                    add(archive, f"models/{model.name}/{name}", gzip.compress((model / name).read_bytes(), 9))
        for path in sorted(data.glob("*.jsonl.gz")):
            lines = gzip.decompress(path.read_bytes()).decode().splitlines()
            kept = [line for line in lines if json.loads(line).get("source", SOURCES[0]) in SOURCES]
            add(archive, f"data/{path.name}", lzma.compress(("\n".join(kept) + "\n").encode(), preset=9))
    whole = packed.getvalue()
    for number, start in enumerate(range(0, len(whole), part << 20)):
        (CARRY / f"lease.{number:02d}").write_bytes(whole[start : start + (part << 20)])
        print(CARRY / f"lease.{number:02d}")


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def unpack() -> None:
    """Put models and data where jobs find them; weights are fp32 again."""
    from safetensors.torch import load, save_file

    whole = b"".join(path.read_bytes() for path in sorted(CARRY.glob("lease.*")))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        for member in archive:
            content, path = archive.extractfile(member), LEASE / member.name
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.name == "data":
                path.write_bytes(gzip.compress(lzma.decompress(content.read()), 1))
            elif path.suffix == ".safetensors":
                half = load(gzip.decompress(content.read()))
                save_file({name: value.float() if value.is_floating_point() else value for name, value in half.items()}, path)
            else:
                path.write_bytes(gzip.decompress(content.read()))


def start(most: int, memory: float) -> None:
    """Unpack, and run the jobs in the background, also after this command has ended."""
    unpack()
    shutil.copytree("results/rehearsals", LEASE / "results/rehearsals", dirs_exist_ok=True)
    jobs = [json.loads(line) for line in (CARRY / "jobs.jsonl").read_text().splitlines()]
    for job in jobs:
        words = job["command"].split(" ")
        model = words.index("--model") + 1
        words[model] = str(LEASE / "models" / Path(words[model]).name)
        job["command"] = "PYTHONPATH=src OMP_NUM_THREADS=2 " + " ".join(words)
    (LEASE / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    if shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    with (LEASE / "queue.log").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "benchmarks/gpu_queue.py", str(LEASE / "jobs.jsonl"), "--logs", str(LEASE / "logs"),
             "--most", str(most), "--memory", str(memory)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def collect(to: Path, seconds: float) -> None:
    """Keep an archive of the cells, the logs and the list of ended jobs up to date for so long, or until all jobs have ended."""
    until, done = time.monotonic() + seconds, LEASE / "logs/done.jsonl"
    while True:
        with tarfile.open(to / "cells.part", "w:gz") as archive:
            for name in ("cells", "failures", "rehearsed", "source-models/pretrained"):
                for path in sorted((LEASE / "results" / name).rglob("*")):
                    if path.suffix in (".json", ".jsonl", ".txt"):
                        archive.add(path, path.relative_to(LEASE))
            if (LEASE / "logs").is_dir():
                archive.add(LEASE / "logs", "logs")
        (to / "cells.part").replace(to / "cells.tgz")
        ended = len(done.read_text().splitlines()) if done.exists() else 0
        if time.monotonic() >= until or ended == len((LEASE / "jobs.jsonl").read_text().splitlines()):
            break
        time.sleep(max(0.0, min(10.0, until - time.monotonic())))
    print(done.read_text() if done.exists() else "no job has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    command = commands.add_parser("pack")
    command.add_argument("--model", type=Path, action="append", required=True)
    command.add_argument("--data", type=Path, required=True, help="folder of the reviews' files")
    command.add_argument("--part", type=int, default=42, help="MiB of a part")
    command = commands.add_parser("start")
    command.add_argument("--most", type=int, default=6, help="jobs side by side")
    command.add_argument("--memory", type=float, default=130.0, help="GB of the GPU")
    command = commands.add_parser("collect")
    command.add_argument("--to", type=Path, required=True)
    command.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    if args.what == "pack":
        pack(args.model, args.data, args.part)
    elif args.what == "start":
        start(args.most, args.memory)
    else:
        collect(args.to, args.seconds)


if __name__ == "__main__":
    main()
