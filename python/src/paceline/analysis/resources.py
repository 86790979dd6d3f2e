"""Resources that each rank really had, and trials whose resources were unequal.

Launchers disagree by default (Spark exports OMP_NUM_THREADS = spark.task.cpus, torchrun 1, Open
MPI binds ranks to cores), so an unchecked comparison compares defaults.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.analysis.reading import TrialRecord
    from paceline.plan.trial import Placement, Trial
    from paceline.records.rows import RankEnvironment

# what ranks of one trial must share; the name reads within a sentence
_SHARED: dict[str, Callable[[RankEnvironment], str]] = {
    "intra-op threads": lambda e: str(e.intraop_threads),
    "inter-op threads": lambda e: str(e.interop_threads),
    "cores to run on": lambda e: str(len(e.affinity)),
    "cgroup CPU limits": lambda e: str(e.cgroup_cpu_limit),
    "cgroup memory limits": lambda e: str(e.cgroup_memory_limit_bytes),
    "CPU models": lambda e: e.cpu_model,
    "precision": lambda e: e.precision,
    "memory formats": lambda e: e.memory_format,
    "OpenMP settings": lambda e: _listed(e.omp_environment),
    "library versions": lambda e: _listed(e.versions),
}
# asked for, and different on purpose, between trials
_NOT_BETWEEN_TRIALS = {"precision", "memory formats"}


def trial_flags(record: TrialRecord) -> list[str]:
    """Sentences on ranks of one trial that are unequal, or had other than was planned."""
    environments = [r.environment for r in record.ranks if r.environment is not None]
    if not environments:
        return ["no rank said what it had, so its resources are unknown"]
    return [*_unequal_ranks(environments), *_other_than_planned(record, environments)]


def flags_between(records: Sequence[TrialRecord]) -> list[str]:
    """Sentences on trials of one placement whose ranks had unequal resources.

    One sentence for each placement and kind of resource, however many trials and workloads. A rank
    that shares its threads out to replicas is none of those that keep them for one.
    """
    alike: dict[tuple[Placement, int], list[TrialRecord]] = defaultdict(list)
    for record in records:
        alike[record.trial.placement, record.trial.placement.replicas_per_rank].append(record)
    return [
        sentence
        for (placement, _), same in alike.items()
        for sentence in _unequal_trials(placement, same)
    ]


def allocated_cores_flags(records: Sequence[TrialRecord]) -> list[str]:
    """Sentences on trials of a workload that were given different numbers of cores.

    On one number of nodes: that two nodes have more cores than one is no surprise. `sequential`
    uses one core a node by its definition, whatever the others get.
    """
    budgets: dict[tuple[str, int], dict[int, dict[str, None]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        trial = record.trial
        if trial.local_strategy != "sequential":
            place = trial.placement
            found = budgets[trial.training.workload, place.nodes][place.cores]
            found[f"{trial.launcher} {trial.local_strategy}"] = None
    sentences = []
    for (workload, nodes), by_cores in budgets.items():
        if len(by_cores) > 1:
            described = ", ".join(
                f"{_and(list(ways))} had {cores} {'core' if cores == 1 else 'cores'}"
                for cores, ways in sorted(by_cores.items())
            )
            where = "" if nodes == 1 else f" on {nodes} nodes"
            sentences.append(f"workload {workload}{where}: {described}: not the same budget")
    return sentences


def _unequal_ranks(environments: list[RankEnvironment]) -> Iterator[str]:
    for name, value in _SHARED.items():
        found: dict[str, list[int]] = defaultdict(list)
        for environment in environments:
            found[value(environment)].append(environment.rank)
        if len(found) > 1:
            described = "; ".join(
                f"rank {', '.join(map(str, ranks))}: {text or 'none'}"
                for text, ranks in found.items()
            )
            yield f"its ranks have different {name} ({described})"


def _other_than_planned(record: TrialRecord, environments: list[RankEnvironment]) -> Iterator[str]:
    place, training = record.trial.placement, record.trial.training
    planned = record.trial.placement.threads_per_worker
    threads = {e.intraop_threads for e in environments}
    if threads != {planned}:
        had = ", ".join(map(str, sorted(threads)))
        yield f"planned {planned} threads a rank, its ranks had {had}"
    for environment in environments:
        yield from _worker_faults(record.trial, environment)
    if len(environments) != place.ranks:
        yield f"planned {place.ranks} ranks, {len(environments)} said what they had"
    if {e.precision for e in environments} != {training.precision}:
        yield f"planned {training.precision}, a rank ran in another precision"
    cores: dict[str, set[int]] = defaultdict(set)
    for environment in environments:
        cores[environment.host].update(environment.affinity)
    for host, allowed in sorted(cores.items()):
        if len(allowed) < place.cores_per_node and not place.oversubscribe:
            yield (
                f"planned {place.cores_per_node} cores on {host}, its ranks could run on "
                f"{len(allowed)} only"
            )
        elif len(allowed) > place.cores_per_node:
            yield (
                f"planned {place.cores_per_node} cores on {host}, its ranks could run on "
                f"{len(allowed)}: helper threads may have used the rest"
            )


def _worker_faults(trial: Trial, environment: RankEnvironment) -> Iterator[str]:
    """Threads with replicas of their own: each has its own cores, a thread for each of them."""
    if trial.placement.replicas_per_rank == 1:
        return
    rank, workers, each = environment.rank, environment.workers, trial.placement.threads_per_worker
    if len(workers) != trial.placement.replicas_per_rank:
        yield (
            f"planned {trial.placement.replicas_per_rank} replica threads in rank {rank}, "
            f"{len(workers)} reported what they had"
        )
    threads = {w.intraop_threads for w in workers}
    if threads - {each}:
        had = ", ".join(map(str, sorted(threads)))
        yield f"planned {each} threads a replica in rank {rank}, its replicas had {had}"
    if trial.placement.oversubscribe or trial.placement.allocated_cores is not None:
        return
    cores = {len(w.affinity) for w in workers}
    if cores - {each}:
        had = ", ".join(map(str, sorted(cores)))
        yield f"planned {each} cores a replica in rank {rank}, its replicas could run on {had}"
    elif len({core for w in workers for core in w.affinity}) < each * len(workers):
        yield f"the replicas of rank {rank} share cores that were planned for one each"


def _unequal_trials(placement: Placement, records: Sequence[TrialRecord]) -> Iterator[str]:
    for name, value in _SHARED.items():
        if name in _NOT_BETWEEN_TRIALS:
            continue
        ways: dict[str, dict[str, None]] = defaultdict(dict)
        for record in records:
            had = {value(r.environment) for r in record.ranks if r.environment is not None}
            if had:
                trial = record.trial
                way = f"{trial.launcher} {trial.transport} {trial.local_strategy}"
                ways[" or ".join(sorted(v or "none" for v in had))][way] = None
        if len(ways) > 1:
            described = "; ".join(f"{had} ({', '.join(found)})" for had, found in ways.items())
            yield (
                f"trials of {placement.nodes} x {placement.ranks_per_node} ranks x "
                f"{placement.threads_per_rank} threads had different {name}: {described}"
            )


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _listed(settings: dict[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items()))
