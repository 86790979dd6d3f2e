"""The outcome of a trial: from the end of its launcher, its log, and the status of its ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import (
    DataError,
    EnvironmentLacks,
    ExitCode,
    PacelineError,
    TimedOut,
    UsageError,
)
from paceline.job.first_failure import FirstFailure, first_failure, outcome_status
from paceline.job.messages import RANK_FAILED_LINE
from paceline.job.stacks import read_stacks, stacks_sentence
from paceline.launchers.base import Launcher
from paceline.launchers.mpi_messages import lost_host, ranks_without_peer
from paceline.launchers.supervise import Ended
from paceline.plan.trial import Trial
from paceline.records.documents import exit_code_of, read_statuses
from paceline.records.layout import TrialFiles
from paceline.records.rows import SCHEMA, Outcome, RankStatus

LOG_TAIL_LINES = 20
# Stack frames of a JVM, and of torch's C++ (c10), which prints them whenever a connection ends.
_FRAME = re.compile(r"\s+at [\w.$/<>]+\(|\s+\.\.\. \d+ more|frame #\d+: |Exception raised from ")
# The first line of a Python or Java error. The lines "Caused by" that follow it say less.
_ERROR_LINE = re.compile(r"^(?!Caused by: |\s).*?(?:\w(?:Error|Exception))\b.*$", re.MULTILINE)
# What a job script said about an error that is no crash.
_OWN_LINE = re.compile(r"^paceline: (?!warning: )(.+)$", re.MULTILINE)
_LONGEST_REASON = 300  # characters
_TAIL_BYTES = 64 * 1024
# Errors whose exit codes say more than that a rank failed.
SPECIFIC_ERRORS: dict[int, type[PacelineError]] = {
    kind.exit_code: kind for kind in (UsageError, EnvironmentLacks, DataError, TimedOut)
}


def diagnose(trial: Trial, files: TrialFiles, ended: Ended, launcher: Launcher) -> Outcome:
    """Return how the trial ended, with a message that names the failed rank and quotes its log."""
    statuses = read_statuses(files)
    has_ended = ended.exit_status == 0 or ended.stuck_at_exit
    if not ended.timed_out and has_ended and _all_done(trial, statuses):
        return _outcome(trial, ended, ExitCode.OK, None, None)
    failure = FirstFailure(rank=None)
    if not ended.timed_out and not ended.missing_ranks:
        failure = _first_failure(files, ended, launcher, statuses)
    message = _message(trial, files, ended, failure, statuses)
    return _outcome(trial, ended, _exit_code(ended, failure), failure.rank, message)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last `lines` lines of a text file without stack frames of a JVM or of C++.

    Return [] if the file is missing or empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.rstrip().splitlines() if not _FRAME.match(line)][-lines:]


def _first_failure(
    files: TrialFiles, ended: Ended, launcher: Launcher, statuses: list[RankStatus]
) -> FirstFailure:
    """Return the rank that failed first. Ranks of a lost host can write nothing."""
    text = _log_text(files.launcher_log)
    failure = first_failure(
        statuses,
        named=launcher.failed_rank(text),
        dead=ended.dead_ranks,
        without_peer=ranks_without_peer(text),
    )
    lost = lost_host(text, statuses)
    if lost is None or not lost.ranks or not failure.is_unexplained:
        return failure
    return FirstFailure(
        rank=lost.ranks[0], status=next(s for s in statuses if s.rank == lost.ranks[0])
    )


def _all_done(trial: Trial, statuses: list[RankStatus]) -> bool:
    done = [s.rank for s in statuses if s.state == "done"]
    return done == list(range(trial.placement.ranks))


def _exit_code(ended: Ended, failure: FirstFailure) -> ExitCode:
    if ended.timed_out or ended.missing_ranks:
        return ExitCode.TIMED_OUT
    if failure.error is not None:
        return exit_code_of(failure.error)
    if failure.rank not in ended.dead_ranks and ended.exit_status in SPECIFIC_ERRORS:
        return ExitCode(ended.exit_status)
    return ExitCode.RANK_FAILED


def _message(
    trial: Trial,
    files: TrialFiles,
    ended: Ended,
    failure: FirstFailure,
    statuses: list[RankStatus],
) -> str:
    log = files.launcher_log
    if failure.status is not None and log_tail(files.rank(failure.status.rank).log):
        log = files.rank(failure.status.rank).log
    reported = _reported_by_launcher(files, failure, ended, statuses)
    if ended.timed_out:
        what = _late_text(trial, statuses)
    elif ended.missing_ranks:
        what = missing_ranks_text(ended.missing_ranks, trial.limits.rendezvous_s)
    else:
        what = _what_happened(trial, ended, failure, statuses, reported)
    lines = [f"trial {trial.id}: {what}"]
    if _exit_code(ended, failure) is ExitCode.TIMED_OUT:
        lines += filter(None, [stacks_sentence(read_stacks(files))])
    if tail := log_tail(log):
        lines += [f"the last lines of {log}:", *(f"  | {line}" for line in tail)]
    lines.append(f"logs: {files.root / 'ranks'}/*/log.txt, {files.launcher_log}")
    if ended.left_behind:
        pids = " ".join(map(str, ended.left_behind))
        lines.append(f"processes that could not be ended: {pids}")
    return "\n".join(lines)


def _what_happened(
    trial: Trial,
    ended: Ended,
    failure: FirstFailure,
    statuses: list[RankStatus],
    reported: str | None,
) -> str:
    how = _exit_words(ended.exit_status)
    ranks, status = trial.placement.ranks, failure.status
    if failure.rank is None:
        finished = len([s for s in statuses if s.state == "done"])
        says = f"the launcher's log says: {reported}" if reported else "no rank says why"
        return f"the launcher {how} and {finished} of {ranks} ranks finished; {says}"
    name = f"rank {failure.rank} of {ranks}"
    if status is None:
        why = f"; the launcher {how}" if reported is None else f": {reported}"
        return f"{name} failed before it could write a status{why}"
    where = f"{name} (host {status.host}, pid {status.pid})"
    if reported is not None and failure.is_unexplained:
        what = "wrote no error" if failure.error is None else "was asked to end"
        return f"{where} {what}; the launcher says: {reported}"
    if failure.error is not None:
        return f"{where} failed: {failure.error}"
    return f"{where} was killed or crashed: it wrote no error; the launcher {how}"


def _late_text(trial: Trial, statuses: list[RankStatus]) -> str:
    done = {s.rank for s in statuses if s.state == "done"}
    late = [str(rank) for rank in range(trial.placement.ranks) if rank not in done]
    return (
        f"not done within its limit of {trial.limits.trial_s:g} s "
        f"(limits.trial_s), ended; ranks not done: {', '.join(late) or 'none'}"
    )


def missing_ranks_text(missing: Sequence[int], limit_s: float) -> str:
    """Return the sentence about ranks that did not start in time."""
    names = ", ".join(map(str, missing))
    return f"rank(s) {names} did not start within {limit_s:g} s (limits.rendezvous_s)"


def _reported_by_launcher(
    files: TrialFiles, failure: FirstFailure, ended: Ended, statuses: list[RankStatus]
) -> str | None:
    """Return the reason that the job script printed for the rank, or that its host was lost.

    Without one, or for a rank that was refused before it began, return the last error.
    """
    text = _log_text(files.launcher_log)
    for found in RANK_FAILED_LINE.finditer(text):
        if failure.rank == int(found.group(1)):
            return found.group(2)
    lost = lost_host(text, statuses)
    if lost is not None and (failure.rank in lost.ranks or not lost.ranks):
        return lost.sentence
    is_own = ended.exit_status in SPECIFIC_ERRORS
    if failure.rank is not None and not (is_own and failure.status is None):
        return None
    errors = (_OWN_LINE if is_own else _ERROR_LINE).findall(text)
    if not errors:
        return None
    reason: str = errors[-1]
    return reason if is_own else reason[:_LONGEST_REASON]


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with status {exit_status}"
    try:
        return f"was ended by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"was ended by signal {-exit_status}"


def _outcome(
    trial: Trial, ended: Ended, code: ExitCode, failed_rank: int | None, message: str | None
) -> Outcome:
    return Outcome(
        schema=SCHEMA,
        trial_id=trial.id,
        status=outcome_status(code),
        exit_code=int(code),
        launched_unix_s=ended.launched_unix_s,
        ended_unix_s=ended.ended_unix_s,
        launcher_exit_status=ended.exit_status,
        failed_rank=failed_rank,
        message=message,
    )


def _log_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
