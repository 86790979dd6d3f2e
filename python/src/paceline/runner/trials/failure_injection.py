"""Kill ranks, executors or hosts of a trial at random times, to measure what a failure costs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from paceline.base.host.processes import command_line_of, parent_of
from paceline.collectives.host import host_name
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import InjectedFailureRow, RankStatus
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.spec.values import FailureKind, FailureSettings
from paceline.plan.trials.rules import failure_kinds
from paceline.plan.trials.trial import Trial
from paceline.runner.lab.record import LabRecord
from paceline.runner.lab.session import boot, crash, own_lab

_POLL_S = 0.1
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFailure:
    """A failure before it happens."""

    wait_s: float  # of training before it
    rank: int
    kind: FailureKind


def planned_failures(
    settings: FailureSettings, seed: int, repeat: int, ranks: int
) -> list[PlannedFailure]:
    """Return the failures of a trial in order, those that the trial skips included."""
    draw = random.Random(f"{seed} {repeat}")  # noqa: S311  (a plan, not a secret)
    return [
        PlannedFailure(
            wait_s=draw.expovariate(1 / settings.mean_s),
            rank=draw.randrange(ranks),
            kind=settings.kinds[number % len(settings.kinds)],
        )
        for number in range(settings.count)
    ]


class Victims:
    """Kills parts of a trial. lab: whose host this is; its hosts share the process ids."""

    def __init__(self, trial: Trial, settings: FailureSettings, lab: LabRecord | None) -> None:
        launcher = LAUNCHERS.get(trial.launcher)
        self._executor = launcher.executor_program(trial.launcher_options)
        self._down_s = settings.host_down_s
        self._lab = lab
        self.hosts = {host_name()} | {host.name for host in (lab.hosts if lab else [])}

    def choose(self, kind: FailureKind, drawn: int, statuses: Sequence[RankStatus]) -> RankStatus:
        """Return the status of the rank to kill.

        For a host it is a rank on another one: this host has the launcher and `paceline run`.
        """
        if kind != "host":
            return statuses[drawn]
        others = [status for status in statuses if status.host != host_name()]
        return others[drawn % len(others)]

    def kill(self, kind: FailureKind, victim: RankStatus, stopped: threading.Event) -> None:
        """Kill the rank, its executor or its host; return when the host is up again.

        stopped: ends the outage of a host early.
        """
        if kind == "host":
            assert self._lab is not None, "check_lab"
            host = self._lab.host(victim.host)
            crash(self._lab, host)
            try:
                stopped.wait(self._down_s)
            finally:
                boot(self._lab, host)
        elif victim.is_alive():  # it may have ended meanwhile
            pid = victim.pid if kind == "rank" else self._executor_of(victim.pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _executor_of(self, pid: int) -> int:
        """Return the nearest ancestor that is an executor. Raises ProcessLookupError."""
        assert self._executor is not None, "failure_kinds"
        above = parent_of(pid)
        while above:
            if any(word.endswith(self._executor) for word in command_line_of(above)):
                return above
            above = parent_of(above)
        raise ProcessLookupError(f"no process above {pid} is an executor ({self._executor})")


@contextmanager
def failing(trial: Trial, files: TrialFiles) -> Iterator[None]:
    """Cause the failures of the trial's `[failures]` while the block runs; nothing without it."""
    if trial.failures is None:
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_inject, args=(trial, trial.failures, files, stopped), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_END_S)


def _inject(
    trial: Trial, settings: FailureSettings, files: TrialFiles, stopped: threading.Event
) -> None:
    victims = Victims(trial, settings, own_lab())
    ranks, kinds = trial.placement.ranks, failure_kinds(trial)
    killed: set[int] = set()
    for failure in planned_failures(settings, trial.training.seed, trial.repeat, ranks):
        if failure.kind not in kinds:
            continue
        statuses: list[RankStatus] = []
        while not statuses:
            if stopped.wait(_POLL_S):
                return
            statuses = _training(files, ranks, victims.hosts, killed)
        if stopped.wait(failure.wait_s):
            return
        victim = victims.choose(failure.kind, failure.rank, statuses)
        with JsonlWriter(files.injected) as rows:
            row = InjectedFailureRow(unix_s=time.time(), rank=victim.rank, kind=failure.kind)
            rows.write(row)
        victims.kill(failure.kind, victim, stopped)
        killed |= {s.pid for s in [*statuses, *read_statuses(files)]}


def _training(files: TrialFiles, ranks: int, hosts: set[str], killed: set[int]) -> list[RankStatus]:
    """Return the statuses by rank if all ranks train, in processes that have had no failure."""
    here = [s for s in read_statuses(files) if s.state == "running" and s.host in hosts]
    if len(here) < ranks or any(s.pid in killed for s in here):
        return []
    return here if all(_has_trained(files.rank(s.rank), s) for s in here) else []


def _has_trained(files: RankFiles, status: RankStatus) -> bool:
    """Return whether the process of a rank has ended a step, one after a restored checkpoint."""
    if files.interrupted.exists():
        return False  # it restores a checkpoint
    began_unix_s = status.process_started_unix_s
    try:
        if files.continuations.exists():  # the last file that a rank writes before it continues
            began_unix_s = max(began_unix_s, files.continuations.stat().st_mtime)
        return files.steps.stat().st_mtime > began_unix_s
    except FileNotFoundError:
        return False
