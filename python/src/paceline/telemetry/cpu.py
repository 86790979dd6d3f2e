"""Where the CPU time of a host goes: by state and by core, from /proc/stat (proc_stat(5))."""

from __future__ import annotations

import os
from typing import NamedTuple

# Places in a line of /proc/stat, after its name: user nice system idle iowait irq softirq steal
# guest guest_nice
_IDLE, _IOWAIT, _IRQ, _STEAL, _GUEST = 3, 4, 5, 7, 8
_ABSENT = (0,) * 9


class CpuSeconds(NamedTuple):
    """CPU time since boot, summed over the cores; disjoint states."""

    user: float
    system: float
    idle: float
    iowait: float
    steal: float
    other: float  # nice, irq, softirq, guest


class CoreSeconds(NamedTuple):
    """One core since boot."""

    busy: float  # it computed, be it for a guest
    total: float  # of all states


class CpuCounters(NamedTuple):
    """What /proc/stat says at one moment."""

    cpu: CpuSeconds
    has_iowait: bool  # False where it cannot mean anything: no such field, or nothing is counted
    cores: tuple[CoreSeconds, ...]  # by number; zeros for one that is off


def parse_counters(stat: bytes, ticks_per_s: int | None = None) -> CpuCounters | None:
    """From the text of /proc/stat; None where it has no line on the CPUs.

    Raises ValueError where a line of it is not numbers.
    """
    ticks_per_s = ticks_per_s or os.sysconf("SC_CLK_TCK")
    lines = stat.partition(b"\nintr ")[0].split(b"\n")  # what follows is long, and not needed
    if not lines[0].startswith(b"cpu "):
        return None
    told = list(map(int, lines[0].split()[1:]))
    cores: dict[int, CoreSeconds] = {}
    for line in lines[1:]:
        if not line.startswith(b"cpu"):
            break
        words = line.split()
        cores[int(words[0][3:])] = _core(list(map(int, words[1:])), ticks_per_s)
    absent = CoreSeconds(0.0, 0.0)
    return CpuCounters(
        cpu=_states(told, ticks_per_s),
        has_iowait=len(told) > _IOWAIT and any(told),
        cores=tuple(cores.get(number, absent) for number in range(max(cores, default=-1) + 1)),
    )


def _states(told: list[int], ticks_per_s: int) -> CpuSeconds:
    ticks = [*told, *_ABSENT][: len(_ABSENT)]  # old and emulated kernels tell fewer
    user, nice, system, idle, iowait, irq, softirq, steal, guest = ticks
    return CpuSeconds(
        user=(user - guest) / ticks_per_s,  # user holds the time of guests as well
        system=system / ticks_per_s,
        idle=idle / ticks_per_s,
        iowait=iowait / ticks_per_s,
        steal=steal / ticks_per_s,
        other=(nice + irq + softirq + guest) / ticks_per_s,
    )


def _core(told: list[int], ticks_per_s: int) -> CoreSeconds:
    total = sum(told[:_GUEST])  # guests are in user and nice
    not_busy = sum(told[_IDLE:_IRQ]) + sum(told[_STEAL:_GUEST])
    return CoreSeconds((total - not_busy) / ticks_per_s, total / ticks_per_s)


class CpuShares:
    """Turns CPU counters into shares of the time between two readings.

    The kernel's iowait, and with it idle, may run backwards (proc(5)); such a step counts as zero.
    """

    def __init__(self) -> None:
        self._last: CpuSeconds | None = None
        self.total_seconds = CpuSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # never runs backwards

    def step(self, reading: CpuSeconds) -> tuple[CpuSeconds | None, bool]:
        """Percent of all cores' time by state (None on the first call), and whether the iowait
        counter ran forwards."""
        last, self._last = self._last, reading
        if last is None:
            self.total_seconds = reading
            return None, True
        deltas = [new - old for new, old in zip(reading, last, strict=True)]
        ran = CpuSeconds(*(max(0.0, delta) for delta in deltas))
        self.total_seconds = CpuSeconds(
            *(old + new for old, new in zip(self.total_seconds, ran, strict=True))
        )
        forwards = reading.iowait >= last.iowait
        elapsed = sum(ran)
        if elapsed <= 0:
            return None, forwards
        return CpuSeconds(*(100.0 * seconds / elapsed for seconds in ran)), forwards


class CoreShares:
    """Turns the counters of cores into busy time that never runs backwards, and its shares."""

    def __init__(self) -> None:
        self._last: tuple[CoreSeconds, ...] = ()
        self.busy_seconds: tuple[float, ...] = ()

    def step(self, reading: tuple[CoreSeconds, ...]) -> tuple[float, ...]:
        """Percent of the time since the last call, by core; () on the first, and where the number
        of cores is another than it was. A core that was off all the time was not busy."""
        last, self._last = self._last, reading
        if len(last) != len(reading):
            self.busy_seconds = tuple(core.busy for core in reading)
            return ()
        ran = [max(0.0, new.busy - old.busy) for new, old in zip(reading, last, strict=True)]
        self.busy_seconds = tuple(
            old + new for old, new in zip(self.busy_seconds, ran, strict=True)
        )
        elapsed = [new.total - old.total for new, old in zip(reading, last, strict=True)]
        return tuple(
            min(100.0, 100.0 * busy / whole) if whole > 0 else 0.0
            for busy, whole in zip(ran, elapsed, strict=True)
        )
