"""Selection of trials by shell patterns."""

from __future__ import annotations

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import load_spec, parse_spec
from paceline.plan.trials.planning import (
    plan_trials,
    selected_trials,
    without_lone_baselines,
)


@pytest.fixture(scope="module")
def trials():
    return plan_trials(load_spec("quickstart").experiment, {"tiny": "/data"}, 2)


def test_without_a_pattern_everything_runs(trials):
    assert selected_trials(trials, ()) == trials


def test_baseline_is_kept_and_the_order_stays(trials):
    found = selected_trials(trials, ["*.mpi.gloo.*", "tiny.spark.*"])
    assert {trial.launcher for trial in found} == {"local", "mpi", "spark"}
    assert [trial for trial in trials if trial in found] == found
    assert len(found) == 3 * 5
    assert all(trial.is_baseline for trial in found if trial.launcher == "local")


def test_only_baselines_of_the_selected_precisions_are_kept(tmp_path):
    path = tmp_path / "precisions.toml"
    half = 'launcher = "local"\nlocal_strategy = "sequential"\nprecision = "fp16"\n'
    path.write_text(f"{load_spec('quickstart').text}\n[[trials]]\n{half}")
    both = plan_trials(load_spec(str(path)).experiment, {"tiny": "/data"}, 2)

    def baselines(pattern):
        found = selected_trials(both, [pattern])
        return {trial.training.precision for trial in found if trial.is_baseline}

    assert baselines("*.mpi.*") == {"fp32"}
    assert baselines("*.fp16*") == {"fp32", "fp16"}


def test_id_selects_one_repeat(trials):
    chosen = next(trial.id for trial in trials if trial.launcher == "spark" and trial.repeat == 1)
    found = selected_trials(trials, [chosen])
    assert [trial.id for trial in found if not trial.is_baseline] == [chosen]


def test_pattern_without_a_match_lists_the_names(trials):
    with pytest.raises(UsageError) as raised:
        selected_trials(trials, ["*.mpi.*", "mpi"])
    message = str(raised.value)
    example = "expected shell patterns (*, ?, [...]), for example '*mpi*', of these names:"
    assert f"no configuration matches 'mpi'; {example}" in message
    assert message.count("\n  - tiny.") == 9


def test_workload_without_a_selected_trial_is_left_out(tmp_path):
    path = tmp_path / "two.toml"
    text = load_spec("quickstart").text
    path.write_text(text + '\n[[workloads]]\nname = "simple-big"\nsamples = 192\n')
    experiment = load_spec(str(path)).experiment
    both = plan_trials(experiment, {"tiny": "/a", "simple-big": "/b"}, 2)
    found = selected_trials(both, ["simple-big.spark.*"])
    assert {trial.training.workload for trial in found} == {"simple-big"}
    assert {trial.launcher for trial in found} == {"local", "spark"}


def test_chosen_baseline_is_kept_unless_one_of_its_configurations_is_selected(trials):
    found = selected_trials(trials, ["tiny.spark.*"], "*.local.shared.*")
    assert {trial.local_strategy for trial in found} > {"pipeline", "sequential"}
    found = selected_trials(trials, ["tiny.spark.*"], "*")
    assert {trial.local_strategy for trial in found} == {"processes", "sequential"}
    assert {trial.launcher for trial in found} == {"local", "spark"}


def test_baseline_that_does_not_exist_is_refused(trials):
    no_example = r"baseline: no configuration matches 'x'.*\) of these names"
    with pytest.raises(UsageError, match=no_example):
        selected_trials(trials, (), "x")


@pytest.fixture
def scaled():
    workers = 'launcher = "local"; local_strategy = "processes"; ranks_per_node = '
    half = 'launcher = "local"; local_strategy = "sequential"; precision = "bf16"'
    keys = "[training]; max_steps = 8; batch_per_replica = 8"
    text = spec_text(f"{workers}2", f"{workers}4", half, tables=keys, repeats=1)
    return plan_trials(parse_spec(text, "test"), {"tiny": "/data"}, 4)


def test_baseline_of_one_replica_is_kept_with_a_batch_for_each_replica(scaled):
    found = {trial.configuration for trial in selected_trials(scaled, ["*.n1r4*"])}
    assert found == {
        "tiny-batch8.local.none.sequential.n1r1t1.fp32",
        "tiny-batch32.local.none.sequential.n1r1t1.fp32",
        "tiny-batch32.local.shared.processes.n1r4t1.fp32",
    }


def test_baseline_of_a_batch_that_no_other_trial_has_is_left_out(scaled, trials):
    fitting = [trial for trial in scaled if trial.placement.ranks < 4]
    found = without_lone_baselines(fitting)
    assert {trial.training.global_batch for trial in found} == {8, 16}
    assert [trial for trial in fitting if trial.training.global_batch != 32] == found
    baselines = [trial for trial in trials if trial.is_baseline]
    assert without_lone_baselines(baselines) == baselines
