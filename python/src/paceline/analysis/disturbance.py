"""What else took the cores while trials trained: speeds of a machine that was not idle are not the
machine's, and trials that were disturbed unequally cannot be compared.

A host's computing time that is not of the trial's own processes is others'. Hosts that are parts of
one machine (namespaces, containers) all see the whole machine's time, so theirs is taken together.
Niced programs are not told from interrupts by the kernel's counters and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.analysis.usage import during_training

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.analysis.reading import HostTrace, TrialRecord
    from paceline.records.rows import HostSample

_WORTH_SAYING = 10.0  # percent of all cores: far above what launcher, kernel and sidecar take
_COMPUTING = ("user", "system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Shares of the cores' time during the `train` span, in percent; of the worst machine."""

    others_percent: float  # computed for programs that are none of the trial's
    stolen_percent: float  # the hypervisor gave it to other machines


class _Interval(NamedTuple):
    """The training of one host, from its first sample to its last."""

    first: HostSample
    last: HostSample

    def cpu_s(self, *states: str) -> float:
        """CPU time of all cores in these states."""
        before, after = self.first.cpu_seconds, self.last.cpu_seconds
        return sum(max(0.0, after.get(state, 0.0) - before.get(state, 0.0)) for state in states)

    def run_cpu_s(self) -> float:
        return max(0.0, self.last.run_cpu_seconds - self.first.run_cpu_seconds)


def disturbance(record: TrialRecord) -> Disturbance | None:
    """Of one trial; None where its hosts were not sampled often enough to tell."""
    machines: dict[str, list[_Interval]] = defaultdict(list)
    for trace in record.hosts:
        samples = [s for s in during_training(trace, record) if s.cpu_seconds]
        if len(samples) > 1:
            machines[_machine(trace)].append(_Interval(samples[0], samples[-1]))
    found = [told for intervals in machines.values() if (told := _of(intervals)) is not None]
    if not found:
        return None
    return Disturbance(
        others_percent=max(told.others_percent for told in found),
        stolen_percent=max(told.stolen_percent for told in found),
    )


def disturbance_flags(records: Iterable[TrialRecord]) -> list[str]:
    """Sentences on trials that had to share the cores with strangers; one for each kind."""
    told = [(r.trial.id, found) for r in records if (found := disturbance(r)) is not None]
    return [
        *_flags(
            [(name, found.others_percent) for name, found in told],
            "other programs took {share:.0f} % of the cores",
        ),
        *_flags(
            [(name, found.stolen_percent) for name, found in told],
            "the hypervisor gave {share:.0f} % of the cores' time to other machines",
        ),
    ]


def _flags(shares: Sequence[tuple[str, float]], what: str) -> Iterator[str]:
    disturbed = [(name, share) for name, share in shares if share > _WORTH_SAYING]
    if disturbed:
        name, share = max(disturbed, key=lambda pair: pair[1])
        yield (
            f"{what.format(share=share)} while {name} trained, and over {_WORTH_SAYING:.0f} % "
            f"in {len(disturbed)} of {len(shares)} trials: run again when nothing else runs"
        )


def _machine(trace: HostTrace) -> str:
    return str(trace.header.get("boot_id") or trace.host)


def _of(intervals: Sequence[_Interval]) -> Disturbance | None:
    """Of one machine; its hosts trained at about the same time."""
    # as shares of time each: hosts of one machine are not sampled at the same moments
    timed = [(i, i.cpu_s(*i.first.cpu_seconds)) for i in intervals]
    if any(total_s <= 0 for _, total_s in timed):
        return None
    computing = max(i.cpu_s(*_COMPUTING) / total_s for i, total_s in timed)
    ours = sum(i.run_cpu_s() / total_s for i, total_s in timed)
    stolen = max(i.cpu_s("steal") / total_s for i, total_s in timed)
    return Disturbance(
        others_percent=100.0 * max(0.0, computing - ours), stolen_percent=100.0 * stolen
    )
