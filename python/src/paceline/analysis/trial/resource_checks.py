"""Check that the ranks of a trial, and the trials that are compared, had equal resources.

Launchers have different defaults: Spark exports OMP_NUM_THREADS = spark.task.cpus, torchrun sets it
to 1, Open MPI binds ranks to cores. Without this check, a comparison would compare defaults. A rank
itself refuses other threads or cores than planned (paceline.train.training.resources).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from paceline.analysis.trial.reading import TrialRecord
from paceline.base.host.machine import SYNCHRONISED_S
from paceline.collectives.host import UNKNOWN_BOOT
from paceline.measure.records.rows import RankEnvironment
from paceline.plan.trials.trial import Placement, Trial

# resources that are equal on all ranks of a trial, as text for a sentence
_SHARED: dict[str, Callable[[RankEnvironment], str]] = {
    "intra-op threads": lambda e: str(e.intraop_threads),
    "inter-op threads": lambda e: str(e.interop_threads),
    "allowed cores": lambda e: str(len(e.affinity)),
    "cgroup CPU limits": lambda e: str(e.cgroup_cpu_limit),
    "cgroup memory limits": lambda e: str(e.cgroup_memory_limit_bytes),
    "CPU models": lambda e: e.cpu_model,
    "OpenMP settings": lambda e: _settings(e.omp_environment),
    "library versions": lambda e: _settings(e.versions),
}


def trial_flags(record: TrialRecord) -> list[str]:
    """Describe unequal ranks of one trial, and hosts with more cores than planned."""
    environments = [r.environment for r in record.ranks if r.environment is not None]
    if not environments:
        return ["no rank reported its resources, so they are unknown"]
    return [*_unequal_ranks(environments), *_further_cores(record.trial, environments)]


def flags_between(records: Sequence[TrialRecord]) -> list[str]:
    """Describe unequal resources of trials with one placement.

    One sentence for each placement and kind of resource, however many trials and workloads. Ranks
    with several replica threads are not compared with ranks of one replica.
    """
    same_placement: dict[Placement, list[TrialRecord]] = defaultdict(list)
    for record in records:
        same_placement[record.trial.placement].append(record)
    return [
        sentence
        for placement, same in same_placement.items()
        for sentence in _unequal_trials(placement, same)
    ]


def allocated_cores_flags(records: Sequence[TrialRecord]) -> list[str]:
    """Describe trials of one workload and number of nodes with different numbers of cores.

    `sequential` is left out: by definition it uses one core per node.
    """
    found: dict[tuple[str, int], dict[int, dict[str, None]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        trial, place = record.trial, record.trial.placement
        if trial.local_strategy != "sequential":
            by_cores = found[trial.training.workload, place.nodes]
            by_cores[place.cores][f"{trial.launcher} {trial.local_strategy}"] = None
    sentences = []
    for (workload, nodes), by_cores in found.items():
        if len(by_cores) > 1:
            described = ", ".join(
                f"{' and '.join(names)} had {cores} {'core' if cores == 1 else 'cores'}"
                for cores, names in sorted(by_cores.items())
            )
            where = "" if nodes == 1 else f" on {nodes} nodes"
            sentences.append(f"workload {workload}{where}: {described}: allocated cores differ")
    return sentences


def shared_machine_flags(records: Sequence[TrialRecord]) -> list[str]:
    """Name hosts of one trial that are parts of one machine, by the boot that their ranks recorded.

    Two containers or pods have names and addresses of their own, but share cores and kernel.
    """
    trials: dict[tuple[str, ...], int] = defaultdict(int)
    for record in records:
        hosts: dict[str, set[str]] = defaultdict(set)
        for status in (rank.status for rank in record.ranks):
            if status is not None and status.boot_id not in (None, UNKNOWN_BOOT):
                hosts[str(status.boot_id)].add(status.host)
        for names in hosts.values():
            if len(names) > 1:
                trials[tuple(sorted(names))] += 1
    return [
        f"hosts {', '.join(names)} of {count} {'trial' if count == 1 else 'trials'} are parts of "
        "one machine (one kernel), so their links are its memory: this is no measurement of "
        "several machines. Place the nodes on different machines"
        for names, count in trials.items()
    ]


def clock_flags(records: Sequence[TrialRecord]) -> list[str]:
    """Name hosts whose clocks were not synchronised with that of rank 0."""
    offsets_s: dict[str, float] = {}
    for record in records:
        for environment in (rank.environment for rank in record.ranks):
            if environment is None:
                continue
            offset_s, error_s = environment.clock_offset_s, environment.clock_error_s
            if abs(offset_s) - error_s > SYNCHRONISED_S:
                before_s = offsets_s.get(environment.host, 0.0)
                offsets_s[environment.host] = max(abs(offset_s), before_s)
    return [
        f"the clock of host {host} differs by {seconds:.3g} s from that of rank 0. Records are "
        "corrected by the difference, logs and times of files are not: synchronise it (chrony, NTP)"
        for host, seconds in offsets_s.items()
    ]


def turns_flags(records: Sequence[TrialRecord]) -> list[str]:
    """Say that hosts took turns on the cores of one machine, so that time ran slower for them."""
    trials = Counter(record.dilation for record in records)
    mixed = (
        "trials on different hosts: some took turns on the same cores, others did not, or in other "
        "numbers. Ratios between them mean nothing; run all of them on the same hosts"
    )
    return [mixed] * (len(trials) > 1) + [
        f"hosts of {count} {'trial' if count == 1 else 'trials'} were emulated: {dilation} hosts "
        f"took turns on the same cores. Times are those in which a host ran (dilation {dilation}). "
        "Not measured: start-up, IOWait, context switches, background CPU load"
        + (". More than two hosts were not compared with real cores" if dilation > 2 else "")
        for dilation, count in trials.items()
        if dilation > 1
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


def _further_cores(trial: Trial, environments: list[RankEnvironment]) -> Iterator[str]:
    planned = trial.placement.cores_per_node
    allowed: dict[str, set[int]] = defaultdict(set)
    for environment in environments:
        allowed[environment.host].update(environment.affinity)
    for host, cores in sorted(allowed.items()):
        if len(cores) > planned:
            yield (
                f"planned {planned} cores on {host}, found {len(cores)}: helper threads may have "
                "used the others"
            )


def _unequal_trials(placement: Placement, records: Sequence[TrialRecord]) -> Iterator[str]:
    for name, value in _SHARED.items():
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for record in records:
            trial = record.trial
            texts = {value(r.environment) for r in record.ranks if r.environment is not None}
            if texts:
                described = f"{trial.launcher} {trial.transport} {trial.local_strategy}"
                found[" or ".join(sorted(text or "none" for text in texts))][described] = None
        if len(found) > 1:
            all_found = "; ".join(f"{text} ({', '.join(who)})" for text, who in found.items())
            yield (
                f"trials of {placement.nodes} x {placement.ranks_per_node} ranks x "
                f"{placement.threads_per_rank} threads had different {name}: {all_found}"
            )


def _settings(settings: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
