"""Verdict, table and JSON of made-up runs never contradict each other, whatever the noise."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.row import Row
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.show.report.table import comparison_text
from paceline.show.report.verdict import verdict_sentence
from paceline.show.report.wording import bounds

SEEDS = range(16)


@pytest.fixture(params=SEEDS)
def comparison(request: pytest.FixtureRequest, tmp_path: Path) -> Comparison:
    """Compare a run whose differences are within the noise, far beyond it, or between the two."""
    random = np.random.default_rng(request.param)
    spread = random.choice([0.0, 0.02, 0.3])
    ways = [
        dataclasses.replace(way, forward_s=way.forward_s * float(random.uniform(1, 1 + spread)))
        for way in (fabricate.PROCESSES, fabricate.THREADS, fabricate.INTRAOP, fabricate.MPI)
    ]
    jitter = float(random.choice([0.01, 0.05, 0.5]))
    repeats = int(random.integers(1, 5))
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, *ways], repeats=repeats, jitter=jitter
    )
    for files in run.trials():  # a repeat is missing now and then
        if random.random() < 0.1 and repeats > 2 and ".sequential." not in files[0]:
            files[1].outcome.unlink()
    return compare_run(run)


def rate_of(row: Row) -> float:
    return row.speed.samples_per_s.estimate


def test_speedup_times_the_baseline_is_the_speed_of_the_row(comparison: Comparison) -> None:
    baseline = rate_of(comparison.row(comparison.baselines["tiny"]))
    for row in comparison.rows:
        assert row.speed.speedup.estimate * baseline == pytest.approx(rate_of(row), rel=1e-9)
        assert row.speed.speedup.low <= row.speed.speedup.estimate <= row.speed.speedup.high


def test_order_verdict_and_sentence_agree(comparison: Comparison) -> None:
    (verdict,) = comparison.verdicts.values()
    sentence = verdict_sentence(comparison, "tiny")
    ranked = [row for row in comparison.rows if row.ranked]
    assert [rate_of(row) for row in ranked] == sorted(map(rate_of, ranked), reverse=True)
    if verdict.best is None:
        assert not verdict.has_noise
        assert "No verdict" in sentence
        return
    assert verdict.best == ranked[0].configuration
    assert set(verdict.ties) <= set(verdict.not_separated)
    are_ties = set(verdict.ties) == set(verdict.not_separated)
    assert sentence.startswith("The fastest ") == are_ties
    assert (" within 3 %, led by " in sentence) == (are_ties and verdict.not_separated != ())
    assert sentence.startswith("Undecided which of ") == (not are_ties)
    slower = {row.configuration for row in ranked} - {verdict.best, *verdict.not_separated}
    assert (verdict.runner_up is None) == (not slower)
    if verdict.over_runner_up is not None:
        assert verdict.over_runner_up.low > 1
        assert verdict.over_runner_up.is_known or verdict.over_runner_up.estimate > 1
    best_rate = rate_of(ranked[0])
    for name in verdict.ties:
        assert best_rate / rate_of(comparison.row(name)) < 1 + verdict.margin
    undecided = set(verdict.not_separated) - set(verdict.ties)
    assert (verdict.further_repeats is not None) == bool(undecided)
    if undecided:
        assert re.search(r"more repeats? (is|are) expected|further repeats would", sentence)
        assert ("paceline run --resume RUN_DIR --repeats" in sentence) or "More than" in sentence


def test_only_intervals_of_one_repeat_are_not_shown_as_numbers(comparison: Comparison) -> None:
    narrow, wide = comparison_text(comparison, 80), comparison_text(comparison, 160)
    intervals = [row.speed.speedup for row in comparison.rows if row.speed.speedup is not None]
    unknown = [each for each in intervals if math.isinf(each.high)]
    assert narrow.count("±?") - narrow.count("±? the interval") == len(unknown)
    assert wide.count("(not known)") >= len(unknown)
    for each in intervals:
        if each not in unknown and each.low < each.high:
            assert f"({bounds(each)})" in wide
    assert all(int(width) < 100 for width in re.findall(r"±(\d+)%", narrow))
