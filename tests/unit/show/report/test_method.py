"""The Method section describes the code: its numbers are read from the text and compared."""

from __future__ import annotations

import dataclasses
import math
import re
from statistics import geometric_mean

import numpy as np
import pytest
from scipy import stats
from tests.unit.analysis import fabricate

from paceline.analysis.compare.row import Row, RowResult
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.model import COMPONENTS, Belief
from paceline.show.report.document import method_section

REPEATS = 4


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    folder = tmp_path_factory.mktemp("method")
    return compare_run(fabricate.make_run(folder / "run", ways, repeats=REPEATS, jitter=0.02))


@pytest.fixture(scope="module")
def told(comparison: Comparison) -> dict[str, str]:
    return {part.title: part.sentences[0] for part in method_section(comparison).parts}


def rates(comparison: Comparison, row: Row) -> list[float]:
    """Return samples/s of each repeat from its steps, the slowest rank's."""
    found = []
    for trial in comparison.trials[row.configuration]:
        late = trial.steps.step >= trial.record.trial.training.warmup_steps
        found.append(float(trial.steps.samples[late].sum() / trial.steps.time_s[late].sum()))
    return found


def number(text: str, pattern: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1])


def test_speeds_are_about_the_means_and_speedups_their_ratios(comparison: Comparison) -> None:
    base, fast = sorted(comparison.rows, key=lambda row: not row.is_baseline)
    means = {row.configuration: geometric_mean(rates(comparison, row)) for row in (base, fast)}
    for row in (base, fast):
        assert row.speed.samples_per_s.estimate == pytest.approx(means[row.configuration], rel=0.02)
    ratio = fast.speed.samples_per_s.estimate / base.speed.samples_per_s.estimate
    assert fast.speed.speedup.estimate == pytest.approx(ratio)
    assert fast.speed.efficiency.estimate == pytest.approx(
        ratio * base.placement.cores / fast.placement.cores
    )


def test_intervals_have_the_confidence_of_the_text(told) -> None:
    confidence = number(told["Interval"], r"contains the speed with a probability of (\d+) %") / 100
    belief = Belief(0.0, (none := np.zeros(COMPONENTS)), np.ones(COMPONENTS), none)
    half = stats.norm.ppf((1 + confidence) / 2)
    assert belief.estimate().high == pytest.approx(half, rel=0.01)
    assert "With one repeat it is not known." in told["Interval"]
    assert Interval(estimate=1.0, low=0.001, high=700.0).is_known
    assert not Interval(estimate=1.0, low=0.0, high=math.inf).is_known


def test_margin_of_a_tie_is_that_of_the_verdict(comparison, told) -> None:
    margin = number(told["Tie"], r"(\d+) % unless") / 100
    assert [verdict.margin for verdict in comparison.verdicts.values()] == [margin]


def test_time_to_a_target_is_explained_where_there_are_evaluations(comparison, told) -> None:
    assert "Time to target" not in told
    result = RowResult(metrics={"accuracy": 0.5})
    rows = tuple(dataclasses.replace(row, result=result) for row in comparison.rows)
    parts = method_section(dataclasses.replace(comparison, rows=rows)).parts
    assert "Time to target" in [part.title for part in parts]
