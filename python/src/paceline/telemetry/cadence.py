"""When to sample: beats at whole multiples of an interval on the monotonic clock, so that watches
with the same interval share their ticks, and a sampler that takes over keeps them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.telemetry.host import HostReading

_EARLY_S = 1e-4  # a beat that a computer's division puts this far ahead is there


def next_beat(after_s: float, interval_s: float) -> float:
    """The first beat that lies behind `after_s`; those that have passed are not made up for."""
    return (math.floor((after_s + _EARLY_S) / interval_s) + 1) * interval_s


def beats_between(last_s: float, now_s: float, interval_s: float) -> int:
    """How many beats were missed between ticks at `last_s` and at `now_s`."""
    last, now = (math.floor((at_s + _EARLY_S) / interval_s) for at_s in (last_s, now_s))
    return max(0, now - last - 1)


class HostShares:
    """Shares of the CPUs since the last row of one watch, out of readings that are more frequent
    where another watch on the host has a shorter interval."""

    def __init__(self) -> None:
        self._last: HostReading | None = None
        self._valid = True
        self._skipped = False

    def pass_over(self, reading: HostReading) -> None:
        """A tick at which this watch has no row."""
        self._valid &= reading.iowait_valid
        self._skipped = True

    def take(self, reading: HostReading) -> dict[str, Any]:
        """The fields of `reading` with shares of the time since the last one taken; None in the
        first."""
        last, self._last = self._last, reading
        valid, self._valid = self._valid and reading.iowait_valid, True
        skipped, self._skipped = self._skipped, False
        fields = reading.fields()
        if last is None:
            nothing = dict.fromkeys(_percent_fields(reading.cpu_seconds))
            return {**fields, **nothing, "core_busy_percent": []}
        if skipped:
            fields |= _since(last, reading) | {"iowait_valid": valid}
        return fields


def _percent_fields(states: dict[str, float]) -> list[str]:
    return [f"cpu_{state}_percent" for state in states]


def _since(last: HostReading, now: HostReading) -> dict[str, Any]:
    ran = {
        state: max(0.0, seconds - last.cpu_seconds.get(state, seconds))
        for state, seconds in now.cpu_seconds.items()
    }
    total_s = sum(ran.values())
    if total_s <= 0:
        return {**dict.fromkeys(_percent_fields(ran)), "core_busy_percent": []}
    percent: dict[str, Any] = {
        f"cpu_{state}_percent": round(100.0 * seconds / total_s, 3)
        for state, seconds in ran.items()
    }
    if now.cpu_iowait_percent is None:
        percent["cpu_iowait_percent"] = None
    cores = len(now.core_busy_s)
    percent["core_busy_percent"] = [
        round(min(100.0, 100.0 * (busy - before) * cores / total_s), 1)
        for busy, before in zip(now.core_busy_s, last.core_busy_s, strict=False)
    ]
    return percent
