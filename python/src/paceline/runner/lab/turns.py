"""Hosts of a lab that take turns: all but one are frozen, and each has all its cores in its slice.

While a trial starts, and after its training, they run all at once.

A scheduler outside of the hosts freezes one and thaws the next (the freezer of control groups,
version 1 or `cgroup.freeze` of version 2). Its parent, the guardian, thaws all hosts if the
scheduler ends or does not report for some seconds: a frozen process of version 1 ignores SIGKILL.
The scheduler ends when the guardian does.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.base.host.processes import kill_until_gone, pids_with_variable, send
from paceline.collectives.host import wait_until
from paceline.measure.records.files import write_text
from paceline.measure.records.virtual_clock import (
    CPU_TIME_VARIABLE,
    RecordedSlices,
    Slice,
    are_together,
    line,
)
from paceline.runner.lab.record import CHANGE_MS, LabRecord

TURNS_VARIABLE = "PACELINE_LAB_TURNS"  # set in scheduler and guardian: the lab's name
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_FREEZE_S = 30.0
_SOON_S = 0.005  # from when on a group that is not frozen is looked at less often
_POLL_S = 50e-6
# Linux 6.18, version 1: a group may never be frozen if a child of vfork(2) was frozen before its
# parent, which waits for it. After a moment in which it runs, the group is.
_AGAIN_S = 0.02
# Without a report of the scheduler for so long, the guardian thaws. Its end is noticed at once; a
# write to a busy disk, or a machine that stands still, can take a second or two.
_REPORT_S = 5.0
_STOP_S = 5.0
_START_S = 20.0
_PROGRAM = f"from {__name__} import main; main()"
_TOGETHER_S = 0.002  # between looks whether all hosts still run at once
_PRIORITY = 10  # of SCHED_FIFO
_SHORTEST = 1 / 4  # of a slice, for a host that ran too long before


@dataclass(frozen=True, slots=True)
class FreezerGroup:
    """A control group that can be frozen."""

    folder: Path
    version: int  # of control groups: 1 or 2
    accounting: Path | None = None  # folder of the same group with its CPU time

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that processes join; in version 1, each controller has its own."""
        own = self.accounting in (None, self.folder)
        return (self.folder,) if own else (self.folder, Path(str(self.accounting)))

    @property
    def cpu_time(self) -> Path | None:
        """Return the file with the CPU time of the group."""
        name = "cpuacct.usage" if self.version == 1 else "cpu.stat"
        return None if self.accounting is None else self.accounting / name

    def make(self) -> None:
        """Raises EnvironmentLacks."""
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            self.thaw()
        except OSError as error:
            raise EnvironmentLacks(
                f"{self.folder}: no control group can be made: {error}"
            ) from error

    def freeze(self) -> None:
        """Freeze all processes and return when they stand still. Raises TimedOut."""
        with closing(Switch(self)) as switch:
            switch.freeze()

    def thaw(self) -> None:
        with closing(Switch(self)) as switch:
            switch.thaw()

    def is_frozen(self) -> bool:
        """Return whether all processes stand still."""
        with closing(Switch(self)) as switch:
            return switch.is_frozen()


