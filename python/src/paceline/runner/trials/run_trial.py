"""One trial: command, supervision, outcome, and the work after a good end."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.base.errors import (
    DataError,
    EnvironmentLacks,
    ExitCode,
    PacelineError,
    RankFailed,
    TimedOut,
)
from paceline.collectives.host import host_name, kills_for_memory
from paceline.measure.records.documents import keep_log, leave_attempt, write_trial
from paceline.measure.records.files import document, read_json, write_json, write_text
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import FailureRow, Outcome, TouchedFilesRow
from paceline.measure.records.tables import compact_trial
from paceline.measure.records.virtual_clock import (
    SLICES_VARIABLE,
    convert_trial,
    keep_slices,
    own_dilation,
    run_in_turns,
    run_together,
)
from paceline.measure.telemetry import SidecarHandle
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.spec.models import LONGEST_INTERVAL_S
from paceline.plan.trials.trial import Trial
from paceline.runner.job import failure_words
from paceline.runner.job.context import SIDECAR_HOST_VARIABLE
from paceline.runner.job.rank import watch
from paceline.runner.job.rank_status import RESTARTED_CODES, outcome_status
from paceline.runner.lab.session import check_turns, links_at
from paceline.runner.launchers.base import launcher_for
from paceline.runner.launchers.diagnosis import diagnose
from paceline.runner.launchers.supervise import (
    EXIT_S,
    NOTICE_S,
    WaitLimits,
    launched,
    write_last_checkpoint,
)
from paceline.runner.trials.copies import collect, collect_after_signal, published
from paceline.runner.trials.failure_injection import failing
from paceline.runner.trials.planning import Progress


def is_finished(files: TrialFiles) -> bool:
    """Return whether the trial has ended well."""
    return files.outcome.exists() and read_json(files.outcome).get("status") == "ok"


def run_trial(trial: Trial, files: TrialFiles) -> Outcome:
    """Run one trial, with new starts after failures as `restarts` allows; record the outcome.

    Raises EnvironmentLacks if its hosts should take turns and do not.
    """
    check_turns()
    trial = slowed(trial, own_dilation())
    write_trial(trial, files)
    attempts = 1 if LAUNCHERS.get(trial.launcher).restarts_ranks else 1 + trial.restarts
    started_s = time.monotonic()
    launched_unix_s: float | None = None
    with links_at(trial.link), failing(trial, files):
        while True:
            limit_s = max(0.0, trial.limits.trial_s - (time.monotonic() - started_s))
            outcome, failure = _run_attempt(trial, files, limit_s)
            launched_unix_s = launched_unix_s or outcome.launched_unix_s
            attempts -= 1
            if attempts == 0 or failure is None:
                break
            leave_attempt(files, failure)
            keep_log(files)
    outcome = dataclasses.replace(outcome, launched_unix_s=launched_unix_s)
    if SLICES_VARIABLE in os.environ:
        outcome = _in_own_time(outcome, files, Path(os.environ[SLICES_VARIABLE]))
        run_together()  # nothing is measured before the next trial trains
    if outcome.status == "ok":
        outcome = _with_load(outcome, files)
    write_json(files.outcome, outcome)
    move_made_paths(trial, files)
    if outcome.status == "ok":
        _after_good_end(trial, files)
    return outcome


def slowed(trial: Trial, dilation: int) -> Trial:
    """Return the trial with limits and sampling interval for hosts whose time runs slower."""
    if dilation == 1:
        return trial
    given = trial.limits.model_dump()
    limits = {
        name: dilation * given[name]
        for name in ("trial_s", "rendezvous_s", "slots_s", "collective_s")
    }
    interval_s = min(LONGEST_INTERVAL_S, dilation * trial.telemetry.interval_s)
    return trial.model_copy(
        update={
            "limits": trial.limits.model_copy(update=limits),
            "telemetry": trial.telemetry.model_copy(update={"interval_s": interval_s}),
        }
    )


def _in_own_time(outcome: Outcome, files: TrialFiles, slices: Path) -> Outcome:
    """Convert the records of a trial to the time of its hosts, which take turns.

    slices: of the lab. A trial whose records cannot be converted is refused. One that failed is not
    converted, but told apart from one that failed because the turns had ended.
    """
    host = host_name()
    try:
        if outcome.status != "ok":
            check_turns()
            return outcome
        clocks = keep_slices(slices, files, outcome.launched_unix_s, time.time()).clocks()
        convert_trial(files, clocks, host)
        return dataclasses.replace(
            outcome,
            launched_unix_s=clocks[host].unix_s(outcome.launched_unix_s),
            ended_unix_s=clocks[host].unix_s(outcome.ended_unix_s),
        )
    except (DataError, EnvironmentLacks) as error:
        code = error.exit_code
        message = f"trial {outcome.trial_id}: {error}"
        return dataclasses.replace(
            outcome, status=outcome_status(code), exit_code=code, message=message
        )


def run_followed(
    trial: Trial, files: TrialFiles, progress: Progress, number: int, of: int
) -> Outcome:
    """Run one trial, and tell the progress of its start and its end. number: from 1."""
    progress.trial_started(trial, files, number, of)
    outcome = run_trial(trial, files)
    progress.trial_ended(trial, outcome)
    return outcome


def run_all(
    trials: Sequence[tuple[Trial, TrialFiles]], progress: Progress, start: int, of: int
) -> None:
    """Run trials in this order. start, of: number of the first one, and of all.

    Raises RankFailed or TimedOut if one fails.
    """
    for number, (trial, files) in enumerate(trials, start=start):
        outcome = run_followed(trial, files, progress, number, of)
        if outcome.status != "ok":
            raise failure_of(outcome)


def _run_attempt(
    trial: Trial, files: TrialFiles, limit_s: float
) -> tuple[Outcome, FailureRow | None]:
    """Launch the trial with its sidecar and wait for its end.

    The second result is the failure of a rank, after which a new start may help.
    """
    launcher = launcher_for(trial.launcher)
    place = published(trial, files)
    of_run = {SIDECAR_HOST_VARIABLE: host_name(), **({} if place is None else place.environment())}
    command = launcher.command(trial, files).with_variables(of_run)
    write_text(files.command, command.shell_line() + "\n")
    # Without a shared run directory, ranks of other nodes are perhaps seen at the end only.
    limits = _wait_limits(trial, limit_s, sees_ranks=place is None)
    kills = kills_for_memory()
    sidecars: list[SidecarHandle] = []
    run_together()
    try:
        with launched(command, files) as started:
            sidecars += watch(trial, files, host_name(), (started.pid,))
            try:
                started.wait(limits)
            except (KeyboardInterrupt, SystemExit):
                if trial.checkpoint is not None:
                    write_last_checkpoint(files)  # the ranks still run
                raise
    except (KeyboardInterrupt, SystemExit):
        if place is not None:
            collect_after_signal(place, files)
        raise
    finally:
        for sidecar in sidecars:
            sidecar.stop()
        run_in_turns()  # the slice in which all have run at once is recorded when it ends
    ended = started.ended
    missing = None if place is None else collect(place, files)
    outcome = diagnose(trial, files, ended, launcher)
    if missing is not None and outcome.message is not None:
        outcome = dataclasses.replace(outcome, message=f"{outcome.message}\n{missing}")
    outcome = with_lack_of_memory(outcome, kills_for_memory() - kills)
    # A rank that waits for a lost host too long has timed out; the limit of the trial is final.
    if ended.timed_out or outcome.exit_code not in RESTARTED_CODES:
        return outcome, None
    return outcome, FailureRow(
        detected_unix_s=ended.trouble_unix_s or ended.ended_unix_s,
        ended_unix_s=time.time(),
        failed_rank=outcome.failed_rank,
        message=outcome.reason,
    )


def with_lack_of_memory(outcome: Outcome, kills: int) -> Outcome:
    """Return the outcome with what the kernel did while the trial ran, below its first line.

    kills: processes that it ended for lack of memory.
    """
    if kills == 0 or outcome.message is None:
        return outcome
    reason, *rest = outcome.message.splitlines()
    message = "\n".join([reason, failure_words.killed_for_memory(kills), *rest])
    return dataclasses.replace(outcome, message=message)


def _with_load(outcome: Outcome, files: TrialFiles) -> Outcome:
    """Return the outcome with what others used while the trial trained, if it was measured."""
    from paceline.analysis.trial.load import recorded_load  # noqa: PLC0415  (loads SciPy)
    from paceline.analysis.trial.reading import load_trial  # noqa: PLC0415

    try:
        found = recorded_load(load_trial(files))
    except DataError:
        return outcome  # the first command that reads the damaged trace reports it
    if found is None:
        return outcome
    return dataclasses.replace(
        outcome,
        others_percent=found.others_percent,
        stolen_percent=found.stolen_percent,
        machine_cores=found.cores,
        beside_others=found.is_load,
    )


def _wait_limits(trial: Trial, limit_s: float, *, sees_ranks: bool) -> WaitLimits:
    """Return the limits of an attempt that may take `limit_s`."""
    launcher, limits = LAUNCHERS.get(trial.launcher), trial.limits
    replaces_ranks = launcher.restarts_ranks and trial.restarts > 0
    return WaitLimits(
        trial_s=limit_s,
        start_s=limits.rendezvous_s if launcher.needs_start_limit and sees_ranks else math.inf,
        ranks=trial.placement.ranks,
        notice_s=limits.rendezvous_s if replaces_ranks else NOTICE_S,
        replaces_ranks=replaces_ranks,
        exit_s=EXIT_S + (0.0 if sees_ranks else limits.collective_s),
    )


def _after_good_end(trial: Trial, files: TrialFiles) -> None:
    """Compact the rows of a trial that has ended well, and remove its checkpoints."""
    compact_trial(files)
    if trial.checkpoint is not None and not trial.checkpoint.keep:
        shutil.rmtree(files.checkpoints, ignore_errors=True)


def failure_of(outcome: Outcome, resumable: RunFiles | None = None) -> PacelineError:
    """Return the error with which a command ends after such a trial.

    resumable: the directory of the run or of the search, if it can be continued.
    """
    advice = "" if resumable is None else f"\n{how_to_continue(resumable)}"
    return _error(outcome, f"{outcome.message}{advice}")


def failure_of_all(outcomes: Sequence[Outcome], files: RunFiles) -> PacelineError:
    """Return the error with which a run ends that went on after its failed trials.

    Its exit code is that of a failed rank if a rank failed in any of them, otherwise that of the
    first one. outcomes: at least one, none of them good.
    """
    if len(outcomes) == 1:
        return failure_of(outcomes[0], files)
    decisive = next((o for o in outcomes if _code(o) is ExitCode.RANK_FAILED), outcomes[0])
    message = f"{len(outcomes)} trials failed:{_listed(outcomes)}\nlogs: {files.root / 'trials'}\n"
    return _error(decisive, message + how_to_continue(files))


def _listed(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each reason, with all trials that it ended."""
    same: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        # Trials differ in the number, the host and the process id of the rank in the reason.
        text = outcome.reason.removeprefix(f"trial {outcome.trial_id}: ")
        same.setdefault(text if outcome.error is None else str(outcome.error), []).append(outcome)
    lines = ""
    for first, *others in same.values():
        more = f" (also {', '.join(each.trial_id for each in others)})" if others else ""
        lines += f"\n  - {first.reason}{more}"
    return lines


