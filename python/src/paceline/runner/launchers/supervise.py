"""Run the processes of a trial to their end and leave none of them behind.

`wait_for_end` is the only loop that watches ranks. `paceline run` uses it for the launcher's
process, the local launcher for its ranks, and a Spark task for the mpirun that it started. `Watch`
decides after each look whether they have to be ended; it reads no clock and no file.
"""

from __future__ import annotations

import inspect
import math
import os
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.errors import PacelineWarning
from paceline.base.host import cleaner
from paceline.base.host.locks import own_folder
from paceline.base.host.processes import (
    TOKEN_VARIABLE,
    end_processes,
    guarded,
    is_alive,
    kill_until_gone,
    pids_with_token,
    send,
)
from paceline.collectives.host import host_name, wait_until
from paceline.measure.records.documents import CHECKPOINT_SIGNAL, CheckpointFolder, read_statuses
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import RankStatus
from paceline.runner.job.stacks import request_stacks
from paceline.runner.launchers.base import SHARED_MEMORY, Command, TemporaryFolders

_POLL_S = 0.1
_STATUS_INTERVAL_S = 0.5
# Time for a launcher to notice by itself that one of its ranks failed: mpirun takes about 0.1 s,
# torchrun's agent polls every 0.1 s. A Spark task fails with its worker's socket, and the driver
# waits up to 2 s for the reason; on a busy host it was not done after 4 s.
NOTICE_S = 10.0
# mpirun sends SIGKILL to its ranks 1 s after SIGTERM; Spark's shutdown hooks stop the context.
_TERMINATION_S = 5.0
_KILL_S = 5.0
# After their last work, ranks write nothing more; a library may still hang in its destructors.
EXIT_S = 60.0
# Slurm and Kubernetes end a job 30 s after SIGTERM by default; the launcher's end takes 5 to 10 s.
_CHECKPOINT_S = 15.0
_PREFIX = "paceline-trial-"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """Times after which the processes of a trial have to be ended, in seconds."""

    trial_s: float
    start_s: float = math.inf  # until all ranks have started
    ranks: int = 0  # that have to start
    # for the others to end after a process or a rank has failed
    notice_s: float = NOTICE_S
    replaces_ranks: bool = False  # the launcher may replace failed ranks in that time
    exit_s: float = math.inf  # for the processes to end after all ranks are done


@dataclass(kw_only=True)
class Watched:
    """The reason why `wait_for_end` returned; all empty if the processes ended by themselves."""

    ended_by_itself: bool = False
    timed_out: bool = False
    stuck_at_exit: bool = False  # all ranks are done, but a process has not ended
    missing_ranks: tuple[int, ...] = ()  # did not start within their limit
    dead_ranks: tuple[int, ...] = ()  # ended without a status before any rank gave a reason
    trouble_unix_s: float | None = None  # when a failed process or rank was noticed


@dataclass(kw_only=True)
class Ended(Watched):
    """The end of a launcher, and why it was ended."""

    exit_status: int  # of the launcher's process; negative: it was ended by that signal
    launched_unix_s: float
    ended_unix_s: float
    left_behind: tuple[int, ...] = ()  # pids that SIGKILL did not end