class Switch:
    """Freezes and thaws a group whose files stay open: to open one takes a hundredth of a slice.

    Raises OSError if the group has no such files.
    """

    def __init__(self, group: FreezerGroup) -> None:
        self._group = group
        first = group.version == 1
        self._words = (b"FROZEN", b"THAWED") if first else (b"1", b"0")
        self._all_frozen = b"FROZEN" if first else b"frozen 1"
        self._state = os.open(
            group.folder / ("freezer.state" if first else "cgroup.freeze"), os.O_RDWR
        )
        self._events = (
            os.dup(self._state) if first else os.open(group.folder / "cgroup.events", os.O_RDONLY)
        )

    def close(self) -> None:
        os.close(self._state)
        os.close(self._events)

    def freeze(self, waiting: Callable[[], object] = lambda: None) -> int:
        """Freeze all processes and return when they stand still. Raises TimedOut.

        The result is the time of the monotonic clock, in ns, from which no process computes. One
        that waits for a disk is frozen when it has what it waits for. waiting: called while some
        process is not frozen.
        """
        began_ns = ended_ns = self._ask()
        while not self.is_frozen():
            now_ns = time.monotonic_ns()
            waited_s = (now_ns - began_ns) / 1e9
            if waited_s > _FREEZE_S:
                raise TimedOut(
                    f"{self._group.folder}: not frozen after {_FREEZE_S:g} s: "
                    f"{', '.join(self._running())}"
                )
            if (now_ns - ended_ns) / 1e9 > _AGAIN_S:
                self.thaw()
                time.sleep(_POLL_S)
                ended_ns = self._ask()
            time.sleep(_POLL_S if waited_s < _SOON_S else _SOON_S)
            waiting()
        return ended_ns

    def _ask(self) -> int:
        os.pwrite(self._state, self._words[0], 0)
        return time.monotonic_ns()

    def _running(self) -> list[str]:
        """Name the threads that do not stand still, and the function of the kernel they wait in."""
        name = "tasks" if self._group.version == 1 else "cgroup.threads"
        found = []
        for thread in (self._group.folder / name).read_text().split():
            with suppress(OSError):  # it has ended
                place = Path("/proc", thread)
                where = (place / "wchan").read_text()
                if where != "__refrigerator":
                    found.append(f"{(place / 'comm').read_text().strip()} ({thread}) in {where}")
        return found

    def thaw(self) -> int:
        """Return the time of the monotonic clock, in ns, from which processes compute."""
        os.pwrite(self._state, self._words[1], 0)
        return time.monotonic_ns()

    def is_frozen(self) -> bool:
        """Return whether all processes stand still."""
        return self._all_frozen in os.pread(self._events, 4096, 0)


def joining(guardian: Path, name: str) -> str:
    """Return the lines of a shell script that add the shell to a group and say where its CPU time
    is.

    guardian: file with the guardian's process id. A host has a /sys of its own (ip-netns(8)), so
    the group is found from the root folder of the guardian.
    """
    [group] = groups_of([name])
    root = f'"/proc/$(cat {shlex.quote(str(guardian))})/root"'
    lines = [
        f"echo $$ > {root}{shlex.quote(str(folder))}/cgroup.procs || exit 1"
        for folder in group.folders
    ]
    if group.cpu_time is not None:
        lines.append(f"export {CPU_TIME_VARIABLE}={root}{shlex.quote(str(group.cpu_time))}")
    return "".join(f"{each}\n" for each in lines)


def groups_of(names: Sequence[str]) -> list[FreezerGroup]:
    """Return the groups with these names below the group of this process.

    Raises EnvironmentLacks if this machine has no freezer.
    """
    folder, version, accounting = _freezer()
    return [
        FreezerGroup(folder / name, version, None if accounting is None else accounting / name)
        for name in names
    ]


def why_no_turns() -> str | None:
    """Return the reason why hosts cannot take turns here; None if they can."""
    try:
        [group] = groups_of([f"paceline-try-{os.getpid()}"])
        group.make()
    except EnvironmentLacks as error:
        return str(error)
    try:
        group.freeze()
    except (OSError, TimedOut) as error:
        return f"the freezer of control groups is not writable: {error}"
    finally:
        with suppress(OSError):
            group.thaw()
        _deleted(group)
    return None


