"""`paceline init` and `paceline show` give the user a spec to edit."""

from __future__ import annotations

from paceline.base.errors import ExitCode
from paceline.cli import main
from paceline.plan.spec.loading import load_spec, shipped_experiments
from paceline.runner.trials.planning import plan


def test_written_spec_can_be_planned_and_is_never_overwritten(
    tmp_path, monkeypatch, capsys, output
):
    monkeypatch.chdir(tmp_path)
    assert "paceline run experiment.toml" in output("init")
    trials = plan(load_spec("experiment.toml")).trials
    assert {trial.launcher for trial in trials} == {"local", "torchrun", "mpi"}

    written = (tmp_path / "experiment.toml").read_text("utf-8")
    assert main(["init", "experiment.toml"]) == ExitCode.USAGE
    assert "expected a new file" in capsys.readouterr().err
    assert (tmp_path / "experiment.toml").read_text("utf-8") == written


def test_file_that_cannot_be_written_is_wrong_usage(tmp_path, capsys):
    assert main(["init", str(tmp_path / "none" / "a.toml")]) == ExitCode.USAGE
    assert "expected a file that can be written" in capsys.readouterr().err


def test_shipped_experiment_is_printed_as_it_is(output):
    assert output("show", "quickstart") == shipped_experiments()["quickstart"]
