"""Run the processes of a trial to their end and leave none of them behind.

`wait_for_end` is the only loop that watches ranks. `paceline run` uses it for the launcher's
process, the local launcher for its ranks, and a Spark task for the mpirun that it started.
"""

from __future__ import annotations

import inspect
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineWarning
from paceline.host import cleaner
from paceline.host.machine import host_name
from paceline.host.processes import (
    TOKEN_VARIABLE,
    end_processes,
    guarded,
    is_alive,
    kill_until_gone,
    pids_with_token,
    send,
    wait_until,
)
from paceline.job.stacks import request_stacks
from paceline.launchers.base import Command, TemporaryFolders
from paceline.records.checkpoints import CHECKPOINT_SIGNAL, CheckpointFolder
from paceline.records.documents import read_statuses
from paceline.records.layout import TrialFiles
from paceline.records.rows import RankStatus

_POLL_S = 0.1
_STATUS_INTERVAL_S = 0.5
# Time for a launcher to notice by itself that one of its ranks failed: mpirun takes about 0.1 s,
# torchrun's agent polls every 0.1 s. A Spark task fails with its worker's socket, and the driver
# waits up to 2 s for the reason; on a busy host it was not done after 4 s.
_NOTICE_S = 10.0
# mpirun sends SIGKILL to its ranks 1 s after SIGTERM; Spark's shutdown hooks stop the context.
_TERMINATION_S = 5.0
_KILL_S = 5.0
# After their last work, ranks write nothing more; a library may still hang in its destructors.
_EXIT_S = 60.0
# Slurm and Kubernetes end a job 30 s after SIGTERM by default; the launcher's end takes 5 to 10 s.
_CHECKPOINT_S = 15.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder itself has a random name)
_PREFIX = "paceline-"


@dataclass(kw_only=True)
class Watched:
    """The reason why `wait_for_end` returned; all empty if the processes ended by themselves."""

    ended_by_itself: bool = False
    timed_out: bool = False
    stuck_at_exit: bool = False  # all ranks are done, but a process has not ended
    missing_ranks: tuple[int, ...] = ()  # did not start within their limit
    dead_ranks: tuple[int, ...] = ()  # ended without a status before any rank gave a reason
    trouble_unix_s: float | None = None  # when a failed process or rank was noticed


@dataclass(frozen=True, slots=True)
class StartLimit:
    """Time in which all ranks have to start."""

    ranks: int
    limit_s: float


@dataclass(kw_only=True)
class Ended(Watched):
    """The end of a launcher, and why it was ended."""

    exit_status: int  # of the launcher's process; negative: it was ended by that signal
    launched_unix_s: float
    ended_unix_s: float
    left_behind: tuple[int, ...] = ()  # pids that SIGKILL did not end


