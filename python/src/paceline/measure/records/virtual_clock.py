"""The clock of a lab host that takes turns with others: it stands still while the host is frozen.

The lab records every slice of time in which a host ran: number of the host, start and end, in
nanoseconds of the machine's monotonic clock, so a step of the wall clock changes no slice.
`unix_offset_ns` in the first line is added to get nanoseconds since the epoch. While a trial
starts and after its training, which is not measured, all hosts run at once: their slices begin at
the same time.

At the end of a trial its records are converted, all by `VirtualClock.unix_s`: a process reads the
clock only while its host runs, so nothing is lost. `slices` of the trial has what is needed to get
the times of the machine again.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.collectives.host import wait_until
from paceline.measure.records.files import (
    ends_of,
    read_json,
    read_jsonl,
    replacing,
    write_json,
    write_text,
)
from paceline.measure.records.layout import RankFiles, TrialFiles

DILATION_VARIABLE = "PACELINE_LAB_DILATION"  # how many hosts take turns with this one, and it
LINK_VARIABLE = "PACELINE_LAB_LINK"  # rate of the host's link, as the lab was made with
OWNER_VARIABLE = "PACELINE_LAB_OWNER"  # process id of what keeps the lab up
SLICES_VARIABLE = "PACELINE_LAB_SLICES"  # the record of slices
CPU_TIME_VARIABLE = "PACELINE_LAB_CPU_TIME"  # file of the host's control group with its CPU time
LEAST_ROUNDS = 20  # in a step, else its duration depends on where the slices begin
_BEFORE_S = 1.0  # slices of a trial begin so long before it
_RECORDED_S = 5.0  # limit to wait for the slice that is running
_READ_BYTES = 2**20  # of the newest slices, at first


def own_dilation() -> int:
    """Return how many lab hosts take turns with this one, and it; 1 if this host takes none."""
    return int(os.environ.get(DILATION_VARIABLE, "1"))


def together_file(slices: Path) -> Path:
    """Return the file that names the process for which all hosts of a lab run at once."""
    return slices.with_suffix(".together")


def waiting_file(slices: Path) -> Path:
    """Return the file that names this process while hosts take turns for it."""
    return slices.with_suffix(".waiting")


def run_together() -> None:
    """Let all hosts run at once until `run_in_turns` or the end of this process.

    Do nothing where they take no turns.
    """
    if SLICES_VARIABLE in os.environ:
        write_text(together_file(Path(os.environ[SLICES_VARIABLE])), f"{os.getpid()}\n")


def run_in_turns() -> None:
    """Let the hosts take turns from now on, because the training begins."""
    if SLICES_VARIABLE in os.environ:
        slices = Path(os.environ[SLICES_VARIABLE])
        _renamed(together_file(slices), waiting_file(slices))


def run_together_again() -> None:
    """Let all hosts run at once as before `run_in_turns`, because all ranks have trained."""
    if SLICES_VARIABLE in os.environ:
        slices = Path(os.environ[SLICES_VARIABLE])
        _renamed(waiting_file(slices), together_file(slices))


def _renamed(path: Path, goal: Path) -> None:
    with suppress(FileNotFoundError):  # another rank was faster
        path.rename(goal)


def are_together(slices: Path) -> bool:
    """Return whether a process that lives has asked for all hosts to run at once."""
    try:
        return Path("/proc", together_file(slices).read_text("utf-8").strip()).exists()
    except FileNotFoundError:
        return False


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
    """Maps times of the machine to times of one host."""

    slices: list[Slice]  # of this host, in order
    origin_ns: int  # at which the clocks of all hosts agree with that of the machine
    cores: int = 1  # of the host
    _starts: list[int] = field(init=False, repr=False)
    _before: list[int] = field(init=False, repr=False)  # time run before each slice
    _longest_gap_ns: int = field(init=False, repr=False)  # the last slice may end a frozen time

    def __post_init__(self) -> None:
        """Raises DataError unless the slices are in order and apart."""
        for one, other in pairwise(self.slices):
            if not one.start_ns <= one.end_ns <= other.start_ns:
                raise DataError(f"slices of a host: expected them in order, got {one}, {other}")
        lengths = [each.length_ns for each in self.slices]
        gaps = (other.start_ns - one.end_ns for one, other in pairwise(self.slices))
        object.__setattr__(self, "_starts", [each.start_ns for each in self.slices])
        object.__setattr__(self, "_before", list(accumulate(lengths, initial=0)))
        object.__setattr__(self, "_longest_gap_ns", max(gaps, default=0))

    @property
    def slice_s(self) -> float:
        return median(each.length_ns for each in self.slices) / 1e9

    def unix_s(self, unix_s: float) -> float:
        """Return the time of the host's clock at a time of the machine.

        Raises DataError before the first round and after the last: the hosts did not take turns.
        """
        moment_ns = round(unix_s * 1e9)
        number = bisect_right(self._starts, moment_ns) - 1
        if number < 0 and self.slices and moment_ns >= self.origin_ns:  # others ran first
            return self.origin_ns / 1e9
        if number < 0 or moment_ns > self.slices[-1].end_ns + self._longest_gap_ns:
            raise DataError(
                f"time {unix_s:.6f}: expected it between the first and the last slice of a host; "
                "the hosts of the lab did not take turns then"
            )
        found = self.slices[number]
        ran_ns = self._before[number] + min(moment_ns, found.end_ns) - found.start_ns
        return (self.origin_ns + ran_ns) / 1e9

    def lengths_s(self, start_unix_s: float, parts_s: Iterable[float]) -> list[float]:
        """Return how long the host ran in each of some times that follow one another."""
        ends = accumulate(parts_s, initial=start_unix_s)
        return [later - sooner for sooner, later in pairwise(map(self.unix_s, ends))]

    def rounds(self, start_unix_s: float, length_s: float) -> int:
        """Count the slices that begin in a time: rounds of all hosts."""
        ends_s = (start_unix_s, start_unix_s + length_s)
        first, last = (bisect_right(self._starts, round(end_s * 1e9)) for end_s in ends_s)
        return last - first


# --- the file of slices -----------------------------------------------------------------------


def line(host: int, slice_: Slice) -> str:
    """Return the line of a slice in the clock that the header's offset belongs to."""
    return f"{host} {slice_.start_ns} {slice_.end_ns}\n"