class Watch:
    """Knowledge about the processes of a trial since they were started."""

    def __init__(self, limits: WaitLimits, now_s: float) -> None:
        """now_s: of a clock that is never set, as in `look`."""
        self.found = Watched()
        self.trouble_s: float | None = None  # when a failed process or rank was noticed first
        self._limits = limits
        self._started_s = now_s
        self._done_s: float | None = None  # since when all ranks are done
        self._failing_s: float | None = None  # since when a process or a rank has failed

    def look(
        self,
        now_s: float,
        statuses: Sequence[RankStatus] | None = None,
        *,
        process_failed: bool = False,
    ) -> bool:
        """Return whether the processes have to be ended now; `found` then says why.

        statuses: None if they were not read for this look.
        """
        if now_s - self._started_s > self._limits.trial_s:
            self.found.timed_out = True
            return True
        has_failed = process_failed
        if statuses is not None:
            if self._lacks_ranks(now_s, statuses) or self._is_stuck(now_s, statuses):
                return True
            has_failed = self._has_failed_rank(statuses) or process_failed
            if self._limits.replaces_ranks and not has_failed:
                self._failing_s = None
        if has_failed and self._failing_s is None:
            self._failing_s = now_s
            self.trouble_s = now_s if self.trouble_s is None else self.trouble_s
        return self._failing_s is not None and now_s - self._failing_s > self._limits.notice_s

    def _lacks_ranks(self, now_s: float, statuses: Sequence[RankStatus]) -> bool:
        if now_s - self._started_s > self._limits.start_s:
            started = {status.rank for status in statuses}
            expected = range(self._limits.ranks)
            self.found.missing_ranks = tuple(rank for rank in expected if rank not in started)
        return bool(self.found.missing_ranks)

    def _is_stuck(self, now_s: float, statuses: Sequence[RankStatus]) -> bool:
        are_done = bool(statuses) and all(status.state == "done" for status in statuses)
        if not are_done:
            self._done_s = None
        elif self._done_s is None:
            self._done_s = now_s
        else:
            self.found.stuck_at_exit = now_s - self._done_s > self._limits.exit_s
        return self.found.stuck_at_exit

    def _has_failed_rank(self, statuses: Sequence[RankStatus]) -> bool:
        """Note the ranks that died here; return whether any rank failed."""
        if self._limits.replaces_ranks:
            self.found.dead_ranks = ()  # others may have taken their places
        failed = [s for s in statuses if s.state == "failed"]
        # Spark kills the other tasks of a stage as soon as one of them has failed with a reason.
        if not self.found.dead_ranks and all(s.secondary for s in failed):
            dead = (s.rank for s in statuses if _runs_here(s) and not s.is_alive())
            self.found.dead_ranks = tuple(dead)
        return bool(failed or self.found.dead_ranks)


def supervise(command: Command, files: TrialFiles, limits: WaitLimits) -> Ended:
    """Run `command` as `launched` does, until it ends or has to be ended."""
    with launched(command, files) as launcher:
        launcher.wait(limits)
    return launcher.ended


@contextmanager
def launched(command: Command, files: TrialFiles) -> Iterator[Launched]:
    """Start `command` with its output in `files.launcher_log`; end it after the block.

    No process of the trial and no temporary file of the launcher is left on this host, not even
    after an exception or KeyboardInterrupt. What the block itself starts is not part of the trial.
    """
    token = secrets.token_hex(8)
    with temporary_folders(token) as folders:
        launched_unix_s = time.time()
        process = _start(command, files, token, folders)
        launcher = Launched(process, files, launched_unix_s)
        try:
            yield launcher
        finally:
            launcher.exit_status, launcher.left_behind = _end_all(process, files, token)
            launcher.ended_unix_s = launcher.ended_unix_s or time.time()


