"""The outcome of a trial: from the records of its ranks, else from its launcher's end and log.

`job.failure_words` has the sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import (
    DataError,
    EnvironmentLacks,
    ExitCode,
    PacelineError,
    TimedOut,
    UsageError,
)
from paceline.measure.records.documents import exit_code_of, read_reported, read_statuses
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import SCHEMA, Failure, Outcome, RankStatus
from paceline.plan.trials.trial import Trial
from paceline.runner.job import failure_words
from paceline.runner.job.rank_status import (
    FirstFailure,
    first_failure,
    outcome_status,
    written_cause,
)
from paceline.runner.job.stacks import read_stacks, stacks_sentence
from paceline.runner.launchers.base import (
    Launcher,
    lost_host,
    ranks_without_peer,
    said_by_mpi,
    signal_of,
)
from paceline.runner.launchers.supervise import Ended

LOG_TAIL_LINES = 20
# Stack frames of a JVM, and of torch's C++ (c10), which prints them whenever a connection ends.
_FRAME = re.compile(r"\s+at [\w.$/<>]+\(|\s+\.\.\. \d+ more|frame #\d+: |Exception raised from ")
# The first line of a Python or Java error. The lines "Caused by" that follow it say less.
_ERROR_LINE = re.compile(r"^(?!Caused by: |\s).*?(?:\w(?:Error|Exception))\b.*$", re.MULTILINE)
# What a job script said about an error that is no crash.
_OWN_LINE = re.compile(r"^paceline: (?!warning: )(.+)$", re.MULTILINE)
# What C++ says of the exception that ends a process, for example of Gloo where ranks disagree.
_LAST_WORDS = re.compile(r"^\s*what\(\):\s+(.+)$", re.MULTILINE)
_LONGEST_REASON = 300  # characters
_TAIL_BYTES = 64 * 1024
# Errors whose exit codes say more than that a rank failed.
SPECIFIC_ERRORS: dict[int, type[PacelineError]] = {
    kind.exit_code: kind for kind in (UsageError, EnvironmentLacks, DataError, TimedOut)
}
_NO_RANK = FirstFailure(rank=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """The rank that failed first, and what others than this rank know about it."""

    failure: FirstFailure = _NO_RANK
    reported: Failure | None = None  # by the job side
    said: str | None = None  # by the launcher's log
    signal: int | None = None  # that ended the rank, by the launcher's log

    @property
    def words(self) -> str | None:
        return self.said if self.reported is None else str(self.reported)

    @property
    def recorded(self) -> Failure | None:
        """The failure that a record has."""
        return self.reported or self.failure.error


def diagnose(trial: Trial, files: TrialFiles, ended: Ended, launcher: Launcher) -> Outcome:
    """Return how the trial ended, with a message that names the failed rank and quotes its log."""
    statuses = read_statuses(files)
    has_ended = ended.exit_status == 0 or ended.stuck_at_exit
    if not ended.timed_out and has_ended and _all_done(trial, statuses):
        return _outcome(trial, ended, ExitCode.OK, _Cause(), None)
    cause = _Cause()
    if not ended.timed_out and not ended.missing_ranks:
        cause = _cause(files, ended, launcher, statuses)
    message = _message(trial, files, ended, cause, statuses)
    return _outcome(trial, ended, _exit_code(ended, cause), cause, message)


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


def _cause(
    files: TrialFiles, ended: Ended, launcher: Launcher, statuses: list[RankStatus]
) -> _Cause:
    """Return the cause that a rank wrote, else the one that the job side reported.

    The launcher's log is read only if there is neither.
    """
    written = written_cause(statuses)
    if written is not None:
        return _Cause(failure=written)
    reported = read_reported(files)
    if reported is not None:
        return _Cause(failure=_failure_of_rank(reported.rank, statuses), reported=reported)
    return _cause_in_log(_log_text(files.launcher_log), ended, launcher, statuses)


def _cause_in_log(
    text: str, ended: Ended, launcher: Launcher, statuses: list[RankStatus]
) -> _Cause:
    """Return the cause from the launcher's words. Ranks of a lost host can write nothing."""
    failure = first_failure(
        statuses,
        named=launcher.failed_rank(text),
        dead=ended.dead_ranks,
        without_peer=ranks_without_peer(text),
    )
    lost = lost_host(text, statuses)
    if lost is not None:
        if lost.ranks and failure.is_unexplained:
            failure = _failure_of_rank(lost.ranks[0], statuses)
        if failure.is_unexplained and (failure.rank in lost.ranks or not lost.ranks):
            return _Cause(failure=failure, said=failure_words.mpi_host_lost(lost.name, lost.ranks))
    number = None if failure.rank is None else signal_of(failure.rank, failure.status, text)
    return _Cause(failure=failure, said=_last_error(text, ended, failure), signal=number)


