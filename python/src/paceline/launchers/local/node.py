"""Several ranks on this node without a launcher: this process starts them and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from paceline.errors import ExitCode
from paceline.job.environment import rank_environment
from paceline.job.messages import rank_failed_line, say
from paceline.job.rank import RankEnd
from paceline.job.rendezvous import close_listener, listen_on
from paceline.records.statuses import exit_code_of, read_statuses

if TYPE_CHECKING:
    from types import FrameType

    from paceline.job.options import Job
    from paceline.training.context import StoreAddress

RANK_VARIABLE = "PACELINE_RANK"
STORE_VARIABLE = "PACELINE_STORE"  # host:port:descriptor, the last empty but for rank 0
PARENT_VARIABLE = "PACELINE_PARENT"
_POLL_S = 0.05
# The first to fail is often seen first by its peers; it may take them this long to tell.
_OTHERS_SETTLE_S = 1.0
_TERMINATION_S = 3.0


def run_ranks(job: Job) -> RankEnd:
    """Start every rank of the trial as a child and wait; one failure ends all.

    Within `limits.trial_s`; a child never outlives this process.
    """
    address = listen_on(job.trial.interface)
    children = []
    try:
        for rank in range(job.trial.placement.ranks):
            children.append(_start(job, rank, address))  # noqa: PERF401  (each is to be ended)
    except BaseException:
        _end(children)
        raise
    finally:
        close_listener(address)  # rank 0 has inherited it
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        timed_out = not _wait(children, job.trial.limits.trial_s)
    finally:
        _end(children)
        signal.signal(signal.SIGTERM, before)
    return _how_it_ended(job, [child.returncode for child in children], timed_out=timed_out)


def _start(job: Job, rank: int, address: StoreAddress) -> subprocess.Popen[bytes]:
    descriptor = address.listen_fd if rank == 0 else None
    environment = {
        **os.environ,
        **rank_environment(job.trial),
        RANK_VARIABLE: str(rank),
        STORE_VARIABLE: f"{address.host}:{address.port}:{'' if descriptor is None else descriptor}",
        PARENT_VARIABLE: str(os.getpid()),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.launchers.local", *sys.argv[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=() if descriptor is None else (descriptor,),
    )


def _wait(children: list[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Until all have ended well or one has not; False if the limit came first."""
    deadline = time.monotonic() + limit_s
    while any(child.poll() is None for child in children):
        if any(child.returncode for child in children):
            settle = time.monotonic() + _OTHERS_SETTLE_S
            while any(c.poll() is None for c in children) and time.monotonic() < settle:
                time.sleep(_POLL_S)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()  # nothing happens if it has ended
    deadline = time.monotonic() + _TERMINATION_S
    for child in children:
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _how_it_ended(job: Job, exit_statuses: list[int], *, timed_out: bool) -> RankEnd:
    if timed_out:
        text = f"TimedOut: not done within its limit of {job.trial.limits.trial_s:g} s"
        say(text)
        return RankEnd(rank=0, exit_code=ExitCode.TIMED_OUT, error=text)
    failed = [rank for rank, status in enumerate(exit_statuses) if status != 0]
    if not failed:
        return RankEnd(rank=0, exit_code=ExitCode.OK)
    told = {s.rank: s for s in read_statuses(job.files) if s.state == "failed"}
    # an error of a rank's own says most; then who died without a word; never who missed a peer
    own = [rank for rank in failed if rank in told and not told[rank].secondary]
    silent = [rank for rank in failed if rank not in told]
    rank = (own or silent or failed)[0]
    if rank in told:
        error = told[rank].error or "no reason given"
        return RankEnd(rank=rank, exit_code=exit_code_of(error), error=error)
    text = f"RankFailed: ended with status {exit_statuses[rank]} and wrote no error"
    say(rank_failed_line(rank, len(exit_statuses), text))
    return RankEnd(rank=rank, exit_code=ExitCode.RANK_FAILED, error=text)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)
