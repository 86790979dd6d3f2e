"""What each rank really had, and where compared trials had unequal resources.

Launchers disagree by default (Spark exports OMP_NUM_THREADS = spark.task.cpus, torchrun 1, Open
MPI binds ranks to cores), so an unchecked comparison compares defaults.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.analysis.reading import TrialRecord
    from paceline.plan.trial import Placement
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

    One sentence for each placement and kind of resource, however many trials and workloads.
    """
    by_placement: dict[Placement, list[TrialRecord]] = defaultdict(list)
    for record in records:
        by_placement[record.trial.placement].append(record)
    return [
        sentence
        for placement, same in by_placement.items()
        for sentence in _unequal_trials(placement, same)
    ]


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
    threads = {e.intraop_threads for e in environments}
    if threads != {place.threads_per_rank}:
        had = ", ".join(map(str, sorted(threads)))
        yield f"planned {place.threads_per_rank} threads a rank, its ranks had {had}"
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


def _listed(settings: dict[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items()))
