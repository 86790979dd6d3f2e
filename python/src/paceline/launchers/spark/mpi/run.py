"""mpirun as task 0 of a barrier stage runs it: its words, the wait for it, and how it ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from paceline.errors import ExitCode
from paceline.job.rank import RankEnd
from paceline.launchers.diagnosis import rank_to_blame
from paceline.launchers.mpi.launcher import (
    MpiLauncher,
    interface_parameters,
    on_this_node,
    slots_of_this_node,
)
from paceline.launchers.spark.mpi.processes import end_process, start_guarded
from paceline.records.statuses import exit_code_of, read_statuses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.job.options import Job
    from paceline.records.rows import RankStatus

_POLL_S = 0.1
_LOOK_AT_RANKS_S = 0.5
# As long as a rank's launcher has under `paceline run` to notice that one failed.
_MPIRUN_NOTICES_S = 4.0
_KEPT_LINES = 200
_TOLD_LINES = 8
# Codes with which a rank says more than that it failed.
_TELLING = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.TIMED_OUT)
_OURS = "paceline: "
# PRRTE's words when it misses a daemon; mpirun itself then ends with 0.
_LOST_DAEMON = re.compile(r"Remote daemon:\s+\[\S+\] on node (\S+)")


def mpirun_words(mpirun: Path, job: Job, nodes: Sequence[str], sequence: Path) -> list[str]:
    """The command that starts every rank where its barrier task is.

    nodes: the address of every rank's host, by rank; sequence: a file that lists them. With a
    single node neither is used, and mpirun starts no daemon.
    """
    trial = job.trial
    words = [str(mpirun), "-n", str(trial.placement.ranks), "--bind-to", "none"]
    if len(set(nodes)) == 1:
        words += on_this_node(trial.placement)
    else:
        words += _on_nodes(job, nodes, sequence)
    words += [*interface_parameters(trial), *trial.mpi.arguments]
    # The first on PATH, which on every host is that of its executor.
    words += [os.path.basename(sys.executable), "-m", "paceline.launchers.spark.mpi.rank"]  # noqa: PTH119
    words += ["--trial", str(job.files.trial)]
    return words if job.managed else [*words, "--by-hand"]


def _on_nodes(job: Job, nodes: Sequence[str], sequence: Path) -> list[str]:
    """One rank after the other on the node of its line; daemons through the barrier tasks."""
    place = job.trial.placement
    slots = slots_of_this_node(place)
    mapping = f"seq:file={sequence}"
    if place.oversubscribe:
        mapping += ":OVERSUBSCRIBE"
    agent = f"{os.path.basename(sys.executable)} -m paceline.launchers.spark.mpi.agent"  # noqa: PTH119
    return [
        "--host", ",".join(f"{node}:{slots}" for node in dict.fromkeys(nodes)),
        "--map-by", mapping,
        "--leave-session-attached",  # daemons stay the children of barrier tasks
        "--prtemca", "plm", "ssh",
        "--prtemca", "plm_ssh_agent", agent,
        "--prtemca", "plm_ssh_no_tree_spawn", "1",  # only task 0 knows the others
    ]  # fmt: skip


def run_mpirun(job: Job, words: Sequence[str], environment: Mapping[str, str]) -> RankEnd:
    """Run mpirun to its end, within `limits.trial_s`; the end of the rank that says most.

    All ranks have to start within `limits.rendezvous_s`.
    """
    process = start_guarded(words, environment, subprocess.PIPE)
    try:
        output = _Output(process)
        too_late = _wait(job, process)
    finally:
        status = end_process(process)
    return how_it_ended(job, status, output.lines(), too_late)


class _Output:
    """Passes on what mpirun says, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name="mpirun-output", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines; call it when the process has ended."""
        self._thread.join(_MPIRUN_NOTICES_S)
        return list(self._kept)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            self._kept.append(text.rstrip())
            sys.stderr.write(text)
            sys.stderr.flush()


def _wait(job: Job, process: subprocess.Popen[bytes]) -> str | None:
    """Until mpirun has ended, or should be: then, if a limit was reached, what was not done."""
    limits, started = job.trial.limits, time.monotonic()
    next_look, trouble_since = started, None
    while True:
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            pass  # the usual case: look around and go on
        else:
            return None
        now = time.monotonic()
        if now - started > limits.trial_s:
            return f"not done within its limit of {limits.trial_s:g} s"
        if now < next_look:
            continue
        next_look = now + _LOOK_AT_RANKS_S
        ranks = read_statuses(job.files)
        absent = set(range(job.trial.placement.ranks)) - {r.rank for r in ranks}
        if absent and now - started > limits.rendezvous_s:
            return (
                f"rank(s) {', '.join(map(str, sorted(absent)))} did not start within "
                f"{limits.rendezvous_s:g} s (limits.rendezvous_s, --rendezvous-timeout)"
            )
        if any(r.state == "failed" for r in ranks):
            trouble_since = trouble_since or now
            if now - trouble_since > _MPIRUN_NOTICES_S:
                return None


def how_it_ended(
    job: Job, exit_status: int, output: Sequence[str], too_late: str | None
) -> RankEnd:
    """The end that stands for all ranks, from mpirun's and from what the ranks wrote.

    too_late: what was not done within a limit, None if mpirun ended by itself.
    """
    ranks = read_statuses(job.files)
    done = [r.rank for r in ranks if r.state == "done"]
    everybody = list(range(job.trial.placement.ranks))
    if too_late is None and exit_status == 0 and done == everybody:
        return RankEnd(rank=0, exit_code=ExitCode.OK)
    if too_late is not None:
        first = next((rank for rank in everybody if rank not in done), 0)
        return RankEnd(rank=first, exit_code=ExitCode.TIMED_OUT, error=f"TimedOut: {too_late}")
    rank = rank_to_blame(ranks, MpiLauncher().failed_rank("\n".join(output)))
    status = next((r for r in ranks if r.rank == rank), None)
    if status is not None and status.state == "failed":
        error = status.error or "no reason given"
        return RankEnd(rank=status.rank, exit_code=exit_code_of(error), error=error)
    return _lost_host(output, ranks) or _unexplained(exit_status, output, rank, status)


def _lost_host(output: Sequence[str], ranks: Sequence[RankStatus]) -> RankEnd | None:
    """That a host's daemon is gone, and its ranks with it; None if mpirun misses none."""
    lost = _LOST_DAEMON.search("\n".join(output))
    if lost is None:
        return None
    host = lost.group(1)
    there = [r.rank for r in ranks if r.host.partition(".")[0] == host.partition(".")[0]]
    listed = ", ".join(map(str, there)) or "none known"
    return RankEnd(
        rank=next(iter(there), 0),
        exit_code=ExitCode.RANK_FAILED,
        error=f"RankFailed: MPI's daemon on host {host} was lost, and its ranks ({listed}) with "
        "it: it was killed, or the host cannot be reached any more",
    )


def _unexplained(
    exit_status: int, output: Sequence[str], rank: int | None, status: RankStatus | None
) -> RankEnd:
    """An end that no rank wrote down."""
    ours = [line.removeprefix(_OURS) for line in output if line.startswith(_OURS)]
    if exit_status in _TELLING and ours:
        code = ExitCode(exit_status)
        return RankEnd(rank=rank or 0, exit_code=code, error=f"{code.name}: {ours[-1]}")
    if status is not None:
        error = (
            f"RankFailed: (host {status.host}, pid {status.pid}) was killed or crashed: it wrote "
            f"no error; mpirun ended with {exit_status}"
        )
    else:
        last = [line for line in output if line.strip()][-_TOLD_LINES:]
        error = f"RankFailed: mpirun ended with {exit_status}: " + "\n".join(last)
    return RankEnd(rank=rank or 0, exit_code=ExitCode.RANK_FAILED, error=error)