def _failure_of_rank(rank: int, statuses: list[RankStatus]) -> FirstFailure:
    return FirstFailure(rank=rank, status=next((s for s in statuses if s.rank == rank), None))


def _last_error(text: str, ended: Ended, failure: FirstFailure) -> str | None:
    """Return the last error in the log of a launcher; None if it is about a rank that began."""
    is_own = ended.exit_status in SPECIFIC_ERRORS
    if failure.rank is not None and not (is_own and failure.status is None):
        return None
    if is_own and (lines := _OWN_LINE.findall(text)):
        return str(lines[-1])
    errors = [] if is_own else _ERROR_LINE.findall(text)
    reason = errors[-1] if errors else said_by_mpi(text)
    return None if reason is None else reason[:_LONGEST_REASON]


def _all_done(trial: Trial, statuses: list[RankStatus]) -> bool:
    done = [s.rank for s in statuses if s.state == "done"]
    return done == list(range(trial.placement.ranks))


def _exit_code(ended: Ended, cause: _Cause) -> ExitCode:
    failure = cause.failure
    if ended.timed_out or ended.missing_ranks:
        return ExitCode.TIMED_OUT
    if cause.recorded is not None:
        return exit_code_of(cause.recorded)
    if failure.rank not in ended.dead_ranks and ended.exit_status in SPECIFIC_ERRORS:
        return ExitCode(ended.exit_status)
    return ExitCode.RANK_FAILED


def _message(
    trial: Trial, files: TrialFiles, ended: Ended, cause: _Cause, statuses: list[RankStatus]
) -> str:
    log, failure = files.launcher_log, cause.failure
    if failure.status is not None and log_tail(files.rank(failure.status.rank).log):
        log = files.rank(failure.status.rank).log
    lines = [f"trial {trial.id}: {_what_happened(trial, files, ended, cause, statuses)}"]
    exit_code = _exit_code(ended, cause)
    if exit_code is ExitCode.TIMED_OUT:
        lines += filter(None, [stacks_sentence(read_stacks(files))])
    # What a rank says of a user's mistake is complete.
    explains_itself = cause.recorded is not None and outcome_status(exit_code) == "refused"
    if not explains_itself and (tail := log_tail(log)):
        lines += [f"the last lines of {log}:", *(f"  | {line}" for line in tail)]
    lines.append(f"logs: {files.root / 'ranks'}/*/log.txt, {files.launcher_log}")
    if ended.left_behind:
        pids = " ".join(map(str, ended.left_behind))
        lines.append(f"processes that could not be ended: {pids}")
    return "\n".join(lines)


def _what_happened(
    trial: Trial, files: TrialFiles, ended: Ended, cause: _Cause, statuses: list[RankStatus]
) -> str:
    limits, ranks, failure = trial.limits, trial.placement.ranks, cause.failure
    if ended.timed_out:
        return failure_words.ranks_not_done(limits.trial_s, statuses, ranks)
    if ended.missing_ranks:
        return failure_words.ranks_not_started(ended.missing_ranks, limits.rendezvous_s)
    if failure.rank is None:
        return failure_words.trial_failed_somewhere(ended.exit_status, statuses, ranks, cause.words)
    crash = failure_words.Crash(
        signal=cause.signal, last_words=_last_words(files.rank(failure.rank).log)
    )
    return failure_words.trial_failed(
        failure.rank, ranks, failure.status, failure.error, cause.words, ended.exit_status, crash
    )


def _last_words(log: Path) -> str | None:
    found = _LAST_WORDS.findall("\n".join(log_tail(log)))
    return found[-1][:_LONGEST_REASON] if found else None


def _outcome(
    trial: Trial, ended: Ended, code: ExitCode, cause: _Cause, message: str | None
) -> Outcome:
    return Outcome(
        schema=SCHEMA,
        trial_id=trial.id,
        status=outcome_status(code),
        exit_code=int(code),
        launched_unix_s=ended.launched_unix_s,
        ended_unix_s=ended.ended_unix_s,
        launcher_exit_status=ended.exit_status,
        failed_rank=cause.failure.rank,
        message=message,
        error=cause.recorded if cause.said is None else None,
    )


def _log_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
