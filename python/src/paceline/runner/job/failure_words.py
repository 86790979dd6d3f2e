"""All sentences by which a user learns how ranks and trials failed.

The records (`Failure`, `RankStatus`) have the facts. `launchers.diagnosis` adds the logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.base.host.processes import ended_by_signal, named_signal
from paceline.measure.records.rows import Failure, RankStatus

ASKED_TO_END = "asked to end (SIGTERM)"
NO_REASON = "no reason given"
ENDED_WITHOUT_REASON = "its process ended without a reason"
EXECUTOR_GONE = "it was killed or crashed, or its host cannot be reached any more"


def rank_failed(failure: Failure, ranks: int) -> str:
    """Return the line that a rank, or the program that started it, prints."""
    return f"rank {failure.rank} of {ranks} failed: {failure}"


def rank_lost_a_peer(rank: int, error: Exception) -> str:
    return f"rank {rank} stops, another rank is the cause: {error}"


def starts_again(failure: Failure, restarts_left: int) -> str:
    return f"{failure}; starting the ranks again, {restarts_left} restarts left"


def command_ended(exit_code: int, failure: Failure | None) -> str:
    """Return how a command with its own launcher failed; failure: of the first rank that did."""
    reason = f"the command ended with exit status {exit_code}"
    return reason if failure is None else f"rank {failure.rank}: {failure}; {reason}"


# Limits


def trial_too_long(limit_s: float) -> str:
    return f"not done within its limit of {limit_s:g} s; raise limits.trial_s"


def ranks_not_done(limit_s: float, statuses: Sequence[RankStatus], ranks: int) -> str:
    """Return the sentence about a trial that was ended at its limit."""
    done = {s.rank for s in statuses if s.state == "done"}
    late = [rank for rank in range(ranks) if rank not in done]
    return (
        f"not done within its limit of {limit_s:g} s (limits.trial_s), ended; ranks not done: "
        f"{_listed(late) or 'none'}"
    )


def ranks_not_started(missing: Sequence[int], limit_s: float) -> str:
    return f"rank(s) {_listed(missing)} did not start within {limit_s:g} s (limits.rendezvous_s)"


def tasks_not_at_barrier(rank: int, ranks: int, limit_s: float) -> str:
    return (
        f"rank {rank}: expected {ranks} tasks at Spark's barrier within {limit_s:g} s "
        "(limits.rendezvous_s), but not all came; look for the others in the logs of the "
        "executors, or increase the limit"
    )


def round_too_late(number: int, late: str, limit_s: float) -> str:
    """late: the ranks with their hosts."""
    return (
        f"round {number}: {late} did not end it within {limit_s:g} s of the first rank that did "
        "(limits.collective_s, plus limits.rendezvous_s for ranks that start): they hang, cannot "
        "be reached, or are much slower than the others"
    )


def round_not_received(number: int, ranks: str, limit_s: float) -> str:
    """ranks: with their hosts."""
    return (
        f"round {number}: all ranks ended it, but not all results reached the driver within "
        f"{limit_s:g} s (limits.collective_s): one of {ranks} hangs or cannot be reached"
    )


# Ranks that could write nothing


def ended_without_error(exit_status: int) -> str:
    """exit_status: negative: of a process that was ended by that signal."""
    if exit_status >= 0:
        return f"ended with status {exit_status} and wrote no error"
    return f"{ended_by_signal(-exit_status)}; it wrote no error"


def mpi_host_lost(host: str, ranks: Sequence[int]) -> str:
    """ranks: that ran there; none if they are not known."""
    known = f" ({_listed(ranks)})" if ranks else ""
    return (
        f"MPI's daemon on host {host} was lost, and its ranks{known} with it: it was killed, or "
        "the host cannot be reached any more"
    )


def killed_under_mpirun(status: RankStatus, exit_status: int, number: int | None) -> str:
    """number: of the signal that ended the rank, if mpirun says it."""
    return (
        f"(host {status.host}, pid {status.pid}) {_ended_by(number)}; it wrote no error; mpirun "
        f"ended with {exit_status}"
    )


def mpirun_ended(exit_status: int, last_lines: Iterable[str]) -> str:
    return f"mpirun ended with {exit_status}: " + "\n".join(last_lines)


def task_killed(loss: str, *, over_mpi: bool) -> str:
    """Return the sentence about a lost task of a barrier stage; loss: of its executor, or empty.

    Over MPI, ranks are processes of their own. SIGTERM ends them together with their task.
    """
    whose = "the Python of its barrier task" if over_mpi else "its Python worker"
    return "; ".join(filter(None, [f"{whose} was killed or crashed", loss]))


def round_task_killed(sparks_words: str) -> str:
    return f"its Python worker or executor was killed or crashed{sparks_words}"


def executor_lost(name: str, host: str, ranks: Sequence[int], why: str) -> str:
    which = "rank" if len(ranks) == 1 else "ranks"
    return f"Spark lost executor {name} on host {host}, and {which} {_listed(ranks)} with it: {why}"


def executor_lost_for(reason: str | None) -> str:
    """Return the words about an executor that Spark has lost for this reason; empty for None."""
    if reason is None:
        return ""
    # Spark names its own key only.
    key = "spark.executor.memoryOverhead"
    advice = f"{key} ([spark.conf] of the spec, or a higher [limits] rank_memory_mib)"
    return f"Spark lost the executor: {reason.replace(key, advice)}"


def killed_for_memory(count: int) -> str:
    """count: processes of this host, whosever, that the kernel has ended meanwhile."""
    processes = "a process" if count == 1 else f"{count} processes"
    return (
        f"meanwhile the kernel ended {processes} of this host for lack of memory; use fewer ranks "
        "or a smaller batch, or more memory"
    )


# The trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The known end of a rank that could not write its error.

    signal: that ended it, by the launcher's log. last_words: of compiled code that gave up.
    """

    signal: int | None
    last_words: str | None


