"""The clock of a lab host that takes turns with others: it stands still while the host is frozen.

The lab records every slice of time in which a host ran: number of the host, start and end, in
nanoseconds of the machine's monotonic clock, so a step of the wall clock changes no slice.
`unix_offset_ns` in the first line is added to get nanoseconds since the epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from paceline.base.errors import DataError

DILATION_VARIABLE = "PACELINE_LAB_DILATION"  # how many hosts take turns with this one, and it
LEAST_ROUNDS = 20  # in a step, else its duration depends on where the slices begin


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A time in which a host ran, in nanoseconds since the epoch."""

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class VirtualClock:
    """Maps times of one host to the time that the host has run."""

    slices: list[Slice]  # of this host, in order
    _starts: list[int] = field(init=False, repr=False)
    _before: list[int] = field(init=False, repr=False)  # time run before each slice

    def __post_init__(self) -> None:
        """Raises DataError unless the slices are in order and apart."""
        for one, other in zip(self.slices, self.slices[1:], strict=False):
            if not one.start_ns <= one.end_ns <= other.start_ns:
                raise DataError(f"slices of a host: expected them in order, got {one}, {other}")
        lengths = [each.length_ns for each in self.slices]
        object.__setattr__(self, "_starts", [each.start_ns for each in self.slices])
        object.__setattr__(self, "_before", list(accumulate(lengths, initial=0)))

    def virtual_s(self, unix_s: float) -> float:
        """Return how long the host had run at a time of the machine.

        Raises DataError before the first slice and after the last: the hosts did not take turns.
        """
        moment_ns = round(unix_s * 1e9)
        number = bisect_right(self._starts, moment_ns) - 1
        if number < 0 or moment_ns > self.slices[-1].end_ns + self._longest_gap_ns():
            raise DataError(f"time {unix_s:.6f}: expected it between the first and the last slice")
        found = self.slices[number]
        return (self._before[number] + min(moment_ns, found.end_ns) - found.start_ns) / 1e9

    def duration_s(self, start_unix_s: float, end_unix_s: float) -> float:
        """Return how long the host ran between two times of the machine."""
        return self.virtual_s(end_unix_s) - self.virtual_s(start_unix_s)

    def step_s(self, started_unix_s: float, step_s: float) -> float:
        """Return how long the host ran in a step that took `step_s` on the machine.

        Raises DataError if the step is too short to be measured in slices.
        """
        ended_unix_s = started_unix_s + step_s
        rounds = self.slices_between(started_unix_s, ended_unix_s)
        if rounds < LEAST_ROUNDS:
            raise DataError(
                f"a step of {step_s:.3g} s: expected at least {LEAST_ROUNDS} rounds of slices in "
                f"it, found {rounds}; use a larger batch or a shorter slice"
            )
        return self.duration_s(started_unix_s, ended_unix_s)

    def slices_between(self, start_unix_s: float, end_unix_s: float) -> int:
        """Count the slices that begin between two times of the machine: rounds of all hosts."""
        start, end = (
            bisect_right(self._starts, round(t * 1e9)) for t in (start_unix_s, end_unix_s)
        )
        return end - start

    def _longest_gap_ns(self) -> int:
        """Return the longest time between two slices; the last one may end a frozen time."""
        pairs = zip(self.slices, self.slices[1:], strict=False)
        return max((other.start_ns - one.end_ns for one, other in pairs), default=0)


def header(unix_offset_ns: int, hosts: int, slice_ms: int) -> str:
    """Return the first line of a file of slices."""
    return f"slices unix_offset_ns={unix_offset_ns} hosts={hosts} slice_ms={slice_ms}\n"


def line(host: int, slice_: Slice) -> str:
    """Return the line of a slice in the clock that the header's offset belongs to."""
    return f"{host} {slice_.start_ns} {slice_.end_ns}\n"


def read_clocks(path: Path) -> dict[int, VirtualClock]:
    """Read the clocks of all hosts, by number; an unfinished last line is left out.

    Raises DataError if the file is not one of slices.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error}") from error
    first, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    try:
        settings = dict(word.split("=") for word in first.split()[1:])
        offset_ns, hosts = int(settings["unix_offset_ns"]), int(settings["hosts"])
        rows = [tuple(map(int, each.split())) for each in lines]
        return {host: VirtualClock(_of(host, rows, offset_ns)) for host in range(hosts)}
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: expected the slices of a lab, found {first[:80]!r}") from error


def _of(host: int, rows: Iterable[tuple[int, ...]], offset_ns: int) -> list[Slice]:
    return [
        Slice(start + offset_ns, end + offset_ns) for number, start, end in rows if number == host
    ]


def overlap_ns(clocks: Iterable[VirtualClock]) -> int:
    """Return how long more than one host ran at the same time; the lab's aim is 0."""
    found, until_ns = 0, 0
    for each in sorted(slice_ for clock in clocks for slice_ in clock.slices):
        found += max(0, min(until_ns, each.end_ns) - each.start_ns)
        until_ns = max(until_ns, each.end_ns)
    return found
