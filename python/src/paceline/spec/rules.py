"""What goes together: combinations that cannot work are refused here, with the reason.

Everything that is known without looking at a machine is checked; the rest is preflight's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest


def faults_of(experiment: Experiment) -> list[str]:
    """All faults, each a sentence with what was expected, what came and how to mend it."""
    faults = [
        f"trials[{number}]: {fault}"
        for number, trial in enumerate(experiment.trials, start=1)
        for fault in _trial_faults(trial, experiment)
    ]
    faults += _baseline_faults(experiment)
    faults += _batch_faults(experiment)
    faults += _step_faults(experiment)
    return faults


def _baseline_faults(experiment: Experiment) -> Iterator[str]:
    if not any(
        t.launcher == "local" and t.local_strategy == "sequential" for t in experiment.trials
    ):
        yield (
            'trials: expected the baseline (launcher = "local", local_strategy = "sequential"), '
            "found none; every speedup is against it"
        )
    names = [t.model_dump_json() for t in experiment.trials]
    for number, name in enumerate(names, start=1):
        if name in names[: number - 1]:
            yield f"trials[{number}]: the same as an earlier one; use `repeats` to repeat"


def _trial_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    yield from _strategy_faults(trial)
    yield from _transport_faults(trial)
    if trial.nodes > 1:
        yield from _multi_node_faults(trial, experiment)


def _strategy_faults(trial: TrialRequest) -> Iterator[str]:
    strategy, ranks, threads = trial.local_strategy, trial.ranks_per_node, trial.threads_per_rank
    if strategy == "sequential":
        if ranks not in (1, "auto"):
            yield f'ranks_per_node: "sequential" is one process a node, got {ranks}'
        if threads not in (1, "auto"):
            yield (
                f'threads_per_rank: "sequential" is one thread, got {threads}; '
                'the framework\'s own threads are local_strategy = "intraop"'
            )
    if strategy == "intraop" and ranks not in (1, "auto"):
        yield f'ranks_per_node: "intraop" is one process a node, got {ranks}'
    if strategy == "processes" and ranks == 1:
        yield 'ranks_per_node: "processes" needs at least 2, got 1'


def _transport_faults(trial: TrialRequest) -> Iterator[str]:
    alone = trial.nodes == 1 and trial.local_strategy != "processes"
    if alone and trial.transport not in (None, "none"):
        yield f'transport: one rank has no peers, expected "none", got "{trial.transport}"'
    if not alone and trial.transport == "none":
        yield (
            'transport: several ranks must average gradients, expected "gloo" or "mpi", got "none"'
        )
    if trial.transport == "mpi" and trial.launcher != "mpi":
        yield (
            f'transport: "mpi" needs launcher = "mpi", got "{trial.launcher}"; '
            'use transport = "gloo" there'
        )


def _multi_node_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    if trial.launcher in ("local", "torchrun"):
        yield (
            f'nodes: launcher "{trial.launcher}" starts ranks on this node only, got '
            f'{trial.nodes}; use launcher = "mpi" or "spark"'
        )
    if experiment.network.interface is None:
        yield (
            "nodes: ranks on several nodes need an interface to talk over; "
            'add [network] interface = "eth0" (as `ip addr` names it)'
        )
    if "auto" in (trial.ranks_per_node, trial.threads_per_rank):
        yield (
            "nodes: on several nodes say ranks_per_node and threads_per_rank as numbers; "
            "this machine's cores say nothing of theirs"
        )


def _batch_faults(experiment: Experiment) -> Iterator[str]:
    for workload in experiment.workloads:
        batch = (
            workload.global_batch
            or experiment.training.global_batch
            or WORKLOADS[workload.name].global_batch
        )
        for number, trial in enumerate(experiment.trials, start=1):
            if trial.ranks_per_node == "auto":
                continue  # plan checks it, once the cores are known
            ranks = trial.nodes * trial.ranks_per_node
            if batch % ranks:
                yield (
                    f"trials[{number}]: workload {workload.name}: a global batch of {batch} cannot "
                    f"be divided among {ranks} ranks; use a multiple of {ranks}, say "
                    f"{-(-batch // ranks) * ranks}"
                )


def _step_faults(experiment: Experiment) -> Iterator[str]:
    for workload in experiment.workloads:
        steps = workload.max_steps or experiment.training.max_steps
        given = (workload.warmup_steps, experiment.training.warmup_steps)
        warmup = next((w for w in given if w is not None), None)
        if steps is not None and warmup is not None and warmup >= steps:
            yield (
                f"workload {workload.name}: warmup_steps = {warmup} leaves nothing to measure of "
                f"max_steps = {steps}; use at most {steps - 1}"
            )
