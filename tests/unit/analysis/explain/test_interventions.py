"""Each removable cause has a change that removes it, and the result decides by stated limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.ways import INTRAOP, MPI, PIPELINE, SEQUENTIAL, THREADS, Way

from paceline.analysis.explain import interventions
from paceline.analysis.explain.interventions import Intervention, judge
from paceline.plan.trial import Trial


def trial_of(way: Way, **training: Any) -> Trial:
    trial = fabricate.make_trial_value(way)
    changed = trial.training.model_copy(update=training)
    return trial.model_copy(update={"training": changed})


def test_data_come_from_memory_unless_they_do_already() -> None:
    streaming, remembering = (trial_of(SEQUENTIAL, reading=r) for r in ("stream", "memory"))
    change = interventions.data_from_memory(streaming, streaming, 1)
    assert change.trial == remembering
    assert change.removes == 1.0
    assert interventions.data_from_memory(streaming, remembering, 1) is None


def test_threads_are_those_of_the_cores_or_of_the_faster() -> None:
    eight = trial_of(dataclasses.replace(INTRAOP, threads=8, allocated_cores=2))
    change = interventions.threads_for_the_cores(eight, eight, 2)
    assert change.trial.placement.threads_per_rank == 2
    assert change.label == "2 threads within an operation instead of 8"
    assert interventions.threads_for_the_cores(eight, trial_of(INTRAOP), 2) is None
    change = interventions.threads_of_the_faster(trial_of(SEQUENTIAL), trial_of(INTRAOP), 2)
    assert change.trial.placement.threads_per_rank == 1


def test_replicas_of_a_rank_share_its_cores() -> None:
    many = trial_of(dataclasses.replace(THREADS, threads=16, allocated_cores=4))
    change = interventions.threads_for_the_cores(many, many, 4)
    assert change.trial.placement.threads_per_worker == 2
    assert change.trial.placement.threads_per_rank == 4
    assert change.label == "2 threads within an operation instead of 8"


def test_the_bubble_is_halved_where_the_batch_suffices() -> None:
    way = dataclasses.replace(PIPELINE, micro_batches=2)
    trial = trial_of(way, global_batch=8)
    change = interventions.more_micro_batches(trial, trial, 2)
    assert change.trial.option("micro_batches") == 4
    assert change.removes == 0.5
    short = trial_of(way, global_batch=3)
    assert interventions.more_micro_batches(short, short, 2) is None
    assert interventions.more_micro_batches(trial_of(MPI), trial_of(MPI), 2) is None


def test_statistics_stay_in_the_replica_and_gradients_are_halved() -> None:
    trial = trial_of(MPI)
    change = interventions.statistics_per_replica(trial, trial, 2)
    assert change.trial.training.batch_norm == "per-replica"
    sharded = trial.model_copy(update={"local_strategy": "sharded"})
    assert interventions.statistics_per_replica(sharded, sharded, 2) is None
    change = interventions.half_the_bytes(trial, trial, 2)
    assert str(change.trial.option("compression")) == "bf16"
    assert interventions.half_the_bytes(trial, change.trial, 2) is None
    alone = trial_of(SEQUENTIAL)  # its transport has no compression
    assert interventions.half_the_bytes(alone, alone, 1) is None


@pytest.mark.parametrize(
    ("unchanged_s", "changed_s", "answer"),
    [
        ((0.20, 0.21, 0.19), (0.10, 0.11, 0.09), "supported"),
        ((0.20, 0.21, 0.19), (0.16, 0.17, 0.15), "refuted"),  # 0.04 s of 0.1 s
        ((0.20, 0.21, 0.19), (0.20, 0.21, 0.19), "refuted"),
        ((0.20, 0.21, 0.19), (0.12, 0.21, 0.08), "undecided"),  # a wide interval
        ((0.11, 0.12, 0.10), (0.10, 0.11, 0.09), "gone"),
    ],
)
def test_the_answer_follows_from_the_interval(
    unchanged_s: tuple[float, ...], changed_s: tuple[float, ...], answer: str
) -> None:
    intervention = Intervention(
        cause="slow_reader", cause_label="slow reader", also_removes=("slow storage",),
        label="data from memory", trial=trial_of(SEQUENTIAL), expected_s=0.1,
    )  # fmt: skip
    found = judge(
        intervention,
        unchanged_s=dict(enumerate(unchanged_s)),
        changed_s=dict(enumerate(changed_s)),
        explained_s=(0.1, 0.2),
    )
    assert found.answer == answer
    assert found.repeats == 3
    assert found.saved_s.mean == pytest.approx((sum(unchanged_s) - sum(changed_s)) / 3)
    assert found.also_removes == ("slow storage",)