@dataclass(frozen=True, slots=True)
class RecordedSlices:
    """Content of a file of slices."""

    unix_offset_ns: int
    hosts: tuple[str, ...]  # names, by number
    cores: int  # of each host
    slice_ms: int
    rows: tuple[tuple[int, Slice], ...] = ()  # number of the host, slice in the monotonic clock

    @classmethod
    def read(cls, path: Path, since_unix_s: float = 0.0) -> Self:
        """Read the slices that began at a time of the machine or later, and perhaps some before.

        An unfinished last line is left out. Raises DataError if the file has no first line.
        """
        first, length = b"", _READ_BYTES
        try:
            while True:
                first, tail = ends_of(path, length)
                is_whole = len(tail) < length
                found = cls._of(first.decode("utf-8"), tail, is_whole=is_whole)
                limit_ns = round(since_unix_s * 1e9) - found.unix_offset_ns
                begins_before = bool(found.rows) and found.rows[0][1].start_ns < limit_ns
                if is_whole or begins_before:
                    return found
                length *= 4
        except (OSError, KeyError, ValueError) as error:
            raise DataError(
                f"{path}: expected the slices of a lab, found {str(first[:80])[1:]}: {error}"
            ) from error

    @classmethod
    def _of(cls, first: str, tail: bytes, *, is_whole: bool) -> Self:
        """Return the slices of lines; if they are not the whole file, without the first line."""
        words = dict(word.split("=") for word in first.split()[1:])
        numbers = (int(words[name]) for name in ("unix_offset_ns", "cores", "slice_ms"))
        offset_ns, cores, slice_ms = numbers
        begin = 0 if is_whole else tail.find(b"\n") + 1
        lines = tail[begin : tail.rfind(b"\n") + 1].decode("utf-8").splitlines()
        rows = [tuple(map(int, each.split())) for each in lines]
        found = tuple((host, Slice(start, end)) for host, start, end in rows)
        return cls(offset_ns, tuple(words["hosts"].split(",")), cores, slice_ms, found)

    @property
    def header(self) -> str:
        return (
            f"slices unix_offset_ns={self.unix_offset_ns} hosts={','.join(self.hosts)} "
            f"cores={self.cores} slice_ms={self.slice_ms}\n"
        )

    @property
    def text(self) -> str:
        return self.header + "".join(line(host, each) for host, each in self.rows)

    def since(self, unix_s: float) -> Self:
        """Return whole rounds of hosts, from the one that ran at a time of the machine."""
        limit_ns = round(unix_s * 1e9) - self.unix_offset_ns
        begins = [place for place, (host, _) in enumerate(self.rows) if host == 0]
        before = [place for place in begins if self.rows[place][1].start_ns <= limit_ns]
        return replace(self, rows=self.rows[before[-1] :] if before else self.rows)

    def until_unix_s(self) -> float:
        """Return until when the slices of all hosts are recorded; 0 without any."""
        ends = dict.fromkeys(range(len(self.hosts)), -self.unix_offset_ns)
        ends.update((host, each.end_ns) for host, each in self.rows)
        return (min(ends.values()) + self.unix_offset_ns) / 1e9

    def clocks(self) -> dict[str, VirtualClock]:
        """Return the clocks of all hosts, by name. Raises DataError."""
        offset_ns = self.unix_offset_ns
        origin_ns = min((each.start_ns for _, each in self.rows), default=0) + offset_ns
        slices: list[list[Slice]] = [[] for _ in self.hosts]
        for host, each in self.rows:
            slices[host].append(Slice(each.start_ns + offset_ns, each.end_ns + offset_ns))
        return {
            name: VirtualClock(own, origin_ns, self.cores)
            for name, own in zip(self.hosts, slices, strict=True)
        }


