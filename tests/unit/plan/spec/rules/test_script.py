"""Specs with a script: its name, and what a script decides itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import check_spec
from paceline.plan.spec.models import name_of_script
from paceline.plan.trials.planning import plan_trials

SPEC: dict[str, Any] = {
    "schema": 2,
    "name": "own",
    "workloads": [{"script": "my train.py", "arguments": ["--lr", "1"], "max_steps": 9}],
    "trials": [
        {"launcher": "local", "local_strategy": "sequential"},
        {"launcher": "mpi", "local_strategy": "processes", "transport": "mpi", "ranks_per_node": 2},
    ],
}  # fmt: skip


def changed(table: str, number: int, **values: Any) -> dict[str, Any]:
    spec = copy.deepcopy(SPEC)
    spec[table][number] |= values
    return spec


def faults(spec: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        check_spec(spec, "spec")
    return str(caught.value)


def test_a_script_is_named_by_its_file_and_runs_where_it_was_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trials = plan_trials(check_spec(SPEC, "spec"), {}, 4)
    assert {t.configuration for t in trials} == {
        "my-train.local.none.sequential.n1r1t1.fp32",
        "my-train.mpi.mpi.processes.n1r2t1.fp32",
    }
    script = trials[0].training.script
    assert script is not None
    assert (script.path, script.arguments) == (str(tmp_path / "my train.py"), ("--lr", "1"))
    assert script.directory == str(tmp_path)
    training = trials[0].training
    assert training.max_steps == 9
    # what only a built-in training has
    assert training.image_size == training.global_batch == training.learning_rate == 0


@pytest.mark.parametrize(
    ("key", "value"), [("global_batch", 4), ("learning_rate", 0.1), ("precision", "bf16")]
)
def test_what_a_script_decides_is_refused(key, value):
    assert f"workloads[1].{key}: a script decides this itself; remove it" in faults(
        changed("workloads", 0, **{key: value})
    )
    assert f"training.{key}: a script decides this itself" in faults(
        {**SPEC, "training": {key: value}}
    )


def test_keys_of_a_trial_that_a_script_decides_are_refused():
    assert "trials[2]: workload my-train: bucket_mb: a script decides this itself" in faults(
        changed("trials", 1, bucket_mb=4.0)
    )
    assert "precision: a script decides this itself" in faults(
        changed("trials", 1, precision="bf16")
    )


def test_a_strategy_with_several_models_in_a_process_is_refused():
    message = faults(
        changed("trials", 1, launcher="local", local_strategy="threads", transport=None)
        | {"trials": [SPEC["trials"][0], {"launcher": "local", "local_strategy": "threads"}]}
    )
    assert (
        'local_strategy: a script has one model per process; use "sequential", "intraop" or '
        '"processes", got "threads"' in message
    )


def test_memory_of_the_node_is_no_process_group():
    spec = changed("trials", 1, launcher="local")
    del spec["trials"][1]["transport"]
    assert (
        'transport: a script needs a process group; use "gloo", "paceline", "mpi" or "nccl", '
        'got "shared"' in faults(spec)
    )


def test_a_name_of_a_built_in_workload_is_refused():
    assert 'workloads[1].name: "tiny" is a built-in workload' in faults(
        changed("workloads", 0, name="tiny")
    )


@pytest.mark.parametrize(
    ("path", "name"), [("a/_1 b.py", "1-b"), ("-.py", "script"), (f"{'n' * 70}.py", "n" * 64)]
)
def test_name_of_a_script_is_one_that_a_workload_may_have(path, name):
    assert name_of_script(path) == name


def test_arguments_need_a_script():
    spec = {**SPEC, "workloads": [{"name": "tiny", "arguments": ["x"]}]}
    assert "workloads[1].arguments: belongs to a script" in faults(spec)


def test_options_of_our_own_training_do_not_name_a_script_on_several_nodes():
    spec = changed("trials", 1, nodes=2) | {"network": {"interface": "eth0"}}
    names = {trial.configuration for trial in plan_trials(check_spec(spec, "spec"), {}, 4)}
    assert "my-train.mpi.mpi.processes.n2r2t1.fp32" in names


def test_what_paceline_sets_and_searches_for_is_refused():
    message = faults(changed("trials", 1, environment={"OMP_NUM_THREADS": "2", "MODE": "x"}))
    assert "1 fault" in message
    assert "environment.OMP_NUM_THREADS: Paceline sets it; use threads_per_rank" in message
    assert "tune: searches are for built-in workloads, got a script" in faults({**SPEC, "tune": {}})