def supervise(  # noqa: PLR0913  (launchers differ in their limits)
    command: Command,
    files: TrialFiles,
    *,
    limit_s: float,
    start_limit: StartLimit | None = None,
    restart_limit_s: float | None = None,
    unseen_s: float = 0.0,
    on_started: Callable[[int], object] = lambda _pid: None,
    on_interrupted: Callable[[], object] = lambda: None,
) -> Ended:
    """Run `command` with its output in `files.launcher_log` until it ends, or for `limit_s`.

    If a rank of this host dies and the launcher does not end by itself, the launcher is ended. No
    process of the trial and no temporary file of the launcher is left on this host, not even after
    an exception or KeyboardInterrupt.
    start_limit: None if the launcher itself limits the time until all ranks have started.
    restart_limit_s: time for a launcher that restarts failed ranks itself; None for others.
    unseen_s: so much later than the ranks whose status is here, others may end.
    on_started gets the launcher's pid; what it starts is not part of the trial.
    on_interrupted is called while the ranks still run, if a signal asks this process to end.
    """
    token = secrets.token_hex(8)
    with temporary_folders(token) as folders:
        launched_unix_s = time.time()
        process = _start(command, files, token, folders)
        try:
            on_started(process.pid)
            watched = wait_for_end(
                [process],
                files,
                limit_s=limit_s,
                start_limit=start_limit,
                restart_limit_s=restart_limit_s,
                exit_limit_s=_EXIT_S + unseen_s,
            )
            ended_unix_s = time.time()
            if watched.stuck_at_exit:
                request_stacks(files, of_done=True)
                _warn_of_exit(files)
            elif not watched.ended_by_itself:
                request_stacks(files, elsewhere=True)
        except (KeyboardInterrupt, SystemExit):
            on_interrupted()
            raise
        finally:
            exit_status, left_behind = _end_all(process, files, token)
    return Ended(
        **vars(watched),
        exit_status=exit_status,
        launched_unix_s=launched_unix_s,
        ended_unix_s=ended_unix_s if watched.ended_by_itself else time.time(),
        left_behind=tuple(sorted(left_behind)),
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
    processes: Sequence[subprocess.Popen[bytes]],
    files: TrialFiles,
    *,
    limit_s: float,
    start_limit: StartLimit | None = None,
    notice_s: float | None = None,
    restart_limit_s: float | None = None,
    exit_limit_s: float = math.inf,
) -> Watched:
    """Wait until all processes have ended, or until the caller has to end them.

    That is the case after `limit_s`, if not all ranks have started within `start_limit`,
    `exit_limit_s` after all ranks are done, and `notice_s` after a process or a rank failed. Ends
    nothing itself.
    restart_limit_s: time in which a launcher may replace failed ranks; None if it does not.
    """
    notice_s = _NOTICE_S if notice_s is None else notice_s
    notice_s = notice_s if restart_limit_s is None else restart_limit_s
    watched = Watched()
    started = time.monotonic()
    next_look, trouble_since, done_since = started, None, None
    while not _all_ended(processes):
        now = time.monotonic()
        if now - started > limit_s:
            watched.timed_out = True
            return watched
        trouble = any(p.returncode for p in processes)
        if now >= next_look:
            next_look = now + _STATUS_INTERVAL_S
            statuses = read_statuses(files)
            if start_limit is not None and now - started > start_limit.limit_s:
                watched.missing_ranks = _missing(statuses, start_limit.ranks)
                if watched.missing_ranks:
                    return watched
            done_since = (done_since or now) if _are_done(statuses) else None
            if done_since is not None and now - done_since > exit_limit_s:
                watched.stuck_at_exit = True
                return watched
            if restart_limit_s is not None:
                watched.dead_ranks = ()  # others may have taken their places
            trouble = _look_for_failures(statuses, watched) or trouble
            if restart_limit_s is not None and not trouble:
                trouble_since = None
        if trouble or trouble_since is not None:
            trouble_since = trouble_since or now
            watched.trouble_unix_s = watched.trouble_unix_s or time.time()
            if now - trouble_since > notice_s:
                return watched
    watched.ended_by_itself = True
    return watched


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


def _are_done(statuses: Sequence[RankStatus]) -> bool:
    return bool(statuses) and all(status.state == "done" for status in statuses)


def _missing(statuses: Sequence[RankStatus], ranks: int) -> tuple[int, ...]:
    started = {status.rank for status in statuses}
    return tuple(rank for rank in range(ranks) if rank not in started)


def _look_for_failures(statuses: Sequence[RankStatus], watched: Watched) -> bool:
    """Note the ranks that died here; return whether any rank failed."""
    failed = [s for s in statuses if s.state == "failed"]
    # Spark kills the other tasks of a stage as soon as one of them has failed with a reason.
    if not watched.dead_ranks and all(s.secondary for s in failed):
        watched.dead_ranks = tuple(s.rank for s in statuses if _runs_here(s) and not s.is_alive())
    return bool(failed or watched.dead_ranks)


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
    with `token`.
    """
    disk = Path(tempfile.mkdtemp(prefix=_PREFIX))
    has_memory = os.access(_SHARED_MEMORY, os.W_OK)
    memory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHARED_MEMORY if has_memory else disk))
    with _cleaner(token, disk, memory):
        try:
            yield TemporaryFolders(disk, memory)
        finally:
            for folder in (disk, memory):
                shutil.rmtree(folder, ignore_errors=True)


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