def overlap_ns(clocks: Iterable[VirtualClock]) -> int:
    """Return how long more than one host ran at the same time in turns; the lab's aim is 0."""
    every = [slice_ for clock in clocks for slice_ in clock.slices]
    begun = Counter(each.start_ns for each in every)
    found, until_ns = 0, 0
    for each in sorted(each for each in every if begun[each.start_ns] == 1):
        found += max(0, min(until_ns, each.end_ns) - each.start_ns)
        until_ns = max(until_ns, each.end_ns)
    return found


# --- conversion of the records of a trial -----------------------------------------------------

# The phases of a step, laid end to end: they add up to the step, also afterwards. Where phases
# alternate within a step, each gets its share of the slices on average.
_STEP_PARTS = (
    "data_wait_s", "forward_s", "backward_s", "bubble_s", "pass_comm_s", "comm_s", "optimizer_s",
    "other_s",
)  # fmt: skip
# How often hosts' threads wait or are interrupted says nothing where the freezer does it, too.
_NOT_MEASURED = ("voluntary_context_switches", "involuntary_context_switches")

_Row = dict[str, Any]


def keep_slices(
    source: Path, files: TrialFiles, from_unix_s: float, until_unix_s: float
) -> RecordedSlices:
    """Copy the slices of a trial into its folder, when all until its end are recorded; return them.

    source: slices of the lab. Raises EnvironmentLacks if the turns have ended.
    """

    recorded: RecordedSlices | None = None
    since_unix_s = from_unix_s - _BEFORE_S

    def complete() -> bool:
        nonlocal recorded
        recorded = RecordedSlices.read(source, since_unix_s)
        return recorded.until_unix_s() >= until_unix_s

    if not wait_until(complete, _RECORDED_S, poll_s=0.2) or recorded is None:
        raise EnvironmentLacks(
            f"{source}: expected slices until the end of the trial; the scheduler of the lab has "
            "ended, and its hosts run all at once: make the lab again"
        )
    kept = recorded.since(since_unix_s)
    write_text(files.slices, kept.text)
    return kept


