"""Table, verdict and explanations of a noisy run never contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run, explain_workload, speed_ranking
from paceline.show.report.verdict import verdict_sentence


@pytest.mark.parametrize("jitter", [0.03, 0.1, 0.3])
def test_causes_follow_the_test_of_the_table_and_of_the_verdict(
    tmp_path: Path, jitter: float
) -> None:
    ways = ("SEQUENTIAL", "INTRAOP", "MPI", "PROCESSES", "MPI_GLOO", "TORCHRUN", "SPARK")
    files = fabricate.make_run(
        tmp_path, [getattr(fabricate, way) for way in ways], repeats=4, jitter=jitter
    )
    comparison = compare_run(files)
    verdict, rates = comparison.verdicts["tiny"], speed_ranking(comparison, "tiny").rates
    found = explain_workload(comparison, "tiny")
    assert len(found) == len(ways) - 1
    for each in found:
        ratio = rates.ratio(each.faster, each.slower)
        assert each.faster == verdict.best
        assert each.is_significant == (each.slower not in verdict.not_separated)
        assert (each.difference_s.low > 0) == (ratio.low > 1)
        assert each.is_significant <= (ratio.low > 1)
        assert bool(each.causes) <= each.is_significant
    for each in (each for each in found if each.slower == verdict.runner_up):
        assert each.is_significant
        if verdict.cause is not None and verdict.cause.label is not None:
            assert verdict.cause.label == each.causes[0].label
            assert verdict.cause.label in verdict_sentence(comparison, "tiny")
