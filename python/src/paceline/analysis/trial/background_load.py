"""Background CPU load: other processes that competed for CPU while trials trained.

Speeds measured on a busy machine are not the speeds of the machine, and trials with different
background load cannot be compared. CPU time of a host that the trial's own processes did not use
belongs to others. Hosts that are parts of one machine (namespaces, containers) all see the time of
the whole machine, so they are combined. The kernel's counters do not separate niced processes from
interrupts; both are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.trial.reading import HostTrace, TrialRecord
from paceline.analysis.trial.usage import BackgroundLoad, load_in_training

_THRESHOLD = 10.0  # percent of all cores: far above launcher, kernel and sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Percent of all cores during the `train` span, on the machine with the highest load."""

    others_percent: float  # used by processes that do not belong to the trial
    stolen_percent: float  # given to other machines by the hypervisor
    busy_percent: float  # the same as others_percent, with niced processes and interrupts


def disturbance(record: TrialRecord, hosts: Sequence[HostTrace]) -> Disturbance | None:
    """Compute the background load of one trial; None if its hosts have too few samples."""
    machines: dict[str, list[BackgroundLoad]] = defaultdict(list)
    for trace in hosts:
        load = load_in_training(record, trace)
        if load is not None:
            machines[str(trace.header.get("boot_id") or trace.host)].append(load)
    if not machines:
        return None
    return Disturbance(
        others_percent=max(_others_percent(loads) for loads in machines.values()),
        busy_percent=max(_others_percent(loads, all_modes=True) for loads in machines.values()),
        stolen_percent=max(100 * load.stolen for loads in machines.values() for load in loads),
    )


def disturbance_flags(found: Mapping[str, Disturbance | None]) -> Iterable[str]:
    """Describe the trials with background load, one sentence for each kind.

    found: by trial id.
    """
    known = {name: load for name, load in found.items() if load is not None}
    yield from _flags(
        {name: load.others_percent for name, load in known.items()},
        "other processes used {share:.0f} % of the cores",
    )
    yield from _flags(
        {name: load.stolen_percent for name, load in known.items()},
        "the hypervisor gave {share:.0f} % of the CPU time to other machines",
    )


def _flags(shares: Mapping[str, float], what: str) -> Iterator[str]:
    loaded = [name for name, share in shares.items() if share > _THRESHOLD]
    if loaded:
        worst = max(loaded, key=lambda name: shares[name])
        yield (
            f"{what.format(share=shares[worst])} while {worst} trained, and more than "
            f"{_THRESHOLD:.0f} % in {len(loaded)} of {len(shares)} trials: repeat the run on an "
            "idle machine"
        )


def _others_percent(loads: Sequence[BackgroundLoad], *, all_modes: bool = False) -> float:
    """Return the load of other processes on one machine, whose hosts trained at the same time.

    all_modes: count niced processes and interrupts, too.
    """
    busy = max(load.computing + (load.other if all_modes else 0.0) for load in loads)
    return 100.0 * max(0.0, busy - sum(load.run for load in loads))