def trial_failed(
    rank: int,
    ranks: int,
    status: RankStatus | None,
    failure: Failure | None,
    said: str | None,
    exit_status: int,
    crash: Crash,
) -> str:
    """Return the sentence about the rank that failed first.

    failure: that it wrote. said: by its launcher, if that knows more. exit_status: of the launcher.
    """
    name, how = f"rank {rank} of {ranks}", _exit_words(exit_status)
    if status is None:
        if said is None and crash.signal is not None:
            said = _ended_by(crash.signal)
        why = f"; the launcher {how}" if said is None else f": {said}"
        return f"{name} failed before it could write a status{why}"
    where = f"{name} (host {status.host}, pid {status.pid})"
    if said is not None:
        return f"{where} {_what_it_wrote(failure)}; the launcher says: {said}"
    if failure is not None:
        return f"{where} failed: {failure}"
    words = crash.last_words
    wrote = "it wrote no error" if words is None else f'it wrote "{words}"'
    return f"{where} {_ended_by(crash.signal)}; {wrote}; the launcher {how}"


def trial_failed_somewhere(
    exit_status: int, statuses: Sequence[RankStatus], ranks: int, said: str | None
) -> str:
    """Return the sentence about a failure that no rank is known to have caused."""
    finished = sum(s.state == "done" for s in statuses)
    says = f"the launcher's log says: {said}" if said else "no rank says why"
    how = _exit_words(exit_status)
    return f"the launcher {how} and {finished} of {ranks} ranks finished; {says}"


def _what_it_wrote(failure: Failure | None) -> str:
    if failure is None:
        return "wrote no error"
    return "was asked to end" if failure.was_asked_to_end else f"ended with {failure}"


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with status {exit_status}"
    return f"was ended by {named_signal(-exit_status)}"


def _ended_by(number: int | None) -> str:
    """number: of a signal; None: it is not known."""
    return "was killed or crashed" if number is None else ended_by_signal(number)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
