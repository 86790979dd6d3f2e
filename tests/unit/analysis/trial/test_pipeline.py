"""Bubbles and stages are those that were put in; split points are what the strategy said."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.trial.phases import (
    median_pipeline,
    theoretical_bubble,
    trial_pipeline,
)
from paceline.analysis.trial.reading import load_trial
from paceline.analysis.trial.steps import read_steps


def pipeline_of(record, steps=None):
    return trial_pipeline(record, read_steps(record) if steps is None else steps)


def test_the_bubble_is_the_mean_share_of_waiting_over_the_stages(tmp_path: Path) -> None:
    # all steps are longer and shorter alike, so shares stay what they are
    found = pipeline_of(load_trial(fabricate.make_one(tmp_path, fabricate.PIPELINE, jitter=0.2)))
    # each stage's span is 0.105 + 0.21 + 0.05; the second waits 0.01 of it more
    assert found.bubble_measured == pytest.approx((0.05 + 0.06) / 2 / 0.365)
    assert found.bubble_theoretical == pytest.approx(1 / 9)
    assert [s.busy_share for s in found.stages] == pytest.approx([0.315 / 0.365, 0.305 / 0.365])


def test_stages_of_several_replicas_are_told_apart(tmp_path: Path) -> None:
    way = dataclasses.replace(fabricate.HYBRID, stages=3, ranks=6, nodes=2, skew_s=0.02)
    found = pipeline_of(load_trial(fabricate.make_one(tmp_path, way)))
    assert [s.stage for s in found.stages] == [0, 1, 2]
    assert [s.forward_s for s in found.stages] == pytest.approx([0.12, 0.10, 0.08])
    assert [s.backward_s for s in found.stages] == pytest.approx([0.24] * 3)
    assert [s.bubble_s for s in found.stages] == pytest.approx([0.08, 0.10, 0.12])


def test_warm_up_steps_are_left_out(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path, fabricate.PIPELINE))
    # of 10 steady steps, 4 waited long: the median does not show it
    steps = read_steps(record)
    steps["bubble_s"][0, (steps.step < 2) | (steps.step >= 8)] = 9.0
    found = pipeline_of(record, steps)
    assert found.bubble_measured == pytest.approx((0.05 + 0.06) / 2 / 0.365)


def test_cuts_are_named_with_the_bytes_that_cross(tmp_path: Path) -> None:
    way = dataclasses.replace(fabricate.PIPELINE, stages=3, ranks=3, split_points=(4, 7))
    found = pipeline_of(load_trial(fabricate.make_one(tmp_path, way)))
    assert [dataclasses.asdict(c) for c in found.split_points] == [
        {"before": "features.4", "bytes_forward": 6e6, "bytes_backward": 6e6},
        {"before": "features.7", "bytes_forward": 10.5e6, "bytes_backward": 10.5e6},
    ]


def test_without_a_report_of_the_strategy_there_are_no_split_points(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path, fabricate.PIPELINE))
    assert record.result is not None
    silent = dataclasses.replace(record.result, communication={})
    found = pipeline_of(dataclasses.replace(record, result=silent))
    assert found.split_points == ()


def test_a_trial_without_steps_or_without_a_pipeline(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path / "pipeline", fabricate.PIPELINE))
    found = pipeline_of(record, dataclasses.replace(read_steps(record), warmup_steps=99))
    assert found.stages == ()
    assert found.bubble_measured is None
    other = load_trial(fabricate.make_one(tmp_path / "other", fabricate.PROCESSES))
    assert pipeline_of(other) is None


def test_repeats_are_put_together_by_their_median(tmp_path):
    make = partial(fabricate.make_one, way=fabricate.PIPELINE)
    found = [
        pipeline_of(load_trial(make(tmp_path / str(bubble), bubble_s=bubble, skew_s=0.0)))
        for bubble in (0.02, 0.05, 0.5)
    ]
    together = median_pipeline([p for p in found if p is not None])
    assert together.bubble_measured == pytest.approx(0.05 / 0.365)
    assert together.stages[1].bubble_s == pytest.approx(0.05)
    assert median_pipeline([]) is None


@pytest.mark.parametrize(
    ("stages", "micro_batches", "share"), [(2, 1, 0.5), (2, 8, 1 / 9), (4, 4, 3 / 7)]
)
def test_the_theoretical_bubble(stages: int, micro_batches: int, share: float) -> None:
    assert theoretical_bubble(stages, micro_batches) == pytest.approx(share)