@dataclass
class Launched:
    """A launcher's process."""

    process: subprocess.Popen[bytes]
    files: TrialFiles
    launched_unix_s: float
    watched: Watched = field(default_factory=Watched)
    exit_status: int = 0
    ended_unix_s: float | None = None
    left_behind: set[int] = field(default_factory=set)

    def wait(self, limits: WaitLimits) -> None:
        """Wait for the end, or until the block of `launched` has to end the process.

        That is also the case if a rank of this host died and the launcher does not end by itself.
        """
        self.watched = watched = wait_for_end([self.process], self.files, limits)
        if watched.ended_by_itself:
            self.ended_unix_s = time.time()
        elif watched.stuck_at_exit:
            request_stacks(self.files, of_done=True)
            _warn_of_exit(self.files)
        else:
            request_stacks(self.files, elsewhere=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> Ended:
        """The end, after the block."""
        assert self.ended_unix_s is not None, "the block has not ended"
        return Ended(
            **vars(self.watched),
            exit_status=self.exit_status,
            launched_unix_s=self.launched_unix_s,
            ended_unix_s=self.ended_unix_s,
            left_behind=tuple(sorted(self.left_behind)),
        )


def _warn_of_exit(files: TrialFiles) -> None:
    warnings.warn(
        f"trial {files.root.name}: all ranks are done, but the launcher did not end and was ended; "
        "ranks of this host whose process had not ended have written where they were to "
        f"{files.root / 'ranks'}/*/{files.rank(0).stacks.name}",
        PacelineWarning,
        stacklevel=2,
    )


def wait_for_end(
    processes: Sequence[subprocess.Popen[bytes]], files: TrialFiles, limits: WaitLimits
) -> Watched:
    """Wait until all processes have ended, or until the caller has to end them; end none."""
    next_read_s = started_s = time.monotonic()
    watch = Watch(limits, started_s)
    while not (has_ended := _all_ended(processes)):
        now_s = time.monotonic()
        statuses = None
        if now_s >= next_read_s:
            next_read_s = now_s + _STATUS_INTERVAL_S
            statuses = read_statuses(files)
        if watch.look(now_s, statuses, process_failed=any(p.returncode for p in processes)):
            break
    watch.found.ended_by_itself = has_ended
    if watch.trouble_s is not None:
        watch.found.trouble_unix_s = time.time() - (time.monotonic() - watch.trouble_s)
    return watch.found


def _all_ended(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait a moment for the first process that still runs; return whether none does."""
    running = [p for p in processes if p.poll() is None]
    if not running:
        return True
    try:
        running[0].wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return len(running) == 1


def _runs_here(status: RankStatus) -> bool:
    return status.state == "running" and status.host == host_name()


def _start(
    command: Command, files: TrialFiles, token: str, folders: TemporaryFolders
) -> subprocess.Popen[bytes]:
    variables = {**command.environment, **command.temporary(folders), TOKEN_VARIABLE: token}
    files.root.mkdir(parents=True, exist_ok=True)
    with files.launcher_log.open("ab") as log:
        return subprocess.Popen(
            guarded(command.argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the trial
            env={**os.environ, **variables},
        )


def _end_all(
    process: subprocess.Popen[bytes], files: TrialFiles, token: str
) -> tuple[int, set[int]]:
    """End the launcher in order, then kill what is left.

    Return the launcher's exit status, and the pids that remain.
    """
    [exit_status] = end_processes([process], _TERMINATION_S)
    kill_until_gone(lambda: pids_with_token(token) | _living_ranks(files), _KILL_S)
    return exit_status, pids_with_token(token)


def wait_for_ranks(files: TrialFiles, limit_s: float) -> None:
    """Wait until no rank of an attempt runs any more, for at most `limit_s`.

    Ranks on other hosts may run as long as their last status says so.
    """

    def have_ended() -> bool:
        running = [s for s in read_statuses(files) if s.state == "running"]
        return all(_runs_here(s) and not s.is_alive() for s in running)

    wait_until(have_ended, limit_s, _POLL_S)


def _living_ranks(files: TrialFiles) -> set[int]:
    """Return the ranks on this host that carry no token (in executors that ran before)."""
    return {s.pid for s in read_statuses(files) if _runs_here(s) and s.is_alive()}


def write_last_checkpoint(files: TrialFiles, limit_s: float = _CHECKPOINT_S) -> bool:
    """Ask the ranks of this host for a checkpoint; return whether a new one is complete in time.

    Rank 0 decides after which step it is written. It has to run on this host.
    """
    folder = CheckpointFolder(files.checkpoints)
    first = [s for s in read_statuses(files) if s.rank == 0 and _runs_here(s) and s.is_alive()]
    # Before its first step, a rank would be ended by the signal, and has nothing to write.
    if not (first and files.rank(0).steps.exists()):
        return False
    newest = _newest_steps(folder)
    send([first[0].pid], CHECKPOINT_SIGNAL)
    wait_until(lambda: _newest_steps(folder) > newest or not is_alive(first[0].pid), limit_s)
    return _newest_steps(folder) > newest


def _newest_steps(folder: CheckpointFolder) -> int:
    return max((checkpoint.steps for checkpoint in folder.complete()), default=-1)


@contextmanager
def temporary_folders(token: str) -> Iterator[TemporaryFolders]:
    """Make the folders and remove them after the block.

    mpirun and Spark remove their temporary files at their end, but not when they are killed. Open
    MPI then leaves 16 MiB of shared memory for each rank, Spark its local folders and unpacked
    libraries. If this process is killed, another one removes the folders and ends all processes
    with `token`; if that is killed as well, a later trial removes the folders.
    """
    with own_folder(_PREFIX) as disk:
        has_memory = os.access(SHARED_MEMORY, os.W_OK)
        with (
            own_folder(_PREFIX, SHARED_MEMORY if has_memory else disk) as memory,
            _cleaner(token, disk, memory),
        ):
            yield TemporaryFolders(disk, memory)


@contextmanager
def _cleaner(token: str, *folders: Path) -> Iterator[None]:
    # The source instead of the path: the package may be in an archive.
    program = [sys.executable, "-I", "-S", "-c", inspect.getsource(cleaner)]
    process = subprocess.Popen(
        [*program, str(os.getpid()), f"{TOKEN_VARIABLE}={token}", *map(str, folders)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends only this process, which then cleans up itself
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(timeout=_KILL_S)