def _freezer() -> tuple[Path, int, Path | None]:
    """Return the folder of this process's group, the version, and the folder with its CPU time."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {kinds: path for _, kinds, path in (each.split(":", 2) for each in lines)}
    if "freezer" in paths and (_CONTROL_GROUPS / "freezer").is_dir():
        own = [kinds for kinds in paths if "cpuacct" in kinds.split(",")]
        accounting = [_CONTROL_GROUPS / kinds / paths[kinds].lstrip("/") for kinds in own]
        found = next((folder for folder in accounting if folder.is_dir()), None)
        return _CONTROL_GROUPS / "freezer" / paths["freezer"].lstrip("/"), 1, found
    for root in (_CONTROL_GROUPS, _CONTROL_GROUPS / "unified"):
        if "" in paths and (root / "cgroup.controllers").exists():
            folder = root / paths[""].lstrip("/")
            return folder, 2, folder
    raise EnvironmentLacks(
        f"{_CONTROL_GROUPS}: expected the freezer of control groups (version 1) or version 2; in a "
        "container, mount it writable"
    )


# --- from outside: start and end --------------------------------------------------------------


def start(record: LabRecord) -> subprocess.Popen[bytes]:
    """Make the groups, start guardian and scheduler; return when slices are recorded.

    Raises EnvironmentLacks.
    """
    slices, slice_ms = record.slices, record.settings.slice_ms
    for group in groups_of(record.groups):
        group.make()
    log = slices.with_suffix(".log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [
                sys.executable, "-c", _PROGRAM, str(slice_ms), str(record.settings.cores),
                str(slices), ",".join(host.name for host in record.hosts), *record.groups,
            ],
            env={**os.environ, TURNS_VARIABLE: record.name},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )  # fmt: skip
    write_text(record.guardian, str(process.pid))
    wait_until(lambda: _has_slices(slices) or process.poll() is not None, _START_S)
    if process.poll() is not None or not _has_slices(slices):
        lacking = f"hosts cannot take turns, their scheduler did not start: {said(record)}"
        raise EnvironmentLacks(lacking)
    return process


def said(record: LabRecord) -> str:
    """Return the end of the log of guardian and scheduler, as long as the lab exists."""
    log = record.slices.with_suffix(".log")
    return log.read_text("utf-8", "replace").strip()[-500:] if log.exists() else ""


def stop(lab: str, names: Sequence[str]) -> None:
    """End guardian and scheduler and thaw all hosts; safe to repeat. Raises TimedOut."""

    def alive() -> set[int]:
        return pids_with_variable(TURNS_VARIABLE, lab)

    try:
        send(alive(), signal.SIGTERM)
        wait_until(lambda: not alive(), _STOP_S, poll_s=0.05)
        if not kill_until_gone(alive, _STOP_S):
            raise TimedOut(f"scheduler of lab {lab} is alive {_STOP_S:g} s after SIGKILL")
    finally:
        thaw(names)


def are_taken(lab: str) -> bool:
    """Return whether the scheduler of the lab with this name is alive."""
    return bool(pids_with_variable(TURNS_VARIABLE, lab))


def thaw(names: Sequence[str]) -> None:
    """Thaw the groups that exist."""
    with suppress(EnvironmentLacks):
        for group in groups_of(names):
            if group.folder.is_dir():
                group.thaw()


def delete_groups(names: Sequence[str]) -> None:
    """Delete the groups, when their processes have ended. Raises TimedOut."""
    with suppress(EnvironmentLacks):
        for group in groups_of(names):
            if not wait_until(lambda: _deleted(group), _STOP_S, poll_s=0.05):  # noqa: B023
                raise TimedOut(f"{group.folder}: its processes are alive after {_STOP_S:g} s")


def _deleted(group: FreezerGroup) -> bool:
    for folder in group.folders:
        with suppress(OSError):
            folder.rmdir()
    return not any(folder.exists() for folder in group.folders)


def _has_slices(path: Path) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") > 1


# --- the scheduler ----------------------------------------------------------------------------


def length_ns(ran_ns: int, turn: int, slice_ns: int) -> int:
    """Return the length of a host's slice, with which its clock agrees with that of the others.

    ran_ns: time that the host has run. turn: number of its slices before this one.
    A slice that ended late is followed by a shorter one.
    """
    return max(round(slice_ns * _SHORTEST), (turn + 1) * slice_ns - ran_ns)


def next_due_ns(due_ns: int, done: Slice, slice_ns: int) -> int:
    """Return when the next slice may begin, so that a change takes CHANGE_MS on average.

    due_ns: when `done` was to begin. Links are slowed for changes of this length, since they go on
    meanwhile. A long change is followed by shorter ones; one longer than a slice is not made up.
    """
    change_ns = round(CHANGE_MS * 1e6)
    begun_ns = due_ns if done.start_ns - due_ns <= slice_ns else done.start_ns
    return begun_ns + done.length_ns + change_ns


def take_turns(
    groups: Sequence[FreezerGroup], settings: RecordedSlices, slices: Path, report: int
) -> None:
    """Run one host after the other until SIGTERM or the end of the guardian; then thaw all.

    slices: file to write. report: descriptor of the pipe to the guardian.
    """
    guardian, slice_ns, ending = os.getppid(), settings.slice_ms * 1_000_000, Ending()
    switches, ran_ns, turn = [Switch(group) for group in groups], [0] * len(groups), 0
    due_ns = 0

    def alive() -> bool:
        os.write(report, b".")
        return not ending.asked and os.getppid() == guardian

    try:
        with slices.open("w", encoding="utf-8") as rows:
            rows.write(settings.header)
            for switch in switches:
                switch.freeze(alive)
            while alive():
                if are_together(slices):
                    every = _run_together(switches, lambda: alive() and are_together(slices), alive)
                    rows.writelines(line(host, done) for host, done in enumerate(every))
                    soonest_ns = min(done.end_ns for done in every)
                    ran_ns = [
                        n + each.end_ns - soonest_ns for n, each in zip(ran_ns, every, strict=True)
                    ]
                for host, switch in enumerate(switches):
                    asked_ns = length_ns(ran_ns[host], turn, slice_ns)
                    _sleep_until(due_ns)
                    done = _run(switch, asked_ns, alive)
                    due_ns = next_due_ns(due_ns, done, slice_ns)
                    ran_ns[host] += done.length_ns
                    rows.write(line(host, done))
                    alive()
                turn += 1
                rows.flush()
    finally:
        _thaw_all(groups)


def _run(switch: Switch, asked_ns: int, alive: Callable[[], object]) -> Slice:
    start_ns = switch.thaw()
    _sleep_until(start_ns + asked_ns)
    return Slice(start_ns, switch.freeze(alive))


def _sleep_until(monotonic_ns: int) -> None:
    """Sleep until a time of the monotonic clock, so that the host which runs has all its cores."""
    time.sleep(max(0, monotonic_ns - time.monotonic_ns()) / 1e9)


def _run_together(
    switches: Sequence[Switch], goes_on: Callable[[], bool], alive: Callable[[], object]
) -> list[Slice]:
    """Run all hosts at once; return the slice of each."""
    for switch in switches:
        switch.thaw()
    start_ns = time.monotonic_ns()
    while goes_on():
        time.sleep(_TOGETHER_S)
    return [Slice(start_ns, switch.freeze(alive)) for switch in switches]


class Ending:
    """Notes SIGTERM, SIGINT and SIGHUP."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True


