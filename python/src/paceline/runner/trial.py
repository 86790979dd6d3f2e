"""One trial: command, supervision, outcome, and the work after a good end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, PacelineError, RankFailed, TimedOut
from paceline.host.machine import host_name
from paceline.job.environment import SIDECAR_HOST_VARIABLE
from paceline.job.sidecars import watch
from paceline.launchers.base import launcher_for
from paceline.launchers.diagnosis import diagnose
from paceline.launchers.supervise import supervise
from paceline.records.compact import compact_trial
from paceline.records.files import read_json, write_json, write_text
from paceline.records.planned_trial import write_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles, TrialFiles
    from paceline.records.rows import Outcome
    from paceline.telemetry import SidecarHandle


def is_finished(files: TrialFiles) -> bool:
    """Return whether the trial has ended well."""
    return files.outcome.exists() and read_json(files.outcome)["status"] == "ok"


def run_trial(trial: Trial, files: TrialFiles) -> Outcome:
    """Launch one trial with its sidecar, wait for its end, and record the outcome."""
    launcher = launcher_for(trial.launcher)
    write_trial(trial, files)
    command = launcher.command(trial, files)
    environment = {**command.environment, SIDECAR_HOST_VARIABLE: host_name()}
    command = dataclasses.replace(command, environment=environment)
    write_text(files.command, command.shell_line() + "\n")
    sidecars: list[SidecarHandle] = []
    try:
        ended = supervise(
            command,
            files,
            limit_s=trial.limits.trial_s,
            on_started=lambda pid: sidecars.extend(watch(trial, files, host_name(), (pid,))),
        )
    finally:
        for sidecar in sidecars:
            sidecar.stop()
    outcome = diagnose(trial, files, ended, launcher)
    write_json(files.outcome, dataclasses.asdict(outcome))
    if outcome.status == "ok":
        _after_good_end(files)
    return outcome


def _after_good_end(files: TrialFiles) -> None:
    """Compact the rows of a trial that has ended well."""
    compact_trial(files)


def failure_of(outcome: Outcome, files: RunFiles) -> PacelineError:
    """Return the error with which a run ends after such a trial."""
    return _error(outcome, f"{outcome.message}\n{_intact(files)}")


def failure_of_all(outcomes: Sequence[Outcome], files: RunFiles) -> PacelineError:
    """Return the error with which a run ends that went on after its failed trials.

    Its exit code is that of a failed rank if a rank failed in any of them, otherwise that of the
    first one. outcomes: at least one, none of them good.
    """
    if len(outcomes) == 1:
        return failure_of(outcomes[0], files)
    decisive = next((o for o in outcomes if _code(o) is ExitCode.RANK_FAILED), outcomes[0])
    listed = "".join(f"\n  - {outcome.reason}" for outcome in outcomes)
    message = f"{len(outcomes)} trials failed:{listed}\nlogs: {files.root / 'trials'}\n"
    return _error(decisive, message + _intact(files))


def _intact(files: RunFiles) -> str:
    return f"Finished trials are intact in {files.root}; complete the run with --resume."


def _code(outcome: Outcome) -> ExitCode:
    if outcome.status == "timed_out":
        return ExitCode.TIMED_OUT
    if outcome.exit_code in set(ExitCode) - {ExitCode.OK}:
        return ExitCode(outcome.exit_code)
    return ExitCode.RANK_FAILED


def _error(outcome: Outcome, message: str) -> PacelineError:
    code = _code(outcome)
    if code is ExitCode.TIMED_OUT:
        return TimedOut(message)
    if code is ExitCode.RANK_FAILED:
        return RankFailed(message, outcome.failed_rank)
    error = PacelineError(message)
    error.exit_code = code
    return error
