"""`paceline run SCRIPT.py`: options become a spec, and mistakes a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from paceline.base.errors import UsageError
from paceline.cli import main
from paceline.cli.experiment import ExperimentCommand, ExperimentRequest, takes_experiment
from paceline.plan.spec.loading import Spec
from paceline.plan.trials.planning import plan_trials


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", "utf-8")


def parsed(*words: str) -> ExperimentRequest:
    """Parse as `paceline run` does."""
    found: list[ExperimentRequest] = []

    @click.command(cls=ExperimentCommand)
    @takes_experiment
    @click.option("--out")
    def command(request: ExperimentRequest, out: str | None) -> None:
        del out
        found.append(request)

    command.main(list(words), standalone_mode=False)
    return found[0]


def loaded(*words: str) -> Spec:
    return parsed(*words).load()


def pairs(*words: str) -> list[tuple[Any, ...]]:
    trials = loaded(*words).experiment.trials
    return [(t.launcher, t.transport, t.local_strategy, t.ranks_per_node) for t in trials]


def test_the_default_is_baseline_all_threads_and_torchrun():
    assert [pair[:3] for pair in pairs("train.py")] == [
        ("local", None, "sequential"),
        ("local", None, "intraop"),
        ("torchrun", "gloo", "processes"),
    ]


@pytest.mark.parametrize("ranks", ["--ranks", "--nproc-per-node"])
def test_impossible_pairs_are_left_out(ranks):
    found = pairs("--launcher", "torchrun,mpi,spark", "--transport", "gloo,mpi",
                  "--local-strategy", "processes", ranks, "2", "train.py")  # fmt: skip
    assert found == [
        ("local", None, "sequential", "auto"),
        ("torchrun", "gloo", "processes", 2),
        ("mpi", "gloo", "processes", 2),
        ("spark", "gloo", "processes", 2),
        ("mpi", "mpi", "processes", 2),
        ("spark", "mpi", "processes", 2),
    ]


@pytest.mark.parametrize(
    "arguments",
    [["--out", "x"], ["--help"], ["--lr", "0.1", "a", "--max-steps=3"], ["--", "-x"], []],
)
def test_words_after_the_script_are_its_own(arguments):
    (workload,) = loaded("--max-steps", "5", "train.py", *arguments).experiment.workloads
    assert (workload.script, list(workload.arguments)) == ("train.py", arguments)
    assert workload.max_steps == 5


def test_a_module_is_named_as_for_python_m(tmp_path):
    package = tmp_path / "own_package"
    (package / "part").mkdir(parents=True)
    for file in ("__init__.py", "train.py", "part/__init__.py", "part/__main__.py"):
        (package / file).write_text("raise RuntimeError('imported')", "utf-8")
    for name, file in (("own_package.train", "train.py"), ("own_package.part", "part/__main__.py")):
        experiment = loaded("--ranks", "2", "-m", name, "--lr", "0.1", "-m").experiment
        (workload,) = experiment.workloads
        assert workload.arguments == ("--lr", "0.1", "-m")
        assert workload.name == name.replace(".", "-")
        script = plan_trials(experiment, {}, 2)[0].training.script
        assert script is not None
        assert (script.path, script.module) == (str(package / file), name)


def test_a_module_that_is_missing_is_refused():
    with pytest.raises(UsageError, match=r"-m own_package\.none: expected a module with a Python"):
        loaded("-m", "own_package.none")


def test_options_may_stand_on_both_sides_of_a_spec():
    request = parsed("--repeats", "2", "quickstart", "--only", "*.mpi.*,*.spark.*", "--out", "x")
    assert (request.spec, request.only) == ("quickstart", ("*.mpi.*", "*.spark.*"))
    experiment = request.load().experiment
    assert (experiment.repeats, experiment.only) == (2, ("*.mpi.*", "*.spark.*"))
    assert experiment.name == "quickstart"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "none.py: expected a Python file, found none"),
        (["a.toml", "--ranks", "2"], "--ranks: expected only with a script"),
        ([], "expected SPEC (a TOML file"),
    ],
)
def test_wrong_use_is_one_message(words, message):
    with pytest.raises((UsageError, click.UsageError)) as caught:
        loaded(*words)
    assert message in str(caught.value)


def test_spec_has_no_arguments(capsys):
    assert main(["run", "quickstart", "--epochs", "3"]) == 2
    assert "No such option '--epochs'" in capsys.readouterr().err
    assert main(["run", "quickstart", "more"]) == 2
    assert "only a script (FILE.py) has arguments" in capsys.readouterr().err


def test_plan_takes_a_script_too(capsys):
    assert main(["plan", "--commands", "train.py", "--lr", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "torchrun" in shown
    assert not Path("runs").exists()
