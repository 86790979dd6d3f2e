"""The processes that a failure kills: of a rank, of its executor, or of its host in a lab."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.host.machine import host_name
from paceline.host.processes import command_line_of, is_alive, parent_of
from paceline.lab.outage import boot, crash
from paceline.spec.extensions import LAUNCHERS

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from paceline.lab.record import LabRecord
    from paceline.plan.trial import Trial
    from paceline.records.rows import RankStatus
    from paceline.spec.tables import FailureKind, FailureSettings


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
            assert self._lab is not None, "check_failures"
            host = self._lab.host(victim.host)
            crash(self._lab, host)
            try:
                stopped.wait(self._down_s)
            finally:
                boot(self._lab, host)
        elif is_alive(victim.pid, victim.process_started_unix_s):  # it may have ended meanwhile
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
