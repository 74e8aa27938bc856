r"""MTEM's step compared with the same step built with betty's darts, higher and torchopt, on the same model and batches.

    pip install -e '.[peers]'
    python benchmarks/peers.py --model minilm --batch 32 --length 128 --device cpu --repeats 5 --json results/cost/peers-cpu.json

A row is a whole step of Algorithm 1: the virtual gradient step on the mean Tsallis loss, the gradient of the source loss in the
indexes through it, the update of the indexes, and AdamW on the Tsallis loss with the new ones. Model, batches, precision, the
indexes' rule, the final update and the clock are those of `mtem cost`, whose engines are rows here too. The pseudo labels are
given: a peer would draw them from the logits of its inner pass, so no pass for them is timed (forward, taylor and second-order
of `mtem` do run one).

higher and torchopt differentiate the virtual step's gradient, which the fused attention kernels cannot: their inner pass has
plain-arithmetic attention. Its logits also serve the final update, so neither runs the target batch twice. betty's darts is a
central difference and keeps the kernel; its engine rolls the virtual step back and runs the batch again. It departs from
Algorithm 1 in two ways: the difference is taken around :math:`\hat\theta`, not :math:`\theta`, and :math:`\eta` is missing from
the result; the latter is corrected here.

On a CPU every row runs in its own process. The row of a missing library says so, and the others are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn

from mtem import tsallis
from mtem.atomic import write_json
from mtem.errors import RequestError
from mtem.progress import Progress
from mtem.training.devices import find_device
from mtem_paper import cost

OURS = ("plain", "layerwise", "forward", "taylor", "second-order")


class Peer(cost.Bench):
    """A step of Algorithm 1 that another library differentiates."""

    module: ClassVar[str]  # what to import
    package: ClassVar[str]  # what to install
    install: ClassVar[str] = "pip install -e '.[peers]'"  # how
    second_derivatives: ClassVar[bool] = True

    def __init__(self, case: cost.Case, device: torch.device) -> None:
        super().__init__(dataclasses.replace(case, engine="second-order"), device)
        self.model = self.method.model

    @classmethod
    def missing(cls) -> str | None:
        """Return how to install the library, and the error, if it cannot be imported; else None."""
        try:
            importlib.import_module(cls.module)
        except Exception as error:  # a library that is too old for this torch may raise anything
            return f"{cls.install}  ({type(error).__name__}: {error})"
        return None

    def step(self) -> None:
        index = self.method.index[self.target.rows].requires_grad_()
        logits, gradient = self.outer(index)
        self.move(gradient)
        self.trainer.update(self.target_loss(logits, self.method.index[self.target.rows]))

    def outer(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target batch's logits with their graph, and the index gradient; all other graphs are freed."""
        raise NotImplementedError

    def move(self, gradient: Tensor) -> None:
        """Update the indexes by the rule of `mtem`, which also stores the gradient."""
        rows = self.target.rows
        self.method.index[rows] = self.method.updated_index(self.method.index[rows], gradient, 0)

    def target_loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return tsallis.loss(torch.log_softmax(logits, dim=-1), self.method.labels, index).mean()

    def source_loss(self, logits: Tensor) -> Tensor:
        return self.method.cross_entropy(logits, self.source.labels)


class Higher(Peer):
    """A stateless copy of the model that takes its parameters as arguments, and a differentiable SGD.

    `innerloop_ctx`, the short form, would make a new copy in every step: some 60 ms of Python for BERT-base's layers.
    """

    module, package = "higher", "higher"

    def __init__(self, case: cost.Case, device: torch.device) -> None:
        super().__init__(case, device)
        import higher

        self.virtual = torch.optim.SGD(self.model.parameters(), lr=cost.RATE)
        self.stateless = higher.monkeypatch(self.model, copy_initial_weights=False, track_higher_grads=False)

    def outer(self, index: Tensor) -> tuple[Tensor, Tensor]:
        import higher

        theta = list(self.model.parameters())
        with self.model.differentiable_attention():
            logits = self.stateless(self.target.inputs, params=theta)
        virtual = higher.get_diff_optim(self.virtual, theta)
        moved = virtual.step(self.target_loss(logits, index), params=theta)
        loss = self.source_loss(self.stateless(self.source.inputs, params=moved))
        # in the indexes alone: backward() would also go on to theta
        gradient = torch.autograd.grad(loss, index, retain_graph=True)[0]
        self.stateless.update_params(theta)  # it would keep the virtual step's graph
        return logits, gradient


class Torchopt(Peer):
    """`MetaSGD` changes the model's parameters to those of the virtual step; the state before it is put back."""

    module, package = "torchopt", "torchopt"

    def __init__(self, case: cost.Case, device: torch.device) -> None:
        super().__init__(case, device)
        import torchopt

        self.virtual = torchopt.MetaSGD(self.model, lr=cost.RATE)

    def outer(self, index: Tensor) -> tuple[Tensor, Tensor]:
        import torchopt

        theta, state = torchopt.extract_state_dict(self.model), torchopt.extract_state_dict(self.virtual)
        with self.model.differentiable_attention():
            logits = self.model(self.target.inputs)
        self.virtual.step(self.target_loss(logits, index))
        loss = self.source_loss(self.model(self.source.inputs))
        gradient = torch.autograd.grad(loss, index, retain_graph=True)[0]
        torchopt.recover_state_dict(self.model, theta)
        torchopt.recover_state_dict(self.virtual, state)
        return logits, gradient