def convert_trial(files: TrialFiles, clocks: dict[str, VirtualClock], launcher: str) -> None:
    """Replace all times and durations of a trial by those of the clocks of its hosts.

    clocks: by name of the host. launcher: name of its host. CPU times, counts and bytes stay.
    Raises DataError if a step is too short, or a host has no clock.
    """
    for _, rank in files.ranks():
        clock = _clock_of(rank, clocks)
        _check_rounds(rank, read_json(files.trial)["training"]["warmup_steps"], clock)
        for rows in (rank.spans, rank.steps, rank.communication, rank.evaluations,
                     rank.checkpoints, rank.continuations):  # fmt: skip
            _convert_rows(rows, partial(_converted, clock=clock))
        for document in (rank.status, rank.environment):
            _convert_document(document, clock)
    for name, host in files.hosts():
        for trace in (host.trace, host.ranks):
            _convert_rows(trace, partial(_sample, clock=clocks[name], hosts=len(clocks)))
    for rows in (files.failures, files.injected):
        _convert_rows(rows, partial(_converted, clock=clocks[launcher]))


def _clock_of(rank: RankFiles, clocks: dict[str, VirtualClock]) -> VirtualClock:
    host = read_json(rank.status)["host"]
    if host not in clocks:
        raise DataError(f"{rank.status}: expected a host that takes turns, found {host!r}")
    return clocks[host]


def _check_rounds(rank: RankFiles, warmup_steps: int, clock: VirtualClock) -> None:
    """Raise DataError if steps after the warm-up are too short to be measured in slices."""
    rows = list(read_jsonl(rank.steps)) if rank.steps.exists() else []
    steady = [row for row in rows if row["step"] >= warmup_steps]
    if not steady:
        return
    rounds = median(clock.rounds(row["started_unix_s"], row["step_s"]) for row in steady)
    if rounds < LEAST_ROUNDS:
        step_s = median(row["step_s"] for row in steady)
        raise DataError(
            f"a step of {step_s:.3g} s has {rounds:g} rounds of slices, expected at least "
            f"{LEAST_ROUNDS} where hosts take turns: use a larger batch, a larger workload, or a "
            "shorter slice (`lab up --slice`)"
        )


def _convert_rows(path: Path, convert: Callable[[_Row], _Row]) -> None:
    if not path.exists():
        return
    with replacing(path) as file:
        for row in read_jsonl(path):
            file.write(json.dumps(convert(row), separators=(",", ":")) + "\n")


def _convert_document(path: Path, clock: VirtualClock) -> None:
    if path.exists():
        write_json(path, _converted(read_json(path), clock))


def _converted(row: _Row, clock: VirtualClock) -> _Row:
    """Return a row or document with its times on the host's clock."""
    found = dict(row)
    for name, value in row.items():
        if isinstance(value, dict):
            found[name] = _converted(value, clock)
        elif name.endswith("unix_s") and value is not None:
            found[name] = clock.unix_s(value)
    if "step_s" in row:
        found |= _parts(row, clock)
    if "blocked_s" in row:
        [found["blocked_s"]] = clock.lengths_s(row["started_unix_s"], [row["blocked_s"]])
    if "clock_offset_s" in row:  # the clocks of all hosts are those of one machine
        found |= {"clock_offset_s": 0.0, "clock_error_s": clock.slice_s}
    return found


def _parts(row: _Row, clock: VirtualClock) -> _Row:
    known = {name: row[name] for name in _STEP_PARTS if row.get(name) is not None}
    lengths_s = clock.lengths_s(row["started_unix_s"], known.values())
    [step_s] = clock.lengths_s(row["started_unix_s"], [row["step_s"]])
    return {**dict(zip(known, lengths_s, strict=True)), "step_s": step_s}


def _sample(row: _Row, clock: VirtualClock, hosts: int) -> _Row:
    """Return a row of a sidecar, or its header, on the host's clock.

    The cores of a host were idle in its own time where its processes did not use them.
    """
    found = {
        name: value
        for name, value in _converted(row, clock).items()
        if name.removeprefix("run_") not in _NOT_MEASURED
    }
    if "interval_s" in row:
        return found | {
            "interval_s": row["interval_s"] / hosts,
            "expensive_interval_s": row["expensive_interval_s"] / hosts,
            "cores": clock.cores,
        }
    modes = row.get("cpu_seconds")
    if isinstance(modes, dict):
        used_s = modes["user"]  # of its control group
        ran_s = found["unix_s"] - clock.origin_ns / 1e9
        found["cpu_seconds"] = {"user": used_s, "idle": clock.cores * ran_s - used_s}
    return found
