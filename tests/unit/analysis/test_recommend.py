"""Recommendations: the goal decides the order, ties are named, the next measurement pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.run import compare_run
from paceline.analysis.predict.link import given_link
from paceline.analysis.predict.predict import predict
from paceline.analysis.predict.prediction import Prediction, Request
from paceline.analysis.recommend.candidates import Candidate, predicted_candidates
from paceline.analysis.recommend.next_measurement import knowledge_gradient, next_measurement
from paceline.analysis.recommend.recommend import recommend
from paceline.analysis.statistics.series import Interval
from paceline.analysis.trial.reading import load_run

DEVIATION = 1.959964  # of a normal variable, half the width of a 95 % interval


def candidate(name: str, value: float, deviation: float) -> Candidate:
    factor = np.exp(DEVIATION * deviation)
    bounds = Interval(median=value, low=value / factor, high=value * factor)
    return Candidate(
        name=name, configuration=name, nodes=1, value=bounds, confidence=0.95, reason=""
    )


@pytest.fixture
def comparison(fabricate: ModuleType, tmp_path: Path) -> Comparison:
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


def test_equal_configurations_are_ties(fabricate: ModuleType, tmp_path: Path) -> None:
    twin = dataclasses.replace(fabricate.MPI, transport="gloo")
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, twin]
    found = compare_run(fabricate.make_run(tmp_path, ways, repeats=4, jitter=0.08))
    first, second, last = recommend(found, "tiny").measured
    assert first.tied
    assert second.tied
    assert not last.tied


def test_predictions_are_apart_and_can_be_promising(
    comparison: Comparison, fabricate: ModuleType, tmp_path: Path
) -> None:
    records = load_run(fabricate.make_run(tmp_path / "b", [fabricate.INTRAOP], repeats=2))
    request = Request(
        nodes=(1, 4), link=given_link(1e12, 1e-9), transports=("gloo",), scaling="weak"
    )
    found = recommend(comparison, "tiny", "time", 4, predict(records, request))
    (one,) = found.predicted
    assert one.configuration is None
    assert one.nodes == 4
    assert found.promising == one
    assert all(each.configuration is not None for each in found.measured)


def test_another_precision_or_batch_was_not_measured(fabricate: ModuleType, tmp_path: Path) -> None:
    two = dataclasses.replace(fabricate.MPI, nodes=2)
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, two]
    comparison = compare_run(fabricate.make_run(tmp_path, ways))
    alone = next(r for r in comparison.rows if (r.local_strategy, r.nodes) == ("processes", 1))
    measured = Prediction(
        workload="tiny", setup=f"processes {alone.layout}", transport="mpi", precision="fp32",
        nodes=2, global_batch=8, step_s=Interval(median=0.2, low=0.1, high=0.4),
        samples_per_s=Interval(median=40.0, low=20.0, high=80.0), node_s=0.15, waiting_s=0.0,
        exposed_s=0.05, start_s={},
    )  # fmt: skip
    changes: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"global_batch": 16}]
    predictions = [dataclasses.replace(measured, **change) for change in changes]
    found = predicted_candidates(predictions, comparison, "tiny", "cost", 2)
    name = f"processes {alone.layout} over mpi on 2 nodes"
    assert [each.name for each in found] == [f"{name} in bf16", name]
    assert found[0].value.median == pytest.approx(4 * 1000 / 40)  # 4 cores


def test_the_knowledge_gradient_by_hand() -> None:
    # two equal means: the gain is the deviation of the move times the density at 0
    gains = knowledge_gradient(np.zeros(2), np.array([0.3, 0.0]))
    assert gains.tolist() == pytest.approx([0.3 * 0.3989423, 0.0])


def test_the_gain_is_the_reduction_of_the_expected_loss() -> None:
    random = np.random.default_rng(1)
    means, deviations, noise = np.array([0.0, 0.02, 0.1]), np.array([0.03, 0.05, 0.02]), 0.02
    truth = means + deviations * random.standard_normal((100_000, 3))
    chosen_now = truth[:, 0]
    seen = truth[:, 1] + noise * random.standard_normal(len(truth))
    weight = deviations[1] ** 2 / (deviations[1] ** 2 + noise**2)
    after = means[1] + weight * (seen - means[1])
    chosen_then = np.where(after < means[0], truth[:, 1], truth[:, 0])
    gain = knowledge_gradient(means, np.sqrt(weight) * deviations)[1]
    assert chosen_now.mean() - chosen_then.mean() == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5])
def test_another_repeat_gains_what_it_does_for_a_median(repeats: int) -> None:
    """Two configurations, equal as far as was measured: simulated from the truth on.

    From an even number of repeats to an odd one, the median moves more than its error shrinks. Then
    the true gain is larger.
    """
    noise = np.random.default_rng(2).standard_normal((repeats + 1, 100_000))
    error = np.median(noise[:repeats], axis=0)
    after = np.median(noise, axis=0) - error  # before, the median was 0, and the truth is -error
    rivals = [candidate("known", 1.0, 0.0), candidate("measured", 1.0, 0.1 * error.std())]
    found = next_measurement([rivals[0], with_repeats(rivals[1], repeats)], noise=9.9)
    assert found is not None
    gained = -0.1 * np.where(after < 0, -error, 0).mean()
    assert gained > 0.95 * found.gain
    if repeats % 2:
        assert gained < 1.05 * found.gain


def with_repeats(one: Candidate, repeats: int) -> Candidate:
    return dataclasses.replace(one, repeats=repeats)


def test_the_uncertain_rival_is_measured_next() -> None:
    rivals = [
        candidate("best", 1.0, 0.005), candidate("unsure", 1.02, 0.05), candidate("far", 2.0, 0.05)
    ]  # fmt: skip
    found = next_measurement(rivals, noise=0.01)
    assert found is not None
    assert found.name == "unsure"
    assert 0 < found.gain <= found.loss_now
    assert found.chance == pytest.approx(0.35, abs=0.02)  # P(N(0.0198, 0.0502) < 0)


def test_a_clear_decision_needs_no_measurement() -> None:
    assert next_measurement([candidate("a", 1.0, 0.01), candidate("b", 1.5, 0.01)], 0.01) is None
    assert next_measurement([candidate("alone", 1.0, 0.5)], 0.01) is None
