"""Ways to compute and failures that a trial may choose: what is planned, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import check_spec
from paceline.plan.spec.values import FailureSettings
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.rules import failure_faults, failure_kinds
from paceline.runner.launchers.descriptors import SparkOptions

PROCESSES = {"launcher": "local", "local_strategy": "processes", "ranks_per_node": 2}
THREADS = {"launcher": "local", "local_strategy": "threads", "replicas": 2}
SHARDED = {"launcher": "local", "local_strategy": "sharded", "ranks_per_node": 2}
PIPELINE = {
    "launcher": "local", "local_strategy": "pipeline", "stages": 2, "oversubscribe": True,
}  # fmt: skip


def planned(trial: dict[str, Any], workload: str = "tiny", **training: Any):
    document = {
        "schema": 2,
        "name": "ways",
        "training": {"max_steps": 4, "global_batch": 8, **training},
        "workloads": [{"name": workload}],
        "trials": [{"launcher": "local", "local_strategy": "sequential"}, trial],
    }
    trials = plan_trials(check_spec(document, "spec"), {workload: "/d"}, 4)
    return next(t for t in trials if len(t.labels) or not t.is_baseline)


def test_each_way_has_a_name_and_a_label():
    ways = {"compile": True, "accumulation_steps": 4, "float32_matmul_precision": "high"}
    trial = planned({**PROCESSES, **ways})
    assert trial.configuration.endswith(".fp32.accumulate4.compiled.matmul-high")
    assert trial.labels == ["accumulate 4", "compiled", "matmul high"]
    assert trial.training.arithmetic == "fp32 high"


@pytest.mark.parametrize("trial", [PROCESSES, SHARDED])
def test_fp16_is_planned_where_all_updates_use_one_scale(trial):
    assert planned({**trial, "precision": "fp16"}).training.arithmetic == "fp16"


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        ({**THREADS, "compile": True}, 'compile: "threads" calls or changes parts'),
        ({**PIPELINE, "compile": True}, 'compile: "pipeline" calls or changes parts'),
        (
            {**PROCESSES, "compile": True, "activation_checkpointing": True},
            "compile: activation_checkpointing computes blocks again",
        ),
        ({**THREADS, "precision": "fp16"}, 'but the trial is "threads"'),
        (
            {**PROCESSES, "transport": "gloo", "precision": "fp16", "averaging_period_steps": 4},
            "but the trial averages weights",
        ),
        (
            {**PROCESSES, "transport": "gloo", "precision": "fp16", "compression": "topk"},
            "compression: keeps the errors of earlier gradients",
        ),
        (
            {**PROCESSES, "precision": "bf16", "float32_matmul_precision": "high"},
            "float32_matmul_precision: applies to matrix products of float32",
        ),
        (
            {**PIPELINE, "accumulation_steps": 2},
            'accumulation_steps: "pipeline" divides the samples by micro_batches',
        ),
        ({**SHARDED, "compile": True}, 'compile: "sharded" calls or changes parts'),
        (
            {**SHARDED, "accumulation_steps": 2},
            'all ranks of "sharded" take part in each pass of one, expected 1, got 2',
        ),
        (
            {**PROCESSES, "accumulation_steps": 5},
            "a replica has 4 sample(s) of a step, expected at most as many parts, got 5",
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(trial, message):
    with pytest.raises(UsageError, match="cannot be planned") as caught:
        planned(trial)
    assert message in str(caught.value)


def test_autotuned_trial_on_a_gpu_has_a_name_and_a_label():
    sequential = {"launcher": "local", "local_strategy": "sequential"}
    trial = planned({**sequential, "device": "cuda", "cudnn_autotuning": True})
    assert trial.configuration.endswith(".fp32.cuda.autotuned")
    assert trial.labels == ["cuDNN autotuned"]


def test_kernels_of_a_gpu_cannot_be_chosen_on_the_cpu():
    with pytest.raises(UsageError, match=r'cudnn_autotuning: .*expected device = "cuda"'):
        planned({**PROCESSES, "cudnn_autotuning": True})


def test_ranks_without_room_for_the_whole_model_cannot_evaluate():
    with pytest.raises(UsageError) as caught:
        planned(SHARDED, held_out_samples=4)
    assert 'evaluations need the whole model on each rank, and "sharded" has no room' in str(
        caught.value
    )


def test_batch_normalisation_cannot_be_accumulated():
    with pytest.raises(UsageError) as caught:
        planned({**PROCESSES, "accumulation_steps": 2}, workload="resnet101")
    assert "normalises over the whole batch, so it cannot be divided" in str(caught.value)


def with_master(trial, master):
    """Return the trial under Spark."""
    options = SparkOptions(master=master)
    return trial.model_copy(update={"launcher": "spark", "launcher_options": options})


@pytest.mark.parametrize(
    ("master", "nodes", "kinds"),
    [
        (None, 1, {"rank"}),
        ("local[2]", 1, {"rank"}),
        ("local-cluster[2,1,512]", 1, {"rank", "executor"}),
        ("spark://10.77.0.1:7077", 2, {"rank", "executor", "host"}),
    ],
)
def test_kinds_of_failures_that_a_trial_can_have(make_trial, master, nodes, kinds):
    assert (
        failure_kinds(with_kinds(with_master(make_trial(), master), "rank", nodes=nodes)) == kinds
    )


def with_kinds(trial, *kinds, nodes=1):
    place = trial.placement.model_copy(update={"nodes": nodes})
    failures = FailureSettings(mean_s=1.0, kinds=kinds)
    return trial.model_copy(update={"failures": failures, "placement": place})


def test_failure_that_no_trial_can_have_is_refused(make_trial):
    assert not list(failure_faults([make_trial(), with_kinds(make_trial(), "rank")]))
    [fault] = failure_faults([with_kinds(make_trial(), "host", "rank", "executor")])
    assert "no trial can have failures of kind executor, host" in fault
