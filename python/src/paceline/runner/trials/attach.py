"""Run a command of the user whose ranks record themselves, as the only trial of a run directory.

The command has the terminal: it is in the same process group, and its input and output are those of
this process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import ExitCode
from paceline.base.host.processes import SIGNAL_BASE, guarded, shell_status
from paceline.base.host.programs import PACKAGE
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import write_json, write_text
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import SCHEMA, Outcome
from paceline.measure.records.tables import compact_trial
from paceline.plan.spec.models import name_of_script
from paceline.runner.job.failure_words import command_ended
from paceline.runner.job.rank_status import first_failure
from paceline.runner.trials.directory import check_new, made_run_dir, only_runner
from paceline.runner.trials.planning import provenance

# of the trial; runner/attach/startup/sitecustomize.py reads it
_FOLDER_VARIABLE = "PACELINE_ATTACH"
_STARTUP = PACKAGE / "runner" / "attach" / "startup"
_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A command that has ended."""

    exit_code: int  # of the command; 128 plus the signal that ended it
    trained: bool  # whether a process of the command was recorded


def name_of_command(command: Sequence[str]) -> str:
    """Return the name of a command's run: that of its script, else that of its program."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return name_of_script(script)


def attach(command: Sequence[str], run_dir: Path) -> Attached:
    """Run a command to its end, and record its ranks into a new run directory.

    Signals that ask this process to end are passed on to the command. Raises UsageError if the
    directory cannot be used.
    """
    run, name = RunFiles(run_dir), name_of_command(command)
    check_new(run)
    with made_run_dir(run_dir), only_runner(run_dir):
        files = run.trial(f"{name}.r0")
        write_json(run.manifest, _manifest(name, files))
        write_text(files.command, shlex.join(command) + "\n")
        launched_unix_s = time.time()
        status, is_interrupted = _run(command, files)
        code = shell_status(status)
        if not any(files.ranks()):
            run.manifest.unlink()
            shutil.rmtree(files.root.parent)
            return Attached(exit_code=code, trained=False)
        failure = first_failure(read_statuses(files))
        is_usable = _is_usable(files, code, is_interrupted=is_interrupted)
        message = None if is_usable else command_ended(code, failure.error)
        outcome = Outcome(
            schema=SCHEMA,
            trial_id=files.root.name,
            status="ok" if is_usable else "failed",
            exit_code=code,
            launched_unix_s=launched_unix_s,
            ended_unix_s=time.time(),
            launcher_exit_status=status,
            failed_rank=None if is_usable else failure.rank,
            message=message,
            error=None if is_usable else failure.error,
        )
        write_json(files.outcome, outcome)
        if is_usable:
            compact_trial(files)
    return Attached(exit_code=code, trained=True)


def _run(command: Sequence[str], files: TrialFiles) -> tuple[int, bool]:
    """Return the exit status of a command, and whether a signal asked for its end."""
    search = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        _FOLDER_VARIABLE: str(files.root.absolute()),
    }
    process = subprocess.Popen(guarded(command), env=environment)
    try:
        return _exit_status(process), False
    except KeyboardInterrupt:
        if not _has_terminal():
            process.send_signal(signal.SIGINT)
    except SystemExit as ended:  # a signal, see paceline.cli.console
        process.send_signal(int(ended.code or 0) - SIGNAL_BASE)
    return _exit_status(process), True


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a command, which runs as long as the user lets it.

    It waits in short parts: the handler that Polars installs for SIGINT restarts system calls, so
    an interrupt would be noticed only after a long one.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_POLL_S)


def _has_terminal() -> bool:
    """Return whether a terminal has sent the interrupt, to all processes in its foreground."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def _is_usable(files: TrialFiles, code: int, *, is_interrupted: bool) -> bool:
    """Return whether the records are those of a whole training.

    One that the user has interrupted can be used if rank 0 has come to its end.
    """
    return code == ExitCode.OK or (is_interrupted and files.result.exists())


def _manifest(name: str, files: TrialFiles) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": name,
        "description": "a command with its own launcher",
        "trials": [files.root.name],
        "data": {},
        **provenance(),
    }
