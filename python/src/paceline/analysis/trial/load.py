"""Background load: use of CPU by other processes while a trial trained.

Speeds measured on a busy machine are not the speeds of the machine, and trials with different
background load cannot be compared. CPU time of a host that the processes of the trial did not use
belongs to others. Hosts that are parts of one machine (namespaces, containers) all see the time of
the whole machine, so they are combined. Niced processes count like all others: they use caches and
memory, too. Interrupts are left out, because those of messages belong to the trial.

The load is computed once, at the end of a trial, and recorded in its outcome. Every reader takes it
from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from paceline.analysis.trial.host_frames import column, struct_fields
from paceline.analysis.trial.reading import HostTrace, TrialRecord, read_hosts
from paceline.analysis.trial.usage import before_end, in_training

DISTURBING_PERCENT = 10.0  # percent of all cores: far above launcher, kernel and sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Percent of all cores during the `train` span, on the machine with the highest load."""

    others_percent: float  # used by processes that do not belong to the trial
    stolen_percent: float  # given to other machines by the hypervisor
    cores: int | None = None  # of the machine; None in outcomes of 0.3.0

    @property
    def percent(self) -> float:
        return self.others_percent + self.stolen_percent

    @property
    def is_load(self) -> bool:
        """Tell whether other work may have slowed the trial."""
        return self.percent > DISTURBING_PERCENT


def recorded_load(record: TrialRecord) -> Disturbance | None:
    """Return the load that the outcome of a trial has; None if it was not measured.

    Runs of 0.3.0, and commands that `paceline watch` records, have only traces.
    """
    outcome = record.outcome
    if outcome is None or outcome.others_percent is None or outcome.stolen_percent is None:
        return disturbance(record, read_hosts(record.files))
    return Disturbance(
        others_percent=outcome.others_percent,
        stolen_percent=outcome.stolen_percent,
        cores=outcome.machine_cores,
    )


def disturbance(record: TrialRecord, hosts: Sequence[HostTrace]) -> Disturbance | None:
    """Compute the background load of one trial; None if its hosts have too few samples, or take
    turns: their traces have no CPU time of others."""
    machines = [] if record.dilation > 1 else _machines(record, hosts)
    if not machines:
        return None
    cores = [int(host.header["cores"]) for host in hosts if host.header.get("cores")]
    return Disturbance(
        others_percent=max(_others_percent(loads) for loads in machines),
        stolen_percent=max(100 * load.stolen for loads in machines for load in loads),
        cores=max(cores, default=None),
    )


def busy_percent(record: TrialRecord, hosts: Sequence[HostTrace]) -> float | None:
    """Return what processes beside the trial and interrupts used, in percent of all cores."""
    machines = [] if record.dilation > 1 else _machines(record, hosts)
    return max((_others_percent(loads, all_modes=True) for loads in machines), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOfRun:
    """Trials of a run that ran beside other work; those without a measured load do not count."""

    trials: int  # that were planned
    beside_others: int  # of them
    measured_again: int
    again_beside_others: int  # of those that were measured again
    # the largest shares of any trial, in percent of all cores
    others_percent: float
    stolen_percent: float
    by_trial: Mapping[str, Disturbance]

    @property
    def is_constant(self) -> bool:
        """Tell whether more than half of the trials ran beside other work."""
        return 2 * self.beside_others > self.trials

    @property
    def is_mostly_stolen(self) -> bool:
        """Tell whether the hypervisor took more than processes of the machine."""
        return self.stolen_percent > self.others_percent

    @property
    def usual_percent(self) -> float:
        """The median share that was taken from the trials beside other work."""
        loaded = [load.percent for load in self.by_trial.values() if load.is_load]
        return median(loaded) if loaded else 0.0

    @property
    def cores(self) -> int | None:
        """The cores of the machine, if all trials had equally many."""
        found = {load.cores for load in self.by_trial.values()}
        return found.pop() if len(found) == 1 else None


def load_of_run(found: Mapping[str, Disturbance | None], again: Collection[str]) -> LoadOfRun:
    """Count the trials that ran beside other work. found: by trial id. again: ids of those that
    measured another one again."""
    known = {name: load for name, load in found.items() if load is not None}
    planned = [load for name, load in known.items() if name not in again]
    repeated = [load for name, load in known.items() if name in again]
    return LoadOfRun(
        trials=len(planned),
        beside_others=sum(load.is_load for load in planned),
        measured_again=len(repeated),
        again_beside_others=sum(load.is_load for load in repeated),
        others_percent=max((load.others_percent for load in known.values()), default=0.0),
        stolen_percent=max((load.stolen_percent for load in known.values()), default=0.0),
        by_trial=known,
    )


def load_of_trials(records: Iterable[TrialRecord]) -> LoadOfRun:
    """Count those of some trials that ran beside other work."""
    every = list(records)
    again = {record.trial.id for record in every if record.trial.is_again}
    return load_of_run({record.trial.id: recorded_load(record) for record in every}, again)


class _BackgroundLoad(NamedTuple):
    """Counters of one host from its first to its last sample in training, as shares of CPU time."""

    computing: float  # user, nice and system time of all processes
    run: float  # CPU time of the trial's own processes
    stolen: float  # CPU time that the hypervisor gave to other machines
    other: float  # interrupts and guests


def _load_in_training(record: TrialRecord, host: HostTrace) -> _BackgroundLoad | None:
    """Return the CPU shares of one host during the `train` span; None without two samples.

    If the training is too short for two samples, the last ones before its end are taken: its ranks
    start up between them, and another program was probably there already.
    """
    frame = host.samples
    if "user" not in struct_fields(frame, "cpu_seconds"):
        return None
    found = np.flatnonzero(in_training(record, host.host, frame))
    if len(found) < 2:
        found = np.flatnonzero(before_end(record, host.host, frame))[-2:]
    if len(found) < 2:
        return None
    ends = frame[[int(found[0]), int(found[-1])]]
    seconds = ends["cpu_seconds"].struct.unnest()
    spent = {mode: max(0.0, float(np.diff(column(seconds, mode))[0])) for mode in seconds.columns}
    run_s = max(0.0, float(np.diff(column(ends, "run_cpu_seconds"))[0]))
    total_s = float(np.nansum(list(spent.values())))
    if total_s <= 0:
        return None
    return _BackgroundLoad(
        computing=sum(spent.get(mode, 0.0) for mode in ("user", "nice", "system")) / total_s,
        run=run_s / total_s,
        stolen=spent.get("steal", 0.0) / total_s,
        other=spent.get("other", 0.0) / total_s,
    )


def _machines(record: TrialRecord, hosts: Sequence[HostTrace]) -> list[list[_BackgroundLoad]]:
    """Return the loads of the hosts of each machine."""
    machines: dict[str, list[_BackgroundLoad]] = defaultdict(list)
    for trace in hosts:
        load = _load_in_training(record, trace)
        if load is not None:
            machines[str(trace.header.get("boot_id") or trace.host)].append(load)
    return list(machines.values())


def _others_percent(loads: Sequence[_BackgroundLoad], *, all_modes: bool = False) -> float:
    """Return the load of other processes on one machine, whose hosts trained at the same time.

    all_modes: count interrupts, too.
    """
    busy = max(load.computing + (load.other if all_modes else 0.0) for load in loads)
    return 100.0 * max(0.0, busy - sum(load.run for load in loads))
