"""`paceline run` and its relatives: exit codes, messages and progress of failed trials."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from paceline import runner
from paceline.cli import main
from paceline.cli.progress import ConsoleProgress
from paceline.errors import ExitCode, PacelineWarning
from paceline.records.rows import SCHEMA, Outcome

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

FAILED = Outcome(
    schema=SCHEMA,
    trial_id="tiny.x.r0",
    status="timed_out",
    exit_code=ExitCode.TIMED_OUT,
    launched_unix_s=0.0,
    ended_unix_s=2.5,
    launcher_exit_status=None,
    failed_rank=None,
    message="trial tiny.x.r0: not done within its limit\nthe last lines of its log",
)


def test_run_without_a_finished_trial_ends_with_the_reasons(
    fabricate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _, files in fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI]).trials():
        fabricate.edit_json(files.outcome, status="failed")
    other = dataclasses.replace(FAILED, trial_id="tiny.y.r0", message="trial tiny.y.r0: broken")
    monkeypatch.setattr(runner, "run", lambda *_, **__: [FAILED, other])
    assert main(["run", "quickstart", "--out", str(tmp_path)]) == ExitCode.TIMED_OUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.lstrip().startswith(
        "paceline: 2 trials failed:\n  - trial tiny.x.r0: not done within"
    )
    assert "  - trial tiny.y.r0: broken\n" in shown.err


def test_run_with_some_failed_trials_shows_the_table_and_then_the_reason(
    fabricate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    monkeypatch.setattr(runner, "run", lambda *_, **__: [FAILED])
    assert main(["run", "quickstart", "--out", str(tmp_path)]) == ExitCode.TIMED_OUT
    shown = capsys.readouterr()
    assert "is fastest" in shown.out
    assert f"report: {tmp_path / 'report.html'}" in shown.out
    assert shown.err.lstrip().startswith(
        "paceline: trial tiny.x.r0: not done within its limit\nthe last"
    )


@pytest.mark.parametrize(("failed", "code"), [([], ExitCode.OK), ([FAILED], ExitCode.TIMED_OUT)])
def test_reader_that_has_ended_changes_neither_the_run_nor_its_exit_code(
    fabricate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failed: list[Outcome],
    code: ExitCode,
) -> None:
    """As in `paceline run … 2>&1 | head -1`."""
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])

    def run(*_: object, progress: ConsoleProgress, **__: object) -> list[Outcome]:
        progress.stage("making the data set")
        warnings.warn("a warning", PacelineWarning, stacklevel=1)
        return failed

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    reading, writing = os.pipe()
    os.close(reading)  # from now on, whoever writes gets EPIPE
    with os.fdopen(writing, "w") as out, os.fdopen(os.dup(writing), "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            assert main(["run", "quickstart", "--out", str(tmp_path)]) == code
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "comparison.json").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], None), (["--keep-going"], True), (["--no-keep-going"], False)],
)
def test_user_decides_whether_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    expected: bool | None,
) -> None:
    asked = []

    def run(*_: object, keep_going: bool | None, **__: object) -> list[Outcome]:
        asked.append(keep_going)
        return [FAILED]

    monkeypatch.setattr(runner, "run", run)
    main(["run", "quickstart", "--out", str(tmp_path), *options])
    assert asked == [expected]


def test_reason_of_a_failed_trial_follows_its_line(
    fabricate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    with ConsoleProgress() as progress:
        progress.trial_ended(trial, FAILED)
    lines = capsys.readouterr().err.rstrip().splitlines()
    assert lines == ["  timed_out  2.5 s", "  trial tiny.x.r0: not done within its limit"]


def test_jobs_of_a_scheduler_need_a_number_of_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "auto.toml"
    spec.write_text(
        'schema = 2\nname = "auto"\nrepeats = "auto"\n[[workloads]]\nname = "tiny"\n'
        '[[trials]]\nlauncher = "local"\nlocal_strategy = "sequential"\n'
    )
    assert main(["render", "slurm", str(spec), "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    assert 'repeats = "auto" needs `paceline run`' in capsys.readouterr().err
