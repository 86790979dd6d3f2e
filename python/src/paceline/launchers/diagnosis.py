"""Why a trial ended as it did: from the launcher's end, its log, and what the ranks last said."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Literal

from paceline.errors import ExitCode
from paceline.launchers.base import OWN_FAILURE
from paceline.records.rows import SCHEMA, Outcome
from paceline.records.statuses import exit_code_of, read_statuses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.launchers.base import Launcher
    from paceline.launchers.supervise import Ended
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import RankStatus

LOG_TAIL_LINES = 20
# Of a JVM, and of torch's C++ (c10), which warns with a trace wherever a connection ends.
_FRAME = re.compile(r"\s+at [\w.$/<>]+\(|\s+\.\.\. \d+ more|frame #\d+: |Exception raised from ")
_TAIL_BYTES = 64 * 1024
# Codes with which our job scripts say more than that a rank failed.
_TELLING = frozenset({ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.TIMED_OUT})
_REFUSALS = frozenset({ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA})


def diagnose(trial: Trial, files: TrialFiles, ended: Ended, launcher: Launcher) -> Outcome:
    """How the trial ended, with a message that names the failed rank and quotes its log."""
    ranks = read_statuses(files)
    if not ended.timed_out and ended.exit_status == 0 and _all_done(trial, ranks):
        return _outcome(trial, ended, ExitCode.OK, None, None)
    failed = None
    if not ended.timed_out:
        named = launcher.failed_rank(_log_text(files.launcher_log))
        failed = rank_to_blame(ranks, named, ended.dead_ranks)
    code = _exit_code(ended, failed, ranks)
    return _outcome(trial, ended, code, failed, _message(trial, files, ended, failed, ranks))


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last `lines` lines of a text file, a JVM's and C++'s stack frames left out; [] if it is
    missing or empty."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.rstrip().splitlines() if not _FRAME.match(line)][-lines:]


def _all_done(trial: Trial, ranks: list[RankStatus]) -> bool:
    done = [r.rank for r in ranks if r.state == "done"]
    return done == list(range(trial.placement.ranks))


def rank_to_blame(
    ranks: Sequence[RankStatus], named: int | None, dead_ranks: Sequence[int] = ()
) -> int | None:
    """The rank to blame. An error of a rank's own says most, and its peers may have been killed
    for it; then who died without a word; then whom the launcher names. A rank whose error is only
    that a peer left is never blamed, and one that waited too long only if nobody else is.

    named: by the launcher; dead_ranks: seen to be gone while it ran.
    """
    own_errors = [r.rank for r in ranks if r.state == "failed" and not r.secondary]
    prompt = [rank for rank in own_errors if not _timed_out(ranks, rank)]
    wordless = [r.rank for r in ranks if r.state == "running"]
    if prompt:
        return named if named in prompt else prompt[0]
    if dead_ranks:
        # Spark ends the peers of a lost task at once: between two looks several may have gone.
        return named if named in wordless else dead_ranks[0]
    if named is not None and named not in {r.rank for r in ranks if r.secondary}:
        return named
    return next(iter(own_errors + wordless), None)


def _timed_out(ranks: Sequence[RankStatus], rank: int) -> bool:
    return any(r.rank == rank and exit_code_of(r.error) == ExitCode.TIMED_OUT for r in ranks)


def _exit_code(ended: Ended, failed: int | None, ranks: list[RankStatus]) -> ExitCode:
    if ended.timed_out:
        return ExitCode.TIMED_OUT
    status = next((r for r in ranks if r.rank == failed), None)
    if status is not None and status.state == "failed":
        return exit_code_of(status.error)
    if failed not in ended.dead_ranks and ended.exit_status in _TELLING:
        return ExitCode(ended.exit_status)
    return ExitCode.RANK_FAILED


def _message(
    trial: Trial, files: TrialFiles, ended: Ended, failed: int | None, ranks: list[RankStatus]
) -> str:
    by_rank = {r.rank: r for r in ranks}
    status = None if failed is None else by_rank.get(failed)
    log = files.launcher_log if status is None else files.rank(status.rank).log
    if not log_tail(log):
        log = files.launcher_log
    told = _told_by_launcher(files, failed)
    lines = [f"trial {trial.id}: {_what_happened(trial, ended, failed, status, ranks, told)}"]
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
    failed: int | None,
    status: RankStatus | None,
    ranks: list[RankStatus],
    told: str | None,
) -> str:
    how = _exit_words(ended.exit_status)
    if ended.timed_out:
        waiting = ", ".join(str(r.rank) for r in ranks if r.state != "done") or "none"
        return (
            f"not done within its limit of {trial.limits.trial_s:g} s (limits.trial_s, "
            f"--trial-timeout), ended; ranks not done: {waiting}"
        )
    if failed is None:
        seen = len([r for r in ranks if r.state == "done"])
        return (
            f"the launcher {how} and {seen} of {trial.placement.ranks} ranks finished; "
            "no rank says why"
        )
    name = f"rank {failed} of {trial.placement.ranks}"
    if status is None:
        return f"{name} failed before it could say anything; the launcher {how}"
    where = f"{name} (host {status.host}, pid {status.pid})"
    if status.state == "failed":
        return f"{where} failed: {status.error}"
    if told is not None:
        return f"{where} wrote no error; the launcher says: {told}"
    return f"{where} was killed or crashed: it wrote no error; the launcher {how}"


def _told_by_launcher(files: TrialFiles, rank: int | None) -> str | None:
    """What our own job script, from where it was, found out about a rank."""
    for found in OWN_FAILURE.finditer(_log_text(files.launcher_log)):
        if rank == int(found.group(1)):
            return found.group(2)
    return None


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with status {exit_status}"
    try:
        return f"was ended by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"was ended by signal {-exit_status}"


def _outcome(
    trial: Trial, ended: Ended, code: ExitCode, failed: int | None, message: str | None
) -> Outcome:
    status: Literal["ok", "failed", "timed_out", "refused"] = "failed"
    if code == ExitCode.OK:
        status = "ok"
    elif code == ExitCode.TIMED_OUT:
        status = "timed_out"
    elif code in _REFUSALS:
        status = "refused"
    return Outcome(
        schema=SCHEMA,
        trial_id=trial.id,
        status=status,
        exit_code=int(code),
        launched_unix_s=ended.launched_unix_s,
        ended_unix_s=ended.ended_unix_s,
        launcher_exit_status=ended.exit_status,
        failed_rank=failed,
        message=message,
    )


def _log_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
