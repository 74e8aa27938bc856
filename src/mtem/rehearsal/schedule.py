"""Run the source models and the trials of a rehearsal, in several processes if asked, within a budget."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from mtem import processes
from mtem.atomic import read_json
from mtem.errors import RunError
from mtem.progress import Progress
from mtem.rehearsal.plan import Plan
from mtem.rehearsal.trials import SHARED_SOURCE, SourceTask, Trial, TrialOutputs, Work, source_methods

FEWEST_EPOCHS = 2  # a budget cuts no further
COST = 3.0  # of a text in a pass of a method, relative to one in source training


def run_trials(
    work: Work, plan: Plan, jobs: int, budget: float | None, progress: Progress, pool: str = processes.PROCESSES
) -> tuple[list[TrialOutputs], dict[str, Any], list[str]]:
    """Train the source models, then run the trials; what was written before is not run again.

    Parameters
    ----------
    work, plan
        What to run.
    jobs
        Number of processes.
    budget
        Minutes, or None.
    progress
        Where to report.
    pool
        As in `processes.run`.

    Returns
    -------
    outputs
        Of all configurations that were tried in every domain.
    resolved
        "epochs" of the trials, and by method the "settings" that were found for the device.
    notes
        What was cut or failed, for the user.

    Raises
    ------
    RunError
        If a source model could not be trained, or no configuration was tried in every domain.
    """
    deadline = float("inf") if budget is None else time.time() + 60 * budget
    names = [work.domains.names[number] for number in work.domains.rehearsed]
    sources = [SourceTask(name, method) for name in names for method in source_methods(plan)]
    for failure in _run(work, [[task] for task in sources], jobs, "source models", progress, pool=pool):
        raise RunError(f"the source model without {failure.task.domain} failed: {failure.message}")
    first = read_json(work.source_model_path(sources[0]) / "run.json")
    plan, notes = cut(work, plan, first, jobs, (deadline - time.time()) / 60)
    work.plan = plan
    trials = plan_trials(work, plan, float(first["resolved"]["learning_rate"]))
    # In this order: out of time, the first ones are complete.
    failures = _run(work, [trials], jobs, "trials", progress, deadline, pool)
    notes += [f"{describe(failure.task)} failed and is left out: {failure.message}" for failure in failures]
    outputs, incomplete = complete(work, trials, failed=[failure.task for failure in failures])
    notes += incomplete
    if not outputs:
        advice = "; --resume continues with what was tried so far" if incomplete else ""
        raise RunError(f"no method was tried in every domain. {'; '.join(notes)}{advice}")
    found = {}
    for method in plan.methods:
        source = SourceTask(names[0], method if plan.own_source_model(method) else SHARED_SOURCE)
        frozen = read_json(work.source_model_path(source) / "run.json")["resolved"]["frozen_layers"]
        found[method] = {"frozen_layers": frozen, **plan.resolved.get(method, {})}
    return outputs, {"epochs": plan.epochs, "settings": found}, notes


def plan_trials(work: Work, plan: Plan, default_rate: float) -> list[Trial]:
    """Return the trials, those of the first method and learning rate first."""
    corpus = work.corpus
    rare = plan.rare_of(corpus.classes, work.domains, corpus.label_numbers(corpus.classes))
    names = [work.domains.names[number] for number in work.domains.rehearsed]
    return [
        Trial(name, method, rate, prior, made_rare)
        for method in plan.methods
        for rate, prior in itertools.product(plan.rates_of(method, default_rate), plan.priors_of(method))
        for made_rare in rare
        for name in names
        if not made_rare or work.can_be_rarer(name, made_rare)
    ]


def cut(work: Work, plan: Plan, source_run: dict[str, Any], jobs: int, minutes: float) -> tuple[Plan, list[str]]:
    """Return the plan that fits into `minutes`, by the speed of a source training, and what was cut from it."""
    trained = source_run["texts"]["source_trained_on"] * source_run["settings"]["source_epochs"]
    seconds = source_run["seconds"]["source"] / max(1.0, trained)  # for one text
    default_rate = float(source_run["resolved"]["learning_rate"])

    def forecast(shorter: Plan) -> float:
        shortened = dataclasses.replace(work, plan=shorter)  # trials of other lengths are other trials
        trials = [trial for trial in plan_trials(shortened, shorter, default_rate) if not shortened.is_done(trial)]
        texts = sum(len(work.pool(trial.domain, trial.rare)[0]) for trial in trials)
        return COST * float(seconds) * shorter.epochs * texts / 60 / max(1, min(jobs, len(trials)))

    whole, notes = plan, []
    while forecast(plan) > minutes:
        if plan.epochs > FEWEST_EPOCHS:
            plan = dataclasses.replace(plan, epochs=plan.epochs - 1)
        elif len(plan.learning_rates or plan.factors) > 1:
            rates = plan.learning_rates and plan.learning_rates[:1]
            plan = dataclasses.replace(plan, learning_rates=rates, factors=plan.factors[:1])
        elif len(plan.methods) > 1:
            plan = dataclasses.replace(plan, methods=plan.methods[:-1])
        else:
            notes.append(f"the budget is too small: about {forecast(plan):.0f} more minutes are needed at least")
            break
    if plan.epochs < whole.epochs:
        notes.append(f"to fit the budget: {plan.epochs} passes instead of {whole.epochs}")
    if (plan.learning_rates, plan.factors) != (whole.learning_rates, whole.factors):
        only = "default learning rate" if plan.learning_rates is None else f"learning rate {plan.learning_rates[0]:g}"
        notes.append(f"to fit the budget: only the {only} is tried")
    if left := [method for method in whole.methods if method not in plan.methods]:
        notes.append(f"to fit the budget: {', '.join(left)} not tried")
    return plan, notes


def complete(work: Work, trials: Sequence[Trial], failed: Sequence[Trial]) -> tuple[list[TrialOutputs], list[str]]:
    """Return the trials of configurations that were tried everywhere, and notes on the others that just ran out of time."""
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.method, trial.learning_rate, trial.prior), []).append(trial)
    outputs, notes = [], []
    for (method, rate, _), group in groups.items():
        if all(work.is_done(trial) for trial in group):
            outputs += [work.read(trial) for trial in group]
        elif not any(trial in failed for trial in group):
            notes.append(f"out of time: {method} at {rate:g} was not tried in every domain and is left out")
    return outputs, notes


def describe(task: Trial) -> str:
    """Return how messages name a trial."""
    rare = f", fewer {task.rare}" if task.rare else ""
    return f"{task.method} at {task.learning_rate:g} on {task.domain}{rare}"


def _run(
    work: Work,
    groups: Sequence[Sequence[Any]],
    jobs: int,
    name: str,
    progress: Progress,
    deadline: float = float("inf"),
    pool: str = processes.PROCESSES,
) -> list[processes.Outcome[Any, None]]:
    """Run the tasks that are not done; return those that failed."""
    open_groups = [[task for task in group if not work.is_done(task)] for group in groups]
    sizes = {task: work.size(task) for group in open_groups for task in group}
    existing = sum(map(len, groups)) - len(sizes)
    done = dict.fromkeys(sizes, 0.0)
    failed, finished, last = [], 0, ""

    def show() -> None:
        texts = sum(sizes[task] * share for task, share in done.items())
        figures: dict[str, Any] = {"done": f"{existing + finished} of {existing + len(sizes)}"}
        progress.advance(int(texts), figures | ({"last": last} if last else {}))

    def report(task: Any, share: float) -> None:
        done[task] = share
        show()

    total = sum(sizes.values())
    if not total:
        return []
    with progress.stage(name, total):
        progress.advance(0)
        count = max(1, min(jobs, len(sizes)))
        for outcome in processes.run(open_groups, work, jobs=count, deadline=deadline, report=report, pool=pool):
            finished += 1
            done[outcome.task] = 1.0
            if outcome.failure is not None:
                failed.append(outcome)
            if isinstance(outcome.task, Trial):
                last = describe(outcome.task) + (" failed" if outcome.failure else "")
            show()
    return failed
