"""`paceline run` and its relatives: exit codes, messages and progress of failed trials."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
from tests.support.rows import ENDED_WELL
from tests.unit.analysis import fabricate

from paceline.base.errors import ExitCode, PacelineWarning
from paceline.base.host.own_runs import remember_run
from paceline.cli import main
from paceline.cli.progress import ConsoleProgress
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import Spec, shipped_experiments
from paceline.runner.trials import experiment

FAILED = dataclasses.replace(
    ENDED_WELL, trial_id="tiny.x.r0", status="timed_out", exit_code=ExitCode.TIMED_OUT,
    ended_unix_s=2.5, launcher_exit_status=None,
    message="trial tiny.x.r0: not done within its limit\nthe last lines of its log",
)  # fmt: skip


def test_run_without_a_finished_trial_ends_with_the_reasons(monkeypatch, tmp_path, capsys) -> None:
    for _, files in fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI]).trials():
        fabricate.edit_json(files.outcome, status="failed")
    other = dataclasses.replace(FAILED, trial_id="tiny.y.r0", message="trial tiny.y.r0: broken")
    monkeypatch.setattr(experiment, "run", lambda *_, **__: [FAILED, other])
    assert main(["run", "quickstart", "--out", str(tmp_path)]) == ExitCode.TIMED_OUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.lstrip().startswith(
        "paceline: 2 trials failed:\n  - trial tiny.x.r0: not done within"
    )
    assert "  - trial tiny.y.r0: broken\n" in shown.err


def test_run_with_some_failed_trials_shows_the_table_and_then_the_reason(
    monkeypatch, tmp_path, capsys
) -> None:
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    monkeypatch.setattr(experiment, "run", lambda *_, **__: [FAILED])
    assert main(["run", "quickstart", "--out", str(tmp_path)]) == ExitCode.TIMED_OUT
    shown = capsys.readouterr()
    assert "The fastest is " in shown.out
    assert f"report: {tmp_path / 'report.html'}" in shown.out
    assert shown.err.lstrip().startswith(
        "paceline: trial tiny.x.r0: not done within its limit\nthe last"
    )


@pytest.mark.parametrize(("failed", "code"), [([], ExitCode.OK), ([FAILED], ExitCode.TIMED_OUT)])
def test_reader_that_has_ended_changes_neither_the_run_nor_its_exit_code(
    monkeypatch, tmp_path, failed, code
) -> None:
    """As in `paceline run … 2>&1 | head -1`."""
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])

    def run(*_: object, progress: ConsoleProgress, **__: object) -> list[Outcome]:
        progress.stage("making the data set")
        warnings.warn("a warning", PacelineWarning, stacklevel=1)
        return failed

    monkeypatch.setattr(experiment, "run", run)
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
    [([], None), (["-x"], False), (["--exit-first"], False)],
)
def test_user_decides_whether_a_run_goes_on(monkeypatch, tmp_path, options, expected) -> None:
    asked = []

    def run(*_: object, keep_going: bool | None, **__: object) -> list[Outcome]:
        asked.append(keep_going)
        return [FAILED]

    monkeypatch.setattr(experiment, "run", run)
    main(["run", "quickstart", "--out", str(tmp_path), *options])
    assert asked == [expected]


def test_reason_of_a_failed_trial_follows_its_line(capsys) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    with ConsoleProgress() as progress:
        progress.trial_ended(trial, FAILED)
    lines = capsys.readouterr().err.rstrip().splitlines()
    assert lines == ["  timed_out  2.5 s", "  trial tiny.x.r0: not done within its limit"]


def test_jobs_of_a_scheduler_are_all_repeats_of_an_automatic_run(tmp_path, capsys) -> None:
    words = ["render", "slurm", "quickstart", "--out", str(tmp_path / "out"), "--cores", "2"]
    assert main(words) == ExitCode.OK
    assert "so all 5 repeats are written" in capsys.readouterr().err
    [job] = (tmp_path / "out").glob("*.sequential.*.sbatch")
    assert "--array=0,1,2,3,4%1" in job.read_text()


def with_five_repeats(spec: str) -> str:
    spec = re.sub(r"^(max_repeats|tie_margin) = .*\n", "", spec, flags=re.MULTILINE)
    return spec.replace('repeats = "auto"', "repeats = 5")


def test_text_that_is_no_option_of_slurm_is_refused(tmp_path: Path, capsys) -> None:
    words = ["render", "slurm", "quickstart", "--out", str(tmp_path / "out"), "--cores", "2"]
    assert main([*words, "--sbatch", "--account=mine\n#SBATCH --x"]) == ExitCode.USAGE
    assert "expected an option of Slurm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_dry_run_shows_the_trials_and_runs_nothing(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "run", pytest.fail)
    assert main(["run", "quickstart", "--dry-run", "--only", "*.mpi.mpi.*"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "mpi.mpi.processes" in shown
    assert "mpirun" not in shown
    assert main(["plan", "quickstart", "--commands", "--only", "*.mpi.mpi.*"]) == ExitCode.OK
    assert "mpi-jobs/train.py" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_result_as_json(monkeypatch, tmp_path, capsys) -> None:
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    monkeypatch.setattr(experiment, "run", lambda *_, **__: [])
    assert main(["run", "quickstart", "--json", "--out", str(tmp_path)]) == ExitCode.OK
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["rows"]) == 2
    assert "report: " in shown.err


def interrupted_run(run_dir: Path) -> None:
    """Make a run of which two of three trials are done."""
    run = fabricate.make_run(run_dir, [fabricate.SEQUENTIAL, fabricate.MPI])
    done = [trial_id for trial_id, _ in run.trials()]
    text = with_five_repeats(shipped_experiments()["quickstart"])
    write_json(run.manifest, {"spec_toml": text, "trials": [*done, "tiny.x.r0"]})
    remember_run(run_dir)


def test_run_goes_on_with_the_spec_of_its_directory(monkeypatch, tmp_path) -> None:
    interrupted_run(tmp_path)
    asked = []

    def run(spec: Spec, run_dir: Path, *, resume: bool, **_: object) -> list[Outcome]:
        asked.append((spec.experiment.name, run_dir, resume))
        return []

    monkeypatch.setattr(experiment, "run", run)
    assert main(["run", "--resume", str(tmp_path)]) == ExitCode.OK
    assert asked == [("quickstart", tmp_path, True)]


@pytest.mark.parametrize(
    "words", [["quickstart"], ["--out", "x"], ["--only", "*"], ["--set", "seed=2"]]
)
def test_resumed_run_takes_no_other_spec(tmp_path, capsys, words) -> None:
    interrupted_run(tmp_path)
    assert main(["run", "--resume", str(tmp_path), *words]) == ExitCode.USAGE
    assert "the run directory holds its spec" in capsys.readouterr().err


def test_resumed_run_gets_further_repeats(monkeypatch, tmp_path, capsys) -> None:
    interrupted_run(tmp_path)
    asked: list[tuple[object, bool]] = []

    def run(spec: Spec, _: Path, *, resume: bool, **__: object) -> list[Outcome]:
        asked.append((spec.experiment.repeats, resume))
        return []

    monkeypatch.setattr(experiment, "run", run)
    words = ["run", "--resume", str(tmp_path), "--repeats"]
    assert main([*words, "7"]) == ExitCode.OK
    assert asked == [(7, True)]
    capsys.readouterr()
    assert main([*words, "7", "--dry-run", "--json"]) == ExitCode.OK
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert max(trial["repeat"] for trial in trials) == 6
    assert main([*words, "4"]) == ExitCode.USAGE
    assert "more repeats than the 5 of this run, got 4" in capsys.readouterr().err
    assert main([*words, "auto"]) == ExitCode.USAGE
    assert "--repeats auto: expected a number with --resume" in capsys.readouterr().err
    assert main([*words, "999"]) == ExitCode.USAGE
    assert "repeats" in capsys.readouterr().err
    assert asked == [(7, True)]


def test_resumed_run_gets_a_further_configuration(monkeypatch, tmp_path, capsys) -> None:
    interrupted_run(tmp_path)
    asked: list[tuple[str, bool]] = []

    def run(spec: Spec, _: Path, *, resume: bool, **__: object) -> list[Outcome]:
        asked.append((spec.experiment.trials[-1].local_strategy, resume))
        return []

    monkeypatch.setattr(experiment, "run", run)
    words = ["run", "--resume", str(tmp_path), "--add"]
    keys = 'launcher="local", local_strategy="sharded", ranks_per_node=2, oversubscribe=true'
    assert main([*words, keys]) == ExitCode.OK
    assert asked == [("sharded", True)]
    capsys.readouterr()
    assert main([*words, keys, "--dry-run", "--json"]) == ExitCode.OK
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert any(".sharded." in trial["id"] for trial in trials)
    assert main(["run", "quickstart", "--add", keys]) == ExitCode.USAGE
    assert "--add: expected --resume beside it" in capsys.readouterr().err


def test_the_same_number_of_repeats_completes_a_run_only(monkeypatch, tmp_path, capsys) -> None:
    interrupted_run(tmp_path)
    monkeypatch.setattr(experiment, "run", lambda *_, **__: [])
    words = ["run", "--resume", str(tmp_path), "--repeats", "5"]
    assert main(words) == ExitCode.OK
    done = [trial_id for trial_id, _ in RunFiles(tmp_path).trials()]
    fabricate.edit_json(RunFiles(tmp_path).manifest, trials=done)
    assert main(words) == ExitCode.USAGE
    assert "more repeats than the 5 of this run, got 5" in capsys.readouterr().err


def test_directory_without_a_spec_cannot_be_resumed(tmp_path, capsys) -> None:
    assert main(["run", "--resume", str(tmp_path)]) == ExitCode.USAGE
    assert "expected a run to resume" in capsys.readouterr().err


def test_interruption_says_how_to_go_on(monkeypatch, tmp_path, capsys) -> None:
    def run(*_: object, **__: object) -> list[Outcome]:
        interrupted_run(tmp_path / "a run")
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run", run)
    out = str(tmp_path / "a run")
    assert main(["run", "quickstart", "--out", out]) == ExitCode.INTERRUPTED
    said = capsys.readouterr().err
    continued = f"2 of 3 trials done. Continue with: paceline run --resume '{out}'\n"
    assert f"paceline: interrupted\n{continued}" in said
    assert re.search(rf"\nOn disk: \d\.\d MB\. To remove it: rm -r '{out}'\n$", said)


def test_quiet_progress_shows_failed_trials_only(capsys) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    with ConsoleProgress(quiet=True) as progress:
        progress.stage("data set for tiny")
        progress.trial_ended(trial, dataclasses.replace(FAILED, status="ok", message=""))
        assert capsys.readouterr().err == ""
        progress.trial_ended(trial, FAILED)
    assert "not done within its limit" in capsys.readouterr().err


def test_verbose_progress_shows_the_log_of_a_trial(tmp_path, capsys) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    with ConsoleProgress(verbose=True) as progress:
        progress.trial_started(trial, RunFiles(tmp_path).trial(trial.id), 1, 2)
        progress.trial_ended(trial, FAILED)
    assert f"log: {tmp_path}/trials/{trial.id}/launcher.log" in capsys.readouterr().err