# --- the guardian -----------------------------------------------------------------------------


def guard(groups: Sequence[FreezerGroup], scheduler: int, reports: int) -> None:
    """Return when the scheduler has ended, with all hosts thawed.

    reports: descriptor of the pipe from the scheduler. A scheduler that does not report is killed.
    """
    ending = Ending()
    try:
        while True:
            if ending.asked:
                os.kill(scheduler, signal.SIGTERM)
            ready, _, _ = select.select([reports], [], [], _REPORT_S)
            if not ready:
                print(f"the scheduler did not report for {_REPORT_S:g} s", file=sys.stderr)
                return
            if not os.read(reports, 4096):
                return
    finally:
        with suppress(ProcessLookupError):
            os.kill(scheduler, signal.SIGKILL)
        os.waitpid(scheduler, 0)
        _thaw_all(groups)


def _thaw_all(groups: Sequence[FreezerGroup]) -> None:
    for group in groups:
        with suppress(OSError):  # one that was deleted must not keep the others frozen
            group.thaw()


def _prefer() -> None:
    """Ask for real-time priority; without it slices are as exact as the machine is idle."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError as error:
        print(f"no real-time priority: {error}", file=sys.stderr)


def main() -> None:
    """Run as guardian, with the scheduler as child.

    Arguments: milliseconds, cores of a host, file, names of hosts, groups.
    """
    slice_ms, cores, slices, hosts, *names = sys.argv[1:]
    groups, offset_ns = groups_of(names), time.time_ns() - time.monotonic_ns()
    settings = RecordedSlices(offset_ns, tuple(hosts.split(",")), int(cores), int(slice_ms))
    _prefer()
    reports, report = os.pipe()
    scheduler = os.fork()
    if scheduler == 0:
        os.close(reports)
        take_turns(groups, settings, Path(slices), report)
    else:
        os.close(report)
        guard(groups, scheduler, reports)