class Table(nn.Module):
    """The indexes as a module, which is what betty optimizes."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.index = nn.Parameter(index)

    def forward(self, rows: Tensor) -> Tensor:
        return self.index[rows]


class Betty(Peer):
    """Two problems and an engine that rolls back: virtual step, indexes, then the step of theta from where it was."""

    module, package = "betty", "betty-ml"
    second_derivatives = False
    # the metadata of 0.2 end at Python 3.10, though it works with later ones, for which pip would choose 0.1
    if sys.version_info >= (3, 11):
        install = "pip install --no-deps --ignore-requires-python betty-ml==0.2.1"

    def __init__(self, case: cost.Case, device: torch.device) -> None:
        super().__init__(case, device)
        logging.getLogger("betty").disabled = True  # it prints its graph of problems
        from betty.configs import Config, EngineConfig
        from betty.engine import Engine
        from betty.problems import ImplicitProblem

        bench = self

        class Student(ImplicitProblem):
            def on_inner_loop_start(self) -> None:
                self.virtual = True

            def training_step(self, batch: Any) -> Tensor:
                inputs, _, rows = batch
                return bench.target_loss(self.module(inputs), self.indexes(rows))

            def custom_optimizer_step(self) -> None:
                if self.virtual:
                    self.optimizer.step()
                else:
                    bench.trainer.update(None)
                self.virtual = False

        class Indexes(ImplicitProblem):
            def training_step(self, batch: Any) -> Tensor:
                return bench.source_loss(self.student(batch[0]))

            def custom_optimizer_step(self) -> None:
                bench.move(cost.RATE * self.module.index.grad[bench.target.rows])

        table = Table(self.method.index)
        virtual, unused = (torch.optim.SGD(part.parameters(), lr=cost.RATE) for part in (self.model, table))
        student = Student("student", Config(type="darts"), self.model, virtual, train_data_loader=[self.target])
        indexes = Indexes("indexes", Config(retain_graph=True), table, unused, train_data_loader=[self.source])
        self.engine = Engine(
            problems=[indexes, student],
            config=EngineConfig(roll_back=True, strategy="gpu" if device.type == "cuda" else "cpu"),
            dependencies={"u2l": {indexes: [student]}, "l2u": {student: [indexes]}},
        )

    @classmethod
    def missing(cls) -> str | None:
        old = version(cls.package).startswith("0.1.")
        return super().missing() or (f"{cls.install}  ({version(cls.package)} does not roll back)" if old else None)

    def step(self) -> None:
        self.engine.global_step += 1
        self.engine.train_step()


PEERS: dict[str, type[Peer]] = {"betty darts": Betty, "higher": Higher, "torchopt MetaSGD": Torchopt}


def measure(cases: Sequence[cost.Case], progress: Progress) -> list[dict[str, Any]]:
    """Return a row for each case, as `mtem cost` does."""
    rows = []
    with progress.stage("measuring", len(cases)):
        for number, case in enumerate(cases):
            missing = PEERS[case.engine].missing() if case.engine in PEERS else None
            if missing:
                rows.append({**dataclasses.asdict(case), "failed": "missing", "reason": missing})
            else:
                rows.append(apart(case) if find_device(case.device).type == "cpu" else row_of(case))
            progress.advance(number + 1, {"step": case.engine})
    plain = next((row for row in rows if row["engine"] == "plain"), {})
    about = cost.machine() | {"versions": versions()}
    return [{**row, **cost.ratios(row, plain.get("memory")), **about} for row in rows]


def apart(case: cost.Case) -> dict[str, Any]:
    return cost.apart(case, row_of)


def row_of(case: cost.Case) -> dict[str, Any]:
    row = dataclasses.asdict(case)
    peer = PEERS.get(case.engine)
    twice = peer.second_derivatives if peer else case.engine == "second-order"
    row["inner_attention"] = "math" if twice and case.attention == "sdpa" else case.attention
    try:
        if peer:
            importlib.import_module(peer.module)  # so that its code is not counted as memory of the step
        row |= cost.measured(case, make)
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    except Exception as error:
        if case.engine not in PEERS:
            raise
        row |= {"failed": "failed", "reason": f"{type(error).__name__}: {error}"}
    gc.collect()
    return row


def make(case: cost.Case, device: torch.device) -> cost.Bench:
    return PEERS.get(case.engine, cost.Bench)(case, device)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def versions() -> dict[str, str]:
    """Return the versions of the libraries, including those of the installed peers."""
    installed = {peer.package: version(peer.package) for peer in PEERS.values() if peer.missing() is None}
    return {"torch": torch.__version__, "transformers": transformers.__version__, **installed}


def main() -> None:
    known = (*OURS, *PEERS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="minilm", help="an encoder, or the shape bert-base or minilm with random weights")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of every text")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default=";".join(known), help="some of them, with semicolons")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    requested = [name.strip() for name in args.rows.split(";")]
    unknown = [name for name in requested if name not in known]
    if unknown:
        parser.error(f"--rows {unknown[0]}: expected some of {'; '.join(known)}")
    if args.batch < 2 or args.length < 4 or args.repeats < 1:
        parser.error("--batch must be at least 2, --length 4 and --repeats 1")
    names = ("model", "batch", "length", "precision", "attention", "repeats", "seed")
    shared = {name: getattr(args, name) for name in names}
    try:
        shared["device"] = str(find_device(args.device))
        rows = measure([cost.Case(engine=name, **shared) for name in requested], Progress())
    except RequestError as error:
        parser.error(str(error))
    if args.json:
        write_json(args.json, rows)
    console = Console()
    cost.render(rows, console)
    for row in rows:
        if "reason" in row:
            console.print(f"{row['engine']}: {row['reason']}", markup=False, highlight=False, soft_wrap=True)
    console.print("second-order, higher, torchopt: plain-arithmetic attention in the inner pass", style="dim")
    console.print(", ".join(f"{name} {number}" for name, number in rows[0]["versions"].items()), style="dim", soft_wrap=True)


if __name__ == "__main__":
    main()
