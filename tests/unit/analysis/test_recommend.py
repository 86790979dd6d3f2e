"""Recommendations: the goal decides the order, ties are named, the next measurement pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.run import compare_run
from paceline.analysis.predict.link import given_link
from paceline.analysis.predict.predict import predict
from paceline.analysis.predict.prediction import Prediction, Predictions, Request
from paceline.analysis.recommend import Goal, recommend
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import load_run
from paceline.spec.tables import Target


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI]
    return compare_run(fabricate.make_run(tmp_path, ways, repeats=3, jitter=0.005))


def test_the_goal_decides_the_order(comparison: Comparison) -> None:
    time = recommend(comparison, "tiny", "time").measured
    cost = recommend(comparison, "tiny", "cost").measured
    assert time[0].configuration != cost[0].configuration
    rates = {row.configuration: row for row in comparison.rows}
    for found in time:
        row = rates[str(found.configuration)]
        assert found.value.median == pytest.approx(1000 / row.samples_per_s.median)
    for found in cost:
        row = rates[str(found.configuration)]
        assert found.value.median == pytest.approx(1000 * row.cores / row.samples_per_s.median)


def test_memory_is_per_node(comparison: Comparison) -> None:
    memory = recommend(comparison, "tiny", "memory").measured
    assert memory[0].value.median == pytest.approx(1e9 / 2**20)
    assert memory[0].value.low <= memory[0].value.median <= memory[0].value.high


@pytest.mark.parametrize("goal", ["time", "cost"])
def test_a_target_decides_as_in_compare(tmp_path: Path, goal: Goal) -> None:
    # the fastest step, but fewer samples learned with each
    hasty = dataclasses.replace(
        fabricate.MPI, transport="gloo", transfer_s=0.0, learned=1.0, compression={"method": "topk"}
    )
    target = Target(metric="accuracy", at_least=0.6)
    case = fabricate.Case(evaluate_every_steps=2, target=target)
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, hasty], cases=[case], repeats=3, jitter=0.01
    )
    comparison = compare_run(run)
    found = recommend(comparison, "tiny", goal)
    order = [row.configuration for row in comparison.rows if row.ranked]
    if goal == "time":
        assert [each.configuration for each in found.measured] == order
    for each in found.measured:
        row = comparison.row(str(each.configuration))
        seconds = row.time_to_target_s.median * (row.cores if goal == "cost" else 1)
        assert each.value.median == pytest.approx(seconds)
    assert found.unit.endswith("s to accuracy of at least 0.6")
    assert (found.best.configuration == comparison.verdicts["tiny"].best) == (goal == "time")


def test_equal_configurations_are_ties(tmp_path: Path) -> None:
    twin = dataclasses.replace(fabricate.MPI, transport="gloo")
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, twin]
    found = compare_run(fabricate.make_run(tmp_path, ways, repeats=4, jitter=0.08))
    first, second, last = recommend(found, "tiny").measured
    assert first.tied
    assert second.tied
    assert not last.tied


def test_predictions_are_apart_and_can_be_promising(comparison: Comparison, tmp_path: Path) -> None:
    records = load_run(fabricate.make_run(tmp_path / "b", [fabricate.INTRAOP], repeats=2))
    request = Request(
        nodes=(1, 4), link=given_link(1e12, 1e-9), transports=("gloo",), scaling="weak"
    )
    found = recommend(comparison, "tiny", "time", 4, predict(records, request))
    (one,) = found.predicted
    assert one.configuration is None
    assert one.nodes == 4
    assert found.promising == one
    low = found.best.value.low
    overlapping = dataclasses.replace(one, value=Interval(median=0.8 * low, low=0, high=low))
    assert dataclasses.replace(found, predicted=(overlapping,)).promising is None
    assert all(each.configuration is not None for each in found.measured)


def test_another_precision_or_batch_was_not_measured(tmp_path: Path) -> None:
    two = dataclasses.replace(fabricate.MPI, nodes=2)
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, two]
    comparison = compare_run(fabricate.make_run(tmp_path, ways, repeats=2))
    alone = next(r for r in comparison.rows if (r.local_strategy, r.nodes) == ("processes", 1))
    measured = Prediction(
        workload="tiny", setup=f"processes {alone.layout}", transport="mpi", precision="fp32",
        nodes=2, global_batch=8, step_s=Interval(median=0.2, low=0.1, high=0.4),
        samples_per_s=Interval(median=40.0, low=20.0, high=80.0), node_s=0.15, waiting_s=0.0,
        exposed_s=0.05, speedup=None,
    )  # fmt: skip
    changes: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"global_batch": 16}]
    predictions = [dataclasses.replace(measured, **change) for change in changes]
    given = Predictions(
        predictions=tuple(predictions), refusals=(), assumptions=(), fastest_alone={}, unmeasured=()
    )
    found = recommend(comparison, "tiny", "cost", 2, given).predicted
    name = f"processes {alone.layout} over mpi on 2 nodes"
    assert [each.name for each in found] == [f"{name} in bf16", name]
    assert found[0].value.median == pytest.approx(4 * 1000 / 40)  # 4 cores


def test_what_is_not_decided_is_repeated_with_the_baseline(tmp_path: Path) -> None:
    twin = dataclasses.replace(fabricate.MPI, transport="gloo")
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI, twin]
    found = compare_run(fabricate.make_run(tmp_path, ways, repeats=4, jitter=0.05))
    proposal = recommend(found, "tiny").next_measurement
    near = [each.configuration for each in recommend(found, "tiny").measured if each.tied]
    assert proposal.configurations[0] == found.baselines["tiny"]
    assert set(proposal.configurations) == {found.baselines["tiny"], *near}
    assert proposal.further_repeats is not None


def test_a_clear_decision_needs_no_measurement(comparison: Comparison) -> None:
    assert recommend(comparison, "tiny").next_measurement is None
    assert recommend(comparison, "tiny", "cost").next_measurement is None