def how_to_continue(files: RunFiles) -> str:
    """Return how many trials of a run are done, and the command that runs the others."""
    planned = read_json(files.manifest)["trials"] if files.manifest.exists() else []
    done = sum(is_finished(files.trial(trial_id)) for trial_id in planned)
    state = f"{done} of {len(planned)} trials done. " if planned else ""
    return f"{state}Continue with: paceline run --resume {shlex.quote(str(files.root))}"


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


def move_made_paths(trial: Trial, files: TrialFiles) -> None:
    """Move the files and folders that the ranks of a script have made to `files.made`.

    The next trial then starts as this one did: it finds no snapshot, and no folder that it expects
    to be new. See `train.rank.script.touched_files`, which records the paths.

    A folder in which a rank has read before its first step stays: such data are prepared once. So
    does what cannot be moved.
    """
    script = trial.training.script
    if script is None or script.resume is not None:  # a resumed training needs its checkpoint
        return
    rows = [document(rank.touched_files, TouchedFilesRow) for _, rank in files.ranks()]
    touched = [row for row in rows if row is not None]
    read = [Path(path) for row in touched for path in row.read_changed_ns]
    folder = _plain(script.directory)
    # The shortest first: a folder takes what another rank has made in it along.
    for path in sorted({_plain(each) for row in touched for each in row.made}):
        if not path.is_relative_to(folder) or not os.path.lexists(path):
            continue
        if any(each.is_relative_to(path) for each in read):
            continue
        goal = files.made / path.relative_to(folder)
        with suppress(OSError):
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, goal)


def _plain(path: str) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  (links keep their names)
