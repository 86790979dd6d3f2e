"""Runs a launcher to its end, whatever that end is, and leaves none of its processes behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host import exec_guarded
from paceline.host.machine import host_name
from paceline.host.processes import (
    TOKEN_VARIABLE,
    is_alive,
    pids_with_token,
    send,
    wait_until,
)
from paceline.records.statuses import read_statuses

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.launchers.base import Command
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import RankStatus

_POLL_S = 0.1
_LOOK_AT_RANKS_S = 0.5
# How long a launcher has to notice by itself that one of its ranks failed: mpirun takes some 0.1 s,
# torchrun's agent polls every 0.1 s, Spark's task fails with its worker's socket.
_LAUNCHER_NOTICES_S = 4.0
# mpirun sends its ranks SIGKILL 1 s after SIGTERM; Spark's shutdown hooks stop the context.
_TERMINATION_S = 5.0
_KILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the launcher ended."""

    exit_status: int  # of the launcher's process; negative: by that signal
    launched_unix_s: float
    ended_unix_s: float
    timed_out: bool
    dead_ranks: tuple[int, ...] = ()  # died without a word while it ran, before any gave a reason
    left_behind: tuple[int, ...] = ()  # pids that outlived even SIGKILL


def supervise(
    command: Command,
    files: TrialFiles,
    *,
    limit_s: float,
    on_started: Callable[[int], object] = lambda _pid: None,
) -> Ended:
    """Run `command` with its output in `files.launcher_log` until it ends, or for `limit_s`.

    When a rank of this host dies and the launcher does not end by itself, it is ended. In any
    case, an exception or KeyboardInterrupt included, no process of the trial on this host is left.
    on_started gets the launcher's pid; what it starts is not part of the trial.
    """
    token = secrets.token_hex(8)
    launched_unix_s = time.time()
    process = _start(command, files, token)
    watch = _Watch(process, files, time.monotonic() + limit_s)
    try:
        on_started(process.pid)
        watch.until_end()
        ended_unix_s = time.time()
    finally:
        left = _end_all(process, files, token)
    return Ended(
        exit_status=process.returncode,
        launched_unix_s=launched_unix_s,
        ended_unix_s=ended_unix_s if watch.ended_by_itself else time.time(),
        timed_out=watch.timed_out,
        dead_ranks=watch.dead_ranks,
        left_behind=tuple(sorted(left)),
    )


def _start(command: Command, files: TrialFiles, token: str) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", "-S", str(Path(exec_guarded.__file__)), str(os.getpid())]
    files.root.mkdir(parents=True, exist_ok=True)
    with files.launcher_log.open("ab") as log:
        return subprocess.Popen(
            [*guard, *command.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we end the trial in order
            env={**os.environ, **command.environment, TOKEN_VARIABLE: token},
        )


class _Watch:
    """Waits for the launcher, with an eye on the clock and on the ranks of this host."""

    def __init__(
        self, process: subprocess.Popen[bytes], files: TrialFiles, deadline: float
    ) -> None:
        self.timed_out = False
        self.ended_by_itself = False
        self.dead_ranks: tuple[int, ...] = ()
        self._process = process
        self._files = files
        self._deadline = deadline
        self._trouble_since: float | None = None

    def until_end(self) -> None:
        """Return when the launcher has ended, or should be."""
        next_look = time.monotonic() + _LOOK_AT_RANKS_S
        while True:
            try:
                self._process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                pass  # the usual case: look around and go on
            else:
                self.ended_by_itself = True
                return
            now = time.monotonic()
            if now > self._deadline:
                self.timed_out = True
                return
            if now >= next_look:
                next_look = now + _LOOK_AT_RANKS_S
                if self._ranks_in_trouble_too_long(now):
                    return

    def _ranks_in_trouble_too_long(self, now: float) -> bool:
        ranks = read_statuses(self._files)
        failed = [r for r in ranks if r.state == "failed"]
        # Spark kills the other tasks of a stage when one of them has said why it fails.
        if not self.dead_ranks and all(r.secondary for r in failed):
            self.dead_ranks = tuple(r.rank for r in ranks if _died(r))
        if not self.dead_ranks and not failed:
            return False
        self._trouble_since = self._trouble_since or now
        return now - self._trouble_since > _LAUNCHER_NOTICES_S


def _died(rank: RankStatus) -> bool:
    """Whether a rank of this host is gone although it wrote no end."""
    return (
        rank.state == "running"
        and rank.host == host_name()
        and not is_alive(rank.pid, rank.process_started_unix_s)
    )


def _end_all(process: subprocess.Popen[bytes], files: TrialFiles, token: str) -> set[int]:
    """End the launcher in order, then by force whatever is left; the pids that remain."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, _TERMINATION_S)
    if process.poll() is None:
        process.kill()
    process.wait(timeout=_KILL_S)

    def remaining() -> set[int]:
        left = pids_with_token(token) | _living_ranks(files)
        send(left, signal.SIGKILL)
        return left

    wait_until(lambda: not remaining(), _KILL_S)
    return pids_with_token(token)


def _living_ranks(files: TrialFiles) -> set[int]:
    """Ranks on this host that the token does not mark (of executors that ran already)."""
    return {
        rank.pid
        for rank in read_statuses(files)
        if rank.host == host_name()
        and rank.state == "running"
        and is_alive(rank.pid, rank.process_started_unix_s)
    }
